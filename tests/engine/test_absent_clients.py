"""States of absent clients: in memory, in a file, and in a file that checkpoints name."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from factories import digits, federation, played, same, seeded
from pfedlms.cohort import Cohort
from pfedlms.engine import Federation, participation
from pfedlms.errors import RunDirectoryError

ROUNDS = 8


def network() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 10))


def federate(method: str, folder: Path | None = None) -> Federation:
    run = federation(method, digits(20), seeded(network), participation=0.3, momentum=0.5, local_steps=2)
    if folder is not None:
        run.use_folder(folder)
    return run


def models_of(run: Federation) -> dict[int, Any]:
    return dict(run.models())


@pytest.mark.parametrize("method", ["pfedlms", "sketchvote"])
def test_a_file_holds_the_bits_that_memory_holds(method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file in a folder, a file without a name, and one that was written again after the last checkpoint."""
    expected = played(federate(method), ROUNDS)
    monkeypatch.setattr(participation, "MAX_MEMORY_BYTES", 0)
    unnamed = played(federate(method), ROUNDS)
    assert same(models_of(unnamed), models_of(expected))

    first = played(federate(method, tmp_path), 2)
    first.state()
    saved = copy.deepcopy(played(first, 1).state())
    played(first, 2).state()  # a checkpoint that is not written
    played(first, 3)  # other clients take part, and rows are written again
    second = federate(method, tmp_path)
    second.load(saved)
    assert same(models_of(played(second, ROUNDS - 3)), models_of(expected))


def test_stored_states_have_a_fixed_order() -> None:
    """Files of earlier runs have it; they contain no names."""
    assert list(played(federate("sketchvote"), 1).state()["away"]["state"]) == ["model", "checked", "residual"]


def test_a_method_may_return_its_state_in_another_order(tmp_path: Path) -> None:
    three = torch.arange(3.0).reshape(3, 1)
    kept = Cohort((0, 1, 2), (1, 1, 1), three, three[:, :0], {}, {"a": three + 10, "b": three + 20})
    file = participation._InFile(kept.take([0]), tmp_path)
    file.write(np.arange(3), replace(kept, state={"b": kept.state["b"], "a": kept.state["a"]}))
    assert file.read(np.array([2])).state == {"a": torch.tensor([[12.0]]), "b": torch.tensor([[22.0]])}


def test_a_checkpoint_does_not_grow_with_the_participants(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(participation, "MAX_MEMORY_BYTES", 0)
    run, sizes = played(federate("pfedlms", tmp_path), 1), []
    for _ in range(2):
        torch.save(played(run, 3).state(), tmp_path / "checkpoint.pt")
        sizes.append((tmp_path / "checkpoint.pt").stat().st_size)
    assert len(run.state()["away"]["places"]) == 20
    assert sizes[1] <= sizes[0] + 1024


def test_checkpoints_of_earlier_versions_are_refused() -> None:
    """They stored answers only, or a dict of the answers that clients know."""
    state = played(federate("sketchvote"), 3).state()
    older: dict[str, Any] = {"answers": {}, "heard": {0: 1}}
    for name, value in older.items():
        with pytest.raises(RunDirectoryError, match="written by an earlier version of pfedlms"):
            federate("sketchvote").load({**state, name: value})
