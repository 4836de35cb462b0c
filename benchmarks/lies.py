"""Clients that lie: their messages are changed before they are encoded, so that they are framed, checked and counted as
any others. N_k is always true."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pfedlms.cohort import Cohort, Tensors
from pfedlms.methods import Exchange, Method

ENORMOUS = 3e38  # nearly the largest float32
Lie = Callable[[Tensors], Tensors]
"""What liars would say, `[liars, …]`, to what they say instead."""


def lies_with(exchange: Exchange[Any], liars: tuple[int, ...], lie: Lie) -> None:
    """From now on these clients say in this exchange what `lie` makes of it."""
    honest = exchange.client_send

    def client_send(cohort: Cohort, round: int, work: Any) -> tuple[Cohort, Tensors]:
        after, values = honest(cohort, round, work)
        rows = [row for row, client in enumerate(cohort.ids) if client in liars]
        if not rows:
            return after, values
        said = {name: value.clone() for name, value in values.items()}
        for name, value in lie({name: value[rows] for name, value in values.items()}).items():
            said[name][rows] = value.to(said[name].dtype)
        return after, said

    exchange.client_send = client_send  # type: ignore[method-assign]


def told(field: str, number: float) -> Lie:
    """The same number everywhere in a field."""
    return lambda said: {field: torch.full_like(said[field], number)}


def times(field: str, factor: float) -> Lie:
    return lambda said: {field: said[field] * factor}


def other_signs(count: int) -> Lie:
    """Every sign of `count` flipped; they are bits, and those behind the last stay zero."""

    def flipped(said: Tensors) -> Tensors:
        signs = ~said["signs"]
        if count % 8:
            signs[:, -1] &= (1 << count % 8) - 1
        return {"signs": signs}

    return flipped


def turned(exchange: Exchange[Any], start: Tensor, factor: float = 1) -> Lie:
    """w − factor (θ − w) instead of θ, by who hears w in `exchange` and begins with w⁰ = `start`."""
    heard, honest = {"model": start}, exchange.client_receive

    def client_receive(cohort: Cohort, values: Tensors, round: int) -> Cohort:
        heard["model"] = values["model"]
        return honest(cohort, values, round)

    exchange.client_receive = client_receive  # type: ignore[method-assign]

    def opposite(said: Tensors) -> Tensors:
        w = heard["model"].to(said["model"].device)
        return {"model": w - factor * (said["model"] - w)}

    return opposite


def enormous(method: Method, liars: tuple[int, ...], field: str) -> None:
    """These clients say the largest numbers they can in `field`; with a variance, a mean of zero."""
    (exchange,) = (each for each in method.exchanges if field in [part.name for part in each.up.fields])
    mean = told("mean", 0) if field == "variance" else lambda said: {}
    lies_with(exchange, liars, lambda said: {**told(field, ENORMOUS)(said), **mean(said)})


def flipped(method: Method, liars: tuple[int, ...]) -> None:
    """These clients say the opposite of what they have learnt."""
    exchange = method.exchanges[-1]
    if method.name == "fedavg":
        lie = turned(exchange, method.task.initial)
    elif method.name == "pfedlms":
        lie = lambda said: {"symbols": method.settings.thresholds - said["symbols"]}  # noqa: E731
    elif method.name == "stc":
        lie = lambda said: {"signs": -said["signs"]}  # noqa: E731
    else:
        assert method.sketched is not None
        lie = other_signs(sum(method.sketched[1]))
    lies_with(exchange, liars, lie)
