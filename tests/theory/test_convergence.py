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


# --- the statements ---------------------------------------------------------------------------------------------------
# Each is written once. Without one of its terms, or with one of them halved, a test below fails. As a bound on the
# drift Lemma 7 is looser: there the tests that fail are those of the sums in its proof.


def bounded_by(start: float, sizes: Sequence[int], rate: float, decay: float, strength: float, task: float) -> float:
    """Lemma 4: B² = max(‖θ⁰‖², C_B/(ημ)), C_B = (2η/μ)(G² + 4λ² Σ κ_l² m_l)."""
    moment = sum(float(kappa) ** 2 * sketch_size(n, RATIO) for n, kappa in zip(sizes, norms(sizes), strict=True))
    return max(start**2, 2 * rate / decay * (task**2 + 4 * strength**2 * moment) / (rate * decay))


def smoothness_of(task: float, sizes: Sequence[int], strength: float, widths: Tensor, decay: float) -> float:
    """Lemma 5: L_F = L_f + max_l λ κ_l²/ρ_l + μ."""
    return task + float((strength * norms(sizes) ** 2 / widths).max()) + decay


def descent(rate: float, smoothness: float, square: float, noise: float) -> float:
    """Lemma 6: the most that E F changes in one step, −η/2 ‖∇F‖² + L_F η² σ²/2."""
    return -rate / 2 * square + smoothness * rate**2 * noise**2 / 2


def drift_bound(sizes: Sequence[int], refreshed: bool, model: float, tau_max: float) -> float:
    """Lemma 7: β^r = Σ_l 4√m κ B χ + 2√m κ B + 6 m τ_max."""
    total = 0.0
    for n, kappa in zip(sizes, norms(sizes).tolist(), strict=True):
        m = sketch_size(n, RATIO)
        total += (4 * refreshed + 2) * sqrt(m) * kappa * model + 6 * m * tau_max
    return total


def stationary_to(
    rate: float, smoothness: float, noise: float, fall: float, strength: float, drifts: float, steps: int
) -> float:
    """Theorem 1, `steps` = ER in all: 2(Ψ⁰ − Ψ_inf)/(ηER) + L_F η σ² + (2λ/(ηER)) Σ β^r."""
    return 2 * fall / (rate * steps) + smoothness * rate * noise**2 + 2 * strength * drifts / (rate * steps)


class Quadratic:
    """f(θ) = ½ Σ a_i (θ_i − c_i)² with L_f = max a, and F = f + λ R̃_ρ + μ/2 ‖θ‖² whose pull is the code's."""

    def __init__(self, levels: int, strength: float, smoothing: float, decay: float) -> None:
        self._made, self._strength, self._decay = some_pull(levels, strength, smoothing), strength, decay
        self._votes, self._phi = votes_of(self._made.consensus, levels), dense_model(SIZES, RATIO, SEED)
        self._curvature = torch.linspace(0.1, 2.0, DIM, dtype=torch.float64)
        self._centre = drawn(DIM, seed=21)
        self.smoothness = smoothness_of(2.0, SIZES, strength, self._made.rho, decay)

    def value(self, theta: Tensor) -> float:
        task = 0.5 * (self._curvature * (theta - self._centre) ** 2).sum()
        regulariser = smoothed(self._phi @ theta, self._made.tau, self._made.rho, self._votes, LAYERS)
        return float(task + self._strength * regulariser + self._decay / 2 * (theta**2).sum())

    def gradient(self, theta: Tensor) -> Tensor:
        return self._curvature * (theta - self._centre) + self._made.pull.gradient(theta) + self._decay * theta


# --- iterates ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rate", [0.1, 2.0])
def test_lemma_bounded_iterates(rate: float) -> None:
    """Lemma 4: with ‖ĝ‖ ≤ G and 0 < η ≤ 1/μ, SGD on f + λR̃ + μ/2‖θ‖² stays within B."""
    strength, decay, clip, starts = 0.2, 0.5, 3.0, (0.0, 1.0, 1e4)
    pull = some_pull(3, strength, 0.1).pull
    bound = torch.tensor([bounded_by(start, SIZES, rate, decay, strength, clip) for start in starts])
    theta = torch.tensor(starts)[:, None] * torch.nn.functional.normalize(drawn(3, DIM, seed=31), dim=1)
    for step in range(100):
        # As long as it may be, and mostly away from zero.
        gradient = clip * torch.nn.functional.normalize(0.1 * drawn(3, DIM, seed=step) - theta.sign(), dim=1)
        theta = (1 - rate * decay) * theta - rate * (gradient + pull.gradient(theta))
        assert (theta.norm(dim=1) ** 2 <= bound).all()


