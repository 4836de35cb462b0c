"""Layers of values by section and key: what stands in TOML files, shipped ones too, and how one lies on top of
another."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from pfedlms.data.sources import DATASETS
from pfedlms.errors import ConfigError
from pfedlms.methods import METHODS

Tables = dict[str, dict[str, Any]]

RELATIVES = {"svhn": "cifar10", "cifar100": "cifar10"}
"""Data sets on which methods' settings were not chosen, and the one whose they take: images and models are alike."""


def merge(base: Mapping[str, Any], top: Mapping[str, Any]) -> Tables:
    """Both, key by key; where both have one, that of `top`."""
    merged = dict(base)
    for key, value in top.items():
        below = merged.get(key, {})
        merged[key] = {**below, **value} if isinstance(below, Mapping) and isinstance(value, Mapping) else value
    return merged


def read_toml(path: Path) -> Tables:
    """A TOML file as tables; raises ConfigError where it cannot be read."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError([f"{path}: cannot be read ({error.strerror})"]) from error
    except (ValueError, RecursionError) as error:  # bad syntax, bad UTF-8, thousands of digits, deep nesting
        raise ConfigError([f"{path}: not a TOML file: {error}"]) from error


def given_in(tables: Mapping[str, Any], section: str, key: str, default: str) -> Any:
    """One value that others depend on; a section that is no table is reported by the check."""
    values = tables.get(section, {})
    return values.get(key, default) if isinstance(values, Mapping) else default


def under_own_name(tables: Mapping[str, Any], method: Any) -> Tables:
    """With what stands in a section of the method's own name, `[pfedlms]`, on top of the section [method]."""
    own = tables.get(method) if isinstance(method, str) and method in METHODS else None
    if own is None or not isinstance(tables.get("method", {}), Mapping):
        return dict(tables)
    return merge({name: values for name, values in tables.items() if name != method}, {"method": own})


def preset(dataset: Any, method: Any) -> Tables:
    """Shipped defaults for a data set, then those for a method on its relative, then on itself."""
    tables: Tables = {}
    if not isinstance(dataset, str) or dataset not in DATASETS:
        return tables
    folder = resources.files("pfedlms") / "configs"
    for stem in (dataset, f"{RELATIVES.get(dataset)}-{method}", f"{dataset}-{method}"):
        file = folder / f"{stem}.toml"
        if file.is_file():
            tables = merge(tables, tomllib.loads(file.read_text(encoding="utf-8")))
    tables.pop("schema", None)
    return tables


def as_toml(value: Any) -> str:
    """As JSON writes it, but for the one character that TOML wants escaped and JSON does not."""
    if isinstance(value, str):
        # Bytes of a path that are no UTF-8 (lone surrogates in Python) have no place in TOML; "?" keeps it readable.
        value = value.encode(errors="replace").decode()
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
