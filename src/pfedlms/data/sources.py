"""Data sets by name: where each is read from and how its samples are normalised; and a user's own, by path."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import resources
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pfedlms.data import cifar, svhn
from pfedlms.data.cache import Raw
from pfedlms.data.file import SUFFIXES, read_file
from pfedlms.data.folder import read_folder
from pfedlms.data.formats import Format, read_files
from pfedlms.data.idx import idx_format
from pfedlms.data.parquet import parquet_format
from pfedlms.data.pool import Constants, Pool, Samples, constants, normalise
from pfedlms.errors import DataError, did_you_mean


@dataclass(frozen=True)
class Source:
    """How one data set is found and described; a sample is x = (raw / scale − mean) / std, channel by channel."""

    description: str
    shape: tuple[int, int, int]
    """Channels, height and width."""
    classes: int
    read: Callable[[Path], Raw]
    mean: tuple[float, ...]
    """One number a channel, as is `std`."""
    std: tuple[float, ...]
    scale: float = 255.0
    formats: tuple[Format, ...] = ()
    """In which it may lie in a folder; none: it is in the package."""
    samples: int = 0
    """As published, train and test."""

    @property
    def needs_dir(self) -> bool:
        return bool(self.formats)


PATHS = {
    "folder": "a folder of images by class: PATH/CLASS/…, or PATH/train/CLASS/… and test (extra: images)",
    "file": "PATH.npz, .csv or .parquet with a label and perhaps a client column (extra for the last: parquet)",
}
"""What a user's own data can be, named as KIND:PATH."""


def kind_of(name: str) -> str | None:
    """`folder` or `file` for a user's own data, None for a data set with a name of its own."""
    kind, colon, path = name.partition(":")
    return kind if colon and path and kind in PATHS else None


def meant_by(name: str) -> str:
    """What a path without its kind was probably meant as; "" where it looks like none."""
    path = Path(os.path.expanduser(name))
    if ":" in name:
        return ""
    if path.suffix.lower() in SUFFIXES or path.is_file():
        return f"did you mean file:{name}?"
    return f"did you mean folder:{name}?" if path.is_dir() or "/" in name or os.sep in name else ""


def load_dataset(name: str, directory: str | Path | None = None) -> tuple[Samples, NDArray[np.int64]]:
    """Samples `[n, channels, height, width]` and labels `[n]` of the data set `name`, train and test pooled, normalised
    by its published mean and standard deviation; as `run` and `compare` take them. Or of `folder:PATH`, `file:PATH`."""
    pool = load_pool(name, directory)
    return pool.x, pool.y


def load_pool(
    name: str,
    directory: str | Path | None = None,
    image_size: int = 0,
    label: str = "",
    client: str = "",
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
) -> Pool:
    """The data set `name`, with what is known of its classes and clients; a path of the user's own is looked up in
    `directory` unless it is absolute. The last five are settings of section [data]: images are normalised by `mean` and
    `std`, one number per channel, where they are given, else by the data set's own. The pool says which were used."""
    given = constants(mean, std)
    path = Path(directory or "", os.path.expanduser(name.partition(":")[2]))
    match kind_of(name):
        case "folder":
            return read_folder(path, image_size, *given)
        case "file":
            return read_file(path, label, client, *given)
    return _load_named(name, directory, *given)


def _load_named(name: str, directory: str | Path | None, mean: Constants, std: Constants) -> Pool:
    if name not in DATASETS:
        near = meant_by(name) or did_you_mean(name, [*DATASETS, *(f"{kind}:PATH" for kind in PATHS)])
        raise DataError(f"data.dataset: got {name!r}; {near}")
    source = DATASETS[name]
    raw, labels = source.read(folder_of(name, directory) if source.needs_dir else Path())
    check_raw(name, raw, labels)
    mean, std = mean or source.mean, std or source.std
    if len(mean) != raw.shape[1]:
        raise DataError(f"data.mean: got {len(mean)} numbers, expected {raw.shape[1]}, one per channel of {name}")
    return Pool(normalise(raw, mean, std, source.scale), labels, mean=mean, std=std)


