"""The formats in which users have one data set: how each is found, read file by file, and put together."""

from __future__ import annotations

import filecmp
import stat
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from pfedlms.data.cache import Raw
from pfedlms.data.published import samples_in
from pfedlms.errors import DataError, DataWarning


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
    """One file, checked; raises DataError that names it. A pair, of which the second has an entry a sample."""
    join: Callable[[Sequence[Any]], Raw]
    """What was read of all files as images and labels, those of train first."""


def read_files(name: str, formats: Sequence[Format], samples: int, directory: Path) -> Raw:
    """Images and labels of the data set `name` from what `directory` has of it; DataWarning where they can be used, but
    are not the `samples` that were published."""
    format, found = chosen(name, formats, directory)
    if found.problems:
        raise DataError(found.problems[0])
    parts = [format.read(file) for file in found.files]
    images, labels = format.join(parts)
    for doubt in (*twins(found.files), *miscounted(name, samples, len(labels), found.files, parts)):
        warnings.warn(doubt, DataWarning, stacklevel=2)
    return images, labels


def miscounted(name: str, published: int, samples: int, files: Sequence[Path], parts: Sequence[Any]) -> list[str]:
    """A sentence with the files that have more or fewer samples than was published, if they are not `published` in
    all; `parts` is what was read of them."""
    if samples == published:
        return []
    counted = [(file, len(part[1]), samples_in(file)) for file, part in zip(files, parts, strict=True)]
    wrong = [f"{file}: {count:,}{f' of {full:,}' if full else ''}" for file, count, full in counted if count != full]
    return [
        f"{name}: got {samples:,} samples, published were {published:,} ({', '.join(wrong)}); a run takes what is "
        f"there; unless that is meant, remove these files, then: pfedlms data download {name}"
    ]


def twins(files: Sequence[Path]) -> list[str]:
    """A sentence for every file that is another one under a second name: as many samples, but not the right ones."""
    return [
        f"{second}: is the same, byte for byte, as {first}; one of them is not what its name says, fetch it again"
        for first, second in combinations(files, 2)
        if filecmp.cmp(first, second, shallow=False)
    ]


def chosen(name: str, formats: Sequence[Format], directory: Path) -> tuple[Format, Found]:
    """The first format all of whose files are there; if there is none, the first of which there are some. DataError
    where there is nothing at all, or a folder may not be looked into."""
    try:
        there = [(format, found) for format in formats if (found := format.find(directory)).files]
    except OSError as error:
        raise DataError(
            f"{error.filename}: cannot be looked at ({error.strerror}); allow it to be read, or name another folder "
            "with --data-dir"
        ) from error
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
    files = max(([base / name for name in names if is_file(base / name)] for base in bases), key=len)
    if not files:
        return Found(())
    lacking = [name for name in names if files[0].parent / name not in files]
    problems = [f"{files[0].parent}: {name} is missing beside {files[0].name}; fetch it" for name in lacking]
    return Found(tuple(files), tuple(problems))


def of_one_file(bases: Sequence[Path], name: str) -> Found:
    """The first file of this name."""
    return Found(tuple(base / name for base in bases if is_file(base / name))[:1])


def is_file(path: Path) -> bool:
    """As `Path.is_file`, which in some versions of Python takes what may not be looked at for absent; here it is an
    OSError."""
    try:
        return stat.S_ISREG(path.stat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False


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
