"""Every lemma of the paper as a test, then the fast paths of sketch and pull against their references.

Φ is built here as a dense matrix, entry by entry, and the smoothed penalty is written here from its definition,
so that the identities below do not rest on the code they check.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from itertools import pairwise, product
from math import sqrt
from statistics import NormalDist

import numpy as np
import pytest
import torch
from torch import Tensor

from pfedlms import rng
from pfedlms.aggregate import Vote, pool_statistics
from pfedlms.models.layout import Layer, Layout
from pfedlms.pull import Pull, penalty, penalty_slope, smoothed_penalty
from pfedlms.quantise import normal_quantiles, statistics, symbols_of, thresholds_of
from pfedlms.sketch import Sketch, sketch_of_round

SEED = 11
RATIO = 0.5
# No padding (16, 64, 1), a little (5 → 8, 11 → 16) and as much as there can be (33 → 64).
SIZES = (16, 11, 1, 5, 64, 33)


def layout_of(sizes: Sequence[int]) -> Layout:
    offsets = [sum(sizes[:index]) for index in range(len(sizes))]
    return Layout(
        (), tuple(Layer(f"layer{i}", offset, n) for i, (offset, n) in enumerate(zip(offsets, sizes, strict=True)))
    )


def padded(size: int) -> int:
    """The smallest power of two that is not below `size`, by counting up."""
    pad = 1
    while pad < size:
        pad *= 2
    return pad


def rows_kept(size: int, ratio: float = RATIO) -> int:
    return max(1, int(ratio * padded(size)))


def hadamard(size: int) -> np.ndarray:
    """Sylvester's construction: H_2N = [[H, H], [H, −H]]."""
    matrix = np.ones((1, 1))
    while len(matrix) < size:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return matrix


def dense_layers(sizes: Sequence[int], epoch: int = 0, ratio: float = RATIO, seed: int = SEED) -> list[Tensor]:
    """Φ_l = 1/√m S H D P of every layer as an explicit float64 matrix `[m, n]`."""
    matrices = []
    for index, n in enumerate(sizes):
        pad, m = padded(n), rows_kept(n, ratio)
        signs = rng.signs(rng.stream(seed, "sketch-signs", epoch, index), n).astype(np.float64)
        kept = rng.rows(rng.stream(seed, "sketch-rows", epoch, index), pad.bit_length() - 1, m)
        matrices.append(torch.from_numpy(hadamard(pad)[kept][:, :n] * signs / sqrt(m)))
    return matrices


def dense(sizes: Sequence[int], epoch: int = 0, ratio: float = RATIO) -> Tensor:
    """Φ of the whole model, `[Σ m, dim]`."""
    return torch.block_diag(*dense_layers(sizes, epoch, ratio))


def layer_of_entry(sizes: Sequence[int], ratio: float = RATIO) -> Tensor:
    return torch.tensor([index for index, n in enumerate(sizes) for _ in range(rows_kept(n, ratio))])


def norms(sizes: Sequence[int], ratio: float = RATIO) -> Tensor:
    """κ_l = √(N/m)."""
    return torch.tensor([sqrt(padded(n) / rows_kept(n, ratio)) for n in sizes], dtype=torch.float64)


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def some_thresholds(layers: int, levels: int, seed: int = 0) -> Tensor:
    return normal(layers, levels, seed=seed).sort(dim=1).values


def some_consensus(size: int, levels: int, seed: int = 0) -> Tensor:
    chosen = torch.randint(0, levels + 1, (size,), generator=torch.Generator().manual_seed(seed))
    return chosen.to(torch.uint8)


def votes_of(consensus: Tensor, levels: int) -> Tensor:
    """v_t(i) = +1 iff q̃(i) ≥ t: `[T, Σ m]`."""
    return torch.stack([torch.where(consensus >= t, 1.0, -1.0).double() for t in range(1, levels + 1)])


def smoothed(y: Tensor, tau: Tensor, rho: Tensor, votes: Tensor, layers: Tensor) -> Tensor:
    """R̃_ρ of one model from its definition, max over |u| ≤ 1 of ⟨u, z⟩ − ρ/2 ‖u‖² at u = clip(z/ρ); autograd follows
    it."""
    total = y.new_zeros(())
    for t in range(tau.shape[1]):
        z = y - tau[layers, t]
        u = (z / rho[layers]).clamp(-1, 1).detach()  # the maximiser: by Danskin's theorem its derivative drops out
        total = total + (u * z - rho[layers] / 2 * u**2 - votes[t] * z).sum()
    return total / tau.shape[1]


