"""What a folder has of the data sets: which files, whole or not, and whether they are those that were published."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

from pfedlms.data.formats import Format, chosen
from pfedlms.data.published import DOWNLOADS, is_published
from pfedlms.data.sources import DATASETS, check_raw, folder_of
from pfedlms.errors import DataError

Row = dict[str, Any]
READABLE = ("complete", "partial", "larger")
"""States in which a run takes what is there."""


def check(name: str, directory: str | Path | None = None) -> Row:
    """The state of the data set `name` in `directory`, or where PFEDLMS_DATA says: `complete` (as many samples as were
    published, `expected`), `partial` (fewer, but a run takes them), `larger`, `missing` (nothing of it is there),
    `incomplete` (a file is missing) or `damaged`; `problems` has a sentence for every file that is at fault. What is
    complete or partial has been read as a run reads it. `published`: all its files are, byte for byte, the published
    ones; None where that cannot be told, as of most Parquet files."""
    source = DATASETS[name]
    row = {"dataset": name, "state": "complete", "format": "", "where": "", "samples": 0, "expected": source.samples,
           "published": None, "problems": []}  # fmt: skip
    if not source.needs_dir:
        return {**row, "format": "in the package", "samples": source.samples}
    try:
        format, found = chosen(name, source.formats, folder_of(name, directory))
    except DataError as error:
        return {**row, "state": "missing", "problems": [str(error)]}
    row |= {"format": format.kind, "where": str(found.files[0].parent)}
    told = [is_published(name, file) for file in found.files]
    if found.problems:
        damaged = _read(name, format, found.files, join=False)[1]
        return {**row, "state": "damaged" if damaged else "incomplete", "problems": [*found.problems, *damaged]}
    samples, problems = _read(name, format, found.files, join=True)
    row |= {"samples": samples, "published": None if None in told else all(told), "problems": problems}
    if problems:
        return {**row, "state": "damaged"}
    if samples == source.samples:
        return row
    lacking = f"{name}: {samples:,} samples, published were {source.samples:,}; a run takes what is there"
    return {**row, "state": "partial" if samples < source.samples else "larger", "problems": [lacking]}


def in_another_form(name: str, directory: str | Path) -> Row | None:
    """What `check` says of a data set that is there as a whole, but not in the files that are downloaded."""
    formats, published = DATASETS[name].formats, {file.name for file in DOWNLOADS[name]}
    try:
        files = chosen(name, formats, Path(directory))[1].files
    except DataError:
        return None
    row = check(name, directory) if not published & {file.name for file in files} else None
    return row if row and row["state"] == "complete" else None


def _read(name: str, format: Format, files: tuple[Path, ...], join: bool) -> tuple[int, list[str]]:
    """The number of samples, if they could be put together, and what is wrong with each file."""
    parts, problems = [], []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # `published` says it
        for file in files:
            try:
                parts.append(format.read(file))
            except DataError as error:
                problems.append(str(error))
        if problems or not join:
            return 0, problems
        try:
            raw, labels = format.join(parts)
            check_raw(name, raw, labels)
        except DataError as error:
            return 0, [str(error)]
    return len(labels), []
