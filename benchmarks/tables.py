"""Markdown tables of docs/results.md and its sister pages, from the rows of study.py.

    python benchmarks/tables.py regimes-mnist                      # one table for every data set and setup
    python benchmarks/tables.py limits plain-mnist                 # rows of both groups in one table
    python benchmarks/tables.py regimes-mnist --minus stc-chosen   # differences to a row, seed by seed
    python benchmarks/tables.py rivals-cifar10 --last 3 [--out DIR]

V-acc, P-acc and G-acc are means of the last 10 evaluations, or of the --last; ± is over seeds. `everyone` and
`newcomers` are measured after the last round. Rows are those collected, or with --out those of a study as it runs.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from statistics import mean
from typing import Any

import study

from pfedlms import load_config
from pfedlms.report.runs import Spread
from pfedlms.report.tables import Column, Table

Row = dict[str, Any]
Seeds = dict[int, Row]
"""The rows of one label, by seed."""
MEASURES = {
    "V-acc": ("v_acc", "validation_accuracy"), "P-acc": ("p_acc", "accuracy"), "G-acc": ("g_acc", "global_accuracy"),
    "perplexity": ("", "perplexity"), "of the shared model": ("", "global_perplexity"),
}  # fmt: skip
"""In a row's curve and in its summary."""
ACCURACIES = ("V-acc", "P-acc", "everyone", "G-acc", "newcomers before", "newcomers after", *list(MEASURES)[3:])
DATASETS = {"mnist": "MNIST", "fmnist": "Fashion-MNIST", "cifar10": "CIFAR-10", "cifar100": "CIFAR-100"}


def accuracies(row: Row, last: int = 10) -> dict[str, float]:
    """Those that were measured."""
    own, found = row["summary"], {}
    for name, (short, long) in MEASURES.items():
        tail = mean(row["curve"][short][-last:]) if last != 10 and short in row["curve"] else None
        found[name] = tail or own.get(long, {}).get("last10")
    if own.get("everyone", {}) is not None:  # null where nobody but participants was measured
        found["everyone"] = own.get("everyone", {}).get("accuracy") or own["accuracy"]["final"]
    newcomers = own.get("newcomers") or {}
    found |= {f"newcomers {when}": newcomers.get(when) for when in ("before", "after")}
    return {name: value for name, value in found.items() if value is not None}


def mib(own: Seeds) -> float:
    """Of all clients and rounds, framing and catching up included; the mean over seeds."""
    return mean(row["summary"]["total_bytes"] for row in own.values()) / study.MIB


@cache
def shipped(dataset: str, method: str) -> dict[str, dict[str, Any]]:
    return load_config(None, {"data": {"dataset": dataset}, "method": {"name": method}}).tables()


def named(row: Row) -> str:
    """The label, with the settings of the method that are not those shipped for the data set, and the learning rate."""
    config, method = row["config"], row["config"]["method"]
    before = shipped(config["data"]["dataset"], method["name"])
    changed = {key: value for key, value in method.items() if value != before["method"].get(key, value)}
    rate = config["train"]["learning_rate"]
    changed |= {"rate": rate} if rate != before["train"]["learning_rate"] else {}
    shown = {key: f"{value:.3g}" if isinstance(value, float) else value for key, value in changed.items()}
    return ", ".join([f"`{row['label']}`", *(f"{key.replace('_', ' ')} {value}" for key, value in shown.items())])


def by_name(rows: Sequence[Row], name: Callable[[Row], str] = named) -> dict[str, Seeds]:
    """Rows that finished: those of one name together, by default those of one label and the same settings."""
    found: dict[str, Seeds] = {}
    for row in rows:
        if row["status"] == "finished":
            found.setdefault(name(row), {})[row["config"]["run"]["seed"]] = row
    return found


def size(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def table(title: str, found: dict[str, Seeds], minus: str, last: int) -> Table:
    """One line per label, the most accurate first."""
    by_label = {row["label"]: own for own in found.values() for row in own.values()}
    fedavg, other, records = by_label.get("fedavg"), by_label.get(minus, {}), []
    for name, own in found.items():
        values = {seed: accuracies(row, last) for seed, row in own.items()}
        if minus:
            lower = {seed: accuracies(row, last) for seed, row in other.items()}
            values = {
                seed: {key: value - lower[seed][key] for key, value in each.items() if key in lower[seed]}
                for seed, each in values.items()
                if seed in lower
            }
        sent, summaries = mib(own), [row["summary"] for row in own.values()]
        again = mean(each["bytes_per_round"].get("catch_up", 0) * each["rounds"] for each in summaries) / study.MIB
        times = "none sent" if not sent else f"1/{size(mib(fedavg) / sent)}" if fedavg else None
        records.append({
            "row": name,
            **{key: Spread.of(each.get(key) for each in values.values()) for key in ACCURACIES},
            "MiB": sent, "of it catching up": again or None, "bytes vs FedAvg": times, "seeds": len(own),
        })  # fmt: skip
    first = next(name for name in ACCURACIES if any(record[name] for record in records))
    records.sort(key=lambda record: -(record[first].mean if record[first] else 0.0))
    sign = "+" if minus else ""

    def spread(value: Spread) -> str:
        deviation = f" ± {value.deviation:.2f}" if value.deviation is not None else ""
        return f"{value.mean:{sign}.2f}{deviation}".replace("-", "−")

    columns = [Column("row", " "), *(Column(name, name, spread) for name in ACCURACIES)]
    columns += [Column("MiB", "MiB", size), Column("of it catching up", "of it catching up", size)]
    return Table([*columns, *(Column(name, name) for name in ("bytes vs FedAvg", "seeds"))], records, title)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("groups", nargs="+", metavar="GROUP")
    parser.add_argument("--minus", default="", metavar="LABEL", help="show differences to this row")
    parser.add_argument("--last", type=int, default=10, help="evaluations of which accuracies are means")
    parser.add_argument("--out", type=Path, default=study.RESULTS)
    options = parser.parse_args()
    tables: dict[tuple[str, str], list[Row]] = {}
    for group in options.groups:
        rows = study.rows_in(options.out, group)
        if not rows:
            raise SystemExit(f"{options.out}: no rows of {group}; collect them with study.py --collect")
        for row in rows:
            tables.setdefault((row["config"]["data"]["dataset"], row["setup"]), []).append(row)
    for (dataset, setup), rows in tables.items():
        title = f"{DATASETS.get(dataset, dataset)}, {setup}" + (f", minus {options.minus}" if options.minus else "")
        print(table(title, by_name(rows), options.minus, options.last).markdown())


if __name__ == "__main__":
    main()
