"""The command line: thin functions over `experiment` and `report`."""

from __future__ import annotations

import argparse
import io
import json
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NoReturn

from rich.console import Console

from pfedlms import __version__
from pfedlms.errors import PfedlmsError, UsageError, did_you_mean
from pfedlms.report.plots import accuracy_against_bytes, accuracy_by_setting, check_plot, who_holds_what
from pfedlms.report.tables import (
    bits_table_of,
    clients_table,
    comparison_table,
    plain_table,
    print_plan,
    profile_table,
    sweep_table,
)
from pfedlms.suggest import suggestion

DESCRIPTION = """\
Personalised federated learning that talks in low-bit sketches.

commands:
  compare            several methods x seeds, one table; without options:
                     local, fedavg, pfedlms and sketchvote on digits
  run [CONFIG]       one method; --dry-run prints the plan, bytes and memory
  sweep              one method, every combination of some settings' values
  resume DIR         go on with an interrupted run, comparison or sweep
  show DIR           print what one reached, finished or not; needs no data
  export DIR         write models: --client K, --global, or --all FOLDER
  data show          who holds what; download NAME: fetch; check: what is there
  bits               bits per client and round of any model, method and setting
  methods, datasets, models, settings
                     what there is to choose from

Each command explains itself: pfedlms run --help. Any setting can be given, too:
  pfedlms run --method pfedlms --set method.thresholds=3 --set data.alpha=0.1
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code: 0 done, 1 a run failed, 2 wrong use, 130 interrupted by Ctrl-C, 143 by
    SIGTERM."""
    parser = _parser()
    options, unknown = parser.parse_known_args(arguments)
    if unknown:
        parser.refuse(options.command, unknown[0])
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # an old terminal shows "?" for "±" instead of a traceback
    warnings.showwarning = lambda message, *rest, **more: _say(f"warning: {message}")
    try:
        return int(options.handler(options) or 0)
    except PfedlmsError as error:
        lines = str(error).splitlines()
        title = lines if len(lines) == 1 else [f"{len(lines)} problems in the settings", *lines]
        _say("error: " + "\n  ".join(title), style="red")
        return error.exit_code
    except KeyboardInterrupt:
        _say("interrupted; a run directory keeps its latest checkpoint: pfedlms resume DIR")
        return 130
    except BrokenPipeError:
        # The reader of our output is gone (for example `| head`); there is nobody left to tell.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        # What fails while a run is stored is a StorageError; the rest is about a path that was given.
        _say(f"error: {error.filename}: {error.strerror}")
        return 2


class _Parser(argparse.ArgumentParser):
    def refuse(self, command: str, option: str) -> NoReturn:
        """An option the command does not have, with what was probably meant."""
        parsers = next(each.choices for each in self._actions if isinstance(each, argparse._SubParsersAction))
        known = {
            name: [option for option in parser._option_string_actions if option.startswith("--")]
            for name, parser in parsers.items()
        }
        parser: _Parser = parsers[command]
        parser.error(f"unknown argument {option!r}; {suggestion(option, known[command], known)}")

    def error(self, message: str) -> NoReturn:
        """One readable line; argparse's own lists of choices are replaced by the nearest name."""
        if "invalid choice: " in message:
            wrong = message.split("invalid choice: ")[1].rsplit(" (choose", 1)[0]
            message = f"unknown command {wrong}; {did_you_mean(wrong, COMMANDS)}"
        self.exit(2, f"error: {message}\nsee: {self.prog} --help\n")


