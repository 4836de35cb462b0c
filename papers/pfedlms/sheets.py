"""The tables of an experiment: measured beside printed, communication, and what bytes buy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import hypot
from statistics import mean, stdev
from typing import Any

import pfedlms
from papers.pfedlms.experiments import Row, on, printed
from pfedlms.report.runs import MIB
from pfedlms.report.tables import Column, Table, count_text, mib_text

Runs = dict[str, list[pfedlms.Run]]
"""By the name of a cell or row, one run per seed."""
WIDE = 2.0  # standard deviations
SHARE = 0.9
FRUGAL = ("sketchvote", "pfedlms")
_SHORTER = "fedavg, "
"""How the names of rows with fewer rounds of FedAvg begin."""


@dataclass(frozen=True)
class Sheet:
    """Records of numbers, and the table that shows them."""

    name: str
    """The name of its files."""
    title: str
    records: list[dict[str, Any]]
    columns: dict[str, str]
    """Headings by the records' keys; `x ± y` shows two of them. Without columns the records are written and not
    shown."""
    note: str = ""
    digits: str = ".2f"
    """The format of numbers that have none of their own."""

    @property
    def table(self) -> Table:
        columns = [Column(key, heading) for key, heading in self.columns.items()]
        records = [{key: _text(record, key, self.digits) for key in self.columns} for record in self.records]
        return Table(columns, records, self.title, self.note)


def _text(record: Mapping[str, Any], key: str, digits: str) -> str | None:
    main, _, spread = key.partition(" ± ")
    value = record.get(main)
    if value is None or isinstance(value, str):
        return value
    if main == "difference":
        text = f"{value:+z.2f}".replace("-", "−") + " *" * bool(record.get("outside"))
    elif main == "rounds":  # a mean over seeds
        text = f"{value:.0f}"
    elif main == "mib":
        text = mib_text(value)
    else:
        text = f"{value:{digits}}" if isinstance(value, float) else str(value)
    return text + (f" ± {record[spread]:.2f}" if spread and record.get(spread) else "")


def finished(runs: Sequence[pfedlms.Run]) -> list[pfedlms.Run]:
    return [run for run in runs if run.summary["status"] == "finished"]


def against_paper(name: str, title: str, dataset: str, rows: Sequence[Row], runs: Runs) -> Sheet:
    """One record per row: the maximum over evaluations, as the paper reports it, the mean of the last ten, and the
    paper's number. `runs` are by label of the row."""
    records = []
    for row in rows:
        own = runs.get(row.label, [])
        done, broken = finished(own), [run for run in own if run.summary["status"] != "finished"]
        record: dict[str, Any] = {"row": row.label, "dataset": dataset, "seeds": len(done)}
        if broken:
            record["row"] += f" ({len(broken)} {broken[0].summary['status']})"
        if done:
            record |= _accuracies(done)
        if row.printed is not None:
            record |= {"paper": row.printed.mean, "paper_deviation": row.printed.deviation}
            if done:
                record["difference"] = record["max"] - row.printed.mean
                # The deviation of a single seed is not known.
                width = WIDE * hypot(row.printed.deviation or 0.0, record["max_deviation"]) if len(done) > 1 else 0.0
                record["outside"] = bool(width) and abs(record["difference"]) > width
        records.append(record)
    columns = {
        "row": "method", "max ± max_deviation": "P-acc max", "paper ± paper_deviation": "paper",
        "difference": "diff", "last10 ± last10_deviation": "last 10", "global": "G-acc", "mib": "MiB",
    }  # fmt: skip
    note = (
        "Accuracy in %, ± over seeds; maximum over evaluations, as the paper reports it, and mean of the last ones, "
        "at most 10; G-acc of the same; MiB per round of all clients, framing included."
    )
    if any(record.get("outside") for record in records):
        note += f" *: more than {WIDE:g} standard deviations away."
    return Sheet(f"{name}-{dataset}", f"{dataset}: {title}", records, columns, note)


