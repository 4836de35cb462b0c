"""CIFAR-10 and CIFAR-100 as their authors publish them: pickled batches or binary ones, in their archive or unpacked.

    pickled   a dict of data, bytes [n, 3072], and labels (CIFAR-10) or fine_labels (CIFAR-100), a list of n
    binary    records: the label, a byte (CIFAR-100: the coarse one, then the fine one), then 3072 bytes of pixels

A row of 3072 is red, green and blue, each 32 x 32. Pickles can ask for any function to be called; here they get
nothing but stand-ins for the four names an array of bytes is made with, and everything else is refused.
"""

from __future__ import annotations

import gzip
import pickle
import tarfile
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from io import BytesIO
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pfedlms.data.cache import Raw, decoded
from pfedlms.data.formats import Format, Found, contents, joined, of_one_file, of_one_folder
from pfedlms.data.published import BATCHES, check_published, md5_of, samples_in
from pfedlms.errors import DataError

_SHAPE = (3, 32, 32)
_PIXELS = prod(_SHAPE)


@dataclass(frozen=True)
class Layout:
    """The names under which one of the two is published."""

    name: str
    classes: int
    batches: tuple[str, ...]
    """Pickled batches, those of train first; the binary ones are called the same with `.bin`."""
    pickled: str
    """Folder of the pickled batches, in the archive and unpacked, as is `binary`."""
    binary: str
    pickled_archive: str
    binary_archive: str
    labels: str
    """Their key in a pickled batch."""
    label_bytes: int
    """Of a binary record; the last one counts."""


_TEN = ("data_batch_1", "data_batch_2", "data_batch_3", "data_batch_4", "data_batch_5", "test_batch")
CIFAR10 = Layout(
    "cifar10", 10, _TEN, "cifar-10-batches-py", "cifar-10-batches-bin", "cifar-10-python.tar.gz",
    "cifar-10-binary.tar.gz", "labels", 1,
)  # fmt: skip
CIFAR100 = Layout(
    "cifar100", 100, ("train", "test"), "cifar-100-python", "cifar-100-binary", "cifar-100-python.tar.gz",
    "cifar-100-binary.tar.gz", "fine_labels", 2,
)  # fmt: skip
_LAYOUTS = (CIFAR10, CIFAR100)
Parse = Callable[[bytes, str, Layout], Raw]
"""One batch, by what errors call it."""


def formats(layout: Layout) -> tuple[Format, ...]:
    """Unpacked before packed, which takes longer to read."""
    binary = tuple(f"{name}.bin" for name in layout.batches)
    return (
        Format(
            f"{layout.pickled}/",
            partial(_unpacked, layout, layout.pickled, layout.batches),
            lambda path: parse_whole(contents(path), str(path), layout),
            joined,
        ),
        Format(
            layout.pickled_archive,
            partial(_packed, layout, layout.pickled_archive),
            lambda path: _archived(path, layout, layout.batches, parse_whole),
            joined,
        ),
        Format(
            f"{layout.binary}/",
            partial(_unpacked, layout, layout.binary, binary),
            lambda path: parse_binary(contents(path), str(path), layout),
            joined,
        ),
        Format(
            layout.binary_archive,
            partial(_packed, layout, layout.binary_archive),
            lambda path: _archived(path, layout, binary, parse_binary),
            joined,
        ),
    )


def _bases(layout: Layout, directory: Path) -> list[Path]:
    return [directory / layout.name, directory / layout.name.upper(), directory]


def _unpacked(layout: Layout, folder: str, names: Sequence[str], directory: Path) -> Found:
    bases = _bases(layout, directory)
    return of_one_folder([*(base / folder for base in bases), *bases], names)


def _packed(layout: Layout, archive: str, directory: Path) -> Found:
    return of_one_file(_bases(layout, directory), archive)


def _archived(path: Path, layout: Layout, names: Sequence[str], parse: Parse) -> Raw:
    """All batches of an archive; the decoded copy is kept (see `data.cache`)."""
    content = contents(path)
    check_published(layout.name, path, content)
    return decoded(content, f"{layout.name} 2", _SHAPE, lambda: _unpack(content, path, layout, names, parse))


def _unpack(content: bytes, path: Path, layout: Layout, names: Sequence[str], parse: Parse) -> Raw:
    """By the last part of members' names; nothing is written anywhere."""
    try:
        # At once, because that checks the length and the checksum, which reading as far as needed does not.
        with tarfile.open(fileobj=BytesIO(gzip.decompress(content)), mode="r:") as archive:
            members = {Path(member.name).name: member for member in archive if member.isfile()}
            batches = {name: archive.extractfile(members[name]) for name in names if name in members}
            found = {name: file.read() for name, file in batches.items() if file is not None}
    except (OSError, EOFError, zlib.error, tarfile.TarError) as error:
        raise DataError(f"{path}: not a whole archive ({error}); fetch the file again") from error
    for name in names:
        if name not in found:
            raise DataError(f"{path}: got {', '.join(sorted(members)) or 'nothing'}, expected {name} in it, too")
    return joined([parse(found[name], f"{path}/{name}", layout) for name in names])


def parse_binary(content: bytes, name: str, layout: Layout) -> Raw:
    """A binary batch."""
    length = layout.label_bytes + _PIXELS
    if not content or len(content) % length:
        raise DataError(
            f"{name}: got {len(content)} bytes, expected a multiple of {length} for {layout.name}; fetch the file "
            "again, or it is of another data set"
        )
    records = np.frombuffer(content, dtype=np.uint8).reshape(-1, length)
    labels = records[:, layout.label_bytes - 1].astype(np.int64)
    _check_labels(labels, name, layout)
    return records[:, layout.label_bytes :].reshape(-1, *_SHAPE), labels


