"""The paper's tables and figures: rows, each a variant of a method, on some data sets at some α."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from papers.pfedlms.cells import Settings, cell
from papers.pfedlms.numbers import Printed, along, paper, printed

ALL = ("mnist", "fmnist", "svhn", "cifar10", "cifar100")
SERVER_STEPS = {"mnist": 3.0, "fmnist": 2.0, "cifar10": 3.0}
"""FedAvg's server step, chosen by V-acc on seed 10 (benchmarks/results/sweep-*.json)."""


@dataclass(frozen=True)
class Row:
    """A row of a table: its name, the variant that is trained, and what the paper prints."""

    label: str
    variant: str
    printed: Printed | None = None


@dataclass(frozen=True)
class Experiment:
    """A table or figure of the paper."""

    title: str
    alpha: float
    datasets: tuple[str, ...]
    rows: Callable[[str], list[Row]]
    """The rows of a data set."""

    def of(self, dataset: str, methods: Sequence[str] = ()) -> list[Row]:
        """The rows of a data set; with `methods` some of them, or variants that the table does not have."""
        rows = self.rows(dataset)
        if not methods:
            return rows
        found: list[Row] = []
        for name in methods:
            own = [row for row in rows if name in (row.label, row.variant, _method(row.variant))]
            found += own or [Row(name, name)]
        return list(dict.fromkeys(found))

    def cells(self, dataset: str, rows: Sequence[Row], quick: bool) -> dict[str, Settings]:
        """What is trained for these rows, by variant."""
        return {row.variant: cell(dataset, self.alpha, row.variant, quick) for row in rows}


def _method(variant: str) -> str:
    return variant.partition("@")[0].partition(":")[0]


def _table(section: str) -> Callable[[str], list[Row]]:
    """The paper's methods, what the paper leaves out (no communication, a tuned server step, methods at each other's
    bytes, replies that are sums and not models), and methods that are newer than the paper."""

    def rows(dataset: str) -> list[Row]:
        step = SERVER_STEPS.get(dataset)
        tuned = [f"fedavg:server_step={step:g}"] if step else []
        variants = [
            "local", "fedavg", *tuned, "obda", "obcsaa", "obcsaa:downlink=sum", "fedproto", "eden", "zsign",
            "zsign:downlink=sum", "pfed1bs", "pfed1bs@pfedlms", "pfedlms", "pfedlms@pfed1bs", "sketchvote",
            "stc@sketchvote",
        ]  # fmt: skip
        return [Row(name, name, printed(section, name, dataset)) for name in variants]

    return rows


def _ablation(dataset: str) -> list[Row]:
    variants = {
        "refined pfed1bs (T=1, whole model)": "pfedlms:thresholds=1:layerwise=false",
        "pfedlms T=1 (layer-wise)": "pfedlms:thresholds=1",
        "T=7, whole model": "pfedlms:layerwise=false",
        "pfedlms T=7 (layer-wise)": "pfedlms",
    }
    return [Row(label, variant, printed("ablation", label, dataset)) for label, variant in variants.items()]


def _along(section: str, axis: str, symbol: str, setting: str, values: Sequence[float]) -> Callable[[str], list[Row]]:
    """pFedLMS with several values of one setting, beside the paper's figure with that `axis`."""

    def rows(dataset: str) -> list[Row]:
        return [
            Row(f"{symbol} = {value:g}", f"pfedlms:{setting}={value:g}", along(section, axis, value, dataset))
            for value in values
        ]

    return rows


EXPERIMENTS = {
    "table1": Experiment("Table 1, α = 0.5", 0.5, ALL, _table("table1")),
    "table2": Experiment("Table 2, α = 0.1", 0.1, ALL, _table("table2")),
    "ablation": Experiment("layer-wise, several thresholds, α = 0.5", 0.5, ("svhn", "cifar10"), _ablation),
    "thresholds": Experiment(
        "thresholds T, α = 0.5", 0.5, ("cifar10",), _along("thresholds", "T", "T", "thresholds", (1, 2, 3, 4, 5, 7))
    ),
    "refresh": Experiment(
        "rounds h between fresh sketches, α = 0.5", 0.5, ("mnist",),
        _along("refresh", "h", "h", "refresh", paper()["refresh"]["h"]),
    ),
    "lambda": Experiment(
        "strength λ of the pull, α = 0.1", 0.1, ALL,
        _along("lambda", "values", "λ", "strength", paper()["lambda"]["values"]),
    ),
    "curves": Experiment("accuracy against rounds, α = 0.5", 0.5, ("cifar10",), _table("table1")),
    "budget": Experiment("accuracy against bytes, α = 0.5", 0.5, ("mnist",), _table("table1")),
}  # fmt: skip
"""Experiments made of cells. `curves` and `budget` use the cells of `table1`."""
