"""Images in Parquet files, laid out as data hubs do: `train-00000-of-00002.parquet`, …, an image file's bytes a row.
Files in which a hub has written the names of classes are told apart by the first of them.

Needs the extra `parquet`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pfedlms.data.cache import Raw, decoded
from pfedlms.data.formats import Format, Found, contents, joined
from pfedlms.data.published import check_published
from pfedlms.errors import DataError

_IMAGES, _LABELS = ("img", "image"), ("label", "fine_label")
"""What the columns may be called; of several the first. CIFAR-100 has coarse labels, too."""
_NAMED = {
    "mnist": {"0"},
    "fmnist": {"T - shirt / top", "T-shirt/top"},
    "svhn": {"0"},
    "cifar10": {"airplane"},
    "cifar100": {"apple"},
}
"""What hubs call the first class."""
_SHARD = re.compile(r"-(\d{5})-of-(\d{5})(?:-[0-9a-f]+)?\.parquet")
_MODES = {1: "L", 3: "RGB"}
"""What Pillow calls images of that many channels."""
_BYTES = {"1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr"}
"""Its modes of at most 8 bits a channel: what has more would be cut."""


def parquet_format(name: str, hub: str, shape: tuple[int, int, int], classes: int) -> Format:
    """Images `[n, *shape]` and labels below `classes` of the data set `name`, in a directory, in its subfolder `name`,
    or below that in `hub`, as hubs call it, or `data`."""
    find = partial(_find, (name, f"{name}/{hub}", f"{name}/data"))
    return Format("Parquet files", find, partial(_read_shard, name, shape, classes), joined)


def _find(folders: Sequence[str], directory: Path) -> Found:
    bases = [*(directory / folder for folder in folders), directory]
    (train, problem), (test, other) = (_shards(bases, part) for part in ("train", "test"))
    return Found((*train, *test), tuple(each for each in (problem, other) if each))


def _shards(bases: Sequence[Path], part: str) -> tuple[list[Path], str]:
    """All files of one part, in their order, and why they cannot be used, if so."""
    for base in bases:
        named = {path: _SHARD.fullmatch(path.name.removeprefix(part)) for path in _listed(base)}
        found = sorted((match[1], match[2], path) for path, match in named.items() if match)
        if not found:
            continue
        total, problem = found[0][1], ""
        expected = [f"{number:05}" for number in range(int(total))]
        if missing := sorted(set(expected) - {number for number, _, _ in found}):
            problem = (
                f"{base}: {part}-{missing[0]}-of-{total}.parquet is missing, expected {int(total)} files of {part} "
                f"and got {len(found)}; fetch it"
            )
        elif [number for number, _, _ in found] != expected or any(each != total for _, each, _ in found):
            problem = (
                f"{base}: got {', '.join(path.name for _, _, path in found)}, expected {int(total)} files of {part}, "
                "each once; they are of more than one set, keep one of them"
            )
        return [path for _, _, path in found], problem
    return [], (
        f"data.dir: {part}-00000-of-….parquet is neither in {' nor in '.join(map(str, bases))}; point --data-dir at "
        "the folder that holds it"
    )


def _listed(folder: Path) -> list[Path]:
    """What is in a folder, if there is one; unlike a glob not silent of one that may not be read."""
    try:
        return list(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []


def _read_shard(name: str, shape: tuple[int, int, int], classes: int, path: Path) -> Raw:
    """One file. What was decoded is kept for the next time (see `data.cache`)."""
    try:
        import PIL
    except ImportError as error:
        raise _extra(error) from error
    content = contents(path)
    check_published(name, path, content)  # pages need not carry checksums
    how = f"parquet 2, {name}, Pillow {PIL.__version__}"
    return decoded(content, how, shape, partial(_decode, content, path, name, shape, classes))


def _decode(content: bytes, path: Path, name: str, shape: tuple[int, int, int], classes: int) -> Raw:
    """All rows of one file; `path` is what errors name."""
    files, column = _columns(content, path, name)
    for row, label in enumerate(column):
        if label is None or not 0 <= label < classes:
            raise _wrong(path, row, f"got label {label}, expected 0 to {classes - 1}")
    return _pixels(files, path, shape), np.array(column, dtype=np.int64)


def _columns(content: bytes, path: Path, name: str) -> tuple[list[bytes | None], list[int | None]]:
    """Image files and labels, a row each."""
    try:
        import pyarrow as pa
        from pyarrow import parquet
    except ImportError as error:
        raise _extra(error) from error
    try:
        with parquet.ParquetFile(pa.BufferReader(content), page_checksum_verification=True) as file:
            columns = {field.name: str(field.type) for field in file.schema_arrow}
            image, label = (next((each for each in known if each in columns), "") for known in (_IMAGES, _LABELS))
            _refuse_others(file.schema_arrow.metadata or {}, label, path, name)
            binary = re.match(r"struct<(.*, )?bytes: (large_)?binary\b", columns.get(image, ""))
            if not binary or not re.fullmatch(r"u?int\d+", columns.get(label, "")):
                raise DataError(
                    f"{path}: got columns {columns}, expected {' or '.join(_IMAGES)} (struct with bytes) and "
                    f"{' or '.join(_LABELS)} (whole numbers); the file is of another data set or layout"
                )
            table = file.read(columns=[f"{image}.bytes", label])
        files = [row and row["bytes"] for row in table[image].to_pylist()]
        labels = table[label].to_pylist()
    except (OSError, ValueError, KeyError, pa.ArrowException) as error:  # damaged names are no text, or come twice
        reason = str(error).strip().partition("\n")[0]
        raise DataError(f"{path}: not a whole Parquet file ({reason}); fetch the file again") from error
    if not files:
        raise DataError(f"{path}: got no rows, expected at least one; fetch the file again")
    return files, labels


def _refuse_others(metadata: dict[bytes, bytes], label: str, path: Path, name: str) -> None:
    """Where a hub has written the names of the classes: not if they are those of another data set."""
    try:
        first = json.loads(metadata[b"huggingface"])["info"]["features"][label]["names"][0]
    except (KeyError, IndexError, TypeError, ValueError):
        return
    others = [other for other, known in _NAMED.items() if first in known]
    if others and name not in others:
        raise DataError(
            f"{path}: its first class is {first!r}, as that of {others[0]}, expected a file of {name}; use --dataset "
            f"{others[0]}, or put the files of {name} there"
        )


def _pixels(files: list[bytes | None], path: Path, shape: tuple[int, int, int]) -> NDArray[np.uint8]:
    """Image files as `[n, *shape]`. One after another: Pillow holds Python's lock for most of the time that such small
    images take, so that threads were no faster."""
    from PIL import Image, UnidentifiedImageError

    channels, height, width = shape
    pixels = np.empty((len(files), height, width, channels), dtype=np.uint8)
    likely: tuple[str, ...] | None = None

    def opened(file: bytes) -> Any:
        """Tried first as what the image before was; to try all that Pillow knows takes almost as long as to decode."""
        try:
            return Image.open(BytesIO(file), formats=likely)
        except UnidentifiedImageError:
            return Image.open(BytesIO(file))

    for row, file in enumerate(files):
        if file is None:
            raise _wrong(path, row, "got no image, expected the bytes of one")
        try:
            with opened(file) as image:
                likely = (image.format,)
                if image.size != (width, height) or image.mode not in _BYTES:
                    raise _wrong(
                        path, row, f"got an image of {image.width}x{image.height} pixels, mode {image.mode}, expected "
                        f"{width}x{height} with 8 bits a channel",
                    )  # fmt: skip
                pixels[row] = np.asarray(image.convert(_MODES[channels])).reshape(height, width, channels)
        except DataError:
            raise
        except Exception as error:  # Pillow raises almost anything on damaged bytes
            reason = re.sub(r" <.*>", "", str(error))  # without the address of the buffer
            raise _wrong(path, row, f"got {len(file)} bytes that are no image Pillow can decode ({reason})") from error
    return np.ascontiguousarray(pixels.transpose(0, 3, 1, 2))


def _wrong(path: Path, row: int, what: str) -> DataError:
    return DataError(f"{path}, row {row} (from 0): {what}; fetch the file again, or it is of another data set")


def _extra(error: ImportError) -> DataError:
    return DataError(
        f"data.dataset: Parquet files are read with pyarrow and pillow ({error}); "
        "install them with: pip install 'pfedlms[parquet]'"
    )
