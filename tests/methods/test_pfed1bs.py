"""pFed1BS: its objective and its messages in float64 through a dense Φ, and pFedLMS with one threshold as its
refinement."""

from __future__ import annotations

from math import log, sqrt

import numpy as np
import pytest
import torch
from torch import Tensor

from definitions import dense_phi, hadamard, rows_kept, signs_of
from factories import (
    cohort_of,
    federation,
    hold,
    normal,
    overheard,
    task_of,
)
from pfedlms.methods.pfed1bs import PFed1BS, PFed1BSSettings
from pfedlms.methods.pfedlms import PFedLMS, PFedLMSSettings
from pfedlms.wire.frames import SERVER

SEED = 5


def penalty(theta: Tensor, phi: Tensor, consensus: Tensor, settings: PFed1BSSettings) -> Tensor:
    """λ Σ_i [log cosh(γ y_i) / γ − v_i y_i], y = Φθ; log cosh z = |z| + log(1 + e^(−2|z|)) − log 2."""
    y = phi @ theta
    z = settings.sharpness * y
    smooth = z.abs() + torch.log1p(torch.exp(-2 * z.abs())) - log(2)
    return settings.strength * (smooth / settings.sharpness - consensus * y).sum()


def some_signs(size: int, seed: int = 0) -> Tensor:
    return torch.where(normal(size, seed=seed) >= 0, 1.0, -1.0)


