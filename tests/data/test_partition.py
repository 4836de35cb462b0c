"""Partitions of every scheme and the train/test split: properties of every draw, and small cases by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from pfedlms import rng
from pfedlms.data import Partitioning, Pool
from pfedlms.data.partition import (
    ClientSets,
    Splits,
    assign,
    by_classes,
    by_dirichlet,
    by_owner,
    by_quantity,
    iid,
    split,
)
from pfedlms.errors import DataError

LABELS = np.repeat(np.arange(10), 100)


def class_counts(labels: np.ndarray, sets: list[np.ndarray]) -> np.ndarray:
    """`[clients, classes]`."""
    return np.array([np.bincount(labels[held], minlength=labels.max() + 1) for held in sets])


def test_a_full_client_gets_no_further_class() -> None:
    """A client that already holds N / clients samples gets nothing of the next class, so that no client holds more than
    N / clients plus one class."""
    saw_a_full_client = False
    for seed in range(30):
        for clients in (5, 20):
            counts = class_counts(LABELS, by_dirichlet(LABELS, clients, 0.5, seed, min_samples=1))
            full = counts.cumsum(axis=1) - counts >= 1000 / clients  # classes are assigned in ascending order
            saw_a_full_client |= bool(full.any())
            assert counts[full].max(initial=0) == 0
            assert counts.sum(axis=1).max() < 1000 / clients + 100
    assert saw_a_full_client


def test_samples_of_a_class_are_shuffled() -> None:
    held = by_dirichlet(LABELS, 5, 100.0, 1)[0]
    own = held[LABELS[held] == 0]
    assert len(own) > 5
    assert own.max() - own.min() >= 2 * len(own)


def test_heterogeneity_grows_as_alpha_falls() -> None:
    """The mean share of a client's most common class, over 5 seeds: 1/10 for even mixes, up to 1."""
    shares = []
    for alpha in (0.05, 0.5, 5.0, 500.0):
        own = []
        for seed in range(5):
            counts = class_counts(LABELS, by_dirichlet(LABELS, 10, alpha, seed, min_samples=1))
            own += (counts.max(axis=1) / counts.sum(axis=1)).tolist()
        shares.append(np.mean(own))
    assert shares[0] > shares[1] + 0.1 > shares[2] + 0.2 > shares[3] + 0.2
    assert shares[0] > 0.6
    assert shares[3] < 0.2


def test_a_very_small_alpha_gives_a_complete_partition() -> None:
    """Dirichlet(1e-300) puts everything on one client (or is no number at all); the partition is still complete."""
    sets = by_dirichlet(np.repeat(np.arange(4), 10), 4, 1e-300, 0, min_samples=0)
    assert sorted(np.concatenate(sets).tolist()) == list(range(40))


def test_an_impossible_partition_is_refused_with_a_remedy() -> None:
    with pytest.raises(DataError) as caught:
        by_dirichlet(LABELS, 50, 0.01, 0, min_samples=15)
    expected = ("1000 samples", "50 clients", "α = 0.01", "data.min_samples = 15", "100 draws", "a larger data.alpha")
    assert all(part in str(caught.value) for part in expected)


