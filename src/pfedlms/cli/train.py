"""run, compare, sweep, resume, reproduce: what trains."""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path
from typing import Any

from rich.console import Console

from pfedlms.cli.options import (
    add_options,
    add_study,
    assignments,
    best_round_text,
    out_directory,
    overrides,
    print_message,
    print_output,
    print_table,
)
from pfedlms.errors import UsageError
from pfedlms.experiment.schema import DEFAULT_METHODS
from pfedlms.report.progress import screen
from pfedlms.report.runs import score_text


def add_run(sub: argparse.ArgumentParser) -> None:
    """Train one federation and keep everything in a run directory."""
    add_options(sub, "config", "method", "settings", "--import")
    sub.add_argument("--dry-run", action="store_true", help="print the plan, bytes and memory; train nothing")
    sub.add_argument("--profile", action="store_true", help="print where the time of a round went")
    add_options(sub, "--json", "--quiet")


def add_compare(sub: argparse.ArgumentParser) -> None:
    """Train several methods with several seeds and print one table."""
    add_options(sub, "config", "--import")
    help, default = (
        "methods by name, with settings of their own as pfedlms:thresholds=1:ratio=0.2",
        ",".join(DEFAULT_METHODS),
    )
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
    add_options(sub, "directory", "--workers", "--moved", "--import", "--json", "--quiet")


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
        print_output(options, document, plans.plan, [document])
        return 0
    out = out_directory(options, config.run.out, f"{config.data.title}-{config.method}")
    with screen(not options.quiet) as callbacks:
        done = start_run(config.with_run(out=str(out)), callbacks=callbacks, profile=options.profile)
    if options.profile:
        # On standard error, so that it goes with --json too.
        print_table(plans.profile(done.summary.get("stages", {}), max(1, done.summary["rounds"])), Console(stderr=True))
    return _report(options, done)


def compare(options: argparse.Namespace) -> int:
    from pfedlms.experiment.grids import plan_grid

    return _study(options, plan_grid(options.config, overrides(options), options.methods, {}, options.seeds), "compare")


def sweep(options: argparse.Namespace) -> int:
    from pfedlms.experiment.config import method_in, parse_overrides
    from pfedlms.experiment.grids import check_has_axes, plan_grid, split_values

    method = vars(options)["method.name"] or method_in(options.config)
    single, axes = split_values(assignments(options), method)
    check_has_axes(axes)
    made = plan_grid(options.config, parse_overrides(single), [method], axes, options.seeds, options.by)
    return _study(options, made, f"{method}-sweep")


def _study(options: argparse.Namespace, made: Any, label: str) -> int:
    from pfedlms.report.charts import check_file

    first = made.planned[0].config
    out = out_directory(options, first.run.out, f"{first.data.title}-{label}")
    if options.plot:
        check_file(options.plot)
    with screen(not options.quiet) as callbacks:
        done = made.start(out, callbacks, options.workers)
    code = _report(options, done)
    if options.plot and not done.interrupted:
        done.plot(options.plot)
    return code


def resume(options: argparse.Namespace) -> int:
    from pfedlms.experiment.api import Study, load

    found = load(options.directory, data_dir=options.data_dir)
    workers = (options.workers,) if isinstance(found, Study) else ()
    with screen(not options.quiet) as callbacks:
        return _report(options, found.train(callbacks, *workers))


def print_results(options: argparse.Namespace, found: Any, **more: Any) -> None:
    """The table of a study, or of a run with its best round; or the document for machines."""
    from pfedlms.experiment.api import Study
    from pfedlms.report.results import comparison

    if isinstance(found, Study):
        best = found.best() if found.axes else None
        shown = best and {key: value for key, value in best.items() if key != "runs"}
        swept = {"axes": found.axes, "by": found.by, "best": shown} if found.axes else {}
        document = {"directory": str(found.directory), **swept, "runs": found.summaries}
        print_output(options, document, lambda _: found.as_table(), found.runs)
        return
    rows = [found] if found.summary["accuracy"]["max"] is not None else []
    print_output(options, {**found.summary, "directory": str(found.directory), **more}, comparison, rows)
    if found.summary.get("best") and not getattr(options, "quiet", False):
        print_message(best_round_text(found.summary))


def _report(options: argparse.Namespace, found: Any) -> int:
    """Show a run or study, name its folder and how to resume it; the exit code: 128 + the signal that interrupted."""
    from pfedlms.experiment.api import Study
    from pfedlms.experiment.problem import resume_instruction

    print_results(options, found)
    study = found if isinstance(found, Study) else None
    finished = sum(run.summary["status"] == "finished" for run in study.runs) if study else 0
    if found.interrupted:
        so_far = (
            f"with {finished} run{'s' * (finished != 1)} finished"
            if study
            else f"after {found.summary['rounds']} rounds"
        )
        resume = resume_instruction(found.directory, found.settings)
        print_message(f"interrupted {so_far}; all of it is saved. Resume with: {resume}")
    else:
        if study and study.axes and (best := study.best()):
            print_message(f"best by {study.by}: {best['name']} ({score_text(best['score'], best['runs'][0])})")
        print_message(f"results: {found.directory}")
    if study and study.broken:
        print_message("error: not all runs finished; the warnings above say why and what to change")
    return 128 + (found.stopped or signal.SIGINT) if found.interrupted else int(bool(study and study.broken))


def reproduce(options: argparse.Namespace) -> int:
    """`python -m papers.pfedlms`, where a clone of the repository has it."""
    clone = Path(__file__).parents[3]
    if (clone / "papers" / "pfedlms").is_dir() and str(clone) not in sys.path:
        sys.path.append(str(clone))
    try:
        from papers.pfedlms.__main__ import main
    except ModuleNotFoundError as error:
        if not str(error.name).startswith("papers"):
            raise
        raise UsageError(
            "reproduce: the tables of the paper are not in the installed package, but in the folder papers/ of its "
            "repository; clone that and repeat the command there"
        ) from error
    return main(options.rest, "pfedlms reproduce")
