"""Cells: one training run each, of a data set, a way to set its clients up, a row of a table, and a seed."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from pfedlms.errors import UsageError
from pfedlms.experiment.config import Config, Tables, load_config, merge
from pfedlms.experiment.grids import variants
from pfedlms.experiment.loop import fixed_settings as settled
from pfedlms.reproduce.budget import at_the_bytes_of

QUICK = 10
"""How many times fewer rounds a quick look has."""
OF_THE_RESULT = ("seed", "lost", "quorum", "evaluate_every")
"""What of [run] changes what is measured: the last of them which evaluations maximum and last 10 are of."""


@dataclass(frozen=True)
class Cell:
    """One training run; what is shipped for the data set and method, with `tables` on top."""

    dataset: str
    setup: str
    """How clients are set up, the same for all rows that are compared."""
    row: str
    seed: int
    tables: Tables = field(default_factory=dict, compare=False)
    quick: bool = False

    @property
    def name(self) -> str:
        """Of its folder."""
        row = re.sub(r"[^\w.=+-]+", "-", self.row)
        return f"{self.dataset}_{self.setup}_{row}_s{self.seed}" + "_quick" * self.quick

    def config(self, directory: str = "", **run: Any) -> Config:
        """The whole configuration; `directory` has the data, `run` are settings of how it is executed."""
        own: Tables = {"data": {"dataset": self.dataset, "dir": directory}, "run": {"seed": self.seed, **run}}
        config = load_config(None, merge_all(own, self.tables))
        if not self.quick:
            return config
        train = replace(config.train, rounds=max(2, config.train.rounds // QUICK))
        return replace(config, train=train, run=replace(config.run, evaluate_every=1))


def cell(dataset: str, alpha: float, row: str, variant: str, seed: int, quick: bool = False) -> Cell:
    """The cell of a variant of a method (`pfedlms:thresholds=1`), also of one that takes as many bytes as another
    (`stc@sketchvote`)."""
    tables = merge_all({"data": {"alpha": alpha}}, tables_of(dataset, variant))
    return Cell(dataset, f"a{alpha:g}", row, seed, tables, quick)


def short_fedavg(dataset: str, alpha: float, rounds: int, seed: int) -> Cell:
    """FedAvg for that many rounds, every one of them evaluated."""
    base = cell(dataset, alpha, f"fedavg-rounds{rounds}", "fedavg", seed)
    return replace(base, tables=merge_all(base.tables, {"train": {"rounds": rounds}, "run": {"evaluate_every": 1}}))


def tables_of(dataset: str, variant: str) -> Tables:
    """The settings a variant stands for."""
    own, at, other = variant.partition("@")
    found, problems = variants(own)
    if problems or len(found) != 1:
        raise UsageError("\n".join(problems) or f"--methods: got {variant!r}, expected one method")
    tables = merge_all({"method": {"name": found[0].method}}, found[0].settings)
    if at:
        equal = at_the_bytes_of(dataset, found[0].method, tables_of(dataset, other)["method"])
        tables = merge_all(tables, {"method": equal})
    return tables


def merge_all(*tables: Mapping[str, Any]) -> Tables:
    merged: Tables = {}
    for own in tables:
        merged = merge(merged, own)
    return merged


def measures(config: Config) -> dict[str, Any]:
    """What of a configuration changes what is measured: all but where data lie and how it is executed."""
    run = {key: getattr(config.run, key) for key in OF_THE_RESULT}
    return {**settled(config), "rounds": config.train.rounds, **run}


def same_run(one: Config, other: Config) -> bool:
    return measures(one) == measures(other)
