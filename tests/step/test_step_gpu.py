"""Kernels of a local step against the CPU, on a GPU or under Triton's interpreter (`make test-kernels`)."""

from __future__ import annotations

import pytest
import torch

from factories import normal
from kernel_device import DEVICE
from pfedlms.step import cross_entropy, sgd_step_
from pfedlms.step import gpu as kernels


@pytest.mark.parametrize("batch", [1, 5, 64])
@pytest.mark.parametrize("classes", [2, 10, 100])
def test_losses_and_slopes_are_those_of_the_cpu(batch: int, classes: int) -> None:
    outputs = 5 * normal(3, batch, classes, seed=1)
    labels = torch.randint(0, classes, (3, batch), generator=torch.Generator().manual_seed(2))
    assert kernels.fits(outputs)
    got = kernels.cross_entropy(outputs.to(DEVICE), labels.to(DEVICE))
    for ours, expected in zip(got, cross_entropy(outputs, labels), strict=True):
        torch.testing.assert_close(ours.cpu(), expected, rtol=1e-5, atol=1e-7)


def test_large_outputs_do_not_fit_one_program() -> None:
    assert not kernels.fits(torch.empty(1, 256, 1000))


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("pulled", [False, True])
def test_a_step_is_that_of_the_cpu(momentum: float, pulled: bool) -> None:
    params, gradient, extra, buffer = (normal(3, 3000, seed=seed) for seed in range(4))
    extra = extra if pulled else None
    on_device = [None if value is None else value.clone().to(DEVICE) for value in (params, gradient, extra, buffer)]
    kernels.sgd_step_(*on_device, 0.1, momentum, 1e-2)
    sgd_step_(params, gradient, extra, buffer, 0.1, momentum, 1e-2)
    torch.testing.assert_close(on_device[0].cpu(), params, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(on_device[3].cpu(), buffer, rtol=1e-6, atol=1e-6)


def test_the_learning_rate_may_be_a_tensor_on_the_device() -> None:
    """A recording is replayed with another rate that way."""
    given = [normal(3, 3000, seed=seed).to(DEVICE) for seed in range(4)]
    number, tensor = ([value.clone() for value in given] for _ in range(2))
    kernels.sgd_step_(*number, 0.1, 0.9, 1e-2)
    kernels.sgd_step_(*tensor, torch.tensor(0.1, device=DEVICE), 0.9, 1e-2)
    assert torch.equal(number[0], tensor[0])
    assert torch.equal(number[3], tensor[3])
