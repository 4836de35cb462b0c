"""The stacked state of clients: selecting, replacing and joining clients changes nothing else."""

from __future__ import annotations

import pytest
import torch

from pfedlms.cohort import Cohort, joined

IDS = (2, 3, 5, 8, 9)


def cohort(ids: tuple[int, ...] = IDS, momentum: bool = True) -> Cohort:
    """Every entry has the number of its client."""
    column = torch.tensor(ids, dtype=torch.float32)[:, None]
    return Cohort(
        ids, tuple(10 * k for k in ids), column.expand(-1, 4).clone(), column.expand(-1, 4 * momentum).clone() + 0.5,
        {"mean": column.expand(-1, 2).clone(), "count": torch.tensor(ids)},
        {"model": -column.expand(-1, 4)}, {"sketched": column.expand(-1, 3).clone()}, {"answer": torch.ones(7)},
    )  # fmt: skip


def assert_clients(got: Cohort, ids: tuple[int, ...]) -> None:
    """`got` holds the state of these clients in this order and nothing else."""
    expected = cohort(ids)
    assert (got.ids, got.samples) == (expected.ids, expected.samples)
    for name in ("params", "momentum"):
        assert torch.equal(getattr(got, name), getattr(expected, name))
    for name in ("buffers", "state", "scratch"):
        own, want = getattr(got, name), getattr(expected, name)
        assert own.keys() == want.keys()
        assert all(torch.equal(own[key], want[key]) for key in want)
    assert torch.equal(got.heard["answer"], torch.ones(7))


@pytest.mark.parametrize("ids", [IDS, (2,), (9,), (3, 5, 8), (2, 5, 9), (2, 5, 3, 8)])
def test_take_selects_clients_in_the_given_order(ids: tuple[int, ...]) -> None:
    assert_clients(cohort().take(ids), ids)


def test_rows_are_views() -> None:
    whole = cohort()
    part = whole.rows(slice(1, 3))
    assert_clients(part, (3, 5))
    part.params.zero_()
    assert whole.params[1:3].eq(0).all()


def test_put_replaces_the_given_clients_in_a_copy() -> None:
    whole = cohort()
    part = whole.take((3, 9)).each(lambda value: value + 100)
    after = whole.put(part)
    assert_clients(whole, IDS)
    assert_clients(after.take((2, 5, 8)), (2, 5, 8))
    assert after.params[:, 0].tolist() == [2, 103, 5, 8, 109]
    assert after.state["model"][:, 0].tolist() == [-2, 97, -5, -8, 91]
    assert after.buffers["count"].tolist() == [2, 103, 5, 8, 109]


def test_cohorts_are_joined_in_the_given_order() -> None:
    assert_clients(joined([cohort((5, 8)), cohort((2,)), cohort((9,))]), (5, 8, 2, 9))
    alone = cohort()
    assert joined([alone]) is alone


def test_round_values_and_models_can_be_removed() -> None:
    rest, without = cohort().without_round_values(), cohort().without_model()
    assert (rest.scratch, rest.heard) == ({}, {})
    assert torch.equal(rest.params, cohort().params)
    assert (without.params.shape, without.momentum.shape) == ((5, 0), (5, 0))
    assert torch.equal(without.buffers["mean"], cohort().buffers["mean"])


@pytest.mark.parametrize("model", [torch.arange(4.0), torch.arange(20.0).view(5, 4)])
def test_a_model_that_is_replaced_loses_its_momentum(model: torch.Tensor) -> None:
    before = cohort()
    after = before.with_model(model)
    assert torch.equal(after.params, model.expand(5, 4))
    assert not after.momentum.any()
    after.params[0] = 99  # its own memory
    assert torch.equal(before.params, cohort().params)
    assert model.max() < 99


def test_values_are_added_to_existing_ones() -> None:
    got = cohort().with_state(other=torch.ones(5)).with_scratch(mine=torch.ones(5)).with_heard(answer=torch.zeros(1))
    assert got.state.keys() == {"model", "other"}
    assert got.scratch.keys() == {"sketched", "mine"}
    assert got.heard["answer"].tolist() == [0]
