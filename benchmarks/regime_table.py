"""The tables of the regimes, in Markdown, from the rows of `study.py regimes-DATASET`.

python benchmarks/regime_table.py mnist cifar10 [--out DIR]      # rows as they are run, else those collected
python benchmarks/regime_table.py mnist cifar10 --differences    # sketchmean minus others, seed by seed
python benchmarks/regime_table.py --trials                       # the table of trials, from effort.json
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import study
from regimes import REGIMES

Row = dict[str, Any]
COLUMNS = ("P-acc", "everyone", "G-acc", "MiB", "of it catching up", "bytes vs FedAvg")
ORDER = (
    "local-chosen", "fedavg", "stc", "fedavg-chosen", "stc-chosen", "fetchsgd-chosen", "sketchvote-chosen", "sketchmean"
)  # fmt: skip
"""Untuned rows first, then those with settings chosen by trials."""
RIVALS = (
    ("fedavg", ("everyone",)), ("fedavg-chosen", ("everyone",)), ("stc-chosen", ("everyone", "P-acc", "G-acc")),
    ("fetchsgd-chosen", ("P-acc", "G-acc")),
)  # fmt: skip


def spread(values: Sequence[float], sign: str = "") -> str:
    if not values:
        return "–"
    shown = f"{mean(values):{sign}.2f}" + (f" ± {stdev(values):.2f}" if len(values) > 1 else "")
    return shown.replace("-", "−")


def accuracies(row: Row) -> dict[str, float]:
    """P-acc and G-acc as means of the last 10 evaluations; everyone after the last round."""
    own = row["summary"]
    found = {"P-acc": own["accuracy"]["last10"], "G-acc": own.get("global_accuracy", {}).get("last10")}
    found["everyone"] = own["everyone"]["accuracy"] if own["everyone"] else own["accuracy"]["final"]
    return {name: value for name, value in found.items() if value is not None}


def total(rows: Sequence[Row]) -> float:
    return mean(row["summary"]["total_bytes"] for row in rows) / study.MIB


def of_a_label(rows: Sequence[Row], fedavg: float) -> list[str]:
    """The columns of one row of a table, from the runs of all its seeds; `fedavg`: the MiB of FedAvg."""
    found = [accuracies(row) for row in rows]
    shown = [spread([own[name] for own in found if name in own]) for name in COLUMNS[:3]]
    summaries = [row["summary"] for row in rows]
    again = mean(own["bytes_per_round"]["catch_up"] * own["rounds"] for own in summaries) / study.MIB
    mib = total(rows)
    times = "none sent" if not mib else "1" if mib == fedavg else f"1/{fedavg / mib:.0f}"
    return [*shown, f"{mib:,.0f}" if mib >= 1000 else f"{mib:.3g}", f"{again:.3g}", times]


def named(label: str, row: Row) -> str:
    """What the tables of the docs call a row, with the settings that were chosen for it."""
    method, train = row["config"]["method"], row["config"]["train"]
    own = {"fedavg": "server_step", "local": ""}.get(method["name"], "gain")
    shown = [f"`{method['name']}`"]
    if method["name"] == "sketchmean":
        shown.append(f"ratio {method['ratio']:g}, answer {method['answer']:g}")
    if label != method["name"]:
        step = {"server_step": "step", "gain": "gain", "": ""}[own]
        shown.append(
            f"{step} {method[own]:g}, rate {train['learning_rate']:g}" if own else f"rate {train['learning_rate']:g}"
        )
    return ", ".join(shown)


def by_label(rows: Sequence[Row]) -> dict[str, list[Row]]:
    place = {label: next(i for i, start in enumerate(ORDER) if label == start or (
        start == "sketchmean" and label.startswith(start))) for label in {row["label"] for row in rows}}  # fmt: skip
    labels = sorted(place, key=lambda label: (place[label], -total([row for row in rows if row["label"] == label])))
    return {label: [row for row in rows if row["label"] == label] for label in labels}


def table(rows: Sequence[Row]) -> None:
    found = by_label(rows)
    fedavg = total(found["fedavg"])
    print(f"| | {' | '.join(COLUMNS)} |\n|---|{'---|' * len(COLUMNS)}")
    for label, own in found.items():
        print(f"| {named(label, own[0])} | {' | '.join(of_a_label(own, fedavg))} |")


def difference(ours: Sequence[Row], theirs: Sequence[Row], measure: str) -> str:
    """Seed by seed."""
    others = {row["summary"]["seed"]: accuracies(row)[measure] for row in theirs}
    return spread([accuracies(row)[measure] - others[row["summary"]["seed"]] for row in ours], "+")


def differences(dataset: str, regime: str, rows: Sequence[Row]) -> None:
    """One line for each budget of sketchmean."""
    found = by_label(rows)
    rivals = [(label, measure) for label, measures in RIVALS for measure in measures]
    for label, own in found.items():
        if label.startswith("sketchmean"):
            times = of_a_label(own, total(found["fedavg"]))[-1]
            cells = [difference(own, found[rival], measure) if rival in found else "–" for rival, measure in rivals]
            print(f"| {dataset} | {regime} | {label.removeprefix('sketchmean-')} | {times} | {' | '.join(cells)} |")


def trials(file: Path) -> None:
    """V-acc (G-acc) of every trial of every contest."""
    contests = json.loads(file.read_text())["contests"]
    print("| data | regime | method | trials | value × rate: V-acc (G-acc) |\n|---|---|---|---|---|")
    for each in contests:
        shown = []
        for trial in each["trials"]:
            shared = f" ({trial['g_acc']:.1f})" if trial["g_acc"] is not None else ""
            shown.append(f"{trial['value']:g} × {trial['rate']:g}: {trial['v_acc']:.2f}{shared}")
        names = each["dataset"], each["regime"], f"`{each['method']}`", len(each["trials"]), ", ".join(shown)
        print("| " + " | ".join(map(str, names)) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("datasets", nargs="*", metavar="DATASET")
    parser.add_argument("--out", type=Path, default=study.RESULTS)
    parser.add_argument("--differences", action="store_true")
    parser.add_argument("--trials", action="store_true")
    options = parser.parse_args()
    if options.trials:
        trials(options.out / "effort.json")
    for dataset in options.datasets:
        rows = [row for row in study.rows_in(options.out, f"regimes-{dataset}") if row["status"] == "finished"]
        for regime in REGIMES:
            here = [row for row in rows if row["setup"] == regime]
            if not here:
                continue
            if options.differences:
                differences(dataset, regime, here)
            else:
                print(f"\n{dataset}, {regime}\n")
                table(here)


if __name__ == "__main__":
    main()
