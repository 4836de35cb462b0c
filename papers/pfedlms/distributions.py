"""The paper's Figure 1: how the weights of a model's layers are distributed while FedAvg trains it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch

import pfedlms
from papers.pfedlms.experiments import short_fedavg
from papers.pfedlms.runs import Outcome, Wanted, gather
from papers.pfedlms.sheets import Sheets, columns_of, finished
from pfedlms.report import charts
from pfedlms.report.tables import Table

ROUNDS = (0, 15, 99)
"""Counted from 0, as in the paper."""
BINS = 80


def distributions(dataset: str, wanted: Wanted, outcome: Outcome) -> dict[str, Any] | None:
    """Densities of every layer's weights in the shared model after the rounds of the figure, and its accuracy after
    every round; None where not all runs finished. Each of the models is that of a run of its own, which is kept and can
    be resumed."""
    rounds = [number // 10 for number in ROUNDS] if wanted.quick else ROUNDS
    cells = [short_fedavg(dataset, 0.5, number + 1) for number in rounds]
    one = replace(wanted, rows=(), seeds=wanted.seeds[:1])
    gathered = gather({name: own for each in cells for name, own in each.items()}, one, outcome)
    runs = [run for own in gathered.values() for run in finished(own)]
    if len(runs) < len(cells):
        return None
    stages = [{"round": number, "layers": _densities(run)} for number, run in zip(rounds, runs, strict=True)]
    return {"stages": stages, "curve": {key: [own[key] for own in runs[-1].metrics] for key in ("round", "g_acc")}}


def _densities(run: pfedlms.Run) -> dict[str, dict[str, Any]]:
    """Of the weights of layers that have a matrix or more."""
    found = {}
    for name, values in (run.trained_models().shared() or {}).items():
        if values.ndim > 1:
            flat = values.to(torch.float64).flatten().cpu().numpy()
            density, edges = np.histogram(flat, BINS, density=True)
            found[name] = {"density": density.tolist(), "edges": edges.tolist(), "deviation": float(flat.std())}
    return found


def sheets(dataset: str, document: Mapping[str, Any]) -> Sheets:
    """The deviation of every layer; and the bins, for figures of one's own."""
    layers = [(stage["round"], name, own) for stage in document["stages"] for name, own in stage["layers"].items()]
    records = [{"round": number, "layer": name, "deviation": own["deviation"]} for number, name, own in layers]
    bins = [
        {"round": number, "layer": name, "from": low, "to": high, "density": density}
        for number, name, own in layers
        for low, high, density in zip(own["edges"][:-1], own["edges"][1:], own["density"], strict=True)
    ]
    name, title = f"distributions-{dataset}", f"{dataset}: weights of the shared model while FedAvg trains"
    columns = columns_of({"layer": "layer", "round": "round", "deviation": "σ"}, ".3f")
    return {name: Table(columns, records, title, "σ: standard deviation."), f"{name}-points": Table([], bins)}


def chart(document: Mapping[str, Any]) -> Any:
    """The weights of every layer after some rounds, and accuracy over rounds with those rounds marked."""
    alt = charts.import_altair()
    panels: list[Any] = []
    for stage in document["stages"]:
        bins = [
            {"row": f"{layer}, σ = {own['deviation']:.3f}", "weight": low, "density": density}
            for layer, own in stage["layers"].items()
            for low, density in zip(own["edges"], [*own["density"], 0.0], strict=True)
        ]
        style = {row: charts.Look.number(place) for place, row in enumerate(charts.group_by_row(bins))}
        drawn = charts.chart_of(bins).mark_area(interpolate="step-after", opacity=0.35, line={"strokeWidth": 1})
        density = alt.Y("density:Q", stack=None, title="density" if not panels else None)
        colour = charts.row_colours(style, alt.Legend(orient="top", direction="vertical"))
        tips = ["row:N", "weight:Q", "density:Q"]
        drawn = drawn.encode(alt.X("weight:Q"), density, color=colour, tooltip=tips)
        panels.append(drawn.properties(width=220, height=200, title=f"round {stage['round']}"))
    marked = {stage["round"] for stage in document["stages"]}
    # Evaluations count from 1, the figure counts from 0.
    points = [
        {"row": "g_acc", "x": number - 1, "mean": own, "marked": number - 1 in marked}
        for number, own in zip(*document["curve"].values(), strict=True)
    ]
    accuracy = charts.line_chart(points, "round", "", full_range=True, style={"g_acc": charts.Look(charts.ORANGE)})
    dots = charts.chart_of(point for point in points if point["marked"]).mark_point(
        filled=True, color=charts.LIGHT["ink"]
    )
    accuracy += dots.encode(alt.X("x:Q"), alt.Y("mean:Q"))
    panels.append(accuracy.properties(width=220, height=200, title="accuracy of the shared model, %"))
    return charts.apply_style(alt.hconcat(*panels).resolve_scale(color="independent", strokeDash="independent"))
