"""Pooling in one pass against PyTorch's ReLU and max pooling: the same bits, forward and back."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from pfedlms.backend import plain
from pfedlms.models.pool_cpu import Pooling, replace_poolings

INFINITY = float("inf")


def images(kind: str, shape: tuple[int, ...]) -> Tensor:
    draw = np.random.default_rng(5)
    if kind == "ties":  # small whole numbers: most windows have equal entries, many are zero
        values = draw.integers(-2, 3, shape)
    elif kind == "special":
        values = draw.choice([float("nan"), INFINITY, -INFINITY, -0.0, 0.0, 1.0, -1.0], shape)
    else:
        values = draw.standard_normal(shape)
    return torch.tensor(values, dtype=torch.float32)


@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("kind", ["usual", "ties", "special"])
@pytest.mark.parametrize("shape", [(3, 2, 8, 8), (2, 3, 7, 5), (1, 1, 2, 3), (2, 2, 28, 33)])
def test_values_and_gradients_are_those_of_pytorch(shape: tuple[int, ...], kind: str, relu: bool) -> None:
    x = images(kind, shape)
    found = []
    for layer in (partial(Pooling(2), relu=relu), nn.Sequential(nn.ReLU() if relu else nn.Identity(), nn.MaxPool2d(2))):
        leaf = x.clone().requires_grad_()
        out = layer(leaf)
        slope = torch.arange(1.0, out.numel() + 1).view_as(out)
        (gradient,) = torch.autograd.grad(out, leaf, slope)
        found.append((out.detach(), gradient))
    for ours, torchs in zip(*found, strict=True):
        np.testing.assert_array_equal(ours.numpy(), torchs.numpy())


@pytest.mark.parametrize("change", [Tensor.double, lambda x: x.to(memory_format=torch.channels_last), lambda x: x[0]])
def test_other_inputs_use_the_pooling_of_pytorch(change: object) -> None:
    x = change(images("ties", (2, 3, 6, 6)))  # type: ignore[operator]
    assert torch.equal(Pooling(2)(x, relu=True), nn.MaxPool2d(2)(torch.relu(x)))


class Skips(nn.Module):
    """Registers ReLU and pooling one after the other, but computes something in between."""

    def __init__(self) -> None:
        super().__init__()
        self.rectify, self.pool = nn.ReLU(), nn.MaxPool2d(2)

    def forward(self, x: Tensor) -> Tensor:
        return self.pool(self.rectify(x) - 1)


def test_only_neighbours_in_a_sequential_are_fused() -> None:
    relu, shift = nn.ReLU(), nn.Conv2d(2, 2, 1)
    module = nn.Sequential(
        nn.Sequential(nn.Conv2d(2, 2, 1), nn.ReLU(inplace=True), nn.MaxPool2d(2)),
        shift, relu, shift, nn.MaxPool2d((2, 2)), Skips(), relu,
        nn.MaxPool2d(2, padding=1), nn.MaxPool2d(2, ceil_mode=True),
    )  # fmt: skip
    x = images("usual", (3, 2, 40, 40))
    changed = replace_poolings(copy.deepcopy(module))
    assert torch.equal(changed(x), module(x))
    assert [name for name, part in changed.named_modules() if isinstance(part, Pooling)] == ["0.2", "4", "5.pool"]
    assert [name for name, part in changed.named_modules() if "forward" in vars(part)] == ["0"]
    assert changed.state_dict().keys() == module.state_dict().keys()


class Watches(nn.Module):
    """Calls the layers of a Sequential itself and uses every output."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(2, 2, 1), nn.ReLU(), nn.MaxPool2d((2, 2)))

    def forward(self, x: Tensor) -> Tensor:
        sums = []
        for layer in self.layers:
            x = layer(x)
            sums.append(x.sum((1, 2, 3)))
        return torch.stack(sums) * self.layers[2].kernel_size[0]  # type: ignore[index,union-attr]


class Reuses(nn.Module):
    """Uses a tensor again after a ReLU has rectified it in place."""

    def __init__(self, *before: nn.Module) -> None:
        super().__init__()
        self.halve = nn.Sequential(*before, nn.ReLU(inplace=True), nn.MaxPool2d(2))

    def forward(self, x: Tensor) -> Tensor:
        shifted = x + 0.5
        return self.halve(shifted).sum() + shifted.sum()


def with_own_relu() -> nn.Module:
    relu = nn.ReLU()
    relu.forward = lambda x: x.abs()  # type: ignore[method-assign]
    return nn.Sequential(relu, nn.MaxPool2d(2))


@pytest.mark.parametrize("make", [Watches, Reuses, lambda: Reuses(nn.Identity()), with_own_relu])
def test_a_module_that_uses_the_rectified_values_is_not_changed(make: Callable[[], nn.Module]) -> None:
    module, x = make(), images("usual", (3, 2, 6, 6))
    assert torch.equal(replace_poolings(copy.deepcopy(module))(x), module(x))


def test_the_reference_uses_the_pooling_of_pytorch() -> None:
    x = images("usual", (1, 1, 4, 4)).requires_grad_()
    with plain():
        assert Pooling(2)(x, relu=True).grad_fn.name() == nn.MaxPool2d(2)(x).grad_fn.name()
