"""show, export, report: commands that read folders of runs and train nothing."""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from pfedlms.cli.options import add_options, print_table, say
from pfedlms.cli.train import how_to_resume, print_results
from pfedlms.errors import PfedlmsError, RunDirectoryError, UsageError, reason
from pfedlms.report.runs import RunLike, Section, group_by_problem

_DEPTH = 4
"""How many levels of folders are searched for runs."""


def add_show(sub: argparse.ArgumentParser) -> None:
    """Print the results of a run, comparison or sweep; needs no data."""
    add_options(sub, "directory")
    sub.add_argument("--clients", action="store_true", help="a table of the clients of a run: samples and P-acc")
    add_options(sub, "--data-dir", "--import", "--json")


def add_export(sub: argparse.ArgumentParser) -> None:
    """Write models, from the checkpoint alone; the suffix decides the format: .pt (a PyTorch state dict) or .onnx."""
    add_options(sub, "directory")
    which = sub.add_mutually_exclusive_group(required=True)
    which.add_argument("--client", metavar="K", help="the model of this client: its number from 0, or its name")
    which.add_argument("--global", dest="shared", action="store_true", help="the model all share, before local steps")
    which.add_argument("--all", type=Path, metavar="FOLDER", help="every client's, as FOLDER/client-0.pt, …")
    sub.add_argument("--best", action="store_true", help="after the round with the highest V-acc (train.patience)")
    sub.add_argument("-o", "--output", type=Path, metavar="FILE", help="where to write: model.pt or model.onnx")
    add_options(sub, "--data-dir", "--import")


def add_report(sub: argparse.ArgumentParser) -> None:
    """Write one self-contained page from runs, comparisons and sweeps: tables and figures, settings, raw data; needs no
    data set and trains nothing."""
    help = "folders of runs, comparisons or sweeps, or folders that hold such"
    sub.add_argument("directories", metavar="DIR", nargs="+", type=Path, help=help)
    help = "the page (default: report.html)"
    sub.add_argument("-o", "--output", metavar="FILE", type=Path, default=Path("report.html"), help=help)
    help = "also write every figure as SVG and its data as CSV there"
    sub.add_argument("--figures", metavar="FOLDER", type=Path, help=help)
    add_options(sub, "--import")


def show(options: argparse.Namespace) -> int:
    from pfedlms.experiment.api import Run, load
    from pfedlms.experiment.runs import per_client
    from pfedlms.experiment.studies import refuse_study
    from pfedlms.experiment.summary import one_line_summary
    from pfedlms.report.tables import table_from_records

    if options.clients:
        refuse_study(options.directory, "show --clients of")
    result = load(options.directory, data_dir=options.data_dir)
    rows = per_client(result) if isinstance(result, Run) and options.clients else []
    print_results(options, result, **({"per_client": rows} if rows else {}))
    if rows and not options.json:
        print_table(table_from_records(rows))
    if result.interrupted:
        say(how_to_resume(result, "not finished"))
    elif isinstance(result, Run) and result.summary["status"] != "finished":
        say(one_line_summary(result.summary))
    return 0


def export(options: argparse.Namespace) -> None:
    from pfedlms.experiment.api import export

    if (options.all is None) == (options.output is None):
        raise UsageError("export: expected --client K or --global with -o FILE, or --all FOLDER, which takes no -o")
    target = options.output or options.all
    which = {"client": options.client, "shared": options.shared, "best": options.best}
    export(options.directory, target, **which, data_dir=options.data_dir)
    what = "models of all clients" if options.all else f"model of client {options.client}"
    say(f"{'shared model' if options.shared else what}: {target}")


def report(options: argparse.Namespace) -> None:
    from pfedlms.report.page import write_page

    sections, left_out = sections_of(options.directories)
    written = write_page(sections, options.output, options.figures, left_out)
    say(f"report: {written[0]}" + (f"; {len(written) - 1} files in {options.figures}" if options.figures else ""))


def sections_of(directories: Iterable[str | Path]) -> tuple[list[Section], list[str]]:
    """The studies in these folders, and the single runs grouped by problem; then the runs that were left out, with the
    reason. A run that cannot be read is left out with a warning; an error is raised only if none can be read."""
    from pfedlms.experiment.store import is_study
    from pfedlms.experiment.studies import Study, read_manifest

    folders = {folder.resolve(): folder for each in directories for folder in _find_folders(Path(each))}
    sections: list[Section] = []
    single_runs: list[RunLike] = []
    left_out: list[str] = []
    for folder in folders.values():
        if not is_study(folder):
            single_runs += _read(folder, "", left_out)
            continue
        manifest = read_manifest(folder)
        names = manifest["names"]
        runs = [run for name in manifest["runs"] for run in _read(folder / name, names.get(name, ""), left_out)]
        if runs:
            sections.append(Study(runs, folder.resolve(), manifest["axes"], manifest["by"], runs).section())
    sections += group_by_problem(single_runs)
    for why in left_out:
        warnings.warn(f"left out of the page: {why}", stacklevel=2)
    if not sections:
        raise RunDirectoryError(
            f"{', '.join(map(str, directories))}: no run with an evaluation here, expected folders of runs, "
            "comparisons or sweeps; pfedlms run, compare and sweep make them (--out DIR)"
        )
    return sections, left_out


def _find_folders(directory: Path, depth: int = _DEPTH) -> Iterator[Path]:
    """The folders of studies and of single runs in `directory`: itself or below."""
    from pfedlms.experiment.store import is_study

    if is_study(directory) or (directory / "config.toml").is_file():
        yield directory
    elif not directory.is_dir():
        raise RunDirectoryError(f"{directory}: there is no such folder; expected one of a run, comparison or sweep")
    elif depth:
        for child in sorted(directory.iterdir()):
            if child.is_dir() and not child.name.startswith("."):
                yield from _find_folders(child, depth - 1)


def _read(directory: Path, label: str, left_out: list[str]) -> list[Any]:
    """The run in `directory` as a list; empty, with the reason in `left_out`, if it has no evaluation to read."""
    from pfedlms.experiment.runs import load_run

    if not directory.exists():
        left_out.append(f"{directory}: this run has not begun")
        return []
    try:
        run = load_run(directory, label=label)
        if run.summary and run.metrics:
            return [run]
        why = "no evaluation yet"
    except (PfedlmsError, KeyError, TypeError) as error:  # of another version, or cut off
        why = str(error) if isinstance(error, PfedlmsError) else reason(error)
    left_out.append(f"{directory}: {why.removeprefix(f'{directory}: ')}")
    return []
