"""Local epochs, with which clients of one cohort take different numbers of steps, and the weights of clients. The same
bits for every cohort size: test_engines_agree.py."""

from __future__ import annotations

from math import ceil

import numpy as np
import pytest
import torch
from torch import nn

import factories
from pfedlms.methods import Objective
from plain_loops import BATCH, CLIENTS, RATE, ROUNDS, SHARE, Loop, federate, played

EPOCHS = 1.3


def steps_of(client: int) -> int:
    return ceil(EPOCHS * len(factories.digits(CLIENTS).train[client]) / BATCH)


def test_fedavg_with_epochs_is_its_plain_loop() -> None:
    """Each client continues its own shuffles where its last phase ended."""
    assert len({steps_of(client) for client in range(CLIENTS)}) > 4
    loop = Loop(factories.digits(CLIENTS))
    w = loop.initial
    for phase in range(ROUNDS + 1):
        own = {k: steps_of(k) for k in loop.participants.of(phase)}
        trained = {k: loop.steps(w, k, phase, steps=n, each_phase=n) for k, n in own.items()}
        w = loop.mean(trained)
    for size in (1, 3, 0):
        state = played("fedavg", participation=SHARE, cohort_size=size, local_epochs=EPOCHS)
        assert state["trained"] == list(trained)
        np.testing.assert_allclose(state["params"], torch.stack(list(trained.values())), rtol=0, atol=2e-5)


def test_the_loss_is_the_mean_over_the_steps_a_client_takes() -> None:
    """One phase at a rate near 0: the loss at w⁰ on the client's own batches."""
    run = federate("local", local_epochs=EPOCHS, learning_rate=1e-12)
    loop, module = Loop(run.data), Loop(run.data).module
    _, losses = run._worker.train(run._clients.start(tuple(range(CLIENTS))), Objective(), 0)
    for k in range(CLIENTS):
        batches = loop.batches(k, 0, steps_of(k), steps_of(k))
        own = [nn.functional.cross_entropy(module(run.data.x[each].double()), run.data.y[each]) for each in batches]
        assert losses[k].item() == pytest.approx(torch.stack(own).mean().item(), rel=1e-5)


def test_control_variates_are_divided_by_each_clients_own_steps() -> None:
    loop, state = Loop(factories.digits(CLIENTS)), played("scaffold", 0, local_epochs=EPOCHS)
    for k in (0, 1, 2):
        trained = loop.steps(loop.initial, k, 0, steps=steps_of(k), each_phase=steps_of(k))
        expected = (loop.initial - trained) / (steps_of(k) * RATE)
        np.testing.assert_allclose(state["state"]["control"][k], expected, rtol=0, atol=1e-5)


# --- weights ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("weights", "exponent"), [("uniform", 0), ("samples", 1)])
def test_the_mean_has_uniform_weights_or_those_of_the_samples(weights: str, exponent: int) -> None:
    run = federate("fedavg", weights=weights, server_step=0.5)
    run.start()
    trained, initial = run.state()["params"].double(), run.method.task.initial.double()
    run.play_round()
    own = torch.tensor([float(n) for n in run.data.samples], dtype=torch.float64) ** exponent
    expected = initial + 0.5 * (trained.T @ own / own.sum() - initial)
    np.testing.assert_allclose(run.state()["server"]["model"], expected, rtol=0, atol=1e-6)
