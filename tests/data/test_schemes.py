"""Ways to deal samples out: what must hold for every draw, and counts by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from pfedlms.data import Partitioning, from_pool
from pfedlms.data.partition import partition
from pfedlms.data.schemes import assign, by_classes, by_quantity, iid
from pfedlms.data.schemes import given as as_given
from pfedlms.errors import DataError

LABELS = np.repeat(np.arange(10), 100)
OWNER = np.arange(1000) % 7


def dealt(scheme: str, labels: np.ndarray = LABELS, clients: int = 5, seed: int = 0, **more: float) -> list[np.ndarray]:
    owner = np.arange(len(labels)) % clients if scheme == "given" else None
    how = Partitioning(clients, more.get("alpha", 0.5), seed, int(more.get("least", 1)), scheme=scheme)
    return assign(labels, how, owner)


def class_counts(labels: np.ndarray, sets: list[np.ndarray]) -> np.ndarray:
    """`[clients, classes]`."""
    return np.array([np.bincount(labels[held], minlength=labels.max() + 1) for held in sets])


SCHEMES = ["dirichlet", "classes", "iid", "quantity", "given"]


@pytest.mark.parametrize("scheme", SCHEMES)
@settings(max_examples=30, deadline=None, derandomize=True)
@given(st.lists(st.integers(0, 3), min_size=20, max_size=80), st.integers(2, 6), st.integers(0, 2**63 - 1))
def test_every_sample_goes_to_exactly_one_client(scheme: str, labels: list[int], clients: int, seed: int) -> None:
    sizes = np.bincount(labels)
    assume(scheme != "classes" or np.minimum(sizes, clients).sum() >= 2 * clients)
    sets = dealt(scheme, np.array(labels), clients, seed)
    assert len(sets) == clients
    assert sorted(np.concatenate(sets).tolist()) == list(range(len(labels)))
    assert all((np.diff(held) > 0).all() for held in sets)
    assert all(held.dtype == np.int64 for held in sets)


@pytest.mark.parametrize("scheme", ["classes", "iid", "quantity"])
def test_a_draw_is_a_function_of_its_seed_and_of_no_other_draw(scheme: str) -> None:
    first, again, other = ([held.tolist() for held in dealt(scheme, seed=seed)] for seed in (1, 1, 2))
    assert first == again
    assert first != other


@pytest.mark.parametrize("scheme", ["classes", "iid", "quantity", "dirichlet"])
def test_more_clients_than_samples_allow(scheme: str) -> None:
    with pytest.raises(
        DataError, match=r"got 101 clients with data.min_samples 10.*only 1000 samples.*at most 100 clients"
    ):
        dealt(scheme, clients=101, least=10)


# --- which one ---


def test_auto_is_given_where_the_data_say_so() -> None:
    owned = assign(LABELS, Partitioning(3, 0.5, 0, 2), OWNER)
    assert [held.tolist() for held in owned] == [list(range(client, 1000, 7)) for client in range(7)]
    for name in ("auto", "dirichlet"):
        expected = partition(LABELS, 3, 0.5, 4, 2)
        got = assign(LABELS, Partitioning(3, 0.5, 4, 2, scheme=name), OWNER if name == "dirichlet" else None)
        assert [held.tolist() for held in got] == [held.tolist() for held in expected]


def test_nothing_is_given() -> None:
    with pytest.raises(
        DataError, match=r"data.partition: got 'given', but the data name no clients.*owner_column=COLUMN"
    ):
        assign(LABELS, Partitioning(3, 0.5, 0, 2, scheme="given"))


def test_a_pool_takes_a_scheme() -> None:
    data = from_pool(np.zeros((1000, 1)), LABELS, Partitioning(5, 0.5, 0, scheme="classes", classes_per_client=2))
    for train, test in zip(data.train, data.test, strict=True):
        assert set(LABELS[train].tolist()) == set(LABELS[test].tolist())
        assert len(set(LABELS[train].tolist())) == 2
        assert (len(train), len(test)) == (150, 50)


# --- iid ---


def test_iid_by_hand() -> None:
    """1000 over 7: six parts of 143 and one of 142, in each about 14 of every class."""
    sets = iid(1000, 7, 3)
    assert sorted(map(len, sets)) == [142] + [143] * 6
    counts = class_counts(LABELS, sets)
    assert counts.min() >= 3
    assert counts.max() <= 28  # a hypergeometric count of mean 14.3 and deviation 3.3, four deviations away


# --- classes ---


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("clients", "classes"), [(10, 1), (5, 2), (20, 2), (7, 3), (4, 10), (1, 10)])
def test_everybody_holds_that_many_classes(clients: int, classes: int, seed: int) -> None:
    """Ten even classes: a class has clients · classes / 10 holders, rounded up or down, and they hold as much of it."""
    counts = class_counts(LABELS, by_classes(LABELS, clients, classes, seed))
    assert ((counts > 0).sum(axis=1) == classes).all()
    holders = (counts > 0).sum(axis=0)
    assert holders.min() >= clients * classes // 10
    assert holders.max() <= -(-clients * classes // 10)
    for column in counts.T:
        assert np.ptp(column[column > 0]) <= 1
    assert counts.sum() == 1000


def test_large_classes_have_more_holders() -> None:
    """600, 200 and 200 samples, five clients with one class: 3, 1 and 1 holders, 200 samples each."""
    labels = np.repeat([0, 1, 2], [600, 200, 200])
    counts = class_counts(labels, by_classes(labels, 5, 1, 0))
    assert (counts > 0).sum(axis=0).tolist() == [3, 1, 1]
    assert counts.sum(axis=1).tolist() == [200] * 5


def test_which_classes_go_together_is_drawn() -> None:
    together = {
        tuple(np.flatnonzero(row)) for seed in range(20) for row in class_counts(LABELS, by_classes(LABELS, 5, 2, seed))
    }
    assert len(together) > 30  # of 45 pairs, with 100 draws


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=8), st.integers(1, 12), st.integers(1, 8), st.integers(0, 99))
def test_every_possible_deal_is_found(sizes: list[int], clients: int, classes: int, seed: int) -> None:
    """Where there is a place for each class and a sample for each place, the deal is made; else it is refused."""
    labels = np.repeat(np.arange(len(sizes)), sizes)
    possible = len(sizes) <= clients * classes <= sum(min(size, clients) for size in sizes) and classes <= len(sizes)
    if possible:
        counts = class_counts(labels, by_classes(labels, clients, classes, seed, min_samples=1))
        assert ((counts > 0).sum(axis=1) == classes).all()
        assert (counts > 0).any(axis=0).all()
    elif clients <= len(labels):
        with pytest.raises(DataError, match=f"data.classes_per_client: got {classes} for {clients} clients"):
            by_classes(labels, clients, classes, seed, min_samples=1)


def test_an_impossible_number_of_classes_says_what_is_possible() -> None:
    for classes in (2, 11):
        with pytest.raises(
            DataError, match=rf"got {classes} for 4 clients, expected 3 to 10, .* each of the 10 classes"
        ):
            by_classes(LABELS, 4, classes, 0)


def test_too_small_a_part_names_the_remedy() -> None:
    labels = np.repeat([0, 1], [5, 95])
    with pytest.raises(DataError, match=r"the smallest got 5 of 100 samples, expected data.min_samples = 10"):
        by_classes(labels, 2, 1, 0, min_samples=10)


# --- quantity ---


@pytest.mark.parametrize("alpha", [1e-300, 0.1, 1.0, 1e6])
def test_everybody_has_the_minimum_whatever_alpha(alpha: float) -> None:
    sizes = [len(held) for held in by_quantity(1000, 20, alpha, 1, min_samples=10)]
    assert min(sizes) >= 10
    assert sum(sizes) == 1000


def test_sizes_are_skewed_by_alpha_and_classes_are_not() -> None:
    """The largest client of 20, over 20 seeds: for a large α the mean of 50, for a small one most of what is left."""
    largest = {
        alpha: np.mean([max(map(len, by_quantity(1000, 20, alpha, seed))) for seed in range(20)])
        for alpha in (0.05, 1.0, 1e6)
    }
    assert largest[1e6] <= 52
    assert largest[0.05] > largest[1.0] + 100 > 200
    sets = by_quantity(1000, 3, 1.0, 0, min_samples=100)
    shares = class_counts(LABELS, sets) / np.array([[len(held)] for held in sets])
    assert np.abs(shares - 0.1).max() < 0.1


def test_the_minimum_to_the_last_sample() -> None:
    assert [len(held) for held in by_quantity(40, 4, 0.5, 0, min_samples=10)] == [10] * 4


# --- given ---


def test_given_by_hand() -> None:
    sets = as_given(np.array([2, 0, 1, 0, 2, 2]), ("a", "b", "c"), 1)
    assert [held.tolist() for held in sets] == [[1, 3], [2], [0, 4, 5]]


def test_a_given_client_with_too_few_samples_is_named() -> None:
    with pytest.raises(DataError, match=r"data.min_samples: got 3, but 2 of 3 given clients .* \(client b: 1\)"):
        as_given(np.array([2, 0, 1, 0, 2, 2]), ("a", "b", "c"), 3)
