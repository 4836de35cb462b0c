"""OBDA: the majority and its coin, and the gradient whose sign a client sends."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from definitions import signs_of
from factories import Work, cohort_of, digits, exchange_of, hold, normal, task_of
from plain_loops import CLIENTS, Loop, federate

STEP = 0.25


def coin(seed: int, round: int, count: int) -> np.ndarray:
    """The coin of every coordinate, in plain Python: thrown in even rounds, turned over in odd ones."""
    return (-1) ** round * signs_of(count, seed, "obda-coin", round // 2)


def vote_on(signs: Tensor, round: int = 0, seed: int = 5, samples: list[int] | None = None) -> Tensor:
    """v = −Δw/η of one exchange of clients whose gradients are `signs: [clients, dim]`, from w = 0."""
    clients, dim = signs.shape
    task, zero = task_of(dim, clients=clients, seed=seed), torch.zeros(dim)
    cohort = cohort_of(torch.zeros(clients, dim), samples=samples, model=zero)
    exchange = exchange_of("obda", task, step=STEP)
    (after,), server = hold(exchange, cohort, {"model": zero}, round=round, work=Work(gradient=signs))
    assert all(torch.equal(row, server["model"]) for row in (*after.params, *after.state["model"]))
    return -server["model"] / STEP


def test_majority_by_hand() -> None:
    """Four clients. Columns: all +, all −, three of four either way, and even splits that only the coin decides. In
    round 0 a zero of client 0 counts as + and one of client 1 as −; that client 2 has many samples does not matter."""
    gradients = torch.tensor(
        [
            [1.0, -1.0, 1.0, 0.0, 1.0, -1.0, 0.0, 1.0],
            [2.0, -1.0, 1.0, 0.0, 1.0, -1.0, 0.0, 1.0],
            [0.1, -1.0, 9.0, -1.0, -9.0, 5.0, 1.0, -1.0],
            [5.0, -7.0, -99.0, -99.0, -9.0, 5.0, -1.0, -1.0],
        ]
    )
    flips = coin(5, 0, 8).tolist()
    assert len(set(flips[4:])) == 2  # so that this seed shows both outcomes
    assert vote_on(gradients, samples=[1, 1, 1000, 1]).tolist() == [1, -1, 1, -1, *flips[4:]]


def test_a_tie_is_decided_by_a_coin_of_seed_and_round() -> None:
    """It is turned over in odd rounds, so that a weight which is always tied does not move away."""
    tied = torch.stack([torch.ones(200), -torch.ones(200)])
    for seed in (5, 6):
        for round in (0, 2, 3, 7):
            assert vote_on(tied, round, seed).tolist() == coin(seed, round, 200).tolist()


@pytest.mark.parametrize("clients", [1, 4, 5])
def test_a_weight_without_gradient_stays_near_its_start(clients: int) -> None:
    """Eight rounds of zeros for 300 weights: at most η from w⁰, back at w⁰ after every second round, and about as many
    moves up as down if the number of clients is even."""
    start = normal(300, seed=1)
    exchange, zeros = exchange_of("obda", task_of(300, clients=clients), step=STEP), torch.zeros(clients, 300)
    cohort, server = cohort_of(start.expand(clients, -1).clone(), model=start), {"model": start}
    for round in range(8):
        (cohort,), server = hold(exchange, cohort, server, round=round, work=Work(gradient=zeros))
        moved = server["model"] - start
        assert float(moved.abs().max()) <= STEP * (1 + 1e-5)
        if round % 2:
            torch.testing.assert_close(moved, torch.zeros(300), rtol=0, atol=1e-6)
        elif clients == 4:
            assert abs(float(moved.sign().mean())) < 5 / 300**0.5


def test_the_sign_is_that_of_the_gradient_at_the_common_model() -> None:
    """Averaged over the round's E batches, in float64, for clients whose own models are elsewhere."""
    loop, run = Loop(digits(CLIENTS)), federate("obda")
    run.start()
    (cohort,) = run._clients.present
    for round in (0, 4):
        _, values = run.method.exchanges[0].client_send(cohort, round, run._worker)
        for client in range(3):
            each = [loop.gradient(loop.initial, samples) for samples in loop.batches(client, round + 1)]
            expected = torch.stack(each).mean(dim=0)
            torch.testing.assert_close(values["signs"][client].double(), expected, rtol=1e-4, atol=1e-6)
