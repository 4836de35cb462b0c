"""Devices by name and as torch.device; cohorts sized by the free memory; class names in a plan."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small import SMALL, edit_config, without_timings
from torch import nn

import pfedlms
from factories import DIM, federation
from pfedlms.data import Partitioning, from_pool, load_dataset
from pfedlms.errors import UsageError
from pfedlms.experiment import memory
from pfedlms.experiment.config import from_keywords, load_config, merge
from pfedlms.experiment.cost import plan_json
from pfedlms.experiment.prepare import _device, prepare
from pfedlms.experiment.problem import Problem
from pfedlms.models import CohortModel, build
from pfedlms.report import plans
from pfedlms.train_settings import TrainSettings


@pytest.fixture
def model() -> CohortModel:
    return CohortModel(build("dnn", (1, 8, 8), 10, 32, 0), torch.device("cpu"))


def digits(clients: int) -> pfedlms.data.FederatedData:
    return from_pool(*load_dataset("digits"), Partitioning(clients, 1.0, 0))


@pytest.mark.parametrize(("free", "size"), [(1000, 20), (20, 20), (19.9, 10), (9, 7), (1, 1), (0.1, 1)])
def test_cohorts_are_even_and_fit(model: CohortModel, monkeypatch: pytest.MonkeyPatch, free: float, size: int) -> None:
    """Memory for 19 of 20 clients gives two cohorts of ten; for 9, three of 7, 7 and 6; at least one client."""
    data = digits(20)
    one = memory.working_bytes(model, data, 16)
    monkeypatch.setattr(memory, "free_memory", lambda device: int(free * one / 0.6) + 1)
    assert memory.fitting_cohort(model, data, 16) == size
    assert memory.fitting_cohort(model, data, 16, participants=5) == min(5, size)


def test_the_memory_of_a_compiled_model_is_counted_while_sizes_are_symbols() -> None:
    """As that of its module, and the ten outputs once more, which the wrapper returns again: two samples, 16 times."""
    module = build("dnn", (1, 8, 8), 10, 32, 0)
    compiled = torch.compile(module, backend="eager", dynamic=True)
    plain, wrapped = (
        memory.working_bytes(CohortModel(each, torch.device("cpu")), digits(5), 16) for each in (module, compiled)
    )
    assert wrapped == plain + 16 * 2 * 4 * 10


def test_clients_form_one_cohort_if_memory_is_unknown(model: CohortModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "free_memory", lambda device: None)
    assert memory.fitting_cohort(model, digits(5), 16) == 5
    assert memory.all_clients_fit(federation("local"), TrainSettings())


WORK = 8 * 4 * DIM + 2 * 8 * 4 * (64 + 20 + 20 + 10 + 10)
NORMALISED = nn.Sequential(nn.Flatten(), nn.Linear(64, 2), nn.BatchNorm1d(2), nn.Linear(2, 10))


@pytest.mark.parametrize(
    ("method", "participant", "absent", "settings"),
    [
        ("local", 1, 1, {}),
        ("local", 2, 2, {"momentum": 0.5}),
        ("fedavg", 2, 0, {"momentum": 0.5}),
        ("zsign", 2, 0, {"downlink": "model"}),
        ("obda", 2, 1, {}),
        ("stc", 3, 2, {}),
    ],
)
def test_memory_counts_the_state_of_participants_and_absent_clients(
    method: str, participant: int, absent: int, settings: dict[str, Any]
) -> None:
    """64-20-10, two of five clients at a time in batches of 8. A participant has θ, twice with momentum, w if it is
    tracked or compared with, and a residual if there is one. An absent client has θ if it is personal, w if it is
    tracked, the residual, and nothing if the next answer is the model."""
    train = TrainSettings(batch_size=8, momentum=settings.get("momentum", 0.0))
    made = federation(method, participation=0.4, **settings)
    assert memory.needed_bytes(made, train) == (4 * DIM * (2 * participant + 3 * absent), 2 * WORK)


def test_memory_counts_running_statistics() -> None:
    """Of five clients: mean and variance of two features and one counter of eight bytes, beside the parameters."""
    needed = [
        memory.needed_bytes(federation(name, module=NORMALISED), TrainSettings())[0] for name in ("local", "fedavg")
    ]
    assert needed == [5 * (4 * (128 + 2 + 4 + 20 + 10) + 4 * (2 + 2) + 8)] * 2


@pytest.mark.parametrize(("missing", "fits"), [(0, True), (10, False)])
def test_all_clients_fit_if_state_and_work_take_at_most_sixty_percent_of_the_free_memory(
    missing: int, fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All five clients have θ, two of them train; together they take 0.6 of the free memory."""
    free = (5 * 4 * DIM + 2 * WORK) * 10 // 6 + 1
    monkeypatch.setattr(memory, "free_memory", lambda device: free - missing)
    assert memory.all_clients_fit(federation("local", participation=0.4), TrainSettings(batch_size=8)) is fits


