"""The command line: thin functions over `experiment` and `report`, one file for each kind of command.

Each command `x` has two functions: `add_x` adds its options to a parser, and its docstring is the help; `x` does the
work, and imports what it needs only then, so that help does not wait for PyTorch.
"""

from __future__ import annotations

import argparse
import io
import os
import signal
import sys
import warnings
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from typing import Any, NoReturn

from pfedlms import __version__
from pfedlms.cli import data, deploy, lists, stored, train
from pfedlms.cli.options import say
from pfedlms.errors import DownloadError, PfedlmsError, did_you_mean
from pfedlms.experiment.schema import OPTIONS, place_by_other_name

DESCRIPTION = """\
Personalised federated learning that talks in low-bit sketches.

commands:
  compare            several methods x seeds, one table; by default on digits
  run [CONFIG]       one method; --dry-run prints the plan, bytes and memory
  sweep              one method, every combination of some settings' values
  resume DIR         resume an interrupted run, comparison or sweep
  show DIR           print what one reached, finished or not; needs no data
  report DIR… -o F   one page to read, of any runs: tables, figures, raw data
  export DIR         write models: --client K, --global or --all FOLDER; --best
  reproduce NAME     a table or figure of the paper, measured beside printed
  data show          samples by client and class; data download NAME: its files
  bits               bits per client and round of any model, method and setting
  deploy init DIR    a folder for a server and nodes (Flower); check: all there?
  methods, datasets, models, settings: what there is; methods check MODULE:CLASS

Each command explains itself: pfedlms run --help. Any setting can be given, too:
  pfedlms run --method pfedlms --set method.thresholds=3 --set data.alpha=0.1
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code: 0 done, 1 a run failed, 2 wrong use, 130 interrupted by Ctrl-C, 143 by
    SIGTERM. If torchrun started several processes, only the first prints. The others print only what keeps them from
    starting: data may be missing on one machine alone."""
    if "MASTER_ADDR" not in os.environ:
        return _main(arguments)
    rank = os.environ.get("RANK", "0")
    if rank == "0":
        # torchrun sends SIGTERM to all processes when one has died. A run handles it. Before and after the run this
        # process must not end by it, or nobody would read why the other one died.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        return _main(arguments)
    with open(os.devnull, "w") as nothing, redirect_stdout(nothing), redirect_stderr(io.StringIO()) as errors:
        code = _main(arguments)
    if code == 2:
        say(f"rank {rank}: {errors.getvalue().rstrip()}")
    return code


def _main(arguments: Sequence[str] | None) -> int:
    parser = _parser()
    words = list(sys.argv[1:] if arguments is None else arguments)
    # `reproduce` passes its options on to another program.
    options, unknown = parser.parse_known_args(words[:1] if words[:1] == ["reproduce"] else words)
    options.rest = words[1:]
    if unknown:
        options.parser.error(f"unknown argument {unknown[0]!r}; {suggest_option(unknown[0], options.parser)}")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # an old terminal shows "?" for "±" instead of a traceback
    warnings.showwarning = lambda message, *rest, **more: say(f"warning: {message}")
    try:
        if getattr(options, "imports", None):
            from pfedlms.experiment.plugins import import_modules

            import_modules(options.imports)
        return int(options.handler(options) or 0)
    except PfedlmsError as error:
        lines = str(error).splitlines()
        is_list = len(lines) > 1 and not isinstance(error, DownloadError)
        title = [f"{len(lines)} problems in the settings"] if is_list else []
        say("error: " + "\n  ".join([*title, *lines]), style="red")
        return error.exit_code
    except KeyboardInterrupt:
        say("interrupted; a run directory has its latest checkpoint: pfedlms resume DIR")
        return 130
    except BrokenPipeError:
        # The reader of our output is gone (for example `| head`); there is nobody left to tell.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        # A file of a run that cannot be written is a StorageError; this is about another path that the user gave, or,
        # without a name, about the output, memory, processes, …
        say(f"error: {error.filename}: {error.strerror}" if error.filename else f"error: {error}")
        return 2


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Exit with one readable line and where to read more."""
        self.exit(2, f"error: {message}\nsee: {self.prog} --help\n")


def suggest_option(option: str, parser: argparse.ArgumentParser) -> str:
    """A closing sentence for an option that a command does not have: how the setting of that name is given, or the
    nearest spelling."""
    from pfedlms.experiment.config import setting_fields
    from pfedlms.methods import METHODS

    own = [flag for flag in parser._option_string_actions if flag.startswith("--")]
    name = option.partition("=")[0].lstrip("-").replace("-", "_")
    places = {key: f"{section}.{key}" for section, key in reversed(setting_fields(METHODS))}
    place = place_by_other_name(name) or places.get(name)
    flags = {each: f"--{flag}" for flag, (each, _) in OPTIONS.items() if f"--{flag}" in own}
    if place in flags:
        return f"did you mean {flags[place]}?"
    return f"did you mean --set {place}=…?" if place and "--set" in own else did_you_mean(option, own)


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
    for name, (handler, add) in COMMANDS.items():
        sub = commands.add_parser(name, description=" ".join((add.__doc__ or "").split()), allow_abbrev=False)
        sub.set_defaults(handler=handler, parser=sub)
        add(sub)
    return parser


COMMANDS: dict[str, tuple[Callable[[argparse.Namespace], Any], Callable[[argparse.ArgumentParser], None]]] = {
    "run": (train.run, train.add_run),
    "compare": (train.compare, train.add_compare),
    "sweep": (train.sweep, train.add_sweep),
    "resume": (train.resume, train.add_resume),
    "show": (stored.show, stored.add_show),
    "report": (stored.report, stored.add_report),
    "export": (stored.export, stored.add_export),
    "reproduce": (train.reproduce, train.add_reproduce),
    "data": (data.data, data.add_data),
    "deploy": (deploy.deploy, deploy.add_deploy),
    "bits": (lists.bits, lists.add_bits),
    "methods": (lists.methods, lists.add_methods),
    **dict.fromkeys(("datasets", "models", "settings"), (lists.listing, lists.add_listing)),
}
"""Each command with its function and the function that adds its options."""
