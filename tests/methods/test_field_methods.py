"""Published methods against plain loops in float64 that follow their papers' algorithms, and their limits."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import factories
from pfedlms.methods.scaffold import Scaffold
from plain_loops import BODY, CLIENTS, RATE, ROUNDS, SHARE, STEPS, Loop, federate, played

STRENGTH, BODY_STEPS, TUNED, SERVER_STEP = 0.3, 2, 8, 1.5
HALVED = {"schedule": "step", "decay": 0.5, "decay_every": 1}
Models = dict[int, Tensor]


def towards(w: Tensor) -> Any:
    return lambda model: STRENGTH * (model - w)


def fedprox(loop: Loop) -> Models:
    """Algorithm 2, with E steps for the inexact solution; phase 0 has no pull."""
    w = loop.initial
    for phase in range(ROUNDS + 1):
        pull = towards(w) if phase else None
        trained = {k: loop.steps(w, k, phase, pull) for k in loop.participants.of(phase)}
        w = loop.mean(trained)
    return trained


def scaffold(loop: Loop) -> Models:
    """Algorithm 1 with option II, weights N_k and a rate that is halved every round."""
    w, c = loop.initial, torch.zeros_like(loop.initial)
    controls = dict.fromkeys(range(CLIENTS), torch.zeros_like(c))
    for phase in range(ROUNDS + 1):
        trained, changes, rate = {}, {}, RATE * 0.5**phase
        for k in loop.participants.of(phase):
            correction = c - controls[k]
            trained[k] = loop.steps(w, k, phase, lambda model, by=correction: by, rate=rate)
            changes[k] = -c + (w - trained[k]) / (STEPS * rate)
            controls[k] = controls[k] + changes[k]
        w = w + SERVER_STEP * loop.mean({k: trained[k] - w for k in trained})
        c = c + len(changes) / CLIENTS * loop.mean(changes)
    return trained


def ditto(loop: Loop) -> Models:
    """Algorithm 1 with FedAvg as its solver."""
    w, own = loop.initial, dict.fromkeys(range(CLIENTS), loop.initial)
    for phase in range(ROUNDS + 1):
        trained = {k: loop.steps(w, k, phase) for k in loop.participants.of(phase)}
        own |= {k: loop.steps(own[k], k, phase, towards(w)) for k in trained}
        w = loop.mean(trained)
    return {k: own[k] for k in trained}


def body_and_head(loop: Loop, apart: bool) -> Models:
    """Algorithms 1 and 2 of FedPer: bodies are averaged, heads stay. Algorithm 1 of FedRep, with both trained `apart`:
    first the head alone, then the body alone; phase 0 trains both."""
    body, heads = loop.initial[:BODY], dict.fromkeys(range(CLIENTS), loop.initial[BODY:])
    for phase in range(ROUNDS + 1):
        trained = {}
        for k in loop.participants.of(phase):
            start = torch.cat([body, heads[k]])
            if phase and apart:
                start = loop.steps(start, k, phase, moves=slice(BODY, None))
                trained[k] = loop.steps(start, k, phase, steps=BODY_STEPS, moves=slice(BODY))
            else:
                trained[k] = loop.steps(start, k, phase)
        body, heads = loop.mean(trained)[:BODY], heads | {k: own[BODY:] for k, own in trained.items()}
    return trained


def finetune(loop: Loop) -> Models:
    """FedAvg; at the end clients take more steps than in the rounds before, from the last average."""
    w = loop.initial
    for phase in range(ROUNDS):
        w = loop.mean({k: loop.steps(w, k, phase) for k in loop.participants.of(phase)})
    return {k: loop.steps(w, k, ROUNDS, steps=TUNED) for k in loop.participants.of(ROUNDS)}


LOOPS = {
    "fedprox": (fedprox, {"strength": STRENGTH}),
    "scaffold": (scaffold, {"server_step": SERVER_STEP, **HALVED}),
    "ditto": (ditto, {"strength": STRENGTH}),
    "fedper": (partial(body_and_head, apart=False), {}),
    "fedrep": (partial(body_and_head, apart=True), {"body_steps": BODY_STEPS}),
    "finetune": (finetune, {"steps": TUNED}),
}


@pytest.mark.parametrize("name", LOOPS)
def test_a_method_is_its_plain_loop(name: str) -> None:
    """25 steps in float32 are within 2e-6; with one step, client or entry too many they differ by 1e-3 or more."""
    follow, settings = LOOPS[name]
    expected = follow(Loop(factories.digits(CLIENTS)))
    for size in (1, 3, 20):
        state = played(name, participation=SHARE, cohort_size=size, **settings)
        assert state["trained"] == list(expected)
        for row, client in enumerate(expected):
            np.testing.assert_allclose(state["params"][row], expected[client], rtol=0, atol=1e-5)


def test_at_its_limit_a_method_has_the_bits_of_fedavg() -> None:
    """And the shared model of ditto and finetune has them with every setting."""
    shared = played("fedavg")["params"]
    for name, settings in (("fedper", {"head": 0}), ("fedrep", {"head": 0}), ("finetune", {"steps": STEPS})):
        assert torch.equal(played(name, **settings)["params"], shared)
        assert not torch.equal(played(name)["params"], shared)
    for name, settings in (("ditto", {"strength": 0.3}), ("finetune", {"steps": TUNED}), ("finetune", {"steps": 0})):
        assert torch.equal(played(name, **settings)["state"]["shared"], shared)


def test_without_fine_tuning_the_average_itself_is_evaluated() -> None:
    federation = federate("finetune", steps=0, participation=SHARE)
    shared = federation.play_round(evaluate_global=True).global_evaluation
    assert shared is not None
    assert federation.evaluate().accuracy == shared.accuracy


def test_control_variates_of_scaffold_with_momentum_are_means_of_gradients() -> None:
    """The first c_k is a mean of the gradients that the steps saw, with weights that add up to 1: gradient s is in all
    E − s buffers after it, β times as much in each."""
    beta, loop = 0.5, Loop(factories.digits(CLIENTS))
    state = played("scaffold", 0, momentum=beta)
    for k in range(3):
        model, buffer, seen = loop.initial.clone(), torch.zeros_like(loop.initial), []
        for samples in loop.batches(k, 0):
            seen.append(loop.gradient(model, samples))
            buffer = beta * buffer + seen[-1]
            model = model - RATE * buffer
        weights = [sum(beta**j for j in range(STEPS - s)) for s in range(STEPS)]
        mean = sum(weight * own for weight, own in zip(weights, seen, strict=True)) / sum(weights)
        np.testing.assert_allclose(state["state"]["control"][k], mean, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("arrived", "expected"), [(1, [2.0, 1.0]), (2, [2.5, 1.5]), (4, [4.0, 2.0])])
def test_the_control_variate_of_scaffold_if_messages_are_lost(arrived: int, expected: list[float]) -> None:
    """Four clients are expected. A fourth of the sum of the changes that arrive is added to c = (1, 1): (4, 0) alone,
    then with (2, 2), then with (2, 2) and (4, 0) again."""
    method = Scaffold(factories.task_of(2, clients=4), Scaffold.Settings())
    changes = torch.tensor([[4.0, 0.0], [2.0, 2.0], [2.0, 2.0], [4.0, 0.0]])[:arrived]
    cohort = factories.cohort_of(torch.zeros(arrived, 2), samples=[3] * arrived, model=torch.zeros(2))
    cohort = cohort.with_state(change=changes, control=changes)
    server = {"model": torch.zeros(2), "control": torch.ones(2)}
    _, server = factories.hold(method.exchanges[0], cohort, server)
    assert server["control"].tolist() == expected
