"""`pfedlms data download`, from the command to the exit code."""

from __future__ import annotations

import hashlib
import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from pfedlms.cli import data as commands
from pfedlms.cli import main
from pfedlms.data.download import FILES, MIRRORS

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