# --- server ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("weights", [(1, 1, 1, 1), (3, 1, 2), (5, 1, 1, 3), (7,)])
def test_lemma_majority_voting_minimises_the_weighted_disagreement(weights: tuple[int, ...]) -> None:
    """Lemma 1: v_t = sign(Σ p_k b_t^k) minimises J(V) = 1/T Σ_t Σ_k p_k ‖[v_t ⊙ b_t^k]₋‖₁ over all V ∈ {±1}; ties give
    +1."""
    tau = torch.tensor([[-1.0, 0.5]])
    levels, size, total = 2, 3, sum(weights)
    random = np.random.default_rng(sum(weights))
    ties = 0
    for _ in range(20):
        # Values on a coarse grid that holds the thresholds, so that equalities and ties happen.
        values = random.choice([-2.0, -1.0, 0.0, 0.5, 1.0], size=(len(weights), size))
        signs = np.where(values[:, None, :] >= tau.numpy()[0][None, :, None], 1, -1)  # b: [clients, T, m]
        vote = Vote(size, levels)
        for weight, own in zip(weights, symbols_of(torch.tensor(values).float(), tau, (size,)).numpy(), strict=True):
            vote.add(own, weight)
        chosen = np.array([[1 if q >= t else -1 for q in vote.result()] for t in (1, 2)])

        def disagreement(v: np.ndarray, signs: np.ndarray = signs) -> Fraction:
            per_client = (v[None] * signs == -1).sum(axis=(1, 2))
            return sum(
                (Fraction(n, total * levels) * int(c) for n, c in zip(weights, per_client, strict=True)), Fraction(0)
            )

        everything = [np.array(v).reshape(levels, size) for v in product((-1, 1), repeat=levels * size)]
        assert disagreement(chosen) == min(disagreement(v) for v in everything)
        sums = np.tensordot(np.array(weights), signs, axes=1)
        ties += int((sums == 0).sum())
        assert (chosen[sums == 0] == 1).all()
    assert ties > 0 or sum(weights) % 2 == 1


def test_lemma_interval_consistency() -> None:
    """Lemma 2: votes are +1 up to some s and −1 after it, and the penalty of a coordinate is zero if and only if
    y ∈ [τ_s, τ_{s+1}], closed at both ends (τ_0 = −∞, τ_{T+1} = +∞)."""
    tau = [-1.5, -0.25, 0.5, 2.0]
    levels = len(tau)
    random = np.random.default_rng(3)
    places = [-9.0, *tau, *((a + b) / 2 for a, b in pairwise(tau)), 9.0]
    places += [float(np.nextafter(t, end)) for t in tau for end in (-np.inf, np.inf)]
    seen = set()
    for _ in range(60):
        weights = random.integers(1, 5, size=4)
        y = random.choice(places, size=4)
        votes = [
            1 if sum(int(n) * (1 if own >= t else -1) for n, own in zip(weights, y, strict=True)) >= 0 else -1
            for t in tau
        ]
        s = votes.count(1)
        assert votes == [1] * s + [-1] * (levels - s)

        vote = Vote(1, levels)
        own_symbols = symbols_of(torch.tensor(y)[:, None], torch.tensor([tau], dtype=torch.float64), (1,))
        for n, own in zip(weights, own_symbols.numpy(), strict=True):
            vote.add(own, int(n))
        assert vote.result().tolist() == [s]
        seen.add(s)

        low, high = [-np.inf, *tau, np.inf][s : s + 2]
        values = torch.tensor(places, dtype=torch.float64)[:, None]
        zero = (
            penalty(
                values,
                torch.tensor([tau], dtype=torch.float64),
                torch.tensor(vote.result()),
                torch.zeros(1, dtype=torch.long),
            )
            == 0
        )
        assert zero.tolist() == [low <= place <= high for place in places]
    assert seen == set(range(levels + 1))


def test_penalty_by_hand() -> None:
    """R = (2/T) Σ_t Σ_i max(0, −v_t (y − τ_t)): τ = (0, 1, 3), q̃ = (3, 0), y = (0.5, 2): (2/3)(0.5 + 2.5 + 2 + 1) =
    4."""
    value = penalty(
        torch.tensor([[0.5, 2.0]]),
        torch.tensor([[0.0, 1.0, 3.0]]),
        torch.tensor([3, 0], dtype=torch.uint8),
        torch.zeros(2, dtype=torch.long),
    )
    assert value.tolist() == [4.0]


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
        zero = (
            penalty(
                grid, torch.tensor(tau)[None], torch.tensor([s], dtype=torch.uint8), torch.zeros(1, dtype=torch.long)
            )
            == 0
        )
        inside = grid[zero]
        width = float(inside.max() - inside.min())
        assert tau[s] - tau[s - 1] - 2 * step <= width <= widest + 1e-9


