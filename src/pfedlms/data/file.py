"""One file with samples, labels and perhaps clients: arrays (`.npz`), or rows with named columns (`.csv`, `.tsv`,
`.parquet`; the last needs the extra `parquet`).

Columns are features but for the label, called `label`, `class`, `target` or `y`, and the client, called `client`,
`user` or `client_id`; the first of these that is there. Arrays are `x`, `samples` or `images`, then `y`, `labels` or
`label`, and `client` or `clients`. Case does not matter. Classes and clients are the values found, in their order.
Features and arrays are taken as they are, but images of whole bytes are normalised as those of a folder.
"""

from __future__ import annotations

import csv
import warnings
import zipfile
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pfedlms.data.pool import Constants, Pool, Samples, normalised, numbered
from pfedlms.errors import DataError, did_you_mean

Columns = Mapping[str, Any]
"""Sequences or arrays by name."""
SUFFIXES = (".npz", ".csv", ".tsv", ".parquet")
_LABELS, _CLIENTS = ("label", "class", "target", "y"), ("client", "user", "client_id")
_ARRAYS, _ARRAY_LABELS, _ARRAY_CLIENTS = ("x", "samples", "images"), ("y", "labels", "label"), ("client", "clients")


def read_file(path: Path, label: str = "", client: str = "", mean: Constants = None, std: Constants = None) -> Pool:
    """The samples of `path`; `label` and `client` name the columns (or arrays) of the class and the client where they
    are called otherwise."""
    readers = dict(zip(SUFFIXES, (_read_arrays, _read_csv, _read_csv, _read_parquet), strict=True))
    if path.suffix.lower() not in readers:
        raise DataError(f"data.dataset: got file:{path}, expected a file that ends in {', '.join(readers)}")
    if not path.is_file():
        raise DataError(f"data.dataset: {path} is no file; file:PATH names one")
    columns = readers[path.suffix.lower()](path)
    if path.suffix.lower() != ".npz":
        pool = _from_columns(path, columns, label, client)
    else:
        pool = _from_arrays(path, columns, label, client, mean, std)
    if mean is not None and pool.mean is None:
        raise DataError(f"data.mean: got {mean}, but {path} holds no images of bytes, which alone are normalised")
    return pool


def _from_columns(path: Path, columns: Columns, label: str, client: str) -> Pool:
    labels = _chosen(path, columns, label, _LABELS, "label_column")
    clients = _chosen(path, columns, client, _CLIENTS, "owner_column")
    features = [name for name in columns if name not in (labels, clients)]
    for name in features if client else ():
        if name.strip().lower() in _CLIENTS:
            warnings.warn(
                f"{path}: data.owner_column is {client!r}, so the column {name!r} is a feature like any other; take it "
                "out of the file if that is not meant",
                stacklevel=2,
            )
    if not features or not len(columns[labels]):
        raise DataError(f"{path}: got {len(columns[labels])} rows of {len(features)} features, expected at least one")
    x = np.stack([_feature(path, name, columns[name]) for name in features], axis=1)
    return _pool(path, x, labels, columns[labels], clients, columns.get(clients))


def _from_arrays(path: Path, arrays: Columns, label: str, client: str, mean: Constants, std: Constants) -> Pool:
    samples = _chosen(path, arrays, "", _ARRAYS, "")
    labels = _chosen(path, arrays, label, _ARRAY_LABELS, "label_column")
    clients = _chosen(path, arrays, client, _ARRAY_CLIENTS, "owner_column")
    columns = {name: _vector(path, name, arrays[name]) for name in (labels, clients) if name}
    x = np.asarray(arrays[samples])
    if x.ndim < 2 or x.dtype.kind not in "fiub":
        raise DataError(
            f"{path}: got {samples} of shape {x.shape} and type {x.dtype}, expected numbers, a row a sample"
        )
    for name, column in columns.items():
        if len(column) != len(x) or not len(x):
            raise DataError(
                f"{path}: got {len(x)} {samples} and {len(column)} {name}, expected as many and at least one"
            )
    if x.dtype == np.uint8 and x.ndim in (3, 4):
        x, mean, std = normalised(_channels_first(x), mean, std)
    else:
        mean = std = None
    pool = _pool(path, x, labels, columns[labels], clients, columns.get(clients))
    return replace(pool, mean=mean, std=std)


def _pool(path: Path, x: Samples, label: str, labels: Any, client: str, clients: Any) -> Pool:
    y, names = numbered(_complete(path, label, labels))
    if any("." in name for name in names) and all(map(_finite, names)):
        raise DataError(
            f"{path}: got {names[-1]} in {label!r}, expected class numbers or names; name another column with --set "
            "data.label_column=COLUMN, or round to classes first; numbers to be predicted as they are need a loss, "
            "which is given in Python: pfedlms.run((x, y), model, loss=…)"
        )
    if clients is None:
        return Pool(x, y, names)
    owner, owners = numbered(_complete(path, client, clients))
    return Pool(x, y, names, owner, owners)


