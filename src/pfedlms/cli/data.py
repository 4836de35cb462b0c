"""data show, download, check: who holds what, and the files data sets are read from."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from rich.console import Console

from pfedlms.cli.options import HOLDINGS, add_json, add_options, add_set, check_config, overrides
from pfedlms.cli.screen import say, show
from pfedlms.errors import UsageError, did_you_mean
from pfedlms.report.plots import check_plot, who_holds_what
from pfedlms.report.tables import plain_table


def add_data(sub: argparse.ArgumentParser) -> None:
    """show: who holds what, clients x classes; nothing is trained. download NAME: fetch the files of a data set, going
    on with what was begun. check [NAME]: which data sets are there, whole or what is wrong."""
    sub.add_argument("what", metavar="show|download|check", help="what to do")
    help = "show: a TOML file, options below come on top of it; else the name of a data set"
    sub.add_argument("subject", nargs="?", metavar="CONFIG|NAME", help=help)
    add_options(sub, *HOLDINGS)
    add_set(sub)
    sub.add_argument("--plot", metavar="FILE", help="draw it, too; PNG, SVG or PDF (extra: report)")
    add_json(sub)


def data(options: argparse.Namespace) -> int:
    handlers = {"show": _show, "download": _download, "check": _check}
    if options.what not in handlers:
        raise UsageError(f"data: got {options.what!r}; {did_you_mean(options.what, handlers)}")
    return int(handlers[options.what](options) or 0)


def _show(options: argparse.Namespace) -> None:
    from pfedlms.experiment.config import load_config
    from pfedlms.experiment.holdings import holdings
    from pfedlms.report.holdings import holdings_lines

    check_config(options.subject)
    if options.plot:
        check_plot(Path(options.plot))
    document = holdings(load_config(options.subject, overrides(options)))
    if options.json:
        print(json.dumps(document, indent=2))
    else:
        console = Console()
        for line in holdings_lines(document, max(60, console.width) if console.is_terminal else 80):
            console.print(line, highlight=False, soft_wrap=True)
    if options.plot:
        who_holds_what(document, Path(options.plot))


def _download(options: argparse.Namespace) -> None:
    from pfedlms.data.download import download
    from pfedlms.data.sources import folder_of
    from pfedlms.report.sources import watching

    if not (name := _named(options)):
        raise UsageError("data download: say which data set, for example: pfedlms data download mnist --data-dir DIR")
    with watching(Console(stderr=True)) as watch:
        files = download(name, folder_of(name, vars(options)["data.dir"]), watch)
    if options.json:
        print(json.dumps({"dataset": name, "files": list(map(str, files))}, indent=2))


def _check(options: argparse.Namespace) -> int:
    """1 if the data set asked for is not complete; of all, if one is there that is not whole."""
    from pfedlms.data.check import check
    from pfedlms.data.sources import DATASETS
    from pfedlms.report.sources import check_rows

    name = _named(options)
    if name and name not in DATASETS:
        raise UsageError(f"data check: got {name!r}; {did_you_mean(name, DATASETS)}")
    rows = [check(each, vars(options)["data.dir"]) for each in ([name] if name else DATASETS)]
    show(options, rows[0] if name else rows, plain_table, check_rows(rows))
    wrong = [row for row in rows if row["state"] != "complete" and (name or row["state"] != "missing")]
    for problem in (problem for row in wrong for problem in row["problems"]):
        say(problem)
    return int(bool(wrong))


def _named(options: argparse.Namespace) -> str | None:
    """The data set's name, given by itself or with --dataset."""
    given: str | None = options.subject or vars(options)["data.dataset"]
    return given
