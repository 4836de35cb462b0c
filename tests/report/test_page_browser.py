"""The page in a real headless browser: figures, sorting, tooltips and themes work, without console messages or network
requests."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from studies import write_comparison

from pfedlms.cli.stored import sections_of
from pfedlms.report.page import write_page

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no browser here; Debian: apt-get install chromium")

ASK = """
<script>addEventListener("load", async () => {
  await drawn;
  const table = document.querySelector("table"), buttons = [...table.querySelectorAll("thead button")];
  const names = () => [...table.tBodies[0].rows].map((row) => row.cells[0].dataset.value);
  const column = (name) => buttons.find((each) => each.textContent === name);
  const press = (name) => {
    column(name).focus();
    const focused = document.activeElement === column(name);
    column(name).click();
    return [names(), column(name).closest("th").getAttribute("aria-sort"), focused];
  };
  const paper = () => getComputedStyle(document.body).backgroundColor;
  const seen = {before: names()};
  seen.fewer = press("fewer");
  seen.fewer_again = press("fewer");
  seen.name = press("");
  seen.sorted = table.querySelectorAll("[aria-sort=ascending],[aria-sort=descending]").length;
  seen.colours = [1, 2, 3].map(() => { document.getElementById("theme").click(); return paper(); });
  seen.wide = [document.documentElement.scrollWidth, innerWidth];
  const boxes = [...document.querySelectorAll("figure svg")].map((each) => each.getBoundingClientRect());
  seen.figures = boxes.filter((box) => box.width > 100 && box.height > 100).length;
  const point = document.querySelector("#c-accuracy-rounds .mark-symbol path"), box = point.getBoundingClientRect();
  const at = {clientX: box.x + box.width / 2, clientY: box.y + box.height / 2, bubbles: true};
  for (const kind of ["pointerover", "pointermove", "mouseover", "mousemove"]) {
    point.dispatchEvent(new (kind.startsWith("p") ? PointerEvent : MouseEvent)(kind, at));
  }
  seen.tooltip = document.getElementById("vg-tooltip-element")?.textContent;
  const line = document.querySelector("#c-accuracy-rounds .mark-line path");
  seen.strokes = ["dark", "light"].map((theme) => {
    document.documentElement.dataset.theme = theme;
    return getComputedStyle(line).stroke;
  });
  seen.svg = (await document.querySelector("#c-cost .chart").view.toSVG()).length;
  seen.blob = document.getElementById("download").href.split(":")[0];
  seen.asked = performance.getEntriesByType("resource").map((each) => each.name);
  const pre = document.createElement("pre");
  pre.id = "seen";
  pre.textContent = JSON.stringify(seen);
  document.body.append(pre);
});</script>
"""


def with_script(page: str, more: str) -> str:
    """Before the last `</body>`: the library that draws has one in it, too."""
    before, tag, after = page.rpartition("</body>")
    return before + more + tag + after


def browse(page: str, folder: Path, ask: str = ASK) -> tuple[dict[str, Any], list[str]]:
    """The result of the script `ask` on the page, and the messages on the console."""
    file = folder / "browsed.html"
    file.write_text(with_script(page, ask), encoding="utf-8")
    command = [
        BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
        "--disable-background-networking", "--disable-component-update", "--host-resolver-rules=MAP * ~NOTFOUND",
        "--allow-file-access-from-files", "--enable-logging=stderr", f"--user-data-dir={folder / 'profile'}",
        "--virtual-time-budget=5000", "--dump-dom", file.as_uri(),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    found = re.search(r'<pre id="seen">(.*?)</pre>', done.stdout, re.DOTALL)
    assert found is not None, done.stderr
    return json.loads(unescape(found[1])), re.findall(r"CONSOLE.*", done.stderr)


@pytest.fixture
def page(tmp_path: Path) -> str:
    write_page(sections_of([write_comparison(tmp_path / "c")])[0], tmp_path / "r.html")
    return (tmp_path / "r.html").read_text(encoding="utf-8")


def test_the_page_works_in_a_browser(page: str, tmp_path: Path) -> None:
    seen, console = browse(page, tmp_path)
    assert console == []
    assert seen["asked"] == []
    assert seen["before"] == ["local", "fedavg", "stc"]
    # 16 and 1 times fewer; what has no number stays below.
    assert seen["fewer"] == [["stc", "fedavg", "local"], "descending", True]
    assert seen["fewer_again"] == [["fedavg", "stc", "local"], "ascending", True]
    assert seen["name"] == [["fedavg", "local", "stc"], "ascending", True]
    assert seen["sorted"] == 1
    light, dark, system = seen["colours"]
    assert (light, dark) == ("rgb(255, 255, 255)", "rgb(20, 23, 28)")
    assert system in (light, dark)
    assert seen["wide"][0] <= seen["wide"][1], "the page itself does not scroll sideways"
    assert seen["figures"] == 5
    assert "fedavg" in seen["tooltip"], "the first line is that of the best row"
    assert "70" in seen["tooltip"]
    assert seen["strokes"][0] != seen["strokes"][1], "a line has another colour in the dark"
    assert seen["svg"] > 1000
    assert seen["blob"] == "blob"


def test_errors_and_network_requests_are_detected(page: str, tmp_path: Path) -> None:
    broken = '<script>undefinedName();</script><img src="http://example.invalid/a.png">'
    seen, console = browse(with_script(page, broken), tmp_path)
    assert any("undefinedName" in line for line in console)
    assert seen["asked"] == ["http://example.invalid/a.png"]


@pytest.mark.parametrize(("width", "fits"), [(390, False), (1100, True)], ids=["phone", "window"])
def test_nothing_scrolls_sideways_but_tables_on_a_phone(width: int, fits: bool, tmp_path: Path) -> None:
    """A frame as wide as a phone is one to the page's style. The table has all columns of a usual study."""
    reached = {"max": 98.76, "last10": 97.65, "final": 96.54}
    study = write_comparison(tmp_path / "c", validation_accuracy=reached, global_accuracy=reached)
    write_page(sections_of([study])[0], tmp_path / "inner.html")
    frame = f'<body><iframe id="f" src="inner.html" style="width:{width}px;height:800px;border:0"></iframe></body>'
    ask = """<script>addEventListener("load", async () => {
      await document.getElementById("f").contentWindow.drawn;
      const root = document.getElementById("f").contentWindow.document.documentElement;
      const shown = [...root.querySelectorAll("figure svg")].filter((each) => each.getBoundingClientRect().width > 0);
      const table = root.querySelector(".scroll");
      const seen = {page: [root.scrollWidth, root.clientWidth], table: [table.scrollWidth, table.clientWidth],
                    figures: shown.map((each) => each.getBoundingClientRect().width)};
      const pre = document.createElement("pre");
      pre.id = "seen"; pre.textContent = JSON.stringify(seen); document.body.append(pre);
    });</script>"""
    seen, console = browse(frame, tmp_path, ask)
    assert console == []
    assert seen["page"][0] == seen["page"][1]
    assert (seen["table"][0] == seen["table"][1]) == fits
    assert len(seen["figures"]) == 5
    assert all(250 < each <= width - 2 * 16 for each in seen["figures"])
