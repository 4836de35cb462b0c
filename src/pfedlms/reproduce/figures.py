"""Figures of experiments; they need the extra `report`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pfedlms.methods import METHODS
from pfedlms.report import charts
from pfedlms.reproduce.play import Measured

MIB = 1 << 20


def curves(title: str, cells: Mapping[str, Sequence[Measured]], axis: str) -> Any:
    """P-acc against `round`, or against the MiB of all clients so far (`bytes`): one line per row with its range over
    seeds."""
    # Variants of a method lie close to it: more lines than can be told apart.
    plain = [row for row in cells if row in METHODS]
    points: list[dict[str, Any]] = []
    style = {}
    looks = charts.looks(cells)
    for row in plain if len(plain) > 1 else cells:
        done = [each.curve for each in cells[row] if each.finished]
        if not done:
            continue
        length = min(len(curve["round"]) for curve in done)
        silent = axis == "bytes" and not done[0]["bytes"][-1]
        name = f"{row} (sends nothing)" if silent else row
        style[name] = looks[row]
        unit = MIB if axis == "bytes" else 1
        for place in range(length - 1 if silent else 0, length):
            values = [curve["p_acc"][place] for curve in done]
            point = {"row": name, "mean": sum(values) / len(values), "low": min(values), "high": max(values)}
            points.append(point if silent else {**point, "x": done[0][axis][place] / unit})
    words = "MiB of all clients so far, framing included" if axis == "bytes" else "round"
    y = "P-acc, % (range over seeds)"
    return charts.styled(charts.lines(points, words, y, log=axis == "bytes", title=title, style=style))


def distributions(document: Mapping[str, Any]) -> Any:
    """The weights of every layer after some rounds, and accuracy over rounds with those rounds marked."""
    alt = charts.altair()
    panels: list[Any] = []
    for stage in document["stages"]:
        bins = [
            {"row": f"{layer}, σ = {own['deviation']:.3f}", "weight": low, "density": density}
            for layer, own in stage["layers"].items()
            for low, density in zip(own["edges"], [*own["density"], 0.0], strict=True)
        ]
        style = {row: charts.Look.number(place) for place, row in enumerate(charts.rows_of(bins))}
        drawn = charts.data(bins).mark_area(interpolate="step-after", opacity=0.35, line={"strokeWidth": 1})
        density = alt.Y("density:Q", stack=None, title="density" if not panels else None)
        colour = charts.coloured(style, alt.Legend(orient="top", direction="vertical"))
        drawn = drawn.encode(
            alt.X("weight:Q"), density, color=colour, tooltip=charts.told("row:N", "weight:Q", "density:Q")
        )
        panels.append(drawn.properties(width=220, height=200, title=f"round {stage['round']}"))
    marked = {stage["round"] for stage in document["stages"]}
    # Evaluations count from 1, the figure counts from 0.
    points = [
        {"row": "g_acc", "x": number - 1, "mean": own, "marked": number - 1 in marked}
        for number, own in zip(*document["curve"].values(), strict=True)
    ]
    accuracy = charts.lines(points, "round", "", whole=True, style={"g_acc": charts.Look(charts.ORANGE)})
    dots = charts.data(point for point in points if point["marked"]).mark_point(filled=True, color=charts.LIGHT["ink"])
    accuracy += dots.encode(alt.X("x:Q"), alt.Y("mean:Q"))
    panels.append(accuracy.properties(width=220, height=200, title="accuracy of the shared model, %"))
    return charts.styled(alt.hconcat(*panels).resolve_scale(color="independent", strokeDash="independent"))