# --- the objective ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sharpness", [0.5, 20.0, 1e4])
@pytest.mark.parametrize("sizes", [(60,), (40, 24)], ids=["padded", "two-layers"])
def test_gradient_of_the_objective(sizes: tuple[int, ...], sharpness: float) -> None:
    """Against float64 autograd; the sketch is of the whole model, with m = floor(0.5 n) rows."""
    dim = sum(sizes)
    settings = PFed1BSSettings(ratio=0.5, strength=0.3, sharpness=sharpness)
    theta, consensus = normal(3, dim, seed=2, dtype=torch.float64), some_signs(dim // 2)
    phi = torch.from_numpy(dense_phi(dim, dim // 2, SEED))
    expected = []
    for own in theta:
        leaf = own.clone().requires_grad_()
        penalty(leaf, phi, consensus.double(), settings).backward()
        expected.append(leaf.grad)
    method = PFed1BS(task_of(*sizes, seed=SEED), settings)
    for dtype, tolerance in ((torch.float64, 1e-10), (torch.float32, 1e-4)):
        cohort = cohort_of(theta.to(dtype)).with_heard(consensus=consensus.to(dtype))
        gradient = method.objective(cohort, 0).gradient(cohort.params)
        assert gradient is not None
        assert gradient.dtype == dtype
        torch.testing.assert_close(gradient.double(), torch.stack(expected), rtol=tolerance, atol=tolerance)


# --- the vote ---------------------------------------------------------------------------------------------------------


def test_a_federation_sends_signs_of_one_fixed_sketch_and_their_majority() -> None:
    """Three rounds: every client's message is the sign of ΦΘ through the dense Φ of the whole model, the same Φ each
    round, and the answer is the weighted majority."""
    chosen = federation("pfed1bs", seed=SEED)
    dim, kept = chosen.model.layout.dim, chosen.model.layout.dim // 10
    phi = dense_phi(dim, kept, SEED)
    chosen.start()
    for _ in range(3):
        params = chosen.state()["params"].double().numpy()
        with overheard() as messages:
            chosen.play_round()
        sketched = params @ phi.T
        clear = np.abs(sketched) > 1e-5
        assert clear.mean() > 0.99
        signs = np.array([np.where(sent.values["signs"] >= 0, 1, -1) for sent in messages if sent.sender != SERVER])
        np.testing.assert_array_equal(signs[clear], np.sign(sketched)[clear])
        (down,) = [sent.values["signs"] for sent in messages if sent.sender == SERVER]
        np.testing.assert_array_equal(down, np.where(np.array(chosen.data.samples) @ signs >= 0, 1, -1))


# --- pFedLMS with one threshold ---------------------------------------------------------------------------------------

DIM, KEPT = 256, 64


def balanced_params(clients: int) -> Tensor:
    """Models whose sketch is known exactly and has mean zero: θ = D H Sᵀ u with small integers u in pairs of opposite
    sign, so that Φθ = N u / √m without rounding before the last product."""
    signs, rows = signs_of(DIM, SEED, "sketch-signs", 0, 0), rows_kept(DIM, KEPT, SEED)
    random = np.random.default_rng(8)
    params = []
    for _ in range(clients):
        half = random.integers(-3, 4, KEPT // 2)  # zeros too: sign(0) = +1
        u = random.permutation(np.concatenate([half, -half]))
        params.append(signs * (hadamard(DIM)[rows].T @ u))
    return torch.from_numpy(np.array(params)).float()


def test_one_threshold_votes_like_pfed1bs_when_the_mean_is_zero() -> None:
    """T = 1, whole model, fixed sketch, 256 = 2^8 parameters in two layers, μ̄ = 0: the same Φ, the same signs, the same
    consensus, in every round."""
    task = task_of(200, 56, clients=4, seed=SEED)
    cohort = cohort_of(balanced_params(4), samples=[3, 5, 4, 6])
    (one_bit,) = PFed1BS(task, PFed1BSSettings(ratio=KEPT / DIM)).exchanges
    settings = PFedLMSSettings(thresholds=1, ratio=KEPT / DIM, strength=0.01, refresh=10**6, layerwise=False)
    agree, vote = PFedLMS(task, settings).exchanges
    for round in (0, 999):
        with overheard() as messages:
            (theirs,), _ = hold(one_bit, cohort, round=round)
            (ours,), _ = hold(agree, cohort, round=round)
            (ours,), _ = hold(vote, ours, round=round)
        assert ours.heard["thresholds"].tolist() == [[0.0]]
        assert float(ours.heard["deviation"]) > 0
        signs = [sent.values["signs"] for sent in messages if "signs" in sent.values and sent.sender != SERVER]
        symbols = [sent.values["symbols"] for sent in messages if "symbols" in sent.values and sent.sender != SERVER]
        assert len(signs) == len(symbols) == 4
        for sign, symbol in zip(signs, symbols, strict=True):
            np.testing.assert_array_equal(symbol, (sign >= 0).astype(np.uint8))
        np.testing.assert_array_equal(ours.heard["consensus"], (theirs.heard["consensus"] > 0).to(torch.uint8))
        assert 0 < int(ours.heard["consensus"].sum()) < KEPT


def test_one_threshold_pulls_like_pfed1bs_in_the_limit() -> None:
    """ρ → 0 and γ → ∞: both pull with λ Φᵀ(sign(Φθ) − v) wherever Φθ is not zero."""
    task, consensus = task_of(DIM, seed=SEED), some_signs(KEPT, seed=3)
    cohort = cohort_of(normal(2, DIM, seed=4)).with_heard(
        consensus=(consensus > 0).to(torch.uint8), thresholds=torch.zeros(1, 1), deviation=torch.ones(1)
    )
    ours = PFedLMS(
        task,
        PFedLMSSettings(thresholds=1, ratio=KEPT / DIM, strength=0.02, smoothing=1e-6, refresh=10**6, layerwise=False),
    )
    theirs = PFed1BS(task, PFed1BSSettings(ratio=KEPT / DIM, strength=0.02, sharpness=1e6))
    phi = torch.from_numpy(dense_phi(DIM, KEPT, SEED))
    expected = 0.02 * (torch.sign(cohort.params.double() @ phi.T) - consensus) @ phi
    torch.testing.assert_close(ours.objective(cohort, 0).gradient(cohort.params).double(), expected, rtol=0, atol=1e-5)
    heard = cohort.with_heard(consensus=consensus)
    torch.testing.assert_close(theirs.objective(heard, 0).gradient(heard.params).double(), expected, rtol=0, atol=1e-5)
    assert float(expected.abs().max()) > 0.02 / sqrt(KEPT)
