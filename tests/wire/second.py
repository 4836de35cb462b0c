"""Shared by tests of the second implementation: the page, the vectors, and one small federation for all methods."""

from __future__ import annotations

import json
import struct
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import make_vectors
import plain_client as plain
import pytest
import torch
from plain_client.sketchmean import MeanRun
from torch import Tensor, nn

from factories import seeded, small_data
from pfedlms.engine import Federation
from pfedlms.methods import METHODS
from pfedlms.models import CohortModel
from pfedlms.train_settings import TrainSettings

HERE = Path(__file__).parent
PAGE = (HERE.parents[1] / "docs" / "protocol.md").read_text(encoding="utf-8")
VECTORS = json.loads((HERE / "vectors.json").read_text(encoding="ascii"))
CLIENTS, SEED = 4, 99
RUNS = {"pfedlms": plain.Run, "sketchvote": plain.VoteRun, "sketchmean": MeanRun}


# --- numbers as `vectors.json` writes them: the hex digits of their bits, most significant first ---


def f32(bits: str) -> float:
    return struct.unpack(">f", bytes.fromhex(bits))[0]


def f32s(values: Iterable[str]) -> list[float]:
    return [f32(bits) for bits in values]


def bits32(values: Iterable[float]) -> list[str]:
    return [struct.pack(">f", value).hex() for value in values]


def f64(bits: str) -> float:
    return struct.unpack(">d", bytes.fromhex(bits))[0]


def signs(text: str) -> list[float]:
    return [1.0 if sign == "+" else -1.0 for sign in text]


# --- runs ---


def recorded_run(method: str, known: dict[str, Any], **more: Any) -> Any:
    """The run of an entry of the vectors, as the second implementation represents it."""
    settings = make_vectors.as_settings(known["settings"]) | more
    layers = [tuple(pair) for pair in known["layers"]]
    return RUNS[method](layers, known["classes"], int(known["seed"], 16), f32s(known["initial"]), **settings)


def run_of(federation: Federation) -> Any:
    """The run of a federation, as the second implementation represents it."""
    layers = [(layer.offset, layer.size) for layer in federation.model.layout.layers]
    chosen = vars(federation.method.settings).items()
    settings = {key: own for key, own in chosen if not key.startswith("server_") and key != "absolute"}
    known = layers, federation.data.classes, SEED, federation.model.initial.tolist()
    return RUNS[federation.method.name](*known, **settings)


def federate(
    method: str, chosen: dict[str, Any], schedule: Any = None, device: torch.device | str = "cpu", **options: Any
) -> Federation:
    """Four clients and three layers, the second of which has few parameters; some weights are −0."""
    layers = lambda: nn.Sequential(nn.Linear(4, 12), nn.Linear(12, 1, bias=False), nn.Linear(1, 4))  # noqa: E731
    module = seeded(layers, 3)
    module[0].weight.data[:6] = -0.0
    train = TrainSettings(local_steps=3, batch_size=4, learning_rate=0.1, momentum=0.5, weight_decay=1e-4)
    model = CohortModel(module, torch.device(device))
    data = small_data(7, 10, 13, 16).to(model.device)
    settings = METHODS[method].Settings(**chosen)
    federation = Federation(METHODS[method], settings, model, data, train, seed=SEED, **options)
    if schedule is not None:
        federation._terms.participation = schedule
    return federation


def last_trained(federation: Federation) -> dict[int, dict[str, Tensor]]:
    """θ and the state of every client that trained last."""
    state = federation.state()
    values = {"params": state["params"], **state["state"]}
    return {k: {name: value[row].cpu() for name, value in values.items()} for row, k in enumerate(state["trained"])}


class Schedule:
    """All clients take part but those of `absent`, in the phases named there."""

    count = CLIENTS

    def __init__(self, absent: dict[int, Collection[int]]) -> None:
        self.absent = absent

    def of(self, phase: int) -> tuple[int, ...]:
        return tuple(k for k in range(CLIENTS) if phase not in self.absent.get(k, ()))


devices = pytest.mark.parametrize(
    "device",
    ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))],
)
