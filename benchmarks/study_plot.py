"""Accuracy against bytes, a panel a data set, from the tables that benchmarks/study.py collected."""

from __future__ import annotations

from pathlib import Path
from statistics import mean

import matplotlib
from study_tables import DATASETS, RESULTS, Row, Rows, by_label, load

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

# Method: colour and marker. Ratios of a method differ in the style of their line and in the filling of their marker.
LOOKS = {
    "fedavg": ("#c84c09", "o"),
    "pfedlms": ("#0b6e4f", "s"),
    "sketchvote": ("#1d4e89", "^"),
    "stc": ("#7a4b94", "D"),
}
STYLES = ("-", "--", "-.", ":")
ROOM_BELOW = 2.5  # points of accuracy under `local` that are shown


def curve(own: Rows) -> tuple[list[float], list[float]]:
    """Bytes a client has sent and received, and P-acc, both means over the seeds that finished."""
    done = [row for row in own.values() if row["status"] == "finished"]
    length = min((len(row["curve"]["p_acc"]) for row in done), default=0)

    def column(name: str, scale: float) -> list[float]:
        return [mean(row["curve"][name][i] * scale for row in done) for i in range(length)]

    clients = done[0]["config"]["data"]["clients"] if done else 1
    return column("bytes", 1 / clients), column("p_acc", 1)


def named(label: str) -> str:
    """The same on every data set: without numbers that were chosen for each."""
    if label.startswith("fedavg-step"):
        return "fedavg, server step chosen"
    if label.startswith("stc-as-r"):
        return f"stc, bytes of ratio {label.removeprefix('stc-as-r')}"
    return label.replace("-r", ", ratio ")


def panel(axes: Axes, rows: list[Row], name: str) -> None:
    lines = by_label(rows)
    drawn: dict[str, int] = {}
    level = None
    for label, own in lines.items():
        method = label.partition("-")[0]
        sent, reached = curve(own)
        if not reached:
            continue
        if method == "local":
            level = mean(reached[-10:])
            axes.axhline(level, color="#444444", linewidth=1, linestyle=(0, (1, 2)), label="local, nothing sent")
            continue
        colour, marker = LOOKS[method]
        style = STYLES[drawn.get(method, 0) % len(STYLES)]
        drawn[method] = drawn.get(method, 0) + 1
        filled = colour if drawn[method] == 1 else "white"
        axes.plot(
            sent, reached, color=colour, linestyle=style, linewidth=1.6, marker=marker, markersize=4.5,
            markevery=[*range(0, len(sent), max(1, len(sent) // 6)), len(sent) - 1], markerfacecolor=filled,
            label=named(label),
        )  # fmt: skip
    points = [point for own in lines.values() for point in zip(*curve(own), strict=True)]
    if level is not None:
        best = max(reached for _, reached in points)
        axes.set_ylim(level - ROOM_BELOW, best + 0.1 * (best - level))
        seen = [sent for sent, reached in points if sent and reached > level - ROOM_BELOW]
        axes.set_xlim(0.6 * min(seen), 1.7 * max(seen))
    axes.set_xscale("log")
    axes.set_title(name, loc="left", fontsize=11)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlabel("bytes a client has sent and received")


def draw(file: Path, setup: str) -> None:
    """All data sets that have tables."""
    names = [path.stem.removeprefix("tables-") for path in RESULTS.glob("tables-*.json")]
    names = sorted(names, key=lambda name: [*DATASETS, name].index(name))
    # Two ratios of each are enough to see; all of them are in the tables.
    chosen = ("r0.2", "r0.02")
    size = (4.6 * len(names) + 0.6, 5.4)
    figure, panels = plt.subplots(1, len(names), figsize=size, dpi=150, squeeze=False, layout="constrained")
    handles: dict[str, object] = {}
    for axes, name in zip(panels[0], names, strict=True):
        rows = [row for row in load(f"tables-{name}") if row["setup"] == setup and not row["label"].endswith(chosen)]
        panel(axes, rows, DATASETS.get(name, name))
        for handle, text in zip(*axes.get_legend_handles_labels(), strict=True):
            handles.setdefault(text, handle)
    panels[0][0].set_ylabel("P-acc, %, mean over seeds")
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    figure.savefig(file)
    plt.close(figure)
