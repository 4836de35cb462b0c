"""What a folder has of the data sets: which files, whole or not, and whether they are those that were published."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

from pfedlms.data.formats import Format, chosen
from pfedlms.data.published import is_published
from pfedlms.data.sources import DATASETS, check_raw, folder_of
from pfedlms.errors import DataError

Row = dict[str, Any]


def check(name: str, directory: str | Path | None = None) -> Row:
    """The state of the data set `name` in `directory`, or where PFEDLMS_DATA says: `complete`, `missing` (nothing of it
    is there), `incomplete` (a file is missing) or `damaged`; `problems` has a sentence for every file that is at fault.
    What is complete has been read as a run reads it. `published`: all its files are, byte for byte, the published ones;
    None where that cannot be told, as of Parquet files."""
    source = DATASETS[name]
    row = {"dataset": name, "state": "complete", "format": "", "where": "", "samples": 0, "published": None,
           "problems": []}  # fmt: skip
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
    return {**row, "state": "damaged" if problems else "complete"}


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
