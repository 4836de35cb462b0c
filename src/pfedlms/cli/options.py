"""Options that several commands have; those that stand for a setting are derived from the schema."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

from pfedlms.errors import UsageError
from pfedlms.experiment.schema import options as schema_options

HOLDINGS = ("dataset", "data-dir", "clients", "partition", "alpha", "validation", "seed")
"""What says which client holds which samples."""


def add_config(sub: argparse.ArgumentParser) -> None:
    help = "a TOML file; options below come on top of it"
    sub.add_argument("config", nargs="?", metavar="CONFIG", help=help)


def check_config(given: str | None) -> None:
    """A second value for an option would be taken for the TOML file."""
    if given and not given.endswith(".toml") and not Path(given).exists():
        raise UsageError(
            f"CONFIG: got {given!r}, expected a TOML file; an option takes one value, and a sweep's are joined by "
            "commas: --learning-rate .03,.1"
        )


def add_options(sub: argparse.ArgumentParser, *names: str, **helps: str) -> None:
    """Options that stand for a setting, stored under its name; `helps` replaces what is said of one."""
    known = schema_options()
    for name in names:
        place, declared = known[name]
        help = helps.get(name) or str(declared.metadata["help"]).partition(";")[0].replace("%", "%%")
        metavar = declared.metadata["option"]
        if metavar:
            sub.add_argument(f"--{name}", dest=place, help=help, metavar=metavar)
        else:
            sub.add_argument(f"--{name}", dest=place, help=help, action="store_const", const="true")


def add_settings(sub: argparse.ArgumentParser) -> None:
    """All that a training run is set by, and where it goes."""
    add_options(sub, *(name for name in schema_options() if name != "method"))
    sub.add_argument("--out", metavar="DIR", help="where results go (default: a fresh folder under runs/)")
    add_set(sub)


def add_set(sub: argparse.ArgumentParser) -> None:
    help = "any setting (pfedlms settings); may be repeated"
    sub.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help=help)


def add_import(sub: argparse.ArgumentParser) -> None:
    help = "import this module first, which registers methods and models of your own; may be repeated"
    sub.add_argument("--import", dest="imports", action="append", default=[], metavar="MODULE", help=help)


def add_data_dir(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--data-dir", metavar="DIR", help="where the data set's files are now, if they were moved")


def add_output(sub: argparse.ArgumentParser) -> None:
    add_json(sub)
    sub.add_argument("--quiet", action="store_true", help="no progress; where results are is still said")


def add_json(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--json", action="store_true", help="print JSON and nothing else on standard output")


def add_study(sub: argparse.ArgumentParser, seeds: int) -> None:
    """What comparisons and sweeps have in common."""
    help = f"how many seeds, from --seed on (default: {seeds})"
    sub.add_argument("--seeds", type=positive_int, metavar="N", default=seeds, help=help)
    help = "how many runs at the same time, each in a process (default: 1)"
    sub.add_argument("--workers", type=positive_int, metavar="N", default=1, help=help)
    add_settings(sub)
    sub.add_argument("--plot", metavar="FILE", help="draw the result; PNG, SVG or PDF (extra: report)")
    add_output(sub)


def positive_int(text: str) -> int:
    if text.isascii() and text.isdecimal() and int(text) > 0:
        return int(text)
    raise argparse.ArgumentTypeError(
        f"got {text}, expected a count of at least 1; compare and sweep have the first seed as --seed"
    )


def assignments(options: argparse.Namespace) -> list[str]:
    """What `--set` and the options that stand for a setting say; the latter come last."""
    given = [f"{name}={value}" for name, value in vars(options).items() if "." in name and value is not None]
    return [*options.set, *given]


def overrides(options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    from pfedlms.experiment.config import parse_overrides

    return parse_overrides(assignments(options))


def out_directory(options: argparse.Namespace, configured: str, label: str) -> Path:
    """The directory asked for, or a fresh one named by time; a run's own config.toml names the directory it lies in,
    which is not meant when it is run again."""
    if options.config and not options.out and Path(configured).resolve() == Path(options.config).resolve().parent:
        configured = ""
    if options.out or configured:
        return Path(options.out or configured)
    stem = Path("runs") / f"{time.strftime('%Y%m%d-%H%M%S')}-{label}"
    candidates = (stem if number == 0 else stem.with_name(f"{stem.name}-{number}") for number in range(1000))
    return next(path for path in candidates if not path.exists())
