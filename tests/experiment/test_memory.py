"""Devices by name and as PyTorch has them; cohorts split by the memory at hand; what a plan says of data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small import SMALL, stripped
from torch import nn

import pfedlms
from factories import DIM, federation
from pfedlms.data import Partitioning, from_pool, load_dataset
from pfedlms.engine.participation import Participation
from pfedlms.engine.terms import task_of
from pfedlms.errors import ConfigError, UsageError
from pfedlms.experiment import memory
from pfedlms.experiment.config import from_keywords, load_config, merge
from pfedlms.experiment.cost import plan_json
from pfedlms.experiment.prepare import _device, prepare
from pfedlms.experiment.problem import Problem
from pfedlms.methods import METHODS
from pfedlms.methods.contract import Method
from pfedlms.models import CohortModel, build
from pfedlms.report import plans
from pfedlms.train_settings import TrainSettings


@pytest.fixture
def model() -> CohortModel:
    return CohortModel(build("dnn", (1, 8, 8), 10, 32, 0), torch.device("cpu"))


def digits(clients: int) -> pfedlms.data.FederatedData:
    return from_pool(*load_dataset("digits"), Partitioning(clients, 1.0, 0))


def made(name: str, model: CohortModel, **settings: object) -> Method:
    """Of five clients two take part."""
    task = task_of(
        model,
        10,
        Participation(5, 0.4, 0),
        TrainSettings(local_steps=1, batch_size=1, learning_rate=0.1, weight_decay=0.0),
        seed=0,
    )
    return METHODS[name](task, METHODS[name].Settings(**settings))


def kept(name: str, model: CohortModel, momentum: bool = False, **settings: object) -> tuple[int, int]:
    return memory.kept_bytes(made(name, model, **settings), model, momentum * model.layout.dim)


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
    assert memory.room_for_all(federation("local"), TrainSettings())


@pytest.mark.parametrize(("missing", "fits"), [(0, True), (10, False)])
def test_what_is_kept_lies_beside_the_work_or_elsewhere(
    missing: int, fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """64-20-10, two of five clients at a time in batches of 8: all keep θ, two work; together 0.6 of what is free."""
    one = 4 * DIM
    work = 8 * one + 2 * 8 * 4 * (64 + 20 + 20 + 10 + 10)
    free = (5 * one + 2 * work) * 10 // 6 + 1
    monkeypatch.setattr(memory, "free_memory", lambda device: free - missing)
    made, train = federation("local", participation=0.4), TrainSettings(batch_size=8)
    assert memory.needed_bytes(made, train) == (5 * one, 2 * work)
    assert memory.room_for_all(made, train) is fits
    tracked = federation("obda", participation=0.4)  # who takes part keeps θ and w, who is away w
    assert memory.needed_bytes(tracked, train) == (2 * 2 * one + 3 * one, 2 * work)


def test_results_do_not_depend_on_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    plenty = pfedlms.run(**SMALL).metrics
    monkeypatch.setattr(memory, "free_memory", lambda device: 1)
    assert stripped(pfedlms.run(**SMALL).metrics) == stripped(plenty)


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


QUICK: dict[str, Any] = {"rounds": 1, "clients": 2, "local_steps": 1, "threads": 1}


def test_a_device_as_pytorch_has_it_is_written_by_name() -> None:
    for name in ("cpu", "cuda", "cuda:3"):
        assert load_config(None, from_keywords(["local"], {"device": torch.device(name)})).run.device == name


@pytest.mark.parametrize("device", [torch.device("mps"), "cuda:", "cuda:-1", "cuda: 1", "cuda:N", "CUDA", "cuda:1:2"])
def test_what_is_no_device_of_ours(device: Any) -> None:
    with pytest.raises(ConfigError, match=r"run.device: got .*, expected one of: auto, cpu, cuda, cuda:N"):
        pfedlms.run("digits", device=device, **QUICK)


def test_the_number_of_a_gpu_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for count, remedy in ((1, "1 GPU; use cuda:0"), (2, "2 GPUs; use cuda:0 or cuda:1"), (8, "use cuda:0 to cuda:7")):
        monkeypatch.setattr(torch.cuda, "device_count", lambda count=count: count)
        assert _device(f"cuda:{count - 1}") == torch.device("cuda", count - 1)
        with pytest.raises(UsageError, match=f"run.device: got 'cuda:{count}', but PyTorch finds .*{remedy}$"):
            _device(f"cuda:{count}")
    assert _device("auto") == _device("cuda") == torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UsageError, match=r"got 'cuda:1', but PyTorch finds no GPU here; set run\.device"):
        _device("cuda:1")
    assert _device("cpu") == torch.device("cpu")


def plan_of(data: Any) -> tuple[dict[str, Any], str]:
    problem = Problem(data, lambda: nn.Linear(2, 12))
    more = {"method": {"name": "local"}, "run": {"device": "cpu"}}
    config = load_config(None, merge(problem.tables(), more))
    plan = plan_json(config, prepare(config, problem))
    return plan, plans.plan([plan]).intro


def test_the_plan_names_classes_where_they_have_names() -> None:
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


def test_the_plan_counts_whole_numbers_in_full() -> None:
    """8 bytes for each of 7 token ids and for each label of 60 samples."""
    tokens = np.random.default_rng(0).integers(0, 9, (60, 7))
    config = load_config(None, {"data": {"dataset": "custom", "clients": 2}, "run": {"device": "cpu"}})
    model = nn.Sequential(nn.Embedding(9, 2), nn.Flatten(), nn.Linear(14, 2))
    federation = prepare(config, Problem((tokens, tokens[:, 0] % 2), model))
    assert plan_json(config, federation)["memory_bytes"]["data"] == 60 * 8 * 8
