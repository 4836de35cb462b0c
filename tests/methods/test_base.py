"""What all methods share: sums over clients, and objectives of federations that are trained in one stack."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from pfedlms.methods.base import Joined, Objective, weighted_sum

# --- weighted sums


def rounded_sum(samples: list[int], values: np.ndarray, start: np.ndarray) -> np.ndarray:
    """One client after another, every operation rounded to float64."""
    total = start.copy()
    for weight, own in zip(samples, values, strict=True):
        total = total + own.astype(np.float64) * float(weight)
    return total


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(1,), (2,), (4095,), (4096,), (4097,), (9000,)])
def test_a_weighted_sum_has_the_bits_of_a_plain_loop(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Around the size of the parts that stay in the cache, and of numbers whose sum depends on its order."""
    random = torch.Generator().manual_seed(0)
    samples = [3, 1, 1000003, 7]
    spread = 10 ** (6 * torch.rand(4, *shape, generator=random, dtype=torch.float64) - 3)
    values = (torch.randn(4, *shape, generator=random, dtype=torch.float64) * spread).to(dtype)
    start = torch.randn(shape, generator=random, dtype=torch.float64)
    before = start.clone()
    got = weighted_sum(samples, values, start)
    expected = rounded_sum(samples, values.numpy(), start.numpy())
    assert got.dtype == torch.float64
    assert got.shape == start.shape
    assert np.array_equal(got.numpy(), expected)
    assert torch.equal(weighted_sum(samples[1:], values[1:], weighted_sum(samples[:1], values[:1], start)), got)
    assert torch.equal(start, before)


def test_a_number_a_client_is_summed_as_well() -> None:
    got = weighted_sum([2, 3], torch.tensor([0.5, 0.25]), torch.tensor([1.0], dtype=torch.float64))
    assert got.tolist() == [2.75]


def test_rows_of_a_wider_tensor_are_summed() -> None:
    wide = torch.arange(24.0).view(3, 8)
    got = weighted_sum([1, 10, 100], wide[:, 2:5], torch.zeros(3, dtype=torch.float64))
    assert got.tolist() == [2 + 100 + 1800, 3 + 110 + 1900, 4 + 120 + 2000]


# --- objectives of several federations


class Scaled(Objective):
    """Of every number of a client a multiple."""

    needs_features = True

    def __init__(self, factor: float) -> None:
        self._factor = torch.tensor(factor)

    def loss(self, features: Tensor, labels: Tensor) -> Tensor:
        return self._factor * features.sum(dim=(1, 2)) + labels.sum(dim=1)

    def gradient(self, params: Tensor) -> Tensor:
        return self._factor * params

    def after_step(self, params: Tensor, step: int) -> Tensor:
        return params + self._factor * step

    def tensors(self) -> dict[str, Tensor]:
        return {"factor": self._factor}


CLIENTS = 9
FACTORS = torch.tensor([2.0, 2, 2, 0, 0, 0, 0, 5, 5])  # of each client; the second federation adds nothing


def joined() -> Joined:
    return Joined([(slice(0, 3), Scaled(2)), (slice(3, 7), Objective()), (slice(7, 9), Scaled(5))])


@pytest.mark.parametrize("start", range(CLIENTS))
def test_the_objective_of_some_rows_is_that_of_their_federations(start: int) -> None:
    """Any rows: of one federation, of two, of all three, from within one to within another."""
    random = torch.Generator().manual_seed(0)
    params, features = torch.randn(CLIENTS, 4, generator=random), torch.randn(CLIENTS, 2, 3, generator=random)
    labels = torch.arange(2 * CLIENTS).view(CLIENTS, 2)
    for stop in range(start + 1, CLIENTS + 1):
        rows = slice(start, stop)
        part, factors = joined().of(rows), FACTORS[rows]
        own = params[rows]
        assert part.needs_features == bool(factors.any())
        gradient = part.gradient(own)
        assert torch.equal(own * factors[:, None], torch.zeros_like(own) if gradient is None else gradient)
        assert (gradient is None) == (not factors.any())
        assert torch.equal(part.after_step(own, 3), own + 3 * factors[:, None])
        losses = factors * features[rows].sum(dim=(1, 2)) + labels[rows].sum(dim=1) * (factors > 0)
        torch.testing.assert_close(part.loss(features[rows], labels[rows]), losses)
        tensors = {value.item() for value in part.tensors().values()}
        assert tensors == set(factors[factors > 0].tolist())


def test_rows_of_rows_are_rows() -> None:
    params = torch.ones(CLIENTS, 2)
    nested = joined().of(slice(1, 9)).of(slice(1, 7))
    assert torch.equal(nested.gradient(params[2:8]), FACTORS[2:8, None].expand(6, 2))


def test_objectives_of_one_kind_do_the_same_computation_on_other_values() -> None:
    """Kinds name what recorded steps can be replayed for; federations of other sizes, or in another order, are no."""
    again = Joined([(slice(0, 3), Scaled(1)), (slice(3, 7), Objective()), (slice(7, 9), Scaled(3))])
    assert again.kind == joined().kind
    assert hash(again.kind) == hash(joined().kind)
    assert again.tensors().keys() == joined().tensors().keys()
    sizes = Joined([(slice(0, 4), Scaled(2)), (slice(4, 7), Objective()), (slice(7, 9), Scaled(5))])
    order = Joined([(slice(0, 3), Objective()), (slice(3, 7), Scaled(2)), (slice(7, 9), Scaled(5))])
    assert joined().kind not in (sizes.kind, order.kind, Scaled(2).kind)
