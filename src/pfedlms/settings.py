"""Documented, bounded settings: one line declares default, meaning and limits of a field of a config dataclass."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import Field, field, fields
from functools import partial
from operator import ge, gt, le, lt
from sys import float_info
from typing import Any

from pfedlms.errors import did_you_mean

CUSTOM = "custom"
"""Stands in a configuration for data, a model, a loss or a metric that was given in Python."""
_TYPES: dict[str, tuple[type[Any], str]] = {
    "int": (int, "a whole number"),
    "float": (float, "a number"),
    "bool": (bool, "true or false"),
    "str": (str, "text"),
}
_LIMITS = {
    "minimum": (ge, "of at least {}"),
    "above": (gt, "above {}"),
    "maximum": (le, "at most {}"),
    "below": (lt, "below {}"),
}


def setting(
    default: Any,
    help: str,
    *,
    minimum: float | None = None,
    above: float | None = None,
    maximum: float | None = None,
    below: float | None = None,
    choices: Callable[[], list[str]] | Iterable[str] | None = None,
    hint: Callable[[str], str] | None = None,
    server_only: bool = False,
    optional: bool = False,
) -> Any:
    """A dataclass field that carries its meaning and its limits (at least `minimum`, strictly above `above`, at most
    `maximum`, strictly below `below`, one of `choices`, in which :N stands for any number after a colon and :PATH for
    any path). `hint` returns a question about a value that is none of the choices, or "".

    Only the server uses a `server_only` setting: clients need not agree on it, so it is not part of the digest. An
    `optional` setting is part of it only if it differs from its default: frames of runs without it have the bytes they
    had before the setting existed.
    """
    if choices is not None and not callable(choices):
        choices = partial(list, tuple(choices))
    limits = {"minimum": minimum, "above": above, "maximum": maximum, "below": below}
    marks = {"server_only": server_only, "optional": optional, "hint": hint}
    return field(default=default, metadata={"help": help, "choices": choices, "limits": limits, **marks})


def shared_settings(settings: Any) -> dict[str, Any]:
    """The values that server and clients must agree on: all fields but those that only the server uses, and those that
    are optional and at their defaults."""
    values = ((declared, getattr(settings, declared.name)) for declared in fields(settings))
    return {
        declared.name: value
        for declared, value in values
        if not declared.metadata.get("server_only")
        and not (declared.metadata.get("optional") and value == declared.default)
    }


def type_name(declared: Field[Any]) -> str:
    """The type of a field by name, whether its module postpones annotations or not."""
    return declared.type if isinstance(declared.type, str) else declared.type.__name__


def find_problems(
    section: str, cls: type[Any], values: dict[str, Any], nearest: Callable[[str, Iterable[str]], str] = did_you_mean
) -> list[str]:
    """Everything wrong with `values` as fields of the dataclass `cls`, one line each: key, got, expected; an unknown
    key is answered by `nearest`."""
    known = {each.name: each for each in fields(cls)}
    found = []
    for key, value in values.items():
        if key not in known:
            near = nearest(key, known) if known else "this section has no keys at all"
            found.append(f"{section}.{key}: unknown key; {near}")
        elif expected := _expectation(known[key], value):
            found.append(f"{section}.{key}: got {value!r}, expected {expected}")
    return found


def _expectation(declared: Field[Any], value: Any) -> str | None:
    """What is expected of a field that has not got it; None if `value` is fine."""
    kind, expected = _TYPES[type_name(declared)]
    limits, choices = declared.metadata["limits"], declared.metadata["choices"]
    bounds = [(limits[name], fits, text) for name, (fits, text) in _LIMITS.items() if limits[name] is not None]
    if bounds:
        expected += " " + " and ".join(text.format(bound) for bound, _, text in bounds)
    if isinstance(value, bool) != (kind is bool) or not isinstance(value, (int, float) if kind is float else kind):
        return expected
    # Neither NaN nor infinite, nor a whole number beyond the largest float.
    finite = kind is str or abs(value) <= float_info.max
    if not (finite and all(fits(value, bound) for bound, fits, _ in bounds)):
        return expected
    if choices is not None and not any(_is_choice(str(value), choice) for choice in choices()):
        known = ", ".join(choice for choice in choices() if choice != CUSTOM)  # users do not type that
        hint = declared.metadata["hint"]
        return "; ".join(filter(None, [f"one of: {known}", hint(str(value)) if hint else ""]))
    return None


def to_python_value(value: Any) -> Any:
    """A single number of NumPy or torch as Python's own; a `torch.device` as text; anything else as it is."""
    if type(value).__name__ == "device":
        return "cpu" if value.type == "cpu" else str(value)  # there is only one CPU
    single = hasattr(value, "item") and getattr(value, "ndim", None) == 0
    return value.item() if single else value


def _is_choice(value: str, choice: str) -> bool:
    stem, colon, placeholder = choice.partition(":")
    given, _, rest = value.partition(":")
    if not colon:
        return value == choice
    return given == stem and (rest.isdecimal() if placeholder == "N" else rest != "")


def parse(declared: Field[Any], text: str) -> Any:
    """The text of a command line as the type the field has, or as a list of such values where it has commas (a path may
    have them, too); left as text where it does not fit, so that the check names it."""
    kind, _ = _TYPES[type_name(declared)]
    if "," in text and (kind is not str or declared.metadata["choices"]):
        values = [parse(declared, part.strip()) for part in text.split(",") if part.strip()]
        if _expectation(declared, text) or not any(_expectation(declared, value) for value in values):
            return values
    try:
        return {"true": True, "false": False}[text.lower()] if kind is bool else kind(text)
    except (ValueError, KeyError):
        return text
