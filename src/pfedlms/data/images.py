"""Image files to pixels, by Pillow. Decoded pixels are kept, so that only the first run waits for the decoder.

A copy is an `.npz` file, named by the SHA-256 of the bytes it was decoded from and of how that was done: other bytes
have another name. Zip files carry checksums, so damage is noticed. The whole folder may be deleted at any time.
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
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pfedlms.data.formats import contents, extra
from pfedlms.errors import DataError

GREY = {"1", "L", "LA"}
_BYTES = GREY | {"P", "PA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr"}
"""Pillow's modes of at most 8 bits per channel: pixels of other modes would be cut."""
Shape = tuple[int, int, int]


def decode(
    files: Sequence[Path | bytes], called: Sequence[str], shape: Shape, resize: bool = False
) -> NDArray[np.uint8]:
    """Images `[n, *shape]` as (channels, height, width), converted to grey or colour. All must have the size that
    `shape` has, or with `resize` are brought to it (bilinear, proportions not kept). `called` is for errors. A copy
    that cannot be read or written costs a warning and the time to decode."""
    with extra("images"):
        import PIL
    digest = hashlib.sha256(f"images 1, {shape}, Pillow {PIL.__version__}, resized {resize}".encode())
    for file in files:
        digest.update(hashlib.sha256(file if isinstance(file, bytes) else contents(file)).digest())
    path = _cache() / f"{digest.hexdigest()}.npz"
    try:
        with open(path, "rb") as copy, np.load(copy, allow_pickle=False) as kept:
            return np.asarray(kept["images"])
    except FileNotFoundError:
        pass
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        _warn(f"{path}: cannot be read ({error}), so images are decoded again")
    images = decode_anew(files, called, shape, resize)
    temporary = path.with_suffix(f".{secrets.token_hex(8)}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(temporary, "xb") as made:
            np.savez(made, images=images)
        os.replace(temporary, path)  # readers see a whole copy or none
    except OSError as error:
        temporary.unlink(missing_ok=True)
        _warn(f"{path.parent}: cannot be written ({error.strerror}), so images will be decoded again next time")
    return images


def _cache() -> Path:
    shared = os.environ.get("XDG_CACHE_HOME", "")  # which counts only where it is absolute
    folder = os.environ.get("PFEDLMS_CACHE") or Path(shared if os.path.isabs(shared) else "~/.cache", "pfedlms")
    return Path(os.path.expanduser(folder))


def _warn(problem: str) -> None:
    warnings.warn(f"{problem}; PFEDLMS_CACHE names another folder", stacklevel=4)


def decode_anew(files: Sequence[Path | bytes], called: Sequence[str], shape: Shape, resize: bool) -> NDArray[np.uint8]:
    """As `decode`, without copies."""
    from PIL.Image import Resampling

    channels, height, width = shape
    pixels = np.empty((len(files), height, width, channels), dtype=np.uint8)
    likely = None
    for place, file in enumerate(files):
        with open_image(file, called[place], likely) as image:
            # Pillow tries all formats it knows, which takes almost as long as to decode; so the last one comes first.
            likely = image.format
            if not resize and image.size != (width, height):
                raise DataError(
                    f"{called[place]}: got an image of {image.width}x{image.height} pixels, expected {width}x{height}; "
                    "replace it, or resize the images of a folder with --set data.image_size=32"
                )
            try:
                made = image.convert("L" if channels == 1 else "RGB")
                made = made.resize((width, height), Resampling.BILINEAR) if resize else made
            except Exception as error:  # Pillow raises almost anything on damaged bytes
                raise _damaged(called[place], error) from error
            pixels[place] = np.asarray(made).reshape(height, width, channels)
    return np.ascontiguousarray(pixels.transpose(0, 3, 1, 2))


def open_image(file: Path | bytes, called: str, likely: str | None = None) -> Any:
    with extra("images"):
        from PIL import Image, UnidentifiedImageError
    try:
        try:
            image = Image.open(BytesIO(file) if isinstance(file, bytes) else file, formats=[likely] if likely else None)
        except UnidentifiedImageError:
            image = Image.open(BytesIO(file) if isinstance(file, bytes) else file)
    except Exception as error:
        raise _damaged(called, error) from error
    if image.mode not in _BYTES:
        image.close()
        raise DataError(
            f"{called}: got an image of mode {image.mode}, expected 8 bits per channel; convert the image first"
        )
    return image


def _damaged(called: str, error: Exception) -> DataError:
    reason = str(error).partition(" <")[0]  # without the address of a buffer
    return DataError(f"{called}: no image that Pillow can decode ({reason}); replace it or fetch the file again")
