"""Devices by name and as PyTorch has them, and what a plan says of names."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from torch import nn

import pfedlms
from pfedlms.errors import ConfigError, UsageError
from pfedlms.experiment.config import from_keywords, load_config, merge
from pfedlms.experiment.cost import plan_json
from pfedlms.experiment.prepare import _device, prepare
from pfedlms.experiment.problem import Problem
from pfedlms.report.plans import print_plan

QUICK: dict[str, Any] = {"rounds": 1, "clients": 2, "local_steps": 1, "threads": 1}


@pytest.mark.parametrize("device", ["cpu", "auto", torch.device("cpu"), torch.device("cpu", 0)])
def test_a_device_by_name_and_as_pytorch_has_it(device: Any) -> None:
    if torch.cuda.is_available() and device == "auto":
        pytest.skip("auto is a GPU here")
    assert pfedlms.run("digits", device=device, **QUICK).federation.model.device == torch.device("cpu")


def test_a_gpu_as_pytorch_has_it_is_written_by_name() -> None:
    for device, name in ((torch.device("cuda"), "cuda"), (torch.device("cuda", 3), "cuda:3")):
        tables = from_keywords(["local"], {"device": device})
        assert load_config(None, tables).run.device == name


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
    assert _device("cpu") == torch.device("cpu")


def plan_of(data: Any) -> tuple[dict[str, Any], str]:
    problem, text = Problem(data, lambda: nn.Linear(2, 12)), io.StringIO()
    more = {"method": {"name": "local"}, "run": {"device": "cpu"}}
    config = load_config(None, merge(problem.tables(), more))
    federation = prepare(config, problem)
    plan = plan_json(config, federation)
    print_plan(plan, 1, Console(file=text, width=100))
    return plan, text.getvalue()


def test_the_plan_names_classes_where_they_have_names() -> None:
    x = np.zeros((24, 2), dtype=np.float32)
    plan, text = plan_of({"a": (x, ["[red]", "blue"] * 12), "b": (x, ["blue", "green"] * 12)})
    assert (plan["classes"], plan["client_names"]) == (["[red]", "blue", "green"], ["a", "b"])
    assert "classes: [red], blue, green\n" in text
    many, text = plan_of([(x, [f"c{place:02}" for place in range(12)] * 2)] * 2)
    assert len(many["classes"]) == 12
    assert "classes: c00, c01, c02, c03, c04, c05, c06, c07, c08, c09, … (12 in all)\n" in text
    plain, text = plan_of([(x, [0, 1] * 12)] * 2)
    assert not {"classes", "client_names"} & set(plain)
    assert "classes:" not in text


def test_the_plan_counts_whole_numbers_in_full() -> None:
    """8 bytes for each of 7 token ids and for each label of 60 samples."""
    tokens = np.random.default_rng(0).integers(0, 9, (60, 7))
    config = load_config(None, {"data": {"dataset": "custom", "clients": 2}, "run": {"device": "cpu"}})
    model = nn.Sequential(nn.Embedding(9, 2), nn.Flatten(), nn.Linear(14, 2))
    federation = prepare(config, Problem((tokens, tokens[:, 0] % 2), model))
    assert plan_json(config, federation)["memory_bytes"]["data"] == 60 * 8 * 8
