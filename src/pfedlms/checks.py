"""Checks of arguments: whole numbers, weights, and arrays of NumPy or tensors of torch.

Public functions return the kind they were given: arrays for arrays, tensors for tensors on the same device, one vector
for one vector. A check that fails raises a ValueError with name, got, expected and the remedy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Array = NDArray[Any]
Values = TypeVar("Values", Tensor, Array)
"""A function returns the kind it takes: tensors for tensors, arrays for arrays."""
IS_MASKED = "got a masked array, whose mask would be lost; fill in what is masked with .filled(VALUE)"
Weights = int | Sequence[int] | Array | Tensor


def check_integer(name: str, value: object, minimum: int, maximum: int | None = None, remedy: str = "") -> int:
    """`value` as an int. Refuses what is no whole number from `minimum` to `maximum`; NumPy's integers are accepted."""
    fits = isinstance(value, int | np.integer) and not isinstance(value, bool)
    if not fits or int(value) < minimum or (maximum is not None and int(value) > maximum):  # type: ignore[call-overload]
        limits = f"of at least {minimum}" if maximum is None else f"from {minimum} to {maximum}"
        raise ValueError(f"{name}: got {value!r}, expected a whole number {limits}{remedy and '; '}{remedy}")
    return int(value)  # type: ignore[call-overload, no-any-return]


def check_number(name: str, value: object, above: float, maximum: float, meaning: str) -> float:
    """`value` as a float. Refuses what is not above `above` and at most `maximum`; NumPy's numbers are accepted."""
    fits = isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)
    if not fits or not above < value <= maximum:  # type: ignore[operator]
        raise ValueError(f"{name}: got {value!r}, expected at most {maximum:g} and above {above:g}; {meaning}")
    return float(value)  # type: ignore[arg-type]


def check_weights(samples: Weights, clients: int) -> list[int]:
    """N_k of `clients` clients, whole numbers above zero: from a list, an array, a tensor, or one number."""
    plain = samples.tolist() if isinstance(samples, np.ndarray | np.generic | Tensor) else samples
    weights = list(plain) if isinstance(plain, Sequence) else [plain]
    if len(weights) != clients:
        raise ValueError(f"weights: got {len(weights)}, expected {clients}, the number of samples of every client")
    for place, value in enumerate(weights):
        if type(value) is not int or value < 1:
            weights[place] = check_integer(f"weights[{place}]", value, 1, remedy="leave out clients without samples")
    check_integer("weights", sum(weights), 0, (1 << 63) - 1, "their sum must be a whole number of 64 bits")
    return weights


def as_tensor(name: str, values: Tensor | Array, device: torch.device | None = None) -> Tensor:
    """An array as a tensor, on `device` if one is named; a tensor as it is, refused where it is on another device."""
    _check_real(name, values)
    if isinstance(values, Tensor):
        if device is not None and values.device != device:
            raise ValueError(f"{name}: got a tensor on {values.device}, expected one on {device}, as the sketch")
        return values
    # NumPy calls an axis of one entry contiguous whatever its stride is, and PyTorch refuses negative ones.
    array = values if values.flags.c_contiguous and min(values.strides, default=0) >= 0 else values.copy()
    tensor = torch.from_numpy(array) if array.flags.writeable else torch.tensor(array)
    return tensor if device is None else tensor.to(device)


def as_array(name: str, values: Tensor | Array) -> Array:
    """A tensor as an array, on the host; bfloat16, which NumPy does not have, as float32. An array as it is."""
    _check_real(name, values)
    if isinstance(values, Tensor):
        return (values.float() if values.dtype == torch.bfloat16 else values).detach().cpu().numpy()
    return values


def _check_real(name: str, values: object) -> None:
    """Refuse what is no array or tensor of real numbers."""
    is_real = isinstance(values, Tensor) and not values.is_complex()
    if isinstance(values, np.ndarray):
        is_real = values.dtype.kind in "fiub"
    if not is_real:
        got = getattr(values, "dtype", type(values).__name__)
        raise ValueError(f"{name}: got {got}, expected an array or a tensor of real numbers")
    if isinstance(values, np.ma.MaskedArray):
        raise ValueError(f"{name}: {IS_MASKED}")


def check_floats(name: str, values: Tensor) -> Tensor:
    """Refuse what is neither float32 nor float64: nothing else has kernels, or enough digits for a transform."""
    if values.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"{name}: got {values.dtype}, expected torch.float32 or torch.float64; pass {name}.float()")
    return values


def like_input(given: Values, result: Tensor) -> Values:
    """`result` as an array if `given` is one, and its only row if `given` is one vector."""
    values = result[0] if given.ndim == 1 and result.ndim == 2 else result
    return values if isinstance(given, Tensor) else values.cpu().numpy()
