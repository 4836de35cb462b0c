"""Files that can be read and are not what was published: `data check` names them, and loading warns of the same."""

from __future__ import annotations

import gzip
import hashlib
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet
from test_cifar import ARCHIVES, BINARY, FOLDERS, archive, binary, files, full, unpack
from test_parquet import encoded, table
from test_parquet import write as write_parquet
from test_sources import idx, write
from test_svhn import write as write_svhn

from pfedlms.cli import main
from pfedlms.data import load_dataset
from pfedlms.data.check import check
from pfedlms.data.published import BATCHES, DOWNLOADS, SHARDS, WHOSE, Published, is_published
from pfedlms.errors import DataError, DataWarning


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PFEDLMS_CACHE", str(tmp_path_factory.mktemp("cache")))


def warned(name: str, folder: Path) -> list[str]:
    """What loading warns of; nothing else is warned of."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        load_dataset(name, folder)
    assert all(each.category is DataWarning for each in told)
    return [str(each.message) for each in told]


# --- as long as the published files, and not the same ---

FULL = {
    "train-images-idx3-ubyte": np.arange(60_000 * 784, dtype=np.uint32).reshape(60_000, 28, 28).astype(np.uint8),
    "train-labels-idx1-ubyte": np.arange(60_000) % 10,
    "t10k-images-idx3-ubyte": np.arange(10_000 * 784, dtype=np.uint32).reshape(10_000, 28, 28).astype(np.uint8),
    "t10k-labels-idx1-ubyte": np.arange(10_000) % 10,
}
"""Of MNIST's sizes."""


@pytest.fixture
def mnist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """70,000 samples that count as the published ones, unpacked but for the last file, which somebody has packed."""
    for name, array in FULL.items():
        content = idx(array)
        monkeypatch.setitem(WHOSE, hashlib.sha256(array.astype(np.uint8).tobytes()).hexdigest()[:16], "mnist")
        packed = name.startswith("t10k-labels")
        (tmp_path / (name + ".gz" * packed)).write_bytes(gzip.compress(content, 1) if packed else content)
    return tmp_path


def test_files_packed_anew_are_the_published_ones(mnist: Path) -> None:
    row = check("mnist", mnist)
    assert (row["state"], row["published"], row["problems"]) == ("complete", True, [])
    assert warned("mnist", mnist) == []


