"""2 x 2 max pooling on a CPU, after a ReLU where there is one before it: one pass forward, one back.

PyTorch's own pooling takes a quarter of a step of a small convolutional network. Values and gradients are the same: of
equal entries the first one gets the gradient.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pfedlms.backend import backend_of, compiled
from pfedlms.checks import Array

_MAKES_A_TENSOR = (nn.Conv2d, nn.BatchNorm2d, nn.GroupNorm)  # which nobody else sees
_NOBODY = 4  # gets the gradient where the ReLU is flat; 0 to 3 are the entries of a window


class Pooling(nn.MaxPool2d):
    """In place of an `nn.MaxPool2d(2)`."""

    def forward(self, x: Tensor, relu: bool = False) -> Tensor:
        """With `relu`, of the rectified `x`."""
        fits = x.dtype == torch.float32 and x.ndim == 4 and x.is_contiguous() and min(x.shape[2:]) > 1
        if fits and backend_of(x) == "cpu":
            pooled: Tensor = _Pooled.apply(x, relu)  # type: ignore[no-untyped-call]
            return pooled
        return F.max_pool2d(F.relu(x) if relu else x, 2)


def with_own_pooling(module: nn.Module) -> nn.Module:
    """A module without hooks, changed in place: its 2 x 2 max poolings are those above. Its layers do what they did,
    because a module may call each of them itself; only a whole Sequential takes a ReLU and a pooling together."""
    for part in module.modules():
        if halves(part):
            part.__class__ = Pooling
    for part in module.modules():
        if type(part) is nn.Sequential and "forward" not in vars(part):
            layers = list(part)
            rectified = {at for at in range(1, len(layers)) if _becomes_one(layers, at)}
            if rectified:
                part.forward = partial(_sequence, layers, rectified)  # type: ignore[method-assign]
    return module


def _becomes_one(layers: list[nn.Module], at: int) -> bool:
    """Whether the layer at this place is a pooling that can take the ReLU before it along. A ReLU that works in place
    must be left alone where others may see the tensor that it changes."""
    relu, pooling = layers[at - 1], layers[at]
    if type(pooling) is not Pooling or type(relu) is not nn.ReLU or "forward" in vars(relu):
        return False
    return not relu.inplace or (at > 1 and type(layers[at - 2]) in _MAKES_A_TENSOR)


def _sequence(layers: list[nn.Module], rectified: set[int], x: Tensor) -> Tensor:
    """Layer after layer; poolings at `rectified` take the ReLU before them along."""
    for at, layer in enumerate(layers):
        if at in rectified:
            x = layer(x, relu=True)
        elif at + 1 not in rectified:
            x = layer(x)
    return x


def halves(layer: nn.Module) -> bool:
    """Whether a layer is a 2 x 2 max pooling and nothing else."""
    if type(layer) is not nn.MaxPool2d or "forward" in vars(layer):
        return False
    given = layer.kernel_size, layer.stride, layer.padding, layer.dilation
    plain = all(value in (wanted, (wanted, wanted)) for value, wanted in zip(given, (2, 2, 0, 1), strict=True))
    return plain and not layer.ceil_mode and not layer.return_indices


class _Pooled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, relu: bool) -> Tensor:
        height, width = x.shape[2] // 2, x.shape[3] // 2
        out = x.new_empty((*x.shape[:2], height, width))
        winner = np.empty((out.shape[0] * out.shape[1], height, width), dtype=np.int32)
        _forward(x.detach().flatten(0, 1).numpy(), out.flatten(0, 1).numpy(), winner, relu)
        ctx.shape, ctx.winner = x.shape, winner
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        of_x = gradient.new_empty(ctx.shape)
        _backward(gradient.contiguous().flatten(0, 1).numpy(), ctx.winner, of_x.flatten(0, 1).numpy())
        return of_x, None


@compiled()
def _forward(x: Array, out: Array, winner: Array, relu: bool) -> None:
    images, height, width = out.shape
    nobody = np.int32(_NOBODY if relu else 0)
    for image in range(images):
        for row in range(height):
            top, bottom = x[image, 2 * row], x[image, 2 * row + 1]
            best, of = out[image, row], winner[image, row]
            for column in range(width):
                a, b, c, d = top[2 * column], top[2 * column + 1], bottom[2 * column], bottom[2 * column + 1]
                # An entry replaces an earlier one where it is larger or NaN, so that NaN is passed on.
                second = (b > a) | (b != b)
                ab, left = (b if second else a), np.int32(1 if second else 0)
                third = (c > ab) | (c != c)
                abc, place = (c if third else ab), (np.int32(2) if third else left)
                fourth = (d > abc) | (d != d)
                value, place = (d if fourth else abc), (np.int32(3) if fourth else place)
                flat = relu & (value <= 0)
                best[column] = np.float32(0) if flat else value
                of[column] = nobody if flat else place


@compiled()
def _backward(gradient: Array, winner: Array, out: Array) -> None:
    images, height, width = gradient.shape
    zero = np.float32(0)
    for image in range(images):
        for row in range(2 * height):
            given, of, line, first = gradient[image, row // 2], winner[image, row // 2], out[image, row], row % 2 * 2
            for column in range(width):  # one line at a time: two are not vectorised
                line[2 * column] = given[column] if of[column] == first else zero
                line[2 * column + 1] = given[column] if of[column] == first + 1 else zero
            line[2 * width :] = zero
        out[image, 2 * height :] = zero