def parse_whole(content: bytes, name: str, layout: Layout) -> Raw:
    """A pickled batch. It carries no checksum of its own, so one with as many images as was published must be the
    published one."""
    images, labels = parse_pickled(content, name, layout)
    path = Path(name)
    if len(labels) == samples_in(path) and md5_of(content) != BATCHES[path.name]:
        raise DataError(
            f"{name}: has {len(labels):,} images as the published file, but not its checksum (MD5 {md5_of(content)}, "
            f"expected {BATCHES[path.name]}); remove it and fetch it again, or load one that was changed on purpose in "
            "Python"
        )
    return images, labels


def parse_pickled(content: bytes, name: str, layout: Layout) -> Raw:
    """A pickled batch."""
    try:
        read = _Unpickler(BytesIO(content), encoding="bytes").load()
    except Exception as error:  # almost anything on damaged bytes
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise DataError(f"{name}: no whole pickled batch of {layout.name} ({reason}); fetch the file again") from error
    batch = read if isinstance(read, dict) else {}
    batch = {key.decode("latin1") if isinstance(key, bytes) else key: value for key, value in batch.items()}
    for other in _LAYOUTS:
        if other != layout and other.labels in batch and layout.labels not in batch:
            raise DataError(f"{name}: holds a batch of {other.name}, expected one of {layout.name}; use --dataset "
                            f"{other.name}, or put the files of {layout.name} there")  # fmt: skip
    data, labels = batch.get("data"), batch.get(layout.labels)
    images = data.pixels() if isinstance(data, _Array) else None
    if images is None or not isinstance(labels, list) or not all(type(label) is int for label in labels):
        raise DataError(
            f"{name}: got a pickle of {type(read).__name__} {sorted(map(str, batch))}, expected data (bytes [n, "
            f"{_PIXELS}]) and {layout.labels} (a list of whole numbers); fetch the file again"
        )
    if len(images) != len(labels) or not labels:
        raise DataError(
            f"{name}: got {len(images)} images and {len(labels)} {layout.labels}, expected as many and at least one; "
            "fetch the file again"
        )
    numbers = np.array([min(max(label, -1), layout.classes) for label in labels], dtype=np.int64)
    _check_labels(numbers, name, layout)
    return images, numbers


def _check_labels(labels: NDArray[np.int64], name: str, layout: Layout) -> None:
    wrong = np.flatnonzero((labels < 0) | (labels >= layout.classes))
    if len(wrong):
        raise DataError(
            f"{name}: got a label that is not 0 to {layout.classes - 1} in image {wrong[0]} (from 0), expected one "
            f"of {layout.name}; fetch the file again, or it is of another data set"
        )


# What a pickle is given instead of numpy's own. All of them are classes with __setstate__, so that a pickle that wants
# to set attributes of one of them, and not of an object it made, is refused by the call that does it.


class _Type:
    """Stands for `numpy.dtype`."""

    def __init__(self, code: Any, *_: Any) -> None:
        self.code = code

    def __setstate__(self, state: Any) -> None:
        """Byte order and the like, which single bytes have not."""


class _Array:
    """Stands for `numpy.ndarray` and for the function that makes an empty one; filled by `__setstate__`."""

    def __init__(self, *_: Any) -> None:
        self.state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def pixels(self) -> NDArray[np.uint8] | None:
        """`[n, 3, 32, 32]`; None if it is anything else than bytes [n, 3072]."""
        match self.state:
            case (_, (int(rows), int(columns)), _Type(code=b"u1" | "u1"), fortran, bytes(data) | bytearray(data)):
                if columns == _PIXELS and rows * columns == len(data):
                    flat = np.frombuffer(bytes(data), dtype=np.uint8)
                    table = flat.reshape(columns, rows).T if fortran else flat.reshape(rows, columns)
                    return table.reshape(rows, *_SHAPE)
        return None


class _FromBuffer(_Array):
    """Stands for the function that newer pickles make an array with: bytes, type, shape, order."""

    def __init__(self, data: Any, kind: Any, shape: Any, order: Any) -> None:
        self.state = (1, shape, kind, order == "F", data)


class _Encoded:
    """Stands for `codecs.encode`, which Python 3 writes bytes with for Python 2: text to bytes, and no other codec."""

    def __new__(cls, text: str, encoding: str) -> Any:
        if encoding not in ("latin1", "latin-1"):
            raise pickle.UnpicklingError(f"asks for the codec {encoding}")
        return text.encode("latin1")

    def __setstate__(self, state: Any) -> None: ...


_STAND_INS: dict[tuple[str, str], type] = {
    ("numpy", "ndarray"): _Array,
    ("numpy", "dtype"): _Type,
    ("_codecs", "encode"): _Encoded,
    **{(f"numpy.{core}.multiarray", "_reconstruct"): _Array for core in ("core", "_core")},
    **{(f"numpy.{core}.numeric", "_frombuffer"): _FromBuffer for core in ("core", "_core")},
}


class _Unpickler(pickle.Unpickler):
    """Of arrays of bytes in plain containers; whatever else a pickle names is refused before it is looked up."""

    def find_class(self, module: str, name: str) -> type:
        if (module, name) not in _STAND_INS:
            raise pickle.UnpicklingError(f"asks for {module}.{name}, which no batch needs and is not run")
        return _STAND_INS[module, name]
