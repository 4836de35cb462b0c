"""Images: files to pixels, by Pillow; folders named as their classes; and pixels to normalised samples.

Decoded pixels are kept, so that only the first run waits for the decoder. A copy is an `.npz` file, named by the
SHA-256 of the bytes it was decoded from and of how that was done. Zip files carry checksums, so damage is noticed. The
whole folder of copies may be deleted at any time.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import warnings
import zipfile
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from pfedlms.data.disk import contents, extra
from pfedlms.data.pool import Constants, Pool
from pfedlms.errors import DataError

_GREY = {"1", "L", "LA"}
_BYTES = _GREY | {"P", "PA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr"}
"""Pillow's modes of at most 8 bits per channel: pixels of other modes would be cut."""
_PARTS = ("train", "test", "val", "valid", "validation")
Shape = tuple[int, int, int]
"""Channels, height and width."""


def decode(
    files: Sequence[Path | bytes], called: Sequence[str], shape: Shape, resize: bool = False
) -> NDArray[np.uint8]:
    """Images `[n, *shape]`, converted to grey or colour. All must have the size that `shape` has, or with `resize` are
    brought to it (bilinear, proportions not kept). `called` is for errors. A copy that cannot be read or written costs
    a warning and the time to decode."""
    with extra("images"):
        import PIL
    digest = hashlib.sha256(f"images 1, {shape}, Pillow {PIL.__version__}, resized {resize}".encode())
    for file in files:
        digest.update(hashlib.sha256(file if isinstance(file, bytes) else contents(file)).digest())
    shared = os.environ.get("XDG_CACHE_HOME", "")  # which counts only where it is absolute
    cache = os.environ.get("PFEDLMS_CACHE") or Path(shared if os.path.isabs(shared) else "~/.cache", "pfedlms")
    path = Path(os.path.expanduser(cache), f"{digest.hexdigest()}.npz")
    elsewhere = "PFEDLMS_CACHE names another folder"
    try:
        with open(path, "rb") as copy, np.load(copy, allow_pickle=False) as kept:
            return np.asarray(kept["images"])
    except FileNotFoundError:
        pass
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        warnings.warn(f"{path}: cannot be read ({error}), so images are decoded again; {elsewhere}", stacklevel=3)
    images = decode_anew(files, called, shape, resize)
    temporary = path.with_suffix(f".{secrets.token_hex(8)}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(temporary, "xb") as made:
            np.savez(made, images=images)
        os.replace(temporary, path)  # readers see a whole copy or none
    except OSError as error:
        temporary.unlink(missing_ok=True)
        problem = f"{path.parent}: cannot be written ({error.strerror}), so images will be decoded again next time"
        warnings.warn(f"{problem}; {elsewhere}", stacklevel=3)
    return images


def decode_anew(files: Sequence[Path | bytes], called: Sequence[str], shape: Shape, resize: bool) -> NDArray[np.uint8]:
    """As `decode`, without copies."""
    channels, height, width = shape
    pixels = np.empty((len(files), height, width, channels), dtype=np.uint8)
    for place, file in enumerate(files):
        image = _image(file, called[place])
        if not resize and image.size != (width, height):
            raise DataError(
                f"{called[place]}: got an image of {image.width}x{image.height} pixels, expected {width}x{height}; "
                "replace it, or resize the images of a folder with --set data.image_size=32 (image_size in Python)"
            )
        image = image.convert("L" if channels == 1 else "RGB")
        image = image.resize((width, height), 2) if resize else image  # 2: bilinear
        pixels[place] = np.asarray(image).reshape(height, width, channels)
    return np.ascontiguousarray(pixels.transpose(0, 3, 1, 2))


def _image(file: Path | bytes, called: str) -> Any:
    with extra("images"):
        from PIL import Image
    try:
        with Image.open(BytesIO(file) if isinstance(file, bytes) else file) as image:
            image.load()
    except Exception as error:  # Pillow raises almost anything on damaged bytes
        reason = str(error).partition(" <")[0]  # without the address of a buffer
        raise DataError(
            f"{called}: no image that Pillow can decode ({reason}); replace it or fetch the file again"
        ) from error
    if image.mode not in _BYTES:
        raise DataError(
            f"{called}: got an image of mode {image.mode}, expected 8 bits per channel; convert the image first"
        )
    return image


# --- folders ---


def read_folder(path: Path, size: int = 0, mean: Constants = None, std: Constants = None) -> Pool:
    """All images under PATH/CLASS/…, or under PATH/train/CLASS/…, PATH/test/CLASS/…, which are pooled; normalised by
    `mean` and `std`, or by those of their own channels. Classes are the folders' names in alphabetical order.

    Grey or colour as the first image is; the others are converted. All must have one size, or are resized to `size` x
    `size` pixels.
    """
    classes = _classes(path)
    names = tuple(sorted(classes))
    files = [file for name in names for file in classes[name]]
    labels = np.repeat(np.arange(len(names)), [len(classes[name]) for name in names])
    first = _image(files[0], str(files[0]))
    shape = (1 if first.mode in _GREY else 3, size or first.height, size or first.width)
    x, mean, std = normalised(decode(files, list(map(str, files)), shape, size > 0), mean, std)
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
    if empty := [name for name, files in classes.items() if not files]:
        raise DataError(f"{path}: the class {empty[0]!r} has no image that Pillow reads; remove its folder")
    return classes


def _folders(path: Path) -> list[str]:
    _, names, _ = next(os.walk(path, onerror=_refuse))
    return sorted(name for name in names if not name.startswith("."))


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


# --- normalisation ---


def normalised(
    raw: NDArray[np.uint8], mean: Constants = None, std: Constants = None, scale: float = 255.0
) -> tuple[NDArray[np.float32], Constants, Constants]:
    """x = (raw / scale − mean) / std of images `[n, channels, height, width]`, channel by channel, and the constants:
    those given, or the images' own."""
    if mean is None or std is None:
        mean, std = _statistics(raw)
    if len(mean) != raw.shape[1]:
        raise DataError(f"data.mean: got {len(mean)} numbers, expected {raw.shape[1]}, one per channel of the images")
    centre, spread = (np.array(each, dtype=np.float32).reshape(-1, 1, 1) for each in (mean, std))
    x = raw.astype(np.float32)
    x /= np.float32(scale)
    x -= centre
    x /= spread
    return x, mean, std


def constants(mean: Sequence[float] | None, std: Sequence[float] | None) -> tuple[Constants, Constants]:
    """`mean` and `std` as given, checked; empty ones count as not given."""
    centre, spread = (tuple(map(float, () if each is None else each)) for each in (mean, std))
    if len(centre) != len(spread) or not np.isfinite([*centre, *spread]).all() or min(spread, default=1) <= 0:
        raise DataError(
            f"data.mean, data.std: got {centre} and {spread}, expected as many of each, one per channel, finite and "
            "data.std above 0; give both or leave both out"
        )
    return centre or None, spread or None


def _statistics(raw: NDArray[np.uint8]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of each channel of images `[n, channels, height, width]`, as shares of 255.

    Both come from sums of whole numbers, so that they are the same on every machine. A channel with one value only
    is divided by 1.
    """
    mean, std = [], []
    for channel in raw.swapaxes(0, 1):
        total, first = channel.size, int(channel.sum(dtype=np.int64))
        second = sum(int(np.square(image, dtype=np.int64).sum()) for image in channel)  # one by one: a copy is large
        mean.append(first / total / 255)
        std.append((max(total * second - first**2, 0) ** 0.5 / total / 255) or 1.0)
    return tuple(mean), tuple(std)
