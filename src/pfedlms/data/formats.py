"""The formats in which named data sets are published: IDX, pickled batches, MATLAB and Parquet. `sources` checks what
was read, once for all formats."""

from __future__ import annotations

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

from pfedlms.data.disk import explain_missing_package, open_parquet, read_contents
from pfedlms.data.images import Shape, decode
from pfedlms.errors import DataError, reason

Piece = tuple[Any, ...]
"""A part of a data set. Of images: its name in error messages, images `[n, channels, height, width]` and labels `[n]`.
Of text: a client and its text."""


@dataclass(frozen=True)
class Format:
    kind: str
    """Its name in error messages."""
    folders: tuple[str, ...]
    """Where its files may be, below the data directory."""
    files: tuple[str, ...]
    """Names of files, or patterns that match several; each file may be gzipped."""
    read: Callable[[Sequence[Path]], Iterable[Piece]]
    """Reads the pieces of the data set, those of train first."""


def find_files(name: str, formats: Sequence[Format], directory: Path) -> tuple[Format, list[Path]]:
    """The first format of the data set `name` that is complete in one folder, and its files. If none is complete, a
    DataError says what is missing in the folder with the most files."""
    most, missing = list[Path](), ""
    for format in formats:
        for folder in (directory / subfolder for subfolder in format.folders):
            matches = {file: _glob(folder, file) or _glob(folder, f"{file}.gz") for file in format.files}
            files = [path for paths in matches.values() for path in paths]
            if all(matches.values()):
                return format, files
            if len(files) > len(most):
                most, missing = files, next(file for file in matches if not matches[file]).replace("[-.]", "-")
    if most:
        raise DataError(f"{most[0].parent}: {missing} is missing beside {most[0].name}; fetch it, or remove the others")
    raise DataError(
        f"data.dir: nothing of {name} is in {directory} or where it usually is below it; looked for "
        f"{', '.join(format.kind for format in formats)}; point --data-dir at the folder that holds it, or fetch it: "
        f"pfedlms data download {name} --data-dir {directory}"
    )


def _glob(folder: Path, pattern: str) -> list[Path]:
    """The files that match; only the first if the pattern stands for one file."""
    files = sorted(path for path in folder.glob(pattern) if path.is_file())
    return files if "*" in pattern else files[:1]


# --- IDX: MNIST and Fashion-MNIST ---


def idx_format(*folders: str) -> Format:
    # Some copies have a dot instead of the second hyphen.
    names = (f"{part}-{kind}-ubyte" for part in ("train", "t10k") for kind in ("images[-.]idx3", "labels[-.]idx1"))
    return Format("IDX files", (*folders, ""), tuple(names), _read_idx_files)


def _read_idx_files(files: Sequence[Path]) -> Iterator[Piece]:
    for images, labels in zip(files[::2], files[1::2], strict=True):
        yield f"{images} and {labels.name}", read_idx(images, 3)[:, np.newaxis], read_idx(labels, 1)


def read_idx(path: Path, axes: int) -> NDArray[np.uint8]:
    """An IDX file: the bytes 00 00 08 and the number of axes; the length of each axis, 4 bytes, big endian; then one
    byte per number."""
    content, header = read_contents(path), 4 * (axes + 1)
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
    with explain_missing_package("MATLAB files"):
        from scipy.io import loadmat
    for path in files:
        try:
            arrays = loadmat(BytesIO(read_contents(path)), variable_names=("X", "y"))
            images, labels = arrays["X"].transpose(3, 2, 0, 1), arrays["y"].reshape(-1)
        except Exception as error:  # SciPy raises almost anything on damaged bytes
            raise DataError(
                f"{path}: not a whole MATLAB file with X and y ({reason(error)}); fetch the file again"
            ) from error
        yield str(path), np.ascontiguousarray(images), np.where(labels == 10, 0, labels)


MATLAB = Format("MATLAB files", ("svhn", "SVHN", ""), ("train_32x32.mat", "test_32x32.mat"), _read_matlab)
"""A third published file, `extra_32x32.mat`, is not used."""


# --- Pickled batches: CIFAR-10 and CIFAR-100 ---

_BATCHES = {
    "cifar10": ("cifar-10-batches-py", *(f"data_batch_{number}" for number in range(1, 6)), "test_batch"),
    "cifar100": ("cifar-100-python", "train", "test"),
}
"""The folder of each data set, and the files in it."""
_LABELS = {"cifar10": "labels", "cifar100": "fine_labels"}


def cifar_formats(name: str) -> tuple[Format, Format]:
    """The unpacked folder, and the archive, which takes longer to read."""
    folder, *batches = _BATCHES[name]
    archive = f"{name[:5]}-{name[5:]}-python.tar.gz"
    bases = (f"{name}/", f"{name.upper()}/", "")
    return (
        Format(
            f"{folder}/", (*(base + folder for base in bases), *bases), tuple(batches), partial(_read_batches, name)
        ),
        Format(archive, bases, (archive,), partial(_read_archive, name, batches)),
    )


def _read_batches(name: str, files: Sequence[Path]) -> Iterator[Piece]:
    return (parse_batch(read_contents(path), str(path), name) for path in files)


