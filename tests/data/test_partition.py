"""Non-IID partitions and the train/test split: what must hold for every draw, and small cases by hand."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pfedlms import rng
from pfedlms.data.partition import Sets, Splits, partition, split
from pfedlms.errors import DataError

LABELS = np.repeat(np.arange(10), 100)


def class_counts(labels: np.ndarray, sets: list[np.ndarray]) -> np.ndarray:
    """`[clients, classes]`."""
    return np.array([np.bincount(labels[held], minlength=labels.max() + 1) for held in sets])


# --- partition ------------------------------------------------------------------------------------


@settings(max_examples=50, deadline=None, derandomize=True)
@given(
    st.lists(st.integers(0, 5), min_size=20, max_size=120),
    st.integers(1, 8),
    st.sampled_from([0.01, 0.1, 0.5, 1.0, 100.0]),
    st.integers(0, 2**64 - 1),
)
def test_every_sample_goes_to_exactly_one_client(labels: list[int], clients: int, alpha: float, seed: int) -> None:
    sets = partition(np.array(labels), clients, alpha, seed, min_samples=0)
    assert len(sets) == clients
    assert sorted(np.concatenate(sets).tolist()) == list(range(len(labels)))
    assert all((np.diff(held) > 0).all() for held in sets)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("alpha", [0.1, 0.5, 10.0])
def test_every_client_has_the_minimum(alpha: float, seed: int) -> None:
    sets = partition(LABELS, 10, alpha, seed, min_samples=30)
    assert min(len(held) for held in sets) >= 30


def test_one_client_holds_everything() -> None:
    assert partition(LABELS, 1, 0.1, 0)[0].tolist() == list(range(1000))


def test_as_many_clients_as_the_minimum_allows() -> None:
    """Three clients, six samples, two each: only an exact cut will do, and some draw finds it."""
    sets = partition(np.array([0, 0, 0, 1, 1, 1]), 3, 5.0, 1, min_samples=2)
    assert [len(held) for held in sets] == [2, 2, 2]


def excess_of_full_clients(labels: np.ndarray, sets: list[np.ndarray]) -> int:
    """The most samples of a class that went to a client that held N / clients before that class was dealt."""
    counts = class_counts(labels, sets)
    before = counts.cumsum(axis=1) - counts  # classes are dealt in ascending order
    full = before >= len(labels) / len(sets)
    return int(counts[full].max(initial=0))


def test_capacity_rule() -> None:
    """A client that already holds N / clients samples gets nothing of the next class (one sample is left to rounding:
    see the test below), so that no client holds more than N / clients plus one class."""
    saw_a_full_client = False
    for seed in range(30):
        for clients in (5, 20):
            sets = partition(LABELS, clients, 0.5, seed, min_samples=1)
            counts = class_counts(LABELS, sets)
            saw_a_full_client |= bool((counts.sum(axis=1) > 1000 / clients).any())
            assert excess_of_full_clients(LABELS, sets) <= 1
            assert counts.sum(axis=1).max() < 1000 / clients + 100 + 10
    assert saw_a_full_client


def test_capacity_rule_to_the_last_sample() -> None:
    assert [excess_of_full_clients(LABELS, partition(LABELS, 20, 0.5, seed, min_samples=1)) for seed in range(10)] == [
        0
    ] * 10


def test_partition_is_a_function_of_its_seed() -> None:
    first, again, other = (partition(LABELS, 5, 0.5, seed) for seed in (1, 1, 2))
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    assert not all(np.array_equal(a, b) for a, b in zip(first, other, strict=True))


def test_members_of_a_class_are_shuffled() -> None:
    """Neighbours in the pool do not stay together: a client's part of a class is no contiguous run."""
    held = partition(LABELS, 5, 100.0, 1)[0]
    own = held[LABELS[held] == 0]
    assert len(own) > 5
    assert own.max() - own.min() >= 2 * len(own)


def test_heterogeneity_grows_as_alpha_falls() -> None:
    """The mean share of a client's most common class, over 5 seeds: 1/10 for even mixes, up to 1."""
    shares = []
    for alpha in (0.05, 0.5, 5.0, 500.0):
        own = []
        for seed in range(5):
            counts = class_counts(LABELS, partition(LABELS, 10, alpha, seed, min_samples=1))
            own += (counts.max(axis=1) / counts.sum(axis=1)).tolist()
        shares.append(np.mean(own))
    assert shares[0] > shares[1] + 0.1 > shares[2] + 0.2 > shares[3] + 0.2
    assert shares[0] > 0.6
    assert shares[3] < 0.2


