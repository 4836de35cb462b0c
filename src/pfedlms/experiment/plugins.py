"""The user's own methods and models, found by name: in installed packages (entry points of the groups
`pfedlms.methods` and `pfedlms.models`) and in modules that `--import` names."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from pfedlms.errors import UsageError, reason
from pfedlms.methods import METHODS, Method, register
from pfedlms.models.zoo import MODELS, Entry

IMPORTED_MODULES: list[str] = []
"""Modules that `--import` named; worker processes of a study import them, too."""


def import_modules(names: Iterable[str]) -> None:
    """Import modules, which register their methods and models; also modules in the working folder."""
    for name in names:
        if str(Path.cwd()) not in sys.path:
            sys.path.insert(0, str(Path.cwd()))
        try:
            import_module(name)
        except Exception as error:  # it is the user's own code and may raise anything
            raise UsageError(f"--import: the module {name!r} cannot be imported ({reason(error)})") from error
        if name not in IMPORTED_MODULES:
            IMPORTED_MODULES.append(name)


@cache
def installed_entry_points(group: str, path: tuple[str, ...]) -> tuple[Any, ...]:
    """The entry points of a group on an import path, cached: reading them takes 20 ms, and every configuration asks."""
    return tuple(entry_points(group=group))


def find_method(name: Any) -> type[Method] | None:
    """The method of that name, if need be from an installed package; None if there is none."""
    if not isinstance(name, str):
        return None
    if name not in METHODS:
        for point in installed_entry_points("pfedlms.methods", tuple(sys.path)):
            if point.name == name:
                register(point.load())
    return METHODS.get(name)


def load_plugins(methods: bool = True) -> None:
    """Add the models of installed packages, functions of (shape, classes, hidden) that return a module, to the zoo;
    with `methods`, register their methods, too."""
    for point in installed_entry_points("pfedlms.methods", tuple(sys.path)) if methods else ():
        find_method(point.name)
    for point in installed_entry_points("pfedlms.models", tuple(sys.path)):
        if point.name not in MODELS:
            built = point.load()
            MODELS[point.name] = built if isinstance(built, Entry) else Entry(f"of {point.value}", built)


def find_object(text: str) -> Any:
    """The object that `module:name` names."""
    module, _, name = text.partition(":")
    import_modules([module])
    value = getattr(sys.modules[module], name, None)
    if value is None:
        raise UsageError(f"got {text!r}, expected MODULE:CLASS; the module {module} has no class {name!r}")
    return value
