"""data show, data download: how data are partitioned, and the files of data sets."""

from __future__ import annotations

import argparse
import json

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TransferSpeedColumn

from pfedlms.cli.options import add_options, output, overrides, say
from pfedlms.errors import UsageError
from pfedlms.report import figures


def add_data(sub: argparse.ArgumentParser) -> None:
    """show: which client holds how many samples of each class. download NAME: fetch the files of a data set."""
    sub.add_argument("what", choices=["show", "download"], help="what to do")
    help = "show: a TOML file, options below come on top of it; else the name of a data set"
    sub.add_argument("subject", nargs="?", metavar="CONFIG|NAME", help=help)
    add_options(sub, "dataset", "data-dir", "clients", "partition", "alpha", "validation", "seed", "--set", "--plot")
    help = "download: replaces files with another checksum"
    sub.add_argument("--force", action="store_true", help=help)
    add_options(sub, "--json")


def data(options: argparse.Namespace) -> None:
    (_show if options.what == "show" else _download)(options)


def _show(options: argparse.Namespace) -> None:
    from pfedlms.experiment.config import load_config
    from pfedlms.experiment.cost import holdings
    from pfedlms.report import plans

    document = holdings(load_config(options.subject, overrides(options)))
    if options.plot:
        figures.client_map(document).save(options.plot)
    output(options, document, lambda _: plans.client_table(document), document["clients"])


def _download(options: argparse.Namespace) -> None:
    from pfedlms.data.download import download
    from pfedlms.data.sources import data_folder

    name = options.subject or vars(options)["data.dataset"]
    if not name:
        raise UsageError("data download: say which data set, for example: pfedlms data download mnist --data-dir DIR")
    folder, files = data_folder(name, vars(options)["data.dir"]), []
    for path in download(name, folder, options.force, _Bar()):
        say(f"{path}: is there, with the published checksum")
        files.append(str(path))
    if options.json:
        print(json.dumps({"dataset": name, "files": files}, indent=2))


class _Bar:
    """A progress bar with the methods that pooch calls; it is shown on a terminal only."""

    total = 0

    def __init__(self) -> None:
        screen = Console(stderr=True)
        columns = BarColumn(), DownloadColumn(), TransferSpeedColumn()
        self._bar = Progress(*columns, console=screen, disable=not screen.is_terminal)
        self._task = self._bar.add_task("", total=None)

    def update(self, count: int) -> None:
        self._bar.start()
        self._bar.update(self._task, advance=count, total=self.total)

    def reset(self) -> None:
        self._bar.reset(self._task)

    def close(self) -> None:
        self._bar.stop()