def _parser() -> _Parser:
    parser = _Parser(
        prog="pfedlms",
        description=DESCRIPTION,
        usage="pfedlms COMMAND [OPTIONS]",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"pfedlms {__version__}")
    commands = parser.add_subparsers(
        dest="command", required=True, metavar="COMMAND", help=argparse.SUPPRESS, parser_class=_Parser, prog="pfedlms"
    )

    def command(name: str, handler: Any, help: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, description=help, allow_abbrev=False)
        sub.set_defaults(handler=handler)
        return sub

    sub = command("run", _run, "Train one federation and keep everything in a run directory.")
    sub.add_argument("config", nargs="?", metavar="CONFIG", help="a TOML file; options below come on top of it")
    sub.add_argument("--method", dest="method.name", metavar="NAME", help="method by name (pfedlms methods)")
    _add_settings(sub)
    sub.add_argument("--dry-run", action="store_true", help="print the plan, bytes and memory; train nothing")
    sub.add_argument("--profile", action="store_true", help="print where the time of a round went")
    _add_output(sub)

    sub = command("compare", _compare, "Train several methods with several seeds and print one table.")
    sub.add_argument("config", nargs="?", metavar="CONFIG", help="a TOML file; options below come on top of it")
    methods = "local,fedavg,pfedlms,sketchvote"
    sub.add_argument(
        "--methods",
        metavar="A,B,C",
        default=methods,
        help=f"methods by name, with settings of their own as pfedlms:thresholds=1:ratio=0.2 (default: {methods})",
    )
    sub.add_argument("--seeds", type=int, metavar="N", default=3, help="how many seeds, from --seed on (default: 3)")
    _add_settings(sub)
    sub.add_argument("--plot", metavar="FILE", help="draw accuracy against bytes; PNG, SVG or PDF (extra: report)")
    _add_output(sub)

    sub = command(
        "sweep",
        _sweep,
        "Train one method with every combination of the values that settings are given "
        "(--set method.ratio=.02,.05,.1 --learning-rate .03,.1), and name the best.",
    )
    sub.add_argument("config", nargs="?", metavar="CONFIG", help="a TOML file; options below come on top of it")
    sub.add_argument("--method", dest="method.name", metavar="NAME", help="method by name (default: pfedlms)")
    sub.add_argument("--seeds", type=int, metavar="N", default=1, help="how many seeds, from --seed on (default: 1)")
    sub.add_argument(
        "--by", metavar="MEASURE", help="v_acc, p_acc or g_acc (default: v_acc with --validation, else p_acc)"
    )
    _add_settings(sub)
    sub.add_argument(
        "--plot", metavar="FILE", help="draw the measure against a setting; PNG, SVG or PDF (extra: report)"
    )
    _add_output(sub)

    sub = command("resume", _resume, "Go on with an interrupted run, comparison or sweep.")
    sub.add_argument("directory", metavar="DIR", type=Path)
    _add_data_dir(sub)
    _add_output(sub)

    sub = command("show", _show_stored, "Print what a run, comparison or sweep has reached; needs no data.")
    sub.add_argument("directory", metavar="DIR", type=Path)
    sub.add_argument("--clients", action="store_true", help="a table of the clients of a run: samples and P-acc")
    _add_data_dir(sub)
    sub.add_argument("--json", action="store_true", help="print JSON")

    sub = command("export", _export, "Write models as PyTorch state dicts, from the checkpoint alone.")
    sub.add_argument("directory", metavar="DIR", type=Path)
    which = sub.add_mutually_exclusive_group()
    which.add_argument("--client", type=int, metavar="K", help="the model of this client, from 0")
    which.add_argument("--global", dest="shared", action="store_true", help="the model all share, before local steps")
    which.add_argument("--all", type=Path, metavar="FOLDER", help="every client's, as FOLDER/client-0.pt, …")
    sub.add_argument("-o", "--output", type=Path, metavar="FILE", help="where to write, for example model.pt")
    _add_data_dir(sub)

    sub = command(
        "data",
        _data,
        "show: who holds what, clients x classes; nothing is trained. download NAME: fetch the files of a data set, "
        "going on with what was begun. check [NAME]: which data sets are there, whole or what is wrong.",
    )
    sub.add_argument("what", metavar="show|download|check", help="what to do")
    sub.add_argument(
        "config",
        nargs="?",
        metavar="CONFIG|NAME",
        help="show: a TOML file, options below come on top of it; else the name of a data set",
    )
    _add_data(sub)
    sub.add_argument("--clients", dest="data.clients", metavar="K", help="number of clients (default: 20)")
    sub.add_argument("--alpha", dest="data.alpha", metavar="A", help="α of the Dirichlet partition (default: 0.5)")
    sub.add_argument(
        "--partition", dest="data.partition", metavar="NAME", help="dirichlet, classes, iid, quantity, given"
    )
    sub.add_argument("--seed", dest="run.seed", metavar="N", help="names every random stream (default: 0)")
    _add_set(sub)
    sub.add_argument("--plot", metavar="FILE", help="draw it, too; PNG, SVG or PDF (extra: report)")
    sub.add_argument("--json", action="store_true", help="print JSON and nothing else on standard output")

    sub = command(
        "bits",
        _bits,
        "Bits of one client and round, from messages that are encoded and decoded; "
        "FedProto as if every client held every class.",
    )
    sub.add_argument("--method", dest="method.name", metavar="NAME", help="method by name (default: all)")
    sub.add_argument("--model", dest="model.name", metavar="NAME", help="model by name (default: the data set's)")
    sub.add_argument("--classes", type=int, metavar="C", help="number of classes (default: the data set's)")
    sub.add_argument("--clients", dest="data.clients", metavar="K", help="number of clients (default: 20)")
    sub.add_argument(
        "--dataset",
        dest="data.dataset",
        metavar="NAME",
        help="take sample shape, model and classes from this data set (default: mnist; 32x32 images for vgg)",
    )
    _add_set(sub)
    sub.add_argument("--json", action="store_true", help="print JSON")

    for name in ("methods", "datasets", "models", "settings"):
        command(name, _list, f"List the {name}.").add_argument("--json", action="store_true", help="print JSON")
    return parser


