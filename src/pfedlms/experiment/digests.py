"""Digests of what is given in Python: by them a later call tells its model, loss and metric from those of a run."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import partial
from types import CodeType, FunctionType, MethodType
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.parameter import is_lazy

_DEPTH = 8
"""How far objects inside objects are followed; objects may hold each other."""


def digest(part: Any, weights: bool = True) -> str:
    """A short digest of a module, a function or another object: of its code, and of the values that it holds. It is the
    same in every process with the same version of Python. Without `weights`, parameters of modules are left out."""
    return _hash(repr(_describe(part, weights, _DEPTH)).encode())[:12]


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _describe(part: Any, weights: bool, depth: int) -> Any:
    def inside(*parts: Any) -> list[Any]:
        return [_describe(each, weights, depth - 1) for each in parts]

    if isinstance(part, str | int | float | complex | bytes | None):
        return part
    name = getattr(part, "__qualname__", type(part).__qualname__).rpartition("<locals>.")[2]
    if depth == 0 or isinstance(part, type):
        return name
    if isinstance(part, torch.Tensor | np.ndarray | np.generic):
        array = part.detach().cpu().numpy() if isinstance(part, torch.Tensor) else np.asarray(part)
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
        cells = [cell.cell_contents for cell in part.__closure__ or ()]
        return name, inside(part.__code__, part.__defaults__, part.__kwdefaults__, cells)
    if isinstance(part, MethodType):
        return inside(part.__func__, part.__self__)
    if isinstance(part, partial):
        return inside(part.func, part.args, part.keywords)
    if isinstance(part, nn.Module):
        layers = part.named_modules()
        return {path: (type(own).__qualname__, *_describe_layer(own, weights, depth)) for path, own in layers}
    call = getattr(type(part), "__call__", None)  # noqa: B004 - the function itself, where it is one of Python
    return name, inside(call if isinstance(call, FunctionType) else None, getattr(part, "__dict__", {}))


def _describe_layer(layer: nn.Module, weights: bool, depth: int) -> list[Any]:
    """The code of a module, unless it is one of PyTorch's, its attributes, and its own parameters and buffers."""
    is_custom = not type(layer).__module__.startswith("torch.")
    attributes = {key: value for key, value in vars(layer).items() if not key.startswith("_") and key != "training"}
    tensors = [*layer.parameters(recurse=False), *layer.buffers(recurse=False)] if weights else []
    held = (type(layer).forward if is_custom else None, attributes, [each for each in tensors if not is_lazy(each)])
    return [_describe(each, weights, depth - 1) for each in held]