@pytest.mark.parametrize("name", ["train-images-idx3-ubyte", "t10k-labels-idx1-ubyte.gz"])
def test_one_other_byte_is_named(mnist: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Packed or not: what counts is inside."""
    path = mnist / name
    content = bytearray(gzip.decompress(path.read_bytes()) if path.suffix else path.read_bytes())
    content[5000] ^= 1
    path.write_bytes(gzip.compress(content, 1) if path.suffix else content)
    row = check("mnist", mnist)
    assert (row["state"], row["samples"], row["published"]) == ("doubtful", 70_000, False)
    assert len(row["problems"]) == 1
    assert f"{path}: is as long as the published file of mnist, but not the same" in row["problems"][0]
    assert warned("mnist", mnist) == row["problems"]
    assert main(["data", "check", "mnist", "--data-dir", str(mnist)]) == 1
    assert capsys.readouterr().err == f"{row['problems'][0]}\n"
    assert main(["data", "check", "--data-dir", str(mnist)]) == 1


def test_another_byte_in_what_cannot_be_joined_is_named_too(mnist: Path) -> None:
    """A label that no class has, in a file of the published length."""
    path = mnist / "train-labels-idx1-ubyte"
    content = bytearray(path.read_bytes())
    content[8 + 17] = 200
    path.write_bytes(content)
    row = check("mnist", mnist)
    assert row["state"] == "damaged"
    assert [problem.split(";")[0] for problem in row["problems"]] == [
        f"{path}: is as long as the published file of mnist, but not the same",
        f"{path}: got label 200 in sample 17 (from 0), expected 0 to 9",
    ]


def test_a_file_as_long_as_the_download_must_be_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A byte of the header that nothing else covers: of a MATLAB file, a note; of an archive, when it was made."""
    unpack(write_svhn(tmp_path), {ARCHIVES["cifar100"]: archive(FOLDERS["cifar100"], files("cifar100"))})
    for name, file in (("svhn", "test_32x32.mat"), ("cifar100", ARCHIVES["cifar100"])):
        whole = (tmp_path / file).read_bytes()
        known = Published(file, len(whole), hashlib.sha256(whole).hexdigest(), ())
        monkeypatch.setitem(DOWNLOADS, name, (known,))
        assert check(name, tmp_path)["state"] == "partial"
        (tmp_path / file).write_bytes(whole[:4] + bytes([whole[4] ^ 1]) + whole[5:])
        row = check(name, tmp_path)
        assert row["state"] == "damaged"
        assert f"{tmp_path / file}: has {len(whole):,} bytes as the published file, but not its checksum" in str(row)
        with pytest.raises(DataError, match="but not its checksum"):
            load_dataset(name, tmp_path)
        (tmp_path / file).write_bytes(whole + b"\0" * 8 if name == "svhn" else gzip.compress(gzip.decompress(whole), 1))
        assert check(name, tmp_path)["state"] == "partial"  # another length, so it is another file on purpose


def test_a_full_batch_in_an_archive_must_be_the_published_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody has packed a damaged batch: the archive's own checksum is right."""
    content = full(10_000)
    path = tmp_path / ARCHIVES["cifar10"]
    path.write_bytes(archive(FOLDERS["cifar10"], {**files("cifar10"), "data_batch_2": content}))
    row = check("cifar10", tmp_path)
    assert row["state"] == "damaged"
    assert f"{path}/data_batch_2: has 10,000 images as the published file, but not its checksum" in row["problems"][0]
    monkeypatch.setitem(BATCHES, "data_batch_2", hashlib.md5(content).hexdigest())
    assert "none of class" in check("cifar10", tmp_path)["problems"][0]  # of 10,010 samples most are of one class


def test_parquet_of_ones_own_is_not_called_damaged(tmp_path: Path) -> None:
    """Under the names of known files, but of another length."""
    assert {path.name for path in write_parquet(tmp_path).iterdir()} == set(SHARDS["cifar10"])
    row = check("cifar10", tmp_path)
    assert (row["state"], row["published"]) == ("partial", None)
    assert {is_published("cifar10", path) for path in tmp_path.iterdir()} == {None}


# --- fewer samples, and more ---


def fewer_idx(folder: Path) -> list[str]:
    """All of the test files, with their headers, but three training samples."""
    write(folder)
    for name in ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"):
        (folder / name).write_bytes(idx(FULL[name]))
    return [f"{folder / f'train-{kind}-ubyte'}: 3 of 60,000" for kind in ("images-idx3", "labels-idx1")]


def fewer_pickled(folder: Path) -> list[str]:
    made = unpack(folder / FOLDERS["cifar100"], files("cifar100"))
    return [f"{made / 'train'}: 2 of 50,000", f"{made / 'test'}: 2 of 10,000"]


def fewer_binary(folder: Path) -> list[str]:
    made = unpack(folder / BINARY["cifar10"], binary("cifar10"))
    return [f"{made / name}.bin: 2 of 10,000" for name in files("cifar10")]


def fewer_archived(folder: Path) -> list[str]:
    unpack(folder, {ARCHIVES["cifar10"]: archive(FOLDERS["cifar10"], files("cifar10"))})
    return [f"{folder / ARCHIVES['cifar10']}: 12"]


def fewer_matlab(folder: Path) -> list[str]:
    write_svhn(folder)
    return [f"{folder / 'train_32x32.mat'}: 12 of 73,257", f"{folder / 'test_32x32.mat'}: 6 of 26,032"]


def fewer_rows(folder: Path) -> list[str]:
    write_parquet(folder)
    counts = {"train-00000-of-00002": 3, "train-00001-of-00002": 2, "test-00000-of-00001": 2}
    return [f"{folder / name}.parquet: {count}" for name, count in counts.items()]


FEWER: dict[str, tuple[str, Callable[[Path], list[str]], str]] = {
    "IDX": ("mnist", fewer_idx, "10,003 samples, published were 70,000"),
    "pickled": ("cifar100", fewer_pickled, "4 samples, published were 60,000"),
    "binary": ("cifar10", fewer_binary, "12 samples, published were 60,000"),
    "archive": ("cifar10", fewer_archived, "12 samples, published were 60,000"),
    "MATLAB": ("svhn", fewer_matlab, "18 samples, published were 99,289"),
    "Parquet": ("cifar10", fewer_rows, "7 samples, published were 60,000"),
}


@pytest.mark.parametrize(("name", "make", "counts"), FEWER.values(), ids=FEWER)
def test_fewer_samples_are_warned_of_file_by_file(
    tmp_path: Path, name: str, make: Callable[[Path], list[str]], counts: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And used: whoever has made them on purpose goes on. Those with as many as published are not named."""
    for array in FULL.values():
        monkeypatch.setitem(WHOSE, hashlib.sha256(array.astype(np.uint8).tobytes()).hexdigest()[:16], "mnist")
    expected = f"{name}: got {counts} ({', '.join(make(tmp_path))}); a run takes what is there"
    (told,) = warned(name, tmp_path)
    assert told.startswith(expected)
    row = check(name, tmp_path)
    assert (row["state"], row["problems"]) == ("partial", [told])


def test_a_run_says_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = ["--dataset", "svhn", "--data-dir", str(write_svhn(tmp_path)), "--dry-run", "--clients", "2"]
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        assert main(["run", *line, "--set", "data.min_samples=2"]) == 0
    assert "warning: svhn: got 18 samples, published were 99,289 (" in capsys.readouterr().err


def test_more_samples_are_warned_of(tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "t10k-images-idx3-ubyte").write_bytes(idx(np.zeros((70_000, 28, 28), np.uint8)))
    (tmp_path / "t10k-labels-idx1-ubyte").write_bytes(idx(np.arange(70_000) % 10))
    row = check("mnist", tmp_path)
    assert (row["state"], row["samples"]) == ("larger", 70_003)
    assert warned("mnist", tmp_path) == row["problems"]
    assert "got 70,003 samples, published were 70,000" in row["problems"][0]
    assert f"{tmp_path / 't10k-labels-idx1-ubyte'}: 70,000 of 10,000" in row["problems"][0]


# --- the same file twice, no samples, no right to read, two formats ---


@pytest.mark.parametrize("kind", ["binary", "Parquet"])
def test_a_file_under_a_second_name_is_named(tmp_path: Path, kind: str) -> None:
    """The number of samples would not tell."""
    made = unpack(tmp_path, binary("cifar10")) if kind == "binary" else write_parquet(tmp_path)
    names = {
        "binary": ("data_batch_1.bin", "data_batch_4.bin"),
        "Parquet": ("train-00000-of-00002.parquet", "train-00001-of-00002.parquet"),
    }
    first, second = (made / each for each in names[kind])
    second.write_bytes(first.read_bytes())
    row = check("cifar10", tmp_path)
    assert row["state"] == "doubtful"
    assert row["problems"][0].startswith(f"{second}: is the same, byte for byte, as {first};")
    assert warned("cifar10", tmp_path) == row["problems"]


@pytest.mark.parametrize("part", ["train", "t10k"])
def test_idx_files_without_samples_are_named(tmp_path: Path, part: str) -> None:
    write(tmp_path)
    (tmp_path / f"{part}-images-idx3-ubyte").write_bytes(idx(np.zeros((0, 28, 28))))
    (tmp_path / f"{part}-labels-idx1-ubyte").write_bytes(idx(np.zeros(0)))
    with pytest.raises(DataError, match=f"{part}-images-idx3-ubyte: got no samples, expected at least one"):
        load_dataset("mnist", tmp_path)
    assert len(check("mnist", tmp_path)["problems"]) == 2


@pytest.fixture
def locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that may not be looked into, whoever runs the tests."""
    folder = tmp_path / "locked"
    folder.mkdir()

    def refusing(call: Callable[..., Any]) -> Callable[..., Any]:
        def asked(path: Any = ".", *more: Any, **named: Any) -> Any:
            if isinstance(path, (str, Path)) and folder in (Path(path), *Path(path).parents) and Path(path) != folder:
                raise PermissionError(13, "Permission denied", str(path))
            return call(path, *more, **named)

        return asked

    monkeypatch.setattr(os, "stat", refusing(os.stat))
    return folder


@pytest.mark.parametrize("name", ["mnist", "svhn", "cifar10", "cifar100"])
def test_a_folder_that_may_not_be_read_is_not_missing(
    locked: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(DataError, match=rf"{locked}.*: cannot be looked at \(Permission denied\)"):
        load_dataset(name, locked)
    assert check(name, locked)["state"] == "damaged"
    assert main(["data", "check", "--data-dir", str(locked)]) == 1
    assert "cannot be looked at (Permission denied)" in capsys.readouterr().err


@pytest.mark.parametrize(("change", "what"), [(0, "the same samples"), (1, "other samples; keep one of the two")])
def test_what_lies_beside_is_compared(
    tmp_path: Path, change: int, what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """In another order, and in another split."""
    unpack(tmp_path / BINARY["cifar10"], binary("cifar10"))
    rows = b"".join(binary("cifar10").values())
    records = [rows[place : place + 3073] for place in range(0, len(rows), 3073)][::-1]
    pictures = [np.frombuffer(each[1:], np.uint8).reshape(3, 32, 32).transpose(1, 2, 0) for each in records]
    labels = [(each[0] + change * (place == 4)) % 10 for place, each in enumerate(records)]
    for part, those in (("train", slice(0, 3)), ("test", slice(3, 12))):
        made: pa.Table = table([encoded(each) for each in pictures[those]], labels[those])
        parquet.write_table(made, tmp_path / f"{part}-00000-of-00001.parquet")
    line = f"not read are Parquet files in {tmp_path}: {what}"
    assert check("cifar10", tmp_path)["also"] == [line]
    main(["data", "check", "cifar10", "--data-dir", str(tmp_path)])
    assert f"cifar10: {line}" in capsys.readouterr().out.splitlines()


def test_what_lies_beside_and_is_damaged_is_named(tmp_path: Path) -> None:
    unpack(tmp_path / FOLDERS["cifar100"], files("cifar100"))
    unpack(tmp_path, {ARCHIVES["cifar100"]: b"half"})
    row = check("cifar100", tmp_path)
    assert row["state"] == "partial"
    (note,) = row["also"]
    assert f"{tmp_path / ARCHIVES['cifar100']}: not a whole archive" in note
