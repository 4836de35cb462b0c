"""Output of commands: documents and tables on standard output, messages on standard error."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.console import Console

from pfedlms.report.runs import score_text
from pfedlms.report.tables import Table


def show(options: argparse.Namespace, document: Any, table: Callable[[Any], Table], rows: Sequence[Any]) -> None:
    """On standard output the document, or a table of the rows, if there are any."""
    if options.json:
        print(json.dumps(document, indent=2))
    elif rows:
        show_table(table(rows))


def show_table(table: Table, where: Console | None = None) -> None:
    """On a terminal the columns that it has room for; all of them in a pipe."""
    screen = where or Console()
    if screen.is_terminal:
        screen.print(table.rich(max(screen.width, 60)), highlight=False)
        return
    shown = table.rich(None)
    width = max(140, Console(width=1000).measure(shown).maximum)
    Console(width=width, stderr=screen.stderr).print(shown, highlight=False)


def say(text: str, style: str | None = None) -> None:
    """Words on standard error, as they are."""
    Console(stderr=True).print(text, highlight=False, markup=False, soft_wrap=True, style=style)


def best_round(summary: Mapping[str, Any]) -> str:
    """Which round was best by validation, of a run that has one; and that it stopped for that, if it did."""
    best = summary["best"]
    kept = "stopped_early" in summary and "transport" not in summary  # nodes keep their latest model only
    where = "; its models: pfedlms export --best" if kept else ""
    early = f"stopped early after {summary['rounds']} rounds: " if summary.get("stopped_early") else ""
    return f"{early}V-acc was highest in round {best['round']}, {score_text(best['v_acc'], summary)}{where}"
