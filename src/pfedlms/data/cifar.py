"""CIFAR-10 and CIFAR-100 in pickled batches, unpacked or in their archive. A batch is a dict with `data`, bytes
[n, 3072], and `labels` or `fine_labels`, a list of n.

A pickle can ask for any function to be called. Here nothing is called: the calls that make an array of bytes are
recorded and read, all others are refused.
"""

from __future__ import annotations

import gzip
import pickle
import re
import tarfile
import zlib
from collections.abc import Iterator, Sequence
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pfedlms.data.formats import Format, Part, contents, wanted
from pfedlms.errors import DataError, reason

BATCHES = {
    "cifar10": (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"),
    "cifar100": ("train", "test"),
}
_FOLDERS = {"cifar10": "cifar-10-batches-py", "cifar100": "cifar-100-python"}
_ARCHIVES = {"cifar10": "cifar-10-python.tar.gz", "cifar100": "cifar-100-python.tar.gz"}
_LABELS = {"cifar10": "labels", "cifar100": "fine_labels"}


def cifar_formats(name: str) -> tuple[Format, Format]:
    """Unpacked before packed, which takes longer to read."""
    bases, inside = (f"{name}/", f"{name.upper()}/", ""), _FOLDERS[name]
    folders = (*(base + inside for base in bases), *bases)
    return (
        Format(f"{inside}/", folders, wanted(*BATCHES[name]), partial(_read_batches, name)),
        Format(_ARCHIVES[name], bases, wanted(_ARCHIVES[name]), partial(_read_archive, name)),
    )


def _read_batches(name: str, files: Sequence[Path]) -> Iterator[Part]:
    return (parse(contents(path), str(path), name) for path in files)


def _read_archive(name: str, files: Sequence[Path]) -> Iterator[Part]:
    """Batches by the last part of their members' names; nothing is written anywhere."""
    path = files[0]
    try:
        # Decompressed as a whole, which checks the length and the checksum.
        with tarfile.open(fileobj=BytesIO(gzip.decompress(contents(path))), mode="r:") as archive:
            members = {Path(member.name).name: archive.extractfile(member) for member in archive if member.isfile()}
            batches = {each: file.read() for each, file in members.items() if file and each in BATCHES[name]}
    except (OSError, EOFError, zlib.error, tarfile.TarError) as error:
        raise DataError(f"{path}: not a whole archive ({error}); fetch the file again") from error
    for each in BATCHES[name]:
        if each not in batches:
            raise DataError(f"{path}: got {', '.join(members) or 'nothing'}, expected {each} in it; fetch it again")
        yield parse(batches[each], f"{path}/{each}", name)


def parse(content: bytes, called: str, name: str) -> Part:
    """One batch."""
    try:
        read = _Recorder(BytesIO(content), encoding="bytes").load()
        batch = {_bytes(key): value for key, value in read.items()}
    except Exception as error:  # almost anything on damaged bytes
        raise DataError(
            f"{called}: no whole pickled batch of {name} ({reason(error)}); fetch the file again"
        ) from error
    labels, images = batch.get(_LABELS[name].encode()), _pixels(batch.get(b"data"))
    if images is None or not isinstance(labels, list) or not all(type(label) is int for label in labels):
        raise DataError(
            f"{called}: got a batch of {', '.join(map(str, batch)) or 'nothing'}, expected data (bytes [n, 3072]) and "
            f"{_LABELS[name]} (a list of whole numbers); fetch the file again, or it is of another data set"
        )
    return called, images, np.array([min(max(label, -1), 1000) for label in labels], dtype=np.int64)


class _Call:
    """A call that a pickle asks for: what is called, its arguments, and the state that the result would be given."""

    def __init__(self, name: str, *arguments: Any) -> None:
        self.name, self.arguments, self.state = name, arguments, None

    def __setstate__(self, state: Any) -> None:
        self.state = state


_RECORDED = re.compile(r"numpy\.(ndarray|dtype|_?core\.(multiarray\._reconstruct|numeric\._frombuffer))|_codecs.encode")


class _Recorder(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if not _RECORDED.fullmatch(f"{module}.{name}"):
            raise pickle.UnpicklingError(f"asks for {module}.{name}, which no batch needs and is not run")
        return partial(_Call, name)


def _bytes(value: Any) -> Any:
    """Python 3 writes bytes for Python 2 as text in an encoding."""
    match value:
        case _Call(name="encode", arguments=(str(text), "latin1" | "latin-1")):
            return text.encode("latin1")
        case str(text):
            return text.encode("latin1")
        case bytearray():
            return bytes(value)
    return value


def _pixels(array: Any) -> NDArray[np.uint8] | None:
    """`[n, 3, 32, 32]`; None if the array is anything else than bytes [n, 3072]."""
    match array:
        case _Call(name="_reconstruct", state=(_, shape, kind, fortran, data)):
            pass
        case _Call(name="_frombuffer", arguments=(data, kind, shape, order)):
            fortran = order == "F"
        case _:
            return None
    data = _bytes(data)
    match kind, shape:
        case _Call(name="dtype", arguments=(code, *_)), (int(rows), 3072) if _bytes(code) == b"u1":
            if isinstance(data, bytes) and len(data) == rows * 3072:
                flat = np.frombuffer(data, dtype=np.uint8)
                return (flat.reshape(3072, rows).T if fortran else flat).reshape(rows, 3, 32, 32)
    return None
