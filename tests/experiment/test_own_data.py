"""Data by path and ways to deal it out, from settings to runs that resume; `pfedlms data show` and `data download`."""

from __future__ import annotations

import hashlib
import io
import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from rich.console import Console

import pfedlms
from pfedlms.cli import data as commands
from pfedlms.cli import main
from pfedlms.data.download import FILES, MIRRORS
from pfedlms.errors import PfedlmsError
from pfedlms.experiment.config import load_config
from pfedlms.report import plans

SMALL = {"rounds": 2, "local_steps": 2, "batch_size": 8, "hidden": 8, "threads": 1}


@pytest.fixture(autouse=True)
def own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PFEDLMS_CACHE", str(tmp_path / "cache"))
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")


def csv_file(path: Path, clients: int = 4, rows: int = 80) -> Path:
    """Client k has every `clients`-th row; classes low and high are told by the first feature."""
    draw = np.random.default_rng(0)
    lines = ["a,b,who,label"]
    for row in range(rows):
        kind = row // clients % 2
        lines.append(
            f"{4 * kind - 2 + draw.normal() / 10:.3f},{draw.normal():.3f},c{row % clients},{('low', 'high')[kind]}"
        )
    path.write_text("\n".join(lines) + "\n")
    return path


def image_folder(root: Path) -> Path:
    draw = np.random.default_rng(0)
    for place, name in enumerate(("owl", "ant", "bee")):
        (root / name).mkdir(parents=True)
        for number in range(20):
            pixels = draw.integers(80 * place, 80 * place + 80, (4, 4), dtype=np.uint8)
            Image.fromarray(pixels).save(root / name / f"{number}.png")
    return root


def config_of(**data: Any) -> Any:
    return load_config(None, {"data": data})


# --- settings ---


@pytest.mark.parametrize(
    ("dataset", "ending"),
    [
        ("fil:/a/long/path/to/a/file.csv", "did you mean file:PATH?"),
        ("folder:", "did you mean folder:PATH?"),
    ],
)
def test_what_is_no_path_shows_what_is_meant(dataset: str, ending: str) -> None:
    with pytest.raises(PfedlmsError) as caught:
        config_of(dataset=dataset)
    assert str(caught.value).startswith(f"data.dataset: got {dataset!r}, expected one of: digits, ")
    assert str(caught.value).endswith(ending)


# --- runs ---


def test_a_run_on_a_file_follows_its_clients(tmp_path: Path) -> None:
    file = csv_file(tmp_path / "t.csv")
    result = pfedlms.run(f"file:{file}", method="fedavg", owner_column="who", **{**SMALL, "rounds": 20})
    assert result.summary["clients"] == 4
    assert result.federation.data.samples == (15, 15, 15, 15)
    assert result.accuracy > 95


def test_a_run_on_a_folder(tmp_path: Path) -> None:
    root = image_folder(tmp_path / "birds")
    result = pfedlms.run(f"folder:{root}", method="local", partition="classes", clients=3, **{**SMALL, "rounds": 20})
    assert result.federation.data.shape == (1, 4, 4)
    assert result.federation.data.classes == 3
    assert all(len(set(result.federation.data.y[own].tolist())) == 2 for own in result.federation.data.train)
    assert result.accuracy > 90


