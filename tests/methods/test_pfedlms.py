"""pFedLMS: consensus and local steps in float64 from their definitions, and the edges of its settings. Whole runs are
recomputed in wire/test_second_implementation.py."""

from __future__ import annotations

from math import sqrt
from statistics import NormalDist
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from definitions import dense_model, exact_steps, layer_of_entry, small_batches, smoothed_penalty
from factories import (
    SMALL_DIM,
    SMALL_LAYERS,
    cohort_of,
    hold,
    normal,
    small_data,
    small_module,
    task_of,
    worker_of,
)
from pfedlms.methods.pfedlms import PFedLMS, PFedLMSSettings
from pfedlms.models import Cohort
from pfedlms.train_settings import TrainSettings


def sketches_of(params: Tensor, sizes: tuple[int, ...]) -> list[np.ndarray]:
    """Φ_l θ_k,l of every layer, float64 `[clients, m_l]`, through the dense Φ."""
    sketched, layers = params.double() @ dense_model(sizes, 0.5, 5).T, layer_of_entry(sizes, 0.5)
    return [sketched[:, layers == layer].numpy() for layer in range(len(sizes))]


def thresholds_by_definition(sketched: np.ndarray, samples: tuple[int, ...], levels: int) -> list[float]:
    """Quantiles of the normal distribution with the mean and variance of all clients' entries, each weighted by its
    client's samples."""
    weights = np.repeat(np.array(samples, dtype=np.float64), sketched.shape[1])
    mean = np.average(sketched.ravel(), weights=weights)
    deviation = sqrt(np.average((sketched.ravel() - mean) ** 2, weights=weights))
    return [mean + deviation * NormalDist().inv_cdf(t / (levels + 1)) for t in range(1, levels + 1)]


def upper_weighted_median(values: np.ndarray, samples: tuple[int, ...]) -> float:
    """The largest of `values: [clients]` that clients with at least half of all samples reach."""
    return max(
        v for v in values if 2 * sum(n for n, own in zip(samples, values, strict=True) if own >= v) >= sum(samples)
    )


def consensus_by_definition(
    sketched: list[np.ndarray], samples: tuple[int, ...], levels: int
) -> tuple[np.ndarray, np.ndarray]:
    """q̃ of every coordinate as the bin of the weighted median, and its distance to the nearest threshold over σ̄."""
    chosen, margin = [], []
    for layer in sketched:
        tau = thresholds_by_definition(layer, samples, levels)
        scale = layer.std() or 1.0
        for column in layer.T:
            median = upper_weighted_median(column, samples)
            chosen.append(sum(median >= t for t in tau))
            margin.append(min(abs(v - t) for v in column for t in tau) / scale)
    return np.array(chosen), np.array(margin)


def played(method: PFedLMS, cohort: Cohort, round: int = 0) -> Cohort:
    """Both exchanges, through real bytes."""
    for exchange in method.exchanges:
        (cohort,), _ = hold(exchange, cohort, round=round)
    return cohort


# --- thresholds and consensus -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("samples", [(1, 1, 1), (7, 2, 2), (3, 2, 1), (10, 1, 1)])
def test_consensus_follows_the_samples(samples: tuple[int, ...]) -> None:
    """Ties at (3, 2, 1), a client that decides alone at (10, 1, 1)."""
    sizes, cohort = (20, 7, 32), cohort_of(normal(3, 59, seed=1), samples=samples)
    method = PFedLMS(task_of(*sizes), PFedLMSSettings(thresholds=5, ratio=0.5, strength=0.01))
    expected, margin = consensus_by_definition(sketches_of(cohort.params, sizes), samples, 5)
    clear = margin > 1e-5
    assert clear.mean() > 0.9
    np.testing.assert_array_equal(played(method, cohort).heard["consensus"].numpy()[clear], expected[clear])


