"""data show, download, check: who holds what, and the files data sets are read from."""

from __future__ import annotations

import argparse
import json
import os

from rich.console import Console

from pfedlms.cli.options import HOLDINGS, add_json, add_options, add_set, check_config, overrides
from pfedlms.cli.screen import console, say, show
from pfedlms.errors import UsageError, did_you_mean
from pfedlms.report import figures
from pfedlms.report.charts import check_file


def add_data(sub: argparse.ArgumentParser) -> None:
    """show: who holds what, clients x classes; nothing is trained. download NAME: fetch the files of a data set, going
    on with what was begun. check [NAME]: which data sets are there, whole or what is wrong."""
    sub.add_argument("what", metavar="show|download|check", help="what to do")
    help = "show: a TOML file, options below come on top of it; else the name of a data set"
    sub.add_argument("subject", nargs="?", metavar="CONFIG|NAME", help=help)
    add_options(sub, *HOLDINGS)
    add_set(sub)
    sub.add_argument("--plot", metavar="FILE", help="draw it, too; PNG, SVG or PDF (extra: report)")
    help = "download: the published files, though the data set is there in another format"
    sub.add_argument("--force", action="store_true", help=help)
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
        check_file(options.plot)
    document = holdings(load_config(options.subject, overrides(options)))
    if options.json:
        print(json.dumps(document, indent=2))
    else:
        console = Console()
        for line in holdings_lines(document, max(60, console.width) if console.is_terminal else 80):
            console.print(line, highlight=False, soft_wrap=True)
    if options.plot:
        figures.holdings(document).save(options.plot)


def _download(options: argparse.Namespace) -> None:
    from pfedlms.data.check import in_another_form
    from pfedlms.data.download import download
    from pfedlms.data.published import DOWNLOADS
    from pfedlms.data.sources import folder_of
    from pfedlms.report.sources import watching

    if not (name := _named(options)):
        raise UsageError("data download: say which data set, for example: pfedlms data download mnist --data-dir DIR")
    folder = folder_of(name, vars(options)["data.dir"])
    there = in_another_form(name, folder) if name in DOWNLOADS and not options.force else None
    if there is not None:
        say(f"{name}: is there already, {there['format']} in {there['where']}; to fetch it all the same: --force")
        files = []
    else:
        with watching(Console(stderr=True)) as watch:
            files = download(name, folder, watch)
    if options.json:
        print(json.dumps({"dataset": name, "files": list(map(str, files))}, indent=2))


def _check(options: argparse.Namespace) -> int:
    """1 if the data set asked for is not complete; of all, if one is there that is, or may be, damaged."""
    from pfedlms.data.check import SOUND, check
    from pfedlms.data.sources import DATASETS
    from pfedlms.report.sources import check_table

    name = _named(options)
    if name and name not in DATASETS:
        raise UsageError(f"data check: got {name!r}; {did_you_mean(name, DATASETS)}")
    rows = [check(each, vars(options)["data.dir"]) for each in ([name] if name else DATASETS)]
    show(options, rows[0] if name else rows, check_table, rows)
    if not options.json:
        for row in rows:
            for line in filter(None, (row["where"], *row["also"])):
                console().print(f"{row['dataset']}: {line}", highlight=False, markup=False, soft_wrap=True)
    if not (name or vars(options)["data.dir"] or os.environ.get("PFEDLMS_DATA")):
        say("no folder was given: name one with --data-dir DIR or PFEDLMS_DATA")
    for problem in (problem for row in rows if name or row["state"] != "missing" for problem in row["problems"]):
        say(problem)
    fine = ("complete",) if name else (*SOUND, "missing")
    return int(any(row["state"] not in fine for row in rows))


def _named(options: argparse.Namespace) -> str | None:
    """The data set's name, given by itself or with --dataset."""
    given: str | None = options.subject or vars(options)["data.dataset"]
    return given
