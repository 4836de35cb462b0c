"""The paper's statements about the penalty and its smooth form, and that the pull is its gradient."""

from __future__ import annotations

from itertools import pairwise
from statistics import NormalDist

import numpy as np
import pytest
import torch
from torch import Tensor

from definitions import dense_model, layer_of_entry, penalty, smoothed, smoothed_penalty, votes_of
from factories import RATIO, SEED, SIZES, normal, some_consensus, some_pull, some_thresholds
from pfedlms.pull import penalty_slope
from pfedlms.quantise import normal_quantiles, thresholds_of

LAYERS = layer_of_entry(SIZES, RATIO)


def exact(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def consensus_of(*symbols: int) -> Tensor:
    return torch.tensor(symbols, dtype=torch.uint8)


def one_layer(entries: int) -> Tensor:
    return torch.zeros(entries, dtype=torch.long)


# --- the penalty ------------------------------------------------------------------------------------------------------


def test_penalty_by_hand() -> None:
    """R = (2/T) Σ_t Σ_i max(0, −v_t (y − τ_t)): τ = (0, 1, 3), q̃ = (3, 0), y = (0.5, 2): (2/3)(0.5 + 2.5 + 2 + 1) =
    4."""
    value = penalty(exact(0.5, 2.0)[None], exact(0.0, 1.0, 3.0)[None], consensus_of(3, 0), one_layer(2))
    assert value.item() == pytest.approx(4.0, rel=1e-15)


@pytest.mark.parametrize("levels", [2, 3, 7, 15, 31])
def test_lemma_resolution_gain(levels: int) -> None:
    """Lemma 3: an internal interval of consistency is no wider than Δ = max_t (τ_{t+1} − τ_t), and for the quantiles
    t/(T+1) of a density that is at least f_min on [τ_1, τ_T], Δ ≤ 1 / ((T+1) f_min)."""
    mean, deviation = 0.7, 2.5
    tau = thresholds_of(np.float32([mean]), np.float32([deviation]), normal_quantiles(levels)).astype(np.float64)[0]
    reference = NormalDist(mean, deviation)
    lowest = min(reference.pdf(tau[0]), reference.pdf(tau[-1]))  # a normal density is lowest at the ends of an interval
    widest = max(b - a for a, b in pairwise(tau))
    assert widest <= 1 / ((levels + 1) * lowest) * (1 + 1e-6)

    # The set without penalty, found by scanning a grid rather than from the thresholds.
    step = 1e-3
    grid = torch.arange(tau[0] - 1, tau[-1] + 1, step, dtype=torch.float64)[:, None]
    for s in range(1, levels):
        inside = grid[penalty(grid, torch.tensor(tau)[None], consensus_of(s), one_layer(1)) == 0]
        width = float(inside.max() - inside.min())
        assert tau[s] - tau[s - 1] - 2 * step <= width <= widest + 1e-9


# --- its smooth form --------------------------------------------------------------------------------------------------


def test_smoothed_penalty_is_the_maximum_over_the_dual_ball() -> None:
    """‖z‖_{1,ρ} = max over ‖u‖_∞ ≤ 1 of ⟨u, z⟩ − ρ/2 ‖u‖², by brute force over a fine grid of u."""
    levels, rho = 3, 0.4
    tau, consensus = some_thresholds(1, levels, seed=1), some_consensus(12, levels, seed=2)
    y = normal(1, 12, seed=3, dtype=torch.float64)
    u = torch.linspace(-1, 1, 20001, dtype=torch.float64)
    total = 0.0
    for t in range(levels):
        z = y[0] - tau[0, t]
        best = (u[:, None] * z - rho / 2 * u[:, None] ** 2).max(dim=0).values
        total += float((best - votes_of(consensus, levels)[t] * z).sum())
    value = smoothed_penalty(y, tau, exact(rho), consensus, one_layer(12))
    assert value.item() == pytest.approx(total / levels, abs=1e-6)


def test_lemma_smoothing_error_is_of_order_rho() -> None:
    """0 ≤ R − R̃_ρ ≤ Σ_l ρ_l m_l / 2 everywhere. The upper end is attained where every |y − τ_t| ≥ ρ (so R̃ = −ρ/2 for
    each coordinate where all is consistent, not 0), the lower end where y = τ."""
    levels, rho = 5, exact(0.3, 0.05, 1.0, 0.7, 0.2, 2.0)
    tau, consensus = some_thresholds(len(SIZES), levels, seed=4), some_consensus(len(LAYERS), levels, seed=5)
    bound = float((rho[LAYERS] / 2).sum())
    near = normal(20, len(LAYERS), seed=6, dtype=torch.float64)
    y = torch.cat([scale * near for scale in (0.01, 1.0, 30.0)])
    gap = penalty(y, tau, consensus, LAYERS) - smoothed_penalty(y, tau, rho, consensus, LAYERS)
    assert (gap > 0).all()
    assert (gap < bound).all()  # random points: some lie within ρ of a threshold

    far = torch.full((1, len(LAYERS)), 50.0, dtype=torch.float64)
    gap = penalty(far, tau, consensus, LAYERS) - smoothed_penalty(far, tau, rho, consensus, LAYERS)
    assert gap.item() == pytest.approx(bound, rel=1e-12)
    agreed = torch.full_like(consensus, levels)
    assert penalty(far, tau, agreed, LAYERS).item() == 0
    assert smoothed_penalty(far, tau, rho, agreed, LAYERS).item() == pytest.approx(-bound, rel=1e-12)

    at = tau[:, :1]
    for vote in (0, 1):
        same = torch.full_like(consensus, vote)
        assert penalty(at[LAYERS].T, at, same, LAYERS).item() == 0
        assert smoothed_penalty(at[LAYERS].T, at, rho, same, LAYERS).item() == 0


# --- the pull ---------------------------------------------------------------------------------------------------------


def test_slope_by_hand() -> None:
    """τ = (0, 1, 3), ρ = 0.5, y = 0.25, q̃ = 2: (1/3) [(0.5 − 1) + (−1 − 1) + (−1 + 1)] = −2.5/3."""
    slope = penalty_slope(exact(0.25)[None], exact(0.0, 1.0, 3.0)[None], exact(0.5), consensus_of(2), one_layer(1))
    assert slope.item() == pytest.approx(-2.5 / 3, rel=1e-15)


@pytest.mark.parametrize("levels", [1, 3, 7])
@pytest.mark.parametrize("smoothing", [0.05, 1.0])
def test_lemma_closed_form_gradient_equals_autograd(levels: int, smoothing: float) -> None:
    """∇_θ R̃_ρ = (1/T) Φᵀ Σ_t [clip((Φθ − τ_t)/ρ, −1, 1) − v_t], against float64 autograd through a dense Φ."""
    strength = 0.3
    made, phi = some_pull(levels, strength, smoothing), dense_model(SIZES, RATIO, SEED)
    votes = votes_of(made.consensus, levels)
    theta = normal(4, sum(SIZES), seed=9, dtype=torch.float64)
    expected = []
    for own in theta:
        leaf = own.clone().requires_grad_()
        (strength * smoothed(phi @ leaf, made.tau, made.rho, votes, LAYERS)).backward()
        expected.append(leaf.grad)
    gradient = made.pull.gradient
    torch.testing.assert_close(gradient(theta), torch.stack(expected), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradient(theta.float()).double(), torch.stack(expected), rtol=1e-4, atol=1e-4)
