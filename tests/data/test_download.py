"""Downloads from a server in this process, which can lack files, send half of a file or another file."""

from __future__ import annotations

import hashlib
import os
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

from pfedlms.data.download import FILES, MIRRORS, NOT_DOWNLOADABLE, download
from pfedlms.data.sources import DATASETS
from pfedlms.errors import DataError, DownloadError

CONTENT = np.random.default_rng(0).bytes(200_000)


class Server(ThreadingHTTPServer):
    """Serves `contents` by path; those in `cut` break off halfway."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.contents: dict[str, bytes] = {}
        self.cut: set[str] = set()
        self.asked: list[str] = []
        self.url = f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        self.server.asked.append(self.path)
        content = self.server.contents.get(self.path)
        if content is None:
            self.send_error(404)
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content[: len(content) // 2] if self.path in self.server.cut else content)

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """One file, `file.bin`, is published as all of MNIST."""
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setitem(FILES, "mnist", {"file.bin": hashlib.sha256(CONTENT).hexdigest()})
    with Server() as made:
        monkeypatch.setitem(MIRRORS, "mnist", (made.url,))
        thread = threading.Thread(target=made.serve_forever, args=(0.01,))
        thread.start()
        yield made
        made.shutdown()
        thread.join()


def test_a_file_is_downloaded_once(tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    server.contents |= {"/file.bin": CONTENT, "/other.bin": CONTENT[:9]}
    monkeypatch.setitem(FILES["mnist"], "other.bin", hashlib.sha256(CONTENT[:9]).hexdigest())
    folder = tmp_path / "new" / "mnist"
    for _ in range(2):
        assert list(download("mnist", tmp_path / "new")) == [folder / "file.bin", folder / "other.bin"]
        assert (folder / "file.bin").read_bytes() == CONTENT
        assert sorted(os.listdir(folder)) == ["file.bin", "other.bin"]
    assert server.asked == ["/file.bin", "/other.bin"]


def test_another_file_of_the_same_name_is_replaced_only_by_force(tmp_path: Path, server: Server) -> None:
    server.contents["/file.bin"] = CONTENT
    path = tmp_path / "mnist" / "file.bin"
    path.parent.mkdir()
    path.write_bytes(b"mine")
    with pytest.raises(DataError, match=f"{path}: is not the published file; remove it, or replace it with --force"):
        list(download("mnist", tmp_path))
    assert path.read_bytes() == b"mine"
    list(download("mnist", tmp_path, force=True))
    assert path.read_bytes() == CONTENT


@pytest.mark.parametrize("wrong", [CONTENT[:-1] + b"\0", CONTENT + b"more", None])
def test_a_wrong_file_is_never_stored(
    tmp_path: Path, server: Server, wrong: bytes | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message names all mirrors with their errors; None: the mirror lacks the file."""
    server.contents |= {"/file.bin": wrong} if wrong else {}
    monkeypatch.setitem(MIRRORS, "mnist", ("http://127.0.0.1:9", server.url))
    with pytest.raises(DownloadError) as caught:
        list(download("mnist", tmp_path))
    first, *others = str(caught.value).splitlines()
    assert first.startswith(f"{tmp_path / 'mnist' / 'file.bin'}: no mirror gave it; try again later, or put it there")
    assert hashlib.sha256(CONTENT).hexdigest() in first
    assert re.search(r"http://127\.0\.0\.1:9/file.bin: .*refused", others[0])
    assert re.search(f"{server.url}/file.bin: {'.*hash' if wrong else '.*404'}", others[1])
    assert os.listdir(tmp_path / "mnist") == []


def test_the_next_mirror_is_tried(tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a mirror without a server, one without the file, one with another file, and one that sends half of it."""
    places = ("none", "other", "cut", "good")
    monkeypatch.setitem(MIRRORS, "mnist", ("http://127.0.0.1:9", *(f"{server.url}/{place}" for place in places)))
    server.contents |= {f"/{place}/file.bin": CONTENT for place in ("cut", "good")} | {"/other/file.bin": b"other"}
    server.cut = {"/cut/file.bin"}
    assert [path.read_bytes() for path in download("mnist", tmp_path)] == [CONTENT]
    assert server.asked == [f"/{place}/file.bin" for place in places]


@pytest.mark.parametrize("name", ["digits", "minst", "folder:x"])
def test_only_published_data_sets_can_be_downloaded(tmp_path: Path, name: str) -> None:
    with pytest.raises(DataError, match=f"data download: got '{name}'; "):
        list(download(name, tmp_path))


def test_every_published_data_set_has_checksums_and_mirrors() -> None:
    published = {name for name, source in DATASETS.items() if source.needs_dir} - set(NOT_DOWNLOADABLE)
    assert set(FILES) == set(MIRRORS) == published
    sums = [sha256 for files in FILES.values() for sha256 in files.values()]
    assert all(re.fullmatch(r"[0-9a-f]{64}", each) for each in sums)
    assert len(set(sums)) == len(sums) == 4 + 4 + 2 + 1 + 1
