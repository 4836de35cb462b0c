"""What `convergence` measured, as a table and drawn; drawing needs the extra `report`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from pfedlms.errors import UsageError
from pfedlms.reproduce.convergence import BASE, NEVER, ConvergenceDocument

Record = dict[str, Any]
Pick = Callable[[Record], float]

_SERIES: Sequence[tuple[str, Pick, str, str, str]] = (
    ("bound: drift, B_θ of the lemma", lambda row: row["bound"]["drift"], "#c84c09", "-", "s"),
    ("bound: drift, largest ‖θ‖ for B_θ", lambda row: row["drift_by_norm"], "#c84c09", "--", "s"),
    ("bound: optimisation", lambda row: row["bound"]["optimisation"], "#3a4fb0", "-", "^"),
    ("bound: noise", lambda row: row["bound"]["noise"], "#6c757d", "-", "v"),
    ("all three terms, measured", lambda row: row["measured"]["total"], "#0b6e4f", "--", "o"),
    ("left side, measured", lambda row: row["left"], "#0b6e4f", "-", "o"),
)


def refresh_name(refresh: int) -> str:
    return "never" if refresh >= NEVER else str(refresh)


def averaged(document: ConvergenceDocument) -> list[Record]:
    """The rows with their means over seeds; `ratio` is of the means."""
    groups: dict[tuple[float, int, int], list[Record]] = {}
    for row in document.rows:
        groups.setdefault((row["strength"], row["refresh"], row["rounds"]), []).append(row)
    found = []
    for (strength, refresh, rounds), rows in groups.items():
        left = mean(row["left"] for row in rows)
        both = {
            side: {term: mean(row[side][term] for row in rows) for term in rows[0][side]}
            for side in ("bound", "measured")
        }
        by_norm = mean(row["drift_by_norm"] for row in rows)
        ratio = both["bound"]["total"] / left
        found.append(
            {"strength": strength, "refresh": refresh, "rounds": rounds, "left": left, **both,
             "drift_by_norm": by_norm, "ratio": ratio}
        )  # fmt: skip
    return found


THEORY = {
    "strength": "λ", "refresh": "h", "rounds": "R", "left": "left", "bound_optimisation": "optimisation",
    "real_optimisation": "real", "bound_noise": "noise", "real_noise": "real", "bound_drift": "drift",
    "drift_by_norm": "by norm", "real_drift": "real", "bound_over_left": "bound/left",
}  # fmt: skip
PRACTICE = {
    "strength": "λ", "refresh": "h", "learning_rate": "η", "rounds": "R", "left": "left", "first": "first",
    "last": "last",
}  # fmt: skip


def theory_records(document: ConvergenceDocument) -> list[Record]:
    """A record a setting and R: the left side, then each term as the theorem bounds it and as it was; bound / left."""
    return [
        {
            **_setting(row), "rounds": row["rounds"], "left": row["left"],
            **{f"bound_{term}": row["bound"][term] for term in ("optimisation", "noise", "drift")},
            **{f"real_{term}": row["measured"][term] for term in ("optimisation", "noise", "drift")},
            "drift_by_norm": row["drift_by_norm"], "bound_over_left": row["ratio"],
        }
        for row in averaged(document)
    ]  # fmt: skip


def practice_records(document: ConvergenceDocument) -> list[Record]:
    """A record a run of `dnn`: the mean of its left side over the rounds looked at, and that of the first and last."""
    return [
        {
            "seed": run["plan"]["seed"], **_setting(run["plan"]), "learning_rate": run["settings"]["learning_rate"],
            "rounds": run["plan"]["rounds"], "looked_at": len(run["stationarity"]), "left": run["left"],
            "first": run["stationarity"][0], "last": run["stationarity"][-1],
        }
        for run in document.practice
    ]  # fmt: skip


def by_round(document: ConvergenceDocument) -> list[Record]:
    """A record a round of every run: left side, noise and drift as they were, and the drift that the theorem allows
    for. Of `dnn` the rounds looked at, and what was measured there."""
    found = []
    for run in (*document.runs, *document.practice):
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


def draw_convergence(document: ConvergenceDocument, file: Path) -> None:
    """Six panels into a .png, .svg or .pdf: both sides against R, λ and h; drift and left side by round; `dnn`."""
    try:
        import matplotlib
    except ImportError as error:
        raise UsageError(
            "convergence: the plot needs matplotlib; install it with: pip install 'pfedlms[report]'"
        ) from error
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows, last = averaged(document), max(row["rounds"] for row in document.rows)
    figure, axes = plt.subplots(2, 3, figsize=(13, 7.5), dpi=150, layout="constrained")
    (by_rounds, by_strength, by_refresh), (drift, left, practice) = axes
    base = [row for row in rows if (row["strength"], row["refresh"]) == BASE]
    _series(by_rounds, [str(row["rounds"]) for row in base], base, "R, rounds")
    ends = [row for row in rows if row["rounds"] == last]
    some = [row for row in ends if row["refresh"] == BASE[1]]
    _series(by_strength, [f"{row['strength']:g}" for row in some], some, f"λ (h = {BASE[1]}, R = {last})")
    some = sorted((row for row in ends if row["strength"] == BASE[0]), key=lambda row: int(row["refresh"]))
    names = [refresh_name(row["refresh"]) for row in some]
    _series(by_refresh, names, some, f"h, rounds between sketches (λ = {BASE[0]:g}, R = {last})")

    seed = document.runs[0]["plan"]["seed"]
    own = [run for run in document.runs if run["plan"]["seed"] == seed]
    for run in own:
        plan, seen = run["plan"], run["trajectory"]
        rounds = range(1, plan["rounds"] + 1)
        name = f"λ {plan['strength']:g}, h {refresh_name(plan['refresh'])}"
        left.plot(rounds, seen["stationarity"], linewidth=1.5, label=name)
        if plan["strength"] == BASE[0]:
            (line,) = drift.plot(rounds, seen["largest_drift"], linewidth=1.5, label=f"{name}: largest of a client")
            drift.plot(rounds, run["allowed_by_norm"], "--", color=line.get_color(), linewidth=1)
            drift.plot(rounds, run["allowed"], ":", color=line.get_color(), linewidth=1)
    drift.plot([], [], "--", color="black", linewidth=1, label="λβ, largest ‖θ‖ for B_θ")
    drift.plot([], [], ":", color="black", linewidth=1, label="λβ of the lemma")
    drift.set_ylabel("drift of F_k between rounds")
    left.set_ylabel("Σ p_k ‖∇F_k‖², mean over steps")
    for run in document.practice:
        plan = run["plan"]
        rounds = range(1, plan["rounds"] + 1, plan["every"])
        name = f"dnn, η {run['settings']['learning_rate']:g}, λ {plan['strength']:g}, seed {plan['seed']}"
        practice.plot(rounds, run["stationarity"], "." * (plan["every"] > 1) + "-", linewidth=1.5, label=name)
    practice.set_ylabel("Σ p_k ‖∇F_k‖², mean over steps")
    for axis in (drift, left, practice):
        axis.set_xlabel("round")
    left.legend(frameon=False, fontsize=7)
    practice.legend(frameon=False, fontsize=7)
    # Between the bounds: drifts lie far below them.
    drift.legend(frameon=False, fontsize=7, loc="upper right", bbox_to_anchor=(1, 0.92))
    by_rounds.set_ylabel(f"both sides of the theorem (λ = {BASE[0]:g}, h = {BASE[1]})")
    for axis in axes.flat:
        axis.set_yscale("log")
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    figure.legend(
        *by_rounds.get_legend_handles_labels(), frameon=False, loc="outside upper center", ncols=3, fontsize=8
    )
    figure.suptitle(f"{document.dataset}: softmax regression, η = 1/L_F", x=0.01, ha="left", fontsize=10)
    figure.savefig(file)
    plt.close(figure)


def _series(axis: Any, ticks: Sequence[str], rows: Sequence[Record], label: str) -> None:
    """Every term over evenly spaced settings; zeros (λ = 0 has no drift) have no place on a log scale."""
    for name, pick, colour, style, marker in _SERIES:
        places = [place for place, row in enumerate(rows) if pick(row) > 0]
        axis.plot(places, [pick(rows[place]) for place in places], style, color=colour, marker=marker, markersize=4,
                  linewidth=1.5, label=name)  # fmt: skip
    axis.set_xticks(range(len(ticks)), ticks)
    axis.set_xlabel(label)
