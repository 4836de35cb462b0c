"""Accuracy against bytes, one figure per regime and one panel per data set, from the rows of `regimes-DATASET`.

    python benchmarks/regime_plot.py [--folder docs]      # regimes-10-of-100.png, …

Where clients are sampled, a point is a row of the tables: the accuracy of all clients after the last round against the
MiB of the whole run, with its range over seeds; budgets of one method are joined. With everybody in every round, where
the compressed methods have one budget, P-acc is drawn against the MiB so far. `local` sends nothing and `fetchsgd` is
far below the others: both are left to the tables.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import study
from regime_table import Row, accuracies, by_label, total
from regimes import REGIMES

from pfedlms.report.charts import Look, accuracy_against_bytes, beside, lines

NAMES = {"mnist": "MNIST", "fmnist": "Fashion-MNIST", "cifar10": "CIFAR-10", "cifar100": "CIFAR-100"}
LEFT_OUT = ("local-chosen", "fetchsgd-chosen")


def named(label: str) -> str:
    """The row of a figure: the same for all budgets of a method."""
    if label.startswith("sketchmean"):
        return "sketchmean, tuned"
    method, _, chosen = label.partition("-")
    return f"{method}, {'tuned' if chosen else 'not tuned'}"


STYLE = {row: Look.number(place) for place, row in enumerate((
    "sketchmean, tuned", "stc, tuned", "sketchvote, tuned", "fedavg, tuned", "stc, not tuned", "fedavg, not tuned"
))}  # fmt: skip


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


def panel(regime: str, dataset: str, rows: Sequence[Row]) -> Any:
    if regime == "20-of-20":
        words = "MiB so far, all clients", "P-acc, %"
        chart = lines(curves(rows), *words, log=True, title=NAMES[dataset], style=STYLE)
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
        charts = [panel(regime, dataset, own) for dataset, own in here.items() if own]
        beside(charts, columns=2).save(options.folder / f"regimes-{regime}.png", scale_factor=2)


if __name__ == "__main__":
    main()
