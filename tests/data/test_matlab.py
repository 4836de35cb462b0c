"""MATLAB's version 5 against files that SciPy wrote, and against bytes put together here."""

from __future__ import annotations

import base64
import io
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pfedlms.data.matlab import read_arrays
from pfedlms.errors import DataError

PATH = Path("file.mat")
WRITTEN = {
    "plain": (
        "TUFUTEFCIDUuMCBNQVQtZmlsZSBQbGF0Zm9ybTogcG9zaXgsIENyZWF0ZWQgb246IE1vbiBOb3YgMTYgMDE6NDg6MTEgMjAyNgAA"
        "AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAABSU0OAAAAOAAAAAYAAAAIAAAABAAAAAAA"
        "AAAFAAAACAAAAAEAAAAGAAAAAQAEAG5vdGUQAAAABgAAAGEgdGV4dAAADgAAAFAAAAAGAAAACAAAAAkAAAAAAAAABQAAABAAAAAC"
        "AAAAAwAAAAIAAAACAAAAAQABAFgAAAACAAAAGAAAAAAMBBAIFAIOBhIKFgENBREJFQMPBxMLFw4AAAB4AAAABgAAAAgAAAACAAAA"
        "AAAAAAUAAAAIAAAAAQAAAAEAAAABAAEAcwAAAAUABAACAAAAAQACAGEAAAAOAAAAOAAAAAYAAAAIAAAADgAAAAAAAAAFAAAACAAA"
        "AAEAAAABAAAAAQAAAAAAAAAMAAAACAAAAAEAAAAAAAAADgAAADAAAAAGAAAACAAAAAkAAAAAAAAABQAAAAgAAAACAAAAAQAAAAEA"
        "AQB5AAAAAgACAAEKAAAOAAAAQAAAAAYAAAAIAAAABgAAAAAAAAAFAAAACAAAAAEAAAACAAAAAQABAGQAAAAJAAAAEAAAAAAAAAAA"
        "AOA/AAAAAAAAAMA="
    ),
    "compressed": (
        "TUFUTEFCIDUuMCBNQVQtZmlsZSBQbGF0Zm9ybTogcG9zaXgsIENyZWF0ZWQgb246IE1vbiBOb3YgMTYgMDE6NDg6MTEgMjAyNgAA"
        "AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAABSU0PAAAALgAAAHic42NgYLAAYjYg5gBi"
        "FgYIYIXyGaFyjECZvPySVAEoP1GhJLWihIEBAER/BIQPAAAAQgAAAHic42NgYAgAYjYg5gBiTgYIYAViASBmAmJmKA3CjEAYAWVL"
        "gBTysAhwiDDxsQlxiTHysgpyijLzswtziwMASKQCHA8AAAA4AAAAeJzjY2BgqABiNiDmAGImBghghfIZ4ZiRoRgszgJWwwgkE4E0"
        "HxBbIOnnw6kfAniQxEEAAKzKAhEPAAAAKQAAAHic42NgYDAAYjYg5gBiTgYIYIXymYCYEYwZGSrBfCYGRi4GBgAYvADwDwAAACwA"
        "AAB4nONjYGBwAGI2IOaA0iDACuUzAjETmGZkSAHSnEAswAADD+yhjAMANaUC0Q=="
    ),
}
"""What `scipy.io.savemat(file, CONTENT, do_compression=…)` of SciPy 1.17.1 wrote, in base 64; CONTENT is
{"note": "a text", "X": arange(24).reshape(2, 3, 2, 2), "s": {"a": 1}, "y": array([[1], [10]]), "d": array([[.5, -2.]])}
with X and y of uint8."""


def element(kind: int, content: bytes, order: str = "<") -> bytes:
    if len(content) <= 4 and kind != 14:
        return struct.pack(f"{order}I", len(content) << 16 | kind) + content.ljust(4, b"\0")
    return struct.pack(f"{order}2I", kind, len(content)) + content + bytes(-len(content) % 8)


NUMBERS = {"i1": 1, "u1": 2, "i2": 3, "u2": 4, "i4": 5, "u4": 6, "f4": 7, "f8": 9, "i8": 12, "u8": 13}
CLASSES = {"f8": 6, "f4": 7, "i1": 8, "u1": 9, "i2": 10, "u2": 11, "i4": 12, "u4": 13, "i8": 14, "u8": 15}


def matrix(name: str, array: np.ndarray, stored: str = "", order: str = "<", flags: int = 0) -> bytes:
    """An array as MATLAB lays it out; `stored` is the type of the numbers on disk, if it is not the array's own."""
    own = array.dtype.str[1:]
    numbers = array.astype(f"{order}{stored or own}").tobytes(order="F")
    parts = [
        element(6, struct.pack(f"{order}2I", CLASSES[own] | flags, 0), order),
        element(5, struct.pack(f"{order}{array.ndim}i", *array.shape), order),
        element(1, name.encode(), order),
        element(NUMBERS[stored or own], numbers, order),
    ]
    return element(14, b"".join(parts), order)


def packed(content: bytes, order: str = "<") -> bytes:
    """A compressed element, which is not padded."""
    content = zlib.compress(content)
    return struct.pack(f"{order}2I", 15, len(content)) + content


