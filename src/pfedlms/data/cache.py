"""Decoded copies of image files, so that only the first run waits for the decoder.

A copy is named by the SHA-256 of the very bytes it was decoded from and of how that was done, so it cannot be out of
date: other bytes have another name. The whole folder may be deleted at any time.

    copy = SHA-256 of its name and of all that follows, 32 bytes · labels, int64 little endian · pixels, a byte each
"""

from __future__ import annotations

import hashlib
import os
import secrets
import warnings
from collections.abc import Callable
from math import prod
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

Raw = tuple[NDArray[np.uint8], NDArray[np.int64]]
"""Images `[n, channels, height, width]` as they were published, and their labels `[n]`."""
_DIGEST = hashlib.sha256().digest_size


def decoded(content: bytes, how: str, shape: tuple[int, int, int], decode: Callable[[], Raw]) -> Raw:
    """What `decode` makes of `content`, images of `shape`, or the copy that is kept of it. `how` names everything else
    that the result depends on. A copy that cannot be read or written costs a warning and the time to decode."""
    name = hashlib.sha256(f"{how} {shape} ".encode() + hashlib.sha256(content).digest()).hexdigest()
    try:
        path = _folder() / name
    except RuntimeError as error:  # a user without a home
        _warn(f"no folder for decoded images ({error})")
        return decode()
    kept = _read(path, shape)
    if kept is None:
        kept = decode()
        _write(path, *kept)
    return kept


def _folder() -> Path:
    """PFEDLMS_CACHE, or pfedlms in XDG_CACHE_HOME, which counts only where it is absolute, or in ~/.cache."""
    if named := os.environ.get("PFEDLMS_CACHE"):
        return Path(named)
    shared = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (shared if shared.is_absolute() else Path.home() / ".cache") / "pfedlms"


def _read(path: Path, shape: tuple[int, int, int]) -> Raw | None:
    try:
        content = np.fromfile(path, dtype=np.uint8)
    except FileNotFoundError:
        return None
    except OSError as error:
        _warn(f"{path}: cannot be read ({error.strerror}), so images are decoded again")
        return None
    rows, rest = divmod(len(content) - _DIGEST, 8 + prod(shape))
    body = content[_DIGEST:]
    if rows < 1 or rest or _digest(path, body) != content[:_DIGEST].tobytes():
        _warn(f"{path}: is damaged, so images are decoded again")
        return None
    return body[8 * rows :].reshape(rows, *shape), body[: 8 * rows].view("<i8").astype(np.int64)


def _write(path: Path, images: NDArray[np.uint8], labels: NDArray[np.int64]) -> None:
    """Under a name of its own first: readers see a whole copy or none, and processes that write the same one do not
    meet. It need not be durable, because it is checked when it is read."""
    body = np.concatenate([labels.astype("<i8").view(np.uint8), images.reshape(-1)])
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with open(temporary, "xb") as file:
                file.write(_digest(path, body))
                file.write(body.data)
            os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
    except OSError as error:
        _warn(f"{path.parent}: cannot be written ({error.strerror}), so images will be decoded again next time")


def _digest(path: Path, body: NDArray[np.uint8]) -> bytes:
    """Of the name too, so that a copy under another's name is found out."""
    digest = hashlib.sha256(path.name.encode())
    digest.update(body.data)
    return digest.digest()


def _warn(problem: str) -> None:
    warnings.warn(f"{problem}; PFEDLMS_CACHE names another folder", stacklevel=2)
