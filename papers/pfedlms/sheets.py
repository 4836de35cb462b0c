"""The tables of an experiment: measured beside printed, communication, and what bytes buy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import hypot
from statistics import mean
from typing import Any

import pfedlms
from papers.pfedlms.experiments import Row, on, printed
from pfedlms.report.runs import MIB, Spread
from pfedlms.report.tables import Column, Table, accuracy_text, count_text, mib_text

Runs = dict[str, list[pfedlms.Run]]
"""By the name of a cell or row, one run per seed."""
Sheets = dict[str, Table]
"""Tables by the name of their files. One without columns is written and not shown."""
WIDE = 2.0  # standard deviations
SHARE = 0.9
FRUGAL = ("sketchvote", "pfedlms")
_SHORTER = "fedavg, "
"""How the names of rows with fewer rounds of FedAvg begin."""


def columns_of(heads: Mapping[str, str], digits: str) -> list[Column]:
    """A column for each key, with its heading; `digits` is the format of numbers with a fraction."""

    def text(value: Any) -> str:
        return f"{value:{digits}}" if isinstance(value, float) else str(value)

    return [Column(key, head, text) for key, head in heads.items()]


def flat(record: Mapping[str, Any]) -> dict[str, Any]:
    """A record for CSV and JSON, with means and deviations apart."""
    found: dict[str, Any] = {}
    for key, value in record.items():
        found |= {key: value.mean, f"{key}_deviation": value.deviation} if isinstance(value, Spread) else {key: value}
    return found


def difference_text(value: float) -> str:
    return f"{value:+z.2f}".replace("-", "−")


def finished(runs: Sequence[pfedlms.Run]) -> list[pfedlms.Run]:
    return [run for run in runs if run.summary["status"] == "finished"]


def against_paper(title: str, dataset: str, rows: Sequence[Row], runs: Runs) -> Table:
    """One record per row: the maximum over evaluations, as the paper reports it, the mean of the last ten, and the
    paper's number. `runs` are by label of the row."""
    records = []
    for row in rows:
        own = runs.get(row.label, [])
        done, broken = finished(own), [run.summary["status"] for run in own if run.summary["status"] != "finished"]
        name = f"{row.label} ({len(broken)} {broken[0]})" if broken else row.label
        record: dict[str, Any] = {"row": name, "dataset": dataset, "seeds": len(done)}
        if done:
            record |= {key: Spread.of(run.summary["accuracy"][key] for run in done) for key in ("max", "last10")}
            shared = [run.summary["global_accuracy"]["last10"] for run in done if "global_accuracy" in run.summary]
            record["global"] = mean(shared) if shared else None
            record["mib"] = mean(sum(run.summary["bytes_per_round"].values()) for run in done) / MIB
        record["paper"] = row.printed
        if done and row.printed is not None:
            record["difference"] = record["max"].mean - row.printed.mean
            deviation = record["max"].deviation  # None: that of a single seed is not known
            if deviation is not None:
                record["outside"] = abs(record["difference"]) > WIDE * hypot(row.printed.deviation or 0, deviation)
        records.append(record)
    columns = [
        Column("row", "method"), Column("max", "P-acc max", accuracy_text), Column("paper", "paper", accuracy_text),
        Column("difference", "diff", difference_text), Column("outside", "*", lambda outside: "*" * outside),
        Column("last10", "last 10", accuracy_text), Column("global", "G-acc", "{:.2f}".format),
        Column("mib", "MiB", mib_text),
    ]  # fmt: skip
    note = (
        "Accuracy in %, ± over seeds; maximum over evaluations, as the paper reports it, and mean of the last ones, "
        "at most 10; G-acc of the same; MiB per round of all clients, framing included."
    )
    if any(record.get("outside") for record in records):
        note += f" *: more than {WIDE:g} standard deviations away."
    return Table(columns, records, f"{dataset}: {title}", note)


def communication(dataset: str, methods: Sequence[str] = ()) -> Table:
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
    columns = [Column("row", "method"), Column("mib", "MiB", mib_text), Column("paper", "paper")]
    columns += [Column("difference", "diff", difference_text)]
    return Table(columns, records, f"{dataset}: MiB per round", note)


def bytes_to_most_of_the_gain(dataset: str, runs: Runs) -> Table | None:
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
    columns = [Column("row", "method"), Column("reached", "seeds"), Column("rounds", "rounds", "{:.0f}".format)]
    columns += [Column("mib", "MiB", mib_text)]
    means = [mean(values[seed] for seed in wanted) for values in (wanted, alone, together)]
    note = (
        f"P-acc of {means[0]:.2f} % on average: local has {means[1]:.2f}, FedAvg {means[2]:.2f} (last 10), each seed "
        "by its own. The first evaluation at or above it; MiB of all clients up to there, framing included."
    )
    return Table(columns, records, f"{dataset}: {100 * SHARE:.0f} % of FedAvg's gain over local", note)


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
