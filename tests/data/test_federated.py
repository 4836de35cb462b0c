"""A federation's data from one pool or from each client's own arrays, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pfedlms.data import FederatedData, Partitioning, from_pairs, from_pool, load_dataset
from pfedlms.errors import DataError

X, Y = np.arange(12.0).reshape(6, 2), np.array([0, 1, 0, 1, 2, 0])


def pair(start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
    return X[start:stop], Y[start:stop]


# --- one pool -------------------------------------------------------------------------------------


def test_pool_of_digits() -> None:
    x, y = load_dataset("digits")
    data = from_pool(x, y, Partitioning(clients=8, alpha=0.5, seed=1))
    assert data.clients == 8
    assert data.shape == (1, 8, 8)
    assert data.classes == 10
    assert data.x.dtype == torch.float32
    assert data.y.dtype == torch.int64
    assert torch.equal(data.x, torch.from_numpy(x))
    assert torch.equal(data.y, torch.from_numpy(y))
    everything = np.concatenate([*data.train, *data.test])
    assert sorted(everything.tolist()) == list(range(1797))
    for train, test in zip(data.train, data.test, strict=True):
        assert len(test) == round(0.25 * (len(train) + len(test)))
        assert len(train) + len(test) >= 10
    assert data.samples == tuple(len(train) for train in data.train)


def test_every_client_of_a_pool_can_be_split() -> None:
    """A client needs one sample to train and one to test on, whatever min_samples says."""
    data = from_pool(np.zeros((8, 1)), np.zeros(8, dtype=int), Partitioning(4, 50.0, 1, min_samples=0))
    assert all(len(own) >= 1 for own in (*data.train, *data.test))


# --- each client's own ----------------------------------------------------------------------------


def test_pairs_by_hand() -> None:
    data = from_pairs([(pair(0, 2), pair(2, 3)), (pair(3, 4), pair(4, 6))])
    assert data.clients == 2
    assert data.shape == (2,)
    assert data.samples == (2, 1)
    assert data.classes == 3
    assert data.x.dtype == torch.float32
    assert data.x[data.train[0]].tolist() == [[0, 1], [2, 3]]
    assert data.y[data.train[0]].tolist() == [0, 1]
    assert data.x[data.test[0]].tolist() == [[4, 5]]
    assert data.x[data.train[1]].tolist() == [[6, 7]]
    assert data.y[data.test[1]].tolist() == [2, 0]


def test_pairs_take_lists_tensors_and_whole_floats() -> None:
    data = from_pairs([(([[1, 2]], [1.0]), (torch.tensor([[3.0, 4.0]]), torch.tensor([0])))])
    assert data.x.tolist() == [[1.0, 2.0], [3.0, 4.0]]
    assert data.y.tolist() == [1, 0]
    assert data.y.dtype == torch.int64


def test_classes_are_counted_over_all_clients_and_splits() -> None:
    data = from_pairs([((X[:1], [0]), (X[:1], [0])), ((X[:1], [1]), (X[:1], [6]))])
    assert data.classes == 7


def test_data_moves_to_a_device_without_its_indices() -> None:
    data = from_pairs([(pair(0, 2), pair(2, 3))])
    moved = data.to(torch.device("meta"))
    assert moved.x.device.type == moved.y.device.type == "meta"
    assert moved.train is data.train
    assert (moved.classes, moved.shape) == (2, (2,))


# --- a share set aside ----------------------------------------------------------------------------


@pytest.mark.parametrize("share", [0.1, 0.3, 0.9])
def test_validation_comes_out_of_training_and_nothing_else_changes(share: float) -> None:
    """Every client: what it trained on before is cut in two by class, give or take one; test samples are the same."""
    x, y = load_dataset("digits")
    before, data = (from_pool(x, y, Partitioning(8, 0.5, 1, validation=each)) for each in (0.0, share))
    assert before.validation == ()
    assert len(data.validation) == 8
    for client, whole in enumerate(before.train):
        train, aside = data.train[client], data.validation[client]
        assert sorted([*train.tolist(), *aside.tolist()]) == whole.tolist()
        assert data.test[client].tolist() == before.test[client].tolist()
        assert len(aside) == min(max(round(share * len(whole)), 1), len(whole) - 1)
        for label in range(10):
            assert abs((y[aside] == label).sum() - share * (y[whole] == label).sum()) <= 1
    assert data.samples == tuple(len(own) for own in data.train)
    assert sum(data.samples) < sum(before.samples)


def test_validation_by_hand() -> None:
    """Of 8 samples of class 0 and 4 of class 1 a quarter is 2 and 1; the client's test samples are as they were."""
    labels = np.array([0] * 8 + [1] * 4)
    clients = [((np.full((12, 1), client), labels), ([[9.0]], [0])) for client in range(2)]
    data = from_pairs(clients, seed=3, validation=0.25)
    for client in range(2):
        aside = data.validation[client]
        assert np.bincount(data.y[aside]).tolist() == [2, 1]
        assert np.bincount(data.y[data.train[client]]).tolist() == [6, 3]
        assert set(data.x[aside].flatten().tolist()) == {client}
        assert data.x[data.test[client]].tolist() == [[9.0]]
    assert data.samples == (9, 9)


