"""Markdown tables and the plot of docs/results.md, from the rows that benchmarks/study.py collected.

    python benchmarks/study_tables.py tables-mnist limits variants …       # a table for every setup of a group
    python benchmarks/study_tables.py sweep-mnist                          # server steps, and the one that is chosen
    python benchmarks/study_tables.py --plot docs/bytes.png [--setup a0.5]   # accuracy against bytes, all tables

Accuracies are means of the last 10 evaluations, ± over seeds. Differences are taken seed by seed, then averaged. Where
a group has no FedAvg or no plain sketchvote of a setup, those of other groups stand beside it, of the same seeds.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import cells

RESULTS = Path(__file__).parent / "results"
MIB = 1 << 20
ORDER = ("local", "fedavg", "pfedlms", "sketchvote", "stc")
DATASETS = {"mnist": "MNIST", "fmnist": "Fashion-MNIST", "cifar10": "CIFAR-10"}
Row = dict[str, Any]
Rows = dict[int, Row]
"""Of one label, by seed."""


def load(group: str) -> list[Row]:
    file = RESULTS / f"{group}.json"
    return json.loads(file.read_text()) if file.is_file() else []


def everything() -> list[Row]:
    """All studies that were collected, but for sweeps, whose runs train on fewer samples."""
    names = ("tables-", "plain-", "limits", "variants")
    files = sorted(file for name in names for file in RESULTS.glob(f"{name}*.json"))
    return [row for file in files for row in load(file.stem)]


def place(label: str) -> tuple[int, float, str]:
    """Where a label stands in a table: by method, then by ratio, the largest first."""
    method, _, rest = label.partition("-")
    ratio = next((float(part.lstrip("r")) for part in rest.split("-") if part[:1] == "r" and part[1:2].isdigit()), 0.0)
    return ORDER.index(method), -ratio, rest


def by_label(rows: Iterable[Row]) -> dict[str, Rows]:
    found: dict[str, Rows] = {}
    for row in rows:
        found.setdefault(row["label"], {})[row["config"]["run"]["seed"]] = row
    return dict(sorted(found.items(), key=lambda pair: place(pair[0])))


def accuracy(row: Row, kind: str = "accuracy") -> float | None:
    finished = row["status"] == "finished" and kind in row["summary"]
    return row["summary"][kind]["last10"] if finished else None


def sent(row: Row) -> float:
    """Bytes a round of all clients, framing and catching up included."""
    return sum(row["summary"]["bytes_per_round"].values())


def spread(values: Iterable[float | None], sign: str = "") -> str:
    known = [value for value in values if value is not None]
    if not known:
        return "–"
    middle = f"{mean(known):{sign}.2f}".replace("-", "−")
    return middle + (f" ± {stdev(known):.2f}" if len(known) > 1 else "")


def difference(own: Rows, other: Rows | None) -> str:
    """P-acc of one label minus that of another, of the seeds both have."""
    pairs = [(accuracy(own[seed]), accuracy(other[seed])) for seed in own if other and seed in other]
    return spread([a - b for a, b in pairs if a is not None and b is not None], "+")


def compared(rows: list[Row], dataset: str, setup: str) -> dict[str, Rows]:
    """The labels of one setup, and beside them what they have to be compared with."""
    own = by_label(row for row in rows if row["setup"] == setup and row["config"]["data"]["dataset"] == dataset)
    seeds = {seed for each in own.values() for seed in each}
    others = by_label(
        row
        for row in everything()
        if (row["setup"], row["config"]["data"]["dataset"]) == (setup, dataset)
        and is_plain(row)
        and row["config"]["run"]["seed"] in seeds
    )
    wanted = {
        name: each for name, each in others.items() if name == "fedavg" or any(f"{name}-" in label for label in own)
    }
    merged = {**wanted, **own}
    return {label: merged[label] for label in sorted(merged, key=place)}


def is_plain(row: Row) -> bool:
    """Not sketchvote with gain and allocation chosen for a data set: limits and variants have neither."""
    own = row["config"]["method"]
    return own["name"] != "sketchvote" or own["gain"] == own["allocation"] == 1


def bytes_against(own: Rows, fedavg: Rows | None) -> str:
    done = [sent(row) for row in own.values() if row["status"] == "finished"]
    reference = [sent(row) for row in (fedavg or {}).values() if row["status"] == "finished"]
    if not done or not reference:
        return "–"
    if mean(done) == mean(reference):
        return "1"
    return f"1/{mean(reference) / mean(done):.0f}" if mean(done) else "none sent"


def table(shown: dict[str, Rows]) -> str:
    """One setup in Markdown."""
    fedavg = shown.get("fedavg")

    columns: dict[str, Callable[[str, Rows], str]] = {
        "P-acc": lambda label, own: spread(map(accuracy, own.values())),
        "G-acc": lambda label, own: spread(accuracy(row, "global_accuracy") for row in own.values()),
        "MiB/round": lambda label, own: spread_bytes(own),
        "bytes vs FedAvg": lambda label, own: bytes_against(own, fedavg),
        "P-acc − FedAvg": lambda label, own: "" if label == "fedavg" else difference(own, fedavg),
    }
    lines = ["| " + " | ".join(["method", *columns]) + " |", "|---" * (1 + len(columns)) + "|"]
    for label, own in shown.items():
        lost = [row["status"] for row in own.values() if row["status"] != "finished"]
        name = title(label, own) + (f" ({len(lost)} of {len(own)} {' and '.join(sorted(set(lost)))})" if lost else "")
        lines.append("| " + " | ".join([name, *(column(label, own) for column in columns.values())]) + " |")
    return "\n".join(lines)


def both_alphas(rows: list[Row], dataset: str) -> str:
    """The tables of a data set at both α as one."""
    high, low = (compared(rows, dataset, setup) for setup in ("a0.5", "a0.1"))
    heads = [f"α = {alpha}: P-acc | − FedAvg | G-acc" for alpha in (0.5, 0.1)]
    lines = [f"| method | {' | '.join(heads)} | MiB/round | bytes vs FedAvg |", "|---" * 9 + "|"]
    for label, own in high.items():
        cells = [title(label, own)]
        for shown in (high, low):
            here = shown.get(label, {})
            cells.append(spread(map(accuracy, here.values())))
            cells.append("" if label == "fedavg" else difference(here, shown["fedavg"]))
            cells.append(spread(accuracy(row, "global_accuracy") for row in here.values()))
        cells += [spread_bytes(own), bytes_against(own, high["fedavg"])]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def spread_bytes(own: Rows) -> str:
    done = [sent(row) / MIB for row in own.values() if row["status"] == "finished"]
    return f"{mean(done):.3g}" if done else "–"


def title(label: str, own: Rows) -> str:
    """A label as it is read: the method, and what was set."""
    method, _, rest = label.partition("-")
    if not rest:
        return f"`{method}`"
    if label.startswith("stc-as-r"):
        sparsity = next(iter(own.values()))["config"]["method"]["sparsity"]
        return f"`stc`, p {sparsity:.2g} (bytes of ratio {rest.removeprefix('as-r')})"
    parts = [
        part.replace("r", "ratio ", 1) if part[:1] == "r" and part[1:2].isdigit() else part for part in rest.split("-")
    ]
    for name in ("step", "gain", "refresh", "allocation", "cap"):
        parts = [f"{name} {part.removeprefix(name)}" if part.startswith(name) else part for part in parts]
    return f"`{method}`, " + ", ".join(parts)


def sweep(group: str) -> str:
    """Server steps by validation accuracy, and the choice."""
    rows = sorted(load(group), key=lambda row: row["config"]["method"]["server_step"])
    lines = ["| server step | V-acc | P-acc | G-acc |", "|---|---|---|---|"]
    for row in rows:
        measured = [accuracy(row, kind) for kind in ("validation_accuracy", "accuracy", "global_accuracy")]
        step = row["config"]["method"]["server_step"]
        lines.append(f"| {step:g} | " + " | ".join(spread([value]) for value in measured) + " |")
    chosen, tried = cells.choice(rows), [row["config"]["method"]["server_step"] for row in rows]
    lines += ["", f"chosen by V-acc: {chosen:g}" if chosen is not None else "none of them finished"]
    if chosen in (tried[0], tried[-1]):
        lines.append(f"warning: {chosen:g} lies at the edge of what was tried; extend the sweep with --steps")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("groups", nargs="*", metavar="GROUP")
    parser.add_argument("--plot", type=Path, metavar="FILE")
    parser.add_argument("--setup", default="a0.5", help="of the plot")
    options = parser.parse_args()
    for group in options.groups:
        rows = load(group)
        if not rows:
            raise SystemExit(
                f"{group}: benchmarks/results/{group}.json is not there; collect it with study.py --collect"
            )
        if group.startswith("sweep-"):
            print(f"{group}\n\n{sweep(group)}\n")
            continue
        if group.startswith("tables-"):
            dataset = group.removeprefix("tables-")
            print(f"{DATASETS[dataset]}\n\n{both_alphas(rows, dataset)}\n")
            continue
        for dataset, setup in dict.fromkeys((row["config"]["data"]["dataset"], row["setup"]) for row in rows):
            print(f"{DATASETS.get(dataset, dataset)}, {setup}\n\n{table(compared(rows, dataset, setup))}\n")
    if options.plot:
        import study_plot

        study_plot.draw(options.plot, options.setup)


if __name__ == "__main__":
    main()