def test_labels_need_not_be_consecutive() -> None:
    sets = partition(np.array([7, -3] * 20), 2, 1.0, 0, min_samples=5)
    assert sorted(np.concatenate(sets).tolist()) == list(range(40))


def test_very_small_alpha_shares_evenly_where_all_mass_is_on_full_clients() -> None:
    """Dirichlet(1e-300) puts everything on one client (or is no number at all); the partition is still complete."""
    sets = partition(np.repeat(np.arange(4), 10), 4, 1e-300, 0, min_samples=0)
    assert sorted(np.concatenate(sets).tolist()) == list(range(40))


@pytest.mark.parametrize(("clients", "minimum", "most"), [(101, 10, 100), (1001, 1, 1000), (1001, 0, 1000)])
def test_more_clients_than_samples_allow(clients: int, minimum: int, most: int) -> None:
    with pytest.raises(DataError, match=f"got {clients} clients.*only 1000 samples.*at most {most} clients"):
        partition(LABELS, clients, 0.5, 0, min_samples=minimum)


def test_an_impossible_draw_names_clients_alpha_and_remedy() -> None:
    with pytest.raises(DataError) as caught:
        partition(LABELS, 50, 0.01, 0, min_samples=15)
    message = str(caught.value)
    for part in (
        "1000 samples",
        "50 clients",
        "α = 0.01",
        "data.min_samples = 15",
        "100 draws",
        "fewer clients",
        "larger data.alpha",
    ):
        assert part in message


# --- split ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("total", "tested"), [(2, 1), (3, 1), (4, 1), (5, 1), (6, 2), (7, 2), (8, 2), (10, 2), (11, 3), (13, 3), (100, 25)]
)
@pytest.mark.parametrize("classes", [1, 3])
def test_split_sizes(total: int, tested: int, classes: int) -> None:
    """A quarter, rounded (half to even), at least one on each side."""
    train, test = split(np.arange(total) % classes, np.arange(total), 0, 0)
    assert (len(train), len(test)) == (total - tested, tested)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.lists(st.integers(0, 6), min_size=2, max_size=60), st.integers(0, 100))
def test_split_is_a_partition_and_stratified(labels: list[int], seed: int) -> None:
    """Each class gives its quarter, give or take one; the client's own indices are cut, not positions."""
    held = 5 + 3 * np.arange(len(labels))
    all_labels = np.full(held[-1] + 1, 99)
    all_labels[held] = labels
    train, test = split(all_labels, held, seed, 1)
    assert sorted([*train.tolist(), *test.tolist()]) == held.tolist()
    assert len(train) > 0
    assert len(test) > 0
    tested = Counter(all_labels[test].tolist())
    for label, size in Counter(labels).items():
        assert abs(tested[label] - 0.25 * size) <= 1


def test_split_of_whole_quotas_by_hand() -> None:
    labels = np.repeat([0, 1, 2], [40, 20, 8])
    train, test = split(labels, np.arange(68), 3, 0)
    assert np.bincount(labels[test]).tolist() == [10, 5, 2]
    assert np.bincount(labels[train]).tolist() == [30, 15, 6]


def test_largest_remainders_give_what_is_missing() -> None:
    """Sizes 7, 6, 5, quotas 1.75, 1.5, 1.25: round(4.5) = 4, floors 1 + 1 + 1, so the class of 7 gives one more."""
    labels = np.repeat([0, 1, 2], [7, 6, 5])
    _, test = split(labels, np.arange(18), 0, 0)
    assert np.bincount(labels[test]).tolist() == [2, 1, 1]


def test_a_class_seen_once_is_trained_on() -> None:
    """Sizes 4, 1, 1, quotas 1, 0.25, 0.25: of round(1.5) = 2 test samples the class of four gives both, though its
    remainder is smaller."""
    labels = np.array([0, 1, 0, 0, 2, 0])
    for seed in range(10):
        _, test = split(labels, np.arange(6), seed, 0)
        assert labels[test].tolist() == [0, 0]


def test_one_class_only() -> None:
    train, test = split(np.zeros(8, dtype=np.int64), np.arange(8), 0, 0)
    assert (len(train), len(test)) == (6, 2)


def test_two_samples_give_one_each() -> None:
    for labels in ([0, 0], [0, 1]):
        train, test = split(np.array(labels), np.arange(2), 0, 0)
        assert sorted([*train.tolist(), *test.tolist()]) == [0, 1]
        assert len(train) == len(test) == 1


