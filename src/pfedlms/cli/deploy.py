"""deploy init, check: a federation on machines of its own."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path

from pfedlms.cli.options import add_json, add_options
from pfedlms.cli.screen import say, show
from pfedlms.errors import UsageError, did_you_mean
from pfedlms.report.tables import table_of


def add_deploy(sub: argparse.ArgumentParser) -> None:
    """init DIR: write a folder for one server and its nodes, ready to edit. check DIR: versions, settings, whether the
    server can be reached, and what its nodes say; with --server only as far as the server. docs/deploy.md walks through
    it."""
    sub.add_argument("what", metavar="init|check", help="what to do")
    sub.add_argument("directory", metavar="DIR", type=Path)
    sub.add_argument("--nodes", type=int, metavar="N", default=3, help="init: how many (default: 3)")
    sub.add_argument("--server", metavar="ADDRESS", help="init: its name or address; check: HOST:PORT")
    sub.add_argument("--port", type=int, metavar="N", default=8000, help="init: of the server (default: 8000)")
    add_options(sub, "method", "dataset")
    add_json(sub)


def deploy(options: argparse.Namespace) -> int:
    handlers = {"init": _init, "check": _check}
    if options.what not in handlers:
        raise UsageError(f"deploy: got {options.what!r}; {did_you_mean(options.what, handlers)}")
    return handlers[options.what](options)


def _init(options: argparse.Namespace) -> int:
    from pfedlms.flower.folder import write_folder

    chosen = {
        "method": vars(options)["method.name"],
        "dataset": vars(options)["data.dataset"],
        "server": options.server,
    }
    given = {name: value for name, value in chosen.items() if value is not None}
    files = write_folder(options.directory, options.nodes, port=options.port, **given)
    show(options, {"directory": str(options.directory), "files": list(map(str, files))}, table_of, [])
    say(f"{len(files)} files; how to go on: {options.directory / 'README.md'}")
    return 0


def _check(options: argparse.Namespace) -> int:
    from pfedlms.flower.check import check

    found = check(options.directory, options.server)
    rows = [{"": "✗" if each.wrong else "✓", "what": each.what, "found": each.said} for each in found]
    show(options, [asdict(each) for each in found], table_of, rows)
    return int(any(each.wrong for each in found))
