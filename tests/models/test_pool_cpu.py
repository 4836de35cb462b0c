"""Pooling in one pass against PyTorch's max pooling: the same bits, forward and back."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from pfedlms.backend import plain
from pfedlms.models.pool_cpu import Pooling, with_own_pooling

INFINITY = float("inf")


def images(kind: str, shape: tuple[int, ...]) -> Tensor:
    draw = np.random.default_rng(5)
    if kind == "ties":  # small whole numbers: most windows have equal entries
        values = draw.integers(-2, 3, shape)
    elif kind == "special":
        values = draw.choice([float("nan"), INFINITY, -INFINITY, -0.0, 0.0, 1.0, -1.0], shape)
    else:
        values = draw.standard_normal(shape)
    return torch.tensor(values, dtype=torch.float32)


@pytest.mark.parametrize("kind", ["usual", "ties", "special"])
@pytest.mark.parametrize("shape", [(3, 2, 8, 8), (2, 3, 7, 5), (1, 1, 2, 3), (2, 2, 28, 33)])
def test_values_and_gradients_are_those_of_torch(shape: tuple[int, ...], kind: str) -> None:
    x = images(kind, shape)
    found = []
    for layer in (Pooling(2), nn.MaxPool2d(2)):
        leaf = x.clone().requires_grad_()
        out = layer(leaf)
        slope = torch.arange(1.0, out.numel() + 1).view_as(out)
        (gradient,) = torch.autograd.grad(out, leaf, slope)
        found.append((out.detach(), gradient))
    for ours, torchs in zip(*found, strict=True):
        np.testing.assert_array_equal(ours.numpy(), torchs.numpy())


@pytest.mark.parametrize("change", [Tensor.double, lambda x: x.to(memory_format=torch.channels_last), lambda x: x[0]])
def test_other_inputs_take_torchs_pooling(change: object) -> None:
    x = change(images("ties", (2, 3, 6, 6)))  # type: ignore[operator]
    assert torch.equal(Pooling(2)(x), nn.MaxPool2d(2)(x))


def test_only_poolings_of_two_by_two_are_replaced() -> None:
    own = nn.MaxPool2d(2)
    own.forward = lambda x: x.abs()  # type: ignore[method-assign]
    module = nn.Sequential(
        nn.Sequential(nn.Conv2d(2, 2, 1), nn.ReLU(inplace=True), nn.MaxPool2d(2)), nn.MaxPool2d((2, 2)), own,
        nn.MaxPool2d(2, padding=1), nn.MaxPool2d(2, ceil_mode=True), nn.MaxPool2d(2, stride=1),
    )  # fmt: skip
    x = images("usual", (3, 2, 40, 40))
    changed = with_own_pooling(copy.deepcopy(module))
    assert torch.equal(changed(x), module(x))
    assert [name for name, part in changed.named_modules() if isinstance(part, Pooling)] == ["0.2", "1"]
    assert changed.state_dict().keys() == module.state_dict().keys()


def test_the_reference_pools_with_torch() -> None:
    x = images("usual", (1, 1, 4, 4)).requires_grad_()
    with plain():
        assert Pooling(2)(x).grad_fn.name() == nn.MaxPool2d(2)(x).grad_fn.name()
