"""Images: decoding files with Pillow, folders with one folder per class, and normalisation.

Decoded pixels are cached, so that only the first run waits for the decoder. A cached copy is an `.npz` file, named by
the SHA-256 of the bytes it was decoded from and of how that was done. Zip files carry checksums, so damage is noticed.
The cache may be deleted at any time.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import warnings
import zipfile
from collections.abc import Sequence
from contextlib import suppress
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pfedlms.data.disk import explain_missing_package, read_contents
from pfedlms.data.pool import Constants, Pool
from pfedlms.errors import DataError, DataWarning

_GREY_MODES = {"1", "L", "LA"}
_BYTE_MODES = _GREY_MODES | {"P", "PA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr"}
"""Pillow's modes with at most 8 bits per channel. Other modes would lose bits."""
_SPLITS = ("train", "test", "val", "valid", "validation")
Shape = tuple[int, int, int]
"""Channels, height and width."""
Files = Sequence[Path | bytes]
"""Image files, as paths or as their bytes."""


def decode(files: Files, names: Sequence[str], shape: Shape, resize: bool = False) -> NDArray[np.uint8]:
    """Images `[n, *shape]`, converted to grey or colour. All must have the size of `shape`, or `resize` brings them to
    it (bilinear, proportions not kept). `names` are for error messages. A cached copy that cannot be read is made
    again."""
    with explain_missing_package("images"):
        import PIL
    digest = hashlib.sha256(f"images 1, {shape}, Pillow {PIL.__version__}, resized {resize}".encode())
    for file in files:
        digest.update(hashlib.sha256(file if isinstance(file, bytes) else read_contents(file)).digest())
    user_cache = os.environ.get("XDG_CACHE_HOME", "")  # the standard ignores a relative path
    cache = os.environ.get("PFEDLMS_CACHE") or Path(user_cache if os.path.isabs(user_cache) else "~/.cache", "pfedlms")
    path = Path(os.path.expanduser(cache), f"{digest.hexdigest()}.npz")
    unreadable = suppress(OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile)
    with unreadable, open(path, "rb") as copy, np.load(copy, allow_pickle=False) as arrays:
        return np.asarray(arrays["images"])
    images = decode_uncached(files, names, shape, resize)
    temporary = path.with_suffix(f".{secrets.token_hex(8)}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(temporary, "xb") as written:
            np.savez(written, images=images)
        os.replace(temporary, path)  # readers see a complete copy or none
    except OSError as error:
        temporary.unlink(missing_ok=True)
        problem = f"{path.parent}: cannot be written ({error.strerror}), so images will be decoded again next time"
        warnings.warn(f"{problem}; PFEDLMS_CACHE names another folder", stacklevel=3)
    return images


def decode_uncached(files: Files, names: Sequence[str], shape: Shape, resize: bool) -> NDArray[np.uint8]:
    """Like `decode`, without the cache."""
    channels, height, width = shape
    in_colour: list[str] = []
    pixels = np.empty((len(files), height, width, channels), dtype=np.uint8)
    for row, file, name in zip(pixels, files, names, strict=True):
        image = _open_image(file, name)
        if not resize and image.size != (width, height):
            raise DataError(
                f"{name}: got an image of {image.width}x{image.height} pixels, expected {width}x{height}; replace it, "
                "or resize those of a folder: --set data.image_size=32"
            )
        in_colour += [name] if channels == 1 and image.mode not in _GREY_MODES else []
        image = image.convert("L" if channels == 1 else "RGB")
        image = image.resize((width, height), 2) if resize else image  # 2: bilinear
        row[:] = np.asarray(image).reshape(height, width, channels)
    if in_colour:
        warnings.warn(
            f"{in_colour[0]}: is in colour, as are {len(in_colour)} of {len(files)} images, but the first image is "
            "grey, so all become grey",
            DataWarning,
            stacklevel=2,
        )
    return np.ascontiguousarray(pixels.transpose(0, 3, 1, 2))


def _open_image(file: Path | bytes, name: str) -> Any:
    """The image, loaded. Errors name it as `name`."""
    with explain_missing_package("images"):
        from PIL import Image
    try:
        with Image.open(BytesIO(file) if isinstance(file, bytes) else file) as image:
            image.load()
    except Exception as error:  # Pillow raises almost anything on damaged bytes
        reason = str(error).partition(" <")[0]  # without the address of a buffer
        raise DataError(f"{name}: no image that Pillow can decode ({reason}); replace it") from error
    if image.mode not in _BYTE_MODES:
        raise DataError(f"{name}: got an image of mode {image.mode}, expected 8 bits per channel; convert it first")
    return image


# --- folders ---


def read_folder(path: Path, size: int = 0, mean: Constants = None, std: Constants = None) -> Pool:
    """The pool of all images under PATH/CLASS/…, or under PATH/train/CLASS/… and PATH/test/CLASS/… together, normalised
    by `mean` and `std`, or by those of their own channels. Classes are the folders' names in alphabetical order.

    All images become grey or colour, as the first one is. All must have one size, or are resized to `size` x `size`
    pixels.
    """
    classes = _files_by_class(path)
    names = tuple(sorted(classes))
    files = [file for name in names for file in classes[name]]
    labels = np.repeat(np.arange(len(names)), [len(classes[name]) for name in names])
    first = _open_image(files[0], str(files[0]))
    shape = (1 if first.mode in _GREY_MODES else 3, size or first.height, size or first.width)
    x, mean, std = normalise(decode(files, list(map(str, files)), shape, size > 0), mean, std)
    return Pool(x, labels, len(names), names, mean=mean, std=std)


def _files_by_class(path: Path) -> dict[str, list[Path]]:
    """The image files of each class, ordered by name, those of train first."""
    if not path.is_dir():
        raise DataError(f"data.dataset: {path} is no folder; folder:PATH names one with a folder of images per class")
    folders = _subfolders(path)
    # A class may be called train: only a folder that holds folders is a split.
    splits = [name for name in _SPLITS if name in folders and _subfolders(path / name)]
    if splits and len(splits) < len(folders):
        raise DataError(f"{path}: got {splits[0]}/ with folders in it beside other folders, expected splits or classes")
    classes: dict[str, list[Path]] = {}
    for split in splits or [""]:
        for name in _subfolders(path / split):
            classes.setdefault(name, []).extend(_image_files(path / split / name))
    if empty := [name for name, files in classes.items() if not files]:
        raise DataError(f"{path}: the class {empty[0]!r} has no image that Pillow reads; remove its folder")
    if not classes:
        raise DataError(f"{path}: got no folders in it, expected one of images for each class")
    return classes


def _subfolders(path: Path) -> list[str]:
    _, names, _ = next(os.walk(path, onerror=_refuse))
    return sorted(name for name in names if not name.startswith("."))


def _image_files(folder: Path) -> list[Path]:
    """All files below `folder` whose ending Pillow knows, without hidden files and folders."""
    with explain_missing_package("images"):
        from PIL.Image import registered_extensions
    endings = registered_extensions()
    # Unlike a glob, os.walk reports folders that cannot be read.
    every = sorted(Path(root, name) for root, _, names in os.walk(folder, onerror=_refuse) for name in names)
    files = [file for file in every if file.suffix.lower() in endings and file.is_file()]
    return [file for file in files if not any(part.startswith(".") for part in file.relative_to(folder).parts)]


def _refuse(error: OSError) -> None:
    raise DataError(f"{error.filename}: cannot be read ({error.strerror}); allow it, or remove it") from error


# --- normalisation ---


def normalise(
    raw: NDArray[np.uint8], mean: Constants = None, std: Constants = None, scale: float = 255.0
) -> tuple[NDArray[np.float32], Constants, Constants]:
    """Images `[n, channels, height, width]` as x = (raw / scale − mean) / std, channel by channel; and the constants
    used, which are the images' own unless they are given."""
    if mean is None or std is None:
        mean, std = _statistics(raw)
    if len(mean) != raw.shape[1]:
        raise DataError(f"data.mean: got {len(mean)} numbers, expected {raw.shape[1]}, one per channel of the images")
    centre, spread = (np.array(values, dtype=np.float32).reshape(-1, 1, 1) for values in (mean, std))
    x = raw.astype(np.float32)
    x /= np.float32(scale)
    x -= centre
    x /= spread
    return x, mean, std


def check_constants(mean: Sequence[float] | None, std: Sequence[float] | None) -> tuple[Constants, Constants]:
    """`mean` and `std`, validated; None if they are empty."""
    centre, spread = (tuple(map(float, () if values is None else values)) for values in (mean, std))
    if len(centre) != len(spread) or not np.isfinite([*centre, *spread]).all() or min(spread, default=1) <= 0:
        raise DataError(
            f"data.mean, data.std: got {centre} and {spread}, expected as many of each, one per channel, finite and "
            "data.std above 0; give both or leave both out"
        )
    return centre or None, spread or None


def _statistics(raw: NDArray[np.uint8]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of each channel of images `[n, channels, height, width]`, divided by 255.

    Both come from sums of whole numbers, so that they are the same on every machine. The deviation of a channel with a
    single value is 1.
    """
    mean, std = [], []
    for channel in raw.swapaxes(0, 1):
        total, first = channel.size, int(channel.sum(dtype=np.int64))
        second = sum(
            int(np.square(image, dtype=np.int64).sum()) for image in channel
        )  # image by image: a copy of all is large
        mean.append(first / total / 255)
        std.append((max(total * second - first**2, 0) ** 0.5 / total / 255) or 1.0)
    return tuple(mean), tuple(std)
