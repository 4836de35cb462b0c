"""Files with named columns or arrays: `.npz`, `.csv`, `.tsv`, `.parquet`. Each reader returns columns by name; what
they mean is decided in `data.file`."""

from __future__ import annotations

import csv
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from pfedlms.data.extra import extra
from pfedlms.errors import DataError

Columns = Mapping[str, Any]
"""Sequences or arrays by name, one entry per sample."""


def read_npz(path: Path) -> Columns:
    try:
        with open(path, "rb") as file, np.load(file, allow_pickle=False) as arrays:
            return {name: arrays[name] for name in arrays.files}
    except (OSError, ValueError, EOFError, TypeError, zipfile.BadZipFile, zlib.error) as error:
        reason = str(error).strip().partition("\n")[0]
        raise DataError(
            f"{path}: cannot be read as arrays ({reason}); write it with numpy.savez, and Python objects as "
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
    with extra("Parquet files"):
        import pyarrow as arrow
        from pyarrow import parquet
    try:
        with parquet.ParquetFile(path, page_checksum_verification=True) as file:
            _check_names(path, file.schema_arrow.names)
            table = file.read()
        nested = arrow.types.is_nested
        return {
            name: table[name].to_pylist() if nested(table[name].type) else table[name].to_numpy()
            for name in table.column_names
        }
    except (OSError, ValueError, arrow.ArrowException) as error:
        reason = str(error).strip().partition("\n")[0]
        raise DataError(f"{path}: not a whole Parquet file ({reason}); write it again") from error
