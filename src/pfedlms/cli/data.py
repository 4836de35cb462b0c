"""data show: who holds what."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from rich.console import Console

from pfedlms.cli.options import HOLDINGS, add_config, add_json, add_options, add_set, overrides
from pfedlms.errors import UsageError
from pfedlms.report.plots import check_plot, who_holds_what


def add_data(sub: argparse.ArgumentParser) -> None:
    """Show who holds what, clients x classes; nothing is trained."""
    sub.add_argument("what", metavar="show", help="the word show")
    add_config(sub)
    add_options(sub, *HOLDINGS)
    add_set(sub)
    sub.add_argument("--plot", metavar="FILE", help="draw it, too; PNG, SVG or PDF (extra: report)")
    add_json(sub)


def data(options: argparse.Namespace) -> None:
    from pfedlms.experiment.config import load_config
    from pfedlms.experiment.holdings import holdings
    from pfedlms.report.holdings import holdings_lines

    if options.what != "show":
        raise UsageError(f"data: got {options.what!r}, expected show: pfedlms data show")
    if options.plot:
        check_plot(Path(options.plot))
    document = holdings(load_config(options.config, overrides(options)))
    if options.json:
        print(json.dumps(document, indent=2))
    else:
        console = Console()
        for line in holdings_lines(document, max(60, console.width) if console.is_terminal else 80):
            console.print(line, highlight=False, soft_wrap=True)
    if options.plot:
        who_holds_what(document, Path(options.plot))
