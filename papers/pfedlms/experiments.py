"""The paper's tables and figures: rows, each a variant of a method, on some data sets at some α, and the numbers that
the paper prints; and their cells, the settings of one row on one data set, also for methods at each other's bytes."""

from __future__ import annotations

import tomllib
import warnings
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pfedlms
from pfedlms.errors import UsageError
from pfedlms.report.runs import Spread

ALL = ("mnist", "fmnist", "svhn", "cifar10", "cifar100")
SERVER_STEPS = {"mnist": 3.0, "fmnist": 2.0, "cifar10": 3.0}
"""FedAvg's server step, chosen by V-acc on seed 10 (benchmarks/results/sweep-*.json)."""


@dataclass(frozen=True)
class Row:
    """A row of a table: its name, the variant that is trained, and what the paper prints."""

    label: str
    variant: str
    printed: Spread | None = None


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
        known = dict(zip(paper()[section][axis], map(Spread, paper()[section].get(dataset, ())), strict=False))
        values = (1, 2, 3, 4, 5, 7) if section == "thresholds" else known or paper()[section][axis]
        return [Row(f"{symbol} = {value:g}", f"pfedlms:{setting}={value:g}", known.get(value)) for value in values]
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


def printed(section: str, row: str, dataset: str) -> Spread | None:
    """A number of a table with one column per data set; None where the paper has none."""
    own, dataset = paper()[section], dataset.partition("/")[0]
    if row not in own or dataset not in own["columns"]:
        return None
    value = own[row][own["columns"].index(dataset)]
    return Spread(*value) if isinstance(value, list) else Spread(value)


# --- cells ---

Settings = dict[str, dict[str, Any]]
"""By section and key."""
QUICK = 10
"""How many times fewer rounds a quick look has."""
RATES = {"stc": "sparsity", "pfed1bs": "ratio", "pfedlms": "ratio", "sketchvote": "ratio"}
"""The setting that decides how large messages are."""
TOLERANCE = 0.005  # of the bytes of a round


def merged(*layers: Mapping[str, Mapping[str, Any]]) -> Settings:
    """All settings; where several layers have one, the last layer's value."""
    found: Settings = {}
    for layer in layers:
        for section, values in layer.items():
            found[section] = {**found.get(section, {}), **values}
    return found


def on(dataset: str) -> Settings:
    """A data set with the model that is shipped for it, or with the one behind a slash: cifar100/vgg8."""
    name, _, model = dataset.partition("/")
    return {"data": {"dataset": name}, "model": {"name": model}} if model else {"data": {"dataset": name}}


def settings_of(dataset: str, variant: str) -> Settings:
    """The settings of a variant: `pfedlms:thresholds=1`, or `stc@sketchvote`, which is stc with messages as large as
    those of sketchvote."""
    own, at, other = variant.partition("@")
    settings = pfedlms.variant(own)
    if not at:
        return settings
    equal = at_the_bytes_of(dataset, settings["method"]["name"], settings_of(dataset, other)["method"])
    return merged(settings, {"method": equal})


def cell(dataset: str, alpha: float, variant: str, quick: bool = False) -> Settings:
    """A variant on a data set, as `pfedlms.study` takes it; all else is as shipped for the data set and the method."""
    settings = merged(on(dataset), {"data": {"alpha": alpha}}, settings_of(dataset, variant))
    if quick:
        rounds = pfedlms.load_config(None, settings).train.rounds
        settings = merged(settings, every_round(max(2, rounds // QUICK)))
    return settings


def short_fedavg(dataset: str, alpha: float, rounds: int) -> dict[str, Settings]:
    """FedAvg for that many rounds, every one of them evaluated: one cell by its name."""
    return {f"fedavg-rounds{rounds}": merged(cell(dataset, alpha, "fedavg"), every_round(rounds))}


def every_round(rounds: int) -> Settings:
    """So many rounds, every one of them evaluated."""
    return {"train": {"rounds": rounds}, "run": {"evaluate_every": 1}}


def cost(dataset: str, method: str, **settings: Any) -> dict[str, Any]:
    """The row of `pfedlms bits` for a method with the model of a data set."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of settings that would not train well; nothing is trained here
        return pfedlms.bits_table(merged(on(dataset), {"method": {"name": method, **settings}}))[0]


def taken(dataset: str, method: str, **settings: Any) -> int:
    """Bytes of one client in one round, up and down with framing."""
    row = cost(dataset, method, **settings)
    bits = [row[f"{way}_{part}_bits"] for way in ("up", "down") for part in ("payload", "framing")]
    return int(sum(bits)) // 8


def at_the_bytes_of(dataset: str, method: str, other: Mapping[str, Any]) -> dict[str, float]:
    """Settings of `method` at which its messages are as large as those of `other` (a section [method]).

    λ is lowered with the ratio, and kept where the ratio is raised: because ΦΦᵀ = (N/m) I, a step on the pull of
    pFedLMS or pFed1BS moves a sketched coordinate by up to 2 η λ N/m and a model of N parameters by up to 2 η λ √N. So
    neither moves further than with the shipped settings."""
    if method not in RATES:
        raise UsageError(
            f"--methods: got {method}@{other['name']}, but no setting of {method} says how large a message is; "
            f"{', '.join(RATES)} have one"
        )
    rest = {key: value for key, value in other.items() if key != "name"}
    rate = equal_rate(dataset, method, taken(dataset, other["name"], **rest))
    shipped = pfedlms.load_config(None, merged(on(dataset), {"method": {"name": method}})).settings
    pulls = hasattr(shipped, "strength")  # λ, the weight of a pull on sketched coordinates
    return {RATES[method]: rate} | ({"strength": shipped.strength * min(1.0, rate / shipped.ratio)} if pulls else {})


@cache
def equal_rate(dataset: str, method: str, wanted: int) -> float:
    """The rate at which one client's messages of one round have `wanted` bytes."""
    key, dim = RATES[method], int(cost(dataset, method)["parameters"])

    def share(count: int) -> float:
        return (count + 0.5) / dim  # in the middle: rounding removes no entry

    sizes = lambda count: taken(dataset, method, **{key: share(count)})  # noqa: E731 - grows with the count
    low = max(1, bisect_right(range(1, dim - 1), wanted, key=sizes))
    off = {rate: abs(taken(dataset, method, **{key: rate}) - wanted) for rate in (share(low), share(low + 1))}
    best = min(off, key=lambda rate: off[rate])
    if off[best] > max(TOLERANCE * wanted, 4):  # one entry more, up and down: sizes cannot agree more closely
        raise UsageError(f"{method}: no {key} takes {wanted} bytes a round on {dataset}, within {TOLERANCE:.1%}")
    return best
