"""Cells: the settings of one row of a table on one data set, by the name of its variant."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pfedlms
from papers.pfedlms.equal_bytes import at_the_bytes_of

Settings = dict[str, dict[str, Any]]
"""By section and key."""
QUICK = 10
"""How many times fewer rounds a quick look has."""


def merged(*layers: Mapping[str, Mapping[str, Any]]) -> Settings:
    """All settings; where several layers have one, the last layer's value."""
    found: Settings = {}
    for layer in layers:
        for section, values in layer.items():
            found[section] = {**found.get(section, {}), **values}
    return found


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
    settings = merged({"data": {"dataset": dataset, "alpha": alpha}}, settings_of(dataset, variant))
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
