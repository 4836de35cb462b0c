"""The command line: python -m papers.pfedlms NAME…"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from papers.pfedlms.reproduce import DATASETS, NAMES, reproduce
from papers.pfedlms.runs import Outcome, Wanted, read_rows
from papers.pfedlms.sheets import flat
from pfedlms.errors import PfedlmsError
from pfedlms.report.tables import count_text

DESCRIPTION = """Train what a table or figure of the paper needs, and print it beside the paper's numbers. The same
command again resumes it. Runs that are finished are kept, and used by every table that has them."""


def parse(arguments: Sequence[str] | None, prog: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=prog, description=DESCRIPTION, allow_abbrev=False)
    parser.add_argument("names", nargs="+", metavar="NAME", help=", ".join(NAMES))
    help = f"some of {', '.join(DATASETS)} (default: those of the paper); cifar100/vgg8: with another model"
    parser.add_argument("--datasets", type=listed, metavar="A,B", default=(), help=help)
    help = "some rows, by method or variant: pfedlms, stc@sketchvote (stc at the bytes of sketchvote), "
    help += "pfedlms:ratio=.2; without effect on distributions (FedAvg) and convergence (pFedLMS)"
    parser.add_argument("--methods", type=listed, metavar="A,B", default=(), help=help)
    help = "how many seeds, from 0 on (default: 3; 1 with --quick); distributions and convergence have seed 0 alone"
    parser.add_argument("--seeds", type=positive, metavar="N", help=help)
    parser.add_argument("--quick", action="store_true", help="a tenth of the rounds: a look, no result")
    help = "rows that were measured elsewhere (a JSON file, or a folder of them), used instead of training"
    parser.add_argument("--rows", action="append", type=Path, default=[], metavar="FILE", help=help)
    parser.add_argument("--out", type=Path, metavar="DIR", default=Path("runs/paper"), help="default: runs/paper")
    parser.add_argument("--data-dir", metavar="DIR", default="", help="where the files of data sets are")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    parser.add_argument("--workers", type=positive, metavar="N", default=1, help="how many runs at the same time")
    parser.add_argument("--json", action="store_true", help="print JSON and nothing else on standard output")
    parser.add_argument("--quiet", action="store_true", help="no progress")
    return parser.parse_args(arguments)


def listed(text: str) -> tuple[str, ...]:
    """Each once."""
    return tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))


def positive(text: str) -> int:
    if text.isascii() and text.isdecimal() and int(text) > 0:
        return int(text)
    raise argparse.ArgumentTypeError(f"got {text}, expected a count of at least 1")


def main(arguments: Sequence[str] | None = None, prog: str = "python -m papers.pfedlms") -> int:
    """Returns the exit code: 0 done, 1 runs diverged or data are missing, 2 wrong use, 130 interrupted by Ctrl-C."""
    options = parse(arguments, prog)
    warnings.showwarning = lambda message, *rest, **more: say(f"warning: {message}")
    try:
        return _reproduce(options)
    except PfedlmsError as error:
        say("error: " + "\n  ".join(str(error).splitlines()))
        return error.exit_code


def _reproduce(options: argparse.Namespace) -> int:
    seeds = options.seeds if options.seeds is not None else 1 if options.quick else 3
    wanted = Wanted(
        options.out, options.datasets, options.methods, tuple(range(seeds)), options.quick,
        read_rows(options.rows), options.data_dir, options.device, options.workers, False if options.quiet else None,
        say=(lambda text: None) if options.quiet else say,
    )  # fmt: skip
    done: dict[str, Outcome] = {}
    for name in dict.fromkeys(options.names):
        try:
            done[name] = reproduce(name, wanted)
        except KeyboardInterrupt:
            done[name] = Outcome(signal=2)
        _show(done[name], options.json)
        if done[name].signal:
            say(f"interrupted; {options.out} keeps what was finished. The same command resumes it.")
            return 128 + done[name].signal
    if options.json:
        shown = [(name, table) for own in done.values() for name, table in own.sheets.items() if table.columns]
        sheets = {name: list(map(flat, table.records)) for name, table in shown}
        print(json.dumps({"directory": str(options.out), "sheets": sheets}, indent=2))
    say(f"results: {options.out}")
    broken = sum(own.broken for own in done.values())
    if broken:
        say(f"error: {count_text(broken, 'run')} did not finish; the tables name them")
    return 1 if broken or any(own.missing for own in done.values()) else 0


def _show(outcome: Outcome, as_json: bool) -> None:
    """The tables, and why cells have no run."""
    screen = Console() if Console().is_terminal else Console(width=1000)  # in a pipe nothing is cut
    for table in outcome.sheets.values() if not as_json else ():
        if table.columns:
            screen.print(table.rich(), highlight=False)
    for dataset, reason in outcome.missing.items():
        say(f"{dataset}: cells stay open: {reason}")


def say(text: str) -> None:
    """On standard error, as it is."""
    Console(stderr=True).print(text, highlight=False, markup=False, soft_wrap=True)


if __name__ == "__main__":
    sys.exit(main())
