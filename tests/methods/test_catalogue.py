"""docs/catalogue.md: every method has its rows, and their numbers are those of messages and states."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pfedlms.experiment.config import load_config
from pfedlms.experiment.cost import bits_table, method_of
from pfedlms.experiment.memory import kept_bytes
from pfedlms.methods import METHODS
from pfedlms.models import CohortModel, build

PAGE = (Path(__file__).parents[2] / "docs" / "catalogue.md").read_text(encoding="utf-8")
OURS = [name for name, method in METHODS.items() if method.__module__.startswith("pfedlms.")]


def rows(heading: str) -> dict[str, list[str]]:
    """The cells of a section's table by the method in the first one."""
    section = PAGE.split(f"## {heading}\n")[1].split("\n## ")[0]
    cells = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line[:3] == "| `"
    ]
    return {name.strip("`"): rest for name, *rest in cells}


NEEDS, USE = rows("What a method needs from a client"), rows("When to use it")


def test_every_method_has_a_row_in_both_tables() -> None:
    assert list(NEEDS) == list(USE) == OURS


@pytest.mark.parametrize("name", OURS)
def test_the_paper_of_a_method_is_cited(name: str) -> None:
    citation = USE[name][1]
    paper = METHODS[name].paper
    assert paper in citation or paper.startswith(("a method of this package", "baseline")), citation


def test_bits_are_those_of_the_messages() -> None:
    for cost in reversed(bits_table()):  # of several downlinks a method's default comes first
        bits = [f"{cost[f'{way}_payload_bits'] / cost['parameters']:.3g}" for way in ("up", "down")]
        if cost.get("downlink", "model") == "model":
            assert NEEDS[cost["method"]][:2] == bits


@pytest.mark.parametrize("name", OURS)
def test_the_state_of_an_absent_client_has_the_stated_size(name: str) -> None:
    """Without momentum; counters of a few bytes are not stated."""
    config = load_config(None, {"data": {"dataset": "mnist"}, "method": {"name": name}})
    model = CohortModel(build("dnn", (1, 28, 28), 10, 256, 0), torch.device("cpu"))
    _, kept = kept_bytes(method_of(config), model, 0)
    assert float(NEEDS[name][2]) == pytest.approx(kept / (4 * model.layout.dim), rel=0.005, abs=1e-4)
