"""pFedLMS: its pull by autograd, and its warnings. test_examples.py, wire/test_second_implementation.py and
engine/test_float64_runs.py recompute whole runs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from definitions import dense_model, smoothed_penalty
from factories import cohort_of, hold, normal, task_of
from pfedlms.methods.pfedlms import PFedLMS, PFedLMSSettings


def method_of(rate: float, optimizer: str = "sgd", **settings: Any) -> PFedLMS:
    task = replace(task_of(50, learning_rate=rate), optimizer=optimizer)
    return PFedLMS(task, PFedLMSSettings(**settings))


def test_warns_where_the_pull_never_vanishes() -> None:
    """T = 7: the narrowest interval is Υ⁻¹(5/8) = 0.3186 σ̄ wide, so that ρ above 0.159 overlaps. T = 1 has none."""
    with pytest.warns(UserWarning, match=r"method\.smoothing: with 7 thresholds the narrowest interval is 0\.319 σ̄"):
        method_of(0.01, smoothing=0.16)
    with pytest.warns(UserWarning, match=r"use method\.smoothing below 0\.16 or fewer thresholds"):
        method_of(0.01, smoothing=0.5)
    method_of(0.01, smoothing=0.159)  # a warning would be an error
    method_of(0.01, smoothing=5.0, thresholds=1)


def test_warns_where_a_step_is_too_long() -> None:
    """2 η λ / ratio = 2 · 0.1 · 0.11 / 0.1 = 0.22 > 0.2; the largest strength is 0.1. The rule is for SGD only."""
    with pytest.warns(UserWarning, match=r"method\.strength: 2 η λ / ratio = 0\.22; .* of at most 0\.1$"):
        method_of(0.1, strength=0.11)
    method_of(0.1, strength=0.1)
    method_of(0.04, strength=0.24)
    method_of(0.1, strength=0.9, ratio=1.0)
    method_of(0.1, "adamw", strength=0.11)


@pytest.mark.parametrize("absolute", [False, True], ids=["relative", "absolute"])
def test_the_pull_is_the_gradient_of_the_penalty_and_zero_for_a_layer_of_zeros(absolute: bool) -> None:
    """λ R̃_ρ towards the consensus of the exchanges, by float64 autograd through dense Φ; ρ in units of σ̄ or one number.
    σ̄ = 0 for the second layer of all clients: no division by it."""
    params = normal(3, 27, seed=5)
    params[:, 20:] = 0
    settings = PFedLMSSettings(thresholds=3, ratio=0.5, strength=0.02, smoothing=0.2, absolute=absolute)
    method, cohort = PFedLMS(task_of(20, 7, learning_rate=0.01), settings), cohort_of(params, samples=[5, 2, 4])
    for exchange in method.exchanges:
        (cohort,), _ = hold(exchange, cohort)
    received, phi, leaf = cohort.heard, dense_model((20,), 0.5, 5), params[:, :20].double().requires_grad_()
    assert received["deviation"].bool().tolist() == [True, False]
    assert not received["thresholds"][1].any()
    tau, unit = received["thresholds"][:1].double(), torch.ones(1) if absolute else received["deviation"][:1]
    consensus, layers = received["consensus"][: len(phi)], torch.zeros(len(phi), dtype=torch.long)
    (0.02 * smoothed_penalty(leaf @ phi.T, tau, 0.2 * unit.double(), consensus, layers)).sum().backward()
    gradient = method.objective(cohort, 0).gradient(params)
    assert gradient is not None
    torch.testing.assert_close(gradient[:, :20].double(), leaf.grad, rtol=1e-4, atol=1e-6)
    assert leaf.grad.any(dim=1).all()  # type: ignore[union-attr]
    assert not gradient[:, 20:].any()
