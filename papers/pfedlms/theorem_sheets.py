"""The measured theorem as tables and as a chart (extra `report`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from papers.pfedlms.sheets import Sheets, columns_of
from papers.pfedlms.theorem import BASE, Record, setting_of
from pfedlms.report import charts
from pfedlms.report.charts import Look
from pfedlms.report.tables import Table

THEORY = {
    "strength": "λ", "refresh": "h", "rounds": "R", "left": "left", "bound_optimisation": "optimisation",
    "real_optimisation": "real", "bound_noise": "noise", "real_noise": "real", "bound_drift": "drift",
    "drift_by_norm": "by norm", "real_drift": "real", "bound_over_left": "bound/left",
}  # fmt: skip
PRACTICE = {
    "strength": "λ", "refresh": "h", "learning_rate": "η", "rounds": "R", "left": "left", "first": "first",
    "last": "last",
}  # fmt: skip
SERIES = {
    "bound_drift": ("bound: drift, B_θ of the lemma", Look(charts.ORANGE)),
    "drift_by_norm": ("bound: drift, largest ‖θ‖ for B_θ", Look(charts.ORANGE, [6, 3])),
    "bound_optimisation": ("bound: optimisation", Look(charts.BLUE)),
    "bound_noise": ("bound: noise", Look(charts.GREY)),
    "real_total": ("all three terms, measured", Look(charts.GREEN, [6, 3])),
    "left": ("left side, measured", Look(charts.GREEN)),
}


def sheets(document: Record) -> Sheets:
    """The terms, the left side of `dnn`, and every round for figures of one's own."""
    name, title = f"convergence-{document['dataset']}", f"{document['dataset']}: the convergence theorem"
    note = "Each term of the bound, then as measured (real); by norm: with the largest ‖θ‖ for B_θ."
    used = "λ, h and η as shipped; the mean over the measured rounds, the first and the last of them."
    practice = columns_of(PRACTICE, ".3g")
    return {
        name: Table(columns_of(THEORY, ".3g"), document["rows"], f"{title}, softmax regression", note),
        f"{name}-dnn": Table(practice, practice_records(document), f"{title}, its left side on dnn", used),
        f"{name}-points": Table([], by_round(document)),
    }


def practice_records(document: Record) -> list[Record]:
    """One record per run of `dnn`: its left side, the mean over the measured rounds, and that of the first and last."""
    return [
        {
            "seed": run["plan"]["seed"], **setting_of(run["plan"]), "learning_rate": run["settings"]["learning_rate"],
            "rounds": run["plan"]["rounds"], "looked_at": len(run["stationarity"]), "left": run["left"],
            "first": run["stationarity"][0], "last": run["stationarity"][-1],
        }
        for run in document["practice"]
    ]  # fmt: skip


def by_round(document: Record) -> list[Record]:
    """One record per round of every run: left side, noise and drift as measured, and the drift that the theorem allows.
    Of `dnn` the rounds that were measured."""
    found = []
    for run in (*document["runs"], *document["practice"]):
        plan, seen = run["plan"], run.get("trajectory", run)
        columns = {"left": seen["stationarity"], "noise": seen["noise"]}
        if "allowed" in run:
            columns |= {key: seen[key] for key in ("drift", "largest_drift")}
            columns |= {key: run[key] for key in ("allowed", "allowed_by_norm")}
        named = {"model": plan["model"], "seed": plan["seed"], **setting_of(plan)}
        rounds = range(1, plan["rounds"] + 1, plan["every"])
        for number, *values in zip(rounds, *columns.values(), strict=True):
            found.append({**named, "round": number, **dict(zip(columns, values, strict=True))})
    return found


def chart(document: Record) -> Any:
    """Six panels: both sides against R, λ and h; drift and left side by round; the left side of `dnn`."""
    points, rows, (strength, refresh) = by_round(document), document["rows"], BASE
    last = max(row["rounds"] for row in rows)
    ends = [row for row in rows if row["rounds"] == last]
    theory = [point for point in points if point["model"] == "softmax"]
    pulled = [row for row in ends if row["strength"] == strength]
    drifts = {"largest_drift": ": largest of a client", "allowed_by_norm": ": λβ, largest ‖θ‖ for B_θ",
              "allowed": ": λβ of the lemma"}  # fmt: skip
    gradient = "Σ p_k ‖∇F_k‖², mean over steps"
    panels = [
        _terms([row for row in rows if (row["strength"], row["refresh"]) == (strength, str(refresh))], "rounds",
               f"R, rounds (λ = {strength:g}, h = {refresh})"),
        _terms([row for row in ends if row["refresh"] == str(refresh)], "strength", f"λ (h = {refresh}, R = {last})"),
        _terms(pulled, "refresh", f"h, rounds between sketches (λ = {strength:g}, R = {last})"),
        _lines([point for point in theory if point["strength"] == strength], drifts, "drift of F_k between rounds"),
        _lines(theory, {"left": ""}, gradient),
        _lines([point for point in points if point["model"] == "dnn"], {"left": ""}, f"dnn: {gradient}"),
    ]  # fmt: skip
    panels = [panel.properties(width=360, height=260) for panel in panels]
    title = f"{document['dataset']}: softmax regression, η = 1/L_F"
    above, below = (charts.import_altair().hconcat(*some) for some in (panels[:3], panels[3:]))
    below = below.resolve_scale(color="independent", strokeDash="independent")
    return charts.combine_charts([above, below], columns=1, title=title, shared_legend=False)


def _terms(rows: Sequence[Record], axis: str, x: str) -> Any:
    """Both sides over evenly spaced settings; zeros have no place on a logarithmic scale."""
    points = [
        {"row": name, "x": f"{row[axis]}", "mean": row[key]}
        for key, (name, _) in SERIES.items()
        for row in rows
        if row[key] > 0
    ]
    ticks, y = [f"{row[axis]}" for row in rows], "both sides of the theorem"
    return charts.line_chart(points, x, y, log_y=True, show_points=True, ticks=ticks, style=dict(SERIES.values()))


def _lines(records: Sequence[Record], columns: Mapping[str, str], y: str) -> Any:
    """Columns by round, one line per setting and column: a colour for each setting, dashes for each column."""
    points = [
        {"row": f"λ {record['strength']:g}, h {record['refresh']}{words}", "x": record["round"], "mean": record[key]}
        for key, words in columns.items()
        for record in records
        if record[key] > 0
    ]
    rows = charts.group_by_row(points)
    settings = len(rows) // len(columns)
    style = {row: Look.number(8 * (place // settings) + place % settings) for place, row in enumerate(rows)}
    return charts.line_chart(points, "round", y, log_y=True, style=style)
