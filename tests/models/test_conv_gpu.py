"""Stacked convolutions against PyTorch's, on a GPU or under Triton's interpreter (`make test-kernels`)."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed; make test-kernels installs it")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if not (INTERPRETED or torch.cuda.is_available()):
    pytest.skip("needs a GPU or TRITON_INTERPRET=1", allow_module_level=True)

from pfedlms.models.conv_gpu import StackedConvolution  # noqa: E402 - after the skip

DEVICE = torch.device("cpu" if INTERPRETED else "cuda")

# clients, batch, inputs, outputs, image, kernel, padding
CASES = [
    (2, 2, 3, 5, (6, 6), (3, 3), (1, 1)),  # few channels: taps and channels share a tile
    (3, 2, 17, 20, (4, 4), (3, 3), (1, 1)),  # channels beyond one tile
    (2, 40, 18, 3, (4, 4), (3, 3), (1, 1)),  # rows in several shares
    (2, 1, 4, 4, (5, 3), (3, 3), (0, 0)),
    (2, 3, 4, 6, (2, 2), (1, 1), (0, 0)),
    (1, 2, 3, 4, (5, 5), (3, 2), (2, 1)),
]
if not INTERPRETED:
    CASES += [(20, 64, 64, 128, (16, 16), (3, 3), (1, 1)), (5, 64, 256, 512, (4, 4), (3, 3), (1, 1))]


def tf32(values: Tensor) -> Tensor:
    """Rounded to the 10 bits of a TF32 fraction, half away from zero."""
    return ((values.contiguous().view(torch.int32) + 0x1000) & -0x2000).view(torch.float32)


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_stacked_convolution_is_every_clients_own(case: tuple[Any, ...]) -> None:
    """Outputs and both gradients, with all factors rounded to TF32; weights and the place of their gradient lie in
    larger rows, as in a flat model."""
    clients, batch, inputs, outputs, image, kernel, pad = case
    size = outputs * inputs * kernel[0] * kernel[1]
    shape = (clients, outputs, inputs, *kernel)
    weight = draw(clients, size + 5, seed=1)[:, 2 : 2 + size].view(shape).requires_grad_()
    place = torch.zeros(clients, size + 3, device=DEVICE)[:, 1 : 1 + size].view(shape)
    x = draw(batch, clients * inputs, *image, seed=2).requires_grad_()
    got = StackedConvolution.apply(x, weight, pad, place)
    slope = draw(*got.shape, seed=3)
    of_x, of_weight = torch.autograd.grad(got, (x, weight), slope)
    assert of_weight.data_ptr() == place.data_ptr()

    exact_x, exact_w = (tf32(value.detach()).double().requires_grad_() for value in (x, weight))
    expected = F.conv2d(exact_x, exact_w.flatten(0, 1), padding=pad, groups=clients)
    gradients = torch.autograd.grad(expected, (exact_x, exact_w), tf32(slope).double())
    for ours, theirs in zip((got, of_x, of_weight), (expected, *gradients), strict=True):
        assert (ours.double() - theirs).norm() <= 2e-5 * theirs.norm()


def test_without_a_place_the_gradient_is_a_tensor_of_its_own() -> None:
    weight, x = draw(2, 3, 4, 3, 3, seed=1).requires_grad_(), draw(2, 8, 4, 4, seed=2)
    out = StackedConvolution.apply(x, weight, (1, 1), None)
    (gradient,) = torch.autograd.grad(out.sum(), weight)
    reference = F.conv2d(x, weight.flatten(0, 1), padding=1, groups=2)
    (expected,) = torch.autograd.grad(reference.sum(), weight)
    torch.testing.assert_close(gradient, expected, rtol=5e-3, atol=5e-3)


def test_nan_stays_nan() -> None:
    nan = torch.full((1, 2, 4, 4), 0x7FFFFFFF, dtype=torch.int32).view(torch.float32).to(DEVICE)
    assert StackedConvolution.apply(nan, torch.ones(1, 3, 2, 3, 3, device=DEVICE), (1, 1), None).isnan().all()


@pytest.mark.skipif(INTERPRETED, reason="needs a GPU")
def test_a_stacked_convolution_is_as_exact_as_pytorchs() -> None:
    x, weight = draw(64, 20 * 64, 8, 8, seed=1), draw(20, 128, 64, 3, 3, seed=2)
    exact = F.conv2d(x.double(), weight.double().flatten(0, 1), padding=1, groups=20)
    ours = StackedConvolution.apply(x, weight, (1, 1), None)
    theirs = F.conv2d(x, weight.flatten(0, 1), padding=1, groups=20)
    assert (ours - exact).norm() < 1.2 * (theirs - exact).norm()
