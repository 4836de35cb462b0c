"""Digests of what is given in Python: by them a later call tells its model, loss and metric from those of a run."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import partial
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.parameter import is_lazy

_DEPTH = 8  # how far objects inside objects are followed


def digest(part: Any, weights: bool = True) -> str:
    """A short digest of a module, a function or another object: of its code, and of the values that it holds. It is the
    same in every process with the same version of Python. Without `weights`, parameters of modules are left out."""
    return _hash(repr(_describe(part, weights)).encode())[:12]


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