@pytest.mark.parametrize(
    ("share", "sizes", "held_out"),
    [
        (0.25, [2], [1]),  # a quarter, rounded (half to even), at least one on each side
        (0.25, [10], [2]),
        (0.25, [7, 6, 5], [2, 1, 1]),  # quotas 1.75, 1.5, 1.25 and round(4.5) = 4
        (0.25, [4, 1, 1], [2, 0, 0]),  # quotas 1, 0.25, 0.25 and round(1.5) = 2: a class of one sample is trained on
        (0.1, [12, 7, 6], [1, 1, 0]),  # quotas 1.2, 0.7, 0.6 and round(2.5) = 2: one more, of the largest remainder
        (0.1, [2, 2, 1], [1, 0, 0]),  # round(0.5) = 0, but one at least; the first of two equals
        (0.5, [2, 4, 1], [1, 3, 0]),  # quotas 1, 2, 0.5 and round(3.5) = 4: only the class of four has one to spare
        (0.5, [2, 1], [1, 1]),  # quotas 1, 0.5 and round(1.5) = 2: neither has one to spare
        (0.99, [1, 1, 1], [1, 1, 0]),  # one is left to train on, for any share
        (1 - 2**-53, [3, 3], [3, 2]),  # the largest share there is
    ],
)  # fmt: skip
def test_the_number_of_held_out_samples_by_hand(share: float, sizes: list[int], held_out: list[int]) -> None:
    labels = np.repeat(np.arange(len(sizes)), sizes)
    _, found = split(labels, np.arange(len(labels)), 0, 0, share, "validation")
    assert np.bincount(labels[found], minlength=len(sizes)).tolist() == held_out
    with pytest.raises(DataError, match=r"client 7: got 1 sample, expected at least 2 .*a \(train, test\) pair"):
        split(labels, np.arange(1), 0, client=7)


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
def test_splits_of_all_clients_equal_those_of_each_client(share: float) -> None:
    draw = np.random.default_rng(1)
    labels, owner = draw.integers(0, 6, 900), draw.integers(0, 40, 900)
    sets = ClientSets(owner, 40)
    splits = Splits(sets, labels, 3, share)
    splits.prefetch([7, 31, 2])  # some together, the others when they are asked for
    for client in range(40):
        held = np.flatnonzero(owner == client)
        assert sets[client].tolist() == held.tolist()
        held_out = split_in_plain_python(labels, held, 3, client, share)
        assert splits.held_out[client].tolist() == held_out
        assert splits.train[client].tolist() == sorted(set(held.tolist()) - set(held_out))
        assert (splits.train.sizes[client], splits.held_out.sizes[client]) == (len(held) - len(held_out), len(held_out))
    assert [own.tolist() for own in splits.train] == [splits.train[client].tolist() for client in range(40)]


def assigned(
    scheme: str, labels: np.ndarray = LABELS, clients: int = 5, seed: int = 0, **more: float
) -> list[np.ndarray]:
    owner = np.arange(len(labels)) % clients if scheme == "given" else None
    how = Partitioning(clients, more.get("alpha", 0.5), seed, int(more.get("least", 1)), scheme=scheme)
    return assign(labels, how, owner)


@pytest.mark.parametrize("scheme", ["dirichlet", "classes", "iid", "quantity", "given"])
@settings(max_examples=30, deadline=None, derandomize=True)
@given(st.lists(st.integers(-1, 2), min_size=20, max_size=80), st.integers(2, 6), st.integers(0, 2**63 - 1))
def test_every_sample_goes_to_exactly_one_client(scheme: str, labels: list[int], clients: int, seed: int) -> None:
    sizes = np.unique(labels, return_counts=True)[1]
    assume(scheme != "classes" or np.minimum(sizes, clients).sum() >= 2 * clients)
    sets = assigned(scheme, np.array(labels), clients, seed)
    assert len(sets) == clients
    assert sorted(np.concatenate(sets).tolist()) == list(range(len(labels)))
    assert all((np.diff(held) > 0).all() for held in sets)
    assert all(held.dtype == np.int64 for held in sets)


@pytest.mark.parametrize("scheme", ["classes", "iid", "quantity", "dirichlet"])
def test_a_partition_depends_on_its_seed_and_gives_every_client_the_minimum(scheme: str) -> None:
    """With seed 3 the first draw of Dirichlet shares gives a client fewer samples, so it is repeated."""
    first, again, *others = (
        [held.tolist() for held in assigned(scheme, seed=seed, alpha=0.1, least=80)] for seed in (1, 1, 2, 3, 4)
    )
    assert first == again
    assert first not in others
    assert min(len(held) for sets in (first, *others) for held in sets) >= 80


@pytest.mark.parametrize(("least", "most"), [(10, 100), (0, 1000)])
@pytest.mark.parametrize("scheme", ["classes", "iid", "quantity", "dirichlet"])
def test_more_clients_than_the_samples_allow_are_refused(scheme: str, least: int, most: int) -> None:
    with pytest.raises(DataError, match=f"got {most + 1} clients.*only 1000 samples.*at most {most} clients"):
        assigned(scheme, clients=most + 1, least=least)


