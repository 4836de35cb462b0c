"""Options and output that commands share. Options that stand for a setting are derived from the schema. Tables and
documents go to standard output, messages to standard error."""

from __future__ import annotations

import argparse
import json
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from pfedlms.errors import UsageError, did_you_mean, printable
from pfedlms.experiment.schema import OPTIONS, short_help
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
    "--data-dir": {"metavar": "DIR", "help": "where the data set's files are now, if they were moved"},
    "--plot": {"metavar": "FILE", "help": "draw the result; PNG, SVG or PDF (extra: report)"},
    "--workers": {
        "type": positive_int, "metavar": "N", "default": 1,
        "help": "of a study: how many runs at the same time, each in a process (default: 1)",
    },
    "--json": {"action": "store_true", "help": "print JSON and nothing else on standard output"},
    "--quiet": {"action": "store_true", "help": "no progress; the folder of the results is still named"},
}  # fmt: skip
"""Options of several commands, with the arguments of argparse."""


class _StoreMethod(argparse.Action):
    """Stores the name of the method. Of other options the last one counts, but who names two methods wants both."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: Any, values: Any, option: str | None = None) -> None:
        if (first := getattr(namespace, self.dest)) is not None:
            several = f"several are compared: pfedlms compare --methods {first},{values}"
            parser.error(f"{option}: got {first} and {values}, expected one; {several}")
        setattr(namespace, self.dest, values)


def add_options(sub: argparse.ArgumentParser, *names: str, **helps: str) -> None:
    """Add options by name: shared ones, and those that stand for a setting, whose help `helps` may replace. `settings`
    adds all options that stand for a setting except the method, and --out and --set."""
    for name in names:
        if name == "settings":
            add_options(sub, *(option for option in OPTIONS if option != "method"), "--out", "--set")
        elif name in SHARED:
            sub.add_argument(name, **SHARED[name])
        else:
            place, metavar = OPTIONS[name]
            help = helps.get(name) or short_help(place).replace("%", "%%")
            kind: dict[str, Any] = {"metavar": metavar} if metavar else {"action": "store_const", "const": "true"}
            kind |= {"action": _StoreMethod} if name == "method" else {}
            sub.add_argument(f"--{name}", dest=place, help=help, **kind)


def add_study(sub: argparse.ArgumentParser, seeds: int) -> None:
    """Add the options that comparisons and sweeps have in common."""
    help = f"how many seeds, from --seed on (default: {seeds})"
    sub.add_argument("--seeds", type=positive_int, metavar="N", default=seeds, help=help)
    add_options(sub, "--workers", "settings", "--plot", "--json", "--quiet")


def dispatch(options: argparse.Namespace, **handlers: Callable[[argparse.Namespace], int | None]) -> int:
    """Call the handler that the first word after the command names."""
    if options.what not in handlers:
        raise UsageError(f"{options.command}: got {options.what!r}; {did_you_mean(options.what, handlers)}")
    return handlers[options.what](options) or 0


_ARGUMENTS = "by|callbacks|classes|client|data_dir|methods|out|plot|seeds|workers"


def translate_arguments(text: str) -> str:
    """An error message for the command line: arguments of Python functions in it become options."""
    text = re.sub(rf"(?m)^({_ARGUMENTS})(?=: )", lambda match: f"--{match[1].replace('_', '-')}", text)
    return re.sub(rf"\b({_ARGUMENTS})=(?=[A-Z])", lambda match: f"--{match[1].replace('_', '-')} ", text)


def check_config(file: str | None) -> None:
    """Refuse a CONFIG that is no file: a second value for an option is parsed as CONFIG."""
    if file and not file.endswith(".toml") and not Path(file).exists():
        one_value = "an option takes one value, and a sweep's are joined by commas: --learning-rate .03,.1"
        remedy = f"did you mean --set {file}?" if re.match(r"\w+\.\w+=", file) else one_value
        raise UsageError(f"CONFIG: got {file!r}, expected a TOML file; {remedy}")


def assignments(options: argparse.Namespace) -> list[str]:
    """Texts `section.key=value` of `--set`, then of options that stand for a setting; a setting that has both is
    refused."""
    flags = {place: f"--{option}" for option, (place, _) in OPTIONS.items()} | {"run.out": "--out"}
    given = {**vars(options), "run.out": getattr(options, "out", None)}
    texts = {name: f"{flags[name]} {value}" for name, value in given.items() if name in flags and value is not None}
    for text in options.set:
        place = text.partition("=")[0].strip()
        if place in texts:
            raise UsageError(f"{place}: got {texts[place]} and --set {text}, expected one of them")
    return [*options.set, *(f"{name}={given[name]}" for name in texts if name in vars(options))]


def overrides(options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    from pfedlms.experiment.config import parse_overrides

    return parse_overrides(assignments(options))


def out_directory(options: argparse.Namespace, configured: str, label: str) -> Path:
    """The directory that the user names, or a new one named by time. The config.toml of a run names that run's
    directory, which is not meant when the file is used for another run."""
    if options.config and not options.out and Path(configured).resolve() == Path(options.config).resolve().parent:
        configured = ""
    if options.out or configured:
        return Path(options.out or configured)
    stem = Path("runs") / f"{time.strftime('%Y%m%d-%H%M%S')}-{label}"
    candidates = (stem if number == 0 else stem.with_name(f"{stem.name}-{number}") for number in range(1000))
    return next(path for path in candidates if not path.exists())


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
