"""The page as a file: well formed, of itself alone, and sound for runs of every kind."""

from __future__ import annotations

import base64
import csv
import json
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from studies import a_comparison, a_run, compared
from torch import nn

import pfedlms
from pfedlms.cli import main
from pfedlms.report.page import write

SMALL = {"rounds": 3, "clients": 4, "hidden": 12, "local_steps": 2, "batch_size": 8, "threads": 1, "progress": False}
NASTY = "</script><script>alert(1)</script>\"'&<b>"
VOID = {"meta", "link", "wbr"}


class Page(HTMLParser):
    """Checks that elements are closed in the order they were opened, and collects what a test asks for."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.text = text
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[tuple[str, str]] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append((self.open[-1] if self.open else "", data))

    def of(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]

    def said(self, tag: str) -> list[str]:
        return [text for name, text in self.words if name == tag]

    @property
    def raw(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.said("script")[0])
        return found

    @property
    def visible(self) -> str:
        return " ".join(text for name, text in self.words if name not in ("script", "style", "title"))

    @property
    def titles(self) -> list[str]:
        return self.said("h3")


def page_of(folder: Path, *directories: Path) -> Page:
    write(directories, folder / "page.html")
    text = (folder / "page.html").read_text(encoding="utf-8")
    lowered = text.replace('xmlns="http://www.w3.org/2000/svg"', "").replace("xmlns='http://www.w3.org/2000/svg'", "")
    assert not re.search(r"https?:|//[\w.]+/|@import|url\((?!#)", lowered), "nothing is loaded from outside"
    assert not re.search(r"\b(nan|inf)\b", re.sub(r"base64,[\w+/=]*", "", lowered), re.IGNORECASE)
    page = Page(text)
    ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    clips = [each for each in ids if each and each.startswith("clip-")]
    rest = [each for each in ids if each not in clips]
    assert len(set(rest)) == len(rest)
    return page


def test_a_comparison(tmp_path: Path) -> None:
    page = page_of(tmp_path, compared(tmp_path / "c"))
    assert page.titles == [
        "Accuracy against rounds", "Accuracy against bytes", "Accuracy of the shared model against rounds", "Cost",
        "Clients against local", "Settings and environment",
    ]  # fmt: skip
    assert {"81.00", "60.50"} <= set(page.said("td"))
    assert "16.0×" in page.said("td")
    assert [run["name"] for run in page.raw["parts"][0]["runs"]] == ["local", "fedavg", "stc"] * 2
    assert len(page.of("svg")) == 2 * 5, "each for a wide and for a narrow screen"


def test_figures_are_files_and_links_of_the_page(tmp_path: Path) -> None:
    study = compared(tmp_path / "c")
    written = write([study], tmp_path / "r.html", tmp_path / "figures" / "deep")
    page = Page((tmp_path / "r.html").read_text(encoding="utf-8"))
    links = {a["download"]: a["href"] for a in page.of("a") if (a.get("href") or "").startswith("data:")}
    assert sorted(path.name for path in written[1:]) == sorted(map(str, links))
    for path in written[1:]:
        href = links[path.name]
        assert href is not None
        assert base64.b64decode(href.split(",")[1]) == path.read_bytes()
        if path.suffix == ".svg":
            root = ElementTree.parse(path).getroot()
            assert root.tag.endswith("svg")
            assert "var(" not in path.read_text(), "programs other than browsers know no such colours"
    with open(tmp_path / "figures" / "deep" / "c-accuracy-rounds.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert rows[1] == {"row": "local", "round": "2", "mean": "60.5", "lowest": "60.0", "highest": "61.0"}


def test_words_of_users_stay_words(tmp_path: Path) -> None:
    config = a_run(tmp_path / "c" / "a", "fedavg", [70, 80], kib=1, client_names=[NASTY, "b"], classes=[NASTY])
    local = a_run(tmp_path / "c" / "b", "local", [60, 70], client_names=[NASTY, "b"], dataset=NASTY, model=NASTY)
    a_comparison(tmp_path / "c", {"a": (NASTY, config), "b": ("local", local)})
    page = page_of(tmp_path, tmp_path / "c")
    assert len(page.of("script")) == 2
    assert not page.of("b")
    assert page.raw["parts"][0]["runs"][0]["name"] == NASTY
    assert any(NASTY in text for text in page.said("th"))
    assert any(text.startswith(NASTY) for text in page.said("title")), "the client whose gain is told"


def interrupted(folder: Path) -> None:
    pfedlms.run(method="fedavg", out=folder, **SMALL)
    (folder / "summary.json").unlink()


def one_evaluation(folder: Path) -> None:
    pfedlms.run(method="pfedlms", out=folder, evaluate_every=3, **SMALL)


def sampled(folder: Path) -> None:
    pfedlms.run(method="sketchvote", out=folder, participation=0.5, validation=0.2, **SMALL)


def nothing_sent(folder: Path) -> None:
    pfedlms.run(method="local", out=folder, **SMALL)


def own_metric(folder: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4, 30, 3, generator=generator)
    clients = [(own, own.sum(dim=1, keepdim=True)) for own in x]

    def squared(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return (outputs - targets).square().sum(dim=1)

    quick = {key: value for key, value in SMALL.items() if key not in ("clients", "hidden")}
    pfedlms.run(clients, lambda: nn.Linear(3, 1), method="pfedlms", loss=squared, out=folder, **quick)


def diverged(folder: Path) -> None:
    a_run(folder, "fedavg", [50, None, None], kib=1, status="diverged")


def old(folder: Path) -> None:
    a_run(folder, "pfedlms", [50, 60], kib=1)
    summary = json.loads((folder / "summary.json").read_text())
    for key in ("evaluations", "participation", "everyone", "parameters", "seconds"):
        del summary[key]
    (folder / "summary.json").write_text(json.dumps(summary))


def many_clients(folder: Path) -> None:
    a_run(folder / "a", "local", [50, 60], clients=[k / 2 for k in range(200)])
    a_run(folder / "b", "fedavg", [50, 60], clients=[100 - k / 2 for k in range(200)], kib=7)


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (interrupted, "interrupted"), (one_evaluation, "of the one evaluation"), (sampled, "everyone: all clients"),
        (nothing_sent, "of all 3 evaluations"), (own_metric, "-loss"), (diverged, "diverged"), (old, "do not tell"),
        (many_clients, "of 200"),
    ],
    ids=lambda case: getattr(case, "__name__", ""),
)  # fmt: skip
def test_runs_of_every_kind(make: Callable[[Path], None], expected: str, tmp_path: Path) -> None:
    make(tmp_path / "r")
    page = page_of(tmp_path, tmp_path / "r")
    assert expected in page.visible
    title = "-loss" if make is own_metric else "Accuracy"
    assert f"{title} against rounds" in page.titles
    assert (f"{title} against bytes" in page.titles) == ("Cost" in page.titles) == (make is not nothing_sent)
    if make is own_metric:
        assert "%" not in page.visible
        assert "model was given in Python" in page.visible, "why there are no layers"


def test_layers_and_stages_are_on_the_page(tmp_path: Path) -> None:
    small = [part for key, value in (("data.clients", 4), ("model.hidden", 12), ("train.local_steps", 2))
             for part in ("--set", f"{key}={value}")]  # fmt: skip
    assert main(["run", "--rounds", "2", "--profile", *small, "--out", str(tmp_path / "r"), "--quiet"]) == 0
    page = page_of(tmp_path, tmp_path / "r")
    assert {"Layers: weights, sketches and thresholds", "Symbols sent", "Time by stage"} <= set(page.titles)
    assert sum(text.startswith("τ") for text in page.said("title")) == 2 * 2 * 7, "two drawings, two layers, T = 7"
    assert torch.__version__ in page.said("td")


def test_a_sweep(tmp_path: Path) -> None:
    made = {}
    for at, (rate, size) in enumerate(((0.1, 8), (0.2, 8), (0.1, 16), (0.2, 16))):
        settings = {"train": {"learning_rate": rate, "batch_size": size}}
        config = a_run(tmp_path / "s" / f"r{at}", "fedavg", [70 + at], kib=1, settings=settings)
        made[f"r{at}"] = (f"learning_rate={rate} batch_size={size}", config)
    axes = {"train.learning_rate": [0.1, 0.2], "train.batch_size": [8, 16]}
    a_comparison(tmp_path / "s", made, "sweep.json", axes=axes, by="p_acc")
    page = page_of(tmp_path, tmp_path / "s")
    assert page.titles[0] == "P-acc, % by train.learning_rate"
    assert page.said("small").count(" best") == 1


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    compared(tmp_path / "c")
    assert main(["report", "c"]) == 0
    assert capsys.readouterr().err == "report: report.html\n"
    assert main(["report", "c", "-o", "deep/r.html", "--figures", "f"]) == 0
    assert capsys.readouterr().err == "report: deep/r.html; 10 files in f\n"
    first = (tmp_path / "deep" / "r.html").read_bytes()
    assert main(["report", "c", "-o", "deep/r.html"]) == 0
    assert (tmp_path / "deep" / "r.html").read_bytes() == first
    capsys.readouterr()
    for arguments, message in (
        (["nowhere"], "nowhere: there is no such folder"),
        (["f"], "no run with an evaluation here"),
        (["c", "-o", "f"], "f: is a folder, expected a file"),
        (["c", "-o", "report.html/x.html"], "cannot be written"),
    ):
        assert main(["report", *arguments]) == 2
        assert message in capsys.readouterr().err
