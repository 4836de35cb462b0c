"""The command line: thin functions over `experiment` and `report`."""

from __future__ import annotations

import argparse
import io
import json
import os
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
from pfedlms.report.plots import accuracy_against_bytes, check_plot, who_holds_what
from pfedlms.report.tables import bits_table_of, comparison_table, plain_table, print_plan, profile_table

DESCRIPTION = """\
Personalised federated learning that talks in low-bit sketches.

commands:
  compare            several methods x seeds, one table; without options:
                     local, fedavg, pfedlms and sketchvote on digits
  run [CONFIG]       one method; --dry-run prints the plan, bytes and memory
  resume DIR         go on with an interrupted run or comparison
  export DIR         write one client's model: --client K -o model.pt
  data show          who holds what: clients x classes, sizes; --plot FILE
  bits               bits per client and round of any model, method and setting
  methods, datasets, models, settings
                     what there is to choose from

Each command explains itself: pfedlms run --help. Any setting can be given, too:
  pfedlms run --method pfedlms --set method.thresholds=3 --set data.alpha=0.1
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code: 0 done, 1 a run failed, 2 wrong use, 130 interrupted."""
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
        """An option the command does not have, with the nearest one it has."""
        parsers = next(each.choices for each in self._actions if isinstance(each, argparse._SubParsersAction))
        parser: _Parser = parsers[command]
        known = [name for name in parser._option_string_actions if name.startswith("--")]
        parser.error(f"unknown argument {option!r}; {did_you_mean(option.partition('=')[0], known)}")

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
    sub.add_argument("--methods", metavar="A,B,C", default=methods, help=f"methods by name (default: {methods})")
    sub.add_argument("--seeds", type=int, metavar="N", default=3, help="how many seeds, from --seed on (default: 3)")
    _add_settings(sub)
    sub.add_argument("--plot", metavar="FILE", help="draw accuracy against bytes; PNG, SVG or PDF (extra: report)")
    _add_output(sub)

    sub = command("resume", _resume, "Go on with an interrupted run or comparison.")
    sub.add_argument("directory", metavar="DIR", type=Path)
    _add_output(sub)

    sub = command("export", _export, "Write the model of one client as a PyTorch state dict.")
    sub.add_argument("directory", metavar="DIR", type=Path)
    sub.add_argument("--client", type=int, required=True, metavar="K", help="which client, from 0")
    sub.add_argument(
        "-o", "--output", type=Path, required=True, metavar="FILE", help="where to write, for example model.pt"
    )

    sub = command("data", _data, "Show who holds what, clients x classes; nothing is trained.")
    sub.add_argument("what", metavar="show", help="the word show")
    sub.add_argument("config", nargs="?", metavar="CONFIG", help="a TOML file; options below come on top of it")
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


COMMANDS = ("run", "compare", "resume", "export", "data", "bits", "methods", "datasets", "models", "settings")


def _add_settings(sub: argparse.ArgumentParser) -> None:
    """Options that stand for a setting are stored under its name."""
    _add_data(sub)
    sub.add_argument("--rounds", dest="train.rounds", metavar="N", help="communication rounds")
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
    sub.add_argument("--data-dir", dest="data.dir", metavar="DIR", help="folder with the data set's files")


def _add_set(sub: argparse.ArgumentParser) -> None:
    help = "any setting (pfedlms settings); may be repeated"
    sub.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help=help)


def _add_output(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--json", action="store_true", help="print JSON and nothing else on standard output")
    sub.add_argument("--quiet", action="store_true", help="no progress")


def _overrides(options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """What `--set` and the options that stand for a setting say; the latter come last."""
    from pfedlms.experiment.config import parse_overrides

    given = [f"{name}={value}" for name, value in vars(options).items() if "." in name and value is not None]
    return parse_overrides([*options.set, *given])


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
    return _report_run(options, result.summary, out)


def _compare(options: argparse.Namespace) -> int:
    from pfedlms.experiment.compare import plan, play

    methods = [name.strip() for name in options.methods.split(",") if name.strip()]
    configs = plan(options.config, _overrides(options), methods, options.seeds)
    out = _out(options, configs[0].run.out, f"{configs[0].data.title}-compare")
    if options.plot:
        check_plot(Path(options.plot))
    with _progress(options) as progress:
        comparison = play(configs, out, None, None, progress)
    code = _report_comparison(options, comparison, out)
    if options.plot and not comparison.interrupted:
        accuracy_against_bytes(out, Path(options.plot))
    return code


def _resume(options: argparse.Namespace) -> int:
    from pfedlms.experiment.compare import resume_comparison
    from pfedlms.experiment.run import resume

    out = options.directory
    if (out / "compare.json").is_file():
        with _progress(options) as progress:
            comparison = resume_comparison(out, None, None, progress)
        return _report_comparison(options, comparison, out)
    with _progress(options) as progress:
        result = resume(out, progress=progress)
    return _report_run(options, result.summary, out)


def _report_run(options: argparse.Namespace, summary: dict[str, Any], out: Path) -> int:
    shown = [summary] if summary["accuracy"]["max"] is not None else []
    done = f"after {summary['rounds']} rounds"
    if summary.get("stopped_early") and not options.quiet:
        best = summary["best"]
        _say(f"stopped early {done}: V-acc was highest in round {best['round']}, {best['v_acc']:.2f} %; see best.pt")
    return _report(options, summary, shown, out, done if summary["status"] == "interrupted" else None)


def _report_comparison(options: argparse.Namespace, comparison: Any, out: Path) -> int:
    finished = sum(summary["status"] == "finished" for summary in comparison.runs)
    done = f"with {finished} run{'s' * (finished != 1)} finished"
    document = {"runs": comparison.runs}
    code = _report(options, document, comparison.runs, out, done if comparison.interrupted else None)
    if comparison.broken:
        _say("error: not all runs came to an end; the warnings above say why and what to change")
    return code or int(comparison.broken)


def _report(
    options: argparse.Namespace, document: Any, shown: Sequence[Any], out: Path, interrupted: str | None
) -> int:
    """The table or the document, and the closing words."""
    _show(options, document, comparison_table, shown)
    if interrupted:
        _say(f"interrupted {interrupted}; all of it is kept. Go on with: pfedlms resume {out}")
        return 130
    if not options.quiet:
        _say(f"results: {out}")
    return 0


def _export(options: argparse.Namespace) -> None:
    from pfedlms.experiment.run import export

    export(options.directory, options.client, options.output)
    _say(f"model of client {options.client}: {options.output}")


def _data(options: argparse.Namespace) -> None:
    from pfedlms.experiment.config import load_config
    from pfedlms.experiment.holdings import holdings
    from pfedlms.report.holdings import holdings_lines

    if options.what != "show":
        raise UsageError(f"data: got {options.what!r}, expected show: pfedlms data show")
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
