"""States of absent clients: in memory, in a file, and in a file that checkpoints refer to."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pfedlms.data import Partitioning, from_pool, load_dataset
from pfedlms.engine import Federation, absent
from pfedlms.engine.training import TrainSettings
from pfedlms.methods import METHODS
from pfedlms.models import CohortModel

DATA = from_pool(*load_dataset("digits"), Partitioning(20, 0.5, seed=0))
ROUNDS = 8


def federate(method: str, folder: Path | None = None) -> Federation:
    torch.manual_seed(1)
    module = nn.Sequential(nn.Flatten(), nn.Linear(64, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 10))
    train = TrainSettings(2, 16, 0.1, 0.5, 0.0, participation=0.3)
    model = CohortModel(module, torch.device("cpu"))
    made = Federation(METHODS[method], METHODS[method].Settings(), model, DATA, train, 5)
    if folder is not None:
        made.keep_in(folder)
    return made


def play(federation: Federation, rounds: int) -> None:
    federation.start()
    for _ in range(rounds):
        federation.play_round()


def everybody(federation: Federation) -> list[dict[str, Any]]:
    return [model for _, model in sorted(federation.models(), key=lambda each: each[0])]


def same(one: list[dict[str, Any]], other: list[dict[str, Any]]) -> bool:
    return all(torch.equal(mine[key], yours[key]) for mine, yours in zip(one, other, strict=True) for key in mine)


@pytest.mark.parametrize("method", ["pfedlms", "sketchvote"])
def test_a_file_holds_the_bits_that_memory_holds(method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a folder, in a file without a name, and after a process that ended long after its last checkpoint."""
    expected = federate(method)
    play(expected, ROUNDS)
    monkeypatch.setattr(absent, "LARGEST", 0)
    nameless = federate(method)
    play(nameless, ROUNDS)
    assert same(everybody(nameless), everybody(expected))

    first = federate(method, tmp_path)
    play(first, 2)
    first.state()
    play(first, 1)
    saved = copy.deepcopy(first.state())
    play(first, 2)
    first.state()  # of a checkpoint whose writing fails
    play(first, 3)  # clients come and go, and their rows are written again
    second = federate(method, tmp_path)
    second.load(saved)
    play(second, ROUNDS - 3)
    assert same(everybody(second), everybody(expected))


def test_a_checkpoint_does_not_grow_with_the_clients_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(absent, "LARGEST", 0)
    federation = federate("pfedlms", tmp_path)
    play(federation, 1)
    sizes = []
    for _ in range(2):
        play(federation, 3)
        torch.save(federation.state(), tmp_path / "checkpoint.pt")
        sizes.append((tmp_path / "checkpoint.pt").stat().st_size)
    assert len(federation.state()["away"]["places"]) == 20
    assert sizes[1] <= sizes[0] + 1024


def test_checkpoints_of_earlier_versions_keep_each_client_separately() -> None:
    federation = federate("pfedlms")
    play(federation, 3)
    state = federation.state()
    away = state["away"]

    def row(value: Any, place: int) -> Any:
        return {k: row(v, place) for k, v in value.items()} if isinstance(value, dict) else value[place : place + 1]

    each = {
        client: {name: row(away[name], place) for name in absent.KEPT}
        for place, client in enumerate(away["ids"].tolist())
    }
    other = federate("pfedlms")
    other.load({**state, "away": each})
    assert same(everybody(other), everybody(federation))
