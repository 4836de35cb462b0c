"""OBCSAA: the decoder against float64, and a step with the norm of the clients' updates."""

from __future__ import annotations

from itertools import pairwise
from math import pi
from typing import Any

import numpy as np
import pytest
import torch
from plain_client import padded
from torch import Tensor

import factories
from definitions import dense_phi
from factories import cohort_of, hold, layout_of, normal, task_of
from pfedlms.methods import Exchange
from pfedlms.methods.obcsaa import decode_mean_of_signs, keep_largest
from pfedlms.sketch import Sketch


def sketch_of(dim: int, measured: int, seed: int = 0) -> Sketch:
    return Sketch(layout_of(dim), measured / padded(dim), seed, epoch=0)


def plain_decoder(phi: np.ndarray, bound: float, mean: np.ndarray, kept: int, iterations: int) -> list[np.ndarray]:
    """Every iterate, not normalised: x ← top_κ(x − ∇/L) of Σ [log cosh(√m Φx) − ȳ √m Φx]/m + α/2 ‖x‖², L = N/m + α,
    from top_κ(Φᵀȳ)/(√m L), in float64 through a dense Φ; `bound` is N/m."""

    def top(x: np.ndarray) -> np.ndarray:
        return np.where(np.abs(x) >= np.sort(np.abs(x))[-kept], x, 0)

    root, alpha = len(phi) ** 0.5, pi * kept / (2 * len(phi))
    iterates = [top(phi.T @ mean) / (root * (bound + alpha))]
    for _ in range(iterations):
        x = iterates[-1]
        gradient = phi.T @ (np.tanh(root * (phi @ x)) - mean) / root + alpha * x
        iterates.append(top(x - gradient / (bound + alpha)))
    return iterates


def plain_thresholding(phi: np.ndarray, signs: np.ndarray, kept: int, iterations: int) -> np.ndarray:
    """Binary iterative hard thresholding as Jacques et al. state it, with τ = 1, in float64 through a dense Φ."""
    x = np.zeros(phi.shape[1])
    for _ in range(1 + iterations):
        a = x + 0.5 * phi.T @ (signs - np.sign(phi @ x))
        x = np.where(np.abs(a) >= np.sort(np.abs(a))[-kept], a, 0)
    return x


@pytest.mark.parametrize(("dim", "kept"), [(64, 1), (50, 6), (64, 37), (64, 64)])
def test_no_step_of_the_decoder_makes_its_objective_larger(dim: int, kept: int) -> None:
    """Σ [log cosh(√m Φx) − ȳ √m Φx]/m + α/2 ‖x‖² for any ȳ and any κ, also above m; and the code computes these
    iterates."""
    phi, alpha = dense_phi(dim, 37, seed=3), pi * kept / (2 * 37)

    def objective(x: np.ndarray, mean: np.ndarray) -> float:
        scaled = 37**0.5 * (phi @ x)
        return float((np.log(np.cosh(scaled)) - mean * scaled).mean() + alpha / 2 * (x**2).sum())

    for seed in range(5):
        y = normal(1, 37, seed=seed).tanh()
        mean = y[0].double().numpy()
        iterates = plain_decoder(phi, 64 / 37, mean, kept, 30)
        values = [objective(x, mean) for x in iterates]
        assert all(later <= earlier + 1e-12 for earlier, later in pairwise(values))
        assert values[-1] < values[0] < 0  # 0 is that of x = 0
        for iterations in (0, 1, 2, 30):
            found, expected = (
                decode_mean_of_signs(sketch_of(dim, 37, seed=3), y, kept, iterations),
                iterates[iterations],
            )
            np.testing.assert_allclose(found[0].numpy(), expected / np.linalg.norm(expected), atol=1e-4)


def test_signs_that_cancel_have_no_direction() -> None:
    assert not decode_mean_of_signs(sketch_of(60, 30), torch.zeros(1, 30), 3, 4).any()


TASK_DIM, KEPT, MEASURED = 60, 3, 30
SETTINGS = {"ratio": 0.5, "sparsity": 0.05, "iterations": 4}


def exchange_of(initial: Tensor, **settings: object) -> Exchange[Any]:
    return factories.exchange_of("obcsaa", task_of(TASK_DIM, initial=initial), **{**SETTINGS, **settings})


@pytest.mark.parametrize("decoder", ["averages", "biht"])
def test_the_step_is_along_the_direction_decoded_from_the_weighted_mean_of_signs(decoder: str) -> None:
    """Seven clients with odd weights, so that the mean of the signs has no ties; each keeps its three largest entries.
    Through the dense Φ in float64, which is the same in every round."""
    samples = [101, 211, 307, 401, 503, 601, 701]
    start, update = torch.zeros(TASK_DIM), normal(7, TASK_DIM, seed=3)
    cohort = cohort_of(-update, samples=samples, model=start)
    _, server = hold(exchange_of(start, decoder=decoder), cohort, {"model": start}, round=3)
    phi, share = dense_phi(TASK_DIM, MEASURED, seed=5), np.array(samples) / sum(samples)
    exact = update.double().numpy()
    exact = np.where(np.abs(exact) >= np.sort(np.abs(exact), axis=1)[:, -KEPT, None], exact, 0)
    mean = share @ np.where(exact @ phi.T >= 0, 1, -1)
    ours = plain_decoder(phi, 64 / MEASURED, mean, KEPT, 4)[-1]
    along = plain_thresholding(phi, mean, KEPT, 4) if decoder == "biht" else ours
    norm = share @ np.linalg.norm(exact, axis=1)
    np.testing.assert_allclose(server["model"].numpy(), -norm * along / np.linalg.norm(along), atol=1e-5)


@pytest.mark.parametrize("downlink", ["model", "sum"])
def test_updates_of_zero_do_not_move_the_model(downlink: str) -> None:
    start = normal(TASK_DIM, seed=1)
    (after,), server = hold(
        exchange_of(start, downlink=downlink), cohort_of(start.expand(3, -1).clone(), model=start), {"model": start}
    )
    assert torch.equal(server["model"], start)
    assert all(torch.equal(row, start) for row in after.params)


def test_of_equal_entries_the_first_are_kept() -> None:
    """With equal weights many entries of the decoder are alike; any choice among them would part clients and server."""
    kept = keep_largest(torch.tensor([[1.0, -2.0, 2.0, -1.0, 2.0]]), 4)
    assert kept.tolist() == [[1.0, -2.0, 2.0, 0.0, 2.0]]
    kept = keep_largest(torch.tensor([[1.0, -2.0, 2.0, -1.0, 2.0]]), 2)
    assert kept.tolist() == [[0.0, -2.0, 2.0, 0.0, 0.0]]