COMMANDS = (
    "run", "compare", "sweep", "resume", "show", "export", "data", "bits", "methods", "datasets", "models", "settings",
)  # fmt: skip


def _add_settings(sub: argparse.ArgumentParser) -> None:
    """Options that stand for a setting are stored under its name."""
    _add_data(sub)
    for name, dest, metavar, help in (
        ("model", "model.name", "NAME", "model by name (pfedlms models)"),
        ("clients", "data.clients", "K", "number of clients"),
        ("alpha", "data.alpha", "A", "of the Dirichlet partition; small: few classes each"),
        ("validation", "data.validation", "SHARE", "of training samples, set aside to choose settings by"),
        ("rounds", "train.rounds", "N", "communication rounds"),
        ("participation", "train.participation", "SHARE", "of the clients, that takes part in a round"),
        ("local-steps", "train.local_steps", "E", "steps of a client in a round"),
        ("batch-size", "train.batch_size", "N", "samples of a step"),
        ("learning-rate", "train.learning_rate", "ETA", "of the local steps"),
    ):
        sub.add_argument(f"--{name}", dest=dest, metavar=metavar, help=help)
    sub.add_argument("--seed", dest="run.seed", metavar="N", help="names every random stream (default: 0)")
    sub.add_argument("--device", dest="run.device", metavar="NAME", help="auto, cpu, cuda or cuda:N")
    for name, help in (
        ("fast", "GPU: compile the model; not reproducible to the bit"),
        ("reference", "plain PyTorch, one client after another: for checking; slow"),
    ):
        sub.add_argument(f"--{name}", dest=f"run.{name}", action="store_const", const="true", help=help)
    sub.add_argument("--out", metavar="DIR", help="where results go (default: a fresh folder under runs/)")
    _add_set(sub)


def _add_data(sub: argparse.ArgumentParser) -> None:
    help = "data set by name (pfedlms datasets), folder:PATH or file:PATH"
    sub.add_argument("--dataset", dest="data.dataset", metavar="NAME", help=help)
    help = "folder with the data set's files (default: PFEDLMS_DATA)"
    sub.add_argument("--data-dir", dest="data.dir", metavar="DIR", help=help)


def _add_set(sub: argparse.ArgumentParser) -> None:
    help = "any setting (pfedlms settings); may be repeated"
    sub.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help=help)


