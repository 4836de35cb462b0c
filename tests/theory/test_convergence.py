"""The analysis of local steps: bounded iterates, smoothness, descent, drift between rounds, stationarity."""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt

import pytest
import torch
from plain_client import padded, sketch_size
from torch import Tensor

from definitions import dense_model, layer_of_entry, smoothed, smoothed_penalty, votes_of
from factories import RATIO, SEED, SIZES, normal, one_layer_pull, sketch_of, some_consensus, some_pull, some_thresholds
from pfedlms.aggregate import Vote, pool_statistics
from pfedlms.pull import Pull
from pfedlms.quantise import normal_quantiles, statistics, symbols_of, thresholds_of

DIM = sum(SIZES)
LAYERS = layer_of_entry(SIZES, RATIO)
PHI = dense_model((16,), RATIO, SEED)
"""Φ of the one layer without padding of `one_layer_pull`: κ² = N/m = 2."""


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return normal(*shape, seed=seed, dtype=torch.float64)


def norms(sizes: Sequence[int]) -> Tensor:
    """κ_l = √(N/m)."""
    return torch.tensor([sqrt(padded(n) / sketch_size(n, RATIO)) for n in sizes], dtype=torch.float64)


class Quadratic:
    """f(θ) = ½ Σ a_i (θ_i − c_i)² with L_f = max a, and F = f + λ R̃_ρ + μ/2 ‖θ‖² whose pull is the code's."""

    def __init__(self, levels: int, strength: float, smoothing: float, decay: float) -> None:
        self._made, self._strength, self._decay = some_pull(levels, strength, smoothing), strength, decay
        self._votes, self._phi = votes_of(self._made.consensus, levels), dense_model(SIZES, RATIO, SEED)
        self._curvature = torch.linspace(0.1, 2.0, DIM, dtype=torch.float64)
        self._centre = drawn(DIM, seed=21)
        self.smoothness = 2.0 + float((strength * norms(SIZES) ** 2 / self._made.rho).max()) + decay

    def value(self, theta: Tensor) -> float:
        task = 0.5 * (self._curvature * (theta - self._centre) ** 2).sum()
        regulariser = smoothed(self._phi @ theta, self._made.tau, self._made.rho, self._votes, LAYERS)
        return float(task + self._strength * regulariser + self._decay / 2 * (theta**2).sum())

    def gradient(self, theta: Tensor) -> Tensor:
        return self._curvature * (theta - self._centre) + self._made.pull.gradient(theta) + self._decay * theta


# --- iterates ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rate", [0.1, 2.0])
def test_lemma_bounded_iterates(rate: float) -> None:
    """Lemma 4: with ‖ĝ‖ ≤ G and 0 < η ≤ 1/μ, SGD on f + λR̃ + μ/2‖θ‖² stays within
    B² = max(‖θ⁰‖², C_B/(ημ)), C_B = (2η/μ)(G² + 4λ² Σ κ_l² m_l)."""
    strength, decay, clip, starts = 0.2, 0.5, 3.0, torch.tensor([[0.0], [1.0], [1e4]], dtype=torch.float64)
    pull = some_pull(3, strength, 0.1).pull
    moment = sum(padded(n) for n in SIZES)  # κ_l² m_l = N_l
    bound = (starts[:, 0] ** 2).clamp(min=(2 * rate / decay) * (clip**2 + 4 * strength**2 * moment) / (rate * decay))
    theta = starts * torch.nn.functional.normalize(drawn(3, DIM, seed=31), dim=1)
    for step in range(100):
        # As long as it may be, and mostly outwards.
        gradient = clip * torch.nn.functional.normalize(0.1 * drawn(3, DIM, seed=step) - theta.sign(), dim=1)
        theta = (1 - rate * decay) * theta - rate * (gradient + pull.gradient(theta))
        assert (theta.norm(dim=1) ** 2 <= bound).all()
    assert (theta.norm(dim=1) > 0.3 * sqrt(2) * clip / decay).all()  # the gradients alone carry it that far


