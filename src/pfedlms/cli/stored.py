"""show, export, report: from folders of runs, without training."""

from __future__ import annotations

import argparse
from pathlib import Path

from pfedlms.cli.options import add
from pfedlms.cli.screen import best_round, say, show, show_table
from pfedlms.cli.train import show_study
from pfedlms.errors import UsageError


def add_show(sub: argparse.ArgumentParser) -> None:
    """Print the results of a run, comparison or sweep; needs no data."""
    add(sub, "directory")
    sub.add_argument("--clients", action="store_true", help="a table of the clients of a run: samples and P-acc")
    add(sub, "--moved", "--import", "--json")


def add_export(sub: argparse.ArgumentParser) -> None:
    """Write models, from the checkpoint alone; the suffix decides the format: .pt (a PyTorch state dict) or .onnx."""
    add(sub, "directory")
    which = sub.add_mutually_exclusive_group()
    which.add_argument("--client", metavar="K", help="the model of this client: its number from 0, or its name")
    which.add_argument("--global", dest="shared", action="store_true", help="the model all share, before local steps")
    which.add_argument("--all", type=Path, metavar="FOLDER", help="every client's, as FOLDER/client-0.pt, …")
    sub.add_argument("--best", action="store_true", help="after the round with the highest V-acc (train.patience)")
    sub.add_argument("-o", "--output", type=Path, metavar="FILE", help="where to write: model.pt or model.onnx")
    add(sub, "--moved", "--import")


def add_report(sub: argparse.ArgumentParser) -> None:
    """Write one self-contained page from runs, comparisons and sweeps: tables and figures, settings, raw data; needs no
    data set and trains nothing."""
    help = "folders of runs, comparisons or sweeps, or folders that hold such"
    sub.add_argument("directories", metavar="DIR", nargs="+", type=Path, help=help)
    help = "the page (default: report.html)"
    sub.add_argument("-o", "--output", metavar="FILE", type=Path, default=Path("report.html"), help=help)
    help = "also write every figure as SVG and its data as CSV there"
    sub.add_argument("--figures", metavar="FOLDER", type=Path, help=help)
    add(sub, "--import")


def show_stored(options: argparse.Namespace) -> int:
    from pfedlms.experiment.runs import load_run, per_client
    from pfedlms.experiment.studies import load_study, manifest_of, refuse_study
    from pfedlms.report.results import comparison
    from pfedlms.report.tables import table_of

    out = options.directory
    if options.clients:
        refuse_study(out, "show --clients of")
    if manifest_of(out) is not None:
        study = load_study(out)
        show_study(options, study)
        shown = f"{len(study.runs)} run{'s are' if len(study.runs) != 1 else ' is'} shown"
        unfinished, done = study.interrupted, f"{shown}; not all are finished"
    else:
        run = load_run(out, data_dir=options.data_dir)
        rows = per_client(run, look_up=bool(options.data_dir)) if options.clients else []
        document = {**run.summary, "directory": str(out), **({"per_client": rows} if rows else {})}
        show(options, document, comparison, [run])
        if rows and not options.json:
            show_table(table_of(rows))
        if run.summary.get("best"):
            say(best_round(run.summary))
        unfinished, done = run.summary["status"] == "interrupted", f"after {run.summary['rounds']} rounds; not finished"
    if unfinished:
        say(f"{done}. {_how_to_resume(out)}")
    return 0


def _how_to_resume(out: Path) -> str:
    """The command, in a sentence; a call, where data, model, loss or metric were given in Python."""
    from pfedlms.experiment.plugins import resume_command
    from pfedlms.experiment.problem import call, given_in_python
    from pfedlms.experiment.runs import open_run
    from pfedlms.experiment.store import SERVER_AGAIN, RunDirectory
    from pfedlms.experiment.studies import first_tables, manifest_of

    several = manifest_of(out) is not None
    if not several and RunDirectory(out).on_nodes:
        return f"To continue: {SERVER_AGAIN}"
    tables = first_tables(out) if several else open_run(out)[1].tables()
    if not given_in_python(tables):
        return f"Resume with: {resume_command(out)}"
    return f"Resume with: {call('resume_study' if several else 'resume', out, tables)}"


def export(options: argparse.Namespace) -> None:
    from pfedlms.experiment.api import export

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


def report(options: argparse.Namespace) -> None:
    from pfedlms.cli.folders import sections_of
    from pfedlms.report.page import write_page

    sections, left_out = sections_of(options.directories)
    written = write_page(sections, options.output, options.figures, left_out)
    say(f"report: {written[0]}" + (f"; {len(written) - 1} files in {options.figures}" if options.figures else ""))
