"""The measured theorem as tables and as a chart (extra `report`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from papers.pfedlms.sheets import Sheet
from papers.pfedlms.theorem import BASE, NEVER, Record
from pfedlms.report import charts
from pfedlms.report.charts import Look

Pick = Callable[[Record], float]

_BLUE, _GREEN, _ORANGE, _GREY = charts.BLUE, charts.GREEN, charts.ORANGE, charts.GREY
_SERIES: Sequence[tuple[str, Pick, Look]] = (
    ("bound: drift, B_θ of the lemma", lambda row: row["bound"]["drift"], Look(_ORANGE)),
    ("bound: drift, largest ‖θ‖ for B_θ", lambda row: row["drift_by_norm"], Look(_ORANGE, [6, 3])),
    ("bound: optimisation", lambda row: row["bound"]["optimisation"], Look(_BLUE)),
    ("bound: noise", lambda row: row["bound"]["noise"], Look(_GREY)),
    ("all three terms, measured", lambda row: row["measured"]["total"], Look(_GREEN, [6, 3])),
    ("left side, measured", lambda row: row["left"], Look(_GREEN)),
)


def refresh_name(refresh: int) -> str:
    return "never" if refresh >= NEVER else str(refresh)


THEORY = {
    "strength": "λ", "refresh": "h", "rounds": "R", "left": "left", "bound_optimisation": "optimisation",
    "real_optimisation": "real", "bound_noise": "noise", "real_noise": "real", "bound_drift": "drift",
    "drift_by_norm": "by norm", "real_drift": "real", "bound_over_left": "bound/left",
}  # fmt: skip
PRACTICE = {
    "strength": "λ", "refresh": "h", "learning_rate": "η", "rounds": "R", "left": "left", "first": "first",
    "last": "last",
}  # fmt: skip


def sheets(document: Record) -> list[Sheet]:
    """The terms, the left side of `dnn`, and every round for figures of one's own."""
    name, title = f"convergence-{document['dataset']}", f"{document['dataset']}: the convergence theorem"
    note = "Each term of the bound, then as measured (real); by norm: with the largest ‖θ‖ for B_θ."
    used = "λ, h and η as shipped; the mean over the measured rounds, the first and the last of them."
    return [
        Sheet(name, f"{title}, softmax regression", theory_records(document), THEORY, note, ".3g"),
        Sheet(f"{name}-dnn", f"{title}, its left side on dnn", practice_records(document), PRACTICE, used, ".3g"),
        Sheet(f"{name}-points", "", by_round(document), {}),
    ]


def theory_records(document: Record) -> list[Record]:
    """One record per setting and R: the left side, each term of the bound and as measured, and bound / left."""
    return [
        {
            **_setting(row), "rounds": row["rounds"], "left": row["left"],
            **{f"bound_{term}": row["bound"][term] for term in ("optimisation", "noise", "drift")},
            **{f"real_{term}": row["measured"][term] for term in ("optimisation", "noise", "drift")},
            "drift_by_norm": row["drift_by_norm"], "bound_over_left": row["ratio"],
        }
        for row in document["rows"]
    ]  # fmt: skip


