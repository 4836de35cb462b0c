"""Federated data from one pool or from each client's own arrays: validation samples, fingerprints, and samples that
stay on the disk."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import pfedlms
from pfedlms.data import FederatedData, Partitioning, from_pairs, from_pool, load_dataset, load_pool, partitioned
from pfedlms.errors import DataError

X, Y = np.arange(12.0).reshape(6, 2), np.array([0, 1, 0, 1, 2, 0])


def pair(start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
    return X[start:stop], Y[start:stop]


def test_every_client_of_a_pool_can_be_split() -> None:
    """A client needs one sample to train and one to test on, for any min_samples."""
    data = from_pool(np.zeros((8, 1)), np.zeros(8, dtype=int), Partitioning(4, 50.0, 1, min_samples=0))
    assert all(len(own) >= 1 for own in (*data.train, *data.test))


def test_data_of_pairs_by_hand() -> None:
    data = from_pairs([(pair(0, 2), pair(2, 3)), (pair(3, 4), pair(4, 6))])
    assert (data.clients, data.shape, data.samples, data.classes) == (2, (2,), (2, 1), 3)
    assert data.x.dtype == torch.float32
    assert data.x[data.train[0]].tolist() == [[0, 1], [2, 3]]
    assert data.y[data.train[0]].tolist() == [0, 1]
    assert data.x[data.test[0]].tolist() == [[4, 5]]
    assert data.x[data.train[1]].tolist() == [[6, 7]]
    assert data.y[data.test[1]].tolist() == [2, 0]
    moved = data.to(torch.device("meta"))  # without its indices
    assert moved.x.device.type == moved.y.device.type == "meta"
    assert (moved.train, moved.classes, moved.shape) == (data.train, 3, (2,))


@pytest.mark.parametrize("share", [0.1, 0.3, 0.9])
def test_validation_samples_are_taken_from_the_training_samples(share: float) -> None:
    """Of every class of every client the share, up to one sample; test samples do not change."""
    x, y = load_dataset("digits")
    before, data = (from_pool(x, y, Partitioning(8, 0.5, 1, validation=each)) for each in (0.0, share))
    assert (before.clients, before.shape, before.classes, before.validation) == (8, (1, 8, 8), 10, ())
    assert torch.equal(data.x, torch.from_numpy(x))
    assert sorted(np.concatenate([*before.train, *before.test]).tolist()) == list(range(1797))
    assert len(data.validation) == 8
    for client, whole in enumerate(before.train):
        train, held_out = data.train[client], data.validation[client]
        assert sorted([*train.tolist(), *held_out.tolist()]) == whole.tolist()
        assert data.test[client].tolist() == before.test[client].tolist()
        assert len(data.test[client]) == round(0.25 * (len(whole) + len(data.test[client])))
        assert len(held_out) == min(max(round(share * len(whole)), 1), len(whole) - 1)
        for label in range(10):
            assert abs((y[held_out] == label).sum() - share * (y[whole] == label).sum()) <= 1
    assert data.samples == tuple(len(own) for own in data.train)


def test_validation_samples_are_drawn_by_seed_and_client() -> None:
    def drawn(seed: int, client: int = 0) -> list[int]:
        pairs = [((np.zeros((40, 1)), np.zeros(40, dtype=int)), (np.zeros((1, 1)), [0]))] * 2
        data = from_pairs(pairs, seed, validation=0.25)
        return (data.validation[client] - 41 * client).tolist()

    assert drawn(1) == drawn(1)
    assert drawn(1) != drawn(2)
    assert drawn(1, client=0) != drawn(1, client=1)
    tested = from_pool(np.zeros((40, 1)), np.zeros(40, dtype=int), Partitioning(1, 1.0, 1)).test[0]
    assert drawn(1) != tested.tolist()


def clients_with(*counts: int) -> list[tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]]:
    return [((np.zeros((n, 1)), np.arange(n) % 2), (np.zeros((1, 1)), np.zeros(1, dtype=int))) for n in counts]


def test_a_single_training_sample_is_not_used_for_validation() -> None:
    with pytest.warns(UserWarning, match=r"data.validation: 2 of 4 clients hold a single .* V-acc is of the others"):
        data = from_pairs(clients_with(1, 4, 2, 1), validation=0.5)
    assert data.samples == (1, 2, 1, 1)
    assert [len(own) for own in data.validation] == [0, 2, 1, 0]
    with pytest.raises(DataError, match=r"data.validation: 2 of 2 clients .* leave data.validation out"):
        from_pairs(clients_with(1, 1), validation=0.5)


@pytest.mark.parametrize("cached", [3, 5])
def test_different_data_have_different_fingerprints(cached: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other partitions, shares of validation or samples; if there are more clients than the cache holds, no splits are
    drawn for the fingerprint."""
    monkeypatch.setattr("pfedlms.data.partition.MAX_CACHED", cached)
    x, y = np.arange(160, dtype=np.float32).reshape(80, 2), np.arange(80) % 4
    made = [
        from_pool(x, y, Partitioning(5, 0.5, seed, 2, share, scheme))
        for seed, share, scheme in [(0, 0, "iid"), (1, 0, "iid"), (0, 0.2, "iid"), (0, 0.3, "iid"), (0, 0, "classes")]
    ]
    made.append(from_pool(x[::-1], y[::-1], Partitioning(5, 0.5, 0, 2, 0, "iid")))
    assert len({data.fingerprint for data in made}) == 6
    assert any(data.train.splits.cache for data in made) == (cached == 5)
    again = from_pool(x, y, Partitioning(5, 0.5, 0, 2, 0.2, "iid"))
    assert again.fingerprint == made[2].fingerprint
    hidden = FederatedData(again.x, again.y, tuple(again.train), tuple(again.test), again.classes)
    assert hidden.fingerprint != again.fingerprint


