"""Options that several commands have; those that stand for a setting are derived from the schema."""

from __future__ import annotations

import argparse
import re
import time
from pathlib import Path
from typing import Any

from pfedlms.errors import UsageError
from pfedlms.experiment.schema import OPTIONS, meaning


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


def add(sub: argparse.ArgumentParser, *names: str, **helps: str) -> None:
    """Options by name: shared ones, or the name of one that stands for a setting, whose help `helps` may replace;
    `settings` are all of these but the method, with where results go."""
    for name in names:
        if name == "settings":
            add(sub, *(each for each in OPTIONS if each != "method"), "--out", "--set")
        elif name in SHARED:
            sub.add_argument("--data-dir" if name == "--moved" else name, **SHARED[name])
        else:
            place, metavar = OPTIONS[name]
            help = helps.get(name) or meaning(place).replace("%", "%%")
            how: dict[str, Any] = {"metavar": metavar} if metavar else {"action": "store_const", "const": "true"}
            sub.add_argument(f"--{name}", dest=place, help=help, **how)


def add_study(sub: argparse.ArgumentParser, seeds: int) -> None:
    """What comparisons and sweeps have in common."""
    help = f"how many seeds, from --seed on (default: {seeds})"
    sub.add_argument("--seeds", type=positive_int, metavar="N", default=seeds, help=help)
    add(sub, "--workers", "settings", "--plot", "--json", "--quiet")


_ARGUMENTS = "by|callbacks|classes|client|data_dir|methods|out|plot|seeds|workers"


def as_options(text: str) -> str:
    """An error as users of the command line know its words: arguments of Python's functions as options."""
    text = re.sub(rf"(?m)^({_ARGUMENTS})(?=: )", lambda found: f"--{found[1].replace('_', '-')}", text)
    return re.sub(rf"\b({_ARGUMENTS})=(?=[A-Z])", lambda found: f"--{found[1].replace('_', '-')} ", text)


def check_config(given: str | None) -> None:
    """A second value for an option would be taken for the TOML file."""
    if given and not given.endswith(".toml") and not Path(given).exists():
        raise UsageError(
            f"CONFIG: got {given!r}, expected a TOML file; an option takes one value, and a sweep's are joined by "
            "commas: --learning-rate .03,.1"
        )


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
