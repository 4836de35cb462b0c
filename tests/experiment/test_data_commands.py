"""`pfedlms data download` and `data check`, from the command to the exit code."""

from __future__ import annotations

import hashlib
import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from pfedlms.cli import main
from pfedlms.data.published import DOWNLOADS, Published
from pfedlms.data.sources import DATASETS
from pfedlms.report.sources import watching

NAMES = ["digits", "mnist", "fmnist", "svhn", "cifar10", "cifar100"]


@pytest.fixture(autouse=True)
def no_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PFEDLMS_DATA", raising=False)


def idx(*shape: int) -> bytes:
    header = bytes([0, 0, 8, len(shape)]) + b"".join(length.to_bytes(4, "big") for length in shape)
    size = 1
    for length in shape:
        size *= length
    return header + bytes(size)


@pytest.fixture
def mnist(tmp_path: Path) -> Path:
    """Three images for training and one for testing."""
    for part, count in (("train", 3), ("t10k", 1)):
        (tmp_path / f"{part}-images-idx3-ubyte").write_bytes(idx(count, 28, 28))
        (tmp_path / f"{part}-labels-idx1-ubyte").write_bytes(idx(count))
    return tmp_path


# --- check ---


def test_all_data_sets_in_one_table(mnist: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What is not there is no error."""
    assert main(["data", "check", "--data-dir", str(mnist)]) == 0
    said = capsys.readouterr()
    rows = [line.split()[:2] for line in said.out.splitlines() if line.split()[:1] and line.split()[0] in NAMES]
    states = {"digits": "complete", "mnist": "partial", "fmnist": "partial"}
    assert rows == [[name, states.get(name, "missing")] for name in NAMES]
    assert "4 of 70,000" in said.out
    assert f"mnist: {mnist}" in said.out.splitlines()
    assert [line.split(",")[0] for line in said.err.splitlines()] == ["mnist: got 4 samples", "fmnist: got 4 samples"]


def test_the_table_fits_a_screen_and_says_that_no_folder_was_given(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the longest format, and a state that says most."""
    found = {"dataset": "cifar100", "state": "incomplete", "format": "cifar-100-python.tar.gz", "samples": 10_000,
             "expected": 60_000, "published": False, "where": "/a/folder/with/a/long/name", "problems": [],
             "also": []}  # fmt: skip
    monkeypatch.setattr("pfedlms.data.check.check", lambda name, directory: found)
    assert main(["data", "check"]) == 1
    said = capsys.readouterr()
    assert "cifar-100-python.tar.gz" in said.out
    assert max(map(len, said.out.splitlines())) <= 80
    assert said.err == "no folder was given: name one with --data-dir DIR or PFEDLMS_DATA\n"


def test_one_that_is_there(mnist: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PFEDLMS_DATA", str(mnist))
    assert main(["data", "check", "mnist", "--json"]) == 1
    said = capsys.readouterr()
    row = json.loads(said.out)
    assert (row["state"], row["where"], row["samples"], row["expected"]) == ("partial", str(mnist), 4, 70_000)
    assert said.err == f"{row['problems'][0]}\n"
    assert f"{mnist / 'train-labels-idx1-ubyte'}: 3 of 60,000" in said.err


@pytest.mark.parametrize("given", [["svhn"], ["--dataset", "svhn"]])
def test_one_that_is_not_there(mnist: Path, given: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "check", *given, "--data-dir", str(mnist)]) == 1
    assert f"pfedlms data download svhn --data-dir {mnist}" in capsys.readouterr().err


@pytest.mark.parametrize("which", [[], ["mnist"]])
def test_a_damaged_file_is_named(mnist: Path, which: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    (mnist / "train-labels-idx1-ubyte").write_bytes(b"short")
    assert main(["data", "check", *which, "--data-dir", str(mnist)]) == 1
    said = capsys.readouterr()
    assert "damaged" in said.out
    assert f"{mnist / 'train-labels-idx1-ubyte'}: not an IDX file" in said.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["check", "minst"], "data check: got 'minst'; did you mean mnist"),
        (["download"], "data download: say which data set"),
        (["download", "mnist"], "name their folder with --data-dir DIR or PFEDLMS_DATA"),
        (["download", "digits", "--data-dir", "x"], "data download: got 'digits'; expected one of: mnist, fmnist"),
        (["downlaod"], "data: got 'downlaod'; did you mean download?"),
    ],
)
def test_wrong_use(
    arguments: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["data", *arguments]) == 2
    said = capsys.readouterr()
    assert message in said.err
    assert said.out == ""
    assert list(tmp_path.iterdir()) == []


# --- download ---

