"""CIFAR-10 and CIFAR-100 from pickled batches, plain and in archives; hostile pickles are refused."""

from __future__ import annotations

import gzip
import io
import os
import pickle
import struct
import tarfile
from collections.abc import Callable
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pfedlms.data import formats, load_dataset
from pfedlms.errors import DataError

pytestmark = pytest.mark.filterwarnings("ignore::pfedlms.errors.DataWarning")  # files of a few samples

MEAN, STD = np.array([0.4914, 0.4822, 0.4465]), np.array([0.2023, 0.1994, 0.2010])
TEN = ["data_batch_1", "data_batch_2", "data_batch_3", "data_batch_4", "data_batch_5", "test_batch"]
NAMES = {"cifar10": TEN, "cifar100": ["train", "test"]}
FOLDERS = {"cifar10": "cifar-10-batches-py", "cifar100": "cifar-100-python"}
ARCHIVES = {"cifar10": "cifar-10-python.tar.gz", "cifar100": "cifar-100-python.tar.gz"}


def pixels(number: int, count: int = 2) -> np.ndarray:
    """`[count, 3, 32, 32]`, of batch `number`."""
    return np.random.default_rng(number).integers(0, 256, (count, 3, 32, 32), dtype=np.uint8)


def labels(name: str, number: int, count: int = 2) -> list[int]:
    classes = {"cifar10": 10, "cifar100": 100}[name]
    return [(7 * number + each + classes - 1) % classes for each in range(count)]


def batch(name: str, number: int, count: int = 2) -> dict[str, Any]:
    """A batch with the other keys of the published batches, too."""
    key = "labels" if name == "cifar10" else "fine_labels"
    more = {} if name == "cifar10" else {"coarse_labels": [3] * count}
    data = pixels(number, count).reshape(count, 3072)
    return {"batch_label": "some", key: labels(name, number, count), **more, "data": data, "filenames": ["a.png"]}


def pickle_of_python_2(content: dict[str, Any]) -> bytes:
    """A pickle of protocol 2 as Python 2 and its NumPy wrote it, opcode by opcode: text and bytes are both strings, and
    NumPy's modules have their old names."""

    def text(value: str | bytes) -> bytes:
        raw = value if isinstance(value, bytes) else value.encode("latin1")
        return b"U" + bytes([len(raw)]) + raw if len(raw) < 256 else b"T" + struct.pack("<i", len(raw)) + raw

    def whole(value: int) -> bytes:
        return b"J" + struct.pack("<i", value)

    def array(value: np.ndarray) -> bytes:
        made = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85" + text("b") + b"\x87R"
        kind = b"cnumpy\ndtype\n" + text("u1") + b"K\x00K\x01\x87R"
        kind += b"(K\x03" + text("|") + b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
        shape = b"".join(map(whole, value.shape)) + b"\x86"
        return made + b"(K\x01" + shape + kind + b"\x89" + text(value.tobytes()) + b"tb"

    def value_of(value: Any) -> bytes:
        if isinstance(value, list):
            return b"](" + b"".join(map(value_of, value)) + b"e"
        return array(value) if isinstance(value, np.ndarray) else (text if isinstance(value, str) else whole)(value)

    return b"\x80\x02}(" + b"".join(text(key) + value_of(value) for key, value in content.items()) + b"u."


WRITERS: dict[str, Callable[[dict[str, Any]], bytes]] = {
    "Python 2": pickle_of_python_2,
    **{f"protocol {number}": partial(pickle.dumps, protocol=number) for number in (0, 1, 2, 3, 4)},
    "keys of bytes": lambda batch: pickle.dumps({key.encode(): value for key, value in batch.items()}, protocol=2),
}


def files(name: str, write: Callable[[dict[str, Any]], bytes] = pickle_of_python_2) -> dict[str, bytes]:
    return {each: write(batch(name, number)) for number, each in enumerate(NAMES[name])}


