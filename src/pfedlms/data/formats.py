"""The formats in which named data sets are published: IDX, pickled batches, MATLAB, Parquet. What a format
reads is checked in `sources`, once for all formats."""

from __future__ import annotations

import os
import pickle
import re
import tarfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from io import BytesIO
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pfedlms.data.disk import contents, extra, parquet_file
from pfedlms.data.images import Shape, decode
from pfedlms.errors import DataError, reason

Piece = tuple[Any, ...]
"""Of images: what errors call it, images `[n, channels, height, width]` and labels `[n]`. Of text:
a client and its text."""


@dataclass(frozen=True)
class Format:
    kind: str
    """What errors call it."""
    folders: tuple[str, ...]
    """Where its files may be, below the data directory."""
    files: tuple[str, ...]
    """Their names, or patterns of several names; each file may be gzipped."""
    read: Callable[[Sequence[Path]], Iterable[Piece]]
    """The pieces of the data set, those of train first."""


def find_files(name: str, formats: Sequence[Format], directory: Path) -> tuple[Format, list[Path]]:
    """The first format of the data set `name` that is complete in one folder, and its files. DataError where none is
    complete; of the folder with the most files it says what is missing."""
    best, lacking = list[Path](), ""
    for format in formats:
        for folder in (directory / each for each in format.folders):
            found = {file: _named(folder, file) or _named(folder, f"{file}.gz") for file in format.files}
            files = [path for own in found.values() for path in own]
            missing = [file for file, own in found.items() if not own]
            if not missing:
                return format, files
            if len(files) > len(best):
                best, lacking = files, missing[0].replace("[-.]", "-")
    if directory.is_dir() and not os.access(directory, os.R_OK | os.X_OK):
        raise DataError(f"{directory}: cannot be read (permission denied); allow it")
    if best:
        raise DataError(f"{best[0].parent}: {lacking} is missing beside {best[0].name}; fetch it, or remove the others")
    nothing = f"nothing of {name} is in {directory} or where it usually is below it"
    raise DataError(
        f"data.dir: {nothing if directory.is_dir() else f'{directory} is no folder'}; looked for "
        f"{', '.join(format.kind for format in formats)}; point --data-dir at the folder that holds it, or fetch it: "
        f"pfedlms data download {name} --data-dir {directory}"
    )


def _named(folder: Path, pattern: str) -> list[Path]:
    found = sorted(path for path in folder.glob(pattern) if path.is_file())
    return found if "*" in pattern else found[:1]


# --- IDX: MNIST and Fashion-MNIST ---


def idx_format(*folders: str) -> Format:
    # Some copies have a dot in the middle of their names.
    names = (f"{part}-{kind}-ubyte" for part in ("train", "t10k") for kind in ("images[-.]idx3", "labels[-.]idx1"))
    return Format("IDX files", (*folders, ""), tuple(names), _read_idx_files)


def _read_idx_files(files: Sequence[Path]) -> Iterator[Piece]:
    for images, labels in zip(files[::2], files[1::2], strict=True):
        yield f"{images} and {labels.name}", read_idx(images, 3)[:, np.newaxis], read_idx(labels, 1)


def read_idx(path: Path, axes: int) -> NDArray[np.uint8]:
    """00 00 08 and the number of axes; the length of each, 4 bytes, big endian; then the numbers, a byte each."""
    content, header = contents(path), 4 * (axes + 1)
    magic, *shape = (int.from_bytes(content[place : place + 4], "big") for place in range(0, header, 4))
    if magic != 0x800 + axes or len(content) - header != prod(shape):
        raise DataError(
            f"{path}: got {len(content)} bytes that begin with {content[:4].hex()}, expected an IDX file with {axes} "
            f"axes{f' and {header + prod(shape)} bytes' * (magic == 0x800 + axes)}; fetch the file again"
        )
    return np.frombuffer(content, dtype=np.uint8, offset=header).reshape(shape)


# --- MATLAB: SVHN ---


def _read_matlab(files: Sequence[Path]) -> Iterator[Piece]:
    """`X`, bytes [32, 32, 3, n], and `y` [n, 1], where 10 stands for the digit 0."""
    with extra("MATLAB files"):
        from scipy.io import loadmat
    for path in files:
        try:
            arrays = loadmat(BytesIO(contents(path)), variable_names=("X", "y"))
            images, labels = arrays["X"].transpose(3, 2, 0, 1), arrays["y"].reshape(-1)
        except Exception as error:  # SciPy raises almost anything on damaged bytes
            raise DataError(
                f"{path}: not a whole MATLAB file with X and y ({reason(error)}); fetch the file again"
            ) from error
        yield str(path), np.ascontiguousarray(images), np.where(labels == 10, 0, labels)


MATLAB = Format("MATLAB files", ("svhn", "SVHN", ""), ("train_32x32.mat", "test_32x32.mat"), _read_matlab)
"""The third file that is published, `extra`, is not used."""


# --- Pickled batches: CIFAR-10 and CIFAR-100 ---

_BATCHES = {
    "cifar10": ("cifar-10-batches-py", *(f"data_batch_{number}" for number in range(1, 6)), "test_batch"),
    "cifar100": ("cifar-100-python", "train", "test"),
}
"""Their folder, and the files in it."""
_LABELS = {"cifar10": "labels", "cifar100": "fine_labels"}


def cifar_formats(name: str) -> tuple[Format, Format]:
    """Unpacked before packed, which takes longer to read."""
    inside, *batches = _BATCHES[name]
    archive = f"{name[:5]}-{name[5:]}-python.tar.gz"
    bases = (f"{name}/", f"{name.upper()}/", "")
    return (
        Format(f"{inside}/", (*(base + inside for base in bases), *bases), tuple(batches), partial(_unpacked, name)),
        Format(archive, bases, (archive,), partial(_packed, name, batches)),
    )


