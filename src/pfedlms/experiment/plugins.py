"""Methods and models of the user's own, by name: from installed packages (entry points of the groups `pfedlms.methods`
and `pfedlms.models`) and from modules that `--import` names."""

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
"""Modules that were imported by name; worker processes of a study import them, too."""


def import_modules(names: Iterable[str]) -> None:
    """Import modules, which register their methods and models; also those beside the user, in the working folder."""
    for name in names:
        if str(Path.cwd()) not in sys.path:
            sys.path.insert(0, str(Path.cwd()))
        try:
            import_module(name)
        except Exception as error:  # it is the user's own code and may raise anything
            missing = isinstance(error, ModuleNotFoundError) and f"{name}.".startswith(f"{error.name}.")
            if missing or not all(part.isidentifier() for part in name.split(".")):
                expected = "expected the name of a module, my_methods for my_methods.py"
                wrong = f"cannot be imported ({reason(error)}); {expected}"
            else:
                wrong = f"is there, but fails when it is imported ({reason(error)})"
            raise UsageError(f"--import: {name!r} {wrong}") from error
        if name not in IMPORTED_MODULES:
            IMPORTED_MODULES.append(name)


@cache
def installed_entry_points(group: str, path: tuple[str, ...]) -> tuple[Any, ...]:
    """The entry points of a group on an import path: reading them takes 20 ms, and every configuration asks."""
    return tuple(entry_points(group=group))


def find_method(name: Any) -> type[Method] | None:
    """The method of that name; one that is not known yet is looked for among installed packages."""
    if not isinstance(name, str):
        return None
    if name not in METHODS:
        for point in (each for each in installed_entry_points("pfedlms.methods", tuple(sys.path)) if each.name == name):
            found = _load(point)
            if not (_is_method(found) and found.name == name):
                raise UsageError(f"method.name: {point.value} gave {found!r}, expected a Method whose name is {name!r}")
            register(found)
    return METHODS.get(name)


def _is_method(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, Method)


def load_plugins(methods: bool = True) -> None:
    """Models of installed packages, functions of (shape, classes, hidden) that return a module, are added to the zoo;
    all methods, too, where they are to be listed."""
    for point in installed_entry_points("pfedlms.methods", tuple(sys.path)) if methods else ():
        find_method(point.name)
    for point in installed_entry_points("pfedlms.models", tuple(sys.path)):
        if point.name not in MODELS:
            built = _load(point)
            MODELS[point.name] = built if isinstance(built, Entry) else Entry(f"of {point.value}", built)


def _load(point: Any) -> Any:
    try:
        return point.load()
    except Exception as error:  # somebody else's package
        raise UsageError(f"{point.group}: {point.name} = {point.value} cannot be loaded ({reason(error)})") from error


def find_object(text: str) -> Any:
    """The object that `module:name` means."""
    module, colon, name = text.partition(":")
    import_modules([module])
    found = getattr(sys.modules[module], name, None) if colon else None
    if found is None and name:
        own = [
            key for key, value in vars(sys.modules[module]).items() if _is_method(value) and value.__module__ == module
        ]
        raise UsageError(f"module {module} has no class {name}; its methods: {', '.join(own) or 'none'}")
    if found is None:
        raise UsageError(f"got {text!r}, expected MODULE:CLASS, my_methods:FedProx for instance")
    return found