def write_files(folder: Path, contents: dict[str, bytes]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for each, content in contents.items():
        (folder / each).write_bytes(content)
    return folder


def archive(inside: str, contents: dict[str, bytes]) -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w:gz") as tar:
        for each, content in {"readme.html": b"<p>", **contents}.items():
            member = tarfile.TarInfo(f"{inside}/{each}")
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return made.getvalue()


def assert_all(name: str, loaded: tuple[np.ndarray, np.ndarray]) -> None:
    x, y = loaded
    count = len(NAMES[name])
    assert y.tolist() == [label for number in range(count) for label in labels(name, number)]
    assert (x.shape, x.dtype, y.dtype) == ((2 * count, 3, 32, 32), np.float32, np.int64)
    raw = np.concatenate([pixels(number) for number in range(count)])
    expected = (raw / 255 - MEAN.reshape(3, 1, 1)) / STD.reshape(3, 1, 1)
    np.testing.assert_allclose(x, expected, rtol=1e-5, atol=1e-6)


def error_of(name: str, folder: Path) -> str:
    with pytest.raises(DataError) as caught:
        load_dataset(name, folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


PLACES = (".", "{name}", "{folder}", "{name}/{folder}", "{upper}/{folder}")


@pytest.mark.parametrize(("write", "place"), list(zip(WRITERS.values(), cycle(PLACES), strict=False)), ids=WRITERS)
@pytest.mark.parametrize("name", NAMES)
def test_pickled_batches_of_any_protocol_are_read(
    tmp_path: Path, name: str, write: Callable[[dict[str, Any]], bytes], place: str
) -> None:
    folder = tmp_path / place.format(name=name, folder=FOLDERS[name], upper=name.upper())
    write_files(folder, files(name, write))
    assert_all(name, load_dataset(name, tmp_path))


@pytest.mark.parametrize("name", NAMES)
def test_archives_are_read_without_unpacking(tmp_path: Path, name: str) -> None:
    batches = files(name)
    write_files(tmp_path / name, {ARCHIVES[name]: archive(FOLDERS[name], batches)})
    write_files(tmp_path / FOLDERS[name], {NAMES[name][0]: batches[NAMES[name][0]]})
    before = sorted(tmp_path.rglob("*"))
    assert_all(name, load_dataset(name, tmp_path))
    assert sorted(tmp_path.rglob("*")) == before


class PickledCall:
    """Pickles as a call."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> Any:
        return self.call


def hostile(path: Path) -> dict[str, bytes]:
    """Pickles that would create `path` if they were run, or change classes of the reader."""
    whole = batch("cifar10", 0)
    setting = b"\x80\x02c%s\n%s\nN}U\x0b__defaults__K\x01s\x86b."
    return {
        "system": pickle.dumps(PickledCall(os.system, f"touch {path}")),
        "system in a batch": pickle.dumps({**whole, "filenames": PickledCall(os.system, f"touch {path}")}),
        "eval, protocol 0": pickle.dumps(PickledCall(eval, f"open({str(path)!r}, 'w')"), protocol=0),
        "by way of numpy": b"\x80\x04\x8c\x05numpy\x8c\x11f2py.os.system.xx\x93" + b"." ,
        "another codec": pickle.dumps({**whole, "x": 1}, protocol=2).replace(b"latin1", b"rot_13"),
        "an extension": b"\x80\x02\x82\x01.",
        "outside object": b"\x80\x02U\x01xQ.",
        "defaults of a function": setting % (b"numpy.core.multiarray", b"_reconstruct"),
        "attributes of a class": setting % (b"numpy", b"dtype"),
        "instance": b"(S'touch'\nios\nsystem\n.",
    }  # fmt: skip


@pytest.mark.parametrize("kind", hostile(Path("x")))
def test_hostile_pickles_are_refused_and_not_run(tmp_path: Path, kind: str) -> None:
    write_files(tmp_path, {**files("cifar10"), "data_batch_3": hostile(tmp_path / "mark")[kind]})
    before = {name: dict(vars(each)) for name, each in vars(formats).items() if isinstance(each, type)}
    message = error_of("cifar10", tmp_path)
    assert message.startswith(f"{tmp_path / 'data_batch_3'}: ")
    assert "fetch the file again" in message
    assert not (tmp_path / "mark").exists()
    assert {name: dict(vars(each)) for name, each in vars(formats).items() if isinstance(each, type)} == before
    assert_all("cifar10", load_dataset("cifar10", write_files(tmp_path, files("cifar10"))))


def test_a_refused_call_is_named(tmp_path: Path) -> None:
    longer = b"cnumpy\ndtypes.os.system\n."  # than numpy.dtype, which is allowed
    for content, name in ((pickle.dumps(PickledCall(exec, "1")), "builtins.exec"), (longer, "numpy.dtypes.os.system")):
        write_files(tmp_path, {**files("cifar10"), "data_batch_1": content})
        assert f"asks for {name}, which no batch needs and is not run" in error_of("cifar10", tmp_path)


def test_missing_and_cut_batches_are_named(tmp_path: Path) -> None:
    whole = files("cifar10")
    folder = write_files(tmp_path / FOLDERS["cifar10"], {e: c for e, c in whole.items() if e != "data_batch_5"})
    assert f"{folder}: data_batch_5 is missing beside " in error_of("cifar10", tmp_path)
    content = whole["test_batch"]
    for end in (0, 1, 10, 100, len(content) // 2, len(content) - 1):
        write_files(tmp_path, {**whole, "test_batch": content[:end]})
        expected = f"{tmp_path / 'test_batch'}: no whole pickled batch of cifar10 ("
        assert error_of("cifar10", tmp_path).startswith(expected)


def test_changed_bytes_raise_a_data_error_or_change_pixels() -> None:
    content, outcomes = files("cifar100")["test"], set()
    for place in range(content.index(pixels(1).tobytes())):
        changed = content[:place] + bytes([content[place] ^ 0x15]) + content[place + 1 :]
        try:
            outcomes.add(formats.parse_batch(changed, "test", "cifar100")[1].shape)
        except DataError:
            outcomes.add("refused")
    assert outcomes == {"refused", (2, 3, 32, 32)}


BLACK = np.zeros((1, 3072), np.uint8)
WRONG: dict[str, tuple[Any, str]] = {
    "of cifar100": (batch("cifar100", 0), "(KeyError: b'labels'), expected data"),
    "floats": ({"data": BLACK.astype(np.float32), "labels": [1]}, "data are no bytes [n, 3072]"),
    "labels as an array": ({"data": BLACK, "labels": np.array([1], np.uint8)}, "labels are no list of whole numbers"),
    "a label below": ({"data": BLACK, "labels": [-(2**70)]}, "labels are no list of whole numbers"),
}


@pytest.mark.parametrize(("content", "message"), WRONG.values(), ids=WRONG)
def test_wrong_contents_are_named(tmp_path: Path, content: Any, message: str) -> None:
    write_files(tmp_path, {**files("cifar10"), "data_batch_2": pickle.dumps(content)})
    found = error_of("cifar10", tmp_path)
    assert found.startswith(f"{tmp_path / 'data_batch_2'}: ")
    assert message in found


def test_broken_archives_are_named(tmp_path: Path) -> None:
    batches = files("cifar100")
    whole = archive(FOLDERS["cifar100"], batches)
    broken = {
        b"": "", whole[:-8] + bytes([whole[-8] ^ 1]) + whole[-7:]: "cannot be read",
        gzip.compress(b"text" * 500): "not a whole archive", gzip.compress(gzip.decompress(whole)[:8000]): "",
        archive("x", {"train": batches["train"]}): "not a whole archive (KeyError: 'test')",
        archive("x", {**batches, "test": b"nothing"}): "/test: no whole pickled batch",
    }  # fmt: skip
    path = tmp_path / ARCHIVES["cifar100"]
    for content, message in broken.items():
        path.write_bytes(content)
        found = error_of("cifar100", tmp_path)
        assert found.startswith(str(path))
        assert message in found
