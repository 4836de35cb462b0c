"""`pfedlms data download` and `data check`, from the command to the exit code."""

from __future__ import annotations

import hashlib
import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from pfedlms.cli import data as commands
from pfedlms.cli import main
from pfedlms.data.download import FILES, MIRRORS
from pfedlms.data.sources import DATASETS

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
    assert [line.split(" (")[0] for line in said.err.splitlines()] == ["mnist: got 4 samples", "fmnist: got 4 samples"]


def test_the_table_fits_a_screen_and_says_that_no_folder_was_given(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the longest format, and a state that says most."""
    found = {"dataset": "cifar100", "state": "incomplete", "format": "cifar-100-python.tar.gz", "samples": 10_000,
             "expected": 60_000, "published": False, "where": "/a/folder/with/a/long/name", "problems": []}  # fmt: skip
    monkeypatch.setattr("pfedlms.data.check.check", lambda name, directory: found)
    assert main(["data", "check"]) == 1
    said = capsys.readouterr()
    assert "cifar-100-python.tar.gz" in said.out
    assert max(map(len, said.out.splitlines())) <= 80
    assert said.err == "no folder was given: name one with --data-dir DIR or PFEDLMS_DATA\n"


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
    assert f"{mnist / 'train-labels-idx1-ubyte'}: not a whole IDX file" in said.err


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
SUM = hashlib.sha256(CONTENT).hexdigest()


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of SVHN is one small file, at an address where nobody listens, as is that of MNIST."""
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setitem(FILES, "svhn", {"x.mat": SUM})
    for name in ("svhn", "mnist"):
        monkeypatch.setitem(MIRRORS, name, ("http://127.0.0.1:9",))


def test_files_that_are_there_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "svhn" / "x.mat"
    path.parent.mkdir()
    path.write_bytes(CONTENT)
    assert main(["data", "download", "svhn", "--data-dir", str(tmp_path), "--json"]) == 0
    said = capsys.readouterr()
    assert json.loads(said.out) == {"dataset": "svhn", "files": [str(path)]}
    assert said.err == f"{path}: is there, with the published checksum\n"


def test_offline_the_file_and_its_address_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "download", "svhn", "--data-dir", str(tmp_path)]) == 1
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith(f"error: {tmp_path / 'svhn' / 'x.mat'}: no mirror gave it; try again later, or put it")
    assert SUM in first
    assert second.startswith("  http://127.0.0.1:9/x.mat: ")


def test_what_is_there_is_left_alone(
    mnist: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unpacked files, where packed ones are fetched; four samples of MNIST are not all of it."""
    line = ["data", "download", "mnist", "--data-dir", str(mnist)]
    assert main(line) == 1
    monkeypatch.setitem(DATASETS, "mnist", replace(DATASETS["mnist"], samples=4, published=None))
    capsys.readouterr()
    assert main(line) == 0
    assert capsys.readouterr().err == (
        f"mnist: is there already, IDX files in {mnist}; to fetch it all the same: --force\n"
    )
    assert main([*line, "--force"]) == 1


def test_a_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """As pooch calls it, in two blocks; elsewhere nothing is shown."""
    screen = io.StringIO()
    for terminal in (True, False):
        console = Console(file=screen, width=200, force_terminal=terminal, color_system=None)
        monkeypatch.setattr(commands, "Console", lambda console=console, **_: console)
        bar = commands._Bar()
        bar.total = 9000
        for step in (bar.update, bar.update):
            step(4096)
        bar.reset()
        bar.update(9000)
        bar.close()
        if terminal:
            assert "9.0/9.0 kB" in screen.getvalue()
            shown = screen.getvalue()
    assert screen.getvalue() == shown