def test_lemma_bounded_iterates_is_tight_up_to_root_two_and_needs_its_step_size() -> None:
    """A consensus that is never reached pulls with its full norm 2κ√m = 2√N and drives ‖θ‖ to 2λ√N/μ = B/√2 (G = 0);
    with η = 2.5/μ > 1/μ the iterates leave the bound."""
    strength, decay = 0.2, 0.5
    pull = one_layer_pull(tau=1e40, strength=strength, rho=0.1)
    bound = sqrt(2 * 4 * strength**2 * 16) / decay
    for rate, stays in ((0.2 / decay, True), (2.5 / decay, False)):
        theta = torch.zeros(16, dtype=torch.float64)
        for _ in range(60):
            theta = (1 - rate * decay) * theta - rate * pull.gradient(theta[None])[0]
        assert bool(theta.norm() <= bound) is stays
        if stays:
            assert float(theta.norm()) == pytest.approx(bound / sqrt(2), rel=1e-5)


# --- smoothness and descent -------------------------------------------------------------------------------------------


def test_lemma_smoothness_of_the_objective() -> None:
    """Lemma 5: ∇F is L_F-Lipschitz with L_F = L_f + max_l λ κ_l²/ρ_l + μ, κ_l = √(N/m)."""
    objective = Quadratic(levels=3, strength=0.3, smoothing=0.5, decay=0.01)
    theta, scales = drawn(200, DIM, seed=41), 10.0 ** (torch.arange(200) % 5 - 3)[:, None]
    step = scales * drawn(200, DIM, seed=42)
    change = objective.gradient(theta + step) - objective.gradient(theta)
    steepest = float((change.norm(dim=1) / step.norm(dim=1)).max())
    assert 0.1 * objective.smoothness < steepest <= objective.smoothness


def test_lemma_smoothness_is_attained_by_one_threshold_without_padding() -> None:
    """For T = 1, ΦΦᵀ = (N/m) I and a step along Φᵀu inside the smoothed region, ∇(λR̃) changes by exactly λ κ²/ρ times
    the step."""
    strength, rho = 0.3, 0.5
    pull = one_layer_pull(0.0, strength, rho)
    theta = torch.zeros(16, dtype=torch.float64)
    step = 1e-3 * PHI.T @ drawn(8, seed=5)
    change = (pull.gradient((theta + step)[None]) - pull.gradient(theta[None]))[0]
    assert float(change.norm() / step.norm()) == pytest.approx(strength * 2 / rho, rel=1e-9)


@pytest.mark.parametrize("noise", [0.0, 0.5, 20.0])
def test_lemma_one_step_descent(noise: float) -> None:
    """Lemma 6: for η ≤ 1/L_F, E F(θ − η(∇F + ξ)) ≤ F(θ) − η/2 ‖∇F‖² + L_F η² σ²/2. The noise is ±σ e_i, each
    of the 2 dim outcomes equally likely, so that the expectation is a finite sum."""
    objective = Quadratic(levels=3, strength=0.3, smoothing=0.5, decay=0.01)
    shifts = [torch.zeros(DIM, dtype=torch.float64)]
    if noise:
        shifts = [sign * noise * axis for axis in torch.eye(DIM, dtype=torch.float64) for sign in (1, -1)]
    for rate in (1 / objective.smoothness, 0.2 / objective.smoothness):
        for trial in range(2):
            theta = drawn(DIM, seed=50 + trial)
            gradient = objective.gradient(theta[None])[0]
            mean = sum(objective.value(theta - rate * (gradient + shift)) for shift in shifts) / len(shifts)
            allowed = -rate / 2 * float(gradient.norm() ** 2) + objective.smoothness * rate**2 * noise**2 / 2
            assert mean <= objective.value(theta) + allowed