def _read_archive(name: str, batches: Sequence[str], files: Sequence[Path]) -> Iterator[Piece]:
    """Find the batches by the last part of their paths in the archive. Nothing is unpacked to disk."""
    path = files[0]
    try:
        with tarfile.open(fileobj=BytesIO(read_contents(path)), mode="r:") as archive:
            files_inside = {
                Path(member.name).name: archive.extractfile(member) for member in archive if member.isfile()
            }
            contents = [file.read() for file in (files_inside[batch] for batch in batches) if file]
    except (OSError, EOFError, KeyError, tarfile.TarError) as error:
        raise DataError(f"{path}: not a whole archive ({reason(error)}); fetch the file again") from error
    for batch, content in zip(batches, contents, strict=True):
        yield parse_batch(content, f"{path}/{batch}", name)


def parse_batch(content: bytes, where: str, name: str) -> Piece:
    """One batch: a dict with `data`, bytes [n, 3072], and `labels` or `fine_labels`, a list of n.

    A pickle can ask for any function to be called. Here nothing is called: the calls that would make an array of bytes
    are recorded and interpreted, and all others are refused.
    """
    try:
        pickled = _CallRecorder(BytesIO(content), encoding="bytes").load()
        batch = {_as_bytes(key): value for key, value in pickled.items()}
        images, labels = _pixels(batch[b"data"]), np.array(batch[_LABELS[name].encode()])
        if labels.dtype.kind != "i" or labels.ndim != 1:
            raise ValueError(f"{_LABELS[name]} are no list of whole numbers")
    except Exception as error:  # damaged bytes can raise almost anything
        raise DataError(
            f"{where}: no whole pickled batch of {name} ({reason(error)}), expected data (bytes [n, 3072], as they are "
            f"published) and {_LABELS[name]}; fetch the file again"
        ) from error
    return where, images, labels


class _Call:
    """A call that a pickle asks for: the function's name, its arguments, and the state that the result would get."""

    def __init__(self, name: str, *arguments: Any) -> None:
        self.name, self.arguments, self.state = name, arguments, None

    def __setstate__(self, state: Any) -> None:
        self.state = state


_ALLOWED = re.compile(r"numpy\.(ndarray|dtype|_?core\.multiarray\._reconstruct)|_codecs.encode")


class _CallRecorder(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if not _ALLOWED.fullmatch(f"{module}.{name}"):
            raise pickle.UnpicklingError(f"asks for {module}.{name}, which no batch needs and is not run")
        return partial(_Call, name)


def _as_bytes(value: Any) -> Any:
    """Text, or the call by which Python 3 writes bytes for Python 2, as bytes; other values as they are."""
    match value:
        case _Call(name="encode", arguments=(str(text), "latin1" | "latin-1")) | str(text):
            return text.encode("latin1")
    return value


def _pixels(array: Any) -> NDArray[np.uint8]:
    """Images `[n, 3, 32, 32]` from the recorded calls that would make an array of bytes."""
    match array:
        case _Call(name="_reconstruct", state=(_, shape, _Call(name="dtype", arguments=(kind, *_)), False, data)):
            if _as_bytes(kind) == b"u1" and shape[1:] == (3072,):
                return np.frombuffer(_as_bytes(data), dtype=np.uint8).reshape(-1, 3, 32, 32)
    raise ValueError("data are no bytes [n, 3072]")


# --- Parquet: all data sets, as data hubs store them: train-00000-of-00002.parquet, …, one image file per row ---

_IMAGE_COLUMNS, _LABEL_COLUMNS = ("img", "image"), ("label", "fine_label")
"""Names that columns may have. CIFAR-100 also has `coarse_label`, which is not used."""


def parquet_format(name: str, hub: str, shape: Shape) -> Format:
    """The Parquet format of the data set `name`, which hubs call `hub`, with images of `shape`."""
    folders, files = (name, f"{name}/{hub}", f"{name}/data", ""), ("train-*-of-*.parquet", "test-*-of-*.parquet")
    return Format("Parquet files", folders, files, partial(_read_parquet, shape))


def _read_parquet(shape: Shape, files: Sequence[Path]) -> Iterator[Piece]:
    for part in ("train", "test"):
        names = [path.name for path in files if path.name.startswith(part)]
        expected = [f"{part}-{number:05}-of-{len(names):05}" for number in range(len(names))]
        if [name[: len(expected[0])] for name in names] != expected:  # a hash may follow
            raise DataError(
                f"{files[0].parent}: got {', '.join(names)}, expected as many as their names say, each once"
            )
    columns = f"{' or '.join(_IMAGE_COLUMNS)} (struct with bytes) and {' or '.join(_LABEL_COLUMNS)} (whole numbers)"
    for path in files:
        with open_parquet(path, f"rows with {columns}") as file:
            there = file.schema_arrow.names
            known = (_IMAGE_COLUMNS, _LABEL_COLUMNS)
            image, label = (next((name for name in names if name in there), names[0]) for names in known)
            # Threads of Arrow that still run when Python ends would abort the process.
            table = file.read(columns=[f"{image}.bytes", label], use_threads=False)
            images = [row["bytes"] for row in table[image].to_pylist()]
            labels = np.array(table[label].to_pylist(), dtype=np.int64)
            if None in images:
                raise ValueError(f"row {images.index(None)} has no image")
        yield str(path), decode(images, [f"{path}, row {row} (from 0)" for row in range(len(images))], shape), labels