def _accuracies(done: Sequence[pfedlms.Run]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for which in ("max", "last10"):
        values = [run.summary["accuracy"][which] for run in done]
        found[which] = mean(values)
        found |= {f"{which}_deviation": stdev(values)} if len(values) > 1 else {}
    shared = [run.summary["global_accuracy"]["last10"] for run in done if "global_accuracy" in run.summary]
    found |= {"global": mean(shared)} if shared else {}
    return {**found, "mib": mean(sum(run.summary["bytes_per_round"].values()) for run in done) / MIB}


def communication(dataset: str, methods: Sequence[str] = ()) -> Sheet:
    """MiB per round of all clients, from messages that are encoded and decoded; payload alone, as the paper counts.
    Nothing is trained."""
    records: list[dict[str, Any]] = []
    for row in pfedlms.bits_table(on(dataset)):
        if methods and row["method"] not in methods:
            continue
        label = f"{row['method']}, {row['downlink']} ↓" if "downlink" in row else row["method"]
        record: dict[str, Any] = {"row": label, "dataset": dataset, "mib": row["mib_per_round"]}
        own = printed("communication", row["method"], dataset) if "/" not in dataset else None  # of another model
        if own is not None:
            record |= {"paper": own.mean, "difference": round(row["mib_per_round"], 2) - own.mean}
        records.append(record)
    note = "Up and down, payload (symbols and statistics) without framing, as the paper counts; 1 MiB is 2^20 bytes."
    columns = {"row": "method", "mib": "MiB", "paper": "paper", "difference": "diff"}
    return Sheet(f"communication-{dataset}", f"{dataset}: MiB per round", records, columns, note)


def bytes_to_most_of_the_gain(dataset: str, runs: Runs) -> Sheet | None:
    """MiB until P-acc first reaches that of `local` plus 90 % of what FedAvg adds to it. Each seed is compared with its
    own two, because partitions differ by points. None where no seed has both."""
    alone, together = (_last10(runs, name) for name in ("local", "fedavg"))
    wanted = {seed: own + SHARE * (together[seed] - own) for seed, own in alone.items() if seed in together}
    if not wanted:
        return None
    records = []
    for row, own in runs.items():
        if row.startswith(_SHORTER):  # the first rounds of `fedavg`
            continue
        compared = [run for run in finished(own) if run.summary["seed"] in wanted]
        if not compared:
            continue
        reached = [first_reaching(run, wanted[run.summary["seed"]]) for run in compared]
        found = [each for each in reached if each is not None]
        record: dict[str, Any] = {"row": row, "reached": f"{len(found)} of {len(reached)}"}
        if found and len(found) == len(reached):
            record |= {"rounds": mean(own[0] for own in found), "mib": mean(own[1] for own in found) / MIB}
        records.append(record)
    columns = {"row": "method", "reached": "seeds", "rounds": "rounds", "mib": "MiB"}
    means = [mean(values[seed] for seed in wanted) for values in (wanted, alone, together)]
    note = (
        f"P-acc of {means[0]:.2f} % on average: local has {means[1]:.2f}, FedAvg {means[2]:.2f} (last 10), each seed "
        "by its own. The first evaluation at or above it; MiB of all clients up to there, framing included."
    )
    title = f"{dataset}: {100 * SHARE:.0f} % of FedAvg's gain over local"
    return Sheet(f"gain-{dataset}", title, records, columns, note)


def first_reaching(run: pfedlms.Run, wanted: float) -> tuple[int, int] | None:
    """Round and bytes of the first evaluation with at least that P-acc."""
    reached = (record for record in run.metrics if record["p_acc"] is not None and record["p_acc"] >= wanted)
    return next(((int(each["round"]), int(sum(each["bytes"].values()))) for each in reached), None)


def frugal_fedavg(runs: Runs) -> dict[str, int]:
    """Rounds of FedAvg that cost as many bytes as another method's run, by the name of the row. At least one round: a
    row whose single round costs more has `>` in its name."""
    found: dict[str, int] = {}
    plain = finished(runs.get("fedavg", []))
    for name in FRUGAL:
        own = finished(runs.get(name, []))
        if not plain or not own:
            continue
        per_round = mean(sum(run.summary["bytes_per_round"].values()) for run in plain)
        paid = int(mean(run.summary["total_bytes"] for run in own) // per_round)
        bytes_of = f"bytes of {name}" if paid else f"> bytes of {name}"
        found[f"{_SHORTER}{count_text(max(1, paid), 'round')} ({bytes_of})"] = max(1, paid)
    return found


def _last10(runs: Runs, name: str) -> dict[int, float]:
    """By seed."""
    return {run.summary["seed"]: float(run.summary["accuracy"]["last10"]) for run in finished(runs.get(name, []))}
