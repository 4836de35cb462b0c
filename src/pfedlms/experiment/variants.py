"""Methods to compare, each as it is or with settings of its own: `pfedlms`, `pfedlms:thresholds=1`,
`stc:sparsity=0.05:sparsity_down=0.1`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from pfedlms.errors import did_you_mean
from pfedlms.experiment.config import TrainSection
from pfedlms.experiment.layers import Tables, merge
from pfedlms.methods import METHODS
from pfedlms.settings import parse

EXPECTED = "expected methods like fedavg, pfedlms:thresholds=1 or stc:sparsity=0.05:sparsity_down=0.1"
_OF_ALL = ("rounds", "participation")
"""Keys of [train] that are the same for all who are compared."""


@dataclass(frozen=True)
class Variant:
    """A method with settings of its own."""

    name: str
    """The text given; names its row, its folders and its line in a plot."""
    method: str
    settings: Tables
    """By section and key."""


def variants(given: Any) -> tuple[list[Variant], list[str]]:
    """Those that `given` names, and everything wrong with it.

    `given` is a text with commas, or a sequence of texts and of pairs (method, {key: value}).
    """
    if isinstance(given, str):
        given = [given]
    if not isinstance(given, Iterable) or isinstance(given, Mapping | bytes):
        return [], [f"--methods: got {given!r}, {EXPECTED}"]
    found: list[Variant] = []
    problems: list[str] = []
    for each in given:
        if isinstance(each, str):
            texts = [text.strip() for text in each.split(",") if text.strip()]
        elif isinstance(each, Sequence) and len(each) == 2 and isinstance(each[1], Mapping):
            texts = [":".join([str(each[0]), *(f"{key}={_text(value)}" for key, value in each[1].items())])]
        else:
            problems.append(f"--methods: got {each!r}, {EXPECTED}")
            continue
        for text in texts:
            made, wrong = _variant(text)
            found.append(made)
            problems += wrong
    names = [each.name for each in found]
    if not names and not problems:
        problems.append("--methods: got none, expected at least one name")
    if len(set(names)) < len(names):
        problems.append(f"--methods: got {','.join(names)}, expected every method once; settings tell variants apart")
    return found, problems


def _variant(text: str) -> tuple[Variant, list[str]]:
    method, *assignments = (part.strip() for part in text.split(":"))
    tables: Tables = {}
    problems: list[str] = []
    if method not in METHODS:
        return Variant(text, method, tables), problems  # the check of its configuration reports it
    known = {("train", each.name): each for each in fields(TrainSection) if each.name not in _OF_ALL}
    known |= {("method", each.name): each for each in fields(METHODS[method].Settings)}
    places = {key: (section, key) for section, key in known} | {f"{s}.{k}": (s, k) for s, k in known}
    for assignment in assignments:
        key, equals, value = (part.strip() for part in assignment.partition("="))
        if not equals:
            problems.append(f"--methods: got {text!r}, expected {method}:key=value")
        elif key not in places:
            near = did_you_mean(key, [key for _, key in known])
            problems.append(f"--methods: got {text!r}, but {key} is no setting that {method} can have alone; {near}")
        else:
            section, key = places[key]
            tables = merge(tables, {section: {key: parse(known[section, key], value)}})
    return Variant(":".join([method, *assignments]), method, tables), problems


def _text(value: Any) -> str:
    """As it would be written on the command line."""
    return str(value).lower() if isinstance(value, bool) else str(value)
