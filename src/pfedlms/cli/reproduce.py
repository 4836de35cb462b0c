"""reproduce: the paper's tables and figures."""

from __future__ import annotations

import argparse
import json
import warnings
from pathlib import Path
from typing import Any

from pfedlms.cli.options import add_options, add_output, positive_int
from pfedlms.cli.screen import console, progress_of, say


def add_reproduce(sub: argparse.ArgumentParser) -> None:
    """Train what a table or figure of the paper takes, and print it beside what is printed there. The same command
    again resumes it; cells that are finished are kept, and used by every table that has them."""
    help = "table1, table2, communication, ablation, thresholds, refresh, lambda, distributions, curves, budget, "
    help += "convergence"
    sub.add_argument("names", nargs="+", metavar="NAME", help=help)
    help = "some of digits, mnist, fmnist, svhn, cifar10, cifar100 (default: those the paper has there)"
    sub.add_argument("--datasets", metavar="A,B", help=help)
    help = "some rows, by method or variant: pfedlms, stc@sketchvote (at the bytes of), pfedlms:ratio=.2; not of "
    help += "distributions (FedAvg) and convergence (pFedLMS)"
    sub.add_argument("--methods", metavar="A,B", help=help)
    help = "how many seeds, from 0 on (default: 3; 1 with --quick); distributions and convergence have seed 0 alone"
    sub.add_argument("--seeds", type=positive_int, metavar="N", help=help)
    sub.add_argument("--quick", action="store_true", help="a tenth of the rounds: a look, no result")
    help = "rows that were measured elsewhere (a JSON file, or a folder of them), used instead of training"
    sub.add_argument("--rows", action="append", type=Path, default=[], metavar="FILE", help=help)
    sub.add_argument("--out", type=Path, metavar="DIR", default=Path("runs/paper"), help="default: runs/paper")
    add_options(sub, "data-dir", "device")
    add_output(sub)


def reproduce(options: argparse.Namespace) -> int:
    from pfedlms.reproduce import Outcome, Wanted, reproduce
    from pfedlms.reproduce.play import Where, read_rows

    seeds = options.seeds if options.seeds is not None else 1 if options.quick else 3
    rows = read_rows(options.rows)
    wanted = Wanted(_listed(options.datasets), _listed(options.methods), tuple(range(seeds)), options.quick, rows)
    chosen = vars(options)
    where = Where(options.out, chosen["data.dir"] or "", chosen["run.device"] or "auto")
    done: dict[str, Outcome] = {}
    for name in dict.fromkeys(options.names):
        _without_effect(name, options)
        try:
            with progress_of(options) as callbacks:
                done[name] = reproduce(name, wanted, where, callbacks, None if options.quiet else say)
        except KeyboardInterrupt:  # Ctrl-C pressed twice
            # Runs of `convergence` are watched step by step, and have no checkpoints.
            rest = "the run it was in begins again" if name == "convergence" else "the latest checkpoint, too"
            say(f"interrupted; {where.out} keeps what was finished, {rest}. The same command goes on.")
            return 130
        _report(options, done[name])
        if done[name].stopped:
            say(f"interrupted; all of it is kept in {where.out}. The same command goes on.")
            return 128 + done[name].stopped
    if options.json:
        sheets = {sheet.name: sheet.records for own in done.values() for sheet in own.sheets if sheet.columns}
        print(json.dumps({"directory": str(where.out), "sheets": sheets}, indent=2))
    say(f"results: {where.out}")
    from pfedlms.report.tables import counted

    broken = sum(own.broken for own in done.values())
    if broken:
        say(f"error: {counted(broken, 'cell')} came to no end; the tables name them")
    return 1 if broken or any(own.missing for own in done.values()) else 0


ALONE = {"distributions": "FedAvg", "convergence": "pFedLMS"}
"""Experiments that are of one method, and of seed 0; nothing measured elsewhere takes their place."""


def _without_effect(name: str, options: argparse.Namespace) -> None:
    given = {"--methods": options.methods, "--seeds": (options.seeds or 1) > 1, "--rows": options.rows}
    told = [option for option, value in given.items() if value and name in ALONE]
    if told:
        warnings.warn(f"{name}: {' and '.join(told)} without effect; it is of {ALONE[name]}, seed 0", stacklevel=2)


def _report(options: argparse.Namespace, outcome: Any) -> None:
    """The sheets that are for reading, and why cells stay open."""
    for sheet in outcome.sheets:
        if sheet.columns and not options.json:
            console().print(sheet.screen(), highlight=False)
    for dataset, why in outcome.missing.items():
        say(f"{dataset}: cells stay open: {why}")


def _listed(text: str | None) -> tuple[str, ...]:
    """Each once."""
    return tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip())) if text else ()
