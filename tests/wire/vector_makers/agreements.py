"""Section 9 of the page: what both ends know, its text and its digest."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

import numpy as np
import torch

from pfedlms.engine.federation import agreement
from pfedlms.methods import METHODS, Task
from pfedlms.models.layout import Layer, Layout
from vector_makers.notation import SAMPLES, bits32, bits64, word


def task(layers: Iterable[int], seed: int, initial: np.ndarray) -> Task:
    table, offset = [], 0
    for index, size in enumerate(layers):
        table.append(Layer(f"layer{index}", offset, size))
        offset += size
    return Task(
        layout=Layout((), tuple(table)),
        classes=2,
        feature_size=0,
        seed=seed,
        initial=torch.from_numpy(initial),
        clients=len(SAMPLES),
        participants=len(SAMPLES),
        learning_rate=0.1,
        weight_decay=0.0,
    )


def digest_text(method: str, settings: Any, known: Task) -> str:
    """The text of §9, written out by hand here; `digest_vectors` asserts that its hash is the package's digest."""
    lines = {
        "classes": str(known.classes),
        "initial": hashlib.sha256(known.initial.numpy().astype("<f4").tobytes()).hexdigest(),
        "layers": ",".join(f"{layer.offset}:{layer.size}" for layer in known.layout.layers),
        "method": method,
        "protocol": "1",
        "seed": str(known.seed),
    }
    if method == "sketchvote":
        lines["agreement.rows"] = ",".join(map(str, known.layout.sketch_sizes(settings.ratio, settings.allocation)))
    for name, value in asdict(settings).items():
        written = value if isinstance(value, str) else str(int(value))
        lines[f"method.{name}"] = bits64(value) if isinstance(value, float) else written
    return "".join(f"{key}={lines[key]}\n" for key in sorted(lines))


def agreed(method: str, settings: Any, known: Task) -> dict[str, Any]:
    text = digest_text(method, settings, known)
    digest = agreement(METHODS[method](known, settings))
    assert digest == hashlib.sha256(text.encode()).digest()[:8], text
    return {
        "method": method,
        "classes": known.classes,
        "seed": word(known.seed),
        "layers": [[layer.offset, layer.size] for layer in known.layout.layers],
        "initial": bits32(known.initial.numpy()),
        "settings": {k: bits64(v) if isinstance(v, float) else v for k, v in asdict(settings).items()},
        "text": text,
        "sha256": hashlib.sha256(text.encode()).hexdigest(),
        "digest": digest.hex(),
    }


def as_settings(stored: dict[str, Any]) -> dict[str, Any]:
    texts = {name for name, field in METHODS["pfedlms"].Settings.__dataclass_fields__.items() if field.type == "str"}
    return {
        name: struct.unpack(">d", bytes.fromhex(value))[0] if isinstance(value, str) and name not in texts else value
        for name, value in stored.items()
    }
