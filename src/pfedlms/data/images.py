"""Image files to pixels, by Pillow."""

from __future__ import annotations

from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pfedlms.data.extra import extra
from pfedlms.errors import DataError

GREY = {"1", "L", "LA"}
_BYTES = GREY | {"P", "PA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr"}
"""Pillow's modes of at most 8 bits per channel: pixels of other modes would be cut."""


def decode(
    files: Sequence[Path | bytes], called: Sequence[str], shape: tuple[int, int, int], resize: bool = False
) -> NDArray[np.uint8]:
    """Images `[n, *shape]` as (channels, height, width), converted to grey or colour. All must have the size that
    `shape` has, or with `resize` are brought to it (bilinear, proportions not kept). `called` is for errors."""
    channels, height, width = shape
    with extra("images"):
        from PIL.Image import Resampling
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