def save(folder: Path, **arrays: np.ndarray) -> str:
    for name, array in arrays.items():
        np.save(folder / f"{name}.npy", array)
    return f"file:{folder}/x.npy"


def test_arrays_in_a_folder_are_memory_mapped(tmp_path: Path) -> None:
    x, y = np.arange(24, dtype=np.float32).reshape(8, 3), np.array([0, 1] * 4)
    name = save(tmp_path, x=x, y=y, client=np.repeat([0, 7], 4))
    pool = load_pool(name)
    assert not pool.x.flags.writeable  # a copy could be written
    assert np.array_equal(pool.x, x)
    assert pool.y.tolist() == y.tolist()
    assert (pool.owner.tolist(), pool.client_names) == ([0] * 4 + [1] * 4, ("0", "7"))
    assert partitioned(pool, Partitioning(2, 1.0, 0, 2)).client_names == ("0", "7")
    (tmp_path / "y.npy").write_bytes(b"nothing")
    with pytest.raises(DataError, match=r"x\.npy: cannot be read .*numpy\.save"):
        load_pool(name)


def test_a_run_on_memory_mapped_samples_equals_one_on_arrays(tmp_path: Path) -> None:
    """By path and in Python; clients named by their numbers get no names, and `everyone` can be left out."""
    draw = np.random.default_rng(0)
    x, y = draw.standard_normal((400, 6), dtype=np.float32), draw.integers(0, 3, 400)
    name, same = save(tmp_path, x=x, y=y), {"clients": 50, "partition": "iid", "min_samples": 2, "participation": 0.1}
    settings = {"method": "fedavg", "rounds": 3, "local_steps": 2, "model": "dnn", "everyone": False, **same}
    runs = [pfedlms.run(data, **settings) for data in (name, (np.load(tmp_path / "x.npy", mmap_mode="r"), y), (x, y))]
    measured = [[{**line, "seconds": 0} for line in run.metrics] for run in runs]
    assert measured[0] == measured[1] == measured[2]
    assert runs[0].summary["everyone"] is None
    save(tmp_path, client=np.repeat(np.arange(50), 8))
    given = pfedlms.run(name, **{**settings, "partition": "given"})
    assert "client_names" not in given.summary
    assert given.client_names[9] == "9"
    assert given.federation.data.train[9].min() >= 72
