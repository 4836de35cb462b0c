"""Data sets by name: where each is read from and how its samples are normalised. And a user's own data, by path.

A new format of a named data set is a `Format` and its place in `DATASETS`.
"""

from __future__ import annotations

import hashlib
import os
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pfedlms.data.file import READERS, read_columns, read_file, texts_by_client
from pfedlms.data.formats import MATLAB, Format, cifar_formats, find_files, idx_format, parquet_format
from pfedlms.data.images import check_constants, normalise, read_folder
from pfedlms.data.pool import Pool, Samples
from pfedlms.data.text import Windows, cut_windows
from pfedlms.errors import DataError, DataWarning, did_you_mean


@dataclass(frozen=True)
class Source:
    """A named data set: images, where a sample is x = (raw / scale − mean) / std, channel by channel; or text."""

    description: str
    shape: tuple[int, ...]
    """Channels, height and width. For text: the default length of a window."""
    classes: int
    """For text: the size of the vocabulary of characters."""
    samples: int
    """How many were published, train and test together. For text: how many clients."""
    mean: tuple[float, ...] = ()
    """`mean` and `std` have one number per channel; text has none."""
    std: tuple[float, ...] = ()
    formats: tuple[Format, ...] = ()
    """The first format that is complete on disk is read. Empty: the data set is in the package."""
    published: int | None = None
    """`fingerprint` of the published samples or texts, where it is known."""
    scale: float = 255.0

    @property
    def needs_dir(self) -> bool:
        return bool(self.formats)

    @property
    def is_text(self) -> bool:
        return not self.mean


_SPEAKERS = Format(
    "lines of JSON", ("shakespeare", ""), ("speakers.jsonl",),
    lambda files: texts_by_client(files[0], read_columns(files[0])).items(),
)  # fmt: skip
_GREY, _COLOUR, _HALF = (1, 28, 28), (3, 32, 32), (0.5, 0.5, 0.5)
_CIFAR = (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)
DATASETS: dict[str, Source] = {
    "digits": Source(
        "1,797 handwritten digits, 8x8 grey, in the package (UCI Optical Recognition of Handwritten Digits)",
        (1, 8, 8), 10, 1797, (0.3053,), (0.3760,), scale=16.0,
    ),
    "mnist": Source(
        "MNIST, 70,000 handwritten digits, 28x28 grey", _GREY, 10, 70_000, (0.1307,), (0.3081,),
        (idx_format("mnist", "MNIST/raw"), parquet_format("mnist", "mnist", _GREY)), 0x0E364F4C3E9F0946,
    ),
    "fmnist": Source(
        "Fashion-MNIST, 70,000 articles of clothing, 28x28 grey", _GREY, 10, 70_000, (0.2860,), (0.3530,),
        (idx_format("fmnist", "FashionMNIST/raw"), parquet_format("fmnist", "fashion_mnist", _GREY)),
        0x67A39152851A6E8D,
    ),
    "svhn": Source(
        "SVHN, 99,289 digits of house numbers, 32x32 colour", _COLOUR, 10, 99_289, _HALF, _HALF,
        (MATLAB, parquet_format("svhn", "cropped_digits", _COLOUR)),
    ),
    "cifar10": Source(
        "CIFAR-10, 60,000 animals and vehicles, 32x32 colour", _COLOUR, 10, 60_000, *_CIFAR,
        (*cifar_formats("cifar10"), parquet_format("cifar10", "plain_text", _COLOUR)), 0x7542CCDEEEA61633,
    ),
    "cifar100": Source(
        "CIFAR-100, 60,000 animals, plants and things, fine labels, 32x32 colour", _COLOUR, 100, 60_000, *_CIFAR,
        (*cifar_formats("cifar100"), parquet_format("cifar100", "cifar100", _COLOUR)), 0xF48219A758C5B1BE,
    ),
    "shakespeare": Source(
        "1,567 speakers of Shakespeare's works, 4.5 million characters: each speaker is a client", (80,), 71, 1567,
        formats=(_SPEAKERS,), published=0xA2F7A6578078BFB0,
    ),
}  # fmt: skip

PATHS = {
    "folder": "a folder of images by class: PATH/CLASS/…, or PATH/train/CLASS/… and test (extra: data)",
    "file": f"PATH{', '.join(READERS)} with a label, or a client and text (extra for Parquet: data)",
}
"""Kinds of a user's own data, named as KIND:PATH."""


def path_kind(name: str) -> str | None:
    """`folder` or `file` for a user's own data, given as KIND:PATH; None for anything else."""
    kind, colon, path = name.partition(":")
    return kind if colon and path and kind in PATHS else None


def suggest_kind(name: str) -> str:
    """A question that suggests the kind for a path without one; "" where `name` does not look like a path."""
    path = Path(os.path.expanduser(name))
    if ":" in name:
        return ""
    if path.suffix == ".toml":
        return f"did you mean config={name!r}?"
    if path.name.lower().endswith(tuple(READERS)) or path.is_file():
        return f"did you mean file:{name}?"
    return f"did you mean folder:{name}?" if path.is_dir() or "/" in name or os.sep in name else ""


