"""Figures of docs/results.md and its sister pages that `pfedlms reproduce` does not draw, from the rows of study.py.

python benchmarks/plots.py [--folder docs]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import study
from regimes import SPARSE
from tables import DATASETS, Row, Seeds, accuracies, by_name, mib

from pfedlms.report import charts
from pfedlms.report.charts import Look, looks
from pfedlms.report.figures import cost
from pfedlms.report.tables import Table

Points = list[dict[str, Any]]
TUNED = ("sketchmean, tuned", "stc, tuned", "sketchvote, tuned", "fedavg, tuned", "stc, not tuned", "fedavg, not tuned")
COSTS = ("fedavg", "eden", "zsign", "obcsaa", "obda", "pfedlms", "fedproto", "sketchvote-r0.1", "pfed1bs")
LAYERWISE, WHOLE = "a sketch for each layer", "one sketch for the whole model"


def rows_of(setup: str, *groups: str) -> dict[str, Seeds]:
    """The finished rows of a setup by label."""
    rows = [row for group in groups for row in study.rows_in(study.RESULTS, group) if row["setup"] == setup]
    return by_name(rows, lambda row: str(row["label"]))


def ends(values: Sequence[float]) -> dict[str, float]:
    return {"mean": mean(values), "low": min(values), "high": max(values)}


def curve(name: str, own: Seeds, scale: float = 1.0) -> Points:
    """P-acc against the MiB so far, times a scale, evaluation by evaluation."""
    rows = [row["curve"] for row in own.values()]
    evaluations = zip(rows[0]["bytes"], *(each["p_acc"] for each in rows), strict=True)
    return [{"row": name, "x": scale * sent / study.MIB, **ends(values)} for sent, *values in evaluations if sent]


def points(records: Points, x: str, y: str, title: str, style: Mapping[str, Look]) -> Any:
    """Points with error bars, those of a row joined; they are diamonds where the row's lines are dashed."""
    alt = charts.import_altair()
    across = alt.X("x:Q", title=x, scale=alt.Scale(type="log", nice=False, padding=24))
    span = alt.Scale(domain=list(charts.value_range(records)), nice=False)
    up, low = (alt.Y(f"{key}:Q", title=y, scale=span) for key in ("mean", "low"))
    forms = ["circle" if look.dash == [1, 0] else "diamond" for look in style.values()]
    shape = alt.Shape("row:N", sort=None, scale=alt.Scale(domain=list(style), range=forms))
    base = charts.chart_of(records).encode(across, color=charts.row_colours(style, alt.Legend(symbolSize=80)))
    return alt.layer(
        base.mark_line(strokeWidth=1.5, opacity=0.6).encode(up),
        base.mark_rule(strokeWidth=1.5).encode(low, alt.Y2("high:Q")),
        base.mark_point(filled=True, size=70, opacity=1).encode(up, shape=shape),
        base.mark_text(align="left", dx=7, dy=-6, fontSize=10).encode(up, alt.Text("label:N")),
    ).properties(width=charts.WIDTH, height=charts.HEIGHT, title=title)


def by_bytes(setup: str = "a0.5") -> Any:
    """sketchvote and stc at several ratios; two ratios are enough to see, all of them are in the tables."""
    panels = []
    for dataset in ("mnist", "fmnist", "cifar10"):
        records: Points = []
        style: dict[str, Look] = {}
        found = rows_of(setup, f"tables-{dataset}")
        local = mean(accuracies(row)["P-acc"] for row in found.pop("local").values())
        for label in ("fedavg", *(own for own in found if own.startswith("fedavg-")), "pfedlms", "sketchvote-r0.1",
                      "sketchvote-r0.05", "stc-as-r0.1", "stc-as-r0.05"):  # fmt: skip
            method, _, rest = label.partition("-")
            own = {"s": "server step chosen", "r": f"ratio {rest[1:]}", "a": f"bytes of ratio {rest[4:]}"}
            name = ", ".join(filter(None, [method, own.get(rest[:1], "")]))
            drawn = sum(look.colour == looks([method])[method].colour for look in style.values())
            style[name] = Look(looks([method])[method].colour, Look.number(8 * drawn).dash)
            clients = next(iter(found[label].values()))["config"]["data"]["clients"]
            means = (
                {key: each[key] for key in ("row", "x", "mean")} for each in curve(name, found[label], 1 / clients)
            )
            records += [each for each in means if each["mean"] > local - 2.5]
        records.append({"row": "local, nothing sent", "mean": local})
        style["local, nothing sent"] = looks(["local"])["local"]
        words = "MiB a client has sent and received", "P-acc, %, mean over seeds"
        chart = charts.line_chart(records, *words, log_x=True, title=DATASETS[dataset], style=style)
        panels.append(chart.properties(width=400, height=380))
    return charts.combine_charts(panels)


