"""Which data sets a folder contains, and whether they are complete."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

from pfedlms.data.sources import DATASETS, found_files, read_found, read_speakers
from pfedlms.errors import DataError, DataWarning

Row = dict[str, Any]
SOUND = ("complete", "partial", "larger")
"""States in which nothing hints at damage."""


def check(name: str, directory: str | Path | None = None) -> Row:
    """The state of the data set `name` in `directory`, or in PFEDLMS_DATA, read as a run reads it.

    | state | |
    |---|---|
    | `complete` | as many samples as were published |
    | `partial`, `larger` | fewer or more; a run uses them, and warns |
    | `doubtful` | as many, but not the same; a run uses them, and warns |
    | `missing` | nothing of it is there |
    | `incomplete` | a file is missing |
    | `damaged` | a file cannot be read, or is of another data set |

    `published` says whether all samples are those published, in whatever format; None where that is not known.
    """
    source = DATASETS[name]
    row = {"dataset": name, "state": "complete", "format": "in the package", "where": "", "samples": source.samples,
           "expected": source.samples, "published": None, "problems": []}  # fmt: skip
    if not source.needs_dir:
        return row
    row |= {"format": "", "samples": 0}
    try:
        found = found_files(name, directory)
    except DataError as error:
        state = "damaged" if isinstance(error.__cause__, OSError) else "missing"
        return row | {"state": state, "problems": [str(error)]}
    row |= {"format": found.format.kind, "where": str(found.files[0].parent)}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            count = len(read_speakers(name, found) if source.is_text else read_found(name, found)[1])
        except DataError as error:
            return row | {"state": "incomplete" if found.missing else "damaged", "problems": [str(error)]}
    problems = [str(each.message) for each in caught if issubclass(each.category, DataWarning)]
    state = "partial" if count < source.samples else "larger" if count > source.samples else "complete"
    if state == "complete" and problems:
        state = "doubtful"
    known = None if source.published is None else state == "complete"
    return row | {"state": state, "samples": count, "published": known, "problems": problems}