def load_dataset(name: str, data_dir: str | Path | None = None) -> tuple[Samples, NDArray[np.int64]]:
    """Samples `[n, channels, height, width]` and labels `[n]` of the data set `name`, or of `folder:PATH` or
    `file:PATH`, as `run` and `compare` accept them: train and test together, normalised by the data set's mean and
    standard deviation."""
    pool = load_pool(name, data_dir)
    return pool.x, pool.y


def load_pool(
    name: str, directory: str | Path | None = None, image_size: int = 0, label: str = "", client: str = "",
    mean: Sequence[float] | None = None, std: Sequence[float] | None = None, text: str = "",
    windows: Windows | None = None,
) -> Pool:  # fmt: skip
    """The pool of the data set `name`, with what is known of its classes and clients. A user's own path is looked up in
    `directory` unless it is absolute. The other arguments are settings of section [data]: images are normalised by
    `mean` and `std` if they are given, else by the data set's own. The pool carries those used."""
    mean, std = check_constants(mean, std)
    path = Path(directory or "", os.path.expanduser(name.partition(":")[2]))
    match path_kind(name):
        case "folder":
            return read_folder(path, image_size, mean, std)
        case "file":
            return read_file(path, label, client, mean, std, text, windows)
    if name not in DATASETS:
        near = suggest_kind(name) or did_you_mean(name, [*DATASETS, *(f"{kind}:PATH" for kind in PATHS)])
        raise DataError(f"data.dataset: got {name!r}; {near}")
    source = DATASETS[name]
    if not source.formats:
        with resources.files("pfedlms.data").joinpath("digits.npz").open("rb") as file, np.load(file) as arrays:
            raw, labels = arrays["images"][:, np.newaxis], arrays["labels"].astype(np.int64)
    else:
        format, files = find_files(name, source.formats, data_folder(name, directory))
        pieces = list(format.read(files))
        if source.is_text:
            rows = (f"{client}\0{words}".encode(errors="replace") for client, words in pieces)
            _compare_with_published(name, files[0].parent, len(pieces), "clients", rows)
            return cut_windows(dict(pieces), windows or Windows(), files[0])
        for piece in pieces:
            _check_piece(name, source, *piece)
        raw, labels = (np.concatenate(arrays) for arrays in list(zip(*pieces, strict=True))[1:])
        labels = labels.astype(np.int64)
        rows = (image.tobytes() + bytes([label]) for image, label in zip(raw, labels, strict=True))
        _compare_with_published(name, files[0].parent, len(labels), "samples", rows)
    x, mean, std = normalise(raw, mean or source.mean, std or source.std, source.scale)
    return Pool(x, labels, source.classes, mean=mean, std=std)


def data_folder(name: str, directory: str | Path | None) -> Path:
    """The folder with the files of the data set `name`: `directory`, or what PFEDLMS_DATA names."""
    if folder := directory or os.environ.get("PFEDLMS_DATA"):
        return Path(folder)
    raise DataError(
        f"data.dir: the data set {name!r} is read from files; name their folder with --data-dir DIR (data_dir in "
        f"Python) or PFEDLMS_DATA, or fetch them: pfedlms data download {name} --data-dir DIR"
    )


def _check_piece(name: str, source: Source, where: str, images: NDArray[Any], labels: NDArray[Any]) -> None:
    """Refuse a piece that cannot be of the data set `name`."""
    fits = images.shape == (len(labels), *source.shape) and images.dtype == np.uint8 and len(labels)
    if not fits or not np.isin(labels, np.arange(source.classes)).all():
        between = f" from {labels.min()} to {labels.max()}" if len(labels) else ""
        raise DataError(
            f"{where}: got images {images.shape} of type {images.dtype} and {len(labels)} labels{between}, expected "
            f"bytes [n, *{source.shape}] and n whole labels from 0 to {source.classes - 1}; fetch {name} again"
        )


def _compare_with_published(name: str, folder: Path, count: int, what: str, rows: Iterable[bytes]) -> None:
    """Warn if the data are not the published ones; refuse the data of another data set."""
    published, digest = DATASETS[name].published, fingerprint(rows)
    if other := next((other for other in DATASETS if other != name and DATASETS[other].published == digest), None):
        raise DataError(f"{folder}: holds the data set {other!r}, expected {name!r}; use --dataset {other}")
    if count != DATASETS[name].samples or published not in (None, digest):
        warnings.warn(
            f"{name}: got {count:,} {what} that are not the {DATASETS[name].samples:,} published ({folder}); they are "
            f"used; for the others remove the files, then: pfedlms data download {name}",
            DataWarning,
            stacklevel=3,
        )


def fingerprint(rows: Iterable[bytes]) -> int:
    """A number that does not depend on the order of rows: the sum, modulo 2^64, of the first 8 bytes of each row's
    SHA-256. A row is an image and its label, or a client and its text."""
    digests = (hashlib.sha256(row).digest()[:8] for row in rows)
    return int(np.frombuffer(b"".join(digests), dtype="<u8").sum())