@pytest.mark.parametrize("changed", [False, True])
def test_a_run_by_path_goes_on_where_the_data_are_now_if_they_are_the_same(
    changed: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The path may change, in config.toml; the samples may not."""
    file = csv_file(tmp_path / "t.csv")
    out = tmp_path / "run"
    arguments = ["--method", "local", "--rounds", "2", "--set", "model.hidden=8", "--set", "data.owner_column=who"]
    assert main(["run", "--dataset", f"file:{file}", *arguments, "--out", str(out)]) == 0
    moved = Path(shutil.move(file, tmp_path / "moved.csv"))
    if changed:
        moved.write_text(re.sub(r"^-?\d\.\d+,", "7,", moved.read_text(), count=1, flags=re.MULTILINE))
    assert main(["resume", str(out)]) == 0  # nothing is left to play, so nothing is read
    text = (out / "config.toml").read_text().replace("rounds = 2", "rounds = 3")
    (out / "config.toml").write_text(text)
    assert main(["resume", str(out)]) == 2
    assert "t.csv is no file" in capsys.readouterr().err
    (out / "config.toml").write_text(text.replace(str(file), str(moved)))
    assert main(["resume", str(out)]) == (2 if changed else 0)
    said = capsys.readouterr().err
    assert ("the data given are not those this run began with; give the same arrays or files" in said) == changed
    assert len((out / "metrics.jsonl").read_text().splitlines()) == (2 if changed else 3)


def test_pairs_are_given_and_nothing_else() -> None:
    pair = (np.zeros((4, 2)), np.array([0, 1, 0, 1]))
    assert pfedlms.run([(pair, pair)] * 2, method="local", partition="given", **SMALL).summary["clients"] == 2
    with pytest.raises(PfedlmsError, match=r"data.partition: got 'iid', but data are given client by client"):
        pfedlms.run([(pair, pair)] * 2, method="local", partition="iid", **SMALL)


# --- data show ---


def shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    capsys.readouterr()
    assert main(["data", "show", *arguments]) == 0
    return capsys.readouterr().out


def test_show_json_by_hand(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of client k's 20 rows, ten of each class, a quarter is tested on, and a fifth of the other 15 set aside."""
    file = csv_file(tmp_path / "t.csv")
    options = ["--set", "data.owner_column=who", "--set", "data.validation=0.2", "--seed", "3", "--json"]
    document = json.loads(shown(capsys, "--dataset", f"file:{file}", *options))
    assert document == {
        "dataset": f"file:{file}",
        "samples": 80,
        "shape": [2],
        "partition": "given",
        "seed": 3,
        "classes": ["high", "low"],
        "clients": [
            {"client": k, "name": f"c{k}", "train": 12, "test": 5, "validation": 3, "classes": [10, 10]}
            for k in range(4)
        ],
    }


def test_show_draws_counts_under_the_names_of_classes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = image_folder(tmp_path / "birds")
    text = shown(capsys, "--dataset", "folder:birds", "--data-dir", str(root.parent), "--clients", "3", "--partition",
                 "classes", "--set", "data.classes_per_client=1")  # fmt: skip
    assert "folder:birds · 60 samples of 1x4x4 · 3 classes · 3 clients · classes · seed 0" in " ".join(text.split())
    rows = [line.split() for line in text.splitlines()]
    assert ["client", "train", "test", "ant", "bee", "owl"] in rows
    held = sorted(row[3:] for row in rows if row[1:3] == ["15", "5"])
    assert held == [[".", ".", "20"], [".", "20", "."], ["20", ".", "."]]
    shares = "samples per client: 20 to 20, median 20; classes per client: 1 to 1, median 1; largest class: 100% of a "
    assert f"{shares}client's samples on average, 33% of all samples." in " ".join(text.split())


def made(clients: int, classes: int) -> dict[str, Any]:
    """Client k has only class k mod `classes`, k + 1 samples of it."""
    rows = []
    for k in range(clients):
        counts = [0] * classes
        counts[k % classes] = k + 1
        rows.append({"client": k, "name": str(k), "train": 1, "test": 1, "classes": counts})
    names = [f"class number {label}" for label in range(classes)]
    about = {"dataset": "digits", "samples": 9, "shape": [1], "partition": "iid", "seed": 0}
    return {**about, "classes": names, "clients": rows}


def test_long_names_stand_below_and_many_classes_are_counted() -> None:
    table = plans.holdings(made(3, 10))
    assert [column.head.strip() for column in table.columns] == ["client", "train", "test", *map(str, range(10))]
    assert list(table.records[1].values()) == ["1", 1, 1, ".", 2, *["."] * 8]
    assert "Classes: 0 class number 0, 1 class number 1, " in table.intro
    many = plans.holdings(made(3, 120)).records[2]
    assert many == {"client": "2", "train": 1, "test": 1, "classes": 1, "largest": "class number 2: 3"}


def test_of_many_clients_some_are_shown_from_the_largest_to_the_smallest() -> None:
    table = plans.holdings(made(100, 2))
    numbers = [int(record["client"]) for record in table.records]
    assert numbers == sorted(numbers, reverse=True)
    assert (len(numbers), numbers[0], numbers[-1]) == (40, 99, 0)
    assert "40 of 100 clients, from the largest to the smallest; --json has all." in table.intro
    assert "samples per client: 1 to 100, median 50.5;" in table.intro


# --- data download ---

CONTENT = b"published" * 1000
SUM = hashlib.sha256(CONTENT).hexdigest()


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of SVHN is one small file, at an address where nobody listens."""
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setitem(FILES, "svhn", {"x.mat": SUM})
    monkeypatch.setitem(MIRRORS, "svhn", ("http://127.0.0.1:9",))


def test_files_that_are_there_are_named(offline: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "svhn" / "x.mat"
    path.parent.mkdir()
    path.write_bytes(CONTENT)
    assert main(["data", "download", "svhn", "--data-dir", str(tmp_path), "--json"]) == 0
    said = capsys.readouterr()
    assert json.loads(said.out) == {"dataset": "svhn", "files": [str(path)]}
    assert said.err == f"{path}: is there, with the published checksum\n"


def test_offline_the_file_and_its_address_are_named(
    offline: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
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
