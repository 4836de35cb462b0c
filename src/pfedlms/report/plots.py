"""Plots; they need the extra `report`."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pfedlms.errors import UsageError

_COLOURS = {"sketchvote": "#3a4fb0", "pfedlms": "#0b6e4f", "fedavg": "#c84c09", "local": "#6c757d"}


def check_plot(file: Path) -> None:
    """Before hours of training rather than after: can the plot be drawn and written?"""
    if find_spec("matplotlib") is None:
        raise UsageError("--plot needs matplotlib; install it with: pip install 'pfedlms[report]'")
    if file.suffix not in (".png", ".svg", ".pdf") or not os.access(file.resolve().parent, os.W_OK):
        raise UsageError(
            f"--plot: got {str(file)!r}, expected a .png, .svg or .pdf file in a folder that can be written"
        )


def accuracy_against_bytes(directory: Path, file: Path) -> None:
    """Draw P-acc against the bytes one client has exchanged on average, a line a variant with its range over seeds, from
    a comparison's folder."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    runs: dict[str, list[list[dict[str, Any]]]] = {}
    clients = 1
    manifest = json.loads((directory / "compare.json").read_text())
    for name in manifest["runs"]:
        summary = json.loads((directory / name / "summary.json").read_text())
        clients = summary["clients"]
        if summary["status"] != "finished":
            continue
        lines = (directory / name / "metrics.jsonl").read_text().splitlines()
        row = manifest.get("names", {}).get(name, summary["method"])
        runs.setdefault(row, []).append([json.loads(line) for line in lines])

    figure, axes = plt.subplots(figsize=(8, 4.5), dpi=150, layout="constrained")
    for method, seeds in runs.items():
        length = min(len(records) for records in seeds)
        curves = [[record["p_acc"] for record in records[:length]] for records in seeds]
        middle = [sum(column) / len(column) for column in zip(*curves, strict=True)]
        colour = _COLOURS.get(method)
        sent = [sum(record["bytes"].values()) / clients for record in seeds[0][:length]]
        if sent[-1] == 0:
            axes.axhline(middle[-1], color=colour, linestyle="--", label=f"{method} (nothing sent)")
            continue
        (line,) = axes.plot(sent, middle, color=colour, linewidth=2, label=method)
        low, high = zip(*((min(column), max(column)) for column in zip(*curves, strict=True)), strict=True)
        axes.fill_between(sent, low, high, color=line.get_color(), alpha=0.15, linewidth=0)
    axes.set_xscale("log")
    axes.set_xlabel("bytes a client has sent and received on average, framing included")
    axes.set_ylabel("P-acc, % (range over seeds)")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="lower right")
    figure.savefig(file)
    plt.close(figure)


def accuracy_by_setting(cells: Sequence[Mapping[str, Any]], best: Mapping[str, Any] | None, by: str, file: Path) -> None:
    """Draw a sweep's measure against the setting with the most values, a line a combination of the others, the best
    marked, with the range over seeds."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    key, name = {
        "v_acc": ("validation_accuracy", "V-acc"), "p_acc": ("accuracy", "P-acc"), "g_acc": ("global_accuracy", "G-acc")
    }[by]  # fmt: skip
    axes_of = {setting: list(dict.fromkeys(cell["settings"][setting] for cell in cells)) for setting in cells[0]["settings"]}
    across = max(axes_of, key=lambda setting: (_numeric(axes_of[setting]), len(axes_of[setting])))
    numeric = _numeric(axes_of[across])
    lines: dict[str, list[tuple[float, list[float]]]] = {}
    for cell in cells:
        scores = [(run.get(key) or {}).get("last10") for run in cell["runs"] if run["status"] == "finished"]
        if not scores or None in scores:
            continue
        value = cell["settings"][across]
        others = (f"{setting.partition('.')[2]} {own}" for setting, own in cell["settings"].items() if setting != across)
        place = float(value) if numeric else float(axes_of[across].index(value))
        lines.setdefault(", ".join(others), []).append((place, scores))

    figure, axes = plt.subplots(figsize=(8, 4.5), dpi=150, layout="constrained")
    for label, points in lines.items():
        points.sort(key=lambda point: point[0])
        places = [place for place, _ in points]
        middle = [sum(scores) / len(scores) for _, scores in points]
        (line,) = axes.plot(places, middle, marker="o", linewidth=2, label=label)
        low, high = ([pick(scores) for _, scores in points] for pick in (min, max))
        axes.fill_between(places, low, high, color=line.get_color(), alpha=0.15, linewidth=0)
    if best is not None:
        value = best["settings"][across]
        place = float(value) if numeric else float(axes_of[across].index(value))
        axes.plot([place], [best["score"]], marker="*", markersize=16, color="black", linestyle="none", zorder=3)
        axes.annotate(f"best, {best['score']:.2f}", (place, best["score"]), (0, -18), textcoords="offset points", ha="center")
    if numeric:
        if min(axes_of[across]) > 0 and max(axes_of[across]) >= 5 * min(axes_of[across]):
            axes.set_xscale("log")
            axes.minorticks_off()
        axes.set_xticks(axes_of[across], [f"{value:g}" for value in axes_of[across]])
    else:
        axes.set_xticks(range(len(axes_of[across])), [str(value) for value in axes_of[across]])
    axes.set_xlabel(across)
    axes.set_ylabel(f"{name}, %, mean of the last 10 evaluations" + " (range over seeds)" * (len(cells[0]["runs"]) > 1))
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    if len(lines) > 1:
        axes.legend(frameon=False)
    figure.savefig(file)
    plt.close(figure)


def _numeric(values: Sequence[Any]) -> bool:
    return all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)
