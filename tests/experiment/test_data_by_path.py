"""Runs on data given by path, and the commands `pfedlms data show` and `pfedlms data download`."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from small import edit_config

from pfedlms.cli import main
from pfedlms.data.download import FILES, MIRRORS
from pfedlms.report import plans


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PFEDLMS_CACHE", str(tmp_path / "cache"))


def csv_file(path: Path) -> Path:
    """80 rows of four clients; half of the labels are low and half high."""
    rows = [f"{row},{row % 7},c{row % 4},{('low', 'high')[row // 4 % 2]}" for row in range(80)]
    path.write_text("\n".join(["a,b,who,label", *rows]) + "\n")
    return path


def image_folder(root: Path) -> Path:
    for place, name in enumerate(("owl", "ant", "bee")):
        (root / name).mkdir(parents=True)
        for number in range(20):
            Image.new("L", (4, 4), 80 * place + number).save(root / name / f"{number}.png")
    return root


@pytest.mark.parametrize("changed", [False, True])
def test_a_run_resumes_from_another_path_only_with_the_same_data(
    changed: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = csv_file(tmp_path / "t.csv")
    out = tmp_path / "run"
    arguments = ["--method", "local", "--rounds", "2", "--set", "model.hidden=8", "--set", "data.owner_column=who"]
    assert main(["run", "--dataset", f"file:{file}", *arguments, "--out", str(out)]) == 0
    moved = Path(shutil.move(file, tmp_path / "moved.csv"))
    if changed:
        moved.write_text(moved.read_text().replace("\n0,", "\n7,"))
    assert main(["resume", str(out)]) == 0  # it has finished, so nothing is read
    edit_config(out, "rounds = 2", "rounds = 3")
    assert main(["resume", str(out)]) == 2
    assert "t.csv is no file" in capsys.readouterr().err
    edit_config(out, str(file), str(moved))
    assert main(["resume", str(out)]) == (2 if changed else 0)
    errors = capsys.readouterr().err
    assert ("the data given are not those this run began with; give the same arrays or files" in errors) == changed
    assert len((out / "metrics.jsonl").read_text().splitlines()) == (2 if changed else 3)


def shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    capsys.readouterr()
    assert main(["data", "show", *arguments]) == 0
    return capsys.readouterr().out


def test_show_writes_json_with_counts_worked_out_by_hand(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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


def test_show_prints_a_table_with_the_names_of_classes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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


def client_counts(clients: int, classes: int) -> dict[str, Any]:
    """Client k has only class k mod `classes`, k + 1 samples of it."""
    rows = []
    for k in range(clients):
        counts = [0] * classes
        counts[k % classes] = k + 1
        rows.append({"client": k, "name": str(k), "train": 1, "test": 1, "classes": counts})
    names = [f"class number {label}" for label in range(classes)]
    about = {"dataset": "digits", "samples": 9, "shape": [1], "partition": "iid", "seed": 0}
    return {**about, "classes": names, "clients": rows}


def test_long_class_names_are_listed_below_the_table_and_many_classes_are_counted() -> None:
    table = plans.client_table(client_counts(3, 10))
    assert [column.head.strip() for column in table.columns] == ["client", "train", "test", *map(str, range(10))]
    assert list(table.records[1].values()) == ["1", 1, 1, ".", 2, *["."] * 8]
    assert "Classes: 0 class number 0, 1 class number 1, " in table.intro
    many = plans.client_table(client_counts(3, 120)).records[2]
    assert many == {"client": "2", "train": 1, "test": 1, "classes": 1, "largest": "class number 2: 3"}


def test_the_table_of_many_clients_shows_forty_from_the_largest_to_the_smallest() -> None:
    table = plans.client_table(client_counts(100, 2))
    numbers = [int(record["client"]) for record in table.records]
    assert numbers == sorted(numbers, reverse=True)
    assert (len(numbers), numbers[0], numbers[-1]) == (40, 99, 0)
    assert "40 of 100 clients, from the largest to the smallest; --json has all." in table.intro
    assert "samples per client: 1 to 100, median 50.5;" in table.intro


CONTENT = b"published" * 1000
SUM = hashlib.sha256(CONTENT).hexdigest()


def test_download_names_files_that_exist_and_files_that_no_mirror_has(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """SVHN is one small file, at an address without a server."""
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setitem(FILES, "svhn", {"x.mat": SUM})
    monkeypatch.setitem(MIRRORS, "svhn", ("http://127.0.0.1:9",))
    path, command = tmp_path / "svhn" / "x.mat", ["data", "download", "svhn", "--data-dir", str(tmp_path), "--json"]
    assert main(command) == 1
    assert capsys.readouterr().err.startswith(f"error: {path}: no mirror gave it; try again later, or put it")
    path.write_bytes(CONTENT)
    assert main(command) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out) == {"dataset": "svhn", "files": [str(path)]}
    assert printed.err == f"{path}: is there, with the published checksum\n"
