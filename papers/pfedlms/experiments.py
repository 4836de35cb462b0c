"""The paper's tables and figures: rows, each a variant of a method, on some data sets at some α, and the numbers that
the paper prints."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

ALL = ("mnist", "fmnist", "svhn", "cifar10", "cifar100")
SERVER_STEPS = {"mnist": 3.0, "fmnist": 2.0, "cifar10": 3.0}
"""FedAvg's server step, chosen by V-acc on seed 10 (benchmarks/results/sweep-*.json)."""


@dataclass(frozen=True)
class Printed:
    """An accuracy or cost of the paper; its standard deviation where the paper gives one."""

    mean: float
    deviation: float = 0.0


@dataclass(frozen=True)
class Row:
    """A row of a table: its name, the variant that is trained, and what the paper prints."""

    label: str
    variant: str
    printed: Printed | None = None


@dataclass(frozen=True)
class Experiment:
    """A table or figure of the paper, made of cells."""

    title: str
    alpha: float
    datasets: tuple[str, ...]
    section: str
    """Its numbers in paper.toml."""

    def of(self, dataset: str, methods: Sequence[str] = ()) -> list[Row]:
        """The rows of a data set; with `methods` some of them, or variants that the table does not have."""
        rows = _rows(self.section, dataset)
        if not methods:
            return rows
        found: list[Row] = []
        for name in methods:
            own = [row for row in rows if name in (row.label, row.variant, row.variant.split("@")[0].split(":")[0])]
            found += own or [Row(name, name)]
        return list(dict.fromkeys(found))


EXPERIMENTS = {
    "table1": Experiment("Table 1, α = 0.5", 0.5, ALL, "table1"),
    "table2": Experiment("Table 2, α = 0.1", 0.1, ALL, "table2"),
    "ablation": Experiment("layer-wise, several thresholds, α = 0.5", 0.5, ("svhn", "cifar10"), "ablation"),
    "thresholds": Experiment("thresholds T, α = 0.5", 0.5, ("cifar10",), "thresholds"),
    "refresh": Experiment("rounds h between fresh sketches, α = 0.5", 0.5, ("mnist",), "refresh"),
    "lambda": Experiment("strength λ of the pull, α = 0.1", 0.1, ALL, "lambda"),
    "curves": Experiment("accuracy against rounds, α = 0.5", 0.5, ("cifar10",), "table1"),
    "budget": Experiment("accuracy against bytes, α = 0.5", 0.5, ("mnist",), "table1"),
}
FIGURES = {
    "thresholds": ("T", "T", "thresholds"),
    "refresh": ("h", "h", "refresh"),
    "lambda": ("values", "λ", "strength"),
}
"""Figures along one setting of pFedLMS: their axis in paper.toml, its symbol, and the setting."""
ABLATION = {
    "refined pfed1bs (T=1, whole model)": "pfedlms:thresholds=1:layerwise=false",
    "pfedlms T=1 (layer-wise)": "pfedlms:thresholds=1",
    "T=7, whole model": "pfedlms:layerwise=false",
    "pfedlms T=7 (layer-wise)": "pfedlms",
}


def _rows(section: str, dataset: str) -> list[Row]:
    if section in FIGURES:
        axis, symbol, setting = FIGURES[section]
        values = (1, 2, 3, 4, 5, 7) if section == "thresholds" else paper()[section][axis]
        named = {f"{symbol} = {value:g}": (value, f"pfedlms:{setting}={value:g}") for value in values}
        return [Row(label, own, along(section, axis, value, dataset)) for label, (value, own) in named.items()]
    if section == "ablation":
        return [Row(label, variant, printed(section, label, dataset)) for label, variant in ABLATION.items()]
    step = SERVER_STEPS.get(dataset)
    # The paper's methods; what it leaves out: no communication, a tuned server step, methods at each other's bytes,
    # replies that are sums and not models; and methods that are newer than the paper.
    variants = [
        "local", "fedavg", *([f"fedavg:server_step={step:g}"] if step else []), "obda", "obcsaa",
        "obcsaa:downlink=sum", "fedproto", "eden", "zsign", "zsign:downlink=sum", "pfed1bs", "pfed1bs@pfedlms",
        "pfedlms", "pfedlms@pfed1bs", "sketchvote", "stc@sketchvote",
    ]  # fmt: skip
    return [Row(name, name, printed(section, name, dataset)) for name in variants]


@cache
def paper() -> dict[str, Any]:
    return tomllib.loads(Path(__file__).with_name("paper.toml").read_text(encoding="utf-8"))


def printed(section: str, row: str, dataset: str) -> Printed | None:
    """A number of a table with one column per data set; None where the paper has none."""
    own = paper()[section]
    if row not in own or dataset not in own["columns"]:
        return None
    value = own[row][own["columns"].index(dataset)]
    return Printed(*value) if isinstance(value, list) else Printed(value)


def along(section: str, axis: str, value: float, dataset: str) -> Printed | None:
    """A number of a figure with one line per data set, at one value of its axis; None where the paper has none."""
    own = paper()[section]
    if dataset not in own or value not in own[axis]:
        return None
    return Printed(own[dataset][own[axis].index(value)])