def test_the_auto_scheme_is_given_for_data_with_owners() -> None:
    owner = np.arange(1000) % 7
    owned = assign(LABELS, Partitioning(3, 0.5, 0, 2, scheme="given"), owner)
    assert [held.tolist() for held in owned] == [list(range(client, 1000, 7)) for client in range(7)]
    classes, numbers = (Pool(LABELS, LABELS, count) for count in (10, 0))
    named = Pool(LABELS, LABELS, 10, owner=owner)
    assert [pool.resolve_scheme("auto") for pool in (named, classes, numbers)] == ["given", "dirichlet", "iid"]
    assert named.resolve_scheme("dirichlet") == "dirichlet"
    with pytest.raises(DataError, match=r"data.partition: got 'given', but the data name no clients.*owner_column=COL"):
        classes.resolve_scheme("given")
    with pytest.raises(DataError, match=r"data.partition: got 'classes', which divides classes, but targets are numb"):
        numbers.resolve_scheme("classes")


def test_iid_sizes_differ_by_at_most_one() -> None:
    """1000 over 7: six parts of 143 and one of 142, in each about 14 of every class."""
    sets = iid(1000, 7, 3)
    assert sorted(map(len, sets)) == [142] + [143] * 6
    counts = class_counts(LABELS, sets)
    assert counts.min() >= 3
    assert counts.max() <= 28  # a hypergeometric count of mean 14.3 and deviation 3.3, four deviations away


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("clients", "classes"), [(10, 1), (5, 2), (20, 2), (7, 3), (4, 10), (1, 10)])
def test_every_client_holds_the_given_number_of_classes(clients: int, classes: int, seed: int) -> None:
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
    """600, 200 and 200 samples, five clients with one class: 3, 1 and 1 holders, 200 samples each, and no more."""
    labels = np.repeat([0, 1, 2], [600, 200, 200])
    counts = class_counts(labels, by_classes(labels, 5, 1, 0))
    assert (counts > 0).sum(axis=0).tolist() == [3, 1, 1]
    assert counts.sum(axis=1).tolist() == [200] * 5
    with pytest.raises(DataError, match=r"the smallest got 200 of 1000 samples, expected data.min_samples = 201"):
        by_classes(labels, 5, 1, 0, min_samples=201)


def test_the_combination_of_classes_is_random() -> None:
    together = {
        tuple(np.flatnonzero(row)) for seed in range(20) for row in class_counts(LABELS, by_classes(LABELS, 5, 2, seed))
    }
    assert len(together) > 30  # of 45 pairs, with 100 draws


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=8), st.integers(1, 12), st.integers(1, 8), st.integers(0, 99))
def test_every_possible_partition_by_classes_is_found(sizes: list[int], clients: int, classes: int, seed: int) -> None:
    labels = np.repeat(np.arange(len(sizes)), sizes)
    possible = len(sizes) <= clients * classes <= sum(min(size, clients) for size in sizes) and classes <= len(sizes)
    if possible:
        counts = class_counts(labels, by_classes(labels, clients, classes, seed, min_samples=1))
        assert ((counts > 0).sum(axis=1) == classes).all()
        assert (counts > 0).any(axis=0).all()
    elif clients <= len(labels):
        with pytest.raises(DataError, match=f"data.classes_per_client: got {classes} for {clients} clients, expected"):
            by_classes(labels, clients, classes, seed, min_samples=1)


@pytest.mark.parametrize("alpha", [1e-300, 0.1, 1.0, 1e6])
def test_every_client_has_the_minimum_for_any_alpha(alpha: float) -> None:
    sizes = [len(held) for held in by_quantity(1000, 20, alpha, 1, min_samples=10)]
    assert min(sizes) >= 10
    assert sum(sizes) == 1000
    even = by_quantity(40, 4, alpha, 0, min_samples=10)
    assert [len(held) for held in even] == [10] * 4
    assert [held.tolist() for held in even] != [held.tolist() for held in iid(40, 4, 0)]  # another order


def test_alpha_skews_sizes_but_not_classes() -> None:
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


def test_the_given_scheme_by_hand() -> None:
    sets = by_owner(np.array([2, 0, 1, 0, 2, 2]), ("a", "b", "c"), 1)
    assert [held.tolist() for held in sets] == [[1, 3], [2], [0, 4, 5]]
    in_order = ClientSets(np.array([0, 0, 2, 2, 2]), 4)
    assert [held.tolist() for held in in_order] == [[0, 1], [], [2, 3, 4], []]
    with pytest.raises(DataError, match=r"data.min_samples: got 3, but 2 of 3 given clients .* \(client b: 1\)"):
        by_owner(np.array([2, 0, 1, 0, 2, 2]), ("a", "b", "c"), 3)