def test_results_do_not_depend_on_the_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    plenty = pfedlms.run(**SMALL).metrics
    monkeypatch.setattr(memory, "free_memory", lambda device: 1)
    assert without_timings(pfedlms.run(**SMALL).metrics) == without_timings(plenty)


def dropout() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.Dropout(0.5), nn.Linear(16, 10))


def test_a_resumed_run_keeps_its_cohorts_with_less_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The draws of nn.Dropout depend on the cohorts, so other cohorts would give other numbers."""
    arrays = load_dataset("digits")
    settings = {"clients": 4, "threads": 1, "checkpoint_every": 1, "evaluate_every": 1}
    whole = pfedlms.run(arrays, dropout, rounds=4, out=tmp_path / "whole", **settings).metrics
    pfedlms.run(arrays, dropout, rounds=2, out=tmp_path / "part", **settings)
    edit_config(tmp_path / "part", "rounds = 2", "rounds = 4")
    monkeypatch.setattr(memory, "free_memory", lambda device: 1)
    resumed = pfedlms.resume(tmp_path / "part", arrays, dropout).metrics
    assert [r["loss"] for r in resumed] == [r["loss"] for r in whole]


def test_a_torch_device_is_stored_by_its_name() -> None:
    for name in ("cpu", "cuda", "cuda:3"):
        assert load_config(None, from_keywords(["local"], {"device": torch.device(name)})).run.device == name


def test_the_number_of_a_gpu_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for count, remedy in ((1, "1 GPUs; use cpu, auto, cuda:0"), (2, "use cpu, auto, cuda:0, cuda:1")):
        monkeypatch.setattr(torch.cuda, "device_count", lambda count=count: count)
        assert _device(f"cuda:{count - 1}") == torch.device("cuda", count - 1)
        with pytest.raises(UsageError, match=f"run.device: got 'cuda:{count}', but PyTorch finds .*{remedy}$"):
            _device(f"cuda:{count}")
    assert _device("auto") == _device("cuda") == torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UsageError, match=r"got 'cuda:1', but PyTorch finds no GPUs; use cpu, auto$"):
        _device("cuda:1")
    assert _device("cpu") == torch.device("cpu")


def test_the_plan_names_classes_where_they_have_names() -> None:
    def plan_of(data: Any) -> tuple[dict[str, Any], str]:
        problem = Problem(data, lambda: nn.Linear(2, 12))
        config = load_config(None, merge(problem.tables({}), {"method": {"name": "local"}, "run": {"device": "cpu"}}))
        plan = plan_json(config, prepare(config, problem))
        return plan, plans.plan_table([plan]).intro

    x = np.zeros((24, 2), dtype=np.float32)
    plan, text = plan_of({"a": (x, ["[red]", "blue"] * 12), "b": (x, ["blue", "green"] * 12)})
    assert (plan["classes"], plan["client_names"]) == (["[red]", "blue", "green"], ["a", "b"])
    assert "Classes: [red], blue, green." in text
    many, text = plan_of([(x, [f"c{place:02}" for place in range(12)] * 2)] * 2)
    assert len(many["classes"]) == 12
    assert "Classes: c00, c01, c02, c03, c04, c05, c06, c07, c08, c09, … (12 in all)." in text
    plain, text = plan_of([(x, [0, 1] * 12)] * 2)
    assert not {"classes", "client_names"} & set(plain)
    assert "Classes:" not in text
