"""The pull's GPU kernels against its definition, on a GPU or under Triton's interpreter (`make test-kernels`)."""

from __future__ import annotations

import pytest
import torch

from factories import layout_of, normal
from kernel_device import DEVICE
from pfedlms.pull import Pull, gpu, penalty_slope
from pfedlms.quantise import normal_quantiles, statistics, symbols_of, thresholds_of
from pfedlms.sketch import Sketch

SIZES = (37, 1, 5000)
STRENGTH, SMOOTHING = 0.05, 0.1


def thresholds_and_consensus(params: torch.Tensor, thresholds: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """τ and σ̄ of the first client's sketch, and the second client's symbols as the consensus."""
    sketch = Sketch(layout_of(*SIZES), 0.1, seed=5, epoch=0)
    sketched = sketch.forward(params)
    mean, variance = statistics(sketched, sketch.sizes)
    deviation = variance[0].sqrt()
    tau = torch.from_numpy(thresholds_of(mean[0].numpy(), deviation.numpy(), normal_quantiles(thresholds)))
    return tau, deviation, symbols_of(sketched, tau, sketch.sizes)[1]


def pull_on(device: torch.device, tau: torch.Tensor, deviation: torch.Tensor, consensus: torch.Tensor) -> Pull:
    sketch = Sketch(layout_of(*SIZES), 0.1, seed=5, epoch=0, device=device)
    return Pull(sketch, tau.to(device), deviation.to(device), consensus.to(device), STRENGTH, SMOOTHING)


@pytest.mark.parametrize("thresholds", [1, 7, 255])
def test_the_pull_is_the_adjoint_of_the_slope(thresholds: int) -> None:
    """One fused kernel (small layers) and block and column passes (a wide one) against sketch, formula and adjoint
    apart; the layer of one entry is constant, so it has no pull."""
    params = normal(2, sum(SIZES), seed=2)
    tau, deviation, consensus = thresholds_and_consensus(params, thresholds)
    sketch = Sketch(layout_of(*SIZES), 0.1, seed=5, epoch=0)
    # The slope is steep where a threshold is near, so it is taken of the same float32 sketch.
    slope = penalty_slope(sketch.forward(params), tau, SMOOTHING * deviation, consensus, sketch.layers)
    expected = sketch.adjoint(STRENGTH * slope.double())
    got = gpu.gradient(pull_on(DEVICE, tau, deviation, consensus), params.to(DEVICE))
    torch.testing.assert_close(got.cpu().double(), expected, rtol=1e-5, atol=1e-6)
    assert got[:, :37].any()
    assert not got[:, 37].any()


def test_type_and_strides_of_the_thresholds_do_not_change_the_pull() -> None:
    params = normal(2, sum(SIZES), seed=2)
    tau, deviation, consensus = thresholds_and_consensus(params, 7)
    plain, other = (
        gpu.gradient(pull_on(DEVICE, own, deviation, consensus), params.to(DEVICE))
        for own in (tau, tau.double().T.contiguous().T)
    )
    assert torch.equal(plain, other)
