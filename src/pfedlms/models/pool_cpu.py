"""2 x 2 max pooling on a CPU: one pass forward, one back.

PyTorch's own pooling takes a quarter of a step of a small convolutional network. Values and gradients are the same: of
equal entries the first one gets the gradient.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from pfedlms.backend import backend_of, compiled
from pfedlms.checks import Array


class Pooling(nn.MaxPool2d):
    """In place of an `nn.MaxPool2d(2)`."""

    def forward(self, x: Tensor) -> Tensor:
        fits = x.dtype == torch.float32 and x.ndim == 4 and x.is_contiguous() and min(x.shape[2:]) > 1
        if not fits or backend_of(x) != "cpu":
            return nn.functional.max_pool2d(x, 2)
        pooled: Tensor = _Pooled.apply(x)  # type: ignore[no-untyped-call]
        return pooled


def with_own_pooling(module: nn.Module) -> nn.Module:
    """A module, changed in place: its 2 x 2 max poolings are those above."""
    for part in module.modules():
        if halves(part):
            part.__class__ = Pooling
    return module


def halves(layer: nn.Module) -> bool:
    """Whether a layer is a 2 x 2 max pooling and nothing else."""
    if type(layer) is not nn.MaxPool2d or "forward" in vars(layer):
        return False
    given = layer.kernel_size, layer.stride, layer.padding, layer.dilation
    plain = all(value in (wanted, (wanted, wanted)) for value, wanted in zip(given, (2, 2, 0, 1), strict=True))
    return plain and not layer.ceil_mode and not layer.return_indices


class _Pooled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        height, width = x.shape[2] // 2, x.shape[3] // 2
        out = x.new_empty((*x.shape[:2], height, width))
        winner = np.empty((out.shape[0] * out.shape[1], height, width), dtype=np.int32)
        _forward(x.detach().flatten(0, 1).numpy(), out.flatten(0, 1).numpy(), winner)
        ctx.shape, ctx.winner = x.shape, winner
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        of_x = gradient.new_empty(ctx.shape)
        _backward(gradient.contiguous().flatten(0, 1).numpy(), ctx.winner, of_x.flatten(0, 1).numpy())
        return of_x


@compiled()
def _forward(x: Array, out: Array, winner: Array) -> None:
    """`winner` is which of the four entries of a window, 0 to 3, was taken."""
    images, height, width = out.shape
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
                best[column] = d if fourth else abc  # two assignments: one of a pair is not vectorised
                of[column] = np.int32(3) if fourth else place


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
