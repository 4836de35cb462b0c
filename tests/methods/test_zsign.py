"""z-SignFedAvg: its noise, the plain sign as its limit, and the answer of counts instead of weights."""

from __future__ import annotations

from math import sqrt
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import factories
from factories import cohort_of, hold, normal, task_of
from pfedlms.methods import Exchange
from pfedlms.models import Cohort

RATE = 0.1
SIGMA = 0.4


def exchange_of(dim: int, clients: int = 4, seed: int = 5, **settings: object) -> Exchange[Any]:
    task = task_of(dim, clients=clients, seed=seed, learning_rate=RATE)
    return factories.exchange_of("zsign", task, **{"sigma": SIGMA, **settings})


def clients_with(updates: Tensor, samples: list[int] | None = None) -> Cohort:
    """Clients whose (w − θ_k)/γ is `updates: [clients, dim]`, with w = 0."""
    return cohort_of(-RATE * updates, samples=samples, model=torch.zeros(updates.shape[1]))


def test_uniform_noise_is_unbiased_up_to_sigma() -> None:
    """σ E[sign(x + σξ)] = x for |x| ≤ σ, within 5 standard deviations: the mean over coordinates with one x of what
    a server estimates when all clients have x."""
    values = [share * SIGMA for share in (-1.0, -0.7, -0.1, 0.0, 0.25, 0.5, 0.9, 1.0)]
    repeats, clients = 20_000, 4
    update = torch.tensor(values).repeat_interleave(repeats)
    exchange = exchange_of(len(update), clients)
    _, server = hold(exchange, clients_with(update.expand(clients, -1)), {"model": torch.zeros(len(update))})
    got = (-server["model"].double() / RATE).reshape(len(values), repeats).mean(dim=1).tolist()
    assert got == pytest.approx(values, abs=5 * SIGMA / sqrt(repeats * clients))


def noise_of(kind: str, clients: int = 1, dim: int = 200_000, round: int = 0, seed: int = 5) -> np.ndarray:
    """ξ of every client: the value whose sign it sends when its update is zero."""
    exchange = exchange_of(dim, clients, seed, noise=kind)
    _, values = exchange.client_send(clients_with(torch.zeros(clients, dim)), round, None)  # type: ignore[arg-type]
    return (values["signs"] / SIGMA).double().numpy()


@pytest.mark.parametrize("kind", ["uniform", "gaussian"])
def test_noise_is_a_function_of_seed_round_and_client(kind: str) -> None:
    """Different streams are uncorrelated; the noise of a client does not depend on the others in its cohort."""
    dim = 20_000
    two = noise_of(kind, clients=2, dim=dim)
    later, other_seed = noise_of(kind, dim=dim, round=1)[0], noise_of(kind, dim=dim, seed=6)[0]
    for other in (two[1], later, other_seed):
        assert abs(np.corrcoef(two[0], other)[0, 1]) < 5 / sqrt(dim)
    np.testing.assert_array_equal(noise_of(kind, dim=dim)[0], two[0])


def test_without_noise_clients_send_the_plain_sign() -> None:
    """σ = 0, signFedAvg: three clients, γ = 0.1, step 0.3, by hand. Zero counts as +1, and all clients the same."""
    updates = torch.tensor([[2.0, -1.0, 0.0, 1e-30], [3.0, -2.0, 0.0, -1e-30], [-4.0, -1e-3, 0.0, -5.0]])
    exchange = exchange_of(4, 3, sigma=0.0, step=0.3)
    (after,), server = hold(exchange, clients_with(updates, [1000, 1, 1]), {"model": torch.zeros(4)})
    expected = [-0.03 / 3, 0.03, -0.03, 0.03 / 3]
    assert server["model"].tolist() == pytest.approx(expected, rel=1e-6)
    assert all(torch.equal(row, server["model"]) for row in (*after.params, *after.state["model"]))


def test_counts_of_255_clients_arrive() -> None:
    """All 255 send +1 to the first coordinate and −1 to the second, so that a count reaches both ends of a byte."""
    exchange = exchange_of(2, 255, downlink="sum")
    updates = torch.tensor([50.0, -50.0]).expand(255, -1)
    (after,), server = hold(exchange, clients_with(updates), {"model": torch.zeros(2)})
    assert after.params[0].tolist() == pytest.approx([-RATE * SIGMA, RATE * SIGMA], rel=1e-6)
    assert all(torch.equal(row, server["model"]) for row in after.params)


@pytest.mark.parametrize("downlink", ["model", "sum"])
def test_the_mean_is_over_the_messages_that_arrive(downlink: str) -> None:
    """Of (+, −, −) the second is lost: the mean of the other two is 0 and not −1/3 or −1/2; client 1 still gets the new
    model."""
    updates = torch.tensor([[9.0, 9.0], [-9.0, 9.0], [-9.0, 9.0]])
    exchange, start = exchange_of(2, 3, downlink=downlink), normal(2, seed=1)
    cohort = cohort_of(start - RATE * updates, model=start)
    with pytest.warns(UserWarning, match="client 1 is left out of this exchange"):
        (after,), server = hold(
            exchange, cohort, {"model": start}, link=lambda data, client: None if client == 1 else data
        )
    assert (server["model"] - start).tolist() == pytest.approx([0.0, -RATE * SIGMA], abs=1e-7)
    assert all(torch.equal(row, server["model"]) for row in after.params)
