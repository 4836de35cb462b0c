"""The pull's CPU kernel against its definition, also at the limits of float32. tests/theory shows that it is the
gradient of the smoothed penalty."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
import torch

from factories import SIZES, normal, sketch_of, some_consensus, some_pull, some_thresholds
from pfedlms.backend import plain
from pfedlms.methods.pfedlms import PulledTowardsConsensus
from pfedlms.pull import Pull


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("levels", [1, 7, 255])
def test_the_kernel_has_the_bits_of_the_definition(dtype: torch.dtype, levels: int) -> None:
    sketch = sketch_of(*SIZES)
    theta = normal(4, sketch.dim, seed=3, dtype=dtype)
    tau, consensus = some_thresholds(len(SIZES), levels).to(dtype), some_consensus(sketch.size, levels)
    tau[0] = sketch.forward(theta)[0, 0]  # on a threshold
    deviations = torch.tensor([0.3, 0.0, 1e-30, 0.7, 0.2, 2.0], dtype=dtype)  # layer 1 is constant, layer 2 almost
    pull = Pull(sketch, tau, deviations, consensus, 0.05, 0.5)
    fast = pull.gradient(theta)
    assert fast.dtype == dtype
    with plain():
        assert torch.equal(fast, pull.gradient(theta))
    first, constant, almost, *_ = fast.split(SIZES, dim=1)
    assert first.any()
    assert not constant.any()
    assert almost.any()


def test_a_changed_field_changes_the_pull() -> None:
    """A copy with another field takes over no cached values; a recorded step is replayed with such copies."""
    pull, theta = some_pull(7, 0.05, 0.3).pull, normal(2, sum(SIZES))
    before = pull.gradient(theta)
    others = {
        "sketch": sketch_of(*SIZES, epoch=1), "thresholds": pull.thresholds + 1, "deviations": 2 * pull.deviations,
        "consensus": 7 - pull.consensus, "strength": 0.1, "smoothing": 0.4,
    }  # fmt: skip
    assert {field.name for field in fields(Pull)} == set(others)
    for name, value in others.items():
        changed = replace(pull, **{name: value})
        fast = changed.gradient(theta)
        assert not torch.equal(fast, before), name
        with plain():
            assert torch.equal(replace(pull, **{name: value}).gradient(theta), fast), name
    assert torch.equal(pull.gradient(theta), before)


def test_nan_in_one_model_reaches_its_own_pull_only() -> None:
    """The engine then finds it; the pull of the other client does not change."""
    pull, theta = some_pull(3, 1.0, 0.3).pull, normal(2, sum(SIZES))
    expected = pull.gradient(theta)[1]
    theta[0, 0] = float("nan")
    got = pull.gradient(theta)
    assert got[0, :16].isnan().all()
    assert torch.equal(got[1], expected)


@pytest.mark.parametrize("smoothing", [0.5, 3.0, 1e30])
@pytest.mark.parametrize("deviation", [3.4e38, 1e-45, 2.0**-126])
def test_extreme_deviations_give_no_nan(deviation: float, smoothing: float) -> None:
    """ρ_l beyond the range beside thresholds beyond it, and ρ_l so small that 1/ρ_l is beyond it where y = τ."""
    sketch = sketch_of(8, ratio=1.0)
    tau, consensus = torch.tensor([[-torch.inf, 0.0, torch.inf]]), torch.full((8,), 2, dtype=torch.uint8)
    pull = PulledTowardsConsensus(sketch, tau, torch.tensor([deviation]), consensus, 1.0, smoothing)
    theta = torch.zeros(1, 8)  # y = 0 = τ_2: clips of +1, 0 and −1, less v = (+1, +1, −1), make −1/3 everywhere
    expected = sketch.adjoint(torch.full((1, 8), -1 / 3))
    if smoothing * deviation < 2.0**-126:
        expected = torch.zeros(1, 8)
    assert torch.allclose(pull.gradient(theta), expected)
    with plain():
        assert torch.allclose(pull.gradient(theta), expected)
    assert (1 / pull.widths[pull.widths > 0]).isfinite().all()
