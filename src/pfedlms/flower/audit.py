"""An audit log: lines of JSON that are only ever appended, each with the SHA-256 of the line before it.

`verify` finds a line that was changed or removed, but not lines that were cut off at the end. If that matters, send the
log to another host as well.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pfedlms.errors import UsageError


def append(file: Path, event: str, **fields: Any) -> None:
    """Write one line and flush it to the disk."""
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor = os.open(file, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
    with os.fdopen(descriptor, "rb+") as log:
        fcntl.flock(log, fcntl.LOCK_EX)
        line = {"time": datetime.now(UTC).isoformat(timespec="milliseconds"), "event": event, **fields}
        before = _last_line_hash(log)
        log.write(json.dumps({**line, "before": before}, ensure_ascii=True).encode() + b"\n")
        log.flush()
        os.fsync(log.fileno())


def verify(file: str | Path) -> int:
    """The number of lines of a log; UsageError names the first line that does not fit the one before it."""
    before, count = "", 0
    for count, line in enumerate(Path(file).read_bytes().splitlines(), 1):
        try:
            recorded = json.loads(line)["before"]
        except (ValueError, KeyError, TypeError) as error:
            raise UsageError(f"{file}: line {count} is not a line of an audit log") from error
        if recorded != before:
            raise UsageError(f"{file}: line {count} names {recorded!r} as the line before it, which has {before!r}")
        before = hashlib.sha256(line).hexdigest()
    return count


def _last_line_hash(log: Any) -> str:
    """SHA-256 of the last line; empty if there is none. A full disk or a kill may have cut off the write of the line
    after it: that part is removed."""
    size, tail = log.seek(0, os.SEEK_END), 4096
    while True:
        log.seek(max(0, size - tail))
        *lines, part = log.read().split(b"\n")
        if len(lines) > 1 or tail >= size:
            break
        tail *= 2
    if is_json(part):  # somebody edited the file and left out the last newline
        log.write(b"\n")
        lines.append(part)
    elif part:
        log.truncate(size - len(part))
    return hashlib.sha256(lines[-1]).hexdigest() if lines else ""


def is_json(line: bytes) -> bool:
    try:
        json.loads(line)
    except ValueError:
        return False
    return True