def test_lemma_one_step_descent_is_attained_and_needs_its_step_size() -> None:
    """f = 0, T = 1, inside the smoothed region, along Φᵀ1: F is a parabola of curvature L_F = λκ²/ρ + μ, so that
    F(θ − η∇F) = F + (L_F η²/2 − η) ‖∇F‖². At η = 1/L_F that is the lemma with equality; at 3/L_F the step goes up."""
    strength, rho = 0.3, 0.5
    steepest = strength * 2 / rho
    decay = steepest  # then the minimum lies at y = ρ/2, well inside
    pull = one_layer_pull(0.0, strength, rho)

    def value(theta: Tensor) -> float:
        width, votes = torch.tensor([rho], dtype=torch.float64), torch.ones(1, 8, dtype=torch.float64)
        tau, layers = torch.zeros(1, 1, dtype=torch.float64), torch.zeros(8, dtype=torch.long)
        return float(strength * smoothed(PHI @ theta, tau, width, votes, layers) + decay / 2 * (theta**2).sum())

    theta = PHI.T @ torch.full((8,), 0.15, dtype=torch.float64)  # y = 0.3
    gradient = pull.gradient(theta[None])[0] + decay * theta
    smoothness = steepest + decay
    for factor in (1.0, 3.0):
        change = value(theta - factor / smoothness * gradient) - value(theta)
        assert change == pytest.approx((factor**2 / 2 - factor) / smoothness * float(gradient.norm() ** 2), rel=1e-9)


# --- from round to round ----------------------------------------------------------------------------------------------


def drift_bound(sizes: Sequence[int], refreshed: bool, model: float, tau_max: float) -> float:
    """β^r = Σ_l 4√m κ B χ + 2√m κ B + 6 m τ_max."""
    total = 0.0
    for n, kappa in zip(sizes, norms(sizes).tolist(), strict=True):
        m = sketch_size(n, RATIO)
        total += (4 * refreshed + 2) * sqrt(m) * kappa * model + 6 * m * tau_max
    return total


@pytest.mark.parametrize("refreshed", [False, True])
def test_lemma_cross_round_drift(refreshed: bool) -> None:
    """Lemma 7: |F(θ; V^{r+1}) − F(θ; V^r)| ≤ λ β^r for one ρ, whether the sketch is refreshed (χ = 1) or kept (χ =
    0)."""
    levels, rho = 3, torch.full((len(SIZES),), 0.2, dtype=torch.float64)
    before, after = dense_model(SIZES, RATIO, SEED, 0), dense_model(SIZES, RATIO, SEED, int(refreshed))
    assert torch.equal(before, after) is not refreshed
    for trial in range(50):
        theta = drawn(DIM, seed=trial) * 10.0 ** (trial % 4 - 2)
        taus = [some_thresholds(len(SIZES), levels, seed=100 + 2 * trial + r) for r in (0, 1)]
        values = [
            smoothed_penalty(
                (phi @ theta)[None], tau, rho, some_consensus(len(LAYERS), levels, seed=300 + 2 * trial + r), LAYERS
            )
            for r, (phi, tau) in enumerate(zip((before, after), taus, strict=True))
        ]
        allowed = drift_bound(SIZES, refreshed, float(theta.norm()), float(torch.stack(taus).abs().max()))
        assert abs(float(values[1] - values[0])) <= allowed


def test_lemma_cross_round_drift_is_attained_and_needs_a_term_for_a_changed_width() -> None:
    """Kept sketch, τ = 0, T = 1, a flat sketch y = c (N/m) s and a consensus that flips from s to −s: the drift is
    2‖y‖₁, exactly β. The lemma holds for one ρ; ours is ρ_l = ρ σ̄_l^r, and where it changes from |y| to 0 the drift is
    2.5‖y‖₁: then β needs the further term Σ_l m_l |ρ_l^{r+1} − ρ_l^r| / 2, which is attained too."""
    n, m, c = 16, 8, 0.3
    spins = torch.tensor([1.0, -1, 1, 1, -1, -1, 1, -1], dtype=torch.float64)
    theta = PHI.T @ (c * spins)
    y = (PHI @ theta)[None]
    size = c * n / m
    torch.testing.assert_close(y[0], size * spins)
    tau, layers = torch.zeros(1, 1, dtype=torch.float64), torch.zeros(m, dtype=torch.long)
    agreed, opposed = (spins > 0).to(torch.uint8), (spins < 0).to(torch.uint8)

    def drift(rho_before: float, rho_after: float) -> float:
        widths = [torch.tensor([rho], dtype=torch.float64) for rho in (rho_before, rho_after)]
        return float(
            smoothed_penalty(y, tau, widths[1], opposed, layers) - smoothed_penalty(y, tau, widths[0], agreed, layers)
        )

    beta = drift_bound((n,), False, float(theta.norm()), 0.0)
    assert beta == pytest.approx(2 * m * size, rel=1e-12)
    assert drift(0.1, 0.1) == pytest.approx(beta, rel=1e-12)
    tiny = 1e-12
    assert drift(size, tiny) > 1.2 * beta
    assert drift(size, tiny) == pytest.approx(beta + m * (size - tiny) / 2, rel=1e-9)


