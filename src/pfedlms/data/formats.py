"""The formats in which users have one data set: how each is found, read file by file, and put together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pfedlms.data.cache import Raw
from pfedlms.errors import DataError


@dataclass(frozen=True)
class Found:
    """What there is of one format's files."""

    files: tuple[Path, ...]
    """In the order in which they are put together."""
    problems: tuple[str, ...] = ()
    """Why they cannot be used, a sentence each: a file is missing, or of another set."""


@dataclass(frozen=True)
class Format:
    """One way in which a data set is published."""

    kind: str
    """What `pfedlms data check` and errors call it."""
    find: Callable[[Path], Found]
    """In a folder and in those below it where such files usually lie."""
    read: Callable[[Path], Any]
    """One file, checked; raises DataError that names it."""
    join: Callable[[Sequence[Any]], Raw]
    """What was read of all files as images and labels, those of train first."""


def read_files(name: str, formats: Sequence[Format], directory: Path) -> Raw:
    """Images and labels of the data set `name` from what `directory` has of it."""
    format, found = chosen(name, formats, directory)
    if found.problems:
        raise DataError(found.problems[0])
    return format.join([format.read(file) for file in found.files])


def chosen(name: str, formats: Sequence[Format], directory: Path) -> tuple[Format, Found]:
    """The first format all of whose files are there; if there is none, the first of which there are some. DataError
    where there is nothing at all."""
    there = [(format, found) for format in formats if (found := format.find(directory)).files]
    if not there:
        nothing = f"nothing of {name} is in {directory} or where it usually lies below it"
        raise DataError(
            f"data.dir: {nothing if directory.is_dir() else f'{directory} is no folder'}; looked for "
            f"{', '.join(format.kind for format in formats)}; point --data-dir at the folder that holds it, or fetch "
            f"it: pfedlms data download {name} --data-dir {directory}"
        )
    return next((each for each in there if not each[1].problems), there[0])


def of_one_folder(bases: Sequence[Path], names: Sequence[str]) -> Found:
    """Files of these names, all of them from one folder: the first of `bases` that has most."""
    files = max(([base / name for name in names if (base / name).is_file()] for base in bases), key=len)
    if not files:
        return Found(())
    lacking = [name for name in names if files[0].parent / name not in files]
    problems = [f"{files[0].parent}: {name} is missing beside {files[0].name}; fetch it" for name in lacking]
    return Found(tuple(files), tuple(problems))


def of_one_file(bases: Sequence[Path], name: str) -> Found:
    """The first file of this name."""
    return Found(tuple(base / name for base in bases if (base / name).is_file())[:1])


def joined(parts: Sequence[Raw]) -> Raw:
    """One after the other."""
    images, labels = zip(*parts, strict=True)
    return np.concatenate(images), np.concatenate(labels)


def contents(path: Path) -> bytes:
    """All bytes of a file."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}); fetch the file again") from error