def test_lemma_bounded_iterates_is_attained_and_needs_its_step_size() -> None:
    """A consensus that is never reached pulls with its full norm λ 2κ√m = 2λ√N, and gradients of the same norm G along
    it carry ‖θ‖ to (G + 2λ√N)/μ, which is B for these equal parts; alone either carries it to B/√2 of its own bound.
    With η = 2.5/μ > 1/μ the iterates leave the bound."""
    strength, decay = 0.2, 0.5
    full = 2 * strength * sqrt(16)
    pull = one_layer_pull(tau=1e40, strength=strength, rho=0.1)
    along = pull.gradient(torch.zeros(1, 16, dtype=torch.float64))[0]
    assert float(along.norm()) == pytest.approx(full, rel=1e-12)
    for task, pulled, rate, reached in [
        (full, 1.0, 0.2 / decay, 1.0), (full, 0.0, 0.2 / decay, 0.5), (0.0, 1.0, 0.2 / decay, 0.5),
        (full, 1.0, 2.5 / decay, None),
    ]:  # fmt: skip
        bound = bounded_by(0.0, (16,), rate, decay, pulled * strength, task)
        theta = torch.zeros(16, dtype=torch.float64)
        for _ in range(80):
            gradient = task / full * along + pulled * pull.gradient(theta[None])[0]
            theta = (1 - rate * decay) * theta - rate * gradient
        if reached is None:
            assert float(theta.norm() ** 2) > bound
        else:
            assert float(theta.norm() ** 2) == pytest.approx(reached * bound, rel=1e-5)


# --- smoothness and descent -------------------------------------------------------------------------------------------


def test_lemma_smoothness_of_the_objective() -> None:
    """Lemma 5: ∇F is L_F-Lipschitz, κ_l = √(N/m)."""
    objective = Quadratic(levels=3, strength=0.3, smoothing=0.5, decay=0.01)
    theta, scales = drawn(200, DIM, seed=41), 10.0 ** (torch.arange(200) % 5 - 3)[:, None]
    step = scales * drawn(200, DIM, seed=42)
    change = objective.gradient(theta + step) - objective.gradient(theta)
    assert float((change.norm(dim=1) / step.norm(dim=1)).max()) <= objective.smoothness


class Parabola:
    """F = L_f/2 ‖θ‖² + λ R̃_ρ + μ/2 ‖θ‖² of layers without padding, T = 1, τ = 0, every vote the same. Where |Φθ| < ρ_l
    it is quadratic, and along Φ_lᵀu its curvature is L_f + λκ_l²/ρ_l + μ, of these two layers the larger in the
    second."""

    def __init__(self, sizes: tuple[int, ...] = (16, 64), strength: float = 0.3, vote: int = 1) -> None:
        self.task, self.strength, self.decay, self.sizes = 0.7, strength, 0.2, sizes
        self.layers, self.phi = layer_of_entry(sizes, RATIO), dense_model(sizes, RATIO, SEED)
        self.tau = torch.zeros(len(sizes), 1, dtype=torch.float64)
        self.widths = torch.tensor([0.5, 0.2][: len(sizes)], dtype=torch.float64)
        consensus = torch.full((len(self.layers),), vote, dtype=torch.uint8)
        self.votes = votes_of(consensus, 1)
        self.pull = Pull(sketch_of(*sizes), self.tau, self.widths, consensus, strength, 1.0)

    @property
    def smoothness(self) -> float:
        return smoothness_of(self.task, self.sizes, self.strength, self.widths, self.decay)

    def value(self, theta: Tensor) -> float:
        regulariser = smoothed(self.phi @ theta, self.tau, self.widths, self.votes, self.layers)
        return float(self.strength * regulariser + (self.task + self.decay) / 2 * (theta**2).sum())

    def gradient(self, theta: Tensor) -> Tensor:
        return self.pull.gradient(theta[None])[0] + (self.task + self.decay) * theta

    def steepest(self, seed: int) -> Tensor:
        """A direction Φᵀu of the second layer, of norm 1."""
        u = torch.zeros(len(self.layers), dtype=torch.float64)
        u[self.layers == 1] = drawn(int((self.layers == 1).sum()), seed=seed)
        return torch.nn.functional.normalize(self.phi.T @ u, dim=0)