def _unpacked(name: str, files: Sequence[Path]) -> Iterator[Piece]:
    return (parse_batch(contents(path), str(path), name) for path in files)


def _packed(name: str, batches: Sequence[str], files: Sequence[Path]) -> Iterator[Piece]:
    """Batches by the last part of their members' names; nothing is written anywhere."""
    path = files[0]
    try:
        with tarfile.open(fileobj=BytesIO(contents(path)), mode="r:") as archive:
            members = {Path(member.name).name: archive.extractfile(member) for member in archive if member.isfile()}
            found = {each: file.read() for each, file in members.items() if file and each in batches}
    except (OSError, EOFError, tarfile.TarError) as error:
        raise DataError(f"{path}: not a whole archive ({error}); fetch the file again") from error
    for each in batches:
        if each not in found:
            raise DataError(f"{path}: got {', '.join(members) or 'nothing'}, expected {each} in it; fetch it again")
        yield parse_batch(found[each], f"{path}/{each}", name)


def parse_batch(content: bytes, called: str, name: str) -> Piece:
    """One batch: a dict with `data`, bytes [n, 3072], and `labels` or `fine_labels`, a list of n.

    A pickle can ask for any function to be called. Here nothing is called: the calls that make an array of bytes are
    recorded and read, all others are refused.
    """
    try:
        read = _Recorder(BytesIO(content), encoding="bytes").load()
        batch = {_bytes(key): value for key, value in read.items()}
        images, labels = _pixels(batch[b"data"]), np.array(batch[_LABELS[name].encode()])
        if labels.dtype.kind != "i" or labels.ndim != 1:
            raise ValueError(f"{_LABELS[name]} are no list of whole numbers")
    except Exception as error:  # almost anything on damaged bytes
        raise DataError(
            f"{called}: no whole pickled batch of {name} ({reason(error)}), expected data (bytes [n, 3072]) and "
            f"{_LABELS[name]}; fetch the file again, or it is of another data set"
        ) from error
    return called, images, labels


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
        case _Call(name="encode", arguments=(str(text), "latin1" | "latin-1")) | str(text):
            return text.encode("latin1")
    return value


def _pixels(array: Any) -> NDArray[np.uint8]:
    """`[n, 3, 32, 32]` of the recorded calls that make an array of bytes."""
    match array:
        case _Call(name="_reconstruct", state=(_, shape, _Call(name="dtype", arguments=(kind, *_)), fortran, data)):
            pass
        case _Call(name="_frombuffer", arguments=(data, _Call(name="dtype", arguments=(kind, *_)), shape, order)):
            fortran = order == "F"
        case _:
            raise ValueError("data are no array")
    if _bytes(kind) != b"u1" or shape[1:] != (3072,):
        raise ValueError("data are no bytes [n, 3072]")
    flat = np.frombuffer(_bytes(data), dtype=np.uint8)
    return flat.reshape(shape, order="F" if fortran else "C").reshape(-1, 3, 32, 32)


# --- Parquet: all, as data hubs lay them out: train-00000-of-00002.parquet, …, one image file per row ---

_IMAGE_COLUMNS, _LABEL_COLUMNS = ("img", "image"), ("label", "fine_label")
"""What columns may be called. CIFAR-100 has `coarse_label`, too."""


def parquet_format(name: str, hub: str, shape: Shape) -> Format:
    """Of the data set `name`, which hubs call `hub`, with images of `shape`."""
    folders, files = (name, f"{name}/{hub}", f"{name}/data", ""), ("train-*-of-*.parquet", "test-*-of-*.parquet")
    return Format("Parquet files", folders, files, partial(_read_parquet, shape))


def _read_parquet(shape: Shape, files: Sequence[Path]) -> Iterator[Piece]:
    for part in ("train", "test"):
        own = [path.name for path in files if path.name.startswith(part)]
        expected = [f"{part}-{number:05}-of-{len(own):05}" for number in range(len(own))]
        if [name[: len(expected[0])] for name in own] != expected:  # what follows is a hash
            raise DataError(
                f"{files[0].parent}: got {', '.join(own)}, expected as many as their names say, each once; fetch what "
                "is missing, or remove the others"
            )
    for path in files:
        with parquet_file(path) as file:
            image, label = _columns(path, file.schema_arrow)
            # Threads of Arrow that still run when Python ends would abort the process.
            table = file.read(columns=[f"{image}.bytes", label], use_threads=False)
            images = [row and row["bytes"] for row in table[image].to_pylist()]
            labels = table[label].to_pylist()
        called = [f"{path}, row {row} (from 0)" for row in range(len(images))]
        for row, pair in zip(called, zip(images, labels, strict=True), strict=True):
            if None in pair:
                raise DataError(f"{row}: got no image or no label, expected both; fetch the file again")
        yield str(path), decode(images, called, shape), np.array(labels, dtype=np.int64)


def _columns(path: Path, schema: Any) -> tuple[str, str]:
    columns = {field.name: str(field.type) for field in schema}
    image, label = (next((own for own in known if own in columns), "") for known in (_IMAGE_COLUMNS, _LABEL_COLUMNS))
    binary = re.match(r"struct<(.*, )?bytes: (large_)?binary\b", columns.get(image, ""))
    if not binary or not re.fullmatch(r"u?int\d+", columns.get(label, "")):
        raise DataError(
            f"{path}: got columns {columns}, expected {' or '.join(_IMAGE_COLUMNS)} (struct with bytes) and "
            f"{' or '.join(_LABEL_COLUMNS)} (whole numbers); the file is of another data set or layout"
        )
    return image, label
