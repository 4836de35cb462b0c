"""The page as a file: well-formed, without external resources, for runs of every kind."""

from __future__ import annotations

import base64
import csv
import errno
import json
import re
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from studies import write_comparison, write_plan, write_run, write_sweep

import pfedlms
from pfedlms import files
from pfedlms.cli import main
from pfedlms.cli.stored import sections_of
from pfedlms.report.page import write_page

MARKUP = "</script><script>alert(1)</script>\"'&<b>"
VOID = {"meta", "link", "wbr"}


class Page(HTMLParser):
    """Checks that elements are closed in the order in which they were opened, and collects what a test asks for."""

    def __init__(self, text: str) -> None:
        super().__init__()
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
        self.words.append((self.open[-1] if self.open else "", data.strip()))

    def of(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]

    def text(self, tag: str) -> list[str]:
        return [text for name, text in self.words if name == tag]

    @property
    def documents(self) -> list[dict[str, Any]]:
        """The charts, and at last the raw data."""
        return [json.loads(text) for text in self.text("script") if text.startswith("{")]

    @property
    def visible(self) -> str:
        return " ".join(text for name, text in self.words if name not in ("script", "style", "title"))


def without_vega(text: str) -> str:
    """The page without the drawing library, which contains addresses that it does not load."""
    start = text.index('<script id="vega">')
    return text[:start] + text[text.index("</script>", start) + 9 :]


def page_of(folder: Path, *directories: Path) -> Page:
    sections, left_out = sections_of(directories)
    write_page(sections, folder / "page.html", left_out=left_out)
    text = without_vega((folder / "page.html").read_text(encoding="utf-8"))
    checked = re.sub(r"xmlns='http://www.w3.org/2000/svg'|\"https://vega.github.io/schema/[^\"]*\"", "", text)
    assert not re.search(r"https?:|//[\w.]+/|@import|url\((?!#)", checked), "nothing is loaded from outside"
    assert not re.search(r"\b(nan|inf)\b", re.sub(r"base64,[\w+/=]*", "", checked), re.IGNORECASE)
    page = Page(text)
    ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(set(ids)) == len(ids)
    return page


def test_the_page_of_a_comparison_has_its_figures_and_numbers(tmp_path: Path) -> None:
    page = page_of(tmp_path, write_comparison(tmp_path / "c"))
    assert page.text("h3") == [
        "Accuracy against rounds", "Accuracy against bytes", "Accuracy of the shared model against rounds", "Cost",
        "Clients against local", "Settings and environment",
    ]  # fmt: skip
    assert {"81.00", "60.50", "16.0×"} <= set(page.text("td"))
    *charts, raw = page.documents
    assert [run["name"] for run in raw["parts"][0]["runs"]] == ["local", "fedavg", "stc"] * 2
    assert len(charts) == 5
    assert not re.findall(r"#[0-9a-f]{6}", json.dumps(charts)), "colours are names, which themes define"
    assert "2 clients, α = 0.5 · 2 rounds · 2 seeds" in page.visible


def test_figures_are_files_and_links_of_the_page(tmp_path: Path) -> None:
    study, deep = write_comparison(tmp_path / "c"), tmp_path / "figures" / "deep"
    written = write_page(sections_of([study])[0], tmp_path / "r.html", deep)
    page = Page(without_vega((tmp_path / "r.html").read_text(encoding="utf-8")))
    links = {a["download"]: a["href"] or "" for a in page.of("a") if "download" in a and a["download"] != "report.json"}
    assert sorted(path.name for path in written[1:]) == sorted(map(str, links))
    assert len(written) == 1 + 2 * 5
    for path in written[1:]:
        if path.suffix == ".csv":
            assert base64.b64decode(links[path.name].split(",")[1]) == path.read_bytes()
        else:
            assert ElementTree.parse(path).getroot().tag.endswith("svg")
            assert "var(" not in path.read_text(), "programs other than browsers know no such colours"
    with open(deep / "c-accuracy-rounds.csv", newline="") as file:
        rows = {(row["row"], row["round"]): row for row in csv.DictReader(file)}
    assert [rows["local", "2"][key] for key in ("mean", "low", "high")] == ["60.5", "60.0", "61.0"]


