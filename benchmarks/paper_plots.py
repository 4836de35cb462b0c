"""Figures of docs/results-paper.md that `pfedlms reproduce` does not draw, from the rows in benchmarks/results.

python benchmarks/paper_plots.py [--folder docs]      # paper-cost.png, paper-thresholds.png
"""

from __future__ import annotations

import argparse
from pathlib import Path
from statistics import mean
from typing import Any

import study
from regime_plot import accuracy_against_bytes

from pfedlms.report.charts import Look, looks, save, styled
from pfedlms.report.figures import cost
from pfedlms.report.tables import Table

Row = dict[str, Any]
SHOWN = ("fedavg", "eden", "zsign", "obcsaa", "obda", "pfedlms", "fedproto", "sketchvote-r0.1", "pfed1bs")
LAYERWISE, WHOLE = "a sketch for each layer", "one sketch for the whole model"


def rows_of(*groups: str) -> list[Row]:
    found = [row for group in groups for row in study.rows_in(study.RESULTS, group)]
    return [row for row in found if row["setup"] == "a0.5" and row["status"] == "finished"]


def per_round(rows: list[Row], *parts: str) -> float:
    """MiB of all clients."""
    return mean(sum(row["summary"]["bytes_per_round"][part] for part in parts) for row in rows) / study.MIB


def costs(dataset: str) -> Any:
    """MiB per round of every method, up and down."""
    records = []
    for label in SHOWN:
        own = [row for row in rows_of(f"tables-{dataset}", f"paper-{dataset}") if row["label"] == label]
        up, down = (per_round(own, f"{way}_payload", f"{way}_framing") for way in ("up", "down"))
        name = own[0]["config"]["method"]["name"]
        records.append({"row": name, "mib_up": up, "mib_down": down, "total_bytes": up + down})
    table = Table([], records)
    figure = cost(table, looks(record["row"] for record in records))
    assert figure is not None
    return figure.chart


def thresholds() -> Any:
    """What more thresholds cost and bring on CIFAR-10; both kinds of sketch."""
    found: dict[tuple[bool, int], list[Row]] = {}
    for row in rows_of("tables-cifar10", "effects-cifar10"):
        own = row["config"]["method"]
        if own["name"] == "pfedlms" and own["refresh"] == 1 and own["strength"] == 0.05:
            found.setdefault((own["layerwise"], own["thresholds"]), []).append(row)
    points = []
    for (layerwise, number), own in sorted(found.items(), reverse=True):
        values = [row["summary"]["accuracy"]["last10"] for row in own]
        ends = {"mean": mean(values), "low": min(values), "high": max(values)}
        sent = per_round(own, *own[0]["summary"]["bytes_per_round"])
        points.append({"row": LAYERWISE if layerwise else WHOLE, "mib": sent, "label": f"T = {number}", **ends})
    style = {LAYERWISE: Look.number(0), WHOLE: Look.number(3)}
    return styled(accuracy_against_bytes(points, title="CIFAR-10, α = 0.5", style=style))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=study.ROOT / "docs")
    options = parser.parse_args()
    save(costs("mnist"), options.folder / "paper-cost.png")
    save(thresholds(), options.folder / "paper-thresholds.png")


if __name__ == "__main__":
    main()
