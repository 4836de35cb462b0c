"""Plots; they need the extra `report`."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from itertools import product
from math import nan
from pathlib import Path
from statistics import mean
from typing import Any

from pfedlms.errors import UsageError
from pfedlms.report.tables import last_evaluations

COLOURS = {
    "sketchvote": "#3a4fb0", "pfedlms": "#0b6e4f", "fedavg": "#c84c09", "local": "#6c757d", "pfed1bs": "#7fb069",
    "eden": "#b5179e", "zsign": "#e0a100", "obcsaa": "#8d5a3b", "obda": "#9aa0a6", "fedproto": "#4cc9f0",
    "stc": "#d7263d", "stc@sketchvote": "#d7263d",
}  # fmt: skip
"""Of methods, the same in every plot."""


def can_draw() -> bool:
    """Whether the extra is there."""
    return find_spec("matplotlib") is not None


def check_plot(file: Path) -> None:
    """Before hours of training rather than after: can the plot be drawn and written?"""
    if not can_draw():
        raise UsageError("--plot needs matplotlib; install it with: pip install 'pfedlms[report]'")
    if file.suffix not in (".png", ".svg", ".pdf") or not os.access(file.resolve().parent, os.W_OK):
        raise UsageError(
            f"--plot: got {str(file)!r}, expected a .png, .svg or .pdf file in a folder that can be written"
        )


def who_holds_what(document: Mapping[str, Any], file: Path) -> None:
    """Draw what `experiment.holdings` found: a map of clients x classes, and beside it everybody's samples by part."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.colors import LinearSegmentedColormap

    clients, classes = document["clients"], document["classes"]
    counts = [client["classes"] for client in clients]
    most = max(map(max, counts))
    size = (min(max(7, 4 + 0.45 * len(classes)), 16), min(max(3, 1.5 + 0.24 * len(clients)), 12))
    figure, (cells, bars) = plt.subplots(
        1, 2, figsize=size, dpi=150, sharey=True, width_ratios=(3, 1), layout="constrained"
    )
    shades = LinearSegmentedColormap.from_list("samples", ["#ffffff", COLOURS["sketchvote"]])
    image = cells.imshow(counts, cmap=shades, vmin=0, aspect="auto", interpolation="nearest")
    if len(clients) <= 40:
        cells.set_yticks(range(len(clients)), [client["name"] for client in clients], fontsize=7)
    if len(classes) <= 40:
        names = [name if len(name) <= 16 else name[:15] + "…" for name in classes]
        cells.set_xticks(range(len(classes)), names, fontsize=7, rotation=90 if max(map(len, names)) > 3 else 0)
    if len(clients) <= 40 and len(classes) <= 20:
        for row, column in product(range(len(clients)), range(len(classes))):
            if count := counts[row][column]:
                colour = "white" if count > most / 2 else "black"
                cells.text(column, row, count, ha="center", va="center", fontsize=6, color=colour)
    else:
        figure.colorbar(image, ax=cells, label="samples", location="bottom", shrink=0.5, aspect=40)
    how = document["partition"] + (f", α = {document['alpha']:g}" if "alpha" in document else "")
    cells.set_title(f"{Path(document['dataset']).name} · {len(clients)} clients · {how}", fontsize=9, loc="left")
    cells.set_xlabel("class")
    cells.set_ylabel("client")
    start = [0] * len(clients)
    for part, colour in (("train", "sketchvote"), ("validation", "fedavg"), ("test", "local")):
        if part in clients[0]:
            sizes = [client[part] for client in clients]
            bars.barh(
                range(len(clients)),
                sizes,
                left=start,
                height=0.8 if len(clients) <= 100 else 1.0,
                color=COLOURS[colour],
                label=part,
            )
            start = [before + more for before, more in zip(start, sizes, strict=True)]
    bars.set_xlabel("samples")
    bars.tick_params(left=False, labelleft=False)
    bars.spines[["top", "right", "left"]].set_visible(False)
    figure.legend(*bars.get_legend_handles_labels(), frameon=False, loc="outside upper right", ncols=3, fontsize=8)
    figure.savefig(file)
    plt.close(figure)


