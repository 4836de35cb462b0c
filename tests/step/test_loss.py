"""The loss of every client and its slope, by hand, are those of torch and its autograd."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pfedlms.step import cross_entropy, sample_losses


def drawn(clients: int, batch: int, classes: int, scale: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(clients * batch)
    outputs = scale * torch.randn(clients, batch, classes, generator=random, dtype=torch.float64)
    return outputs.to(dtype).requires_grad_(), torch.randint(classes, (clients, batch), generator=random)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scale", [1.0, 1e4])  # the second overflows an exponential that nothing is taken from
@pytest.mark.parametrize(("clients", "batch", "classes"), [(1, 1, 2), (3, 7, 10), (2, 64, 3)])
def test_loss_and_slope_are_those_of_autograd(
    clients: int, batch: int, classes: int, scale: float, dtype: torch.dtype
) -> None:
    outputs, labels = drawn(clients, batch, classes, scale, dtype)
    expected = torch.stack([F.cross_entropy(own, chosen) for own, chosen in zip(outputs, labels, strict=True)])
    (gradient,) = torch.autograd.grad(expected.sum(), outputs)
    losses, slope = cross_entropy(outputs, labels)
    torch.testing.assert_close(losses, expected.detach())
    torch.testing.assert_close(slope, gradient)
    torch.testing.assert_close(sample_losses(outputs, labels).mean(dim=1), expected)
    assert not losses.requires_grad
    assert not slope.requires_grad


def test_the_loss_of_windows_of_tokens_is_the_mean_over_all_positions() -> None:
    outputs, labels = drawn(3, 4 * 5, 6, 1.0, torch.float64)
    windows = outputs.detach().view(3, 4, 5, 6).requires_grad_(), labels.view(3, 4, 5)
    losses, slope = cross_entropy(*windows)
    expected = torch.stack([F.cross_entropy(own, chosen) for own, chosen in zip(outputs, labels, strict=True)])
    (gradient,) = torch.autograd.grad(expected.sum(), outputs)
    torch.testing.assert_close(losses, expected.detach())
    torch.testing.assert_close(slope, gradient.view(3, 4, 5, 6))
    each = sample_losses(*windows)
    assert each.shape == (3, 4)
    torch.testing.assert_close(each.mean(dim=1), expected)