def folder_of(name: str, directory: str | Path | None) -> Path:
    """Where the files of the data set `name` are: in `directory`, or where PFEDLMS_DATA says."""
    if found := directory or os.environ.get("PFEDLMS_DATA"):
        return Path(found)
    raise DataError(
        f"data.dir: the data set {name!r} is read from files; name their folder with --data-dir DIR or PFEDLMS_DATA, "
        f"or fetch them: pfedlms data download {name} --data-dir DIR"
    )


def check_raw(name: str, raw: NDArray[np.uint8], labels: NDArray[np.int64]) -> None:
    """Refuse what cannot be the data set `name`."""
    source = DATASETS[name]
    if raw.shape[1:] != source.shape:
        raise DataError(
            f"{name}: got images of shape {raw.shape[1:]}, expected {source.shape} (channels, height, width); "
            f"the files are not {name}'s"
        )
    if labels.max() >= source.classes:
        raise DataError(
            f"{name}: got label {labels.max()}, expected below {source.classes}; the files are not {name}'s"
        )
    absent = sorted(set(range(source.classes)) - set(np.unique(labels).tolist()))
    if absent and len(labels) >= 100 * source.classes:  # by chance in no such sample; CIFAR-10 taken for CIFAR-100 is
        raise DataError(
            f"{name}: got {len(labels)} samples and none of class {absent[0]}, expected some of each of "
            f"{source.classes}; the files are not {name}'s"
        )


def _read_digits(_: Path) -> Raw:
    with resources.files("pfedlms.data").joinpath("digits.npz").open("rb") as file, np.load(file) as arrays:
        return arrays["images"][:, np.newaxis], arrays["labels"].astype(np.int64)


def _source(
    name: str, what: str, samples: int, shape: tuple[int, int, int], classes: int,
    mean: tuple[float, ...], std: tuple[float, ...], formats: tuple[Format, ...], hub: str,
) -> Source:  # fmt: skip
    """A data set of images in files: as its authors publish it, or in Parquet files, where hubs call it `hub`."""
    formats = (*formats, parquet_format(name, hub, shape, classes))
    size = f"{shape[1]}x{shape[2]} {'grey' if shape[0] == 1 else 'colour'}"
    return Source(
        f"{what}, {size}", shape, classes, partial(read_files, name, formats, samples), mean, std, formats=formats,
        samples=samples,
    )  # fmt: skip


_DIGITS = "1,797 handwritten digits, 8x8 grey, in the package (UCI Optical Recognition of Handwritten Digits)"
_GREY, _COLOUR = (1, 28, 28), (3, 32, 32)
_CIFAR = (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)
DATASETS: dict[str, Source] = {
    "digits": Source(_DIGITS, (1, 8, 8), 10, _read_digits, (0.3053,), (0.3760,), scale=16.0, samples=1797),
    "mnist": _source(
        "mnist", "MNIST, 70,000 handwritten digits", 70_000, _GREY, 10, (0.1307,), (0.3081,),
        (idx_format("mnist", ("mnist", "MNIST/raw")),), "mnist",
    ),
    "fmnist": _source(
        "fmnist", "Fashion-MNIST, 70,000 articles of clothing", 70_000, _GREY, 10, (0.2860,), (0.3530,),
        (idx_format("fmnist", ("fmnist", "FashionMNIST/raw")),), "fashion_mnist",
    ),
    "svhn": _source(
        "svhn", "SVHN, 99,289 digits of house numbers", 99_289, _COLOUR, 10, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5),
        (svhn.FORMAT,), "cropped_digits",
    ),
    "cifar10": _source(
        "cifar10", "CIFAR-10, 60,000 animals and vehicles", 60_000, _COLOUR, 10, *_CIFAR,
        cifar.formats(cifar.CIFAR10), "plain_text",
    ),
    "cifar100": _source(
        "cifar100", "CIFAR-100, 60,000 animals, plants and things, fine labels", 60_000, _COLOUR, 100, *_CIFAR,
        cifar.formats(cifar.CIFAR100), "cifar100",
    ),
}  # fmt: skip