CONTENT = b"published" * 1000


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Published:
    """All of SVHN is one small file, at an address where nobody listens."""
    monkeypatch.setenv("no_proxy", "*")
    made = Published("x.mat", len(CONTENT), hashlib.sha256(CONTENT).hexdigest(), ("http://127.0.0.1:9/x.mat",))
    monkeypatch.setitem(DOWNLOADS, "svhn", (made,))
    return made


def test_files_that_are_there_are_named(tmp_path: Path, file: Published, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "svhn" / "x.mat"
    path.parent.mkdir()
    path.write_bytes(CONTENT)
    assert main(["data", "download", "svhn", "--data-dir", str(tmp_path), "--json"]) == 0
    said = capsys.readouterr()
    assert json.loads(said.out) == {"dataset": "svhn", "files": [str(path)]}
    assert said.err == f"{path}: is there, with the published checksum\n"


def test_offline_all_files_are_named(
    tmp_path: Path, file: Published, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for those that are there."""
    other = Published("y.mat", 7, "f" * 64, ("http://127.0.0.1:9/y.mat", "http://127.0.0.1:9/again/y.mat"))
    there = Published("z.mat", len(CONTENT), file.sha256, ("http://127.0.0.1:9/z.mat",))
    monkeypatch.setitem(DOWNLOADS, "svhn", (there, file, other))
    (tmp_path / "svhn").mkdir()
    (tmp_path / "svhn" / "z.mat").write_bytes(CONTENT)
    assert main(["data", "download", "svhn", "--data-dir", str(tmp_path)]) == 1
    said = capsys.readouterr().err.splitlines()[1:]
    assert said[1].endswith(f"or fetch by hand into {tmp_path / 'svhn'}:")
    assert said[2:] == [
        f"  http://127.0.0.1:9/x.mat (SHA-256 {file.sha256})",
        f"  http://127.0.0.1:9/y.mat or http://127.0.0.1:9/again/y.mat (SHA-256 {'f' * 64})",
    ]


def test_offline_is_one_line(tmp_path: Path, file: Published, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "download", "svhn", "--data-dir", str(tmp_path)]) == 1
    said = capsys.readouterr().err.splitlines()
    assert said[0] == "x.mat: 0.0 MiB"
    assert said[1].startswith(f"error: {tmp_path / 'svhn' / 'x.mat'}: no mirror gave it (http://127.0.0.1:9/x.mat: ")
    assert said[2:] == [f"  http://127.0.0.1:9/x.mat (SHA-256 {file.sha256})"]


def test_what_is_there_in_another_format_is_left_alone(
    mnist: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unpacked files, where packed ones are fetched; four samples of MNIST are not all of it."""
    published = Published("train-images-idx3-ubyte.gz", 7, "f" * 64, ("http://127.0.0.1:9/x.gz",))
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setitem(DOWNLOADS, "mnist", (published,))
    line = ["data", "download", "mnist", "--data-dir", str(mnist)]
    assert main(line) == 1
    monkeypatch.setitem(DATASETS, "mnist", replace(DATASETS["mnist"], samples=4))
    capsys.readouterr()
    assert main(line) == 0
    assert capsys.readouterr().err == (
        f"mnist: is there already, IDX files in {mnist}; to fetch it all the same: --force\n"
    )
    assert main([*line, "--force"]) == 1


def test_plain_lines(file: Published) -> None:
    """Every quarter is said once, however the bytes come."""
    console = Console(file=io.StringIO(), width=200)
    with watching(console) as watch:
        watch.starts(file, 0)
        for have in range(0, 9001, 500):
            watch.gets(have)
        watch.ends(Path("x.mat"), new=True)
        watch.starts(file, 6000)
        watch.gets(9000)
    assert console.file.getvalue().splitlines() == [  # type: ignore[attr-defined]
        "x.mat: 0.0 MiB", "x.mat: 25 %", "x.mat: 50 %", "x.mat: 75 %", "x.mat: fetched, with the published checksum",
        "x.mat: 0.0 MiB, 0.0 MiB of it are there",
    ]  # fmt: skip


def test_a_bar_on_a_terminal(file: Published) -> None:
    console = Console(file=io.StringIO(), width=200, force_terminal=True, color_system=None)
    with watching(console) as watch:
        watch.starts(file, 0)
        watch.gets(4500)
        watch.gets(9000)
        watch.ends(Path("x.mat"), new=True)
        watch.ends(Path("y.mat"), new=False)
    said = console.file.getvalue()  # type: ignore[attr-defined]
    assert "x.mat" in said
    assert "8.8/8.8 KiB" in said
    assert "y.mat: is there, with the published checksum" in said
