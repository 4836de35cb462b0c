"""The formats in which a named data set may be on disk: how its files are found in a folder, and read."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pfedlms.errors import DataError, reason

Raw = tuple[NDArray[np.uint8], NDArray[np.int64]]
"""Images `[n, channels, height, width]` as they were published, and their labels `[n]`."""
Part = tuple[str, Any, Any]
"""What errors call it, images and labels, or texts and their clients. They are checked by the reader of the data set,
once for all formats."""
Find = Callable[[Sequence[str]], tuple[list[str], list[str]]]
"""From the names of all files in a folder: those of this format in order, and a sentence about each that is missing."""


@dataclass(frozen=True)
class Format:
    kind: str
    """What errors call it."""
    folders: tuple[str, ...]
    """Where its files may be, below the data directory."""
    find: Find
    read: Callable[[Sequence[Path]], Iterator[Part]]
    """The parts of the data set, those of train first; raises DataError that names the file."""


def wanted(*names: str | tuple[str, ...]) -> Find:
    """Finds files of these names; a tuple lists names that one file may have."""
    choices = [(name,) if isinstance(name, str) else name for name in names]

    def find(there: Sequence[str]) -> tuple[list[str], list[str]]:
        found = {each[0]: next((name for name in each if name in there), None) for each in choices}
        return [name for name in found.values() if name], [f"{each} is missing" for each in found if not found[each]]

    return find


def read_files(name: str, formats: Sequence[Format], directory: Path) -> tuple[Path, list[Part]]:
    """The data set `name` in the first format that is complete in one folder: that folder, and the parts. DataError
    where none is complete; of the folder with the most files it says what is missing."""
    best, lacking = list[Path](), ""
    for format in formats:
        for folder in (directory / each for each in format.folders):
            names, missing = format.find(_files_in(folder))
            files = [folder / each for each in names]
            if files and not missing:
                return folder, list(format.read(files))
            if len(files) > len(best):
                best, lacking = files, missing[0]
    if best:
        raise DataError(f"{best[0].parent}: {lacking} beside {best[0].name}; fetch it, or remove the others")
    nothing = f"nothing of {name} is in {directory} or where it usually is below it"
    raise DataError(
        f"data.dir: {nothing if directory.is_dir() else f'{directory} is no folder'}; looked for "
        f"{', '.join(format.kind for format in formats)}; point --data-dir at the folder that holds it, or fetch it: "
        f"pfedlms data download {name} --data-dir {directory}"
    )


def _files_in(folder: Path) -> list[str]:
    try:
        with os.scandir(folder) as entries:
            return sorted(entry.name for entry in entries if entry.is_file())
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise DataError(
            f"{folder}: cannot be read ({error.strerror}); allow it, or name another folder with --data-dir"
        ) from error


def contents(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}); allow it, or fetch the file again") from error


@contextmanager
def extra(what: str) -> Iterator[None]:
    """Around an import of a package of the extra `data`: turns ImportError into a DataError with the remedy."""
    try:
        yield
    except ImportError as error:
        remedy = "install what is missing with: pip install 'pfedlms[data]'"
        raise DataError(f"data: {what} need {error.name or error} ({error}); {remedy}") from error


@contextmanager
def parquet_file(path: Path) -> Iterator[Any]:
    """A Parquet file, opened; errors of Arrow become a DataError that names it."""
    with extra("Parquet files"):
        import pyarrow as arrow
        from pyarrow import parquet
    try:
        with parquet.ParquetFile(path, page_checksum_verification=True) as file:
            yield file
    except (OSError, ValueError, KeyError, arrow.ArrowException) as error:
        raise DataError(f"{path}: not a whole Parquet file ({reason(error)}); write or fetch the file again") from error
