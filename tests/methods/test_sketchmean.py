"""sketchmean: how its scales find the median, and its limits. wire/test_second_sketchmean.py recomputes whole runs."""

from __future__ import annotations

from math import pi, sqrt
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import factories
import pfedlms
from factories import CPU, RATIO, SEED, SIZES, cohort_of, hold, layout_of, method_of, normal, task_of
from pfedlms.cohort import Cohort
from pfedlms.methods import Exchange
from pfedlms.methods.consensus import Sketches
from pfedlms.methods.sketchmean import SETTLED, SketchMeanSettings, Votes, next_scales, shares_for

DIM = sum(SIZES)
LAYERS = len(SIZES)


def exchange_of(*sizes: int, **settings: Any) -> Exchange[Any]:
    return factories.exchange_of("sketchmean", task_of(*sizes, seed=SEED), **{"ratio": RATIO, **settings})


def clients_at(params: Tensor, model: Tensor, scale: Tensor, samples: list[int]) -> Cohort:
    cohort = cohort_of(params, samples=samples, model=model, scale=scale)
    return cohort.with_state(checked=torch.zeros(len(params), 1, dtype=torch.int64))


def server_at(model: Tensor, scale: Tensor, settled: int = SETTLED) -> dict[str, Tensor]:
    kept = {"settled": torch.full(scale.shape, settled, dtype=torch.int8), "update": torch.zeros_like(model)}
    return {"model": model, "unsent": torch.zeros_like(model), "scale": scale, **kept}


def test_scales_by_hand() -> None:
    """Fast until the sign of b̄ changes or it is 0, then slowly for good: 1 · 1.7 · 1.35 · 0.9 · 1.2."""
    scale, settled, start = np.ones(1), np.zeros(1, np.int8), np.ones(1)
    for lean, factor, state in ((1.0, 1.7, 1), (0.5, 1.35, 1), (-0.5, 0.9, SETTLED), (1.0, 1.2, SETTLED)):
        after, settled = next_scales(scale, settled, np.array([lean]), start)
        assert after.dtype == np.float32
        np.testing.assert_allclose(after, scale * factor, rtol=1e-6)
        assert settled.tolist() == [state]
        scale = after.astype(np.float64)
    assert next_scales(np.ones(1), np.zeros(1, np.int8), np.zeros(1), start)[1].tolist() == [SETTLED]


@pytest.mark.parametrize(("settled", "moves"), [(0, False), (-1, False), (1, True), (SETTLED, True)])
def test_a_scale_that_may_be_far_too_large_does_not_move_the_model(settled: int, moves: bool) -> None:
    """All clients are below S, so b̄ = −1: the layer is moved only if b̄ was positive before."""
    model, scale = torch.zeros(64), torch.tensor([1e3])
    _, server = hold(
        exchange_of(64, answer=1.0), clients_at(normal(2, 64, seed=2), model, scale, [1, 1]),
        server_at(model, scale, settled=settled),
    )  # fmt: skip
    assert bool(server["model"].any()) == moves


def test_a_scale_finds_the_weighted_median() -> None:
    """Clients with fixed scales 1, 2, 4 and 8 and weights 1, 1, 1 and 4: between 4 and 8, from 1e-3 and from 1e3."""
    own, weights = np.array([1.0, 2, 4, 8]), np.array([1.0, 1, 1, 4]) / 7
    for start in (1e-3, 1e3):
        scale, settled = np.array([start]), np.zeros(1, np.int8)
        for _ in range(60):
            lean = np.array([weights @ np.where(own > scale, 1.0, -1.0)])
            after, settled = next_scales(scale, settled, lean, np.array([start]))
            scale = after.astype(np.float64)
        assert 8 * 0.8 < scale[0] < 8 * 1.2


