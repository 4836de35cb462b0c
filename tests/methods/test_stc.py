"""STC: which entries are kept, the server's residual, and its limits. Whole rounds are recomputed in
wire/test_second_implementation.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import factories
from factories import cohort_of, hold, normal, task_of
from pfedlms.methods import Exchange
from pfedlms.methods.stc import Ternary
from pfedlms.models import Cohort


def ternary(x: Tensor, count: int) -> dict[str, Tensor]:
    """STC of the rows of x."""
    return Ternary(x.shape[1], (count + 0.5) / x.shape[1]).compress(x)


def exchange_of(dim: int, sparsity: float, down: float = 0.0) -> Exchange[Any]:
    return factories.exchange_of("stc", task_of(dim), sparsity=sparsity, sparsity_down=down)


def clients_with(updates: Tensor, samples: list[int] | None = None) -> Cohort:
    """Clients whose θ_k is `updates: [clients, dim]`, with w = 0."""
    zero = torch.zeros(updates.shape[1])
    return cohort_of(updates, samples=samples, model=zero, residual=zero)


def server_of(dim: int) -> dict[str, Tensor]:
    return {"model": torch.zeros(dim), "residual": torch.zeros(dim)}


def test_many_ties_against_a_sort_of_pairs() -> None:
    """Five magnitudes over 3,000 entries; an order of equals that depends on an algorithm would show."""
    levels = torch.randint(-2, 3, (4, 3000), generator=torch.Generator().manual_seed(1)).float()
    for count in (1, 17, 1200, 2500, 3000):
        got = ternary(levels, count)["positions"]
        for row, kept in zip(levels.tolist(), got.tolist(), strict=True):
            assert kept == sorted(sorted(range(3000), key=lambda i: (-abs(row[i]), i))[:count])


def test_smallest_and_largest_numbers() -> None:
    """Subnormal numbers are told apart; the mean does not overflow."""
    x = torch.tensor([[1e-45, -3e-45, 2.8e-45, 3.4e38, -3.3e38]])
    assert ternary(x, 2)["positions"].tolist() == [[3, 4]]
    assert ternary(x, 2)["magnitude"].item() == pytest.approx(3.35e38)
    assert ternary(x, 4)["positions"].tolist() == [[1, 2, 3, 4]]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_keeps_the_same_entries() -> None:
    tied = torch.randint(-40, 41, (3, 20_000), generator=torch.Generator().manual_seed(2)).float()
    for x in (normal(3, 20_000, seed=3), tied):
        for count in (1, 200, 20_000):
            here, there = ternary(x, count), ternary(x.cuda(), count)
            assert all(torch.equal(here[name], there[name].cpu()) for name in here)


def test_the_server_has_a_residual_of_its_own() -> None:
    """Clients send (8, 0, 0, 0) and (0, −4, 0, 0), N = 1 and 3, one entry each: x = (2, −3, 0, 0). Down go −3 and then,
    when clients have nothing more to say, the 2."""
    exchange = exchange_of(4, 0.25)
    cohort = clients_with(torch.tensor([[8.0, 0, 0, 0], [0, -4.0, 0, 0]]), samples=[1, 3])
    (cohort,), server = hold(exchange, cohort, server_of(4))
    assert server["model"].tolist() == [0, -3, 0, 0]
    assert server["residual"].tolist() == [2, 0, 0, 0]
    assert torch.equal(cohort.params, server["model"].expand(2, -1))
    (cohort,), server = hold(exchange, cohort, server, round=1)
    assert server["model"].tolist() == [2, -3, 0, 0]
    assert server["residual"].tolist() == [0, 0, 0, 0]
    assert torch.equal(cohort.state["model"], server["model"].expand(2, -1))


def test_all_entries_are_scaled_signs() -> None:
    """p = 1: every entry goes, as its sign times the mean magnitude, in one bit for the place and one for the sign."""
    exchange, updates = exchange_of(64, 1.0), normal(1, 64, seed=7)
    _, sent = exchange.client_send(clients_with(updates), 0, None)  # type: ignore[arg-type]
    assert sent["positions"].tolist() == [[*range(64)]]
    torch.testing.assert_close(sent["magnitude"] * sent["signs"], updates.sign() * updates.abs().mean())
    assert exchange.up.max_bytes == 4 + 8 + 8


def test_more_entries_than_there_are() -> None:
    """Of a mean with one entry other than zero four go down: zeros among them are sent as +μ, and taken back later."""
    exchange = exchange_of(8, 0.125, 0.5)
    update = torch.tensor([[0.0, 0, 0, 0, 0, -8.0, 0, 0]])
    _, server = hold(exchange, clients_with(update), server_of(8))
    assert server["model"].tolist() == [2, 2, 2, 0, 0, -2, 0, 0]
    assert server["residual"].tolist() == [-2, -2, -2, 0, 0, -6, 0, 0]


def test_a_sparse_update_of_one_magnitude_arrives_as_it_is() -> None:
    """As FedAvg's would, with no residual at either end."""
    update = torch.zeros(100)
    update[[3, 50, 51, 99]] = torch.tensor([0.25, -0.25, -0.25, 0.25])
    (after,), server = hold(exchange_of(100, 0.04), clients_with(update[None]), server_of(100))
    assert torch.equal(after.params[0], update)
    assert torch.equal(server["model"], update)
    assert not torch.cat([server["residual"], after.state["residual"][0]]).any()
