"""Clients of their own in JSON: LEAF's files, and lines of objects."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from pfedlms.data.columns import Columns
from pfedlms.data.formats import Format, Part, contents, wanted
from pfedlms.errors import DataError


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
