"""What a folder has of the data sets: which files, whole or not, and whether they are those that were published."""

from __future__ import annotations

import hashlib
import warnings
from pathlib import Path
from typing import Any

from pfedlms.data.cache import Raw
from pfedlms.data.formats import Format, chosen, miscounted, twins
from pfedlms.data.published import DOWNLOADS, is_published
from pfedlms.data.sources import DATASETS, check_raw, folder_of
from pfedlms.errors import DataError, DataWarning

Row = dict[str, Any]
SOUND = ("complete", "partial", "larger")
"""States in which nothing hints at damage."""


def check(name: str, directory: str | Path | None = None) -> Row:
    """The state of the data set `name` in `directory`, or where PFEDLMS_DATA says: `complete` (as many samples as were
    published, `expected`), `partial` (fewer, but a run takes them), `larger`, `doubtful` (a file is as long as the
    published one and not the same, or the same as another; a run takes them), `missing` (nothing of it is there),
    `incomplete` (a file is missing) or `damaged` (or may not be read); `problems` has a sentence for every file that is
    at fault. All but the last three have been read as a run reads them, which warns of the same problems. `published`:
    all its files are, byte for byte, the published ones; None where that cannot be told, as of most Parquet files.
    `also` has a sentence for every other format that is there, and not read."""
    source = DATASETS[name]
    row = {"dataset": name, "state": "complete", "format": "", "where": "", "samples": 0, "expected": source.samples,
           "published": None, "problems": [], "also": []}  # fmt: skip
    if not source.needs_dir:
        return {**row, "format": "in the package", "samples": source.samples}
    try:
        folder = folder_of(name, directory)
        format, found = chosen(name, source.formats, folder)
    except DataError as error:
        state = "damaged" if isinstance(error.__cause__, OSError) else "missing"
        return {**row, "state": state, "problems": [str(error)]}
    row |= {"format": format.kind, "where": str(found.files[0].parent)}
    parts, faults, doubts = _read(format, found.files)
    if found.problems:
        return {**row, "state": "damaged" if faults else "incomplete", "problems": [*found.problems, *doubts, *faults]}
    raw = None if faults else _joined(name, format, parts, faults)
    if raw is None:
        return {**row, "state": "damaged", "problems": [*doubts, *faults]}
    samples, told = len(raw[1]), [is_published(name, file) for file in found.files]
    doubts += twins(found.files)
    row |= {"samples": samples, "published": None if None in told else all(told),
            "problems": [*doubts, *miscounted(name, source.samples, samples, found.files, parts)],
            "also": _others(name, format, folder, raw)}  # fmt: skip
    counted = "complete" if samples == source.samples else "partial" if samples < source.samples else "larger"
    return {**row, "state": "doubtful" if doubts else counted}


def in_another_form(name: str, directory: str | Path) -> Row | None:
    """What `check` says of a data set that is there as a whole, but not in the files that are downloaded."""
    formats, published = DATASETS[name].formats, {file.name for file in DOWNLOADS[name]}
    try:
        files = chosen(name, formats, Path(directory))[1].files
    except DataError:
        return None
    row = check(name, directory) if not published & {file.name for file in files} else None
    return row if row and row["state"] == "complete" else None


def _read(format: Format, files: tuple[Path, ...]) -> tuple[list[Any], list[str], list[str]]:
    """What was read of the files, what is wrong with each that could not be, and what a run would warn of."""
    parts, faults = [], []
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for file in files:
            try:
                parts.append(format.read(file))
            except DataError as error:
                faults.append(str(error))
    return parts, faults, [str(each.message) for each in told if issubclass(each.category, DataWarning)]


def _joined(name: str, format: Format, parts: list[Any], faults: list[str]) -> Raw | None:
    """All samples, or None and one more of `faults`."""
    try:
        raw, labels = format.join(parts)
        check_raw(name, raw, labels)
        return raw, labels
    except DataError as error:
        faults.append(str(error))
        return None


def _others(name: str, read: Format, folder: Path, raw: Raw) -> list[str]:
    """What else there is as a whole, and whether it holds the same samples as what is read, in whatever order."""
    notes = []
    for format in DATASETS[name].formats:
        found = format.find(folder)
        if format is read or not found.files or found.problems:
            continue
        parts, faults, _ = _read(format, found.files)
        other = None if faults else _joined(name, format, parts, faults)
        same = other is not None and _digests(*other) == _digests(*raw)
        what = faults[0] if other is None else "the same samples" if same else "other samples; keep one of the two"
        notes.append(f"not read are {format.kind} in {found.files[0].parent}: {what}")
    return notes


def _digests(*raw: Any) -> list[bytes]:
    """One for every sample and its label, sorted."""
    return sorted(hashlib.sha256(image.tobytes() + bytes([label])).digest() for image, label in zip(*raw, strict=True))