def _add_data_dir(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--data-dir", metavar="DIR", help="where the data set's files are now, if they were moved")


def _add_output(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--json", action="store_true", help="print JSON and nothing else on standard output")
    sub.add_argument("--quiet", action="store_true", help="no progress; where results are is still said")


def _assignments(options: argparse.Namespace) -> list[str]:
    """What `--set` and the options that stand for a setting say; the latter come last."""
    given = [f"{name}={value}" for name, value in vars(options).items() if "." in name and value is not None]
    return [*options.set, *given]


def _overrides(options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    from pfedlms.experiment.config import parse_overrides

    return parse_overrides(_assignments(options))


def _out(options: argparse.Namespace, configured: str, label: str) -> Path:
    """The directory asked for, or a fresh one named by time; a run's own config.toml names the directory it lies in,
    which is not meant when it is run again."""
    if options.config and not options.out and Path(configured).resolve() == Path(options.config).resolve().parent:
        configured = ""
    if options.out or configured:
        return Path(options.out or configured)
    stem = Path("runs") / f"{time.strftime('%Y%m%d-%H%M%S')}-{label}"
    candidates = (stem if number == 0 else stem.with_name(f"{stem.name}-{number}") for number in range(1000))
    return next(path for path in candidates if not path.exists())


def _progress(options: argparse.Namespace) -> Any:
    from pfedlms.report.progress import LiveProgress, PlainProgress

    console = Console(stderr=True, quiet=options.quiet)
    return LiveProgress(console) if console.is_terminal else nullcontext(PlainProgress(console))


def _show(options: argparse.Namespace, document: Any, table: Callable[[Any], Any], rows: Sequence[Any]) -> None:
    """On standard output the document, or a table of the rows, if there are any."""
    if options.json:
        print(json.dumps(document, indent=2))
    elif rows:
        _console().print(table(rows), highlight=False)


def _console() -> Console:
    """Standard output; wide enough when piped, so that nothing is cut."""
    console = Console()
    return console if console.is_terminal else Console(width=140)


def _say(text: str, style: str | None = None) -> None:
    """Words on standard error, as they are."""
    Console(stderr=True).print(text, highlight=False, markup=False, soft_wrap=True, style=style)


def _run(options: argparse.Namespace) -> int:
    from pfedlms.experiment.config import load_config
    from pfedlms.experiment.cost import plan_json
    from pfedlms.experiment.prepare import prepare
    from pfedlms.experiment.run import begin

    config = load_config(options.config, _overrides(options))
    if options.dry_run:
        federation = prepare(config)
        plan = plan_json(config, federation)
        if options.json:
            print(json.dumps(plan, indent=2))
        else:
            print_plan(plan, federation.largest_cohort, _console())
        return 0
    out = _out(options, config.run.out, f"{config.data.title}-{config.method}")
    with _progress(options) as progress:
        result = begin(config.with_run(out=str(out)), progress, profile=options.profile)
    if options.profile:
        # On standard error, so that it goes with --json too.
        Console(stderr=True).print(profile_table(result.federation.watch.seconds, max(1, result.summary["rounds"])))
    return _report_run(options, result.summary, out, result.stopped)


def _compare(options: argparse.Namespace) -> int:
    from pfedlms.experiment.compare import plan, play

    planned = plan(options.config, _overrides(options), options.methods, options.seeds)
    first = planned[0].config
    out = _out(options, first.run.out, f"{first.data.title}-compare")
    if options.plot:
        check_plot(Path(options.plot))
    with _progress(options) as progress:
        comparison = play(planned, out, None, None, progress)
    code = _report_study(options, comparison)
    if options.plot and not comparison.interrupted:
        accuracy_against_bytes(out, Path(options.plot))
    return code


def _sweep(options: argparse.Namespace) -> int:
    from pfedlms.experiment.config import method_in, parse_overrides
    from pfedlms.experiment.sweep import plan, play, split_values

    method = vars(options)["method.name"] or method_in(options.config)
    single, axes = split_values(_assignments(options), method)
    planned, by = plan(options.config, parse_overrides(single), axes, options.seeds, options.by)
    first = planned[0].config
    out = _out(options, first.run.out, f"{first.data.dataset}-{first.method}-sweep")
    if options.plot:
        check_plot(Path(options.plot))
    with _progress(options) as progress:
        done = play(planned, axes, by, out, None, None, progress)
    code = _report_study(options, done)
    if options.plot and done.best:
        accuracy_by_setting(done.cells, done.best, by, Path(options.plot))
    return code


def _resume(options: argparse.Namespace) -> int:
    from pfedlms.experiment.run import resume
    from pfedlms.experiment.studies import resume_study
    from pfedlms.experiment.study import manifest_of

    out = options.directory
    if manifest_of(out) is not None:
        with _progress(options) as progress:
            done = resume_study(out, progress=progress, data_dir=options.data_dir)
        return _report_study(options, done)
    with _progress(options) as progress:
        result = resume(out, progress=progress, data_dir=options.data_dir)
    return _report_run(options, result.summary, out, result.stopped)


def _show_stored(options: argparse.Namespace) -> int:
    from pfedlms.experiment.export import refuse_study
    from pfedlms.experiment.show import clients_of, stored_study, stored_summary
    from pfedlms.experiment.study import manifest_of

    out = options.directory
    if options.clients:
        refuse_study(out, "show --clients of")
    if manifest_of(out) is not None:
        study = stored_study(out)
        _show(options, _document(study), lambda _: _study_table(study), study.runs)
        unfinished, done = study.interrupted, f"{len(study.runs)} runs are shown; not all are finished"
    else:
        summary = stored_summary(out)
        document = {**summary, "directory": str(out)}
        rows = clients_of(out, summary, options.data_dir) if options.clients else []
        _show(options, {**document, "per_client": rows} if rows else document, comparison_table, [summary])
        if rows and not options.json:
            _console().print(clients_table(rows), highlight=False)
        unfinished, done = summary["status"] == "interrupted", f"after {summary['rounds']} rounds; not finished"
    if unfinished:
        _say(f"{done}. Go on with: pfedlms resume {out}")
    return 0


def _report_run(options: argparse.Namespace, summary: dict[str, Any], out: Path, stopped: int) -> int:
    shown = [summary] if summary["accuracy"]["max"] is not None else []
    if summary.get("stopped_early") and not options.quiet:
        best = summary["best"]
        _say(
            f"stopped early after {summary['rounds']} rounds: V-acc was highest in round {best['round']}, "
            f"{best['v_acc']:.2f} %; see best.pt"
        )
    _show(options, {**summary, "directory": str(out)}, comparison_table, shown)
    interrupted = f"after {summary['rounds']} rounds" if summary["status"] == "interrupted" else None
    return _closing(out, interrupted, stopped)


def _report_study(options: argparse.Namespace, study: Any) -> int:
    """The table or the document of a comparison or sweep."""
    _show(options, _document(study), lambda _: _study_table(study), study.runs)
    finished = sum(summary["status"] == "finished" for summary in study.runs)
    best = getattr(study, "best", None)
    if best and not study.interrupted:
        percent = "" if "metric" in best["runs"][0] else " %"
        _say(f"best by {study.by}: {best['name']} ({best['score']:.2f}{percent})")
    done = f"with {finished} run{'s' * (finished != 1)} finished" if study.interrupted else None
    code = _closing(study.directory, done, study.signal)
    if study.broken:
        _say("error: not all runs came to an end; the warnings above say why and what to change")
    return code or int(study.broken)


def _document(study: Any) -> dict[str, Any]:
    """A study for machines."""
    swept = hasattr(study, "axes")
    more = {"axes": study.axes, "by": study.by, "best": _without_runs(study.best)} if swept else {}
    return {"directory": str(study.directory), **more, "runs": study.runs}


def _without_runs(cell: dict[str, Any] | None) -> dict[str, Any] | None:
    return {key: value for key, value in cell.items() if key != "runs"} if cell else None


def _study_table(study: Any) -> Any:
    return sweep_table(study.cells, study.best, study.by) if hasattr(study, "axes") else comparison_table(study.runs)


def _closing(out: Path, interrupted: str | None, stopped: int) -> int:
    """The closing words, also of a quiet call, and the exit code: 128 + the signal that interrupted."""
    if interrupted:
        _say(f"interrupted {interrupted}; all of it is kept. Go on with: pfedlms resume {out}")
        return 128 + (stopped or signal.SIGINT)
    _say(f"results: {out}")
    return 0


def _export(options: argparse.Namespace) -> None:
    from pfedlms.experiment.export import export

    one = options.client is not None or options.shared
    if not one and options.all is None:
        raise UsageError("export: say which model: --client K or --global, with -o FILE, or --all FOLDER")
    if one and options.output is None:
        raise UsageError("export: say where to write with -o FILE, for example -o model.pt")
    target = options.output if one else options.all
    export(options.directory, target, client=options.client, shared=options.shared, data_dir=options.data_dir)
    what = "shared model" if options.shared else "model of client" if one else "models of all clients"
    _say(f"{what}{f' {options.client}' if options.client is not None else ''}: {target}")


def _data(options: argparse.Namespace) -> int:
    handlers = {"show": _data_show, "download": _data_download, "check": _data_check}
    if options.what not in handlers:
        raise UsageError(f"data: got {options.what!r}; {did_you_mean(options.what, handlers)}")
    return int(handlers[options.what](options) or 0)


def _data_download(options: argparse.Namespace) -> None:
    from pfedlms.data.download import download
    from pfedlms.data.sources import folder_of
    from pfedlms.report.sources import watching

    if not (name := _data_set(options)):
        raise UsageError("data download: say which data set, for example: pfedlms data download mnist --data-dir DIR")
    with watching(Console(stderr=True)) as watch:
        files = download(name, folder_of(name, vars(options)["data.dir"]), watch)
    if options.json:
        print(json.dumps({"dataset": name, "files": list(map(str, files))}, indent=2))


def _data_check(options: argparse.Namespace) -> int:
    """1 if the data set asked for is not complete; of all, if one is that is not whole."""
    from pfedlms.data.check import check
    from pfedlms.data.sources import DATASETS
    from pfedlms.report.sources import check_rows

    name = _data_set(options)
    if name and name not in DATASETS:
        raise UsageError(f"data check: got {name!r}; {did_you_mean(name, DATASETS)}")
    rows = [check(each, vars(options)["data.dir"]) for each in ([name] if name else DATASETS)]
    _show(options, rows[0] if name else rows, plain_table, check_rows(rows))
    wrong = [row for row in rows if row["state"] != "complete" and (name or row["state"] != "missing")]
    for problem in (problem for row in wrong for problem in row["problems"]):
        _say(problem)
    return int(bool(wrong))


def _data_set(options: argparse.Namespace) -> str | None:
    """Its name, given by itself or with --dataset."""
    given: str | None = options.config or vars(options)["data.dataset"]
    return given


def _data_show(options: argparse.Namespace) -> None:
    from pfedlms.experiment.config import load_config
    from pfedlms.experiment.holdings import holdings
    from pfedlms.report.holdings import holdings_lines

    if options.plot:
        check_plot(Path(options.plot))
    document = holdings(load_config(options.config, _overrides(options)))
    if options.json:
        print(json.dumps(document, indent=2))
    else:
        console = Console()
        for line in holdings_lines(document, max(60, console.width) if console.is_terminal else 80):
            console.print(line, highlight=False, soft_wrap=True)
    if options.plot:
        who_holds_what(document, Path(options.plot))


def _bits(options: argparse.Namespace) -> None:
    from pfedlms.experiment.cost import bits_table

    overrides = _overrides(options)
    rows = bits_table(overrides, options.classes)
    _show(options, rows[0] if "name" in overrides.get("method", {}) else rows, bits_table_of, rows)


def _list(options: argparse.Namespace) -> None:
    from pfedlms.report import listings

    rows = getattr(listings, options.command)()
    _show(options, rows, plain_table, rows)


if __name__ == "__main__":
    sys.exit(main())
