"""Tables of results for people; the numbers come from run summaries."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import mean, stdev
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

MIB = 1 << 20
Summary = Mapping[str, Any]
Spread = tuple[float, float, int]
"""Mean, standard deviation, and over how many runs."""


@dataclass(frozen=True)
class Row:
    """One method of a comparison, over its seeds."""

    method: str
    note: str
    """What a reader must know: how many seeds finished, if not all."""
    best: Spread | None
    last: Spread | None
    shared: Spread | None
    up: float
    """MiB a round, all clients together, framing included."""
    down: float
    times_less: float | None
    """How many times fewer bytes than FedAvg; None without FedAvg or without communication."""
    seconds: float


def rows_of(summaries: Sequence[Summary]) -> list[Row]:
    """Collect summaries by method, in the order methods first appear.

    Runs that diverged or were interrupted do not enter the means of those that finished; a method of which none
    finished shows what it had reached.
    """
    groups: dict[str, list[Summary]] = {}
    for summary in summaries:
        groups.setdefault(summary["method"], []).append(summary)
    rows = []
    for name, group in groups.items():
        finished = [run for run in group if run["status"] == "finished"]
        rows.append(_row(name, finished or group, len(group), bool(finished)))
    fedavg = next((row.up + row.down for row in rows if row.method == "fedavg"), None)
    return [
        replace(row, times_less=fedavg / (row.up + row.down) if fedavg and row.up + row.down else None) for row in rows
    ]


def _row(method: str, group: Sequence[Summary], planned: int, finished: bool) -> Row:
    evaluated = [run for run in group if run["accuracy"]["max"] is not None]
    shared = [run["global_accuracy"]["max"] for run in evaluated if "global_accuracy" in run]
    note = group[0]["status"] if not finished else f"{len(group)} of {planned} seeds" if len(group) < planned else ""
    return Row(
        method,
        note,
        _spread([run["accuracy"]["max"] for run in evaluated]),
        _spread([run["accuracy"]["last10"] for run in evaluated]),
        _spread(shared),
        _mib(group, "up"),
        _mib(group, "down"),
        None,
        mean(run["seconds"] for run in group),
    )


def comparison_table(summaries: Sequence[Summary]) -> Table:
    """The table of `pfedlms compare`."""
    first = summaries[0]
    size = f"{first['model']}, {first['parameters']:,} parameters"
    title = f"{first['dataset']} · {size} · {first['clients']} clients · {first['rounds']} rounds"
    table = Table(
        title=title,
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
        title_style="bold",
        caption_justify="left",
        caption=_CAPTION,
    )
    table.add_column("method")
    for name in ("P-acc max", "last 10", "G-acc max", "MiB ↑", "MiB ↓", "fewer", "s"):
        table.add_column(name, justify="right")
    for row in rows_of(summaries):
        table.add_row(
            f"{row.method} ({row.note})" if row.note else row.method,
            _pair(row.best),
            _pair(row.last),
            _pair(row.shared),
            _size(row.up),
            _size(row.down),
            _fewer(row),
            f"{row.seconds:.1f}",
        )
    return table


_CAPTION = (
    "Accuracy in %, ± over seeds: maximum, and mean of the last 10 evaluations. P-acc: each client's own model on its "
    "own test split after local steps; G-acc: the shared model before them. MiB a round of all clients, framing "
    "included; fewer: how many times fewer bytes than FedAvg; s: seconds a run."
)


def bits_table_of(rows: Sequence[Mapping[str, Any]]) -> Table:
    """The table of `pfedlms bits`."""
    first = rows[0]
    title = f"{first['model']}, {first['parameters']:,} parameters, {first['clients']} clients"
    table = Table(
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
        title=title,
        title_style="bold",
        caption=_BITS_CAPTION,
        caption_justify="left",
    )
    table.add_column("method")
    for name in ("bits ↑", "frame ↑", "bits ↓", "frame ↓", "per parameter ↑", "↓", "MiB"):
        table.add_column(name, justify="right")
    for row in rows:
        up, down, mib = row["up_payload_bits"], row["down_payload_bits"], row["mib_per_round"]
        table.add_row(
            f"{row['method']} ({row['downlink']} ↓)" if "downlink" in row else row["method"],
            *(f"{bits:,}" for bits in (up, row["up_framing_bits"], down, row["down_framing_bits"])),
            *(f"{bits / row['parameters']:.3g}" for bits in (up, down)),
            f"{mib:,.2f}" if mib >= 1 else f"{mib:.3g}",
        )
    return table


_BITS_CAPTION = (
    "Bits of one client in one round: payload, and framing apart. MiB/round: payload of all clients, up and down."
)


def profile_table(seconds: Mapping[str, float], rounds: int) -> Table:
    """The table of `--profile`: time by stage, largest first."""
    table = Table(
        box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, title="where the time went", title_style="bold"
    )
    for name in ("stage", "ms a round", "share"):
        table.add_column(name, justify="left" if name == "stage" else "right")
    for stage, spent in sorted(seconds.items(), key=lambda item: -item[1]):
        table.add_row(stage, f"{1e3 * spent / rounds:.2f}", f"{100 * spent / sum(seconds.values()):.0f} %")
    return table


def plain_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Rows as they are, a column a key."""
    table = Table(box=SIMPLE_HEAD)
    for name in rows[0]:
        table.add_column(name)
    for row in rows:
        table.add_row(*(str(value) for value in row.values()))
    return table


def comparison_text(summaries: Sequence[Summary]) -> str:
    """The comparison as plain text."""
    console = Console(file=io.StringIO(), width=120, no_color=True)
    console.print(comparison_table(summaries))
    file = console.file
    assert isinstance(file, io.StringIO)
    return file.getvalue()


def _mib(group: Sequence[Summary], way: str) -> float:
    sent = [run["bytes_per_round"][f"{way}_payload"] + run["bytes_per_round"][f"{way}_framing"] for run in group]
    return float(mean(sent)) / MIB


def _spread(values: Sequence[float]) -> Spread | None:
    if not values:
        return None
    return mean(values), stdev(values) if len(values) > 1 else 0.0, len(values)


def _pair(value: Spread | None) -> str:
    if value is None:
        return "–"
    return f"{value[0]:.2f} ± {value[1]:.2f}" if value[2] > 1 else f"{value[0]:.2f}"


def _size(mib: float) -> str:
    return "0" if mib == 0 else f"{mib:.4f}" if mib < 0.1 else f"{mib:.2f}"


def _fewer(row: Row) -> str:
    return "–" if row.times_less is None else f"{row.times_less:.1f}×"
