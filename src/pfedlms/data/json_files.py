"""Clients of their own in JSON: LEAF's files, and lines of objects."""

from __future__ import annotations

import gzip
import json
import zlib
from pathlib import Path

from pfedlms.data.columns import Columns
from pfedlms.data.formats import contents
from pfedlms.errors import DataError


def read_leaf(path: Path) -> Columns:
    """`{"users": [...], "user_data": {user: {"x": [...], "y": [...]}}}`, the layout of the LEAF benchmark."""
    try:
        held = json.loads(contents(path))["user_data"]
        x, y = ([sample for own in held.values() for sample in own[part]] for part in ("x", "y"))
        clients = [user for user, own in held.items() for _ in own["y"]]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(
            f"{path}: not LEAF's JSON ({type(error).__name__}: {error}), expected user_data with x and y for each user"
        ) from error
    return {"x": x, "y": y, "client": clients}


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
            columns[name].append(value)
    return columns
