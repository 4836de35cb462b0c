"""Progress of runs: a live line on a terminal, plain lines otherwise."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from pfedlms.report.runs import MEASURES, MIB, score_text
from pfedlms.report.tables import mib_text


def _traffic_text(record: Mapping[str, Any]) -> str:
    return f"{mib_text(sum(record['bytes'].values()) / MIB)} MiB"


def evaluation_text(record: Mapping[str, Any]) -> str:
    """The measures of an evaluation in one line."""
    values = {name: record[key] for key, (name, _) in MEASURES.items() if record.get(key) is not None}
    return "  ".join(f"{name} {score_text(value, record):>7}" for name, value in values.items())


@contextmanager
def progress_callbacks(show: bool | None = None) -> Iterator[list[Any]]:
    """Callbacks that show progress on standard error: a live line on a terminal and in a notebook; elsewhere plain
    lines, and only if `show` is True."""
    console = Console(stderr=True)
    live = console.is_jupyter or (console.file.isatty() and console.is_terminal)
    if show is False or (show is None and not live):
        yield []
    elif live:
        with LiveProgress(console) as progress:
            yield [progress]
    else:
        yield [PlainProgress(console)]


COMPILING = "compiling kernels, once on this machine; not counted as training time"


class LiveProgress(Bar):
    """A callback: one bar per run, with accuracy, bytes sent and time left."""

    def __init__(self, console: Console) -> None:
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TextColumn("{task.fields[accuracy]}", markup=False),
            TextColumn("{task.fields[sent]}", style="cyan"),
            TimeRemainingColumn(elapsed_when_finished=True),
        )
        super().__init__(*columns, console=console)
        self._bars: dict[str, TaskID] = {}

    def on_start(self, run: Any) -> None:
        rounds = run.config.train.rounds
        self._bars[run.name] = self.add_task(run.name, total=rounds, completed=run.round, accuracy="", sent="")

    def on_compile(self, run: Any) -> None:
        self.console.print(COMPILING, highlight=False)

    def on_evaluation(self, run: Any, record: Mapping[str, Any]) -> None:
        accuracy, sent = evaluation_text(record), _traffic_text(record)
        self.update(self._bars[run.name], completed=record["round"], accuracy=accuracy, sent=sent)

    def on_end(self, run: Any, summary: Mapping[str, Any]) -> None:
        """Stop the clock, and show a run that a worker process has trained, of which there were no other calls."""
        if run.metrics:
            self.on_evaluation(run, run.metrics[-1])
        self.stop_task(self._bars[run.name])


class PlainProgress:
    """A callback: about ten lines per run, for logs and pipes."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._next: dict[str, int] = {}
        """By run, the first round whose evaluation is shown."""

    def on_compile(self, run: Any) -> None:
        self._say(COMPILING)

    def on_start(self, run: Any) -> None:
        self._next[run.name] = run.round
        already = f", from round {run.round} on" if run.round else ""
        self._say(f"{run.name}: {run.config.train.rounds} rounds on {run.config.data.dataset}{already}")

    def on_evaluation(self, run: Any, record: Mapping[str, Any]) -> None:
        rounds = run.config.train.rounds
        if record["round"] < self._next[run.name] and record["round"] < rounds:
            return
        self._next[run.name] = record["round"] + max(1, rounds // 10)
        self._say(
            f"{run.name}: round {record['round']}/{rounds}  {evaluation_text(record)}  loss "
            f"{record['loss']:.4f}  {_traffic_text(record)}  {record['seconds']:.1f} s"
        )

    def on_end(self, run: Any, summary: Mapping[str, Any]) -> None:
        """Show the last evaluation, unless it was shown: a worker process makes no other calls."""
        if run.metrics and run.metrics[-1]["round"] >= self._next[run.name]:
            self.on_evaluation(run, run.metrics[-1])

    def _say(self, text: str) -> None:
        self._console.print(text, highlight=False, soft_wrap=True, markup=False)