@pytest.mark.parametrize("absolute", [False, True], ids=["relative", "absolute"])
def test_local_steps_follow_the_objective(absolute: bool) -> None:
    """Three steps of f + λ R̃_ρ + μ/2 ‖θ‖² against float64 autograd through dense Φ and the definition of R̃_ρ."""
    data, train, levels, strength, smoothing = (
        small_data(9, 12, 20),
        TrainSettings(local_steps=3, batch_size=8, learning_rate=0.2, weight_decay=0.05),
        3,
        0.02,
        0.2,
    )
    params = 0.5 * normal(3, SMALL_DIM, seed=6)
    method = PFedLMS(
        task_of(*SMALL_LAYERS, learning_rate=0.2),
        PFedLMSSettings(thresholds=levels, ratio=0.5, strength=strength, smoothing=smoothing, absolute=absolute),
    )
    cohort = played(method, cohort_of(params, samples=data.samples))
    after, _ = worker_of(small_module(), data, train, seed=7).train(cohort, method.objective(cohort, 0), phase=2)

    sketched, layers = sketches_of(params, SMALL_LAYERS), layer_of_entry(SMALL_LAYERS, 0.5)
    phi = dense_model(SMALL_LAYERS, 0.5, 5)
    consensus = torch.from_numpy(consensus_by_definition(sketched, data.samples, levels)[0])
    tau = torch.tensor([thresholds_by_definition(own, data.samples, levels) for own in sketched], dtype=torch.float64)
    sigma = (tau[:, 2] - tau[:, 1]) / NormalDist().inv_cdf(0.75)
    rho = smoothing * (torch.ones_like(sigma) if absolute else sigma)

    def pull(flat: Tensor, features: Tensor, labels: Tensor) -> Tensor:
        return strength * smoothed_penalty((phi @ flat)[None], tau, rho, consensus, layers)[0]

    for client in range(3):
        expected = exact_steps(params[client], small_batches(data, client, 2, train, seed=7), train, pull)
        torch.testing.assert_close(after.params[client].double(), expected, rtol=1e-3, atol=1e-5)


# --- the settings -----------------------------------------------------------------------------------------------------


def method_of(rate: float, **settings: Any) -> PFedLMS:
    return PFedLMS(task_of(50, learning_rate=rate), PFedLMSSettings(**settings))


def test_warns_where_the_pull_never_vanishes() -> None:
    """T = 7: the narrowest interval is Υ⁻¹(5/8) = 0.3186 σ̄ wide, so that ρ above 0.159 overlaps. T = 1 has none."""
    with pytest.warns(UserWarning, match=r"method\.smoothing: with 7 thresholds the narrowest interval is 0\.319 σ̄"):
        method_of(0.01, smoothing=0.16)
    with pytest.warns(UserWarning, match=r"use method\.smoothing below 0\.16 or fewer thresholds"):
        method_of(0.01, smoothing=0.5)
    method_of(0.01, smoothing=0.159)  # a warning would be an error
    method_of(0.01, smoothing=5.0, thresholds=1)


def test_warns_where_a_step_is_too_long() -> None:
    """2 η λ / ratio = 2 · 0.1 · 0.11 / 0.1 = 0.22 > 0.2; the strength that just does is 0.1."""
    with pytest.warns(UserWarning, match=r"method\.strength: 2 η λ / ratio = 0\.22; .* of at most 0\.1$"):
        method_of(0.1, strength=0.11)
    method_of(0.1, strength=0.1)
    method_of(0.04, strength=0.24)
    method_of(0.1, strength=0.9, ratio=1.0)


# --- models without scale ---------------------------------------------------------------------------------------------


def test_a_layer_that_is_zero_everywhere_has_no_pull() -> None:
    """σ̄ = 0 for the second layer of all clients: no division by it, and no pull there; the first layer has one."""
    params = normal(3, 27, seed=5)
    params[:, 20:] = 0
    method = PFedLMS(task_of(20, 7), PFedLMSSettings(ratio=0.5, strength=0.01))
    after = played(method, cohort_of(params))
    assert after.heard["deviation"][1] == 0
    assert not after.heard["thresholds"][1].any()
    gradient = method.objective(after, 0).gradient(after.params)
    assert gradient is not None
    assert gradient.isfinite().all()
    assert gradient[:, :20].any(dim=1).all()
    assert not gradient[:, 20:].any()
