"""The numbers that the paper prints."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Printed:
    """An accuracy or cost of the paper; its standard deviation where the paper gives one."""

    mean: float
    deviation: float = 0.0


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
