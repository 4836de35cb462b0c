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
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from typing import Any, NoReturn

from pfedlms import __version__
from pfedlms.cli import data, deploy, lists, stored, train
from pfedlms.cli.options import check_config, say, translate_arguments
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
    started_together = "MASTER_ADDR" in os.environ
    rank = os.environ.get("RANK", "0") if started_together else "0"
    if rank == "0":
        if started_together:
            # torchrun sends SIGTERM to all processes when one has died. A run handles it. Before and after the run
            # this process must not end by it, or nobody would read why the other one died.
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
        parser.refuse(options.command, unknown[0])
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # an old terminal shows "?" for "±" instead of a traceback
    warnings.showwarning = lambda message, *rest, **more: say(translate_arguments(f"warning: {message}"))
    try:
        check_config(getattr(options, "config", None))
        if getattr(options, "imports", None):
            from pfedlms.experiment.plugins import import_modules

            import_modules(options.imports)
        return int(options.handler(options) or 0)
    except PfedlmsError as error:
        lines = translate_arguments(str(error)).splitlines()
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
    def refuse(self, command: str, option: str) -> NoReturn:
        """Exit for an option that the command does not have, with the option that was probably meant."""
        parsers = next(action.choices for action in self._actions if isinstance(action, argparse._SubParsersAction))
        options = {
            name: [option for option in parser._option_string_actions if option.startswith("--")]
            for name, parser in parsers.items()
        }
        parser: _Parser = parsers[command]
        parser.error(f"unknown argument {option!r}; {suggest_option(option, options[command], options)}")

    def error(self, message: str) -> NoReturn:
        """Exit with one readable line; the nearest name replaces argparse's lists of choices."""
        if "invalid choice: " in message:
            wrong, choices = message.split("invalid choice: ")[1].rstrip(")").rsplit(" (choose from ", 1)
            names = [name.strip("'") for name in choices.split(", ")]
            message = f"unknown command {wrong}; {did_you_mean(wrong[1:-1], names)}"
        self.exit(2, f"error: {message}\nsee: {self.prog} --help\n")


_OTHER_NAMES = {"--silent": "--quiet", "--metric": "--by", "--trials": "--seeds", "--repeats": "--seeds"}
"""Options that stand for no setting, by the names that other tools have for them."""
_RELATED = (("--method", "--methods"), ("--seed", "--seeds"), ("--client", "--clients"))


def suggest_option(option: str, own: Sequence[str], commands: Mapping[str, Sequence[str]]) -> str:
    """A closing sentence for an option that is not among a command's `own`: our name for what other tools call so, a
    setting of that name, the command that has it (`commands` has their options), or the nearest spelling."""
    name = option.partition("=")[0].lower().replace("_", "-")
    place = place_by_other_name(name.removeprefix("--")) or _setting(name.removeprefix("--").replace("-", "_"))
    flags = {dest: f"--{flag}" for flag, (dest, _) in OPTIONS.items()}
    likely = [_OTHER_NAMES.get(name, name), *([flags.get(place, "--out")] if place in (*flags, "run.out") else [])]
    likely += [other for pair in _RELATED if set(pair) & set(likely) for other in pair]
    for candidate in likely:
        if candidate in own:
            return f"did you mean {candidate}?"
    if place:
        return f"did you mean --set {place}=…?" if "--set" in own else f"{place} is a setting of a run"
    owners = [command for command, options in commands.items() if name in options]
    return f"it is an option of {' and '.join(owners[:3])}" if owners else did_you_mean(name, own)


def _setting(key: str) -> str | None:
    from pfedlms.experiment.config import setting_fields
    from pfedlms.methods import METHODS

    return next((f"{section}.{name}" for section, name in setting_fields(METHODS) if name == key), None)


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
        sub.set_defaults(handler=handler)
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
