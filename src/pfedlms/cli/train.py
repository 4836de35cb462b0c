"""run, compare, sweep, resume: what trains."""

from __future__ import annotations

import argparse
import json
import signal
from pathlib import Path
from typing import Any

from rich.console import Console

from pfedlms.cli.options import (
    a_count,
    add_config,
    add_data_dir,
    add_options,
    add_output,
    add_settings,
    assignments,
    out_directory,
    overrides,
)
from pfedlms.cli.screen import best_round, console, progress_of, say, show, study_document, study_table
from pfedlms.report.charts import check_file
from pfedlms.report.figures import accuracy_curves, by_setting
from pfedlms.report.plans import print_plan, profile
from pfedlms.report.results import comparison, set_up
from pfedlms.report.runs import StoredRun

METHODS = "local,fedavg,pfedlms,sketchvote"


def add_run(sub: argparse.ArgumentParser) -> None:
    """Train one federation and keep everything in a run directory."""
    add_config(sub)
    add_options(sub, "method")
    add_settings(sub)
    sub.add_argument("--dry-run", action="store_true", help="print the plan, bytes and memory; train nothing")
    sub.add_argument("--profile", action="store_true", help="print where the time of a round went")
    add_output(sub)


def add_compare(sub: argparse.ArgumentParser) -> None:
    """Train several methods with several seeds and print one table."""
    add_config(sub)
    sub.add_argument(
        "--methods",
        metavar="A,B,C",
        default=METHODS,
        help=f"methods by name, with settings of their own as pfedlms:thresholds=1:ratio=0.2 (default: {METHODS})",
    )
    sub.add_argument(
        "--seeds", type=a_count, metavar="N", default=3, help="how many seeds, from --seed on (default: 3)"
    )
    add_settings(sub)
    sub.add_argument("--plot", metavar="FILE", help="draw accuracy against bytes; PNG, SVG or PDF (extra: report)")
    add_output(sub)


def add_sweep(sub: argparse.ArgumentParser) -> None:
    """Train one method with every combination of the values that settings are given
    (--set method.ratio=.02,.05,.1 --learning-rate .03,.1), and name the best."""
    add_config(sub)
    add_options(sub, "method")
    sub.add_argument(
        "--seeds", type=a_count, metavar="N", default=1, help="how many seeds, from --seed on (default: 1)"
    )
    help = "v_acc, p_acc or g_acc (default: v_acc with --validation, else p_acc)"
    sub.add_argument("--by", metavar="MEASURE", help=help)
    add_settings(sub)
    help = "draw the measure against a setting; PNG, SVG or PDF (extra: report)"
    sub.add_argument("--plot", metavar="FILE", help=help)
    add_output(sub)


def add_resume(sub: argparse.ArgumentParser) -> None:
    """Go on with an interrupted run, comparison or sweep."""
    sub.add_argument("directory", metavar="DIR", type=Path)
    add_data_dir(sub)
    add_output(sub)


def run(options: argparse.Namespace) -> int:
    from pfedlms.experiment.config import load_config
    from pfedlms.experiment.cost import plan_json
    from pfedlms.experiment.prepare import prepare
    from pfedlms.experiment.run import begin

    config = load_config(options.config, overrides(options))
    if options.dry_run:
        federation = prepare(config)
        plan = plan_json(config, federation)
        if options.json:
            print(json.dumps(plan, indent=2))
        else:
            print_plan(plan, federation.largest_cohort, console())
        return 0
    out = out_directory(options, config.run.out, f"{config.data.title}-{config.method}")
    with progress_of(options) as progress:
        result = begin(config.with_run(out=str(out)), progress, profile=options.profile)
    if options.profile:
        # On standard error, so that it goes with --json too.
        spent = profile(result.federation.watch.seconds, max(1, result.summary["rounds"]))
        Console(stderr=True).print(spent.rich())
    return _report_run(options, result.summary, out, result.stopped)


def compare(options: argparse.Namespace) -> int:
    from pfedlms.experiment.compare import plan, play

    planned = plan(options.config, overrides(options), options.methods, options.seeds)
    first = planned[0].config
    out = out_directory(options, first.run.out, f"{first.data.title}-compare")
    if options.plot:
        check_file(options.plot)
    with progress_of(options) as progress:
        done = play(planned, out, None, None, progress)
    code = _report_study(options, done)
    if options.plot and not done.interrupted:
        figure = accuracy_curves(done.results, against="bytes", title=set_up(done.results[0]))
        if figure is not None:
            figure.save(options.plot)
    return code


def sweep(options: argparse.Namespace) -> int:
    from pfedlms.experiment.config import method_in, parse_overrides
    from pfedlms.experiment.sweep import plan, play, split_values

    method = vars(options)["method.name"] or method_in(options.config)
    single, axes = split_values(assignments(options), method)
    planned, by = plan(options.config, parse_overrides(single), axes, options.seeds, options.by)
    first = planned[0].config
    out = out_directory(options, first.run.out, f"{first.data.title}-{first.method}-sweep")
    if options.plot:
        check_file(options.plot)
    with progress_of(options) as progress:
        done = play(planned, axes, by, out, None, None, progress)
    code = _report_study(options, done)
    if options.plot and done.best:
        figure = by_setting(done.section, f"{first.method} on {set_up(done.results[0], axes)}")
        if figure is not None:
            figure.save(options.plot)
    return code


def resume(options: argparse.Namespace) -> int:
    from pfedlms.experiment import studies
    from pfedlms.experiment.run import go_on
    from pfedlms.experiment.study import manifest_of

    out = options.directory
    if manifest_of(out) is not None:
        with progress_of(options) as progress:
            done = studies.go_on(out, progress=progress, data_dir=options.data_dir)
        return _report_study(options, done)
    with progress_of(options) as progress:
        result = go_on(out, progress=progress, data_dir=options.data_dir)
    return _report_run(options, result.summary, out, result.stopped)


def _report_run(options: argparse.Namespace, summary: dict[str, Any], out: Path, stopped: int) -> int:
    shown = [StoredRun(summary["method"], summary)] if summary["accuracy"]["max"] is not None else []
    if summary.get("best") and not options.quiet:
        say(best_round(summary))
    show(options, {**summary, "directory": str(out)}, comparison, shown)
    interrupted = f"after {summary['rounds']} rounds" if summary["status"] == "interrupted" else None
    return _closing(out, interrupted, stopped)


def _report_study(options: argparse.Namespace, study: Any) -> int:
    """The table or the document of a comparison or sweep."""
    show(options, study_document(study), lambda _: study_table(study), study.runs)
    finished = sum(summary["status"] == "finished" for summary in study.runs)
    best = getattr(study, "best", None)
    if best and not study.interrupted:
        score = f"{best['score']:.4g}" if "metric" in best["runs"][0] else f"{best['score']:.2f} %"
        say(f"best by {study.by}: {best['name']} ({score})")
    done = f"with {finished} run{'s' * (finished != 1)} finished" if study.interrupted else None
    code = _closing(study.directory, done, study.signal)
    if study.broken:
        say("error: not all runs came to an end; the warnings above say why and what to change")
    return code or int(study.broken)


def _closing(out: Path, interrupted: str | None, stopped: int) -> int:
    """The closing words, also of a quiet call, and the exit code: 128 + the signal that interrupted."""
    if interrupted:
        say(f"interrupted {interrupted}; all of it is kept. Go on with: pfedlms resume {out}")
        return 128 + (stopped or signal.SIGINT)
    say(f"results: {out}")
    return 0