def test_what_is_set_aside_is_drawn_by_seed_and_client_and_not_as_the_test_split() -> None:
    def drawn(seed: int, client: int = 0) -> list[int]:
        pairs = [((np.zeros((40, 1)), np.zeros(40, dtype=int)), (np.zeros((1, 1)), [0]))] * 2
        data = from_pairs(pairs, seed, validation=0.25)
        return (data.validation[client] - 41 * client).tolist()

    assert drawn(1) == drawn(1)
    assert drawn(1) != drawn(2)
    assert drawn(1, client=0) != drawn(1, client=1)
    tested = from_pool(np.zeros((40, 1)), np.zeros(40, dtype=int), Partitioning(1, 1.0, 1)).test[0]
    assert drawn(1) != tested.tolist()


def with_singles(*counts: int) -> list[tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]]:
    return [((np.zeros((n, 1)), np.arange(n) % 2), (np.zeros((1, 1)), np.zeros(1, dtype=int))) for n in counts]


def test_a_single_training_sample_is_trained_on() -> None:
    with pytest.warns(UserWarning, match=r"data.validation: 2 of 4 clients hold a single .* V-acc is of the others"):
        data = from_pairs(with_singles(1, 4, 2, 1), validation=0.5)
    assert data.samples == (1, 2, 1, 1)
    assert [len(own) for own in data.validation] == [0, 2, 1, 0]


def test_nobody_who_could_set_anything_aside() -> None:
    with pytest.raises(DataError, match=r"data.validation: got 0.5, but every client .* leave data.validation out"):
        from_pairs(with_singles(1, 1), validation=0.5)


def test_the_fingerprint_tells_what_is_set_aside() -> None:
    pairs = with_singles(20, 20)
    plain = from_pairs(pairs)
    one, again, other = (from_pairs(pairs, seed, 0.5) for seed in (1, 1, 2))
    assert one.fingerprint() == again.fingerprint()
    assert len({plain.fingerprint(), one.fingerprint(), other.fingerprint()}) == 3
    hidden = FederatedData(one.x, one.y, one.train, one.test, one.classes)
    assert hidden.fingerprint() != one.fingerprint()
    assert one.to(torch.device("meta")).validation is one.validation


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("x", "y", "message"),
    [
        (X[:2], Y[:1], "got 2 samples and 1 labels"),
        (X[:2], [float("nan"), 1], "1 labels are missing"),
        ([[1.0, float("inf")]], [0], "NaN or infinite"),
    ],
)
@pytest.mark.parametrize("place", ["client 1 train", "client 1 test", "data"])
def test_wrong_arrays_are_refused_by_name(x: object, y: object, message: str, place: str) -> None:
    good = pair(0, 2)
    make = {
        "client 1 train": lambda: from_pairs([(good, good), ((x, y), good)]),
        "client 1 test": lambda: from_pairs([(good, good), (good, (x, y))]),
        "data": lambda: from_pool(x, y, Partitioning(1, 0.5, 0)),
    }
    with pytest.raises(DataError, match=f"^{place}: .*{message}"):
        make[place]()


@pytest.mark.parametrize("split", ["train", "test"])
def test_samples_of_another_shape_are_refused(split: str) -> None:
    good, other = pair(0, 2), (np.zeros((2, 3)), np.array([0, 1]))
    pairs = [(good, good), (other, good) if split == "train" else (good, other)]
    with pytest.raises(
        DataError, match=rf"client 1 {split}: got samples of shape \(3,\), expected \(2,\) as for client 0 train"
    ):
        from_pairs(pairs)


def test_no_clients() -> None:
    with pytest.raises(DataError, match="got no clients, expected one"):
        from_pairs([])
