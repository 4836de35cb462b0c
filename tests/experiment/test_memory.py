"""Cohorts split by the memory at hand; results do not depend on the split."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import pfedlms
from factories import DIM, federation
from pfedlms.data import Partitioning, from_pool, load_dataset
from pfedlms.engine.participation import Participation
from pfedlms.engine.terms import task_of
from pfedlms.engine.training import TrainSettings
from pfedlms.experiment import memory
from pfedlms.experiment.schema import TrainSection
from pfedlms.methods import METHODS
from pfedlms.methods.contract import Method
from pfedlms.models import CohortModel, build


@pytest.fixture
def model() -> CohortModel:
    return CohortModel(build("dnn", (1, 8, 8), 10, 32, 0), torch.device("cpu"))


def digits(clients: int) -> pfedlms.data.FederatedData:
    return from_pool(*load_dataset("digits"), Partitioning(clients, 1.0, 0))


def made(name: str, model: CohortModel, **settings: object) -> Method:
    """Of five clients two take part."""
    task = task_of(model, 10, Participation(5, 0.4, 0), TrainSettings(1, 1, 0.1, 0.0, 0.0), seed=0)
    return METHODS[name](task, METHODS[name].Settings(**settings))


def kept(name: str, model: CohortModel, momentum: bool = False, **settings: object) -> tuple[int, int]:
    return memory.kept_bytes(made(name, model, **settings), model, momentum)


def test_a_client_keeps_what_it_will_need(model: CohortModel) -> None:
    """2,410 parameters of four bytes. Here: θ, with momentum twice, w where it is tracked or compared with, and a
    residual where there is one. Away: θ where it is its own, w where both ends track it, the residual, and nothing
    where the next answer is the model."""
    one = 4 * 2410
    assert (kept("local", model), kept("local", model, momentum=True)) == ((one, one), (2 * one, 2 * one))
    assert (kept("fedavg", model), kept("fedavg", model, momentum=True)) == ((one, 0), (2 * one, 0))
    assert (kept("zsign", model, downlink="model"), kept("obda", model)) == ((2 * one, 0), (2 * one, one))
    assert kept("stc", model) == (3 * one, 2 * one)


def test_running_statistics_are_kept_too() -> None:
    """Mean and variance of three features and one counter of eight bytes, beside 2 · 3 + 3 + 6 parameters."""
    model = CohortModel(nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)), torch.device("cpu"))
    assert kept("local", model)[1] == 4 * (6 + 3 + 6) + 4 * (3 + 3) + 8
    assert kept("fedavg", model)[1] == 4 * (3 + 3) + 8


def test_a_client_works_with_copies_of_its_parameters_and_its_activations(model: CohortModel) -> None:
    """64-32-10: 2,410 parameters; outputs of a sample: 64 (flatten), 32, 32 (ReLU), 10, and 10 for the container."""
    expected = 8 * 4 * 2410 + 2 * 16 * 4 * (64 + 32 + 32 + 10 + 10)
    assert memory.working_bytes(model, digits(4), batch_size=16) == expected


@pytest.mark.parametrize(("room", "size"), [(1000, 20), (20, 20), (19.9, 10), (9, 7), (1, 1), (0.1, 1)])
def test_cohorts_are_even_and_fit(model: CohortModel, monkeypatch: pytest.MonkeyPatch, room: float, size: int) -> None:
    """Room for 19 of 20 clients gives two cohorts of ten; for 9, three of 7, 7 and 6; never less than one client."""
    data = digits(20)
    one = memory.working_bytes(model, data, 16)
    monkeypatch.setattr(memory, "free_memory", lambda device: int(room * one / 0.6) + 1)
    assert memory.fitting_cohort(model, data, 16) == size
    assert memory.fitting_cohort(model, data, 16, participants=5) == min(5, size)


def test_where_the_system_does_not_tell_all_are_stacked(model: CohortModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "free_memory", lambda device: None)
    assert memory.fitting_cohort(model, digits(5), 16) == 5
    assert memory.room_for_all(federation("local"), TrainSection())


@pytest.mark.parametrize(("missing", "fits"), [(0, True), (10, False)])
def test_what_is_kept_lies_beside_the_work_or_elsewhere(
    missing: int, fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """64-20-10, two of five clients at a time in batches of 8: all keep θ, two work; together 0.6 of what is free."""
    one = 4 * DIM
    work = 8 * one + 2 * 8 * 4 * (64 + 20 + 20 + 10 + 10)
    free = (5 * one + 2 * work) * 10 // 6 + 1
    monkeypatch.setattr(memory, "free_memory", lambda device: free - missing)
    made, train = federation("local", participation=0.4), TrainSection(batch_size=8)
    assert memory.needed_bytes(made, train) == (5 * one, 2 * work)
    assert memory.room_for_all(made, train) is fits
    tracked = federation("obda", participation=0.4)  # who takes part keeps θ and w, who is away w
    assert memory.needed_bytes(tracked, train) == (2 * 2 * one + 3 * one, 2 * work)


def test_results_do_not_depend_on_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def metrics() -> list[dict[str, object]]:
        records = pfedlms.run("digits", clients=5, rounds=3, threads=1).metrics
        return [{key: value for key, value in record.items() if key != "seconds"} for record in records]

    plenty = metrics()
    monkeypatch.setattr(memory, "free_memory", lambda device: 1)
    assert metrics() == plenty


def dropout() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.Dropout(0.5), nn.Linear(16, 10))


def test_a_resumed_run_keeps_its_cohorts_whatever_memory_is_left(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Dropout depends on the grouping, so a run that goes on with less memory must go on with the same cohorts."""
    arrays = load_dataset("digits")
    settings = {"clients": 4, "threads": 1, "checkpoint_every": 1, "evaluate_every": 1}
    whole = pfedlms.run(arrays, dropout, rounds=4, out=tmp_path / "whole", **settings).metrics
    pfedlms.run(arrays, dropout, rounds=2, out=tmp_path / "part", **settings)
    config = tmp_path / "part" / "config.toml"
    config.write_text(config.read_text().replace("rounds = 2", "rounds = 4"))
    monkeypatch.setattr(memory, "free_memory", lambda device: 1)
    resumed = pfedlms.resume(tmp_path / "part", arrays, dropout).metrics
    assert [r["loss"] for r in resumed] == [r["loss"] for r in whole]
