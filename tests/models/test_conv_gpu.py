"""Stacked convolutions, and blocks of convolution, norm, ReLU and pooling, against PyTorch's in float64; on a GPU or
under Triton's interpreter (`make test-kernels`)."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kernel_device import DEVICE, INTERPRETED
from pfedlms.models import CohortModel, conv_gpu
from pfedlms.models.conv_gpu import (
    StackedBlocks,
    StackedConvolution,
    StackedGroupNorm,
    blocks_in,
    images_fit,
    norms_with_relu,
)
from pfedlms.models.one_by_one import OneByOne
from pfedlms.models.stacked import Stacked

# The interpreter has no bfloat16 products; float16 takes the same way through the kernels.
HALF = torch.float16 if INTERPRETED else torch.bfloat16
KINDS = {"TF32": torch.float32, "half": HALF}
BOUNDS = {torch.float32: 2e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}

# clients, batch, inputs, outputs, image, kernel, padding, stride
CASES = [
    (2, 2, 3, 5, (6, 6), (3, 3), (1, 1), 1),  # few channels: taps and channels share a tile
    (3, 2, 17, 20, (4, 4), (3, 3), (1, 1), 1),
    (2, 2, 64, 20, (4, 4), (3, 3), (1, 1), 1),  # one tap in a tile
    (2, 40, 18, 3, (4, 4), (3, 3), (1, 1), 1),
    (2, 1, 4, 4, (5, 3), (3, 3), (0, 0), 1),
    (2, 3, 4, 6, (2, 2), (1, 1), (0, 0), 1),
    (1, 2, 3, 4, (5, 5), (3, 2), (2, 1), 1),
    (2, 2, 16, 6, (6, 6), (3, 3), (1, 1), 2),
    (2, 2, 5, 6, (7, 5), (1, 1), (0, 0), 2),  # the last line is left out
    (2, 36, 16, 16, (8, 8), (3, 3), (1, 1), 1),  # rows in several shares
]
if not INTERPRETED:
    CASES += [(20, 64, 64, 128, (16, 16), (3, 3), (1, 1), 1), (5, 64, 256, 512, (4, 4), (3, 3), (1, 1), 1)]
    CASES += [(5, 64, 256, 512, (4, 4), (3, 3), (1, 1), 2)]


def rounded(values: Tensor, kind: torch.dtype) -> Tensor:
    """In TF32 to the 10 bits of its fraction, half away from zero."""
    if kind == torch.float32:
        return ((values.contiguous().view(torch.int32) + 0x1000) & -0x2000).view(torch.float32)
    return values.to(kind)


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def error(ours: Tensor, right: Tensor) -> float:
    return float((ours.detach().double() - right.detach()).norm() / right.detach().norm())


def in_rows(*shape: int, seed: int | None) -> Tensor:
    """A tensor `[clients, …]` that is a view of larger rows, as in a flat model; random, or zeros without a seed."""
    clients, size = shape[0], torch.Size(shape[1:]).numel()
    whole = torch.zeros(clients, size + 5, device=DEVICE) if seed is None else draw(clients, size + 5, seed=seed)
    return whole[:, 2 : 2 + size].view(shape)


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_stacked_convolution_is_the_convolution_of_every_client(case: tuple[Any, ...], kind: torch.dtype) -> None:
    """Outputs and both gradients, with all factors rounded."""
    clients, batch, inputs, outputs, image, kernel, pad, stride = case
    shape = (clients, outputs, inputs, *kernel)
    weight, place = in_rows(*shape, seed=1).requires_grad_(), in_rows(*shape, seed=None)
    x = draw(batch, clients * inputs, *image, seed=2).requires_grad_()
    got = StackedConvolution.apply(x, weight, pad, stride, kind, place)
    slope = rounded(draw(*got.shape, seed=3), kind).to(got.dtype)
    of_x, of_weight = torch.autograd.grad(got, (x, weight), slope)
    assert of_weight.data_ptr() == place.data_ptr()

    exact_x, exact_w = (rounded(value.detach(), kind).double().requires_grad_() for value in (x, weight))
    expected = F.conv2d(exact_x, exact_w.flatten(0, 1), None, stride, pad, groups=clients)
    gradients = torch.autograd.grad(expected, (exact_x, exact_w), slope.double())
    for ours, right in zip((got, of_x, of_weight), (expected, *gradients), strict=True):
        assert error(ours, right) <= BOUNDS[kind]


def test_without_a_place_the_gradient_is_a_new_tensor() -> None:
    weight, x = draw(2, 3, 4, 3, 3, seed=1).requires_grad_(), draw(2, 8, 4, 4, seed=2)
    out = StackedConvolution.apply(x, weight, (1, 1), 1, torch.float32, None)
    (gradient,) = torch.autograd.grad(out.sum(), weight)
    reference = F.conv2d(x, weight.flatten(0, 1), padding=1, groups=2)
    (expected,) = torch.autograd.grad(reference.sum(), weight)
    torch.testing.assert_close(gradient, expected, rtol=5e-3, atol=5e-3)


def test_nan_stays_nan() -> None:
    nan = torch.full((1, 2, 4, 4), 0x7FFFFFFF, dtype=torch.int32).view(torch.float32).to(DEVICE)
    ones = torch.ones(1, 3, 2, 3, 3, device=DEVICE)
    assert StackedConvolution.apply(nan, ones, (1, 1), 1, torch.float32, None).isnan().all()
    network = [nn.Conv2d(2, 3, 3, padding=1, bias=False), nn.BatchNorm2d(3), nn.ReLU(), nn.MaxPool2d(2)]
    norm = [torch.ones(1, 3, device=DEVICE) for _ in range(4)]
    assert StackedBlocks.apply(nan, blocks_in(network)[0], torch.float32, [None] * 3, ones, *norm).isnan().all()


class Setup:
    """Two blocks of some clients, and the same in float64 with a module for each client."""

    def __init__(
        self, image: int, pools: tuple[bool, bool], channels: tuple[int, int, int], clients: int, batch: int
    ) -> None:
        self.clients = clients
        layers: list[nn.Module] = []
        for (inputs, outputs), pool in zip(pairwise(channels), pools, strict=True):
            layers += [
                nn.Conv2d(inputs, outputs, 3, padding=1, bias=False),
                nn.BatchNorm2d(outputs, momentum=0.3),
                nn.ReLU(),
            ]
            layers += [nn.MaxPool2d(2)] * pool
        self.layers = layers
        self.x = draw(batch, clients * channels[0], image, image, seed=1)
        self.tensors: list[Tensor] = []
        for number, (inputs, outputs) in enumerate(pairwise(channels)):
            self.tensors += [in_rows(clients, outputs, inputs, 3, 3, seed=10 + number)]
            self.tensors += [in_rows(clients, outputs, seed=20 + number), in_rows(clients, outputs, seed=30 + number)]
            self.tensors += [torch.zeros(clients, outputs, device=DEVICE), torch.ones(clients, outputs, device=DEVICE)]

    def expected(self, x: Tensor, tensors: list[Tensor], training: bool) -> Tensor:
        outs = []
        for client, own in enumerate(x.unflatten(1, (self.clients, -1)).unbind(1)):
            for number, pool in enumerate(self.pools):
                weight, gamma, beta, mean, var = (each[client] for each in tensors[5 * number : 5 * number + 5])
                own = F.conv2d(own, weight, padding=1)
                own = F.relu(F.batch_norm(own, mean, var, gamma, beta, training, 0.3, 1e-5))
                own = F.max_pool2d(own, 2) if pool else own
            outs.append(own)
        return torch.cat(outs, dim=1)

    @property
    def pools(self) -> list[bool]:
        return [block.pool for block in blocks_in(self.layers)[0]]


@pytest.mark.parametrize("pools", [(True, False), (False, True), (True, True)])
def test_blocks_are_the_layers_of_every_client(pools: tuple[bool, bool]) -> None:
    """Outputs, all gradients and running statistics, within the rounding of TF32."""
    setup = Setup(8, pools, (3, 6, 17), 2, 9)
    blocks = blocks_in(setup.layers)[0]
    assert images_fit(blocks, 8, 8)
    x, tensors = setup.x.clone().requires_grad_(), [each.clone() for each in setup.tensors]
    learnt = [value for number, value in enumerate(tensors) if number % 5 < 3]
    places = [in_rows(*value.shape, seed=None) for value in learnt]
    for value in learnt:
        value.requires_grad_()
    got = StackedBlocks.apply(x, blocks, torch.float32, places, *tensors)
    slope = draw(*got.shape, seed=5)
    gradients = torch.autograd.grad(got, [x, *learnt], slope)
    assert [value.data_ptr() for value in gradients[1:]] == [place.data_ptr() for place in places]

    exact_x, exact = setup.x.double().requires_grad_(), [each.double() for each in setup.tensors]
    for number in (0, 1, 2, 5, 6, 7):
        exact[number].requires_grad_()
    right = setup.expected(exact_x, exact, True)
    wanted = torch.autograd.grad(right, [exact_x, *(exact[number] for number in (0, 1, 2, 5, 6, 7))], slope.double())
    assert error(got, right) < 2e-3
    for ours, theirs in zip(gradients, wanted, strict=True):
        assert error(ours, theirs) < 2e-2  # of two nearly equal pixels, rounding decides which is larger
    for number in (3, 4, 8, 9):
        torch.testing.assert_close(tensors[number].double(), exact[number], rtol=2e-3, atol=2e-3)


def test_blocks_use_running_statistics_in_evaluation() -> None:
    setup = Setup(4, (False, True), (3, 6, 5), 2, 3)
    for number in (3, 4, 8, 9):
        setup.tensors[number] += draw(*setup.tensors[number].shape, seed=number).abs()
    blocks = blocks_in([layer.eval() for layer in setup.layers])[0]
    with torch.no_grad():
        got = StackedBlocks.apply(setup.x, blocks, torch.float32, [None] * 6, *setup.tensors)
    right = setup.expected(setup.x.double(), [each.double() for each in setup.tensors], False)
    assert error(got, right) < 2e-3


def test_blocks_are_found_only_without_other_layers_and_hooks() -> None:
    def block(*, bias: bool = False, **norm: Any) -> list[nn.Module]:
        return [nn.Conv2d(3, 3, 3, padding=1, bias=bias), nn.BatchNorm2d(3, **norm), nn.ReLU()]

    hooked = block()
    hooked[2].register_forward_hook(lambda *given: None)
    layers = [*block(), nn.MaxPool2d(2), *block(), nn.MaxPool2d(3), *block(), *block(bias=True), *block(momentum=None)]
    layers += [*hooked, *block(), nn.Flatten()]
    found = blocks_in(layers)
    assert {start: [each.pool for each in blocks] for start, blocks in found.items()} == {
        0: [True, False], 8: [False], 20: [False]
    }  # fmt: skip
    assert images_fit(found[0], 6, 4)
    assert not images_fit(found[0], 5, 4)


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(6, 5, 3, padding=1, bias=False), nn.BatchNorm2d(5), nn.ReLU(), nn.Flatten(), nn.Linear(20, 4),
    )  # fmt: skip


def summed(
    outputs: Tensor, features: Tensor | None, labels: Tensor, rows: slice
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """A loss whose gradient is one everywhere."""
    return outputs.detach().flatten(1).sum(dim=1), [outputs], [torch.ones_like(outputs)]


def test_the_gradient_of_a_model_of_blocks_is_that_of_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The flat gradient and the buffers of the whole runner, against the same layers one by one."""
    monkeypatch.setattr(conv_gpu, "precision", lambda x: torch.float32)
    torch.manual_seed(0)
    model = CohortModel(network(), DEVICE)
    model._runner = Stacked(model._functional, gpu_rules=True)
    plain = CohortModel(network().double(), DEVICE)
    plain._runner = OneByOne(plain._functional, DEVICE, draw(8, 3, 4, 4, seed=2).double())
    cohort = model.cohort((0, 1), (1, 1))
    params, x = cohort.params + 0.2 * draw(*cohort.params.shape, seed=1), draw(2, 8, 3, 4, 4, seed=2)
    labels, gradients, kept = torch.zeros(2, 0), [], []
    for each, kind in ((model, torch.float32), (plain, torch.float64)):
        buffers = {
            name: value.to(kind, copy=True) if value.is_floating_point() else value.clone()
            for name, value in cohort.buffers.items()
        }
        out = torch.zeros_like(params, dtype=kind)
        each.gradient(out, params.to(kind), buffers, x.to(kind), labels, summed)
        gradients.append(out)
        kept.append(buffers)
    assert error(gradients[0], gradients[1]) < 2e-2
    for name, value in kept[1].items():
        torch.testing.assert_close(kept[0][name].to(value.dtype), value, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize(("channels", "groups", "image"), [(8, 4, (4, 4)), (16, 1, (3, 5)), (4, 4, (2, 3))])
def test_group_norm_is_that_of_every_client(channels: int, groups: int, image: tuple[int, int], relu: bool) -> None:
    x = (draw(3, 2 * channels, *image, seed=1) + 5).requires_grad_()
    weights = [in_rows(2, channels, seed=seed).requires_grad_() for seed in (2, 3)]
    got = StackedGroupNorm.apply(x, *weights, groups, 0.1, relu)
    slope = draw(*got.shape, seed=4)
    gradients = torch.autograd.grad(got, [x, *weights], slope)
    exact = [value.detach().double().requires_grad_() for value in (x, *weights)]
    right = F.group_norm(exact[0], 2 * groups, exact[1].flatten(), exact[2].flatten(), 0.1)
    right = F.relu(right) if relu else right
    for ours, theirs in zip(
        (got, *gradients), (right, *torch.autograd.grad(right, exact, slope.double())), strict=True
    ):
        assert error(ours, theirs) < 1e-5


def test_group_norm_with_relu_is_found() -> None:
    hooked = nn.GroupNorm(1, 2)
    hooked.register_forward_hook(lambda *given: None)
    layers = [nn.GroupNorm(1, 2), nn.ReLU(), nn.GroupNorm(1, 2), nn.Tanh(), hooked, nn.ReLU(), nn.ReLU()]
    assert norms_with_relu(layers) == {0}


@pytest.mark.skipif(INTERPRETED, reason="needs a GPU")
def test_a_stacked_convolution_is_as_exact_as_pytorchs() -> None:
    x, weight = draw(64, 20 * 64, 8, 8, seed=1), draw(20, 128, 64, 3, 3, seed=2)
    exact = F.conv2d(x.double(), weight.double().flatten(0, 1), padding=1, groups=20)
    ours = StackedConvolution.apply(x, weight, (1, 1), 1, torch.float32, None)
    theirs = F.conv2d(x, weight.flatten(0, 1), padding=1, groups=20)
    assert (ours - exact).norm() < 1.2 * (theirs - exact).norm()