def practice_records(document: Record) -> list[Record]:
    """One record per run of `dnn`: its left side, the mean over the measured rounds, and that of the first and last."""
    return [
        {
            "seed": run["plan"]["seed"], **_setting(run["plan"]), "learning_rate": run["settings"]["learning_rate"],
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
        named = {"model": plan["model"], "seed": plan["seed"], **_setting(plan)}
        rounds = range(1, plan["rounds"] + 1, plan["every"])
        for number, *values in zip(rounds, *columns.values(), strict=True):
            found.append({**named, "round": number, **dict(zip(columns, values, strict=True))})
    return found


def _setting(of: Record) -> Record:
    return {"strength": of["strength"], "refresh": refresh_name(of["refresh"])}


def chart(document: Record) -> Any:
    """Six panels: both sides against R, λ and h; drift and left side by round; the left side of `dnn`."""
    rows, last = document["rows"], max(row["rounds"] for row in document["rows"])
    base = [row for row in rows if (row["strength"], row["refresh"]) == BASE]
    ends = [row for row in rows if row["rounds"] == last]
    by_strength = [row for row in ends if row["refresh"] == BASE[1]]
    by_refresh = sorted((row for row in ends if row["strength"] == BASE[0]), key=lambda row: int(row["refresh"]))
    sides = f"both sides of the theorem (λ = {BASE[0]:g}, h = {BASE[1]})"
    left, drift, practice = [], [], []
    for run in document["runs"]:
        plan, seen = run["plan"], run["trajectory"]
        name = f"λ {plan['strength']:g}, h {refresh_name(plan['refresh'])}"
        left += _points(name, plan, seen["stationarity"])
        if plan["strength"] == BASE[0]:
            drift += _points(f"{name}: largest of a client", plan, seen["largest_drift"])
            drift += _points(f"{name}: λβ, largest ‖θ‖ for B_θ", plan, run["allowed_by_norm"])
            drift += _points(f"{name}: λβ of the lemma", plan, run["allowed"])
    for run in document["practice"]:
        plan = run["plan"]
        name = f"dnn, η {run['settings']['learning_rate']:g}, λ {plan['strength']:g}, seed {plan['seed']}"
        practice += _points(name, plan, run["stationarity"])
    gradient = "Σ p_k ‖∇F_k‖², mean over steps"
    panels = [
        _series([str(row["rounds"]) for row in base], base, "R, rounds", sides),
        _series([f"{row['strength']:g}" for row in by_strength], by_strength, f"λ (h = {BASE[1]}, R = {last})", ""),
        _series([refresh_name(row["refresh"]) for row in by_refresh], by_refresh,
                f"h, rounds between sketches (λ = {BASE[0]:g}, R = {last})", ""),
        charts.lines(drift, "round", "drift of F_k between rounds", log_y=True, style=_threes(drift)),
        charts.lines(left, "round", gradient, log_y=True),
        *([charts.lines(practice, "round", gradient, log_y=True)] if practice else []),
    ]  # fmt: skip
    panels = [panel.properties(width=360, height=260) for panel in panels]
    title = f"{document['dataset']}: softmax regression, η = 1/L_F"
    above, below = charts.altair().hconcat(*panels[:3]), charts.altair().hconcat(*panels[3:])
    return charts.stacked([above, below.resolve_scale(color="independent", strokeDash="independent")], title)


def _points(name: str, plan: Record, values: Sequence[float]) -> list[Record]:
    """Values above 0, since the scale is logarithmic."""
    rounds = range(1, plan["rounds"] + 1, plan["every"])
    return [{"row": name, "x": at, "mean": value} for at, value in zip(rounds, values, strict=True) if value > 0]


def _threes(points: Sequence[Record]) -> dict[str, Look]:
    """One colour per setting; the allowed drift is dashed or dotted."""
    names = list(dict.fromkeys(point["row"] for point in points))
    settings = list(dict.fromkeys(name.partition(":")[0] for name in names))
    dashes = {"largest of a client": [1, 0], "λβ, largest ‖θ‖ for B_θ": [6, 3], "λβ of the lemma": [2, 3]}
    return {
        name: Look(charts.COLOURS[settings.index(name.partition(":")[0]) % 8], dashes[name.partition(": ")[2]])
        for name in names
    }


def _series(ticks: Sequence[str], rows: Sequence[Record], x: str, y: str) -> Any:
    """Every term over evenly spaced settings; λ = 0 has no drift."""
    points = [
        {"row": name, "x": tick, "mean": pick(row)}
        for name, pick, _ in _SERIES
        for tick, row in zip(ticks, rows, strict=True)
        if pick(row) > 0
    ]
    style = {name: look for name, _, look in _SERIES}
    return charts.lines(points, x, y, log_y=True, marks=True, style=style)
