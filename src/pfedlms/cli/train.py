"""run, compare, sweep, resume, reproduce: the commands that train."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from pfedlms.cli.options import add_options, add_study, out_directory, output, overrides, print_table, say
from pfedlms.errors import UsageError
from pfedlms.experiment.schema import DEFAULT_METHODS
from pfedlms.report.progress import progress_callbacks
from pfedlms.report.runs import score_text
from pfedlms.report.tables import count_text


def add_run(sub: argparse.ArgumentParser) -> None:
    """Train one federation and keep everything in a run directory."""
    add_options(sub, "config", "method", "settings", "--import")
    sub.add_argument("--dry-run", action="store_true", help="print the plan, bytes and memory; train nothing")
    sub.add_argument("--profile", action="store_true", help="print where the time of a round went")
    add_options(sub, "--json", "--quiet")


def add_compare(sub: argparse.ArgumentParser) -> None:
    """Train several methods with several seeds and print one table."""
    add_options(sub, "config", "--import")
    default = ",".join(DEFAULT_METHODS)
    help = "methods by name, with settings of their own as pfedlms:thresholds=1:ratio=0.2"
    sub.add_argument("--methods", metavar="A,B,C", default=default, help=f"{help} (default: {default})")
    add_study(sub, seeds=3)


def add_sweep(sub: argparse.ArgumentParser) -> None:
    """Train one method with every combination of the values that settings are given
    (--set method.ratio=.02,.05,.1 --learning-rate .03,.1), and name the best."""
    add_options(sub, "config", "method", "--import")
    help = "v_acc, p_acc or g_acc (default: v_acc with --validation, else p_acc)"
    sub.add_argument("--by", metavar="MEASURE", help=help)
    add_study(sub, seeds=1)


def add_resume(sub: argparse.ArgumentParser) -> None:
    """Resume an interrupted run, comparison or sweep."""
    add_options(sub, "directory", "--workers", "--data-dir", "--import", "--json", "--quiet")


def add_reproduce(sub: argparse.ArgumentParser) -> None:
    """Its options are those of `python -m papers.pfedlms`."""


def run(options: argparse.Namespace) -> int:
    from pfedlms.experiment.config import load_config
    from pfedlms.experiment.cost import plan_json
    from pfedlms.experiment.prepare import prepare
    from pfedlms.experiment.runs import start_run
    from pfedlms.report import plans

    config = load_config(options.config, overrides(options))
    if options.dry_run:
        document = plan_json(config, prepare(config))
        output(options, document, plans.plan_table, [document])
        return 0
    out = out_directory(options, config.run.out, f"{config.data.title}-{config.method}")
    with progress_callbacks(not options.quiet) as callbacks:
        result = start_run(config.with_run(out=str(out)), callbacks=callbacks, profile=options.profile)
    if options.profile:
        profile = plans.profile_table(result.summary.get("stages", {}), max(1, result.summary["rounds"]))
        print_table(profile, Console(stderr=True))  # standard output may have JSON
    return _report(options, result)


def compare(options: argparse.Namespace) -> int:
    return _train_study(options, options.methods, "compare")


def sweep(options: argparse.Namespace) -> int:
    from pfedlms.experiment.config import method_in
    from pfedlms.experiment.grids import refuse_single_values, split_axes

    refuse_single_values(split_axes(overrides(options))[1])
    method = vars(options)["method.name"] or method_in(options.config)
    return _train_study(options, method, f"{method}-sweep", options.by)


def _train_study(options: argparse.Namespace, methods: str, label: str, by: str | None = None) -> int:
    from pfedlms.experiment.grids import grid_rows, plan_study, split_axes
    from pfedlms.report.charts import check_file

    settings, values = split_axes(overrides(options))
    study = plan_study(options.config, settings, *grid_rows({"method": methods, **values}), options.seeds, by)
    first = study.planned[0].config
    out = out_directory(options, first.run.out, f"{first.data.title}-{label}")
    if options.plot:
        check_file(options.plot)
    with progress_callbacks(not options.quiet) as callbacks:
        result = study.start(out, callbacks, options.workers)
    code = _report(options, result)
    if options.plot and not result.interrupted:
        result.plot(options.plot)
    return code


def resume(options: argparse.Namespace) -> int:
    from pfedlms.experiment.api import Study, load

    stored = load(options.directory, data_dir=options.data_dir)
    workers = (options.workers,) if isinstance(stored, Study) else ()
    with progress_callbacks(not options.quiet) as callbacks:
        return _report(options, stored.train(callbacks, *workers))


def print_results(options: argparse.Namespace, result: Any, **fields: Any) -> None:
    """Print the table of a study, or of a run with its best round; with --json a document that has `fields`, too."""
    from pfedlms.experiment.api import Study
    from pfedlms.report.results import comparison

    if isinstance(result, Study):
        best = result.best() if result.axes else None
        best_cell = best and {key: value for key, value in best.items() if key != "runs"}
        sweep = {"axes": result.axes, "by": result.by, "best": best_cell} if result.axes else {}
        document = {"directory": str(result.directory), **sweep, "runs": result.summaries}
        output(options, document, lambda _: result.as_table(), result.runs)
        return
    rows = [result] if result.summary["accuracy"]["max"] is not None else []
    output(options, {**result.summary, "directory": str(result.directory), **fields}, comparison, rows)
    if result.summary.get("best") and not getattr(options, "quiet", False):
        say(_best_round_text(result.summary))


def _best_round_text(summary: Mapping[str, Any]) -> str:
    """A sentence about the best round by V-acc of a run that has one, and about early stopping."""
    best = summary["best"]
    has_models = "stopped_early" in summary and "transport" not in summary  # nodes keep their latest model only
    where = "; its models: pfedlms export --best" if has_models else ""
    early = f"stopped early after {count_text(summary['rounds'], 'round')}: " if summary.get("stopped_early") else ""
    return f"{early}V-acc was highest in round {best['round']}, {score_text(best['v_acc'], summary)}{where}"


def _report(options: argparse.Namespace, result: Any) -> int:
    """Print a run or study, its folder and how to resume it. Returns the exit code: 128 + the signal that interrupted
    it, 1 if a run failed, else 0."""
    from pfedlms.experiment.api import Study

    print_results(options, result)
    broken = isinstance(result, Study) and result.broken
    if result.interrupted:
        say(f"interrupted {how_to_resume(result, 'all of it is saved')}")
    else:
        if isinstance(result, Study) and result.axes and (best := result.best()):
            say(f"best by {result.by}: {best['name']} ({score_text(best['score'], best['runs'][0])})")
        say(f"results: {result.directory}")
    if broken:
        say("error: not all runs finished; the warnings above say why and what to change")
    return 128 + (result.stopped or signal.SIGINT) if result.interrupted else int(broken)


def how_to_resume(result: Any, state: str) -> str:
    """How far an interrupted run or study is, its state in words, and how to resume it."""
    from pfedlms.experiment.api import Study
    from pfedlms.experiment.problem import resume_instruction
    from pfedlms.experiment.store import RESTART_SERVER, RunDirectory

    if isinstance(result, Study):
        finished = sum(run.summary["status"] == "finished" for run in result.runs)
        so_far = f"with {finished} of {count_text(len(result.planned), 'run')} finished"
    else:
        so_far = f"after {count_text(result.summary['rounds'], 'round')}"
    if any(run.summary["status"] == "running" for run in getattr(result, "runs", [result])):
        return f"{so_far}; it is being trained now"
    on_nodes = RunDirectory(result.directory).on_nodes
    command = RESTART_SERVER if on_nodes else resume_instruction(result.directory, result.settings)
    return f"{so_far}; {state}. Resume with: {command}"


def reproduce(options: argparse.Namespace) -> int:
    """Run `python -m papers.pfedlms`, if this is a clone of the repository."""
    clone = Path(__file__).parents[3]
    if not (clone / "papers" / "pfedlms").is_dir():
        raise UsageError(
            "reproduce: the tables of the paper are not in the installed package, but in the folder papers/ of its "
            "repository; clone that and repeat the command there"
        )
    sys.path.append(str(clone))
    from papers.pfedlms.__main__ import main

    return main(options.rest, "pfedlms reproduce")