def file(*elements: bytes, order: str = "<") -> bytes:
    return b"MATLAB 5.0 MAT-file, made here".ljust(124) + {"<": b"\0\1IM", ">": b"\1\0MI"}[order] + b"".join(elements)


# --- what SciPy writes ---


@pytest.mark.parametrize("how", WRITTEN)
def test_arrays_that_scipy_wrote(how: str) -> None:
    """Text and structures between them are stepped over."""
    read = read_arrays(base64.b64decode(WRITTEN[how]), PATH, ("X", "y", "d"))
    assert np.array_equal(read["X"], np.arange(24).reshape(2, 3, 2, 2))
    assert read["X"].dtype == read["y"].dtype == np.uint8
    assert read["y"].tolist() == [[1], [10]]
    assert read["d"].dtype == np.float64
    assert read["d"].tolist() == [[0.5, -2.0]]


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("kind", CLASSES)
def test_whatever_scipy_writes(kind: str, compressed: bool) -> None:
    scipy = pytest.importorskip("scipy.io")
    array = np.random.default_rng(0).integers(0, 100, (3, 4, 5)).astype(kind)
    made = io.BytesIO()
    scipy.savemat(made, {"other": array[0], "array": array}, do_compression=compressed)
    read = read_arrays(made.getvalue(), PATH, ("array",))["array"]
    assert np.array_equal(read, array)
    assert read.dtype == array.dtype


# --- what the format says ---


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("kind", CLASSES)
def test_both_byte_orders_and_all_kinds_of_numbers(order: str, kind: str) -> None:
    array = np.arange(24).reshape(2, 3, 4).astype(kind)
    for content in (matrix("a", array, order=order), packed(matrix("a", array, order=order), order)):
        read = read_arrays(file(content, order=order), PATH, ("a",))["a"]
        assert read.dtype == array.dtype
        assert np.array_equal(read, array)


def test_numbers_may_be_stored_in_a_shorter_type() -> None:
    """As MATLAB does with whole doubles; four bytes and fewer lie in the tag itself."""
    array = np.array([[1.0, 2, 200]])
    read = read_arrays(file(matrix("y", array, "u1")), PATH, ("y",))["y"]
    assert read.dtype == np.float64
    assert read.tolist() == [[1.0, 2.0, 200.0]]


def test_elements_after_a_compressed_one_are_found_wherever_it_ends() -> None:
    arrays = {f"a{number}": np.arange(number, dtype=np.uint8).reshape(1, -1) for number in range(1, 30)}
    elements = [packed(matrix(name, array)) for name, array in arrays.items()]
    assert len({len(each) % 8 for each in elements}) > 3
    read = read_arrays(file(*elements), PATH, tuple(arrays))
    assert all(np.array_equal(read[name], array) for name, array in arrays.items())


# --- what is refused ---


def refused(content: bytes, *names: str) -> str:
    with pytest.raises(DataError, match=r"^file\.mat: ") as caught:
        read_arrays(content, PATH, names or ("X",))
    return str(caught.value)


X = np.arange(60, dtype=np.uint8).reshape(3, 4, 5)


def test_files_of_other_kinds() -> None:
    assert "version 7.3, expected version 5; save it with -v7" in refused(b"MATLAB 7.3 MAT-file".ljust(512))
    for other in (b"", b"<html>404</html>" * 20, bytes(500), file()[:127]):
        assert "not a MATLAB file of version 5; fetch the file again" in refused(other)


def test_a_missing_array_is_named() -> None:
    assert "got no array 'y', expected X and y" in refused(file(matrix("X", X)), "X", "y")
    assert "got no array 'X'" in refused(file(matrix("X", X, flags=0x0800)))  # complex
    assert "got no array 'X'" in refused(file())


@pytest.mark.parametrize("compressed", [False, True])
def test_every_cut_is_refused(compressed: bool) -> None:
    content = matrix("X", X)
    content = file(packed(content) if compressed else content)
    for end in range(len(content)):
        refused(content[:end])


def test_changed_bytes_of_a_compressed_file_are_refused() -> None:
    content = file(packed(matrix("X", X)))
    for place in range(128, len(content)):
        refused(content[:place] + bytes([content[place] ^ 0x55]) + content[place + 1 :])


def test_changed_bytes_of_a_plain_file_are_refused_or_numbers() -> None:
    """It has no checksum; but nothing else than DataError comes of it."""
    content = file(matrix("X", X))
    for place in range(128, len(content)):
        changed = content[:place] + bytes([content[place] ^ 0x55]) + content[place + 1 :]
        try:
            read: Any = read_arrays(changed, PATH, ("X",))["X"]
        except DataError:
            continue
        assert read.size <= 60


@pytest.mark.parametrize("shape", [(3, 4, 6), (0, 4, 5), (-3, -4, 5), (2**30, 2**30, 2**30)])
def test_a_shape_that_does_not_fit_the_numbers(shape: tuple[int, ...]) -> None:
    content = matrix("X", X).replace(struct.pack("<3i", 3, 4, 5), struct.pack("<3i", *shape))
    assert "60 numbers for shape" in refused(file(content))
