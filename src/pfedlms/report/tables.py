"""Tables of results for people; the numbers come from run summaries."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, stdev
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

MIB = 1 << 20
Summary = Mapping[str, Any]


@dataclass(frozen=True)
class Row:
    """One method of a comparison, over its seeds."""

    method: str
    seeds: int
    best: tuple[float, float]
    last: tuple[float, float]
    shared: tuple[float, float] | None
    up: float
    """MiB a round, all clients together, framing included."""
    down: float
    times_less: float | None
    """How many times fewer bytes than FedAvg; None without FedAvg or without communication."""
    seconds: float


def rows_of(summaries: Sequence[Summary]) -> list[Row]:
    """Collect summaries by method, in the order methods first appear; runs that were never evaluated are left out."""
    groups: dict[str, list[Summary]] = {}
    for summary in summaries:
        if summary["accuracy"]["max"] is not None:
            groups.setdefault(summary["method"], []).append(summary)
    traffic = {name: (_mib(group, "up"), _mib(group, "down")) for name, group in groups.items()}
    fedavg = sum(traffic["fedavg"]) if "fedavg" in traffic else None
    rows = []
    for name, group in groups.items():
        shared = [run["global_accuracy"]["max"] for run in group if "global_accuracy" in run]
        used = sum(traffic[name])
        rows.append(
            Row(
                name,
                len(group),
                _spread([run["accuracy"]["max"] for run in group]),
                _spread([run["accuracy"]["last10"] for run in group]),
                _spread(shared) if shared else None,
                *traffic[name],
                fedavg / used if fedavg and used else None,
                mean(run["seconds"] for run in group),
            )
        )
    return rows


def comparison_table(summaries: Sequence[Summary]) -> Table:
    """The table of `pfedlms compare`."""
    first = summaries[0]
    size = f"{first['model']}, {first['parameters']:,} parameters"
    title = f"{first['dataset']} · {size} · {first['clients']} clients · {first['rounds']} rounds"
    table = Table(title=title, box=SIMPLE_HEAD, title_style="bold", caption_justify="left", caption=_CAPTION)
    table.add_column("method")
    for name in (
        "P-acc max %",
        "P-acc last 10 %",
        "G-acc max %",
        "MiB/round ↑",
        "MiB/round ↓",
        "bytes vs FedAvg",
        "seconds",
    ):
        table.add_column(name, justify="right")
    for row in rows_of(summaries):
        table.add_row(
            row.method,
            _pair(row.best),
            _pair(row.last),
            _pair(row.shared) if row.shared else "–",
            _size(row.up),
            _size(row.down),
            _fewer(row),
            f"{row.seconds:.1f}",
        )
    return table


_CAPTION = (
    "P-acc: each client's own model on its own test split, after local steps. G-acc: the shared model before them. "
    "± over seeds. MiB: all clients, framing included."
)


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


def _spread(values: Sequence[float]) -> tuple[float, float]:
    return mean(values), stdev(values) if len(values) > 1 else 0.0


def _pair(value: tuple[float, float]) -> str:
    return f"{value[0]:.2f} ± {value[1]:.2f}"


def _size(mib: float) -> str:
    return "0" if mib == 0 else f"{mib:.4f}" if mib < 0.1 else f"{mib:.2f}"


def _fewer(row: Row) -> str:
    if row.times_less is None:
        return "none sent" if row.up + row.down == 0 else "–"
    return "1" if row.method == "fedavg" else f"{row.times_less:.1f}× fewer"
