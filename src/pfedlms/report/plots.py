"""Plots; they need the extra `report`."""

from __future__ import annotations

import json
import os
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
    """Draw P-acc against the bytes one client has exchanged on average, a line a method with its range over seeds, from
    a comparison's folder."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    runs: dict[str, list[list[dict[str, Any]]]] = {}
    clients = 1
    for name in json.loads((directory / "compare.json").read_text())["runs"]:
        summary = json.loads((directory / name / "summary.json").read_text())
        clients = summary["clients"]
        if summary["status"] != "finished":
            continue
        lines = (directory / name / "metrics.jsonl").read_text().splitlines()
        runs.setdefault(summary["method"], []).append([json.loads(line) for line in lines])

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
