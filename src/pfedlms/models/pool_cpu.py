"""2 x 2 max pooling on a CPU, together with the ReLU before it if there is one: one pass forward, one back.

PyTorch's pooling takes a quarter of a training step of a small convolutional network. Values and gradients are the same
as PyTorch's: of equal entries the first one gets the gradient.
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

_MAKES_A_TENSOR = (nn.Conv2d, nn.BatchNorm2d, nn.GroupNorm)  # their output is a new tensor that nothing else uses
_NO_WINNER = 4  # no entry gets the gradient, because the ReLU is flat; 0 to 3 are the entries of a window


class Pooling(nn.MaxPool2d):
    """Replaces an `nn.MaxPool2d(2)`."""

    def forward(self, x: Tensor, relu: bool = False) -> Tensor:
        """With `relu`, of the fused `x`."""
        fits = x.dtype == torch.float32 and x.ndim == 4 and x.is_contiguous() and min(x.shape[2:]) > 1
        if fits and backend_of(x) == "cpu":
            pooled: Tensor = _PoolFunction.apply(x, relu)  # type: ignore[no-untyped-call]
            return pooled
        return F.max_pool2d(F.relu(x) if relu else x, 2)


def replace_poolings(module: nn.Module) -> nn.Module:
    """Replace the 2 x 2 max poolings of a module without hooks, in place, by `Pooling`. Every layer still computes what
    it did, because the module may call it directly; only a Sequential computes a ReLU and a pooling together."""
    for part in module.modules():
        if is_2x2_max_pool(part):
            part.__class__ = Pooling
    for part in module.modules():
        if type(part) is nn.Sequential and "forward" not in vars(part):
            layers = list(part)
            fused = {at for at in range(1, len(layers)) if _can_fuse(layers, at)}
            if fused:
                part.forward = partial(_sequence, layers, fused)  # type: ignore[method-assign]
    return module


def _can_fuse(layers: list[nn.Module], at: int) -> bool:
    """Whether layer `at` is a pooling that can be fused with a ReLU before it. A ReLU that works in place must not be
    fused if other layers may use the tensor that it changes."""
    relu, pooling = layers[at - 1], layers[at]
    if type(pooling) is not Pooling or type(relu) is not nn.ReLU or "forward" in vars(relu):
        return False
    return not relu.inplace or (at > 1 and type(layers[at - 2]) in _MAKES_A_TENSOR)


def _sequence(layers: list[nn.Module], fused: set[int], x: Tensor) -> Tensor:
    """Apply the layers one after another; the poolings at `fused` include the ReLU before them."""
    for at, layer in enumerate(layers):
        if at in fused:
            x = layer(x, relu=True)
        elif at + 1 not in fused:
            x = layer(x)
    return x


def is_2x2_max_pool(layer: nn.Module) -> bool:
    """Whether a layer is a 2 x 2 max pooling and nothing else."""
    if type(layer) is not nn.MaxPool2d or "forward" in vars(layer):
        return False
    settings = layer.kernel_size, layer.stride, layer.padding, layer.dilation
    plain = all(value in (number, (number, number)) for value, number in zip(settings, (2, 2, 0, 1), strict=True))
    return plain and not layer.ceil_mode and not layer.return_indices


class _PoolFunction(torch.autograd.Function):
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
    no_winner = np.int32(_NO_WINNER if relu else 0)
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
                of[column] = no_winner if flat else place


@compiled()
def _backward(gradient: Array, winner: Array, out: Array) -> None:
    images, height, width = gradient.shape
    zero = np.float32(0)
    for image in range(images):
        for row in range(2 * height):
            slope, of, line, first = gradient[image, row // 2], winner[image, row // 2], out[image, row], row % 2 * 2
            for column in range(width):  # one line at a time, because LLVM does not vectorise two
                line[2 * column] = slope[column] if of[column] == first else zero
                line[2 * column + 1] = slope[column] if of[column] == first + 1 else zero
            line[2 * width :] = zero
        out[image, 2 * height :] = zero
