"""Options that several commands have, and what they say together."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

from pfedlms.errors import UsageError

SETTINGS = {
    "method": ("method.name", "NAME", "method by name (pfedlms methods; default: pfedlms)"),
    "dataset": ("data.dataset", "NAME", "data set by name (pfedlms datasets), folder:PATH or file:PATH"),
    "data-dir": ("data.dir", "DIR", "folder with the data set's files (default: PFEDLMS_DATA)"),
    "model": ("model.name", "NAME", "model by name (pfedlms models)"),
    "clients": ("data.clients", "K", "number of clients"),
    "partition": ("data.partition", "NAME", "how samples are dealt out: dirichlet, classes, iid, quantity, given"),
    "alpha": ("data.alpha", "A", "of the Dirichlet partition; small: few classes each"),
    "validation": ("data.validation", "SHARE", "of training samples, set aside to choose settings by"),
    "rounds": ("train.rounds", "N", "communication rounds"),
    "participation": ("train.participation", "SHARE", "of the clients, that takes part in a round"),
    "local-steps": ("train.local_steps", "E", "steps of a client in a round"),
    "batch-size": ("train.batch_size", "N", "samples of a step"),
    "learning-rate": ("train.learning_rate", "ETA", "of the local steps"),
    "seed": ("run.seed", "N", "names every random stream (default: 0)"),
    "device": ("run.device", "NAME", "auto, cpu, cuda or cuda:N"),
}
"""Options that stand for a setting: its name, what is given, help."""
HOLDINGS = ("dataset", "data-dir", "clients", "partition", "alpha", "validation", "seed")
"""What says who holds what."""


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
    for name in names:
        dest, metavar, help = SETTINGS[name]
        sub.add_argument(f"--{name}", dest=dest, metavar=metavar, help=helps.get(name, help))


def add_settings(sub: argparse.ArgumentParser) -> None:
    """All that a training run is set by, and where it goes."""
    add_options(sub, *(name for name in SETTINGS if name != "method"))
    for name, help in (
        ("fast", "GPU: compile the model; not reproducible to the bit"),
        ("reference", "plain PyTorch, one client after another: for checking; slow"),
    ):
        sub.add_argument(f"--{name}", dest=f"run.{name}", action="store_const", const="true", help=help)
    sub.add_argument("--out", metavar="DIR", help="where results go (default: a fresh folder under runs/)")
    add_set(sub)


def add_set(sub: argparse.ArgumentParser) -> None:
    help = "any setting (pfedlms settings); may be repeated"
    sub.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help=help)


def add_data_dir(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--data-dir", metavar="DIR", help="where the data set's files are now, if they were moved")


def add_output(sub: argparse.ArgumentParser) -> None:
    add_json(sub)
    sub.add_argument("--quiet", action="store_true", help="no progress; where results are is still said")


def add_json(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--json", action="store_true", help="print JSON and nothing else on standard output")


def a_count(text: str) -> int:
    """Of seeds."""
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
