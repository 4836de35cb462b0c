"""Cohorts split by the memory at hand; results do not depend on the split."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import pfedlms
from pfedlms.data import from_pool, load
from pfedlms.experiment import memory
from pfedlms.models import CohortModel, build


@pytest.fixture
def model() -> CohortModel:
    return CohortModel(build("dnn", (1, 8, 8), 10, 32, 0), torch.device("cpu"))


def digits(clients: int) -> pfedlms.data.FederatedData:
    source = load("digits")
    return from_pool(source.x, source.y, clients, 1.0, 0)


def test_a_client_takes_its_parameters_and_its_activations(model: CohortModel) -> None:
    """64-32-10: 2,410 parameters; outputs of a sample: 64 (flatten), 32, 32 (ReLU), 10, and 10 for the container."""
    expected = 8 * 4 * 2410 + 2 * 16 * 4 * (64 + 32 + 32 + 10 + 10)
    assert memory.client_bytes(model, digits(4), batch_size=16) == expected


@pytest.mark.parametrize(("room", "size"), [(1000, 20), (20, 20), (19.9, 10), (9, 7), (1, 1), (0.1, 1)])
def test_cohorts_are_even_and_fit(model: CohortModel, monkeypatch: pytest.MonkeyPatch, room: float, size: int) -> None:
    """Room for 19 of 20 clients gives two cohorts of ten; for 9, three of 7, 7 and 6; never less than one client."""
    data = digits(20)
    one = memory.client_bytes(model, data, 16)
    monkeypatch.setattr(memory, "free_memory", lambda device: int(room * one / 0.6) + 1)
    assert memory.fitting_cohort(model, data, 16) == size


def test_where_the_system_does_not_tell_all_are_stacked(model: CohortModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "free_memory", lambda device: None)
    assert memory.fitting_clients(model, digits(5), 16) is None
    assert memory.fitting_cohort(model, digits(5), 16) == 5


@pytest.mark.parametrize(("room", "clients"), [(1000, 1000), (3.9, 3), (1, 1), (0.1, 1)])
def test_as_many_clients_fit_as_the_free_memory_holds(
    model: CohortModel, monkeypatch: pytest.MonkeyPatch, room: float, clients: int
) -> None:
    """More than the federation has, where its seeds are to be stacked; never less than one."""
    data = digits(4)
    monkeypatch.setattr(
        memory, "free_memory", lambda device: int(room * memory.client_bytes(model, data, 16) / 0.6) + 1
    )
    assert memory.fitting_clients(model, data, 16) == clients


def test_free_memory_is_a_plausible_number() -> None:
    free = memory.free_memory(torch.device("cpu"))
    assert free is None or 1 << 20 < free < 1 << 50


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
    source = load("digits")
    arrays = (source.x, source.y)
    settings = {"clients": 4, "threads": 1, "checkpoint_every": 1, "evaluate_every": 1}
    whole = pfedlms.run(arrays, dropout, rounds=4, out=tmp_path / "whole", **settings).metrics
    pfedlms.run(arrays, dropout, rounds=2, out=tmp_path / "part", **settings)
    config = tmp_path / "part" / "config.toml"
    config.write_text(config.read_text().replace("rounds = 2", "rounds = 4"))
    monkeypatch.setattr(memory, "free_memory", lambda device: 1)
    resumed = pfedlms.resume(tmp_path / "part", arrays, dropout).metrics
    assert [r["loss"] for r in resumed] == [r["loss"] for r in whole]


def test_resuming_with_other_data_is_refused(tmp_path: Path) -> None:
    source = load("digits")
    pfedlms.run((source.x, source.y), dropout, rounds=1, clients=4, out=tmp_path / "run")
    with pytest.raises(pfedlms.PfedlmsError, match="not those this run began with"):
        pfedlms.resume(tmp_path / "run", (source.x + 1, source.y), dropout)