def _chosen(path: Path, columns: Columns, asked: str, known: Sequence[str], what: str) -> str:
    """The column that is meant; "" where there is no client."""
    if asked:
        if asked not in columns:
            raise DataError(
                f"data.{what}: got {asked!r}, but {path} has no such column; {did_you_mean(asked, columns)}"
            )
        return asked
    lowered = {name.strip().lower(): name for name in columns}
    found = next((lowered[name] for name in known if name in lowered), "")
    if not found and what != "owner_column":
        shown = ", ".join([*list(columns)[:10], *["…"] * (len(columns) > 10)])
        remedy = f"; name it with --set data.{what}=COLUMN" * bool(what)
        raise DataError(f"{path}: got {shown}, expected one called {' or '.join(known)}{remedy}")
    return found


def _complete(path: Path, name: str, values: Any) -> Any:
    for row, value in enumerate(values):
        if value is None or value != value or (isinstance(value, str) and not value.strip()):  # NaN is not itself
            raise DataError(f"{path}: got no {name} in sample {row} (from 0), expected one in each; fill it in")
    return values


def _feature(path: Path, name: str, values: Any) -> NDArray[np.float32]:
    """A column of numbers; the first that is none is named."""
    try:
        with np.errstate(over="ignore"):
            column = np.asarray(values, dtype=np.float32)
    except (TypeError, ValueError):
        column = None
    if column is not None and column.ndim == 1 and np.isfinite(column).all():
        return column
    row, value = next((row, value) for row, value in enumerate(values) if not _finite(value))
    raise DataError(
        f"{path}, column {name!r}, sample {row} (from 0): got {value!r}, expected a finite number; turn all into "
        "numbers, or leave the column out"
    )


def _finite(value: Any) -> bool:
    try:
        with np.errstate(over="ignore"):
            return isfinite(np.float32(value))
    except (TypeError, ValueError):
        return False


def _vector(path: Path, name: str, array: Any) -> NDArray[Any]:
    array = np.asarray(array)
    if array.size != len(array) or array.ndim > 2:
        raise DataError(f"{path}: got {name} of shape {array.shape}, expected a vector, one a sample")
    return np.asarray(array.reshape(-1), dtype=str if array.dtype.kind == "S" else array.dtype)


def _channels_first(images: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """`[n, h, w]`, `[n, h, w, channels]` or `[n, channels, h, w]` as the last; 1 and 3 are numbers of channels."""
    if images.ndim == 3:
        return images[:, np.newaxis]
    last = images.shape[3] in (1, 3) and images.shape[1] not in (1, 3)
    return np.ascontiguousarray(images.transpose(0, 3, 1, 2)) if last else images


def _read_arrays(path: Path) -> Columns:
    try:
        with open(path, "rb") as file, np.load(file, allow_pickle=False) as arrays:
            return {name: _array(path, arrays, name) for name in arrays.files}
    except (OSError, ValueError, EOFError, TypeError, zipfile.BadZipFile, zlib.error) as error:
        reason = str(error).strip().partition("\n")[0]
        raise DataError(f"{path}: cannot be read as arrays ({reason}); write it with numpy.savez") from error


def _array(path: Path, arrays: Any, name: str) -> NDArray[Any]:
    try:
        return np.asarray(arrays[name])
    except ValueError as error:
        if "Object arrays" not in str(error):
            raise
        raise DataError(
            f"{path}: got {name} as Python objects (dtype object), expected numbers or texts; write it again with "
            f"numpy.savez(…, {name}=numpy.array({name}.tolist()))"
        ) from error


def _read_csv(path: Path) -> Columns:
    """Texts by column; the separator is the one of comma, semicolon and tab that the header has most of."""
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            header = file.readline()
            file.seek(0)
            rows = csv.reader(file, delimiter=max(",;\t", key=header.count))
            names = [name.strip() for name in next(rows, [])]
            _each_once(path, names)
            columns = list(zip(*_of_length(path, rows, len(names)), strict=True)) or [()] * len(names)
            return dict(zip(names, columns, strict=True))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path}: cannot be read ({error}); expected text in UTF-8 with a header") from error


def _of_length(path: Path, rows: Any, length: int) -> Iterable[list[str]]:
    for row in rows:
        if row and len(row) != length:
            raise DataError(f"{path}, line {rows.line_num}: got {len(row)} values, expected {length} as in the header")
        if row:
            yield row


def _each_once(path: Path, names: list[str]) -> None:
    if not names:
        raise DataError(f"{path}: got no columns, expected a header and rows")
    if doubled := [name for name in names if names.count(name) > 1]:
        raise DataError(f"{path}: got two columns called {doubled[0]!r}, expected each name once")


def _read_parquet(path: Path) -> Columns:
    try:
        import pyarrow as pa
        from pyarrow import parquet
    except ImportError as error:
        raise DataError(
            f"data.dataset: Parquet files are read with pyarrow ({error}); "
            "install it with: pip install 'pfedlms[parquet]'"
        ) from error
    try:
        with parquet.ParquetFile(path, page_checksum_verification=True) as file:
            _each_once(path, file.schema_arrow.names)
            table = file.read()
        return {name: table[name].to_numpy() for name in table.column_names}
    except (OSError, ValueError, pa.ArrowException) as error:
        reason = str(error).strip().partition("\n")[0]
        raise DataError(f"{path}: not a whole Parquet file ({reason}); write it again") from error
