"""STC: the entries that are kept, and the server's residual. wire/test_second_implementation.py recomputes whole
rounds."""

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


def test_of_equal_magnitudes_the_first_are_kept() -> None:
    """Five magnitudes over 3,000 entries, against a sort of pairs."""
    levels = torch.randint(-2, 3, (4, 3000), generator=torch.Generator().manual_seed(1)).float()
    for count in (1, 17, 1200, 2500, 3000):
        got = ternary(levels, count)["positions"]
        for row, kept in zip(levels.tolist(), got.tolist(), strict=True):
            assert kept == sorted(sorted(range(3000), key=lambda i: (-abs(row[i]), i))[:count])


def test_the_smallest_and_largest_numbers_are_compressed() -> None:
    """Subnormal numbers are compared exactly; the mean does not overflow."""
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
    """Clients send (8, 0, 0, 0) and (0, −4, 0, 0), N = 1 and 3, one entry each: x = (2, −3, 0, 0). The answer
    has −3, and in the next round, when the clients' updates are zero, the 2."""
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


def test_zeros_in_an_answer_are_sent_as_the_magnitude_and_kept_in_the_residual() -> None:
    """The mean has one entry other than zero, the answer has four."""
    exchange = exchange_of(8, 0.125, 0.5)
    update = torch.tensor([[0.0, 0, 0, 0, 0, -8.0, 0, 0]])
    _, server = hold(exchange, clients_with(update), server_of(8))
    assert server["model"].tolist() == [2, 2, 2, 0, 0, -2, 0, 0]
    assert server["residual"].tolist() == [-2, -2, -2, 0, 0, -6, 0, 0]
