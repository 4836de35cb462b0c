"""Cross-entropy of every client and its slope are those of PyTorch and its autograd."""

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
@pytest.mark.parametrize(
    ("clients", "batch", "classes", "positions"), [(1, 1, 2, ()), (3, 7, 10, ()), (2, 64, 3, ()), (3, 20, 6, (4, 5))]
)
def test_loss_and_slope_are_those_of_autograd(
    clients: int, batch: int, classes: int, positions: tuple[int, ...], scale: float, dtype: torch.dtype
) -> None:
    """With windows of tokens it is the mean over all positions of all samples."""
    outputs, labels = drawn(clients, batch, classes, scale, dtype)
    expected = torch.stack([F.cross_entropy(own, chosen) for own, chosen in zip(outputs, labels, strict=True)])
    (gradient,) = torch.autograd.grad(expected.sum(), outputs)
    given = [each.unflatten(1, positions) for each in (outputs, labels)] if positions else [outputs, labels]
    losses, slope = cross_entropy(*given)
    torch.testing.assert_close(losses, expected.detach())
    torch.testing.assert_close(slope, gradient.view_as(given[0]))
    each = sample_losses(*given)
    assert each.shape == given[1].shape
    torch.testing.assert_close(each.flatten(1).mean(dim=1), expected)
    assert not losses.requires_grad
    assert not slope.requires_grad
