"""Arrays of numbers in MATLAB's files of version 5 (`save -v6`, `-v7`), the form in which SVHN is published.

    file     128 bytes of header, the last four: version 0x0100 and "IM" or "MI", the byte order · elements
    element  type and length, 4 bytes each · contents, padded to a multiple of 8; or, of at most 4 bytes, type and
             length in 2 bytes each · contents, padded to 4
    array    an element of elements: class and flags · dimensions · name · numbers, the first axis fastest

An element of type 15 is another one, compressed. Structures, text and the like are stepped over.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator, Sequence
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pfedlms.errors import DataError

_COMPRESSED, _MATRIX = 15, 14
_NUMBERS = {1: "i1", 2: "u1", 3: "i2", 4: "u2", 5: "i4", 6: "u4", 7: "f4", 9: "f8", 12: "i8", 13: "u8"}
"""Types of stored numbers."""
_CLASSES = {6: "f8", 7: "f4", 8: "i1", 9: "u1", 10: "i2", 11: "u2", 12: "i4", 13: "u4", 14: "i8", 15: "u8"}
"""Of arrays of numbers; they may be stored in a shorter type."""
_COMPLEX = 0x0800


def read_arrays(content: bytes, path: Path, names: Sequence[str]) -> dict[str, NDArray[Any]]:
    """The arrays of these names; DataError, which calls the file `path`, where one is missing or it is not whole."""
    if content[:10] == b"MATLAB 7.3":
        raise DataError(f"{path}: is of MATLAB's version 7.3, expected version 5; save it with -v7")
    order = {b"\x00\x01IM": "<", b"\x01\x00MI": ">"}.get(content[124:128])
    if order is None:
        raise DataError(f"{path}: not a MATLAB file of version 5; fetch the file again")
    try:
        found = dict(_arrays(memoryview(content)[128:], order, names))
    except (ValueError, struct.error, zlib.error, UnicodeDecodeError) as error:
        raise DataError(f"{path}: not a whole MATLAB file ({error}); fetch the file again") from error
    if missing := [name for name in names if name not in found]:
        raise DataError(f"{path}: got no array {missing[0]!r}, expected {' and '.join(names)}; fetch the file again")
    return found


def _arrays(content: memoryview, order: str, names: Sequence[str]) -> Iterator[tuple[str, NDArray[Any]]]:
    for kind, body in _elements(content, order):
        if kind == _COMPRESSED:
            kind, body = next(_elements(memoryview(zlib.decompress(body)), order), (0, body))
        if kind == _MATRIX:
            parts = _elements(body, order)
            flags, dimensions, name = (next(parts, (0, body[:0]))[1] for _ in range(3))
            (word,) = struct.unpack(f"{order}I", flags[:4])
            if word & 0xFF in _CLASSES and not word & _COMPLEX and (called := bytes(name).decode("ascii")) in names:
                shape = tuple(np.frombuffer(dimensions, dtype=f"{order}i4").tolist())
                yield called, _numbers(next(parts, (0, body[:0])), shape, order, _CLASSES[word & 0xFF])


def _numbers(stored: tuple[int, memoryview], shape: tuple[int, ...], order: str, kind: str) -> NDArray[Any]:
    type, body = stored
    if type not in _NUMBERS:
        raise ValueError(f"numbers of type {type}")
    flat = np.frombuffer(body, dtype=f"{order}{_NUMBERS[type]}")
    if min(shape, default=-1) < 0 or prod(shape) != len(flat):
        raise ValueError(f"{len(flat)} numbers for shape {shape}")
    return flat.astype(kind, copy=False).reshape(shape, order="F")


def _elements(content: memoryview, order: str) -> Iterator[tuple[int, memoryview]]:
    """Type and contents, one after another."""
    place = 0
    while place < len(content):
        kind, length = struct.unpack_from(f"{order}2I", content, place)
        start, padding = place + 8, 8
        if short := kind >> 16:  # both in the first four bytes
            kind, length, start, padding = kind & 0xFFFF, short, place + 4, 4
        if length > (4 if short else len(content) - start):
            raise ValueError(f"{len(content) - start} bytes of an element of {length}")
        yield kind, content[start : start + length]
        place = start + (length if kind == _COMPRESSED else -(-length // padding) * padding)
