"""IDX files of unsigned bytes, gzipped or not: the form in which MNIST and Fashion-MNIST are published."""

from __future__ import annotations

import gzip
import struct
import zlib
from collections.abc import Iterator, Sequence
from math import prod
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pfedlms.data.formats import Format, Part, contents, wanted
from pfedlms.errors import DataError


def idx_format(*folders: str) -> Format:
    stems = [f"{part}-{kind}-ubyte" for part in ("train", "t10k") for kind in ("images-idx3", "labels-idx1")]
    dotted = [(stem, stem.replace("-idx", ".idx")) for stem in stems]
    names = [tuple(name + end for name in both for end in ("", ".gz")) for both in dotted]
    return Format("IDX files", (*folders, ""), wanted(*names), read)


def read(files: Sequence[Path]) -> Iterator[Part]:
    for images, labels in zip(files[::2], files[1::2], strict=True):
        yield f"{images} and {labels.name}", read_idx(images, 3)[:, np.newaxis], read_idx(labels, 1).astype(np.int64)


def read_idx(path: Path, axes: int) -> NDArray[np.uint8]:
    """00 00 08 and the number of axes; the length of each, 4 bytes, big endian; then the numbers, a byte each."""
    content = contents(path)
    try:
        content = gzip.decompress(content) if path.suffix == ".gz" else content
        magic, *shape = struct.unpack_from(f">{axes + 1}I", content)
    except (OSError, EOFError, zlib.error, struct.error) as error:
        raise DataError(f"{path}: not a whole IDX file ({error}); fetch the file again") from error
    got, header = len(content), 4 * (axes + 1)
    if magic != 0x800 + axes:
        raise DataError(f"{path}: not an IDX file of bytes with {axes} axes; fetch the file again")
    if got - header != prod(shape):
        raise DataError(
            f"{path}: got {got - header} bytes of data, expected {prod(shape)} for shape {tuple(shape)}; fetch the "
            "file again"
        )
    return np.frombuffer(content, dtype=np.uint8, offset=header).reshape(shape)