def test_lemma_smoothness_is_attained_by_one_threshold_without_padding() -> None:
    """∇F changes by exactly L_F times a short step along Φᵀu in the layer where λκ²/ρ is largest; in the other by less.
    By hand: κ² = N/m = 2, so 0.7 + 0.3 · 2 / 0.2 + 0.2 = 3.9."""
    objective = Parabola()
    assert objective.smoothness == pytest.approx(3.9, rel=1e-12)
    theta, step = torch.zeros(80, dtype=torch.float64), 1e-3 * objective.steepest(seed=5)
    change = objective.gradient(theta + step) - objective.gradient(theta)
    assert float(change.norm() / step.norm()) == pytest.approx(objective.smoothness, rel=1e-9)


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
            allowed = descent(rate, objective.smoothness, float(gradient.norm() ** 2), noise)
            assert mean <= objective.value(theta) + allowed


def test_lemma_one_step_descent_is_attained_and_needs_its_step_size() -> None:
    """On the parabola, from a point from which ∇F is along a steepest direction, with noise ±σ along another one,
    E F(θ − η(∇F + ξ)) = F + (L_F η²/2 − η) ‖∇F‖² + L_F η² σ²/2. At η = 1/L_F that is the lemma with equality; at
    3/L_F it is above."""
    objective = Parabola()
    rate, direction = 1 / objective.smoothness, objective.steepest(seed=7)
    lowest = torch.zeros(80, dtype=torch.float64)
    for _ in range(2000):
        lowest = lowest - rate * objective.gradient(lowest)
    theta, noise = lowest + 0.02 * direction, 0.05
    gradient = objective.gradient(theta)
    square, aside = float(gradient.norm() ** 2), noise * objective.steepest(seed=8)
    for point in (theta, lowest + rate * aside, lowest - rate * aside):  # all of it where F is quadratic
        assert ((objective.phi @ point).abs() < objective.widths[objective.layers]).all()
    torch.testing.assert_close(gradient, 0.02 * objective.smoothness * direction, rtol=1e-9, atol=1e-12)

    def mean(factor: float) -> float:
        ends = [objective.value(theta - factor * rate * (gradient + sign * aside)) for sign in (1, -1)]
        return sum(ends) / 2 - objective.value(theta)

    assert mean(1.0) == pytest.approx(descent(rate, objective.smoothness, square, noise), rel=1e-9)
    assert mean(3.0) > descent(3 * rate, objective.smoothness, square, noise)


# --- from round to round ----------------------------------------------------------------------------------------------


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


Round = tuple[Tensor, float, Tensor]
"""Φθ, τ and v of a round, T = 1."""


def parts_of_drift(before: Round, after: Round, rho: float) -> float:
    """A + B + C of the lemma's proof, a = Φθ − τ: |‖a'‖_ρ − ‖a‖_ρ| + |⟨v' − v, a'⟩| + |⟨v, a' − a⟩|."""
    (y, tau, votes), (y_after, tau_after, votes_after) = before, after
    a, a_after = y - tau, y_after - tau_after

    def huber(z: Tensor) -> float:
        return float(torch.where(z.abs() < rho, z**2 / (2 * rho), z.abs() - rho / 2).sum())

    aligned = abs(float((votes_after - votes) @ a_after)) + abs(float(votes @ (a_after - a)))
    return abs(huber(a_after) - huber(a)) + aligned


