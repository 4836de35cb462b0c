"""Images in folders named as their classes: PATH/cat/1.png, PATH/dog/2.jpg, …, or PATH/train/cat/1.png,
PATH/test/cat/2.png, …, which are pooled."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NoReturn

import numpy as np

from pfedlms.data.formats import extra
from pfedlms.data.images import GREY, decode, open_image
from pfedlms.data.pool import Constants, Pool, normalised
from pfedlms.errors import DataError

_PARTS = ("train", "test", "val", "valid", "validation")


def read_folder(path: Path, size: int = 0, mean: Constants = None, std: Constants = None) -> Pool:
    """All images under `path`, train and test pooled, normalised by `mean` and `std`, or by those of their own
    channels; classes are the folders' names in alphabetical order.

    Grey or colour as the first image is; the others are converted. All must have one size, or are resized to `size` x
    `size` pixels.
    """
    classes = _classes(path)
    names = tuple(sorted(classes))
    files = [file for name in names for file in classes[name]]
    labels = np.repeat(np.arange(len(names)), [len(classes[name]) for name in names])
    with open_image(files[0], str(files[0])) as first:
        shape = (1 if first.mode in GREY else 3, size or first.height, size or first.width)
    raw = decode(files, list(map(str, files)), shape, resize=size > 0)
    x, mean, std = normalised(raw, mean, std)
    return Pool(x, labels, len(names), names, mean=mean, std=std)


def _classes(path: Path) -> dict[str, list[Path]]:
    """The image files of every class, in the order of their names, those of train first."""
    if not path.is_dir():
        raise DataError(
            f"data.dataset: {path} is no folder; folder:PATH names one with a folder of images for each class"
        )
    inside = _folders(path)
    # A class may be called train; only a folder that holds folders is a part.
    parts = [path / name for name in _PARTS if name in inside and _folders(path / name)]
    others = [name for name in inside if path / name not in parts]
    if parts and others:
        raise DataError(
            f"{path}: got {parts[0].name}/ with folders in it beside {others[0]}/, expected classes, or "
            f"{', '.join(_PARTS)} with classes in them; move {others[0]}/ elsewhere"
        )
    classes: dict[str, list[Path]] = {}
    for part in parts or [path]:
        for name in _folders(part):
            classes.setdefault(name, []).extend(_images(part / name))
    if not classes:
        raise DataError(f"{path}: got no folders in it, expected one of images for each class")
    for name, files in classes.items():
        if not files:
            raise DataError(f"{path}: the class {name!r} has no image that Pillow reads; remove its folder")
    return classes


def _folders(path: Path) -> list[str]:
    try:
        return sorted(each.name for each in path.iterdir() if each.is_dir() and not each.name.startswith("."))
    except OSError as error:
        _refuse(error)


def _images(folder: Path) -> list[Path]:
    """Files whose ending names a format of Pillow's, also in folders below; without hidden ones."""
    with extra("images"):
        from PIL.Image import registered_extensions
    known = registered_extensions()
    # Unlike a glob, os.walk reports a folder that may not be read.
    below = sorted(Path(root, name) for root, _, names in os.walk(folder, onerror=_refuse) for name in names)
    found = (file for file in below if file.suffix.lower() in known and file.is_file())
    return [file for file in found if not any(part.startswith(".") for part in file.relative_to(folder).parts)]


def _refuse(error: OSError) -> NoReturn:
    raise DataError(f"{error.filename}: cannot be read ({error.strerror}); allow it, or remove it") from error
