"""Files with named columns: a new format is a reader and a line in `READERS`. What columns mean is decided in
`data.file`."""

from __future__ import annotations

import csv
import gzip
import json
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pfedlms.data.formats import Format, Part, contents, parquet_file, wanted
from pfedlms.errors import DataError, reason

Columns = Mapping[str, Any]
"""Sequences or arrays by name, one entry per sample."""


def read_npz(path: Path) -> Columns:
    try:
        with open(path, "rb") as file, np.load(file, allow_pickle=False) as arrays:
            return {name: arrays[name] for name in arrays.files}
    except (OSError, ValueError, EOFError, TypeError, zipfile.BadZipFile, zlib.error) as error:
        raise DataError(
            f"{path}: cannot be read as arrays ({reason(error)}); write it with numpy.savez, and Python objects as "
            "numpy.array(objects.tolist()) first"
        ) from error


def read_npy(path: Path) -> Columns:
    """All arrays of the folder by the names of their files, mapped: only the samples that are used are read."""
    try:
        return {each.stem: np.load(each, mmap_mode="r", allow_pickle=False) for each in path.parent.glob("*.npy")}
    except (OSError, ValueError, EOFError) as error:
        raise DataError(f"{path}: arrays of its folder cannot be read ({error}); write each with numpy.save") from error


def read_csv(path: Path) -> Columns:
    """Texts by column; the separator is the one of comma, semicolon and tab that the header has most of."""
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            header = file.readline()
            file.seek(0)
            rows = csv.reader(file, delimiter=max(",;\t", key=header.count))
            names = [name.strip() for name in next(rows, [])]
            _check_names(path, names)
            columns = list(zip(*_rows_of_length(path, rows, len(names)), strict=True)) or [()] * len(names)
            return dict(zip(names, columns, strict=True))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path}: cannot be read ({error}); expected text in UTF-8 with a header") from error


def _rows_of_length(path: Path, rows: Any, length: int) -> Iterator[list[str]]:
    for row in rows:
        if row and len(row) != length:
            raise DataError(f"{path}, line {rows.line_num}: got {len(row)} values, expected {length} as in the header")
        if row:
            yield row


def _check_names(path: Path, names: list[str]) -> None:
    if not names:
        raise DataError(f"{path}: got no columns, expected a header and rows")
    if doubled := [name for name in names if names.count(name) > 1]:
        raise DataError(f"{path}: got two columns called {doubled[0]!r}, expected each name once")


def read_parquet(path: Path) -> Columns:
    with parquet_file(path) as file:
        _check_names(path, file.schema_arrow.names)
        table = file.read()
    nested = {each.name for each in table.schema if each.type.num_fields}
    return {name: table[name].to_pylist() if name in nested else table[name].to_numpy() for name in table.column_names}


def read_leaf(path: Path) -> Columns:
    """`{"users": [...], "user_data": {user: {"x": [...], "y": [...]}}}`, the layout of the LEAF benchmark. Where x are
    texts, each with the characters that follow it as y, they are put together to the running text of each user."""
    try:
        held = json.loads(contents(path))["user_data"]
        x, y = ([sample for own in held.values() for sample in own[part]] for part in ("x", "y"))
        if x and all(isinstance(each, str) for each in (*x, *y)):
            return {"client": list(held), "text": [_running_text(own["x"], own["y"]) for own in held.values()]}
        clients = [user for user, own in held.items() for _ in own["y"]]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(
            f"{path}: not LEAF's JSON ({type(error).__name__}: {error}), expected user_data with x and y for each user"
        ) from error
    return {"x": x, "y": y, "client": clients}


def _running_text(inputs: list[str], targets: list[str]) -> str:
    """The text that windows were cut from one character after another; a window that does not continue the one before
    begins on a new line."""
    pieces: list[str] = []
    before = ""
    for window, following in zip(inputs, targets, strict=True):
        whole = window + following
        continues = before and window == before[len(before) - len(window) :]
        pieces.append(following if continues else "\n" * bool(pieces) + whole)
        before = whole
    return "".join(pieces)


def read_json_lines(path: Path) -> Columns:
    """One object per line, each with the same keys, such as `{"client": "a", "x": [1, 2], "y": 0}`."""
    content = contents(path)
    try:
        text = (gzip.decompress(content) if path.suffix.lower() == ".gz" else content).decode()
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise DataError(
            f"{path}: cannot be read ({error}); expected text in UTF-8, gzipped if it ends in .gz"
        ) from error
    columns: dict[str, list[object]] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise DataError(f"{path}, line {number}: not JSON ({error}); expected one object per line") from error
        columns = columns or {name: [] for name in row} if isinstance(row, dict) else columns
        if not isinstance(row, dict) or set(row) != set(columns):
            keys = ", ".join(columns) or "keys"
            raise DataError(f"{path}, line {number}: got {str(row)[:60]}, expected an object with {keys}")
        for name, value in row.items():
            if columns[name] and isinstance(value, str) != isinstance(columns[name][0], str):
                kind = "no text" if isinstance(columns[name][0], str) else "text"
                raise DataError(f"{path}, line {number}: got {name} that is {kind}, unlike in the lines before")
            columns[name].append(value)
    return columns


def text_format(name: str, *files: str) -> Format:
    """Of a data set of text: lines with `client` and `text`, in one file that may be called in several ways."""
    return Format("lines of JSON", (name, ""), wanted(files), _read_texts)


def _read_texts(files: Sequence[Path]) -> Iterator[Part]:
    columns = read_json_lines(files[0])
    if not {"client", "text"} <= set(columns):
        raise DataError(f"{files[0]}: got {', '.join(columns) or 'nothing'}, expected client and text in every line")
    yield str(files[0]), columns["text"], columns["client"]


READERS: dict[str, Callable[[Path], Columns]] = {
    ".npz": read_npz,
    ".csv": read_csv,
    ".tsv": read_csv,
    ".parquet": read_parquet,
    ".json": read_leaf,
    ".jsonl": read_json_lines,
    ".jsonl.gz": read_json_lines,
    ".npy": read_npy,
}
"""By the ending of a file's name."""


def read_columns(path: Path) -> Columns:
    """The columns of a file, by the reader of its format."""
    reader = next((READERS[ending] for ending in READERS if path.name.lower().endswith(ending)), None)
    if reader is None:
        raise DataError(f"data.dataset: got file:{path}, expected a file that ends in {', '.join(READERS)}")
    if not path.is_file():
        raise DataError(f"data.dataset: {path} is no file; file:PATH names one")
    return reader(path)