def bound_of_parts(before: Round, after: Round) -> float:
    """The proof's bounds on these parts: 2‖a' − a‖₁ for A + C, 2‖a'‖₁ for B."""
    a, a_after = before[0] - before[1], after[0] - after[1]
    return 2 * float((a_after - a).abs().sum() + a_after.abs().sum())


SPINS = torch.tensor([1.0, -1, 1, 1, -1, -1, 1, -1], dtype=torch.float64)


def flat_sketch(size: float, spins: Tensor = SPINS) -> tuple[Tensor, float]:
    """y = Φθ with |y_i| = `size` and ‖y‖₁ = √m κ ‖θ‖, as large as it can be; and ‖θ‖."""
    theta = PHI.T @ (size / 2 * spins)  # ΦΦᵀ = 2 I
    torch.testing.assert_close(PHI @ theta, size * spins)
    return PHI @ theta, float(theta.norm())


def test_lemma_cross_round_drift_is_attained_by_the_parts_of_its_proof_for_a_kept_sketch() -> None:
    """χ = 0: Φθ = c, a threshold that goes from τ to −τ, c − τ ≥ ρ, and a consensus that reverses: A = C = 2mτ and
    B = 2m(c + τ), which is β = 2√m κB + 6mτ."""
    up = torch.ones(8, dtype=torch.float64)
    y, norm = flat_sketch(0.9, up)
    parts = parts_of_drift((y, 0.7, up), (y, -0.7, -up), rho=0.1)
    assert parts == pytest.approx(2 * 8 * 0.9 + 6 * 8 * 0.7, rel=1e-12)
    assert parts == pytest.approx(drift_bound((16,), False, norm, 0.7), rel=1e-12)


def test_lemma_cross_round_drift_of_a_refreshed_sketch() -> None:
    """χ = 1: the proof's 2‖a' − a‖₁ + 2‖a'‖₁ attain β, with Φ^{r+1} = −Φ^r and a threshold that goes from τ to −τ. A
    + B + C are at most 4√m κB + 4mτ, which is attained: they are a function of a and one of a', ‖·‖₁ ∓ ‖·‖_ρ and 3‖·‖₁
    ± ‖·‖_ρ, all concave in the squares, and ‖a‖, ‖a'‖ ≤ κB + √m τ. So they need χ, but cannot tell 4χ from 2χ."""
    y, norm = flat_sketch(0.6)
    turned = (y, 0.0, SPINS), (-y, 0.0, -SPINS)
    assert parts_of_drift(*turned, rho=0.1) == pytest.approx(4 * 8 * 0.6, rel=1e-12)
    assert parts_of_drift(*turned, rho=0.1) == pytest.approx(2 * drift_bound((16,), False, norm, 0.0), rel=1e-12)
    up = torch.ones(8, dtype=torch.float64)
    y, norm = flat_sketch(0.6, up)
    opposed = (-y, 0.7, up), (y, -0.7, -up)
    assert parts_of_drift(*opposed, rho=0.1) == pytest.approx(4 * 8 * (0.6 + 0.7), rel=1e-12)
    assert bound_of_parts(*opposed) == pytest.approx(drift_bound((16,), True, norm, 0.7), rel=1e-12)
    for trial in range(200):
        theta = drawn(2, 16, seed=trial) * 10.0 ** (trial % 4 - 2)
        theta[1] *= theta[0].norm() / theta[1].norm()  # Φθ of two sketches of one θ
        taus, votes = drawn(2, seed=300 + trial).tolist(), drawn(2, 8, seed=600 + trial).sign()
        before, after = ((PHI @ theta[r], taus[r], votes[r]) for r in (0, 1))
        length, highest = float(theta[0].norm()), max(map(abs, taus))
        parts = parts_of_drift(before, after, rho=10.0 ** (trial % 3 - 2))
        assert parts <= bound_of_parts(before, after) <= drift_bound((16,), True, length, highest)
        assert parts <= 4 * 4 * length + 4 * 8 * highest  # √m κ = √N = 4


