"""Digests of what is given in Python: by them a later call tells its model, loss, metric and method from those of a
run."""

from __future__ import annotations

import dis
import hashlib
import sys
from collections.abc import Iterable, Mapping
from functools import partial
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.parameter import is_lazy

_PLAIN = str | int | float | complex | bytes | None
_CONSTANTS = (str, int, float, complex, bytes, tuple, frozenset, torch.Tensor, np.ndarray)
_OTHER_PACKAGES = ("pfedlms", "torch", "numpy", *(sys.stdlib_module_names - {"abc"}))  # `type` makes classes of abc


def digest(part: Any, weights: bool = True) -> str:
    """A short digest of a module, a function, a class or another object: of the user's own code in it, and of the
    values that it holds. It is the same in every process with the same version of Python. Without `weights`, parameters
    of modules are left out."""
    objects: list[Any] = []
    numbers: dict[int, int] = {}

    def refer(value: Any) -> Any:
        """A value itself, or the number of an object, which is described once, since objects may hold each other."""
        if isinstance(value, _PLAIN):
            return value
        if isinstance(value, tuple):
            return tuple(map(refer, value))
        if isinstance(value, torch.Tensor | np.ndarray | np.generic):
            return str(value.dtype), tuple(value.shape), _hash(value)
        if id(value) not in numbers:
            numbers[id(value)] = len(objects)
            objects.append(value)
        return "object", numbers[id(value)]

    described = [refer(part)]
    # `objects` grows by the objects inside while it is read.
    described += [(_name(each), [refer(value) for value in _parts(each, weights)]) for each in objects]
    return hashlib.sha256(repr(described).encode()).hexdigest()[:12]


def is_own(part: Any) -> bool:
    """Whether a class or function is of the user's own. Those of Python, PyTorch and NumPy are known by their names."""
    return str(part.__module__).partition(".")[0] not in _OTHER_PACKAGES


def _hash(values: Any) -> str:
    if isinstance(values, torch.Tensor):
        values = values.detach().cpu().reshape(-1).contiguous().view(torch.uint8).numpy()  # NumPy has no bfloat16
    return hashlib.sha256(values.tobytes()).hexdigest()


def _name(part: Any) -> str:
    name = getattr(part, "__name__", None)
    return name if isinstance(name, str) else type(part).__name__  # an object may answer anything


def _parts(part: Any, weights: bool) -> Iterable[Any]:
    """What an object consists of."""
    if isinstance(part, list):
        return part
    if isinstance(part, set | frozenset):
        return sorted(repr(value) for value in part if isinstance(value, _PLAIN | tuple))
    if isinstance(part, Mapping):
        return part.items()
    if isinstance(part, MethodType):
        return part.__func__, part.__self__
    if isinstance(part, partial):
        return part.func, part.args, part.keywords
    if isinstance(part, CodeType):
        return part.co_code, part.co_names, part.co_consts
    if isinstance(part, FunctionType):
        return _parts_of_function(part) if is_own(part) else ()
    if isinstance(part, type):
        return (part.__bases__, _attributes(part)) if is_own(part) else ()
    values = getattr(part, "__dict__", {})
    if isinstance(part, nn.Module):
        values = {key: value for key, value in values.items() if not key.startswith("_") and key != "training"}
        tensors = [*part.parameters(recurse=False), *part.buffers(recurse=False)] if weights else []
        return type(part), values, dict(part.named_children()), [each for each in tensors if not is_lazy(each)]
    if not is_own(type(part)):  # a logger, for instance, holds all others
        values = {key: value for key, value in values.items() if isinstance(value, _PLAIN)}
    return type(part), values


def _parts_of_function(function: FunctionType) -> Iterable[Any]:
    """Its code without the docstring, defaults, variables of the function around it, and what it uses of its module."""
    code, used = function.__code__, dict[str, Any]()
    codes = [code]
    for each in codes:  # which grows by the functions inside
        codes += [inner for inner in each.co_consts if isinstance(inner, CodeType)]
        # Names of attributes are in co_names, too: `cohort.params` does not use a variable `params` of a notebook.
        names = {step.argval for step in dis.get_instructions(each) if step.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
        used |= {name: function.__globals__[name] for name in sorted(names & function.__globals__.keys())}
    of_module = {
        name: value
        for name, value in used.items()
        if isinstance(value, _CONSTANTS)
        or (isinstance(value, type | FunctionType) and value.__module__ == function.__module__)
    }
    without_docstring = code.replace(co_consts=tuple(each for each in code.co_consts if each != function.__doc__))
    cells = [_contents(cell) for cell in function.__closure__ or ()]
    return without_docstring, function.__defaults__, function.__kwdefaults__, cells, of_module


def _contents(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # nothing was assigned to this variable
        return None


def _attributes(kind: type) -> dict[str, Any]:
    """Functions and other attributes of a class, without what Python adds to it."""
    attributes = {}
    for name, value in vars(kind).items():
        function = getattr(value, "__func__", None) or getattr(value, "fget", None) or getattr(value, "func", value)
        if isinstance(function, FunctionType) or not name.startswith("_"):
            attributes[name] = function
    return attributes
