"""Which figures a part of the page has, and what they are called."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from pfedlms.report.page import panels
from pfedlms.report.page.figures import Figure, cost, gain, over_bytes, over_rounds
from pfedlms.report.page.gather import Gathered, Part, Run
from pfedlms.report.page.layers import layers_of
from pfedlms.report.page.measures import best, cells, curves, gains, headline
from pfedlms.report.page.svg import Look

MOST_LINES = 12
"""Lines of a figure that can be told apart; of more rows the best are drawn."""
MOST_VIEWS = 3
"""Rows of a part whose layers are shown."""
_MEASURES = {"p_acc": "P-acc", "v_acc": "V-acc", "g_acc": "G-acc"}


def measure_of(part: Part, key: str = "p_acc") -> str:
    """What an axis is called."""
    first = part.runs[0]
    return f"{_MEASURES[key]}, %" if first.percent else f"{_MEASURES[key]}: {first.summary['metric']}"


def figures_of(part: Part, everything: Gathered, looks: Mapping[str, Look]) -> tuple[list[Figure], list[str]]:
    """The figures, in the order they are read, and why others that one may look for are missing."""
    found: list[Figure] = []
    notes: list[str] = []
    scored = cells(part) if part.kind == "sweep" else []
    if len(scored) > 1:
        found.append(panels.setting(scored, measure_of(part, part.by)))
    drawn = {key: curves(part, key) for key in _MEASURES}
    for key, title in (("p_acc", "Accuracy"), ("g_acc", "Accuracy of the shared model"), ("v_acc", "V-acc")):
        own = sorted(drawn[key], key=lambda curve: -curve.middle[-1])
        if not own or (key == "v_acc" and part.kind == "sweep"):
            continue
        kept = {curve.name for curve in own[:MOST_LINES]}
        shown = [curve for curve in drawn[key] if curve.name in kept]
        more = f" The best {len(shown)} of {len(own)} rows are drawn." if len(shown) < len(own) else ""
        title = title if part.runs[0].percent else title.replace("Accuracy", part.runs[0].summary["metric"])
        name = {"p_acc": "accuracy", "g_acc": "shared-accuracy", "v_acc": "validation-accuracy"}[key]
        made = [over_rounds(shown, looks, measure_of(part, key), f"{name}-rounds", f"{title} against rounds")]
        if key == "p_acc" and any(curve.mib[-1] > 0 for curve in shown):
            against = over_bytes(shown, looks, measure_of(part, key))
            made.append(replace(against, title=f"{title} against bytes"))
        found += [replace(figure, caption=figure.caption + more) for figure in made]
    rows = headline(part)
    if any(row.up + row.down for row in rows):
        found.append(cost(rows, looks))
    gained = gains(part, everything)
    if gained:
        few = dict(list(gained.items())[:MOST_LINES])
        found.append(gain(few, " points" if part.runs[0].percent else ""))
    elif any(run.config.method != "local" for run in part.runs):
        notes.append("Clients against local: no run of local with the same data, seed and rounds is on this page.")
    found += _layers(part, notes)
    profiled = {_label(run): (run.summary["stages"], run.summary["rounds"]) for run in part.runs if _staged(run)}
    if profiled:
        found.append(panels.stages(profiled))
    else:
        notes.append("Time by stage: no run was made with --profile.")
    return found, notes


def _staged(run: Run) -> bool:
    return bool(run.summary.get("stages"))


def _label(run: Run) -> str:
    return f"{run.name}, seed {run.seed}"


def _layers(part: Part, notes: list[str]) -> list[Figure]:
    """Of the first seed of each row whose clients agree on thresholds; of a sweep that of its best."""
    rows = [runs for runs in part.rows.values() if runs[0].config.method == "pfedlms"]
    if part.kind == "sweep" and (top := best(part)) is not None:
        rows = [runs for runs in rows if runs[0].name == top]
    if len(rows) > MOST_VIEWS:
        notes.append(f"Layers: the first {MOST_VIEWS} of {len(rows)} rows of pfedlms are shown.")
    found = []
    for at, runs in enumerate(rows[:MOST_VIEWS]):
        layers, missing = layers_of(runs[0])
        if not layers:
            notes.append(f"Layers of {_label(runs[0])}: {missing}.")
            continue
        tail = f"-{at + 1}" if at else ""
        found.append(panels.distributions(layers, f"layers{tail}", _label(runs[0])))
        found.append(panels.symbols(layers, f"symbols{tail}", _label(runs[0])))
    return found
