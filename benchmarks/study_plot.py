"""Accuracy against bytes, one panel per data set, from the tables that benchmarks/study.py collected."""

from __future__ import annotations

from pathlib import Path
from statistics import mean
from typing import Any

from study_tables import DATASETS, MIB, RESULTS, Row, Rows, by_label, load

from pfedlms.report import charts

DASHES = ([1, 0], [6, 3], [2, 3], [8, 3, 2, 3])
ROOM_BELOW = 2.5  # points of accuracy under `local` that are shown


def curve(own: Rows) -> list[tuple[float, float]]:
    """Bytes a client has sent and received, and P-acc, both means over the seeds that finished."""
    done = [row for row in own.values() if row["status"] == "finished"]
    length = min((len(row["curve"]["p_acc"]) for row in done), default=0)
    clients = done[0]["config"]["data"]["clients"] if done else 1
    return [
        (mean(row["curve"]["bytes"][i] / clients for row in done), mean(row["curve"]["p_acc"][i] for row in done))
        for i in range(length)
    ]


def named(label: str) -> str:
    """The same on every data set: without numbers that were chosen for each."""
    if label.startswith("fedavg-step"):
        return "fedavg, server step chosen"
    if label.startswith("stc-as-r"):
        return f"stc, bytes of ratio {label.removeprefix('stc-as-r')}"
    return label.replace("-r", ", ratio ")


def panel(rows: list[Row], title: str) -> Any:
    """Variants of a method have its colour and differ in their dashes."""
    points: list[dict[str, Any]] = []
    style: dict[str, charts.Look] = {}
    drawn: dict[str, int] = {}
    found = {label: curve(own) for label, own in by_label(rows).items()}
    level = next((mean(p for _, p in own[-10:]) for label, own in found.items() if label.startswith("local")), None)
    for label, own in found.items():
        method = label.partition("-")[0]
        name = "local, nothing sent" if method == "local" else named(label)
        dash = DASHES[drawn.get(method, 0) % len(DASHES)]
        drawn[method] = drawn.get(method, 0) + 1
        style[name] = charts.Look(charts.looks([method])[method].colour, dash)
        if method == "local" and level is not None:
            points.append({"row": name, "mean": level})
        else:
            shown = [each for each in own if each[0] and (level is None or each[1] > level - ROOM_BELOW)]
            points += [{"row": name, "x": sent / MIB, "mean": reached} for sent, reached in shown]
    y = "P-acc, %, mean over seeds"
    return charts.lines(points, "MiB a client has sent and received", y, log=True, title=title, style=style)


def draw(file: Path, setup: str) -> None:
    """All data sets that have tables."""
    names = [path.stem.removeprefix("tables-") for path in RESULTS.glob("tables-*.json")]
    names = sorted(names, key=lambda name: [*DATASETS, name].index(name))
    # Two ratios of each are enough to see; all of them are in the tables.
    left_out = ("r0.2", "r0.02")
    panels = []
    for name in names:
        rows = [row for row in load(f"tables-{name}") if row["setup"] == setup and not row["label"].endswith(left_out)]
        panels.append(panel(rows, DATASETS.get(name, name)).properties(width=400, height=380))
    charts.save(charts.beside(panels), file)
