"""Decoded copies of image files, so that only the first run waits for the decoder.

A copy is an `.npz` file, named by the SHA-256 of the bytes it was decoded from and of how that was done: other bytes
have another name. Zip files carry checksums, so damage is noticed. The whole folder may be deleted at any time.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np

from pfedlms.data.formats import Raw


def decoded(how: str, content: bytes, decode: Callable[[], Raw]) -> Raw:
    """What `decode` makes of `content`, or the copy kept of it; `how` names everything else that the result depends
    on. A copy that cannot be read or written costs a warning and the time to decode."""
    shared = os.environ.get("XDG_CACHE_HOME", "")  # which counts only where it is absolute
    folder = os.environ.get("PFEDLMS_CACHE") or Path(shared if os.path.isabs(shared) else "~/.cache", "pfedlms")
    name = hashlib.sha256(how.encode() + hashlib.sha256(content).digest()).hexdigest()
    path = Path(os.path.expanduser(folder), f"{name}.npz")
    try:
        with open(path, "rb") as file, np.load(file, allow_pickle=False) as kept:
            return kept["images"], kept["labels"]
    except FileNotFoundError:
        pass
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        _warn(f"{path}: cannot be read ({error}), so images are decoded again")
    images, labels = decode()
    temporary = path.with_suffix(f".{secrets.token_hex(8)}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(temporary, "xb") as made:
            np.savez(made, images=images, labels=labels)
        os.replace(temporary, path)  # readers see a whole copy or none
    except OSError as error:
        temporary.unlink(missing_ok=True)
        _warn(f"{path.parent}: cannot be written ({error.strerror}), so images will be decoded again next time")
    return images, labels


def _warn(problem: str) -> None:
    warnings.warn(f"{problem}; PFEDLMS_CACHE names another folder", stacklevel=4)
