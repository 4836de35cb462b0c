"""States of absent clients: in memory, in a file, and in a file that checkpoints refer to."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from factories import digits, federation, same, seeded
from pfedlms.engine import Federation, participation

ROUNDS = 8


def network() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 10))


def federate(method: str, folder: Path | None = None) -> Federation:
    made = federation(method, digits(20), seeded(network), participation=0.3, momentum=0.5, local_steps=2)
    if folder is not None:
        made.keep_in(folder)
    return made


def play(federation: Federation, rounds: int) -> None:
    federation.start()
    for _ in range(rounds):
        federation.play_round()


def everybody(federation: Federation) -> dict[int, Any]:
    return dict(federation.models())


@pytest.mark.parametrize("method", ["pfedlms", "sketchvote"])
def test_a_file_holds_the_bits_that_memory_holds(method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a folder, in a file without a name, and after a process that ended long after its last checkpoint."""
    expected = federate(method)
    play(expected, ROUNDS)
    monkeypatch.setattr(participation, "LARGEST", 0)
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
    monkeypatch.setattr(participation, "LARGEST", 0)
    run = federate("pfedlms", tmp_path)
    play(run, 1)
    sizes = []
    for _ in range(2):
        play(run, 3)
        torch.save(run.state(), tmp_path / "checkpoint.pt")
        sizes.append((tmp_path / "checkpoint.pt").stat().st_size)
    assert len(run.state()["away"]["places"]) == 20
    assert sizes[1] <= sizes[0] + 1024


def test_checkpoints_of_earlier_versions_keep_each_client_separately() -> None:
    run = federate("pfedlms")
    play(run, 3)
    state = run.state()
    away = state["away"]

    def row(value: Any, place: int) -> Any:
        return {k: row(v, place) for k, v in value.items()} if isinstance(value, dict) else value[place : place + 1]

    each = {
        client: {name: row(away[name], place) for name in participation.KEPT}
        for place, client in enumerate(away["ids"].tolist())
    }
    other = federate("pfedlms")
    other.load({**state, "away": each})
    assert same(everybody(other), everybody(run))
