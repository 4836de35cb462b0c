"""pFedLMS: thresholds and consensus of a round recomputed in float64 from the clients' models, and the edges of its
settings."""

from __future__ import annotations

from math import sqrt
from statistics import NormalDist
from typing import Any

import numpy as np
import pytest
import torch
from plain_client import sketch_size
from torch import Tensor

from definitions import dense_phi, exact_steps, small_batches
from factories import (
    LAYERS,
    SEED,
    SMALL_DIM,
    SMALL_LAYERS,
    cohort_of,
    federation,
    hold,
    normal,
    overheard,
    small_data,
    small_module,
    task_of,
    worker_of,
)
from pfedlms.engine.training import TrainSettings
from pfedlms.methods.pfedlms import PFedLMS, PFedLMSSettings
from pfedlms.models import Cohort
from pfedlms.wire.frames import SERVER


def sketches_of(params: np.ndarray, sizes: tuple[int, ...], ratio: float, seed: int, epoch: int) -> list[np.ndarray]:
    """Φ_l θ_k,l of every layer, float64 `[clients, m_l]`, through the dense Φ."""
    ends = np.cumsum(sizes)
    parts = [params[:, end - size : end] for size, end in zip(sizes, ends, strict=True)]
    return [
        part @ dense_phi(size, sketch_size(size, ratio), seed, epoch, layer).T
        for layer, (size, part) in enumerate(zip(sizes, parts, strict=True))
    ]


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


@pytest.mark.parametrize("settings", [{}, {"thresholds": 1}, {"thresholds": 4, "refresh": 2}, {"layerwise": False}])
def test_consensus_of_a_federation_by_brute_force(settings: dict[str, Any]) -> None:
    """Three rounds on digits: thresholds and consensus recomputed from the models every client had before the round."""
    chosen = federation("pfedlms", **settings)
    levels, refresh = settings.get("thresholds", 7), settings.get("refresh", 1)
    sizes = LAYERS if settings.get("layerwise", True) else (sum(LAYERS),)
    chosen.start()
    for round in range(3):
        params = chosen.state()["params"].double().numpy()
        with overheard() as messages:
            chosen.play_round()
        downs = [sent.values for sent in messages if sent.sender == SERVER]
        sketched = sketches_of(params, sizes, 0.1, SEED, round // refresh)
        pooled = [thresholds_by_definition(layer, chosen.data.samples, 3) for layer in sketched]
        assert downs[0]["mean"].tolist() == pytest.approx([tau[1] for tau in pooled], abs=1e-6)
        deviations = [(tau[2] - tau[1]) / NormalDist().inv_cdf(0.75) for tau in pooled]
        assert downs[0]["deviation"].tolist() == pytest.approx(deviations, rel=1e-5)
        expected, margin = consensus_by_definition(sketched, chosen.data.samples, levels)
        clear = margin > 1e-5  # of rounding in float32
        assert clear.mean() > 0.98
        np.testing.assert_array_equal(downs[1]["symbols"][clear], expected[clear])
        assert len(np.unique(expected)) == levels + 1


@pytest.mark.parametrize("absolute", [False, True], ids=["relative", "absolute"])
def test_local_steps_follow_the_objective(absolute: bool) -> None:
    """Three steps of f + λ R̃_ρ + μ/2 ‖θ‖² against float64 autograd through dense Φ and the definition of R̃_ρ."""
    data, train, levels, strength, smoothing = small_data(9, 12, 20), TrainSettings(3, 8, 0.2, 0.0, 0.05), 3, 0.02, 0.2
    params = 0.5 * normal(3, SMALL_DIM, seed=6)
    method = PFedLMS(
        task_of(*SMALL_LAYERS, learning_rate=0.2),
        PFedLMSSettings(thresholds=levels, ratio=0.5, strength=strength, smoothing=smoothing, absolute=absolute),
    )
    cohort = played(method, cohort_of(params, samples=data.samples))
    after, _ = worker_of(small_module(), data, train, seed=7).train(cohort, method.objective(cohort, 0), phase=2)

    sketched = sketches_of(params.double().numpy(), SMALL_LAYERS, 0.5, 5, 0)
    consensus, _ = consensus_by_definition(sketched, data.samples, levels)

    def pull(flat: Tensor, features: Tensor, labels: Tensor) -> Tensor:
        total, at = flat.new_zeros(()), 0
        for layer, part in enumerate(flat.split(SMALL_LAYERS)):
            phi = torch.from_numpy(dense_phi(len(part), sketch_size(len(part), 0.5), 5, 0, layer))
            tau = thresholds_by_definition(sketched[layer], data.samples, levels)
            sigma = (tau[2] - tau[1]) / NormalDist().inv_cdf(0.75)
            rho = smoothing * (1 if absolute else sigma)
            own = torch.from_numpy(consensus[at : at + len(phi)])
            for t in range(levels):
                z = phi @ part - tau[t]
                huber = torch.where(z.abs() <= rho, z**2 / (2 * rho), z.abs() - rho / 2)
                total = total + (huber - torch.where(own > t, 1.0, -1.0) * z).sum() / levels
            at += len(phi)
        return strength * total

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


def test_pooling_is_the_servers_alone() -> None:
    """Clients that do not know how the server pools accept its frames; what the server sends differs."""
    sent = {}
    for pooling in ("mean", "median"):
        run = federation("pfedlms", pooling=pooling)
        run.start()
        with overheard() as messages:
            run.play_round()
        sent[pooling] = next(each for each in messages if each.sender == SERVER)
    assert sent["mean"].digest == sent["median"].digest
    assert not np.array_equal(sent["mean"].values["deviation"], sent["median"].values["deviation"])
