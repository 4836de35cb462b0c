"""Shared by the tests of runs and studies: small settings, models, losses and data, and callbacks that end a run."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import pfedlms
from factories import same, tensors

SMALL: dict[str, Any] = {
    "rounds": 3, "clients": 4, "hidden": 12, "local_steps": 2, "batch_size": 8, "threads": 1, "progress": False
}  # fmt: skip
OPTIONS = [
    "--rounds", "3", "--clients", "4", "--local-steps", "2", "--batch-size", "8", "--set", "model.hidden=12", "--set",
    "run.threads=1",
]  # fmt: skip

X = np.random.default_rng(0).normal(size=(80, 4)).astype(np.float32)
Y = np.arange(80) % 2
QUICK: dict[str, Any] = {"rounds": 2, "local_steps": 1, "batch_size": 8, "threads": 1, "progress": False}
"""Settings for X, Y and `linear`; the number of clients is added."""


def linear() -> nn.Module:
    return nn.Linear(4, 2)


def squared_error(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).square().mean(dim=-1)


def half_accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs.argmax(1) == targets).float() / 2


def same_models(ours: Iterable[Mapping[str, Any]], theirs: Iterable[Mapping[str, Any]]) -> bool:
    """Whether the models of all clients are equal, bit by bit."""
    return all(same(dict(own), dict(other)) for own, other in zip(ours, theirs, strict=True))


def without_timings(records: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Metrics or summaries without the values that depend on time and place."""
    omitted = ("seconds", "name", "directory", "environment")
    return [{key: value for key, value in record.items() if key not in omitted} for record in records]


def stored_metrics(folder: Path) -> list[dict[str, Any]]:
    return without_timings(json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines())


def assert_same_run(got: Path, expected: Path) -> None:
    """Metrics, summary and every tensor of the last checkpoint are equal; only timings may differ."""
    assert stored_metrics(got) == stored_metrics(expected)
    summaries = [json.loads((folder / "summary.json").read_text()) for folder in (got, expected)]
    assert without_timings(summaries[:1]) == without_timings(summaries[1:])
    states = [torch.load(folder / "checkpoint.pt", weights_only=True) for folder in (got, expected)]
    assert states[0]["traffic"] == states[1]["traffic"]
    assert states[0]["federation"]["rounds_played"] == states[1]["federation"]["rounds_played"]
    assert same(*map(tensors, states))


def edit_config(folder: Path, old: str, new: str) -> None:
    """Replace a setting in the config.toml of a run."""
    file = folder / "config.toml"
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))


def batch_norm() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 10))


class Wrapped(nn.Module):
    """Applies `wrap` to the outputs of a module that takes samples of type `kind`."""

    def __init__(self, module: nn.Module, wrap: Callable[[Tensor], Any], kind: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.module, self.wrap, self.kind = module, wrap, kind

    def forward(self, x: Tensor) -> Any:
        return self.wrap(self.module(x.to(self.kind)))


def network() -> nn.Module:
    """The same model as `dnn` for digits with 12 hidden units."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 12), nn.ReLU(), nn.Linear(12, 10))


def accuracy_of_models(
    models: Sequence[Any], data: pfedlms.data.FederatedData, held: Any, clients: Iterable[int]
) -> float:
    """Accuracy of some clients' models on the samples that each client holds, in percent, by plain PyTorch."""
    correct = total = 0
    for client in clients:
        module = network()
        module.load_state_dict(models[client])
        with torch.no_grad():
            correct += int((module(data.x[held[client]]).argmax(dim=1) == data.y[held[client]]).sum())
        total += len(held[client])
    return 100 * correct / total


class Crash(Exception):
    pass


class RecordEnds(pfedlms.Callback):
    """Records status and rounds of every run that ends."""

    def __init__(self) -> None:
        self.ends: list[tuple[str, int]] = []

    def on_end(self, run: pfedlms.RunInfo, summary: Mapping[str, Any]) -> None:
        self.ends.append((summary["status"], summary["rounds"]))


class CrashAt(RecordEnds):
    """Raises `Crash` in the callback methods named in `where` in one round; of one method only if it is given."""

    def __init__(self, at: int, method: str | None = None, where: Sequence[str] = ("on_evaluation",)) -> None:
        super().__init__()
        self._at, self._method, self._where = at, method, where

    def _call(self, name: str, run: pfedlms.RunInfo) -> None:
        if name in self._where and run.round == self._at and self._method in (None, run.config.method):
            raise Crash(name)

    def on_round(self, run: pfedlms.RunInfo, record: Mapping[str, Any]) -> None:
        self._call("on_round", run)

    def on_evaluation(self, run: pfedlms.RunInfo, record: Mapping[str, Any]) -> None:
        self._call("on_evaluation", run)

    def on_step(self, run: pfedlms.RunInfo) -> None:
        self._call("on_step", run)

    def on_end(self, run: pfedlms.RunInfo, summary: Mapping[str, Any]) -> None:
        super().on_end(run, summary)
        self._call("on_end", run)


class SendSignal(RecordEnds):
    """Sends a signal `times` times in one round; only in the run of one seed or name if it is given."""

    def __init__(self, at: int, times: int = 1, number: int = signal.SIGINT, of: int | str | None = None) -> None:
        super().__init__()
        self._at, self._times, self._number, self._of = at, times, number, of

    def on_round(self, run: pfedlms.RunInfo, record: Mapping[str, Any]) -> None:
        if record["round"] == self._at and self._of in (None, run.name, run.config.run.seed):
            for _ in range(self._times):
                signal.raise_signal(self._number)