def accuracy_against_bytes(given: Sequence[Any], file: Path, title: str = "") -> None:
    """Draw P-acc against the bytes one client has exchanged on average, a line per row with its range over seeds."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    runs: dict[str, list[list[dict[str, Any]]]] = {}
    clients, name_of = 1, "P-acc, %"
    for run in given:
        clients, name_of = run.summary["clients"], run.summary.get("metric", name_of)
        if run.summary["status"] == "finished":
            runs.setdefault(run.label, []).append(run.metrics)

    figure, axes = plt.subplots(figsize=(8, 4.5), dpi=150, layout="constrained")
    for method, seeds in runs.items():
        length = min(len(records) for records in seeds)
        # What was not finite is null in JSON, and a gap in the line.
        curves = [[nan if (p := record["p_acc"]) is None else p for record in records[:length]] for records in seeds]
        middle = [sum(column) / len(column) for column in zip(*curves, strict=True)]
        colour = COLOURS.get(method)
        sent = [sum(record["bytes"].values()) / clients for record in seeds[0][:length]]
        if sent[-1] == 0:
            axes.axhline(middle[-1], color=colour, linestyle="--", label=f"{method} (nothing sent)")
            continue
        (line,) = axes.plot(sent, middle, color=colour, linewidth=2, label=method)
        low, high = zip(*((min(column), max(column)) for column in zip(*curves, strict=True)), strict=True)
        axes.fill_between(sent, low, high, color=line.get_color(), alpha=0.15, linewidth=0)
    axes.set_xscale("log")
    axes.set_xlabel("bytes a client has sent and received on average, framing included")
    axes.set_ylabel(f"{name_of} (range over seeds)")
    axes.set_title(title, loc="left", fontsize=10)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="best")
    figure.savefig(file)
    plt.close(figure)


def accuracy_by_setting(
    cells: Sequence[Mapping[str, Any]], best: Mapping[str, Any], by: str, file: Path, title: str = ""
) -> None:
    """Draw a sweep's measure against the setting with the most values, a line a combination of the others with its
    range over seeds, the best marked."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    key, name = _MEASURES[by]
    tried = {each: list(dict.fromkeys(cell["settings"][each] for cell in cells)) for each in best["settings"]}
    across = max(tried, key=lambda each: (_numeric(tried[each]), len(tried[each])))
    ticks = tried[across]
    numeric = _numeric(ticks)

    def place(cell: Mapping[str, Any]) -> float:
        value = cell["settings"][across]
        return float(value) if numeric else float(ticks.index(value))

    lines: dict[str, list[tuple[float, list[float]]]] = {}
    for cell in cells:
        if cell["score"] is not None:
            others = [f"{each.partition('.')[2]} {own}" for each, own in cell["settings"].items() if each != across]
            scores = [run[key]["last10"] for run in cell["runs"]]
            lines.setdefault(", ".join(others), []).append((place(cell), scores))

    figure, axes = plt.subplots(figsize=(8, 4.5), dpi=150, layout="constrained")
    for label, points in lines.items():
        points.sort(key=lambda point: point[0])
        places = [at for at, _ in points]
        (line,) = axes.plot(places, [mean(scores) for _, scores in points], marker="o", linewidth=2, label=label)
        low, high = ([pick(scores) for _, scores in points] for pick in (min, max))
        axes.fill_between(places, low, high, color=line.get_color(), alpha=0.15, linewidth=0)
    top = (place(best), best["score"])
    axes.plot(*([value] for value in top), marker="*", markersize=16, color="black", linestyle="none", zorder=3)
    own = best["runs"][0].get("metric")
    axes.annotate(f"{top[1]:.4g}" if own else f"{top[1]:.2f} %", top, (0, 11), textcoords="offset points", ha="center")
    axes.margins(y=0.12)
    if numeric and min(ticks) > 0 and max(ticks) >= 5 * min(ticks):
        axes.set_xscale("log")
        axes.minorticks_off()
    axes.set_xticks(ticks if numeric else range(len(ticks)), [str(value) for value in ticks])
    axes.set_xlabel(across)
    over = last_evaluations([run for cell in cells for run in cell["runs"]])[1]
    what = f"{own} ({name})" if own else f"{name}, %"
    axes.set_ylabel(f"{what}\nmean of {over}" + " (range over seeds)" * (len(best["runs"]) > 1))
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(title, loc="left", fontsize=10)
    if len(lines) > 1:
        figure.legend(frameon=False, loc="outside right upper")
    figure.savefig(file)
    plt.close(figure)


_MEASURES = {
    "v_acc": ("validation_accuracy", "V-acc"),
    "p_acc": ("accuracy", "P-acc"),
    "g_acc": ("global_accuracy", "G-acc"),
}


def _numeric(values: Sequence[Any]) -> bool:
    return all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)