def regime(name: str) -> Any:
    """Where clients are sampled, the accuracy of all clients against the MiB of the run, budgets of a method joined;
    else P-acc against the MiB so far. `local` sends nothing, `fetchsgd` is far below: both are in the tables alone."""
    first = {row: looks([row.partition(",")[0]])[row.partition(",")[0]] for row in TUNED}
    style = {row: look if row.endswith(", tuned") else Look(look.colour, [6, 3]) for row, look in first.items()}
    panels = []
    for dataset in DATASETS:
        records: Points = []
        for label, own in rows_of(name, f"regimes-{dataset}").items():
            method = label.partition("-")[0]
            row = f"{method}, {'not tuned' if label in ('fedavg', 'stc') else 'tuned'}"
            if row in style and name in SPARSE:
                values = [accuracies(each)["everyone"] for each in own.values()]
                records.append({"row": row, "x": mib(own), "label": "", **ends(values)})
            elif row in style:
                records += curve(row, own)
        if records:
            records.sort(key=lambda each: TUNED.index(each["row"]))
            words = "MiB of the whole run, all clients", "accuracy of all clients at the end, %"
            chart = points(records, *words, DATASETS[dataset], style) if name in SPARSE else charts.line_chart(
                records, "MiB so far, all clients", "P-acc, %", log_x=True, title=DATASETS[dataset], style=style
            )  # fmt: skip
            panels.append(chart.properties(width=330, height=260))
    return charts.combine_charts(panels, columns=2)


def per_round(own: Seeds, *parts: str) -> float:
    """MiB of all clients."""
    return mean(sum(row["summary"]["bytes_per_round"][part] for part in parts) for row in own.values()) / study.MIB


def costs() -> Any:
    """MiB per round of every method, up and down, on MNIST."""
    records, found = [], rows_of("a0.5", "tables-mnist", "paper-mnist")
    for label in COSTS:
        up, down = (per_round(found[label], f"{way}_payload", f"{way}_framing") for way in ("up", "down"))
        records.append({"row": label.partition("-")[0], "mib_up": up, "mib_down": down, "total_bytes": up + down})
    figure = cost(Table([], records), looks(record["row"] for record in records))
    assert figure is not None
    return figure.chart


def thresholds() -> Any:
    """What more thresholds cost and bring on CIFAR-10; both kinds of sketch."""
    records: Points = []
    for own in rows_of("a0.5", "tables-cifar10", "effects-cifar10").values():
        row: Row = next(iter(own.values()))
        method, sent = row["config"]["method"], per_round(own, *row["summary"]["bytes_per_round"])
        if method["name"] == "pfedlms" and method["refresh"] == 1 and method["strength"] == 0.05:
            kind, values = (
                LAYERWISE if method["layerwise"] else WHOLE,
                [accuracies(each)["P-acc"] for each in own.values()],
            )
            records.append({"row": kind, "x": sent, "label": f"T = {method['thresholds']}", **ends(values)})
    style = {LAYERWISE: Look.number(0), WHOLE: Look.number(3)}
    return charts.apply_style(points(records, "MiB per round", "P-acc, %", "CIFAR-10, α = 0.5", style))


FIGURES: dict[str, Callable[[], Any]] = {
    "bytes": by_bytes, "paper-cost": costs, "paper-thresholds": thresholds,
    **{f"regimes-{name}": lambda name=name: regime(name) for name in (*SPARSE, "20-of-20")},
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=study.ROOT / "docs")
    options = parser.parse_args()
    for name, draw in FIGURES.items():
        charts.save(draw(), options.folder / f"{name}.png")


if __name__ == "__main__":
    main()