# --- the penalty and its smooth form --------------------------------------------------------------


def test_smoothed_penalty_is_the_maximum_over_the_dual_ball() -> None:
    """‖z‖_{1,ρ} = max over ‖u‖_∞ ≤ 1 of ⟨u, z⟩ − ρ/2 ‖u‖², by brute force over a fine grid of u."""
    levels, rho = 3, 0.4
    tau, consensus = some_thresholds(1, levels, seed=1), some_consensus(12, levels, seed=2)
    y = normal(1, 12, seed=3)
    u = torch.linspace(-1, 1, 20001, dtype=torch.float64)
    total = 0.0
    for t in range(levels):
        z = y[0] - tau[0, t]
        best = (u[:, None] * z - rho / 2 * u[:, None] ** 2).max(dim=0).values
        total += float((best - votes_of(consensus, levels)[t] * z).sum())
    value = smoothed_penalty(
        y, tau, torch.tensor([rho], dtype=torch.float64), consensus, torch.zeros(12, dtype=torch.long)
    )
    assert value.item() == pytest.approx(total / levels, abs=1e-6)


def test_lemma_smoothing_error_is_of_order_rho() -> None:
    """0 ≤ R − R̃_ρ ≤ Σ_l ρ_l m_l / 2 everywhere. The upper end is attained where every |y − τ_t| ≥ ρ (so R̃ = −ρ/2 for
    each coordinate where all is consistent, not 0), the lower end where y = τ."""
    layers, levels = layer_of_entry(SIZES), 5
    tau, consensus = some_thresholds(len(SIZES), levels, seed=4), some_consensus(len(layers), levels, seed=5)
    rho = torch.tensor([0.3, 0.05, 1.0, 0.7, 0.2, 2.0], dtype=torch.float64)
    bound = float((rho[layers] / 2).sum())
    y = torch.cat([scale * normal(20, len(layers), seed=6) for scale in (0.01, 1.0, 30.0)])
    gap = penalty(y, tau, consensus, layers) - smoothed_penalty(y, tau, rho, consensus, layers)
    assert (gap > 0).all()
    assert (gap < bound).all()  # random points: some lie within ρ of a threshold

    far = torch.full((1, len(layers)), 50.0, dtype=torch.float64)
    gap = penalty(far, tau, consensus, layers) - smoothed_penalty(far, tau, rho, consensus, layers)
    assert gap.item() == pytest.approx(bound, rel=1e-12)
    agreed = torch.full_like(consensus, levels)
    assert penalty(far, tau, agreed, layers).item() == 0
    assert smoothed_penalty(far, tau, rho, agreed, layers).item() == pytest.approx(-bound, rel=1e-12)

    at = tau[:, :1]
    for vote in (0, 1):
        same = torch.full_like(consensus, vote)
        assert penalty(at[layers].T, at, same, layers).item() == 0
        assert smoothed_penalty(at[layers].T, at, rho, same, layers).item() == 0


def test_smoothed_penalty_of_a_constant_layer_is_not_nan() -> None:
    """With ρ = 0 the smooth form is R itself; at y = τ that is 0."""
    zero = torch.zeros(1, dtype=torch.float64)
    consensus, layers = torch.tensor([3], dtype=torch.uint8), torch.zeros(1, dtype=torch.long)
    assert smoothed_penalty(zero[None], zero.expand(1, 3), zero, consensus, layers).tolist() == [0.0]


def a_pull(levels: int, strength: float, smoothing: float, seed: int = 0) -> tuple[Pull, Tensor, Tensor, Tensor]:
    """A pull through Φ of SIZES with hand-made thresholds; also τ, ρ_l and the votes."""
    layers = layer_of_entry(SIZES)
    tau, consensus = (
        some_thresholds(len(SIZES), levels, seed=seed + 1),
        some_consensus(len(layers), levels, seed=seed + 2),
    )
    deviations = torch.tensor([1.0, 0.5, 2.0, 1.5, 0.8, 1.2], dtype=torch.float64)
    pull = Pull(Sketch(layout_of(SIZES), RATIO, SEED, 0), tau, deviations, consensus, strength, smoothing)
    return pull, tau, smoothing * deviations, votes_of(consensus, levels)


def objective(theta: Tensor, tau: Tensor, rho: Tensor, votes: Tensor, strength: float) -> Tensor:
    """λ R̃_ρ(Φθ) through the dense Φ."""
    return strength * smoothed(dense(SIZES) @ theta, tau, rho, votes, layer_of_entry(SIZES))


