"""Data of very many clients: nothing is computed for those that take no part, and samples may stay on the disk."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import pfedlms
from pfedlms.data import Partitioning, from_pool, load_pool
from pfedlms.errors import DataError


def test_the_fingerprint_of_very_many_clients_draws_no_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    """It still tells other partitions, other shares set aside and other samples apart."""
    monkeypatch.setattr("pfedlms.data.federated.REMEMBERED", 3)
    x, y = np.arange(160, dtype=np.float32).reshape(80, 2), np.arange(80) % 4
    made = [
        from_pool(x, y, Partitioning(5, 0.5, seed, 2, share, scheme))
        for seed, share, scheme in [(0, 0, "iid"), (1, 0, "iid"), (0, 0.2, "iid"), (0, 0.3, "iid"), (0, 0, "classes")]
    ]
    made.append(from_pool(x[::-1], y[::-1], Partitioning(5, 0.5, 0, 2, 0, "iid")))
    assert len({data.fingerprint() for data in made}) == 6
    assert not any(data.train._splits._found for data in made)
    assert from_pool(x, y, Partitioning(5, 0.5, 0, 2, 0.2, "iid")).fingerprint() == made[2].fingerprint()


def save(folder: Path, **arrays: np.ndarray) -> str:
    for name, array in arrays.items():
        np.save(folder / f"{name}.npy", array)
    return f"file:{folder}/x.npy"


def test_arrays_in_a_folder_are_mapped(tmp_path: Path) -> None:
    x, y = np.arange(24, dtype=np.float32).reshape(8, 3), np.array([0, 1] * 4)
    name = save(tmp_path, x=x, y=y, client=np.repeat([3, 7], 4))
    pool = load_pool(name)
    assert not pool.x.flags.writeable  # a copy could be written
    assert np.array_equal(pool.x, x)
    assert pool.y.tolist() == y.tolist()
    assert pool.owner is not None
    assert pool.owner.tolist() == [0] * 4 + [1] * 4
    assert pool.owners == ("3", "7")
    (tmp_path / "y.npy").write_bytes(b"nothing")
    with pytest.raises(DataError, match=r"x\.npy: arrays of its folder cannot be read .*numpy\.save"):
        load_pool(name)


def test_a_run_on_mapped_samples_is_that_on_arrays(tmp_path: Path) -> None:
    """By path, and given in Python; of clients called by their numbers no names are kept, and `everyone` is left out if
    it is not asked for."""
    draw = np.random.default_rng(0)
    x, y = draw.standard_normal((400, 6), dtype=np.float32), draw.integers(0, 3, 400)
    name, same = save(tmp_path, x=x, y=y), {"clients": 50, "partition": "iid", "min_samples": 2, "participation": 0.1}
    how = {"method": "fedavg", "rounds": 3, "local_steps": 2, "model": "dnn", "everyone": False, **same}
    runs = [pfedlms.run(data, **how) for data in (name, (np.load(tmp_path / "x.npy", mmap_mode="r"), y), (x, y))]
    measured = [[{**line, "seconds": 0} for line in run.metrics] for run in runs]
    assert measured[0] == measured[1] == measured[2]
    assert runs[0].summary["everyone"] is None
    save(tmp_path, client=np.repeat(np.arange(50), 8))
    given = pfedlms.run(name, **{**how, "partition": "given"})
    assert "client_names" not in given.summary
    assert given.federation.data.train[9].min() >= 72
