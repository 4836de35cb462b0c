"""Small runs through the code for GPUs, against the CPU and against steps that are not recorded. They take seconds also
on the pretended GPU of `pretend_gpu.py`, so that machines without a GPU run them, too."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import pfedlms
from pfedlms.engine import client as engine_client
from pfedlms.methods import METHODS

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU, or -p pretend_gpu")

SMALL: dict[str, Any] = {
    "rounds": 2, "clients": 3, "local_steps": 3, "batch_size": 4, "seed": 3, "partition": "iid", "learning_rate": 0.05,
}  # fmt: skip


def dense() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 3), nn.ReLU(), nn.Linear(3, 10))


def convolutions() -> nn.Module:
    """A block whose kernels are fused, one with an own bias, and group norm."""
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(4, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 10),
    )  # fmt: skip


class Attention(nn.Module):
    """Rows of an image as tokens, with layer norm; more than a chain of layers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(8), nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.mix(self.norm(x.squeeze(1))).mean(dim=1))
        return out


def few_samples() -> tuple[np.ndarray, np.ndarray]:
    x, y = pfedlms.load_dataset("digits")
    return x[:120], y[:120]


def check_against_cpu(
    model: Any, monkeypatch: pytest.MonkeyPatch, rtol: float = 1e-3, equal: bool = True, **settings: Any
) -> None:
    """The GPU's losses and bytes are the CPU's; recorded steps have the bits of steps that are not recorded, `equal`
    unless cohorts are padded for a recording."""
    given, data = {**SMALL, **settings}, few_samples()
    cpu = pfedlms.run(data, model, device="cpu", **given)
    recorded = pfedlms.run(data, model, device="cuda", **given)
    monkeypatch.setattr(engine_client, "Replayed", lambda largest: None)
    plain = pfedlms.run(data, model, device="cuda", **given)
    for field in ("loss", "test_loss"):
        losses = [[record[field] for record in run.metrics] for run in (cpu, recorded, plain)]
        np.testing.assert_allclose(losses[1], losses[0], rtol=rtol)
        np.testing.assert_allclose(losses[1], losses[2], rtol=0 if equal else 1e-4)
    assert [record["bytes"] for record in recorded.metrics] == [record["bytes"] for record in cpu.metrics]
    models = [run.federation.state()["params"] for run in (plain, recorded)]
    torch.testing.assert_close(*models, rtol=0, atol=0 if equal else 1e-4)


@pytest.mark.parametrize("method", METHODS)
def test_every_method(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check_against_cpu(dense, monkeypatch, method=method)


@pytest.mark.parametrize("method", ["obcsaa", "zsign"])
def test_answers_that_both_ends_decode(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They have the same bits, or a run would end. With equal weights many entries tie."""
    check_against_cpu(dense, monkeypatch, method=method, downlink="sum", weights="uniform")


@pytest.mark.parametrize("method", ["pfedlms", "sketchvote", "scaffold", "stc"])
def test_sampled_clients_and_lost_messages(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"clients": 8, "participation": 0.75, "lost": 0.2, "quorum": 0.1, "rounds": 4}
    check_against_cpu(dense, monkeypatch, method=method, equal=False, **settings)


@pytest.mark.parametrize(
    "settings",
    [
        {"optimizer": "adamw", "learning_rate": 0.01, "schedule": "cosine", "clip": 1.0},
        {"local_epochs": 1, "batch_size": 16},
        {"momentum": 0.9, "augment": "flip"},
        {"cohort_size": 2},
    ],
    ids=["adamw", "epochs", "augment", "cohorts"],
)
def test_settings_of_training(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    check_against_cpu(dense, monkeypatch, method="pfedlms", **settings)


@pytest.mark.parametrize("model", [convolutions, Attention], ids=["convolutions", "attention"])
def test_models(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    check_against_cpu(model, monkeypatch, rtol=2e-2, method="fedavg")  # convolutions in TF32
