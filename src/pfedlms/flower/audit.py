"""An audit log: one JSON object per line, only ever appended to, each with the SHA-256 of the line before it.

A line that was changed or removed is found by `verify`; lines at the end that were cut off are not, so send the file to
a log host as well where that matters.
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
    """Write one line and make it durable."""
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor = os.open(file, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
    with os.fdopen(descriptor, "rb+") as log:
        fcntl.flock(log, fcntl.LOCK_EX)
        line = {"time": datetime.now(UTC).isoformat(timespec="milliseconds"), "event": event, **fields}
        log.write(json.dumps({**line, "before": _last(log)}, ensure_ascii=True).encode() + b"\n")
        log.flush()
        os.fsync(log.fileno())


def verify(file: Path) -> int:
    """How many lines a log has; UsageError names the first that does not fit the one before it."""
    before, count = "", 0
    for count, line in enumerate(file.read_bytes().splitlines(), 1):
        try:
            named = json.loads(line)["before"]
        except (ValueError, KeyError, TypeError) as error:
            raise UsageError(f"{file}: line {count} is not a line of an audit log") from error
        if named != before:
            raise UsageError(f"{file}: line {count} names {named!r} as the line before it, which has {before!r}")
        before = hashlib.sha256(line).hexdigest()
    return count


def _last(log: Any) -> str:
    """SHA-256 of the last line; empty at the beginning."""
    end, back = log.seek(0, os.SEEK_END), 4096
    while True:
        log.seek(max(0, end - back))
        lines = log.read().splitlines()
        if len(lines) > 1 or back >= end:
            return hashlib.sha256(lines[-1]).hexdigest() if lines else ""
        back *= 2
