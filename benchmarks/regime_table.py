"""The tables of the regimes, in Markdown, from the rows of `study.py regimes-DATASET`.

python benchmarks/regime_table.py mnist cifar10 [--out DIR]      # rows as they are run, else those collected
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import study
from regimes import REGIMES

COLUMNS = ("P-acc", "everyone", "G-acc", "MiB", "of it catching up", "seeds")


def spread(values: Sequence[float]) -> str:
    if not values:
        return "–"
    return f"{mean(values):.2f}" + (f" ± {stdev(values):.2f}" if len(values) > 1 else "")


def of_a_label(rows: Sequence[dict[str, Any]]) -> list[str]:
    """The columns of one row of a table, from the runs of all its seeds."""
    found = [row["summary"] for row in rows]
    everyone = [(own["everyone"] or own["accuracy"])["accuracy" if own["everyone"] else "last10"] for own in found]
    shared = [own["global_accuracy"]["last10"] for own in found if "global_accuracy" in own]
    total = mean(own["total_bytes"] for own in found) / study.MIB
    again = mean(own["bytes_per_round"]["catch_up"] * own["rounds"] for own in found) / study.MIB
    accuracies = [spread(each) for each in ([own["accuracy"]["last10"] for own in found], everyone, shared)]
    return [*accuracies, f"{total:.4g}", f"{again:.3g}", str(len(found))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("datasets", nargs="+", metavar="DATASET")
    parser.add_argument("--out", type=Path, default=study.RESULTS)
    options = parser.parse_args()
    for dataset in options.datasets:
        rows = [row for row in study.rows_in(options.out, f"regimes-{dataset}") if row["status"] == "finished"]
        for regime in REGIMES:
            here = [row for row in rows if row["setup"] == regime]
            if not here:
                continue
            print(f"\n{dataset}, {regime}\n\n| | {' | '.join(COLUMNS)} |\n|---|{'---|' * len(COLUMNS)}")
            for label in dict.fromkeys(row["label"] for row in here):
                own = [row for row in here if row["label"] == label]
                print(f"| {label} | {' | '.join(of_a_label(own))} |")


if __name__ == "__main__":
    main()
