"""Documented, bounded settings: one line declares default, meaning and limits of a field of a config dataclass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import Field, field, fields
from math import isfinite
from typing import Any

from pfedlms.errors import did_you_mean

_TYPES = {"int": int, "float": float, "bool": bool, "str": str}


def setting(
    default: Any,
    help: str,
    *,
    minimum: float | None = None,
    above: float | None = None,
    maximum: float | None = None,
    choices: Callable[[], list[str]] | None = None,
) -> Any:
    """A dataclass field that carries its meaning and its limits (at least `minimum`, strictly above `above`, at most
    `maximum`, one of `choices`)."""
    limits = {"minimum": minimum, "above": above, "maximum": maximum}
    return field(default=default, metadata={"help": help, "limits": limits, "choices": choices})


def type_name(declared: Field[Any]) -> str:
    """The type of a field by name, whether its module postpones annotations or not."""
    return declared.type if isinstance(declared.type, str) else declared.type.__name__


def problems(section: str, cls: type[Any], values: dict[str, Any]) -> list[str]:
    """Everything wrong with `values` as fields of the dataclass `cls`, one line each: key, got, expected, nearest
    valid name."""
    known = {each.name: each for each in fields(cls)}
    found = []
    for key, value in values.items():
        if key not in known:
            names = ", ".join(known) or "no keys at all"
            found.append(
                f"{section}.{key}: unknown key; {did_you_mean(key, known) if known else f'this section has {names}'}"
            )
        elif wrong := _wrong(known[key], value):
            found.append(f"{section}.{key}: got {value!r}, expected {wrong}")
    return found


def _wrong(declared: Field[Any], value: Any) -> str | None:
    kind = _TYPES[type_name(declared)]
    limits, choices = declared.metadata["limits"], declared.metadata["choices"]
    expected = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}[kind]
    bounds = [text.format(limits[name]) for name, text in _BOUNDS.items() if limits[name] is not None]
    expected += f" {' and '.join(bounds)}" if bounds else ""
    fits = isinstance(value, bool) == (kind is bool) and isinstance(value, (int, float) if kind is float else kind)
    if not fits:
        return expected
    if kind in (int, float) and not (_finite(value) and _within(value, limits)):
        return expected
    if choices is not None and value not in choices():
        # 'custom' stands for objects given in Python; nobody types it.
        shown = [choice for choice in choices() if choice != "custom"]
        near = did_you_mean(value, shown)
        return f"one of: {', '.join(shown)}" + (f"; {near}" if near.startswith("did") else "")
    return None


_BOUNDS = {"minimum": "of at least {}", "above": "above {}", "maximum": "at most {}"}


def _finite(value: float) -> bool:
    try:
        return isfinite(value)
    except OverflowError:  # a whole number beyond the largest float
        return False


def _within(value: float, limits: dict[str, float | None]) -> bool:
    minimum, above, maximum = limits["minimum"], limits["above"], limits["maximum"]
    return (
        (minimum is None or value >= minimum)
        and (above is None or value > above)
        and (maximum is None or value <= maximum)
    )


def parse(cls: type[Any], key: str, text: str) -> Any:
    """The text of a command line as the type the key has; left as text where it does not fit, so that the check names
    it."""
    declared = {each.name: type_name(each) for each in fields(cls)}.get(key, "str")
    try:
        if declared == "bool":
            return {"true": True, "false": False}[text.lower()]
        return _TYPES[declared](text)
    except (ValueError, KeyError):
        return text