def test_theorem_average_stationarity() -> None:
    """Theorem 1 on three quadratic clients without gradient noise: each round descends by η/2 Σ_k p_k Σ_e ‖∇F_k‖², and
    the average squared gradient is below the theorem's bound. Ψ ≥ −λ Σ ρ m/2, because f ≥ 0. Every round has a fresh
    sketch and a consensus of its own, so that gradients do not vanish: over enough rounds they are larger than Ψ⁰ −
    Ψ_inf alone allows, and what the drift adds is needed."""
    sizes, levels, strength, rho, decay, rounds, steps = (16, 11), 3, 0.3, 0.3, 0.01, 60, 3
    dim, layers, samples = sum(sizes), layer_of_entry(sizes, RATIO), (5, 2, 3)
    share = torch.tensor(samples, dtype=torch.float64) / sum(samples)
    centres, curvature = drawn(3, dim, seed=1), 0.2 + drawn(3, dim, seed=2).abs()
    widths = torch.full((len(sizes),), rho, dtype=torch.float64)
    smoothness = smoothness_of(float(curvature.max()), sizes, strength, widths, decay)
    rate = 1 / smoothness
    theta, total, start, largest, tau_max = centres.clone(), 0.0, None, float(centres.norm(dim=1).max()), 0.0
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
        assert potential(theta) <= before + descent(rate, smoothness, squares, 0.0)
        total += squares
        largest, tau_max = max(largest, float(theta.norm(dim=1).max())), max(tau_max, float(tau.abs().max()))
    fall = start + strength * float((widths[layers] / 2).sum())
    average, drifts = total / (rounds * steps), rounds * drift_bound(sizes, True, largest, tau_max)
    assert average <= stationary_to(rate, smoothness, 0.0, fall, strength, drifts, rounds * steps)
    assert average > 2 * stationary_to(rate, smoothness, 0.0, fall, strength, 0.0, rounds * steps)


@pytest.mark.parametrize("noise", [0.0, 0.4])
@pytest.mark.parametrize("steps", [1, 12])
def test_theorem_is_attained_without_a_pull(noise: float, steps: int) -> None:
    """λ = 0, η = 1/L_F: a step goes to the minimum but for its noise, ±σ along some direction. There ‖∇F‖ = σ and
    Ψ = σ²/(2L_F), which is Ψ_inf: the fall from Ψ⁰ and the noise are all of the bound, with equality."""
    objective = Parabola(strength=0.0)
    rate, aside = 1 / objective.smoothness, noise * objective.steepest(seed=8)
    theta, squares = drawn(80, seed=9), 0.0
    start = objective.value(theta)
    for step in range(steps):
        gradient = objective.gradient(theta)
        squares += float(gradient.norm() ** 2)
        theta = theta - rate * (gradient + (-1) ** step * aside)
    fall = start - objective.value(theta)
    allowed = stationary_to(rate, objective.smoothness, noise, fall, 0.0, 0.0, steps)
    assert squares / steps == pytest.approx(allowed, rel=1e-9)


def test_theorem_is_attained_by_a_consensus_that_reverses() -> None:
    """One step a round, η = 1/L_F, T = 1, τ = 0, a kept sketch, and votes that are all +1, then all −1, and so on
    (the theorem does not ask where they come from). F is quadratic between the two minima ±λΦᵀ1/L_F, where Φθ is flat:
    a reversal makes F larger by 2λ‖Φθ‖₁ = λβ, and the step from one minimum to the other takes all of it back. From the
    first round's minimum, Ψ⁰ = Ψ_inf, the R − 1 reversals between R rounds are the whole bound but one β."""
    sides, rounds = [Parabola((16,), vote=vote) for vote in (1, 0)], 20
    smoothness, strength = sides[0].smoothness, sides[0].strength
    rate, squares = 1 / smoothness, 0.0
    theta = -rate * sides[0].gradient(torch.zeros(16, dtype=torch.float64))
    for round in range(rounds):
        assert ((PHI @ theta).abs() < sides[0].widths).all()
        gradient = sides[round % 2].gradient(theta)
        squares += float(gradient.norm() ** 2)
        theta = theta - rate * gradient
    drifts = rounds * drift_bound((16,), False, float(theta.norm()), 0.0)
    allowed = stationary_to(rate, smoothness, 0.0, 0.0, strength, drifts, rounds)
    assert squares / rounds == pytest.approx((1 - 1 / rounds) * allowed, rel=1e-9)
