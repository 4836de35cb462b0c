"""One run, from a configuration or from Python objects: begin it, go on with it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pfedlms.engine.stopwatch import Stopwatch
from pfedlms.errors import RunDirectoryError, UsageError
from pfedlms.experiment.config import CUSTOM, Config, load_config, method_in
from pfedlms.experiment.play import Progress, Result, execute, leave
from pfedlms.experiment.prepare import NOTHING_OWN, ModelLike, Own, in_python, prepare, python_overrides
from pfedlms.experiment.store import SERVER_AGAIN, RunDirectory
from pfedlms.experiment.watch import watching
from pfedlms.step.own import Metric, PerSample


def run(
    data: Any = None,
    model: ModelLike = None,
    *,
    method: str | None = None,
    config: str | Path | None = None,
    out: str | Path | None = None,
    progress: Progress | bool | None = None,
    callbacks: Iterable[Any] | None = None,
    loss: PerSample | None = None,
    metric: Metric | None = None,
    **settings: Any,
) -> Result:
    """Train one federation.

    Args:
        data: a data set's name; one to be partitioned, as arrays `(x, y)`, a torch or Hugging Face Dataset, or a tuple
        of two, (train, test), which are pooled and dealt out anew; or a list or dict of clients, each with a
        (train, test) pair or one data set. Default: the embedded digits.
        model: a name of the zoo, a factory that returns an `nn.Module`, or a module (its weights are w⁰). Default: the
        data set's own.
        method: name of the method. None, the default, is the one `config` names, or pfedlms.
        config: a TOML file with settings.
        out: run directory; without one nothing is written.
        progress: True shows it, False does not. Default: on a terminal and in a notebook.
        callbacks: objects with `on_round`, `on_evaluation` or `on_end`; see `pfedlms.Callback`.
        loss: what local steps minimise in place of cross-entropy: a function of outputs `[batch, …]` and targets
        `[batch, …]` of one client that gives one number a sample. Targets may then be anything numeric, `[samples, …]`.
        metric: what is measured in place of accuracy, likewise, or a pair of its name and such a function; the higher
        the better. Default: accuracy where targets are classes and outputs are one number a class, else minus the loss.
        settings: any key of a section (`rounds=50, alpha=0.1, strength=0.05, seed=1, …`).

    Ctrl-C lets the round end and be saved, then raises `KeyboardInterrupt`, whose `result` has what there is; SIGTERM
    ends the program likewise. A second Ctrl-C does not wait for the round.
    """
    method = method_in(config) if method is None else method
    own = Own(loss, metric)
    data = own.read(data)
    overrides = python_overrides(data, model, [method], settings)
    overrides["method"]["name"] = method
    if out:
        overrides["run"]["out"] = str(out)
    checked = load_config(config, own.into(overrides))
    with watching(progress, callbacks) as told:
        result = begin(checked, told, data, model, own=own)
    return _left(result)


def _left(result: Result) -> Result:
    """A run as its caller in Python gets it, or what a signal asked for once all is kept."""
    kept = result.directory is not None and result.summary["status"] == "interrupted"
    call = in_python("resume", result.directory, result.config.tables()) if kept and result.directory else ""
    leave(result.stopped, result, call)
    return result


def begin(
    config: Config, progress: Progress, data: Any = None, model: ModelLike = None, profile: bool = False,
    own: Own = NOTHING_OWN,
) -> Result:  # fmt: skip
    """Train from a checked configuration; without `run.out` nothing is written, with `profile` the federation's
    stopwatch runs."""
    federation = prepare(config, data, model, own)
    if profile:
        federation.watch = Stopwatch(federation.model.device)
    if not config.run.out:
        return execute(config, federation, progress)
    with RunDirectory(Path(config.run.out)) as directory:
        directory.create(config.to_toml())
        return execute(config, federation, progress, directory)


def resume(
    directory: str | Path,
    data: Any = None,
    model: ModelLike = None,
    progress: Progress | bool | None = None,
    callbacks: Iterable[Any] | None = None,
    data_dir: str | None = None,
    loss: PerSample | None = None,
    metric: Metric | None = None,
) -> Result:
    """Go on with the run in `directory`; data, model, loss and metric are needed again where they were given in Python.
    `data_dir` says where a data set's files are now, if they were moved. Ctrl-C as in `run`."""
    result = go_on(directory, data, model, progress, callbacks, data_dir, Own(loss, metric))
    return _left(result)


def go_on(
    directory: str | Path, data: Any = None, model: ModelLike = None, progress: Progress | bool | None = None,
    callbacks: Iterable[Any] | None = None, data_dir: str | None = None, own: Own = NOTHING_OWN,
) -> Result:  # fmt: skip
    """`resume` for callers that look at `Result.stopped` themselves."""
    stored, config = open_run(directory, data_dir)
    if stored.on_nodes:
        raise UsageError(f"{directory}: this is a run on nodes, which its server goes on with; {SERVER_AGAIN}")
    for section, given, name in (("data", data, config.data.dataset), ("model", model, config.model.name)):
        if name == CUSTOM and given is None:
            raise UsageError(
                f"{directory}: this run's {section} was given in Python; "
                f"go on with {in_python('resume', directory, config.tables())}"
            )
    for name in own.missing(config):
        raise UsageError(
            f"{directory}: this run's {name} was given in Python; "
            f"go on with {in_python('resume', directory, config.tables())}"
        )
    for name, function in vars(own).items():
        if function is not None and getattr(config.train, name) != CUSTOM:
            raise UsageError(f"{directory}: this run has no {name} of its own; leave {name} out")
    with stored, watching(progress, callbacks) as told:
        stored.open()
        checkpoint = stored.load_checkpoint()
        federation = prepare(grouped(config, checkpoint), data, model, own)
        return execute(config, federation, told, stored, checkpoint)


def open_run(directory: str | Path, data_dir: str | None = None) -> tuple[RunDirectory, Config]:
    """A run's folder and configuration, with the data in `data_dir` if that is given."""
    stored = RunDirectory(Path(directory))
    if not stored.config.is_file():
        several = any((stored.path / name).is_file() for name in ("compare.json", "sweep.json"))
        remedy = f"it holds several; pfedlms.resume_study({str(directory)!r}) goes on with all" if several else ""
        missing = "config.toml is missing" if stored.path.is_dir() else "there is no such folder"
        raise RunDirectoryError(f"{stored.path}: no run here ({remedy or missing})")
    moved = {"data": {"dir": str(data_dir)}} if data_dir else {}
    return stored, load_config(stored.config, moved, stored=True)


def grouped(config: Config, checkpoint: Mapping[str, Any] | None) -> Config:
    """Where the size of cohorts follows the memory at hand, it stays what it was: dropout depends on the grouping."""
    return config.with_run(cohort_size=config.run.cohort_size or (checkpoint["cohort_size"] if checkpoint else 0))
