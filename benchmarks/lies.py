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
    """From now on these clients send in this exchange what `lie` makes of their values."""
    honest = exchange.client_send

    def client_send(cohort: Cohort, round: int, work: Any) -> tuple[Cohort, Tensors]:
        after, values = honest(cohort, round, work)
        rows = [row for row, client in enumerate(cohort.ids) if client in liars]
        if not rows:
            return after, values
        values = {name: value.clone() for name, value in values.items()}
        for name, value in lie({name: value[rows] for name, value in values.items()}).items():
            values[name][rows] = value.to(values[name].dtype)
        return after, values

    exchange.client_send = client_send  # type: ignore[method-assign]


def constant(field: str, number: float) -> Lie:
    """The same number everywhere in a field."""
    return lambda values: {field: torch.full_like(values[field], number)}


def times(field: str, factor: float) -> Lie:
    return lambda values: {field: values[field] * factor}


def other_signs(count: int) -> Lie:
    """Every sign of `count` flipped; they are bits, and those behind the last stay zero."""

    def flipped(values: Tensors) -> Tensors:
        signs = ~values["signs"]
        if count % 8:
            signs[:, -1] &= (1 << count % 8) - 1
        return {"signs": signs}

    return flipped


def turned(exchange: Exchange[Any], start: Tensor, factor: float = 1) -> Lie:
    """w − factor (θ − w) instead of θ, by a client that receives w in `exchange` and begins with w⁰ = `start`."""
    heard, honest = {"model": start}, exchange.client_receive

    def client_receive(cohort: Cohort, values: Tensors, round: int) -> Cohort:
        heard["model"] = values["model"]
        return honest(cohort, values, round)

    exchange.client_receive = client_receive  # type: ignore[method-assign]

    def opposite(values: Tensors) -> Tensors:
        w = heard["model"].to(values["model"].device)
        return {"model": w - factor * (values["model"] - w)}

    return opposite


def enormous(method: Method, liars: tuple[int, ...], field: str) -> None:
    """These clients say the largest numbers they can in `field`; with a variance, a mean of zero."""
    (exchange,) = (each for each in method.exchanges if field in [part.name for part in each.up.fields])
    mean = constant("mean", 0) if field == "variance" else lambda values: {}
    lies_with(exchange, liars, lambda values: {**constant(field, ENORMOUS)(values), **mean(values)})


def flipped(method: Method, liars: tuple[int, ...]) -> None:
    """These clients say the opposite of what they have learnt."""
    exchange = method.exchanges[-1]
    if method.name == "fedavg":
        lie = turned(exchange, method.task.initial)
    elif method.name == "pfedlms":
        lie = lambda values: {"symbols": method.settings.thresholds - values["symbols"]}  # noqa: E731
    elif method.name == "stc":
        lie = lambda values: {"signs": -values["signs"]}  # noqa: E731
    else:
        assert method.sketched is not None
        lie = other_signs(sum(method.sketched[1]))
    lies_with(exchange, liars, lie)
