"""Downloads from a server in this process, which can break off, lie and refuse; and what `check` says of a folder."""

from __future__ import annotations

import fcntl
import gzip
import hashlib
import os
import re
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
from test_cifar import FOLDERS, archive, files, unpack
from test_sources import IMAGES, LABELS, idx, write
from test_svhn import write as write_svhn

from pfedlms.data import load_dataset
from pfedlms.data.check import check
from pfedlms.data.download import Watch, download
from pfedlms.data.published import BATCHES, DOWNLOADS, WHOSE, Published
from pfedlms.data.sources import DATASETS
from pfedlms.errors import DataError, DownloadError

pytestmark = pytest.mark.filterwarnings("ignore::pfedlms.errors.DataWarning")  # files of a few samples

CONTENT = np.random.default_rng(0).bytes(700_000)


class Server(ThreadingHTTPServer):
    """Serves `contents` by path. `cuts`: after how many bytes the next answers break off. `ranges`: whether parts can
    be asked for."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.contents: dict[str, bytes] = {}
        self.cuts: list[int] = []
        self.ranges = True
        self.asked: list[tuple[str, str | None]] = []

    def url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/{path}"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        wanted = self.headers.get("Range")
        self.server.asked.append((self.path[1:], wanted))
        content = self.server.contents.get(self.path[1:])
        if content is None:
            self.send_error(404)
            return
        start = int(re.fullmatch(r"bytes=(\d+)-", wanted)[1]) if wanted and self.server.ranges else 0  # type: ignore[index]
        if start and start >= len(content):
            self.send_error(416)
            return
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(content) - start))
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        self.end_headers()
        cut = self.server.cuts.pop(0) if self.server.cuts else len(content)
        self.wfile.write(content[start : start + cut])

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with Server() as made:
        thread = threading.Thread(target=made.serve_forever, args=(0.01,))
        thread.start()
        yield made
        made.shutdown()
        thread.join()


def offer(monkeypatch: pytest.MonkeyPatch, *urls: str, content: bytes = CONTENT, name: str = "file.bin") -> None:
    """Publish one file as all of MNIST."""
    digest = hashlib.sha256(content).hexdigest()
    monkeypatch.setitem(DOWNLOADS, "mnist", (Published(name, len(content), digest, urls),))


class Told(Watch):
    def __init__(self) -> None:
        self.heard: list[tuple[object, ...]] = []

    def starts(self, file: Published, have: int) -> None:
        self.heard.append(("starts", file.name, have))

    def gets(self, have: int) -> None:
        self.heard.append(("gets", have))

    def ends(self, path: Path, new: bool) -> None:
        self.heard.append(("ends", path.name, new))


def refused(folder: Path) -> str:
    with pytest.raises(DataError) as caught:
        download("mnist", folder)
    assert "\n" not in str(caught.value) or isinstance(caught.value, DownloadError)
    return str(caught.value)


# --- downloads ---


def test_a_file_is_fetched_checked_and_told(tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    offer(monkeypatch, server.url("file.bin"))
    server.contents["file.bin"] = CONTENT
    told = Told()
    assert download("mnist", tmp_path / "new", told) == [tmp_path / "new" / "mnist" / "file.bin"]
    assert (tmp_path / "new" / "mnist" / "file.bin").read_bytes() == CONTENT
    assert os.listdir(tmp_path / "new" / "mnist") == ["file.bin"]
    assert told.heard[0] == ("starts", "file.bin", 0)
    assert told.heard[-2:] == [("gets", 700_000), ("ends", "file.bin", True)]
    steps = [each[1] for each in told.heard if each[0] == "gets"]
    assert steps == sorted(steps)  # type: ignore[type-var]
    assert len(steps) > 1


def test_what_is_there_is_not_fetched_again(tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    offer(monkeypatch, server.url("file.bin"))
    (tmp_path / "mnist").mkdir()
    (tmp_path / "mnist" / "file.bin").write_bytes(CONTENT)
    told = Told()
    download("mnist", tmp_path, told)
    assert told.heard == [("ends", "file.bin", False)]
    assert server.asked == []


@pytest.mark.parametrize("other", [CONTENT[:-1], CONTENT[:-1] + b"\0", b""])
def test_another_file_under_its_name_is_kept_and_named(
    tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch, other: bytes
) -> None:
    offer(monkeypatch, server.url("file.bin"))
    server.contents["file.bin"] = CONTENT
    path = tmp_path / "mnist" / "file.bin"
    path.parent.mkdir()
    path.write_bytes(other)
    assert f"{path}: got {len(other):,} bytes that are not the published file of 700,000; remove it" in refused(
        tmp_path
    )
    assert path.read_bytes() == other


def test_a_connection_that_breaks_off_is_gone_on_with(
    tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    offer(monkeypatch, server.url("file.bin"))
    server.contents["file.bin"], server.cuts = CONTENT, [300_000, 100_000]
    (path,) = download("mnist", tmp_path)
    assert path.read_bytes() == CONTENT
    assert [wanted for _, wanted in server.asked] == [None, "bytes=300000-", "bytes=400000-"]


def test_what_was_begun_is_gone_on_with(tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    offer(monkeypatch, server.url("file.bin"))
    (tmp_path / "mnist").mkdir()
    (tmp_path / "mnist" / "file.bin.part").write_bytes(CONTENT[:123_456])
    server.contents["file.bin"] = CONTENT
    told = Told()
    (path,) = download("mnist", tmp_path, told)
    assert path.read_bytes() == CONTENT
    assert server.asked == [("file.bin", "bytes=123456-")]
    assert told.heard[0] == ("starts", "file.bin", 123_456)
    assert os.listdir(path.parent) == ["file.bin"]


def test_a_server_without_parts_begins_anew(tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    offer(monkeypatch, server.url("file.bin"))
    (tmp_path / "mnist").mkdir()
    (tmp_path / "mnist" / "file.bin.part").write_bytes(CONTENT[:123_456])
    server.contents["file.bin"], server.ranges = CONTENT, False
    assert download("mnist", tmp_path)[0].read_bytes() == CONTENT


@pytest.mark.parametrize("part", [b"x" * 1000, b"x" * 700_000, b"x" * 700_001, CONTENT[:-1] + b"\0"])
def test_a_part_that_is_none_is_fetched_anew(
    tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch, part: bytes
) -> None:
    offer(monkeypatch, server.url("file.bin"))
    (tmp_path / "mnist").mkdir()
    (tmp_path / "mnist" / "file.bin.part").write_bytes(part)
    server.contents["file.bin"] = CONTENT
    assert download("mnist", tmp_path)[0].read_bytes() == CONTENT


def test_a_whole_part_needs_no_server(tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    offer(monkeypatch, server.url("file.bin"))
    (tmp_path / "mnist").mkdir()
    (tmp_path / "mnist" / "file.bin.part").write_bytes(CONTENT)
    assert download("mnist", tmp_path)[0].read_bytes() == CONTENT
    assert server.asked == []


@pytest.mark.parametrize("wrong", [CONTENT[:-1] + b"\0", CONTENT + b"more", b"<html>gone</html>"])
def test_a_wrong_file_is_never_given_its_name(
    tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch, wrong: bytes
) -> None:
    offer(monkeypatch, server.url("file.bin"))
    server.contents["file.bin"] = wrong
    message = refused(tmp_path)
    assert message.startswith(f"{tmp_path / 'mnist' / 'file.bin'}: no mirror gave it ({server.url('file.bin')}: ")
    assert hashlib.sha256(CONTENT).hexdigest() in message
    assert not (tmp_path / "mnist" / "file.bin").exists()
    if len(wrong) >= len(CONTENT):
        assert f"its file has the SHA-256 {hashlib.sha256(wrong).hexdigest()}"[:60] in message
        assert os.listdir(tmp_path / "mnist") == []


def test_the_next_mirror_is_asked(tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """After one that is not there, one that lacks the file, one that has another, and one that gives only a part."""
    offer(monkeypatch, "http://127.0.0.1:9/x", *(server.url(each) for each in ("none", "other", "short", "good")))
    server.contents |= {"other": CONTENT[::-1], "good": CONTENT, "short": CONTENT[:1000]}
    assert download("mnist", tmp_path)[0].read_bytes() == CONTENT
    assert server.asked == [
        ("none", None), ("other", None), ("short", None), ("short", "bytes=1000-"), ("good", "bytes=1000-"),
    ]  # fmt: skip


def test_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody listens there; every mirror is named with its reason, and nothing is left behind."""
    monkeypatch.setenv("no_proxy", "*")
    offer(monkeypatch, "http://127.0.0.1:9/a", "http://name.invalid/b")
    message = refused(tmp_path)
    assert re.search(r"http://127\.0\.0\.1:9/a: .*refused", message)
    assert "http://name.invalid/b: " in message
    assert "try again later" in message
    assert f"fetch by hand into {tmp_path / 'mnist'}:" in message
    assert f"http://127.0.0.1:9/a or http://name.invalid/b (SHA-256 {hashlib.sha256(CONTENT).hexdigest()})" in message
    assert os.listdir(tmp_path / "mnist") == []


