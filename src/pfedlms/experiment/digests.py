"""Digests of what is given in Python: by them a later call tells its model, loss, metric and method from those of a
run."""

from __future__ import annotations

import dis
import hashlib
import sys
from collections.abc import Iterator, Mapping
from functools import partial
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.parameter import is_lazy

_CONSTANTS = (str, int, float, complex, bytes, tuple, frozenset, torch.Tensor, np.ndarray)
_DEPTH = 8  # how far objects inside objects are followed


def digest(part: Any, weights: bool = True) -> str:
    """A short digest of a module, a function or another object: of its code, and of the values that it holds. It is the
    same in every process with the same version of Python. Without `weights`, parameters of modules are left out."""
    return _hash(repr(_describe(part, weights)).encode())[:12]


def class_digest(kind: type) -> str:
    """A short digest of the code of a class of the user's own, of its bases and attributes, and of what they use of the
    modules that these are in: classes, functions and constants. "" for a class of this package."""
    modules = {kind.__module__} if _is_own(kind) else set[str]()
    found: list[tuple[str, str]] = []
    seen, waiting = set[int](), list[Any]([kind])
    while waiting:
        part = waiting.pop()
        if part.__module__ in modules and id(part) not in seen:
            seen.add(id(part))
            used = list(_used_by_class(part) if isinstance(part, type) else _used_by_function(part))
            parts = [value for _, value in used if isinstance(value, type | FunctionType)]
            waiting += parts
            constants = [(name, value) for name, value in used if isinstance(value, _CONSTANTS)]
            if isinstance(part, type):  # its exchange and its functions may be of another module
                modules |= {each.__module__ for each in parts if _is_own(each)}
                code: Any = [each.__qualname__ for each in part.__bases__]
            else:
                without_docstring = tuple(each for each in part.__code__.co_consts if each != part.__doc__)
                code = part.__code__.replace(co_consts=without_docstring)
            found.append((part.__qualname__, repr(_describe((code, constants), True))))
    return _hash(repr(sorted(found)).encode())[:12] if found else ""


def _is_own(part: Any) -> bool:
    """Whether a class or function is of the user's own. An abstract class that `type` made says that it is of `abc`."""
    package = str(part.__module__).partition(".")[0]
    return package in ("__main__", "abc") or package not in ("pfedlms", *sys.stdlib_module_names)


def _used_by_class(kind: type) -> Iterator[tuple[str, Any]]:
    """Bases, functions and other attributes of a class, without what Python adds to it."""
    yield from ((each.__qualname__, each) for each in kind.__bases__)
    for name, value in vars(kind).items():
        function = getattr(value, "__func__", None) or getattr(value, "fget", None) or getattr(value, "func", value)
        if isinstance(function, FunctionType) or not name.startswith("_"):
            yield name, function


def _used_by_function(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """What a function finds by name: defaults, variables of the function around it, and of its module."""
    yield from (("defaults", function.__defaults__), *(function.__kwdefaults__ or {}).items())
    yield from zip(function.__code__.co_freevars, map(_contents, function.__closure__ or ()), strict=True)
    codes = [function.__code__]
    for code in codes:  # which grows by the functions inside
        codes += [each for each in code.co_consts if isinstance(each, CodeType)]
        # Names of attributes are in co_names, too: `cohort.params` does not use a variable `params` of a notebook.
        names = {each.argval for each in dis.get_instructions(code) if each.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
        yield from ((name, function.__globals__[name]) for name in sorted(names & function.__globals__.keys()))


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _describe(part: Any, weights: bool, above: tuple[int, ...] = ()) -> Any:
    """What a digest is of. `above` are the ids of the objects that `part` is in; an object may hold one of these."""

    def inside(*parts: Any) -> list[Any]:
        return [_describe(each, weights, (*above, id(part))) for each in parts]

    if isinstance(part, str | int | float | complex | bytes | None):
        return part
    name = getattr(part, "__qualname__", None)
    # An object may answer anything when it is asked for an attribute.
    name = (name if isinstance(name, str) else type(part).__qualname__).rpartition("<locals>.")[2]
    if len(above) == _DEPTH or id(part) in above or isinstance(part, type):
        return name
    if isinstance(part, torch.Tensor):
        values = part.detach().cpu()
        # NumPy has no bfloat16 and no floats of 8 bits.
        part = (values.float() if values.is_floating_point() and values.itemsize < 4 else values).numpy()
    if isinstance(part, np.ndarray | np.generic):
        array = np.asarray(part)
        return str(array.dtype), array.shape, _hash(array.tobytes())
    if isinstance(part, Mapping):
        return {str(key): inside(value) for key, value in part.items()}
    if isinstance(part, set | frozenset):
        return sorted(map(repr, inside(*part)))
    if isinstance(part, list | tuple):
        return inside(*part)
    if isinstance(part, CodeType):
        return part.co_code, part.co_names, inside(*part.co_consts)
    if isinstance(part, FunctionType):
        cells = [_contents(cell) for cell in part.__closure__ or ()]
        return name, inside(part.__code__, part.__defaults__, part.__kwdefaults__, cells)
    if isinstance(part, MethodType):
        return inside(part.__func__, part.__self__)
    if isinstance(part, partial):
        return inside(part.func, part.args, part.keywords)
    if isinstance(part, nn.Module):
        layers = part.named_modules()
        return {path: (type(layer).__qualname__, *inside(*_parts(layer, weights))) for path, layer in layers}
    call = getattr(type(part), "__call__", None)  # noqa: B004 - the function itself, where it is one of Python
    return name, inside(call if isinstance(call, FunctionType) else None, getattr(part, "__dict__", {}))


def _contents(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # nothing was assigned to this variable
        return None


def _parts(layer: nn.Module, weights: bool) -> tuple[Any, ...]:
    """The code of a module, unless it is one of PyTorch's, its attributes, and its own parameters and buffers."""
    is_custom = not type(layer).__module__.startswith("torch.")
    attributes = {key: value for key, value in vars(layer).items() if not key.startswith("_") and key != "training"}
    tensors = [*layer.parameters(recurse=False), *layer.buffers(recurse=False)] if weights else []
    return type(layer).forward if is_custom else None, attributes, [each for each in tensors if not is_lazy(each)]
