"""Images in folders named as their classes: PATH/cat/1.png, PATH/dog/2.jpg, …, or PATH/train/cat/1.png,
PATH/test/cat/2.png, …, which are pooled. Needs Pillow (extra `images`)."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from pfedlms.data.cache import decoded
from pfedlms.data.pool import Constants, Pool, normalised
from pfedlms.errors import DataError

_PARTS = ("train", "test", "val", "valid", "validation")
_GREY = {"1", "L", "LA"}
_BYTES = _GREY | {"P", "PA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr"}
"""Pillow's modes of at most 8 bits a channel: what has more would be cut."""


def read_folder(path: Path, size: int = 0, mean: Constants = None, std: Constants = None) -> Pool:
    """All images under `path`, train and test pooled, normalised by `mean` and `std`, or by those of their own
    channels; classes are the folders' names in alphabetical order.

    Grey or colour as the first image is; the others are converted. All must have one size, or are resized to `size` x
    `size` pixels (bilinear, proportions not kept). What was decoded is kept for the next time (see `data.cache`).
    """
    classes = _classes(path)
    names = tuple(sorted(classes))
    files = [file for name in names for file in classes[name]]
    labels = np.repeat(np.arange(len(names)), [len(classes[name]) for name in names])
    mode, width, height = _first(files[0], size)
    shape = (1 if mode == "L" else 3, height, width)
    digests = b"".join(_digest(file) for file in files) + labels.astype("<i8").tobytes()
    how = f"folder 1, Pillow {_version()}, resized {size}"
    raw, labels = decoded(digests, how, shape, lambda: (_pixels(files, mode, shape, size), labels))
    x, mean, std = normalised(raw, mean, std)
    return Pool(x, labels, names, mean=mean, std=std)


def _classes(path: Path) -> dict[str, list[Path]]:
    """The image files of every class, in the order of their names, those of train first."""
    if not path.is_dir():
        raise DataError(
            f"data.dataset: {path} is no folder; folder:PATH names one with a folder of images for each class"
        )
    inside = _folders(path)
    # A class may be called train; what holds folders is a part.
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
        _not_read(error)


def _images(folder: Path) -> list[Path]:
    """Files whose ending names a format of Pillow's, in folders below too; hidden ones are none."""
    known = _pillow().registered_extensions()
    # Unlike a glob, not silent of a folder that may not be read.
    below = sorted(Path(root, name) for root, _, names in os.walk(folder, onerror=_not_read) for name in names)
    found = (file for file in below if file.suffix.lower() in known and file.is_file())
    return [file for file in found if not any(part.startswith(".") for part in file.relative_to(folder).parts)]


def _first(file: Path, size: int) -> tuple[str, int, int]:
    """Mode, width and height that all images will have."""
    with _opened(file) as image:
        mode = "L" if image.mode in _GREY else "RGB"
        return (mode, size, size) if size else (mode, image.width, image.height)


def _pixels(files: Sequence[Path], mode: str, shape: tuple[int, int, int], size: int) -> NDArray[np.uint8]:
    """`[n, *shape]`."""
    image_of = _pillow()
    channels, height, width = shape
    pixels = np.empty((len(files), height, width, channels), dtype=np.uint8)
    for place, file in enumerate(files):
        with _opened(file) as image:
            if not size and image.size != (width, height):
                raise DataError(
                    f"{file}: got {image.width}x{image.height} pixels, expected {width}x{height} as {files[0].name}; "
                    "resize all of them with --set data.image_size=32, or another size"
                )
            try:
                made = image.convert(mode)
                made = made.resize((width, height), image_of.Resampling.BILINEAR) if size else made
            except Exception as error:  # Pillow raises almost anything on damaged bytes
                raise _damaged(file, error) from error
            pixels[place] = np.asarray(made).reshape(height, width, channels)
    return np.ascontiguousarray(pixels.transpose(0, 3, 1, 2))


def _opened(file: Path) -> Any:
    try:
        image = _pillow().open(file)
    except Exception as error:
        raise _damaged(file, error) from error
    if image.mode not in _BYTES:
        image.close()
        raise DataError(f"{file}: got mode {image.mode}, expected 8 bits a channel; convert the image first")
    return image


def _digest(file: Path) -> bytes:
    try:
        return hashlib.sha256(file.read_bytes()).digest()
    except OSError as error:
        _not_read(error)


def _not_read(error: OSError) -> NoReturn:
    raise DataError(f"{error.filename}: cannot be read ({error.strerror}); allow it, or remove it") from error


def _damaged(file: Path, error: Exception) -> DataError:
    return DataError(f"{file}: no image that Pillow can decode ({error}); replace or remove the file")


def _version() -> str:
    import PIL

    return str(PIL.__version__)


def _pillow() -> Any:
    """Pillow's module `Image`, which knows all formats."""
    try:
        from PIL import Image
    except ImportError as error:
        raise DataError(
            f"data.dataset: images in folders are read with pillow ({error}); "
            "install it with: pip install 'pfedlms[images]'"
        ) from error
    return Image
