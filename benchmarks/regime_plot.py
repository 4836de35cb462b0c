"""Accuracy against bytes, one figure per regime and one panel per data set, from the rows of `regimes-DATASET`.

    python benchmarks/regime_plot.py [--folder docs]      # regimes-10-of-100.png, …

Where clients are sampled, a point is a row of the tables: the accuracy of all clients after the last round against the
MiB of the whole run, with its range over seeds; budgets of one method are joined. With everybody in every round, where
the compressed methods have one budget, P-acc is drawn against the MiB so far. `local` sends nothing and `fetchsgd` is
far below the others: both are left to the tables.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import study
from regime_table import Row, accuracies, by_label, total
from regimes import REGIMES

from pfedlms.report import charts

NAMES = {"mnist": "MNIST", "fmnist": "Fashion-MNIST", "cifar10": "CIFAR-10", "cifar100": "CIFAR-100"}
LEFT_OUT = ("local-chosen", "fetchsgd-chosen")


def named(label: str) -> str:
    """The row of a figure: the same for all budgets of a method."""
    if label.startswith("sketchmean"):
        return "sketchmean, tuned"
    method, _, chosen = label.partition("-")
    return f"{method}, {'tuned' if chosen else 'not tuned'}"


def look(row: str) -> charts.Look:
    """The colour of the method; rows that are not tuned have dashed lines."""
    method, _, tuned = row.partition(", ")
    own = charts.looks([method])[method]
    return own if tuned == "tuned" else charts.Look(own.colour, [6, 3])


STYLE = {row: look(row) for row in (
    "sketchmean, tuned", "stc, tuned", "sketchvote, tuned", "fedavg, tuned", "stc, not tuned", "fedavg, not tuned"
)}  # fmt: skip


def points(rows: Sequence[Row]) -> list[dict[str, Any]]:
    found = []
    for label, own in by_label(rows).items():
        if label not in LEFT_OUT:
            values = [accuracies(row)["everyone"] for row in own]
            ends = {"mean": mean(values), "low": min(values), "high": max(values)}
            found.append({"row": named(label), "mib": total(own), "label": "", **ends})
    return sorted(found, key=lambda point: list(STYLE).index(point["row"]))


def curves(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """P-acc against the MiB so far, evaluation by evaluation, in the order of the style."""
    found = []
    for label, own in sorted(by_label(rows).items(), key=lambda pair: list(STYLE).index(named(pair[0]))):
        for sent, *values in zip(own[0]["curve"]["bytes"], *(row["curve"]["p_acc"] for row in own), strict=True):
            ends = {"mean": mean(values), "low": min(values), "high": max(values)}
            found.append({"row": named(label), "x": sent / study.MIB, **ends})
    return found


def accuracy_against_bytes(
    records: Sequence[Mapping[str, Any]], y: str = "P-acc, %", x: str = "MiB per round", *, title: str = "",
    style: Mapping[str, charts.Look] | None = None,
) -> Any:  # fmt: skip
    """One point per record with its error bar: `row`, `mib`, `mean`, and if known `low`, `high` and `label`. Points of
    one row are joined, such as those of a method at several ratios. Rows with dashed lines have diamonds."""
    alt = charts.altair()
    points = charts.with_range(records)
    by_row = charts.rows_of(points)
    span = alt.Scale(domain=list(charts.shown_range(points)), nice=False)
    up = alt.Y("mean:Q", title=y, scale=span)
    across = alt.X("mib:Q", title=x, scale=alt.Scale(type="log", nice=False, padding=24))
    style = {row: (style or charts.looks(by_row))[row] for row in by_row}
    base = charts.data(points).encode(across, color=charts.coloured(style, alt.Legend(symbolSize=80)))
    forms = ["circle" if look.dash == [1, 0] else "diamond" for look in style.values()]
    shape = alt.Shape("row:N", sort=None, scale=alt.Scale(domain=list(style), range=forms))
    tips = charts.tooltips("row:N", "label:N", mib=x, mean=y, low="lowest", high="highest")
    return alt.layer(
        base.mark_line(strokeWidth=1.5, opacity=0.6).encode(up),
        base.mark_rule(strokeWidth=1.5).encode(alt.Y("low:Q", title=y, scale=span), alt.Y2("high:Q")),
        base.mark_point(filled=True, size=70, opacity=1).encode(up, shape=shape, tooltip=tips),
        base.mark_text(align="left", dx=7, dy=-6, fontSize=10).encode(up, alt.Text("label:N")),
    ).properties(width=charts.WIDTH, height=charts.HEIGHT, title=title)


def panel(regime: str, dataset: str, rows: Sequence[Row]) -> Any:
    if regime == "20-of-20":
        words = "MiB so far, all clients", "P-acc, %"
        chart = charts.lines(curves(rows), *words, log=True, title=NAMES[dataset], style=STYLE)
    else:
        words = "accuracy of all clients at the end, %", "MiB of the whole run, all clients"
        chart = accuracy_against_bytes(points(rows), *words, title=NAMES[dataset], style=STYLE)
    return chart.properties(width=330, height=260)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=study.ROOT / "docs")
    options = parser.parse_args()
    rows = {dataset: study.rows_in(study.RESULTS, f"regimes-{dataset}") for dataset in NAMES}
    for regime in REGIMES:
        here = {
            dataset: [row for row in every if row["setup"] == regime and row["status"] == "finished"]
            for dataset, every in rows.items()
        }
        panels = [panel(regime, dataset, own) for dataset, own in here.items() if own]
        if panels:
            charts.beside(panels, columns=2).save(options.folder / f"regimes-{regime}.png", scale_factor=2)


if __name__ == "__main__":
    main()
