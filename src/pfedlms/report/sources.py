"""Files of data sets on the screen: how a download goes, and what was found in a folder."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.progress import Progress as Bar

from pfedlms.data.download import Watch
from pfedlms.data.published import Published
from pfedlms.report.runs import MIB
from pfedlms.report.tables import Table, table_of

_SHARES = 4
"""Plain lines of a long file."""


@contextmanager
def watching(console: Console) -> Iterator[Watch]:
    """A live bar on a terminal, plain lines elsewhere."""
    if not console.is_terminal:
        yield _Lines(console)
        return
    columns = (
        TextColumn("{task.description}"), BarColumn(bar_width=20), DownloadColumn(binary_units=True),
        TransferSpeedColumn(), TimeRemainingColumn(),
    )  # fmt: skip
    with Bar(*columns, console=console) as bar:
        yield _Bars(bar)


class _Bars(Watch):
    def __init__(self, bar: Bar) -> None:
        self._bar = bar

    def starts(self, file: Published, have: int) -> None:
        self._task = self._bar.add_task(file.name, total=file.size, completed=have)

    def gets(self, have: int) -> None:
        self._bar.update(self._task, completed=have)

    def ends(self, path: Path, new: bool) -> None:
        if not new:
            self._bar.console.print(_there(path), highlight=False, markup=False, soft_wrap=True)


class _Lines(Watch):
    def __init__(self, console: Console) -> None:
        self._console = console

    def starts(self, file: Published, have: int) -> None:
        self._file, self._said = file, have * _SHARES // file.size
        begun = f", {have / MIB:,.1f} MiB of it are there" * (have > 0)
        self._say(f"{file.name}: {file.size / MIB:,.1f} MiB{begun}")

    def gets(self, have: int) -> None:
        share = min(have, self._file.size) * _SHARES // self._file.size
        if self._said < share < _SHARES:
            self._say(f"{self._file.name}: {100 * share // _SHARES} %")
        self._said = share

    def ends(self, path: Path, new: bool) -> None:
        self._say(f"{path}: fetched, with the published checksum" if new else _there(path))

    def _say(self, line: str) -> None:
        self._console.print(line, highlight=False, markup=False, soft_wrap=True)


def _there(path: Path) -> str:
    return f"{path}: is there, with the published checksum"


def check_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """What `data.check` found; without folders, whose names are long."""
    published = {True: "yes", False: "no", None: None}
    return table_of([
        {
            "data set": row["dataset"], "state": row["state"], "samples": _samples(row),
            "as published": published[row["published"]], "format": row["format"],
        }
        for row in rows
    ])  # fmt: skip


def _samples(row: Mapping[str, Any]) -> str:
    if not row["samples"]:
        return "–"
    more = "" if row["samples"] == row["expected"] else f" of {row['expected']:,}"
    return f"{row['samples']:,}{more}"