def test_exact_values_and_all_rows_give_fedavg() -> None:
    """Σ N_k y_k in place of the votes, with the size √(2/π) S = 1 that these have for the signs of y; a gain of 1. The
    answer and the server's residual add up to w', on layers with and without padding."""
    model, params, samples = normal(DIM, seed=1), normal(3, DIM, seed=2), [2, 3, 7]
    exchange = exchange_of(*SIZES, ratio=1.0, gain=1.0, answer=0.1)
    server = server_at(model, torch.full((LAYERS,), sqrt(pi / 2)))
    y = Sketches(layout_of(*SIZES), 1.0, SEED, refresh=1).of(4, CPU).forward((params - model).double())
    sums = torch.tensor(samples).double() @ y
    votes = Votes(SimpleNamespace(sums=sums.numpy), np.zeros(LAYERS, np.int64), sum(samples))  # type: ignore[arg-type]
    after, _ = exchange.server_reply(server, votes, 4)
    fedavg = (torch.tensor(samples).double() @ params.double() / sum(samples)).float()
    torch.testing.assert_close(after["model"] + after["unsent"], fedavg, rtol=1e-5, atol=2e-6)
    assert not torch.equal(after["model"], model)


@pytest.mark.parametrize(("step", "bounded"), [(0.1, True), (0.2, False)])
def test_on_a_quadratic_the_residual_is_bounded_up_to_twice_the_share_of_the_answer(step: float, bounded: bool) -> None:
    """Each client steps towards its own centre; the answer has a twentieth of the entries, all equally important, so
    that an entry waits for 20 rounds. If a step is twice that share of the distance, w comes near the mean of the
    centres and the residual shrinks; if it is four times that share, both grow without end."""
    dim, clients = 256, 8
    centres, samples = 1 + normal(clients, dim, seed=1) / 4, [1] * clients
    goal = centres.mean(dim=0)
    method = method_of("sketchmean", task_of(dim, seed=SEED), ratio=RATIO, answer=0.05, gain=pi / 2)
    (exchange,), server, residuals = method.exchanges, method.server_start(), []
    for round in range(300):
        w = server["model"]
        cohort = clients_at(w + step * (centres - w), w, server["scale"], samples)
        _, server = hold(exchange, cohort, server, round=round)
        residuals.append(float(server["unsent"].norm()))
    assert (max(residuals[200:]) < 0.1 * max(residuals[:100])) == bounded
    assert bool((server["model"] - goal).norm() < 0.05 * goal.norm()) == bounded


@pytest.mark.parametrize(
    ("dim", "ratio", "answer"),
    [
        (60, 1.0, 60),
        (650, 1.0, 80),
        (2452, 1000 / 2452, 80),
        (15_999, 0.1, 80),
        (19_210, 0.1, 96),
        (203_530, 0.1, 1017),
    ],
)
def test_shares_that_are_0_have_a_floor_in_small_models(dim: int, ratio: float, answer: int) -> None:
    chosen = method_of("sketchmean", task_of(dim)).settings
    assert chosen.ratio == ratio
    assert max(1, int(chosen.answer * dim)) == answer
    given = SketchMeanSettings(ratio=0.02, answer=0.3)
    assert shares_for(given, dim) == given


def test_a_small_model_learns_with_the_settings_that_are_shipped() -> None:
    """With the shares of larger models, 0.1 and 0.005, G-acc is more than 10 points below FedAvg's."""

    def shared_accuracy(**settings: Any) -> float:
        run = pfedlms.run(
            "digits", hidden=16, participation=0.3, rounds=60, seed=1, evaluate_every=6, everyone=False,
            progress=False, **settings,
        )  # fmt: skip
        return float(run.summary["global_accuracy"]["final"])

    fedavg = shared_accuracy(method="fedavg")
    assert shared_accuracy(method="sketchmean") > fedavg - 3
    assert shared_accuracy(method="sketchmean", ratio=0.1, answer=0.005) < fedavg - 10


@pytest.mark.filterwarnings("error:method.answer")
def test_an_answer_of_few_entries_warns() -> None:
    with pytest.warns(UserWarning, match=r"about 5 of 1000 entries in a round, expected at least 40.*use 0\.04 or"):
        method_of("sketchmean", task_of(1000), answer=0.005)
    method_of("sketchmean", task_of(1000), answer=0.04)  # a warning would be an error
