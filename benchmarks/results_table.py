"""Print the Markdown table of docs/results.md from the summaries in benchmarks/results.

python benchmarks/results_table.py mnist 0.5
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import mean, stdev

MIB = 1 << 20
ORDER = ("local", "fedavg", "pfedlms", "pfed1bs", "eden", "zsign", "obcsaa", "obda", "fedproto")
# Maximum test accuracy in the paper's tables 1 (α = 0.5) and 2 (α = 0.1).
COLUMNS = ("fedavg", "obda", "obcsaa", "fedproto", "eden", "zsign", "pfed1bs", "pfedlms")
PAPER = {
    ("mnist", "0.5"): dict(zip(COLUMNS, (98.55, 91.12, 93.81, 96.21, 98.12, 94.98, 95.10, 97.45), strict=True)),
    ("mnist", "0.1"): dict(zip(COLUMNS, (99.19, 86.84, 96.35, 98.61, 98.83, 95.63, 98.20, 98.78), strict=True)),
}


def spread(values: list[float]) -> str:
    return f"{mean(values):.2f} ± {stdev(values):.2f}"


def main() -> None:
    dataset, alpha = sys.argv[1:3]
    folder = Path(__file__).parent / "results"
    runs = [
        run for file in sorted(folder.glob(f"{dataset}-{alpha}-*.json")) for run in json.loads(file.read_text())["runs"]
    ]
    print("| method | P-acc max | P-acc last 10 | G-acc max | paper | MiB/round ↑ | ↓ | bytes vs FedAvg |")
    print("|---|---|---|---|---|---|---|---|")
    totals = {name: mean(run["total_bytes"] for run in runs if run["method"] == name) for name in ORDER}
    for name in ORDER:
        own = [run for run in runs if run["method"] == name]
        shared = [run["global_accuracy"]["max"] for run in own if "global_accuracy" in run]
        sent = own[0]["bytes_per_round"]
        up, down = ((sent[f"{way}_payload"] + sent[f"{way}_framing"]) / MIB for way in ("up", "down"))
        less = f"{totals['fedavg'] / totals[name]:.3g}× fewer" if totals[name] else "none sent"
        less = "1" if name == "fedavg" else less
        cells = [
            f"`{name}`",
            spread([run["accuracy"]["max"] for run in own]),
            spread([run["accuracy"]["last10"] for run in own]),
            spread(shared) if shared else "–",
            f"{PAPER[dataset, alpha][name]:.2f}" if name in PAPER[dataset, alpha] else "–",
            f"{up:.3f}",
            f"{down:.3f}",
            less,
        ]
        print("| " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
