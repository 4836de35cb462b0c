"""The tensors inside an objective: found, replaced, and kept in step with the clients of a cohort."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor

from pfedlms.methods.contract import Objective, PerClient

Leaf = Tensor | PerClient


def attributes(value: Any) -> dict[str, Any] | None:
    """What is set on an object, without what it has computed from that and keeps (`cached_property`); None for what
    cannot be looked into."""
    if isinstance(value, type) or callable(value) or not hasattr(value, "__dict__"):
        return None
    kind: Any = type(value)
    kept = _kept(kind)
    return {name: entry for name, entry in vars(value).items() if name not in kept}


@lru_cache(maxsize=256)
def _kept(kind: Any) -> frozenset[str]:
    """The names under which objects of a class keep what they have computed."""
    names = (name for each in kind.__mro__ for name, own in vars(each).items() if isinstance(own, cached_property))
    return frozenset(names)


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Leaf]]:
    """Every tensor inside `value` with its path, in the order of `changed`."""
    if isinstance(value, Tensor | PerClient):
        yield path, value
    elif isinstance(value, int | float | str):
        return
    elif isinstance(value, list | tuple):
        for index, entry in enumerate(value):
            yield from leaves(entry, f"{path}[{index}]")
    elif isinstance(value, dict):
        for key, entry in value.items():
            yield from leaves(entry, f"{path}[{key!r}]")
    elif (own := attributes(value)) is not None:
        for name, entry in own.items():
            yield from leaves(entry, f"{path}.{name}" if path else name)


def changed(value: Any, change: Callable[[Leaf], Leaf], fresh: bool = False) -> Any:
    """`value` with `change` applied to every tensor inside. Objects in which nothing changes stay themselves; with
    `fresh` all are copied, without what they have computed and keep."""
    if isinstance(value, Tensor | PerClient):
        return change(value)
    if isinstance(value, list | tuple):
        entries = [changed(entry, change, fresh) for entry in value]
        if not fresh and all(new is old for new, old in zip(entries, value, strict=True)):
            return value
        return type(value)(*entries) if hasattr(value, "_fields") else type(value)(entries)
    if isinstance(value, dict):
        values = {key: changed(entry, change, fresh) for key, entry in value.items()}
        return values if fresh or any(values[key] is not value[key] for key in value) else value
    if (own := attributes(value)) is None:
        return value
    values = {name: changed(entry, change, fresh) for name, entry in own.items()}
    if not fresh and all(values[name] is own[name] for name in own):
        return value
    copy = object.__new__(type(value))
    for name, entry in values.items():
        object.__setattr__(copy, name, entry)
    return copy


def splitter(objective: Objective) -> Callable[[slice], Objective]:
    """The objective of some rows of the cohort it was made for."""
    if not any(isinstance(leaf, PerClient) for _, leaf in leaves(objective)):
        return lambda rows: objective
    return lambda rows: changed(
        objective, lambda leaf: PerClient(leaf.value[rows]) if isinstance(leaf, PerClient) else leaf
    )


def filled_up(objective: Objective, clients: int) -> Objective:
    """The objective of a cohort that is filled up to `clients` with copies of its last client."""

    def longer(leaf: Leaf) -> Leaf:
        if not isinstance(leaf, PerClient):
            return leaf
        rows = leaf.value
        return PerClient(torch.cat([rows, rows[-1:].expand(clients - len(rows), *rows.shape[1:])]))

    result: Objective = changed(objective, longer)
    return result
