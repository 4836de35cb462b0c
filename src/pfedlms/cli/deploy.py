"""deploy init, check, approve, upgrade: a federation on machines of its own."""

from __future__ import annotations

import argparse
from dataclasses import asdict

from pfedlms.cli.options import add_options, output, say
from pfedlms.report.tables import table_from_records


def add_deploy(sub: argparse.ArgumentParser) -> None:
    """init DIR: write a folder for one server and its nodes, ready to edit. check DIR: versions, settings, whether the
    server can be reached, which of its paths answer, and what its nodes say; with --server only as far as the server.
    approve DIR: let this machine take part in runs of the app in DIR. upgrade DIR: bring a folder of an older version
    up to date. docs/deploy.md walks through it."""
    sub.add_argument("what", choices=[*_HANDLERS], help="what to do")
    add_options(sub, "directory")
    sub.add_argument("--nodes", type=int, metavar="N", default=3, help="init: how many (default: 3)")
    sub.add_argument("--server", metavar="ADDRESS", help="init: its name or address; check: HOST:PORT")
    sub.add_argument("--port", type=int, metavar="N", default=8000, help="init: of the gate, for nodes (default: 8000)")
    sub.add_argument(
        "--link-port", type=int, metavar="N", help="init: of the SuperLink on loopback (default: --port + 1)"
    )
    sub.add_argument("--run-config", metavar="TEXT", help="approve: settings, as run.sh takes them")
    add_options(sub, "method", "dataset", "--json")


def deploy(options: argparse.Namespace) -> int:
    return _HANDLERS[options.what](options)


def _init(options: argparse.Namespace) -> int:
    from pfedlms.flower.folder import write_folder

    named = vars(options)
    arguments = {"method": named["method.name"], "dataset": named["data.dataset"], "server": options.server}
    arguments = {name: value for name, value in arguments.items() if value is not None}
    files = write_folder(options.directory, options.nodes, port=options.port, link_port=options.link_port, **arguments)
    output(options, {"directory": str(options.directory), "files": list(map(str, files))}, table_from_records, [])
    say(f"{len(files)} files; next steps: {options.directory / 'README.md'}")
    return 0


def _check(options: argparse.Namespace) -> int:
    from pfedlms.flower.check import check

    results = check(options.directory, options.server)
    rows = [{"": "✗" if result.wrong else "✓", "what": result.what, "found": result.said} for result in results]
    output(options, [asdict(result) for result in results], table_from_records, rows)
    return int(any(result.wrong for result in results))


def _approve(options: argparse.Namespace) -> int:
    from pfedlms.flower.approval import approve, run_config

    entry = approve(options.directory, run_config(["--run-config", options.run_config] if options.run_config else []))
    output(options, entry, table_from_records, [{"what": key, "approved": str(value)} for key, value in entry.items()])
    return 0


def _upgrade(options: argparse.Namespace) -> int:
    from pfedlms.flower.folder import upgrade

    steps = upgrade(options.directory)
    output(options, {"steps": steps}, table_from_records, [])
    for step in steps:
        say(step)
    return 0


_HANDLERS = {"init": _init, "check": _check, "approve": _approve, "upgrade": _upgrade}
