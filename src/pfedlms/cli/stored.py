"""show, export: what a run directory holds; nothing is trained."""

from __future__ import annotations

import argparse
from pathlib import Path

from pfedlms.cli.options import add_data_dir, add_json
from pfedlms.cli.screen import best_round, print_table, say, show, study_document, study_table
from pfedlms.errors import UsageError
from pfedlms.report.results import comparison
from pfedlms.report.runs import StoredRun
from pfedlms.report.tables import table_of


def add_show(sub: argparse.ArgumentParser) -> None:
    """Print what a run, comparison or sweep has reached; needs no data."""
    sub.add_argument("directory", metavar="DIR", type=Path)
    sub.add_argument("--clients", action="store_true", help="a table of the clients of a run: samples and P-acc")
    add_data_dir(sub)
    add_json(sub)


def add_export(sub: argparse.ArgumentParser) -> None:
    """Write models as PyTorch state dicts, from the checkpoint alone."""
    sub.add_argument("directory", metavar="DIR", type=Path)
    which = sub.add_mutually_exclusive_group()
    which.add_argument("--client", metavar="K", help="the model of this client: its number from 0, or its name")
    which.add_argument("--global", dest="shared", action="store_true", help="the model all share, before local steps")
    which.add_argument("--all", type=Path, metavar="FOLDER", help="every client's, as FOLDER/client-0.pt, …")
    sub.add_argument("--best", action="store_true", help="after the round with the highest V-acc (train.patience)")
    sub.add_argument("-o", "--output", type=Path, metavar="FILE", help="where to write, for example model.pt")
    add_data_dir(sub)


def show_stored(options: argparse.Namespace) -> int:
    from pfedlms.experiment.export import refuse_study
    from pfedlms.experiment.show import clients_of, stored_study, stored_summary
    from pfedlms.experiment.study import manifest_of

    out = options.directory
    if options.clients:
        refuse_study(out, "show --clients of")
    if manifest_of(out) is not None:
        study = stored_study(out)
        show(options, study_document(study), lambda _: study_table(study), study.runs)
        shown = f"{len(study.runs)} run{'s are' if len(study.runs) != 1 else ' is'} shown"
        unfinished, done = study.interrupted, f"{shown}; not all are finished"
    else:
        summary = stored_summary(out)
        document = {**summary, "directory": str(out)}
        rows = clients_of(out, summary, options.data_dir) if options.clients else []
        run = StoredRun(summary["method"], summary)
        show(options, {**document, "per_client": rows} if rows else document, comparison, [run])
        if rows and not options.json:
            print_table(table_of(rows, "clients"))
        if summary.get("best"):
            say(best_round(summary))
        unfinished, done = summary["status"] == "interrupted", f"after {summary['rounds']} rounds; not finished"
    if unfinished:
        say(f"{done}. {_what_goes_on(out)}")
    return 0


def _what_goes_on(out: Path) -> str:
    """The command, in a sentence; a call, where data, model, loss or metric were given in Python."""
    from pfedlms.experiment.prepare import given_in_python, in_python
    from pfedlms.experiment.run import open_run
    from pfedlms.experiment.store import SERVER_AGAIN, RunDirectory
    from pfedlms.experiment.study import first_tables, manifest_of

    several = manifest_of(out) is not None
    if not several and RunDirectory(out).on_nodes:
        return f"To go on: {SERVER_AGAIN}"
    tables = first_tables(out) if several else open_run(out)[1].tables()
    if not given_in_python(tables):
        return f"Go on with: pfedlms resume {out}"
    return f"Go on with: {in_python('resume_study' if several else 'resume', out, tables)}"


def export(options: argparse.Namespace) -> None:
    from pfedlms.experiment.export import export

    one = options.client is not None or options.shared
    if options.best and not one and options.all is None:
        raise UsageError("export: --best goes with --client K or --global, and -o FILE, or with --all FOLDER")
    if not one and options.all is None:
        raise UsageError("export: say which model: --client K or --global, with -o FILE, or --all FOLDER")
    if one and options.output is None:
        raise UsageError("export: say where to write with -o FILE, for example -o model.pt")
    if not one and options.output is not None:
        raise UsageError(f"export: got --all and -o, expected one of them; --all FOLDER says where: {options.all}")
    target = options.output if one else options.all
    which = {"client": options.client, "shared": options.shared, "best": options.best}
    export(options.directory, target, **which, data_dir=options.data_dir)
    what = "shared model" if options.shared else f"model of client {options.client}" if one else "models of all clients"
    say(f"{what}: {target}")
