"""The paper's numbers, as its tables have them."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any


@dataclass(frozen=True)
class Printed:
    """An accuracy or cost of the paper; its standard deviation where the paper gives one."""

    mean: float
    deviation: float = 0.0


@cache
def paper() -> dict[str, Any]:
    text = (resources.files("pfedlms") / "reproduce" / "paper.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


def printed(section: str, row: str, dataset: str) -> Printed | None:
    """What a table of the paper with a column a data set says; None where it says nothing."""
    own = paper()[section]
    if row not in own or dataset not in own["columns"]:
        return None
    value = own[row][own["columns"].index(dataset)]
    return Printed(*value) if isinstance(value, list) else Printed(value)


def along(section: str, axis: str, value: float, dataset: str) -> Printed | None:
    """What a figure of the paper with a line a data set says at one value of its axis."""
    own = paper()[section]
    if dataset not in own or value not in own[axis]:
        return None
    return Printed(own[dataset][own[axis].index(value)])
