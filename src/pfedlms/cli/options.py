"""What commands share: options, of which those that stand for a setting are derived from the schema; and output, tables
and documents on standard output, messages on standard error."""

from __future__ import annotations

import argparse
import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from pfedlms.errors import UsageError, did_you_mean
from pfedlms.experiment.schema import OPTIONS, short_help
from pfedlms.report.runs import score_text
from pfedlms.report.tables import Table


def positive_int(text: str) -> int:
    if text.isascii() and text.isdecimal() and int(text) > 0:
        return int(text)
    raise argparse.ArgumentTypeError(
        f"got {text}, expected a count of at least 1; compare and sweep have the first seed as --seed"
    )


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
    "--moved": {"metavar": "DIR", "help": "where the data set's files are now, if they were moved"},
    "--plot": {"metavar": "FILE", "help": "draw the result; PNG, SVG or PDF (extra: report)"},
    "--workers": {
        "type": positive_int, "metavar": "N", "default": 1,
        "help": "of a study: how many runs at the same time, each in a process (default: 1)",
    },
    "--json": {"action": "store_true", "help": "print JSON and nothing else on standard output"},
    "--quiet": {"action": "store_true", "help": "no progress; the folder of the results is still named"},
}  # fmt: skip
"""Arguments of argparse by option."""


def add_options(sub: argparse.ArgumentParser, *names: str, **helps: str) -> None:
    """Options by name: shared ones, or the name of one that stands for a setting, whose help `helps` may replace;
    `settings` are all of these but the method, with where results go."""
    for name in names:
        if name == "settings":
            add_options(sub, *(each for each in OPTIONS if each != "method"), "--out", "--set")
        elif name in SHARED:
            sub.add_argument("--data-dir" if name == "--moved" else name, **SHARED[name])
        else:
            place, metavar = OPTIONS[name]
            help = helps.get(name) or short_help(place).replace("%", "%%")
            how: dict[str, Any] = {"metavar": metavar} if metavar else {"action": "store_const", "const": "true"}
            sub.add_argument(f"--{name}", dest=place, help=help, **how)


def add_study(sub: argparse.ArgumentParser, seeds: int) -> None:
    """What comparisons and sweeps have in common."""
    help = f"how many seeds, from --seed on (default: {seeds})"
    sub.add_argument("--seeds", type=positive_int, metavar="N", default=seeds, help=help)
    add_options(sub, "--workers", "settings", "--plot", "--json", "--quiet")


def dispatch(options: argparse.Namespace, **handlers: Callable[[argparse.Namespace], int | None]) -> int:
    """Do what a command is told to by its first word."""
    if options.what not in handlers:
        raise UsageError(f"{options.command}: got {options.what!r}; {did_you_mean(options.what, handlers)}")
    return handlers[options.what](options) or 0


_ARGUMENTS = "by|callbacks|classes|client|data_dir|methods|out|plot|seeds|workers"


def translate_arguments(text: str) -> str:
    """An error as users of the command line know its words: arguments of Python's functions as options."""
    text = re.sub(rf"(?m)^({_ARGUMENTS})(?=: )", lambda found: f"--{found[1].replace('_', '-')}", text)
    return re.sub(rf"\b({_ARGUMENTS})=(?=[A-Z])", lambda found: f"--{found[1].replace('_', '-')} ", text)


def check_config(given: str | None) -> None:
    """A second value for an option would be taken for the TOML file."""
    if given and not given.endswith(".toml") and not Path(given).exists():
        many = "an option takes one value, and a sweep's are joined by commas: --learning-rate .03,.1"
        meant = f"did you mean --set {given}?" if re.match(r"\w+\.\w+=", given) else many
        raise UsageError(f"CONFIG: got {given!r}, expected a TOML file; {meant}")


def assignments(options: argparse.Namespace) -> list[str]:
    """Texts `section.key=value`: those of `--set`, then those of options that stand for a setting."""
    given = [f"{name}={value}" for name, value in vars(options).items() if "." in name and value is not None]
    return [*options.set, *given]


def overrides(options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    from pfedlms.experiment.config import parse_overrides

    return parse_overrides(assignments(options))


def out_directory(options: argparse.Namespace, configured: str, label: str) -> Path:
    """The directory asked for, or a fresh one named by time. A run's own config.toml names its own directory,
    which is not meant when it is run again."""
    if options.config and not options.out and Path(configured).resolve() == Path(options.config).resolve().parent:
        configured = ""
    if options.out or configured:
        return Path(options.out or configured)
    stem = Path("runs") / f"{time.strftime('%Y%m%d-%H%M%S')}-{label}"
    candidates = (stem if number == 0 else stem.with_name(f"{stem.name}-{number}") for number in range(1000))
    return next(path for path in candidates if not path.exists())


# --- output


def print_output(
    options: argparse.Namespace, document: Any, table: Callable[[Any], Table], rows: Sequence[Any]
) -> None:
    """On standard output the document, or a table of the rows, if there are any."""
    if options.json:
        print(json.dumps(document, indent=2))
    elif rows:
        print_table(table(rows))


def print_table(table: Table, where: Console | None = None) -> None:
    """On a terminal the columns that it has room for; all of them in a pipe."""
    screen = where or Console()
    if screen.is_terminal:
        screen.print(table.rich(max(screen.width, 60)), highlight=False)
        return
    shown = table.rich(None)
    width = max(140, Console(width=1000).measure(shown).maximum)
    Console(width=width, stderr=screen.stderr).print(shown, highlight=False)


def print_message(text: str, style: str | None = None) -> None:
    """Words on standard error, as they are."""
    Console(stderr=True).print(text, highlight=False, markup=False, soft_wrap=True, style=style)


def best_round_text(summary: Mapping[str, Any]) -> str:
    """Which round was best by validation, of a run that has one; and that it stopped for that, if it did."""
    best = summary["best"]
    kept = "stopped_early" in summary and "transport" not in summary  # nodes keep their latest model only
    where = "; its models: pfedlms export --best" if kept else ""
    early = f"stopped early after {summary['rounds']} rounds: " if summary.get("stopped_early") else ""
    return f"{early}V-acc was highest in round {best['round']}, {score_text(best['v_acc'], summary)}{where}"
