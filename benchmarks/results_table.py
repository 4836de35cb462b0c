"""Print the Markdown tables of docs/results.md where a fifth of the clients takes part, from the rows in
benchmarks/results.

    python benchmarks/results_table.py sampled-mnist n100
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from cells import SAMPLED

MIB = 1 << 20
Runs = list[dict[str, Any]]


def spread(values: list[float]) -> str:
    return f"{mean(values):.2f} ± {stdev(values):.2f}" if values else "–"


def mib(runs: Runs, *names: str) -> str:
    """MiB a round, the mean over seeds."""
    return f"{mean(sum(run['bytes_per_round'].get(name, 0) for name in names) for run in runs) / MIB:.3f}"


def columns(totals: dict[str, float]) -> dict[str, Callable[[str, Runs], str]]:
    """What a table shows of the runs of one method."""

    def fewer(name: str, runs: Runs) -> str:
        told = f"{totals['fedavg'] / totals[name]:.3g}× fewer" if totals[name] else "none sent"
        return "1" if name == "fedavg" else told

    def shared(name: str, runs: Runs) -> str:
        return spread([run["global_accuracy"]["max"] for run in runs if "global_accuracy" in run])

    return {
        "P-acc last 10": lambda name, runs: spread([run["accuracy"]["last10"] for run in runs]),
        "everyone": lambda name, runs: spread([run["everyone"]["accuracy"] for run in runs]),
        "G-acc max": shared,
        "MiB/round ↑": lambda name, runs: mib(runs, "up_payload", "up_framing"),
        "↓": lambda name, runs: mib(runs, "down_payload", "down_framing"),
        "catching up": lambda name, runs: mib(runs, "catch_up"),
        "bytes vs FedAvg": fewer,
    }


def main() -> None:
    group, setup = sys.argv[1:]
    rows = json.loads((Path(__file__).parent / "results" / f"{group}.json").read_text())
    groups = {
        name: [row["summary"] for row in rows if (row["setup"], row["label"]) == (setup, name)] for name in SAMPLED
    }
    shown = columns({name: mean(run["total_bytes"] for run in own) for name, own in groups.items()})
    print("| " + " | ".join(["method", *shown]) + " |")
    print("|---" * (1 + len(shown)) + "|")
    for name, own in groups.items():
        print("| " + " | ".join([f"`{name}`", *(cell(name, own) for cell in shown.values())]) + " |")


if __name__ == "__main__":
    main()
