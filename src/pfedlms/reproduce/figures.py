"""Figures of experiments; they need the extra `report`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pfedlms.report.plots import COLOURS
from pfedlms.reproduce.play import Measured


def draw_curves(title: str, cells: Mapping[str, Sequence[Measured]], axis: str, file: Path) -> None:
    """P-acc against `round`, or against the MiB of all clients so far (`bytes`): a line a row, its range over seeds."""
    plt = _pyplot()
    figure, axes = plt.subplots(figsize=(8, 4.8), dpi=150, layout="constrained")
    # Variants of a method lie close to it: more lines than can be told apart.
    drawn = [row for row in cells if row in COLOURS]
    for row, measured in ((row, cells[row]) for row in (drawn if len(drawn) > 1 else cells)):
        done = [each.curve for each in measured if each.finished]
        if not done:
            continue
        length = min(len(curve["round"]) for curve in done)
        columns = list(zip(*(curve["p_acc"][:length] for curve in done), strict=True))
        middle = [sum(column) / len(column) for column in columns]
        colour = COLOURS.get(row)
        if axis == "bytes" and not done[0]["bytes"][-1]:
            axes.axhline(middle[-1], color=colour, linestyle=":", linewidth=1.2, label=f"{row} (sends nothing)")
            continue
        unit = 1 / (1 << 20) if axis == "bytes" else 1
        across = [unit * value for value in done[0][axis][:length]]
        (line,) = axes.plot(across, middle, color=colour, linewidth=1.5, label=row)
        lowest, highest = [min(column) for column in columns], [max(column) for column in columns]
        axes.fill_between(across, lowest, highest, color=line.get_color(), alpha=0.12, linewidth=0)
    axes.set_xlabel("MiB of all clients so far, framing included" if axis == "bytes" else "round")
    if axis == "bytes":
        axes.set_xscale("log")
    axes.set_ylabel("P-acc, % (range over seeds)")
    axes.set_title(title, loc="left", fontsize=10)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside right upper", frameon=False, fontsize=8)
    figure.savefig(file)
    plt.close(figure)


def draw_distributions(document: Mapping[str, Any], file: Path) -> None:
    """The weights of every layer after some rounds, and accuracy over rounds with those rounds marked."""
    plt = _pyplot()
    stages = document["stages"]
    size = (3.2 * (len(stages) + 1), 3)
    figure, panels = plt.subplots(1, len(stages) + 1, figsize=size, dpi=150, layout="constrained")
    colours = list(COLOURS.values())
    for panel, stage in zip(panels, stages, strict=False):
        for colour, (layer, own) in zip(colours, stage["layers"].items(), strict=False):
            drawn = {"color": colour, "label": f"{layer}, σ = {own['deviation']:.3f}"}
            panel.stairs(own["density"], own["edges"], color=colour, fill=True, alpha=0.35)
            panel.stairs(own["density"], own["edges"], linewidth=1, **drawn)
        panel.set_title(f"round {stage['round']}", loc="left", fontsize=9)
        panel.set_xlabel("weight")
        panel.margins(y=0.3)  # room for the legend
        panel.legend(frameon=False, fontsize=6, loc="upper right")
    panels[0].set_ylabel("density")
    accuracy = {number - 1: own for number, own in zip(*document["curve"].values(), strict=True)}  # from 0, as stages
    panels[-1].plot(list(accuracy), list(accuracy.values()), color=COLOURS["fedavg"])
    for stage in stages:
        panels[-1].plot(stage["round"], accuracy[stage["round"]], "o", color="black", markersize=4)
    panels[-1].set_title("accuracy of the shared model, %", loc="left", fontsize=9)
    panels[-1].set_xlabel("round")
    for panel in panels:
        panel.spines[["top", "right"]].set_visible(False)
        panel.tick_params(labelsize=7)
    figure.savefig(file)
    plt.close(figure)


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt
