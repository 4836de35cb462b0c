"""report: one page to read, from folders of runs."""

from __future__ import annotations

import argparse
from pathlib import Path

from pfedlms.cli.screen import say


def add_report(sub: argparse.ArgumentParser) -> None:
    """Write one self-contained page from runs, comparisons and sweeps: tables and figures, settings, raw data; needs no
    data set and trains nothing (extra: report)."""
    help = "folders of runs, comparisons or sweeps, or folders that hold such"
    sub.add_argument("directories", metavar="DIR", nargs="+", type=Path, help=help)
    help = "the page (default: report.html)"
    sub.add_argument("-o", "--output", metavar="FILE", type=Path, default=Path("report.html"), help=help)
    help = "also write every figure as SVG and its data as CSV there"
    sub.add_argument("--figures", metavar="FOLDER", type=Path, help=help)


def report(options: argparse.Namespace) -> None:
    from pfedlms.cli.folders import layers_of, sections_of
    from pfedlms.report.page import write_page

    sections, left_out = sections_of(options.directories)
    written = write_page(sections, options.output, options.figures, layers_of=layers_of, left_out=left_out)
    say(f"report: {written[0]}" + (f"; {len(written) - 1} files in {options.figures}" if options.figures else ""))
