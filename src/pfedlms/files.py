"""Atomic writing: a file is written completely or not at all."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from io import BufferedWriter, FileIO
from pathlib import Path
from typing import Any, BinaryIO

DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Error numbers of a full disk."""


class _RawFile(FileIO):
    """Remembers why a write failed: torch.save reports a full disk only as an error of its zip writer."""

    write_error: OSError | None = None

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            self.write_error = error
            raise


def write_text(path: Path, content: str) -> None:
    write_atomically(path, lambda file: file.write(content.encode()))


def write_atomically(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Write beside the file, make it durable, then put it in place: readers see the old content or the new, never a
    part."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        raw = _RawFile(temporary, "wb")
        try:
            with BufferedWriter(raw) as file:
                write(file)
                file.flush()
                os.fsync(file.fileno())
        except RuntimeError as error:
            raise raw.write_error or error from error
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def write_failure(file: object, error: Exception) -> str:
    """The message for a file that the user has named and that could not be written."""
    room = "make room or " * (getattr(error, "errno", None) in DISK_FULL)
    return f"{file}: cannot be written ({getattr(error, 'strerror', None) or error}); {room}name another file"