@pytest.mark.parametrize("total", [0, 1])
def test_fewer_than_two_samples_cannot_be_split(total: int) -> None:
    with pytest.raises(DataError, match=rf"client 7 holds {total} sample\(s\), expected at least 2.*data.min_samples"):
        split(np.zeros(total, dtype=np.int64), np.arange(total), 0, client=7)


def test_split_is_a_function_of_seed_and_client() -> None:
    labels, held = np.zeros(40, dtype=np.int64), np.arange(40)
    first, again, other_seed, other_client = (
        split(labels, held, *name)[1].tolist() for name in ((0, 0), (0, 0), (1, 0), (0, 1))
    )
    assert first == again
    assert first != other_seed
    assert first != other_client


def test_split_takes_another_fraction() -> None:
    train, test = split(np.zeros(10, dtype=np.int64), np.arange(10), 0, 0, share=0.4)
    assert (len(train), len(test)) == (6, 4)


# --- other shares ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("share", "sizes", "aside"),
    [
        (0.1, [40, 20, 10], [4, 2, 1]),  # whole quotas
        (0.1, [12, 7, 6], [1, 1, 0]),  # quotas 1.2, 0.7, 0.6 and round(2.5) = 2: one more, of the largest remainder
        (0.1, [2, 2, 1], [1, 0, 0]),  # round(0.5) = 0, but one at least; the first of two equals
        (0.6, [3, 2], [2, 1]),  # quotas 1.8, 1.2 and round(3.0) = 3
        (0.5, [2, 4, 1], [1, 3, 0]),  # quotas 1, 2, 0.5 and round(3.5) = 4: only the class of four has one to spare
        (0.5, [2, 1], [1, 1]),  # quotas 1, 0.5 and round(1.5) = 2: neither has one to spare
        (0.99, [1, 1, 1], [1, 1, 0]),  # one is left to train on, whatever the share
        (1 - 2**-53, [3, 3], [3, 2]),  # the largest share there is
    ],
)  # fmt: skip
def test_what_is_set_aside_by_hand(share: float, sizes: list[int], aside: list[int]) -> None:
    labels = np.repeat(np.arange(len(sizes)), sizes)
    _, apart = split(labels, np.arange(len(labels)), 0, 0, share, "validation")
    assert np.bincount(labels[apart], minlength=len(sizes)).tolist() == aside


def split_in_plain_python(labels: np.ndarray, held: np.ndarray, seed: int, client: int, share: float) -> list[int]:
    """What `split` sets aside, client by client and class by class."""
    order = [int(held[place]) for place in rng.permutation(rng.stream(seed, "split", client), len(held))]
    sizes = {label: sum(labels[each] == label for each in order) for label in sorted({int(labels[k]) for k in order})}
    take = {label: int(share * size) for label, size in sizes.items()}
    wanted = min(max(round(share * len(order)), 1), len(order) - 1)
    ranked = sorted(sizes, key=lambda each: (take[each] + 1 == sizes[each], take[each] - share * sizes[each], each))
    for label in ranked[: wanted - sum(take.values())]:
        take[label] += 1
    return sorted(k for label, count in take.items() for k in [each for each in order if labels[each] == label][:count])


@pytest.mark.parametrize("share", [0.25, 0.05, 0.6])
def test_splits_of_all_clients_at_once_are_those_of_each(share: float) -> None:
    draw = np.random.default_rng(1)
    labels, owner = draw.integers(0, 6, 900), draw.integers(0, 40, 900)
    sets = Sets(owner, 40)
    splits = Splits(sets, labels, 3, share)
    splits.find([7, 31, 2])  # some together, the others when they are asked for
    for client in range(40):
        held = np.flatnonzero(owner == client)
        assert sets[client].tolist() == held.tolist()
        aside = split_in_plain_python(labels, held, 3, client, share)
        assert splits.aside[client].tolist() == aside
        assert splits.rest[client].tolist() == sorted(set(held.tolist()) - set(aside))
        assert (splits.rest.sizes[client], splits.aside.sizes[client]) == (len(held) - len(aside), len(aside))
    assert [own.tolist() for own in splits.rest] == [splits.rest[client].tolist() for client in range(40)]


def test_samples_stored_client_by_client_need_no_table() -> None:
    sets = Sets(np.array([0, 0, 2, 2, 2]), 4)
    assert [own.tolist() for own in sets] == [[0, 1], [], [2, 3, 4], []]
