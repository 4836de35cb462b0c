"""Published files from their mirrors: what was begun is gone on with, and a file gets its name once it is whole and has
the published checksum."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPException, HTTPResponse
from io import FileIO
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from pfedlms.data.published import DOWNLOADS, Published, digest_of
from pfedlms.errors import DataError, DownloadError, did_you_mean

_TIMEOUT = 30.0
"""Seconds without a byte."""
_PART = 1 << 18


class Watch:
    """Hears how far a download is; this one says nothing."""

    def starts(self, file: Published, have: int) -> None:
        """`have` bytes are there already."""

    def gets(self, have: int) -> None:
        """So many bytes of the file are there now."""

    def ends(self, path: Path, new: bool) -> None:
        """It is whole; not `new` if it was before."""


def download(name: str, directory: str | Path, watch: Watch | None = None) -> list[Path]:
    """Fetch the files of the data set `name` into `directory`/`name`, where they are found, and return their paths.
    Files that are there already are checked and kept."""
    if name not in DOWNLOADS:
        raise DataError(f"data download: got {name!r}; {did_you_mean(name, DOWNLOADS)}")
    folder = Path(directory) / name
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return [fetch(file, folder, watch or Watch()) for file in DOWNLOADS[name]]
    except DownloadError as error:
        lacking = [file for file in DOWNLOADS[name] if not (folder / file.name).exists()]
        by_hand = [f"{' or '.join(file.urls)} (SHA-256 {file.sha256})" for file in lacking]
        raise DownloadError("\n".join([f"{error}, or fetch by hand into {folder}:", *by_hand])) from error
    except OSError as error:
        raise DataError(
            f"{error.filename or folder}: cannot be written ({error.strerror}); name another folder with --data-dir"
        ) from error


def fetch(file: Published, folder: Path, watch: Watch) -> Path:
    """One file, from the first mirror that has it."""
    path, part = folder / file.name, folder / f"{file.name}.part"
    if path.exists():
        if path.stat().st_size != file.size or digest_of(path) != file.sha256:
            raise DataError(
                f"{path}: got {path.stat().st_size:,} bytes that are not the published file of {file.size:,}; remove "
                "it, then download again"
            )
        watch.ends(path, new=False)
        return path
    with _alone(part) as content:
        watch.starts(file, _length(content))
        failures = []
        for url in file.urls:
            failure = _from_mirror(url, file, content, watch)
            if failure is None:
                os.replace(part, path)
                watch.ends(path, new=True)
                return path
            failures.append(f"{url}: {failure}")
        if not _length(content):
            part.unlink()
    raise DownloadError(
        f"{path}: no mirror gave it ({'; '.join(failures)}); try again later, which goes on where this ended"
    )


def _from_mirror(url: str, file: Published, content: FileIO, watch: Watch) -> str | None:
    """Fetch what is lacking, again while a connection breaks off after it gave something; why not, or None."""
    resumed = before = _length(content)
    try:
        while before < file.size:
            _transfer(url, file, content, watch)
            if _length(content) <= before:
                return f"ended after {before:,} of {file.size:,} bytes"
            before = _length(content)
    except HTTPError as error:
        return f"{error.code} {error.reason}"
    except (HTTPException, OSError) as error:
        return str(getattr(error, "reason", error)) or type(error).__name__
    os.fsync(content.fileno())
    digest = digest_of(Path(os.fsdecode(content.name)))
    if before == file.size and digest == file.sha256:
        return None
    content.truncate(0)
    if resumed:  # what was there before may be at fault
        return _from_mirror(url, file, content, watch)
    return f"its file has the SHA-256 {digest}, expected {file.sha256}, and was discarded"


def _transfer(url: str, file: Published, content: FileIO, watch: Watch) -> None:
    """One connection, from where the file ends now; from its beginning where the server cannot do that."""
    have = _length(content)
    headers = {"User-Agent": "pfedlms", **({"Range": f"bytes={have}-"} if have else {})}
    with urlopen(Request(url, headers=headers), timeout=_TIMEOUT) as answer:
        if have and not _continues(answer, have):
            have = content.truncate(0)
        while have <= file.size and (part := answer.read(_PART)):
            _append(content, part)
            have += len(part)
            watch.gets(have)


def _append(content: FileIO, part: bytes) -> None:
    """Apart from what the network does, because a full disk is no reason to ask another mirror."""
    try:
        while part:
            part = part[content.write(part) :]
    except OSError as error:
        raise DataError(
            f"{os.fsdecode(content.name)}: cannot be written ({error.strerror}); make room, then download again, which "
            "goes on where this ended"
        ) from error


def _continues(answer: HTTPResponse, have: int) -> bool:
    return answer.status == 206 and answer.headers.get("Content-Range", "").startswith(f"bytes {have}-")


@contextmanager
def _alone(part: Path) -> Iterator[FileIO]:
    """What there is of a file, open for writing by nobody else."""
    with open(part, "ab", buffering=0) as content:
        try:
            fcntl.flock(content, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise DataError(f"{part}: is being downloaded by another process; wait until it has ended") from error
        yield content


def _length(content: FileIO) -> int:
    return os.fstat(content.fileno()).st_size
