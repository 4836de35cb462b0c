"""Cells: the settings of one row of a table on one data set, by the name of its variant, also for methods at each
other's bytes."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from functools import cache
from typing import Any

import pfedlms
from pfedlms.errors import UsageError

Settings = dict[str, dict[str, Any]]
"""By section and key."""
QUICK = 10
"""How many times fewer rounds a quick look has."""
RATES = {"stc": "sparsity", "pfed1bs": "ratio", "pfedlms": "ratio", "sketchvote": "ratio"}
"""The setting that decides how large messages are."""
PULLS = ("pfedlms", "pfed1bs")
"""Methods whose `strength` is λ, the weight of a pull on sketched coordinates."""
TOLERANCE = 0.005  # of the bytes of a round
ENTRY_BYTES = 4  # one entry more, up and down: sizes cannot agree more closely


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


def cost(dataset: str, method: str, **settings: Any) -> dict[str, Any]:
    """The row of `pfedlms bits` for a method with the model that is shipped for a data set."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of settings that would not train well; nothing is trained here
        return pfedlms.bits_table({"data": {"dataset": dataset}, "method": {"name": method, **settings}})[0]


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
    if method not in PULLS:
        return {RATES[method]: rate}
    shipped = pfedlms.load_config(None, {"data": {"dataset": dataset}, "method": {"name": method}}).settings
    return {"ratio": rate, "strength": shipped.strength * min(1.0, rate / shipped.ratio)}


@cache
def equal_rate(dataset: str, method: str, wanted: int) -> float:
    """The rate at which one client's messages of one round have `wanted` bytes."""
    key, dim = RATES[method], int(cost(dataset, method)["parameters"])

    def share(count: int) -> float:
        return (count + 0.5) / dim  # in the middle: rounding removes no entry

    low, high = 1, dim - 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if taken(dataset, method, **{key: share(middle)}) <= wanted else (low, middle)
    off = {rate: abs(taken(dataset, method, **{key: rate}) - wanted) for rate in (share(low), share(high))}
    best = min(off, key=lambda rate: off[rate])
    if off[best] > max(TOLERANCE * wanted, ENTRY_BYTES):
        raise UsageError(f"{method}: no {key} takes {wanted} bytes a round on {dataset}, within {TOLERANCE:.1%}")
    return best
