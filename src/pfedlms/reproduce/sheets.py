"""What is printed and written of an experiment: measured beside printed, with the difference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import hypot
from statistics import mean, stdev
from typing import Any

from rich.table import Table

from pfedlms.report.results import last_evaluations
from pfedlms.report.tables import Column, to_csv
from pfedlms.report.tables import Table as Shown
from pfedlms.reproduce.plans import Row
from pfedlms.reproduce.play import Measured

MIB = 1 << 20
WIDE = 2.0  # standard deviations


@dataclass(frozen=True)
class Sheet:
    """A table: records of numbers for machines, and how they are shown."""

    name: str
    title: str
    records: list[dict[str, Any]]
    columns: dict[str, str]
    """Headings, by the records' keys; `x ± y` shows two of them."""
    note: str = ""
    digits: str = ".2f"
    """How numbers are shown that have no form of their own."""

    def shown(self) -> list[list[str]]:
        return [[_shown(record, key, self.digits) for key in self.columns] for record in self.records]

    def screen(self) -> Table:
        return self.table.rich()

    @property
    def table(self) -> Shown:
        columns = [Column(key, heading) for key, heading in self.columns.items()]
        records = [dict(zip(self.columns, row, strict=True)) for row in self.shown()]
        return Shown(columns, records, self.title, self.note)

    def markdown(self) -> str:
        return self.table.markdown()

    def csv(self) -> str:
        return to_csv(self.records)


def _shown(record: Mapping[str, Any], key: str, digits: str) -> str:
    main, _, spread = key.partition(" ± ")
    value = record.get(main)
    if value is None:
        return "–"
    if isinstance(value, str):
        return value
    if main == "difference":
        text = f"{value:+z.2f}".replace("-", "−") + " *" * bool(record.get("outside"))
    elif main == "rounds":  # a mean over seeds
        text = f"{value:.0f}"
    elif main == "deviation":
        text = f"{value:.3f}"
    elif main == "mib":
        text = "0" if value == 0 else f"{value:.3g}" if value < 1 else f"{value:.2f}"
    else:
        text = f"{value:{digits}}" if isinstance(value, float) else str(value)
    return text + (f" ± {record[spread]:.2f}" if spread and record.get(spread) else "")


def against_paper(
    name: str, title: str, dataset: str, rows: Sequence[Row], cells: Mapping[str, Sequence[Measured]]
) -> Sheet:
    """A line a row: the maximum over evaluations as the paper has it, the mean of the last ten, the paper's."""
    records = []
    for row in rows:
        done = [each for each in cells.get(row.label, ()) if each.finished]
        ended = [each for each in cells.get(row.label, ()) if not each.finished]
        record: dict[str, Any] = {"row": row.label, "dataset": dataset, "seeds": len(done)}
        if ended:
            record["row"] += f" ({len(ended)} {ended[0].summary['status']})"
        if done:
            record |= _accuracies(done)
        if row.printed is not None:
            record |= {"paper": row.printed.mean, "paper_deviation": row.printed.deviation}
            if done:
                record["difference"] = record["max"] - row.printed.mean
                # Of a single seed nobody knows how far it may lie from others.
                width = WIDE * hypot(row.printed.deviation, record["max_deviation"]) if len(done) > 1 else 0.0
                record["outside"] = bool(width) and abs(record["difference"]) > width
        records.append(record)
    tail, over = _last_evaluations(cells)
    columns = {
        "row": "method", "max ± max_deviation": "P-acc max", "paper ± paper_deviation": "paper",
        "difference": "diff", "last10 ± last10_deviation": tail, "global": "G-acc", "mib": "MiB",
    }  # fmt: skip
    note = (
        f"Accuracy in %, ± over seeds; max over evaluations, as the paper has it, and mean of {over}; G-acc of the "
        "same; MiB a round of all clients, framing included."
    )
    if any(record.get("outside") for record in records):
        note += f" *: more than {WIDE:g} standard deviations away."
    known = {key for record in records for key in record}
    columns = {key: heading for key, heading in columns.items() if key.partition(" ")[0] in known}
    return Sheet(f"{name}-{dataset}", f"{dataset}: {title}", records, columns, note)


def _last_evaluations(cells: Mapping[str, Sequence[Measured]]) -> tuple[str, str]:
    """What the mean of the last 10 is called, and over how many it is, as in `compare`: of the rows with the most
    evaluations, where some stop early on purpose."""
    counts = [len(each.curve.get("p_acc", ())) or 20 for own in cells.values() for each in own if each.finished]
    most = max(counts, default=20)
    tail, over = last_evaluations([{"evaluations": most, "accuracy": {"max": 0.0}}])
    return tail, over + ", or of all where a row has fewer" * (min(counts, default=20) < min(10, most))


def _accuracies(done: Sequence[Measured]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for which in ("max", "last10"):
        values = [each.summary["accuracy"][which] for each in done]
        found[which] = mean(values)
        if len(values) > 1:
            found[f"{which}_deviation"] = stdev(values)
    shared = [each.summary["global_accuracy"]["last10"] for each in done if "global_accuracy" in each.summary]
    if shared:
        found["global"] = mean(shared)
    found["mib"] = mean(sum(each.summary["bytes_per_round"].values()) for each in done) / MIB
    return found