def test_a_missing_page(tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    offer(monkeypatch, server.url("gone"))
    assert f"{server.url('gone')}: 404 Not Found" in refused(tmp_path)


def test_what_came_before_an_end_is_kept(tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    offer(monkeypatch, server.url("file.bin"))
    server.contents["file.bin"], server.cuts = CONTENT, [5000, 0]
    assert "ended after 5,000 of 700,000 bytes" in refused(tmp_path)
    assert (tmp_path / "mnist" / "file.bin.part").read_bytes() == CONTENT[:5000]
    assert download("mnist", tmp_path)[0].read_bytes() == CONTENT


def test_two_at_once_do_not_meet(tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    offer(monkeypatch, server.url("file.bin"))
    (tmp_path / "mnist").mkdir()
    with open(tmp_path / "mnist" / "file.bin.part", "ab") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert "file.bin.part: is being downloaded by another process" in refused(tmp_path)
    assert server.asked == []


def test_a_folder_that_cannot_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    offer(monkeypatch, "http://127.0.0.1:9/a")
    (tmp_path / "file").write_text("")
    assert "cannot be written (Not a directory); name another folder with --data-dir" in refused(tmp_path / "file")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device of Linux")
def test_a_full_disk_asks_no_other_mirror(tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device that is always full stands in for the file."""
    offer(monkeypatch, server.url("file.bin"), server.url("other"))
    server.contents |= {"file.bin": CONTENT, "other": CONTENT}
    (tmp_path / "mnist").mkdir()
    (tmp_path / "mnist" / "file.bin.part").symlink_to("/dev/full")
    assert "file.bin.part: cannot be written (No space left on device); make room" in refused(tmp_path)
    assert [path for path, _ in server.asked] == ["file.bin"]


@pytest.mark.parametrize("name", ["digits", "minst", "folder:x"])
def test_only_published_data_sets_can_be_fetched(tmp_path: Path, name: str) -> None:
    with pytest.raises(DataError, match=f"data download: got '{name}'; "):
        download(name, tmp_path)


def test_everything_in_files_can_be_fetched() -> None:
    assert set(DOWNLOADS) == {name for name, source in DATASETS.items() if source.needs_dir}
    published = [file for each in DOWNLOADS.values() for file in each]
    for file in published:
        assert re.fullmatch(r"[0-9a-f]{64}", file.sha256)
        assert file.urls
        assert all(re.fullmatch(rf"https?://.*/{re.escape(file.name)}", url) for url in file.urls)
    assert len({file.sha256 for file in published}) == len(published) == 4 + 4 + 2 + 1 + 1


def test_downloads_are_what_loads(tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """MNIST's four files, from the server to samples."""
    packed = {path.name: path.read_bytes() for path in write(tmp_path / "made", packed=True).iterdir()}
    server.contents |= packed
    published = [
        Published(name, len(content), hashlib.sha256(content).hexdigest(), (server.url(name),))
        for name, content in packed.items()
    ]
    monkeypatch.setitem(DOWNLOADS, "mnist", tuple(published))
    download("mnist", tmp_path / "data")
    assert load_dataset("mnist", tmp_path / "data")[1].tolist() == [5, 0, 9, 1, 2]
    row = check("mnist", tmp_path / "data")
    assert (row["state"], row["published"], row["samples"]) == ("partial", True, 5)


# --- check ---


def test_nothing_is_there(tmp_path: Path) -> None:
    for name in DOWNLOADS:
        row = check(name, tmp_path)
        assert row["state"] == "missing"
        assert f"pfedlms data download {name} --data-dir {tmp_path}" in row["problems"][0]


def test_digits_are_always_there() -> None:
    row = check("digits")
    assert (row["state"], row["samples"], row["problems"]) == ("complete", 1797, [])


def test_without_a_folder_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PFEDLMS_DATA", raising=False)
    assert "--data-dir DIR or PFEDLMS_DATA" in check("mnist")["problems"][0]


def test_the_variable_names_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PFEDLMS_DATA", str(write(tmp_path / "here")))
    assert check("mnist")["where"] == str(tmp_path / "here")
    assert load_dataset("mnist")[1].tolist() == [5, 0, 9, 1, 2]
    write(tmp_path / "there")
    (tmp_path / "there" / "t10k-labels-idx1-ubyte").write_bytes(idx(np.array([3, 4])))
    assert load_dataset("mnist", tmp_path / "there")[1].tolist() == [5, 0, 9, 3, 4]  # what is said comes first


def test_fewer_samples_than_published_are_partial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small files pass, and load; with their checksums known, they are the published ones, packed or not."""
    row = check("mnist", write(tmp_path))
    assert row == {
        "dataset": "mnist", "state": "partial", "format": "IDX files", "where": str(tmp_path), "samples": 5,
        "expected": 70_000, "published": False, "also": [],
        "problems": [
            f"mnist: got 5 samples, published were 70,000 ({tmp_path / 'train-images-idx3-ubyte'}: 3 of 60,000, "
            f"{tmp_path / 'train-labels-idx1-ubyte'}: 3 of 60,000, {tmp_path / 't10k-images-idx3-ubyte'}: 2 of 10,000, "
            f"{tmp_path / 't10k-labels-idx1-ubyte'}: 2 of 10,000); a run takes what is there; unless that is meant, "
            "remove these files, then: pfedlms data download mnist"
        ],
    }  # fmt: skip
    assert len(load_dataset("mnist", tmp_path)[1]) == 5
    for count, state in ((4, "larger"), (5, "complete")):
        monkeypatch.setitem(DATASETS, "mnist", replace(DATASETS["mnist"], samples=count))
        assert check("mnist", tmp_path)["state"] == state
    for array in (*IMAGES.values(), *LABELS.values()):
        monkeypatch.setitem(WHOSE, hashlib.sha256(array.astype(np.uint8).tobytes()).hexdigest()[:16], "mnist")
    assert check("mnist", tmp_path)["published"] is True


def test_every_file_at_fault_is_named(tmp_path: Path) -> None:
    """Two damaged, one missing."""
    write(tmp_path)
    (tmp_path / "train-images-idx3-ubyte").write_bytes(b"short")
    (tmp_path / "train-labels-idx1-ubyte").unlink()
    (tmp_path / "train-labels-idx1-ubyte.gz").write_bytes(gzip.compress(idx(LABELS["train"]))[:-3])
    (tmp_path / "t10k-images-idx3-ubyte").unlink()
    row = check("mnist", tmp_path)
    assert row["state"] == "damaged"
    said = "\n".join(row["problems"])
    assert re.search(r"t10k-images-idx3-ubyte\[\.gz\] is neither in", said)
    assert re.search(r"train-images-idx3-ubyte: not an IDX file", said)
    assert re.search(r"train-labels-idx1-ubyte\.gz: cannot be read", said)
    assert len(row["problems"]) == 3


def test_incomplete(tmp_path: Path) -> None:
    unpack(tmp_path / FOLDERS["cifar100"], {"train": files("cifar100")["train"]})
    row = check("cifar100", tmp_path)
    assert row["state"] == "incomplete"
    assert row["problems"] == [f"{tmp_path / FOLDERS['cifar100']}: test is missing beside train; fetch it"]


def test_files_that_do_not_belong_together_are_damaged(tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "t10k-labels-idx1-ubyte").write_bytes(idx(np.array([1, 2, 3])))
    row = check("mnist", tmp_path)
    assert row["state"] == "damaged"
    assert re.search("t10k-images-idx3-ubyte: has 2 images, but .*t10k-labels-idx1-ubyte 3 labels", row["problems"][0])


def test_batches_are_compared_with_the_published_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    batches = files("cifar10")
    unpack(tmp_path, batches)
    assert check("cifar10", tmp_path)["published"] is False
    for name, content in batches.items():
        monkeypatch.setitem(BATCHES, name, hashlib.md5(content).hexdigest())
    assert check("cifar10", tmp_path)["published"] is True


def test_other_formats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PFEDLMS_CACHE", str(tmp_path / "cache"))
    write_svhn(tmp_path / "data")
    unpack(tmp_path / "data", {"cifar-100-python.tar.gz": archive("cifar-100-python", files("cifar100"))})
    rows = [check(name, tmp_path / "data") for name in ("svhn", "cifar100", "cifar10")]
    assert [row["state"] for row in rows] == ["partial", "partial", "missing"]
    assert [row["samples"] for row in rows] == [18, 4, 0]
    assert [row["published"] for row in rows] == [False, False, None]
    assert rows[1]["format"] == "cifar-100-python.tar.gz"