@pytest.mark.parametrize("levels", [1, 3, 7])
@pytest.mark.parametrize("smoothing", [0.05, 1.0])
def test_lemma_closed_form_gradient_equals_autograd(levels: int, smoothing: float) -> None:
    """∇_θ R̃_ρ = (1/T) Φᵀ Σ_t [clip((Φθ − τ_t)/ρ, −1, 1) − v_t], against float64 autograd through a dense Φ."""
    strength = 0.3
    pull, tau, rho, votes = a_pull(levels, strength, smoothing)
    theta = normal(4, sum(SIZES), seed=9)
    expected = []
    for own in theta:
        leaf = own.clone().requires_grad_()
        objective(leaf, tau, rho, votes, strength).backward()
        expected.append(leaf.grad)
    torch.testing.assert_close(pull.gradient(theta), torch.stack(expected), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(pull.gradient(theta.float()).double(), torch.stack(expected), rtol=1e-4, atol=1e-4)


def test_smoothed_penalty_equals_its_definition() -> None:
    """The code's R̃_ρ and the one written in this file from the definition, on several layers."""
    _, tau, rho, votes = a_pull(3, 1.0, 0.3)
    layers = layer_of_entry(SIZES)
    y = normal(1, len(layers), seed=12)
    value = smoothed_penalty(y, tau, rho, some_consensus(len(layers), 3, seed=2), layers)
    assert value.item() == pytest.approx(smoothed(y[0], tau, rho, votes, layers).item(), rel=1e-12)


# --- constants of the analysis
# ------------------------------------------------------------------------------------------


class Quadratic:
    """f(θ) = ½ Σ a_i (θ_i − c_i)² with L_f = max a, and F = f + λ R̃_ρ + μ/2 ‖θ‖² whose pull is the code's."""

    def __init__(self, levels: int, strength: float, smoothing: float, decay: float) -> None:
        self.pull, self.tau, self.rho, self.votes = a_pull(levels, strength, smoothing)
        self.curvature = torch.linspace(0.1, 2.0, sum(SIZES), dtype=torch.float64)
        self.centre = normal(sum(SIZES), seed=21)
        self.strength, self.decay = strength, decay
        self.smoothness = 2.0 + float((strength * norms(SIZES) ** 2 / self.rho).max()) + decay

    def value(self, theta: Tensor) -> float:
        task = 0.5 * (self.curvature * (theta - self.centre) ** 2).sum()
        regulariser = objective(theta, self.tau, self.rho, self.votes, self.strength)
        return float(task + regulariser + self.decay / 2 * (theta**2).sum())

    def gradient(self, theta: Tensor) -> Tensor:
        return self.curvature * (theta - self.centre) + self.pull.gradient(theta) + self.decay * theta


def test_lemma_smoothness_of_the_objective() -> None:
    """Lemma 5: ∇F is L_F-Lipschitz with L_F = L_f + max_l λ κ_l²/ρ_l + μ, κ_l = √(N/m)."""
    objective_ = Quadratic(levels=3, strength=0.3, smoothing=0.5, decay=0.01)
    theta, scales = normal(200, sum(SIZES), seed=41), 10.0 ** (torch.arange(200) % 5 - 3)[:, None]
    step = scales * normal(200, sum(SIZES), seed=42)
    change = objective_.gradient(theta + step) - objective_.gradient(theta)
    steepest = float((change.norm(dim=1) / step.norm(dim=1)).max())
    assert 0.1 * objective_.smoothness < steepest <= objective_.smoothness


def test_lemma_smoothness_is_attained_by_one_threshold_without_padding() -> None:
    """For T = 1, ΦΦᵀ = (N/m) I and a step along Φᵀu inside the smoothed region, ∇(λR̃) changes by exactly λ κ²/ρ times
    the step."""
    n, strength, rho = 16, 0.3, 0.5
    pull = one_layer_pull(0.0, strength, rho)
    theta = torch.zeros(n, dtype=torch.float64)
    step = 1e-3 * dense((n,)).T @ normal(8, seed=5)
    change = (pull.gradient((theta + step)[None]) - pull.gradient(theta[None]))[0]
    assert float(change.norm() / step.norm()) == pytest.approx(strength * 2 / rho, rel=1e-9)


@pytest.mark.parametrize("rate", [0.1, 2.0])
def test_lemma_bounded_iterates(rate: float) -> None:
    """Lemma 4: with ‖ĝ‖ ≤ G and 0 < η ≤ 1/μ, SGD on f + λR̃ + μ/2‖θ‖² stays within
    B² = max(‖θ⁰‖², C_B/(ημ)), C_B = (2η/μ)(G² + 4λ² Σ κ_l² m_l)."""
    strength, decay, clip, starts = 0.2, 0.5, 3.0, torch.tensor([[0.0], [1.0], [1e4]], dtype=torch.float64)
    pull, *_ = a_pull(3, strength, 0.1)
    moment = sum(float(k) ** 2 * rows_kept(n) for k, n in zip(norms(SIZES), SIZES, strict=True))
    bound = (starts[:, 0] ** 2).clamp(min=(2 * rate / decay) * (clip**2 + 4 * strength**2 * moment) / (rate * decay))
    theta = starts * torch.nn.functional.normalize(normal(3, sum(SIZES), seed=31), dim=1)
    for step in range(100):
        # As long as it may be, and mostly outwards.
        gradient = clip * torch.nn.functional.normalize(0.1 * normal(3, sum(SIZES), seed=step) - theta.sign(), dim=1)
        theta = (1 - rate * decay) * theta - rate * (gradient + pull.gradient(theta))
        assert (theta.norm(dim=1) ** 2 <= bound).all()
    assert (theta.norm(dim=1) > 0.3 * sqrt(2) * clip / decay).all()  # the gradients alone carry it that far


def one_layer_pull(tau: float, strength: float, rho: float) -> Pull:
    """T = 1, one layer of 16 parameters without padding (N/m = 2), every vote +1."""
    thresholds, deviation = torch.full((1, 1), tau, dtype=torch.float64), torch.ones(1, dtype=torch.float64)
    return Pull(
        Sketch(layout_of((16,)), RATIO, SEED, 0), thresholds, deviation, torch.ones(8, dtype=torch.uint8), strength, rho
    )


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


@pytest.mark.parametrize("noise", [0.0, 0.5, 20.0])
def test_lemma_one_step_descent(noise: float) -> None:
    """Lemma 6: for η ≤ 1/L_F, E F(θ − η(∇F + ξ)) ≤ F(θ) − η/2 ‖∇F‖² + L_F η² σ²/2. The noise is ±σ e_i, each
    of the 2 dim outcomes equally likely, so that the expectation is a finite sum."""
    chosen = Quadratic(levels=3, strength=0.3, smoothing=0.5, decay=0.01)
    dim = sum(SIZES)
    for rate in (1 / chosen.smoothness, 0.2 / chosen.smoothness):
        for trial in range(2):
            theta = normal(dim, seed=50 + trial)
            gradient = chosen.gradient(theta[None])[0]
            shifts = [torch.zeros(dim, dtype=torch.float64)]
            if noise:
                shifts = [sign * noise * axis for axis in torch.eye(dim, dtype=torch.float64) for sign in (1, -1)]
            mean = sum(chosen.value(theta - rate * (gradient + shift)) for shift in shifts) / len(shifts)
            allowed = -rate / 2 * float(gradient.norm() ** 2) + chosen.smoothness * rate**2 * noise**2 / 2
            assert mean <= chosen.value(theta) + allowed


def test_lemma_one_step_descent_is_attained_and_needs_its_step_size() -> None:
    """f = 0, T = 1, inside the smoothed region, along Φᵀ1: F is a parabola of curvature L_F = λκ²/ρ + μ, so that
    F(θ − η∇F) = F + (L_F η²/2 − η) ‖∇F‖². At η = 1/L_F that is the lemma with equality; at 3/L_F the step goes up."""
    strength, rho = 0.3, 0.5
    steepest = strength * 2 / rho
    decay = steepest  # then the minimum lies at y = ρ/2, well inside
    pull, phi = one_layer_pull(0.0, strength, rho), dense((16,))

    def value(theta: Tensor) -> float:
        width, votes = torch.tensor([rho], dtype=torch.float64), torch.ones(1, 8, dtype=torch.float64)
        regulariser = smoothed(
            phi @ theta, torch.zeros(1, 1, dtype=torch.float64), width, votes, torch.zeros(8, dtype=torch.long)
        )
        return float(strength * regulariser + decay / 2 * (theta**2).sum())

    theta = phi.T @ torch.full((8,), 0.15, dtype=torch.float64)  # y = 0.3
    gradient = pull.gradient(theta[None])[0] + decay * theta
    smoothness = steepest + decay
    for factor in (1.0, 3.0):
        change = value(theta - factor / smoothness * gradient) - value(theta)
        assert change == pytest.approx((factor**2 / 2 - factor) / smoothness * float(gradient.norm() ** 2), rel=1e-9)


def drift_bound(sizes: Sequence[int], refreshed: bool, model: float, tau_max: float) -> float:
    """β^r = Σ_l 4√m κ B χ + 2√m κ B + 6 m τ_max."""
    total = 0.0
    for n, kappa in zip(sizes, norms(sizes).tolist(), strict=True):
        m = rows_kept(n)
        total += (4 * refreshed + 2) * sqrt(m) * kappa * model + 6 * m * tau_max
    return total


@pytest.mark.parametrize("refreshed", [False, True])
def test_lemma_cross_round_drift(refreshed: bool) -> None:
    """Lemma 7: |F(θ; V^{r+1}) − F(θ; V^r)| ≤ λ β^r for one ρ, whether the sketch is refreshed (χ = 1) or kept (χ =
    0)."""
    layers, levels = layer_of_entry(SIZES), 3
    rho = torch.full((len(SIZES),), 0.2, dtype=torch.float64)
    before, after = dense(SIZES, 0), dense(SIZES, int(refreshed))
    assert torch.equal(before, after) is not refreshed
    for trial in range(50):
        theta = normal(sum(SIZES), seed=trial) * 10.0 ** (trial % 4 - 2)
        taus = [some_thresholds(len(SIZES), levels, seed=100 + 2 * trial + r) for r in (0, 1)]
        values = [
            smoothed_penalty(
                (phi @ theta)[None], tau, rho, some_consensus(len(layers), levels, seed=300 + 2 * trial + r), layers
            )
            for r, (phi, tau) in enumerate(zip((before, after), taus, strict=True))
        ]
        allowed = drift_bound(SIZES, refreshed, float(theta.norm()), float(torch.stack(taus).abs().max()))
        assert abs(float(values[1] - values[0])) <= allowed


def test_lemma_cross_round_drift_is_attained_and_needs_a_term_for_a_changed_width() -> None:
    """Kept sketch, τ = 0, T = 1, a flat sketch y = c (N/m) s and a consensus that flips from s to −s: the drift is
    2‖y‖₁,
    exactly β. The lemma holds for one ρ; ours is ρ_l = ρ σ̄_l^r, and where it changes from |y| to 0 the drift is
    2.5‖y‖₁: then β needs the further term Σ_l m_l |ρ_l^{r+1} − ρ_l^r| / 2, which is attained too."""
    n, m, c = 16, 8, 0.3
    spins = torch.tensor([1.0, -1, 1, 1, -1, -1, 1, -1], dtype=torch.float64)
    theta = dense((n,)).T @ (c * spins)
    y = (dense((n,)) @ theta)[None]
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
    dim, layers, samples = sum(sizes), layer_of_entry(sizes), (5, 2, 3)
    share = torch.tensor(samples, dtype=torch.float64) / sum(samples)
    centres, curvature = normal(3, dim, seed=1), 0.2 + normal(3, dim, seed=2).abs()
    widths = torch.full((len(sizes),), rho, dtype=torch.float64)
    smoothness = float(curvature.max()) + float((strength * norms(sizes) ** 2 / rho).max()) + decay
    rate = 1 / smoothness
    theta, total, start, largest, tau_max = normal(3, dim, seed=3), 0.0, None, 0.0, 0.0
    for epoch in range(rounds):
        sketch = Sketch(layout_of(sizes), RATIO, SEED, epoch)
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
        votes, phi = votes_of(consensus, levels), dense(sizes, epoch)

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


# --- the sketch
# ---------------------------------------------------------------------------------------------------------


def test_sketch_equals_the_dense_matrix() -> None:
    """Φ = 1/√m S H D P and its transpose, several layers, against explicit matrices."""
    for epoch in (0, 3):
        sketch, phi = Sketch(layout_of(SIZES), RATIO, SEED, epoch), dense(SIZES, epoch)
        assert sketch.sizes == (8, 8, 1, 4, 32, 32)
        assert sketch.size == 85
        assert torch.equal(sketch.layers, layer_of_entry(SIZES))
        theta, u = normal(3, sum(SIZES), seed=1), normal(3, 85, seed=2)
        torch.testing.assert_close(sketch.forward(theta), theta @ phi.T, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(sketch.adjoint(u), u @ phi, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_lemma_adjoint_identity_for_every_layer(dtype: torch.dtype) -> None:
    """⟨Φ_l x, u⟩ = ⟨x, Φ_lᵀ u⟩ for every layer, padded or not, and no layer reaches into another."""
    sketch = Sketch(layout_of(SIZES), RATIO, SEED, 0)
    ends, stops = np.cumsum(SIZES), np.cumsum(sketch.sizes)
    for index, n in enumerate(SIZES):
        x, u = torch.zeros(1, sum(SIZES), dtype=dtype), torch.zeros(1, sketch.size, dtype=dtype)
        mine, own = slice(ends[index] - n, ends[index]), slice(stops[index] - sketch.sizes[index], stops[index])
        x[0, mine], u[0, own] = (
            normal(n, seed=index, dtype=dtype),
            normal(sketch.sizes[index], seed=50 + index, dtype=dtype),
        )
        y, back = sketch.forward(x), sketch.adjoint(u)
        assert float((y * u).sum()) == pytest.approx(
            float((x * back).sum()), rel=1e-4 if dtype == torch.float32 else 1e-12
        )
        assert y[0, own].abs().sum() > 0
        y[0, own], back[0, mine] = 0, 0
        assert not y.any()
        assert not back.any()


@pytest.mark.parametrize("size", [1, 2, 16, 64, 4096])
def test_lemma_rows_are_orthogonal_without_padding(size: int) -> None:
    """Φ Φᵀ = (N/m) I for a layer without padding."""
    ratio = 1 / 64 if size > 64 else RATIO
    sketch = Sketch(layout_of((size,)), ratio, SEED, 2)
    product_ = sketch.forward(sketch.adjoint(torch.eye(sketch.size, dtype=torch.float64)))
    torch.testing.assert_close(
        product_, torch.eye(sketch.size, dtype=torch.float64) * size / sketch.size, rtol=1e-12, atol=1e-12
    )


@pytest.mark.parametrize("size", [11, 33, 5])
def test_lemma_rows_are_not_orthogonal_with_padding(size: int) -> None:
    """With padding the diagonal of ΦΦᵀ is n/m < N/m and other entries are not zero."""
    sketch = Sketch(layout_of((size,)), RATIO, SEED, 0)
    product_ = sketch.forward(sketch.adjoint(torch.eye(sketch.size, dtype=torch.float64)))
    torch.testing.assert_close(product_.diagonal(), torch.full((sketch.size,), size / sketch.size, dtype=torch.float64))
    assert (product_ - torch.diag(product_.diagonal())).abs().max() > 0.1


@pytest.mark.parametrize("size", [1, 5, 11, 16, 33, 64, 100])
@pytest.mark.parametrize("ratio", [0.1, 0.5, 1.0])
def test_lemma_norm_of_the_sketch(size: int, ratio: float) -> None:
    """‖Φ‖₂ ≤ √(N/m), with equality without padding (largest singular value of the matrix of `forward`)."""
    sketch = Sketch(layout_of((size,)), ratio, SEED, 1)
    matrix = sketch.forward(torch.eye(size, dtype=torch.float64)).T.numpy()
    largest, bound = np.linalg.svd(matrix, compute_uv=False)[0], sqrt(padded(size) / rows_kept(size, ratio))
    assert largest <= bound * (1 + 1e-12)
    assert np.allclose(np.abs(matrix), 1 / sqrt(rows_kept(size, ratio)))
    if size == padded(size):
        assert largest == pytest.approx(bound, rel=1e-12)


def test_one_threshold_is_one_bit_voting_at_the_mean() -> None:
    """T = 1: the threshold is μ̄ to the bit, a symbol is 1[y ≥ μ̄] and the consensus the weighted majority of those
    bits."""
    assert normal_quantiles(1).tolist() == [0.0]
    mean, deviation = np.float32([0.1, -3.7]), np.float32([1.3, 0.01])
    tau = thresholds_of(mean, deviation, normal_quantiles(1))
    assert tau.tolist() == [[mean[0]], [mean[1]]]
    y = torch.tensor([[0.1, 5.0, -3.7, -4.0], [0.0, 0.2, -3.8, 0.0], [-1.0, -2.0, -9.0, -3.6]])
    symbols = symbols_of(y, torch.from_numpy(tau), (2, 2))
    assert symbols.tolist() == [[1, 1, 1, 0], [0, 1, 0, 1], [0, 0, 0, 1]]
    vote = Vote(4, 1)
    for own, weight in zip(symbols.numpy(), (4, 1, 3), strict=True):
        vote.add(own, weight)
    assert vote.result().tolist() == [1, 1, 1, 1]  # 4:4 and 4:4 are ties, which go up; 5:3 and 4:4
    vote.add(np.zeros(4, dtype=np.uint8), 2)
    assert vote.result().tolist() == [0, 1, 0, 0]  # 4:6, 5:5, 4:6, 4:6


# --- fast paths against their references
# ----------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [SIZES, (1,), (2570, 8193), (70_000, 3, 64)])
@pytest.mark.parametrize("clients", [1, 5])
def test_fast_sketch_has_the_bits_of_the_reference(sizes: tuple[int, ...], clients: int) -> None:
    sketch = Sketch(layout_of(sizes), 0.1, SEED, 1)
    theta = normal(clients, sum(sizes), seed=1, dtype=torch.float32)
    forward = sketch.forward(theta)
    assert forward.dtype == torch.float32
    assert torch.equal(forward, sketch.forward_reference(theta))
    u = normal(clients, sketch.size, seed=2, dtype=torch.float32)
    assert torch.equal(sketch.adjoint(u), sketch.adjoint_reference(u))


def test_reference_sketch_equals_the_dense_matrix() -> None:
    sketch, phi = Sketch(layout_of(SIZES), RATIO, SEED, 0), dense(SIZES)
    theta, u = normal(2, sum(SIZES), seed=1), normal(2, sketch.size, seed=2)
    torch.testing.assert_close(sketch.forward_reference(theta), theta @ phi.T, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(sketch.adjoint_reference(u), u @ phi, rtol=1e-12, atol=1e-12)


def test_sketch_of_a_cohort_is_the_sketch_of_each_client() -> None:
    sketch = Sketch(layout_of(SIZES), RATIO, SEED, 0)
    theta = normal(7, sum(SIZES), seed=1, dtype=torch.float32)
    alone = torch.cat([sketch.forward(own[None]) for own in theta])
    assert torch.equal(sketch.forward(theta), alone)
    every_second = theta[::2]  # not contiguous
    assert torch.equal(sketch.forward(every_second), alone[::2])


@pytest.mark.parametrize("other", [(SEED + 1, 0), (SEED, 1)])
def test_another_seed_or_epoch_is_another_sketch(other: tuple[int, int]) -> None:
    theta = normal(1, sum(SIZES), seed=1, dtype=torch.float32)
    first, again = (Sketch(layout_of(SIZES), RATIO, SEED, 0).forward(theta) for _ in range(2))
    assert torch.equal(first, again)
    assert torch.equal(sketch_of_round(layout_of(SIZES), RATIO, SEED, 0).forward(theta), first)
    assert not torch.equal(sketch_of_round(layout_of(SIZES), RATIO, *other).forward(theta), first)


def test_equal_layers_have_different_sketches() -> None:
    """The layer's index is part of the stream: two layers of the same shape and values are sketched differently."""
    sketch = Sketch(layout_of((64, 64)), RATIO, SEED, 0)
    y = sketch.forward(normal(1, 64, seed=1).repeat(1, 2))
    assert not torch.equal(y[:, :32].sort().values, y[:, 32:].sort().values)


@pytest.mark.parametrize("direction", ["forward", "adjoint"])
def test_wrong_width_is_refused(direction: str) -> None:
    sketch = Sketch(layout_of((16, 11)), RATIO, SEED, 0)
    with pytest.raises(ValueError):
        getattr(sketch, direction)(torch.ones(1, 5))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("levels", [1, 7, 255])
def test_the_pull_in_one_pass_has_the_bits_of_its_parts(dtype: torch.dtype, levels: int) -> None:
    sketch = Sketch(layout_of(SIZES), RATIO, SEED, 0)
    theta = normal(4, sketch.dim, seed=3, dtype=dtype)
    tau, consensus = some_thresholds(len(SIZES), levels).to(dtype), some_consensus(sketch.size, levels)
    tau[0] = sketch.forward(theta)[0, 0]  # on a threshold
    deviations = torch.tensor([0.3, 0.0, 1e-30, 0.7, 0.2, 2.0], dtype=dtype)  # layer 1 is constant, layer 2 almost
    pull = Pull(sketch, tau, deviations, consensus, 0.05, 0.5)
    fast = pull.gradient(theta)
    assert fast.dtype == dtype
    assert torch.equal(fast, pull.gradient_in_parts(theta))
    first, second, third = (fast[:, offset : offset + size] for offset, size in parts_of(SIZES)[:3])
    assert first.any()
    assert third.any()
    assert not second.any()


def parts_of(sizes: tuple[int, ...]) -> list[tuple[int, int]]:
    return [(sum(sizes[:index]), size) for index, size in enumerate(sizes)]


def test_slope_by_hand() -> None:
    """τ = (0, 1, 3), ρ = 0.5, y = 0.25, q̃ = 2: (1/3) [(0.5 − 1) + (−1 − 1) + (−1 + 1)] = −2.5/3."""
    layers = torch.zeros(1, dtype=torch.long)
    tau, rho = torch.tensor([[0.0, 1.0, 3.0]], dtype=torch.float64), torch.tensor([0.5], dtype=torch.float64)
    slope = penalty_slope(
        torch.tensor([[0.25]], dtype=torch.float64), tau, rho, torch.tensor([2], dtype=torch.uint8), layers
    )
    assert slope.item() == pytest.approx(-2.5 / 3, rel=1e-15)
