"""OBDA: the majority and its coin, and the gradient whose sign is sent."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from definitions import exact_module, signs_of, small_batches
from factories import (
    SMALL_DIM,
    Work,
    cohort_of,
    exchange_of,
    hold,
    normal,
    small_data,
    small_module,
    task_of,
    worker_of,
)
from pfedlms.data import FederatedData
from pfedlms.train_settings import TrainSettings

STEP = 0.25


def coin(seed: int, round: int, count: int) -> np.ndarray:
    """The coin of every coordinate, in plain Python: thrown in even rounds, turned over in odd ones."""
    return (-1) ** round * signs_of(count, seed, "obda-coin", round // 2)


def vote_on(signs: Tensor, round: int = 0, seed: int = 5, samples: list[int] | None = None) -> Tensor:
    """v of one exchange between clients whose gradients are `signs: [clients, dim]`, from w = 0 and back: −Δw/η."""
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
    """The second implementation's, which is turned over in odd rounds: what is always tied goes nowhere."""
    tied = torch.stack([torch.ones(200), -torch.ones(200)])
    for seed in (5, 6):
        for round in (0, 2, 3, 7):
            assert vote_on(tied, round, seed).tolist() == coin(seed, round, 200).tolist()


@pytest.mark.parametrize("clients", [1, 4, 5])
def test_a_weight_without_gradient_stays_where_it_is(clients: int) -> None:
    """Eight rounds of zeros from 300 weights: never further than η from w⁰, back after every second round, and as many
    weights go one way as the other where the number of clients is even."""
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


def exact_gradient(params: Tensor, data: FederatedData, client: int, round: int, train: TrainSettings) -> Tensor:
    """∇f at `params: [dim]`, float64, by torch's own module and autograd, averaged over the round's E batches."""
    module = exact_module(params)
    for x, y in small_batches(data, client, round + 1, train, seed=7):
        (nn.functional.cross_entropy(module(x), y) / train.local_steps).backward()
    return torch.cat([p.grad.reshape(-1) for p in module.parameters()])  # type: ignore[union-attr]


def test_the_sign_is_that_of_the_gradient_at_the_common_model() -> None:
    """Against float64 autograd, for clients whose own models are elsewhere; coordinates within rounding of zero are
    left out, and there are hardly any."""
    data, train = (
        small_data(9, 4, 20),
        TrainSettings(local_steps=3, batch_size=8, learning_rate=0.1, weight_decay=0.02),
    )
    common = normal(SMALL_DIM, seed=8) * 0.5
    task = task_of(SMALL_DIM, weight_decay=train.weight_decay)
    cohort = cohort_of(normal(3, SMALL_DIM, seed=9), samples=data.samples, model=common)
    exchange, worker = exchange_of("obda", task), worker_of(small_module(), data, train, seed=7)
    for round in (0, 4):
        _, values = exchange.client_send(cohort, round, worker)
        sent = values["signs"]
        for client in range(3):
            expected = exact_gradient(common, data, client, round, train) + 0.02 * common.double()
            clear = expected.abs() > 1e-5
            assert int(clear.sum()) >= len(expected) - 1
            assert torch.equal(sent[client][clear] >= 0, expected[clear] >= 0)
            torch.testing.assert_close(sent[client].double(), expected, rtol=1e-4, atol=1e-6)
