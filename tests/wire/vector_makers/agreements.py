"""Section 9 of the page: what server and clients agree on, its text and its digest."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import torch

from pfedlms.engine.terms import method_digest
from pfedlms.methods import METHODS, Task
from pfedlms.models.layout import Layer, Layout
from pfedlms.train_settings import TrainSettings
from vector_makers.notation import SAMPLES, bits32, bits64, floats, word


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


def digest_text(method: str, settings: Any, run_task: Task) -> str:
    """The text of §9, written without the package; `agreement` asserts that its hash is the package's digest."""
    lines = {
        "classes": str(run_task.classes),
        "initial": hashlib.sha256(run_task.initial.numpy().astype("<f4").tobytes()).hexdigest(),
        "layers": ",".join(f"{layer.offset}:{layer.size}" for layer in run_task.layout.layers),
        "method": method,
        "protocol": "1",
        "seed": str(run_task.seed),
    }
    if method == "sketchmean":
        lines["agreement.learning_rate"] = bits64(run_task.learning_rate)
    if method in ("sketchvote", "sketchmean"):
        lines["agreement.rows"] = ",".join(map(str, run_task.layout.sketch_sizes(settings.ratio, settings.allocation)))
    if method == "zsign":
        lines |= {
            "agreement.clients": str(run_task.participants),
            "agreement.learning_rate": bits64(run_task.learning_rate),
        }
        rates = run_task.schedule
        if (rates.shape, rates.warmup) != ("constant", 0):
            lines |= {f"agreement.{name}": str(getattr(rates, name)) for name in ("shape", "warmup", "rounds")}
            lines |= {"agreement.decay": bits64(rates.decay), "agreement.decay_every": str(rates.decay_every)}
    for name, value in agreed_settings(settings).items():
        written = value if isinstance(value, str) else str(int(value))
        lines[f"method.{name}"] = bits64(value) if isinstance(value, float) else written
    return "".join(f"{key}={lines[key]}\n" for key in sorted(lines))


def agreed_settings(settings: Any) -> dict[str, Any]:
    """Settings in the digest: not those that only the server uses, nor optional ones at their default."""
    server_only = {"server_optimizer", "server_decay", "server_epsilon", "pooling"}
    if type(settings).__name__ != "FedAvgSettings":
        server_only |= {"server_momentum"} | ({"gain"} if hasattr(settings, "server_momentum") else set())
    optional = {"absolute": False, "decoder": "averages"}
    given = {name: value for name, value in asdict(settings).items() if name not in server_only}
    return {name: value for name, value in given.items() if name not in optional or value != optional[name]}


def agreement(method: str, settings: Any, run_task: Task) -> dict[str, Any]:
    text = digest_text(method, settings, run_task)
    digest = method_digest(METHODS[method](run_task, settings))
    assert digest == hashlib.sha256(text.encode()).digest()[:8], text
    return {
        "method": method,
        "classes": run_task.classes,
        "seed": word(run_task.seed),
        "layers": [[layer.offset, layer.size] for layer in run_task.layout.layers],
        "initial": bits32(run_task.initial.numpy()),
        "settings": {k: bits64(v) if isinstance(v, float) else v for k, v in agreed_settings(settings).items()},
        "text": text,
        "sha256": hashlib.sha256(text.encode()).hexdigest(),
        "digest": digest.hex(),
    }


def agreements() -> list[dict[str, Any]]:
    """Methods that add `agreement.*`, and the facts of their runs; the text has only the settings that a shape uses."""
    run_task = task([18, 8], 17, floats(26, 15))
    voting = METHODS["sketchvote"].Settings(ratio=0.3, allocation=0.7)
    entries = [agreement("sketchvote", voting, run_task)]
    for schedule, warmup in (("constant", 0), ("constant", 4), ("cosine", 0), ("cosine", 2), ("step", 0), ("step", 3)):
        train = TrainSettings(
            local_steps=1, batch_size=1, learning_rate=0.05, weight_decay=0.0, schedule=schedule,
            warmup=warmup, rounds=30, floor=0.0, decay=0.5, decay_every=10,
        )  # fmt: skip
        settings = METHODS["zsign"].Settings(downlink="sum" if warmup else "model")
        own = replace(run_task, participants=2, learning_rate=train.learning_rate, schedule=train.rates)
        facts = {name: getattr(train, name) for name in ("schedule", "warmup", "rounds", "decay_every")}
        facts |= {"participants": 2, "learning_rate": bits64(train.learning_rate), "decay": bits64(train.decay)}
        entries.append({**agreement("zsign", settings, own), "facts": facts})
    return entries


TEXTS = {"schedule"} | {
    name for method in METHODS.values() for name, field in method.Settings.__dataclass_fields__.items()
    if field.type == "str"
}  # fmt: skip


def as_settings(stored: dict[str, Any]) -> dict[str, Any]:
    return {
        name: struct.unpack(">d", bytes.fromhex(value))[0] if isinstance(value, str) and name not in TEXTS else value
        for name, value in stored.items()
    }