def test_markup_in_names_is_escaped(tmp_path: Path) -> None:
    config = write_run(tmp_path / "c" / "a", "fedavg", [70, 80], kib=1, client_names=[MARKUP, "b"], classes=[MARKUP])
    local = write_run(tmp_path / "c" / "b", "local", [60, 70], client_names=[MARKUP, "b"], dataset=MARKUP, model=MARKUP)
    write_plan(tmp_path / "c", {"a": (MARKUP, config), "b": ("local", local)})
    page = page_of(tmp_path, tmp_path / "c")
    *charts, raw = page.documents
    assert len(page.of("script")) == len(charts) + 2, "the charts, the raw data, and the page's own"
    assert not page.of("b")
    assert raw["parts"][0]["runs"][0]["name"] == MARKUP
    assert MARKUP in "".join(page.text("th"))
    assert MARKUP in {point["client"] for chart in charts for point in chart.get("data", {}).get("values", [])
                     if "client" in point}  # fmt: skip


MANY = [k / 2 for k in range(200)]


@pytest.mark.parametrize(
    ("method", "reached", "more", "expected"),
    [
        ("fedavg", [50, 60], {"kib": 1, "status": "interrupted"}, "interrupted"),
        ("fedavg", [50, None, None], {"kib": 1, "status": "diverged"}, "diverged"),
        ("pfedlms", [50], {"kib": 1}, "1 round"),
        ("fedavg", [50, 60], {"kib": 7, "clients": MANY}, "200 clients"),
        ("local", [50, 60], {}, "2 rounds"),
        ("pfedlms", [0.5, 0.6], {"kib": 1, "metric": "-loss"}, "-loss, the higher the better"),
        ("sketchvote", [50, 60], {"kib": 1, "participation": 0.5}, "everyone: all clients"),
    ],
)
def test_the_page_shows_runs_of_every_kind(
    method: str, reached: list[float | None], more: dict[str, Any], expected: str, tmp_path: Path
) -> None:
    write_run(tmp_path / "r", method, reached, **more)
    page = page_of(tmp_path, tmp_path / "r")
    assert expected in page.visible
    title = more.get("metric", "Accuracy")
    assert f"{title} against rounds" in page.text("h3")
    assert (f"{title} against bytes" in page.text("h3")) == ("Cost" in page.text("h3")) == (method != "local")
    assert ("%" in page.visible) == ("metric" not in more)


def test_the_page_of_a_killed_run(tmp_path: Path) -> None:
    chosen = {"rounds": 3, "clients": 4, "hidden": 12, "local_steps": 2, "threads": 1, "progress": False}
    pfedlms.run(method="sketchvote", out=tmp_path / "r", validation=0.2, **chosen)
    (tmp_path / "r" / "summary.json").unlink()
    page = page_of(tmp_path, tmp_path / "r")
    assert "interrupted" in page.visible
    assert "V-acc against rounds" in page.text("h3")


def test_the_page_of_a_sweep_marks_the_best_and_lists_its_settings(tmp_path: Path) -> None:
    write_sweep(tmp_path / "s", {"learning_rate": [0.1, 0.2], "batch_size": [8, 16]}, [70, 71, 72, 73])
    page = page_of(tmp_path, tmp_path / "s")
    assert page.text("h3")[0] == "P-acc, % by train.learning_rate"
    assert page.visible.count("(best)") == 1
    assert {"train.learning_rate", "train.batch_size"} <= set(page.text("button"))


def test_the_page_names_several_studies_and_what_is_left_out(tmp_path: Path) -> None:
    write_comparison(tmp_path / "one")
    write_comparison(tmp_path / "deep" / "one")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.toml").write_text("schema = 99\n")
    with pytest.warns(UserWarning, match="left out"):
        page = page_of(tmp_path, tmp_path)
    assert [section["id"] for section in page.of("section")] == ["one", "one-2"]
    assert [a["href"] for a in page.of("a")][:2] == ["#one", "#one-2"]
    assert "Left out: " in page.visible


def test_the_report_command_writes_a_page_or_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_comparison(tmp_path / "c")
    (tmp_path / "f").mkdir()
    monkeypatch.chdir(tmp_path)
    assert main(["report", "c"]) == 0
    assert capsys.readouterr().err == "report: report.html\n"
    first = (tmp_path / "report.html").read_bytes()
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

    def fail_to_write(self: Any, data: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files._RawFile, "write", fail_to_write)
    (tmp_path / "report.html").write_bytes(b"as it was")
    assert main(["report", "c"]) == 2
    message = "report.html: cannot be written (No space left on device); make room or name another file"
    assert message in capsys.readouterr().err
    assert (tmp_path / "report.html").read_bytes() == b"as it was"
    assert main(["report", "c", "-o", "/dev/null"]) == 0  # not a regular file
    assert not list(tmp_path.glob("*.tmp"))