def test_theorem_average_stationarity() -> None:
    """Theorem 1 on three quadratic clients without gradient noise: each round descends by η/2 Σ_k p_k Σ_e ‖∇F_k‖², and
    the average squared gradient is below 2(Ψ⁰ − Ψ_inf)/(ηER) + (2λ/(ηER)) Σ β^r. Ψ ≥ −λ Σ ρ m/2, because f ≥ 0."""
    sizes, levels, strength, rho, decay, rounds, steps = (16, 11), 3, 0.05, 0.3, 0.01, 6, 5
    dim, layers, samples = sum(sizes), layer_of_entry(sizes, RATIO), (5, 2, 3)
    share = torch.tensor(samples, dtype=torch.float64) / sum(samples)
    centres, curvature = drawn(3, dim, seed=1), 0.2 + drawn(3, dim, seed=2).abs()
    widths = torch.full((len(sizes),), rho, dtype=torch.float64)
    smoothness = float(curvature.max()) + float((strength * norms(sizes) ** 2 / rho).max()) + decay
    rate = 1 / smoothness
    theta, total, start, largest, tau_max = drawn(3, dim, seed=3), 0.0, None, 0.0, 0.0
    for epoch in range(rounds):
        sketch = sketch_of(*sizes, epoch=epoch)
        y = sketch.forward(theta)
        means, variances = statistics(y, sketch.sizes)
        tau = torch.from_numpy(
            thresholds_of(*pool_statistics(samples, means.numpy(), variances.numpy()), normal_quantiles(levels))
        ).double()
        vote = Vote(len(layers), levels)
        for n, own in zip(samples, symbols_of(y, tau, sketch.sizes).numpy(), strict=True):
            vote.add(own, n)
        consensus = torch.from_numpy(vote.result())
        pull = Pull(sketch, tau, torch.ones(len(sizes), dtype=torch.float64), consensus, strength, rho)
        votes, phi = votes_of(consensus, levels), dense_model(sizes, RATIO, SEED, epoch)

        def potential(models: Tensor, phi: Tensor = phi, tau: Tensor = tau, votes: Tensor = votes) -> float:
            own = [
                0.5 * (a * (x - c) ** 2).sum()
                + strength * smoothed(phi @ x, tau, widths, votes, layers)
                + decay / 2 * (x**2).sum()
                for x, a, c in zip(models, curvature, centres, strict=True)
            ]
            return float((share * torch.stack(own)).sum())

        before = potential(theta)
        start = before if start is None else start
        squares = 0.0
        for _ in range(steps):
            gradient = curvature * (theta - centres) + pull.gradient(theta) + decay * theta
            squares += float((share * (gradient**2).sum(dim=1)).sum())
            theta = theta - rate * gradient
        assert potential(theta) <= before - rate / 2 * squares
        total += squares
        largest, tau_max = max(largest, float(theta.norm(dim=1).max())), max(tau_max, float(tau.abs().max()))
    lowest = -strength * float((widths[layers] / 2).sum())
    bound = 2 * (start - lowest) + 2 * strength * rounds * drift_bound(sizes, True, largest, tau_max)
    assert total / (rounds * steps) <= bound / (rate * steps * rounds)
