"""The paper's statements about the vote."""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise, product

import numpy as np
import pytest
import torch

from definitions import penalty
from pfedlms.aggregate import Vote
from pfedlms.quantise import normal_quantiles, symbols_of, thresholds_of


def vote_of(symbols: torch.Tensor, weights: tuple[int, ...], levels: int) -> Vote:
    vote = Vote(symbols.shape[1], levels)
    for own, weight in zip(symbols.numpy(), weights, strict=True):
        vote.add(own, weight)
    return vote


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
        consensus = vote_of(symbols_of(torch.tensor(values).float(), tau, (size,)), weights, levels).result()
        chosen = np.array([[1 if q >= t else -1 for q in consensus] for t in (1, 2)])

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
    edges = [-1.5, -0.25, 0.5, 2.0]
    tau, levels = torch.tensor([edges], dtype=torch.float64), len(edges)
    places = [-9.0, *edges, *((a + b) / 2 for a, b in pairwise(edges)), 9.0]
    places += [float(np.nextafter(np.float32(t), np.float32(end))) for t in edges for end in (-np.inf, np.inf)]
    random = np.random.default_rng(3)
    seen = set()
    for _ in range(60):
        weights = tuple(random.integers(1, 5, size=4).tolist())
        y = random.choice(places, size=4)
        votes = [1 if sum(n if own >= t else -n for n, own in zip(weights, y, strict=True)) >= 0 else -1 for t in edges]
        s = votes.count(1)
        assert votes == [1] * s + [-1] * (levels - s)
        consensus = vote_of(symbols_of(torch.tensor(y)[:, None], tau, (1,)), weights, levels).result()
        assert consensus.tolist() == [s]
        seen.add(s)

        low, high = [-np.inf, *edges, np.inf][s : s + 2]
        values = torch.tensor(places, dtype=torch.float64)[:, None]
        penalised = penalty(values, tau, torch.tensor(consensus), torch.zeros(1, dtype=torch.long))
        assert (penalised == 0).tolist() == [low <= place <= high for place in places]
    assert seen == set(range(levels + 1))


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
    vote = vote_of(symbols, (4, 1, 3), 1)
    assert vote.result().tolist() == [1, 1, 1, 1]  # 4:4, 5:3, 4:4, 4:4; ties go up
    vote.add(np.zeros(4, dtype=np.uint8), 2)
    assert vote.result().tolist() == [0, 1, 0, 0]  # 4:6, 5:5, 4:6, 4:6
