"""Options and output that commands share. Options that stand for a setting are derived from the schema. Tables and
documents go to standard output, messages to standard error."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from rich.console import Console

from pfedlms.errors import printable
from pfedlms.experiment.schema import OPTIONS, short_help
from pfedlms.report.tables import Table

SHARED: dict[str, dict[str, Any]] = {
    "config": {"nargs": "?", "metavar": "CONFIG", "help": "a TOML file; options below come on top of it"},
    "directory": {"metavar": "DIR", "type": Path},
    "--import": {
        "dest": "imports", "action": "append", "default": [], "metavar": "MODULE",
        "help": "import this module first, which registers methods and models of your own; may be repeated",
    },
    "--out": {"metavar": "DIR", "help": "where results go (default: a fresh folder under runs/)"},
    "--set": {
        "action": "append", "default": [], "metavar": "SECTION.KEY=VALUE",
        "help": "any setting (pfedlms settings); may be repeated",
    },
    "--data-dir": {"metavar": "DIR", "help": "where the data set's files are now, if they were moved"},
    "--plot": {"metavar": "FILE", "help": "draw the result; PNG, SVG or PDF (extra: report)"},
    "--workers": {
        "type": int, "metavar": "N", "default": 1,
        "help": "of a study: how many runs at the same time, each in a process (default: 1)",
    },
    "--json": {"action": "store_true", "help": "print JSON and nothing else on standard output"},
    "--quiet": {"action": "store_true", "help": "no progress; the folder of the results is still named"},
}  # fmt: skip
"""Options of several commands, with the arguments of argparse."""


def add_options(sub: argparse.ArgumentParser, *names: str) -> None:
    """Add options by name, shared ones and those that stand for a setting. `settings` adds all the latter except the
    method, and --out and --set."""
    for name in names:
        if name == "settings":
            add_options(sub, *(option for option in OPTIONS if option != "method"), "--out", "--set")
        elif name in SHARED:
            sub.add_argument(name, **SHARED[name])
        else:
            place, metavar = OPTIONS[name]
            kind: dict[str, Any] = {"metavar": metavar} if metavar else {"action": "store_const", "const": "true"}
            sub.add_argument(f"--{name}", dest=place, help=short_help(place).replace("%", "%%"), **kind)


def add_study(sub: argparse.ArgumentParser, seeds: int) -> None:
    """Add the options that comparisons and sweeps have in common."""
    help = f"how many seeds, from --seed on (default: {seeds})"
    sub.add_argument("--seeds", type=int, metavar="N", default=seeds, help=help)
    add_options(sub, "--workers", "settings", "--plot", "--json", "--quiet")


def overrides(options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """The settings of `--set`, and over them those of options that stand for a setting."""
    from pfedlms.experiment.config import from_texts
    from pfedlms.methods import METHODS

    given = {place: value for place, _ in OPTIONS.values() if (value := vars(options).get(place)) is not None}
    methods = [*METHODS, *([given["method.name"]] if "method.name" in given else [])]  # which may be installed
    return from_texts(methods, [*options.set, *(f"{place}={value}" for place, value in given.items())])


def out_directory(options: argparse.Namespace, configured: str, label: str) -> Path:
    """The directory that the user names, or a new one named by time. The config.toml of a run names that run's
    directory, which is not meant when the file is used for another run."""
    is_of_that_run = options.config and Path(configured).resolve() == Path(options.config).resolve().parent
    if named := options.out or ("" if is_of_that_run else configured):
        return Path(named)
    stem = Path("runs") / f"{time.strftime('%Y%m%d-%H%M%S')}-{label}"
    numbered = (stem.with_name(f"{stem.name}-{number}") for number in range(1, 1000))
    return next(path for path in chain([stem], numbered) if not path.exists())


# --- output


def output(options: argparse.Namespace, document: Any, table: Callable[[Any], Table], rows: Sequence[Any]) -> None:
    """Print the document with --json, else a table of the rows, if there are any."""
    if options.json:
        print(json.dumps(document, indent=2))
    elif rows:
        print_table(table(rows))


def print_table(table: Table, where: Console | None = None) -> None:
    """Print the columns that a terminal has room for; in a pipe all of them."""
    screen = where or Console()
    if screen.is_terminal:
        screen.print(table.rich(max(screen.width, 60)), highlight=False)
        return
    shown = table.rich(None)
    width = max(140, Console(width=1000).measure(shown).maximum)
    Console(width=width, stderr=screen.stderr).print(shown, highlight=False)


def say(text: str, style: str | None = None) -> None:
    """Print a message on standard error. What it quotes of a file must not move the cursor or fill the screen."""
    text = "\n".join(printable(line, longest=2000) for line in text.split("\n"))
    Console(stderr=True).print(text, highlight=False, markup=False, soft_wrap=True, style=style)
