"""The functions that users call: run, study, compare, sweep, resume, load and export."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pfedlms.errors import ConfigError, UsageError
from pfedlms.experiment.callbacks import callbacks_with_progress
from pfedlms.experiment.config import Tables, from_keywords, load_config, merge, method_in
from pfedlms.experiment.cost import bits_table, method_of
from pfedlms.experiment.grids import (
    EXPECTED,
    LIST_TYPES,
    cell_rows,
    grid_rows,
    methods_of,
    plan_study,
    refuse_single_values,
    variants,
)
from pfedlms.experiment.loop import raise_if_stopped
from pfedlms.experiment.prepare import prepare
from pfedlms.experiment.problem import ModelLike, Problem
from pfedlms.experiment.runs import Run, load_run, start_run
from pfedlms.experiment.schema import DEFAULT_METHODS
from pfedlms.experiment.store import is_study
from pfedlms.experiment.studies import Study, load_study, refuse_study, same_run
from pfedlms.step.custom import Metric, PerSample

__all__ = [
    "Run", "Study", "bits_table", "compare", "export", "load", "method_of", "prepare", "resume", "run", "same_run",
    "study", "sweep", "variant",
]  # fmt: skip


def run(
    data: Any = None,
    model: ModelLike = None,
    *,
    method: str | None = None,
    config: str | Path | None = None,
    out: str | Path | None = None,
    progress: bool | None = None,
    callbacks: Iterable[Any] | None = None,
    loss: PerSample | None = None,
    metric: Metric | None = None,
    **settings: Any,
) -> Run:
    """Train one federation.

    Args:
        data, model, loss, metric: the learning problem, see `Problem`; or a `Problem` as `data` alone.
        method: name of the method. Default: the method that `config` names, else pfedlms.
        config: a TOML file with settings.
        out: run directory; without one nothing is written.
        progress: True shows progress, False does not. Default: on a terminal and in a notebook.
        callbacks: objects with `on_round`, `on_evaluation` or `on_end`; see `pfedlms.Callback`.
        settings: any key of a section (`rounds=50, alpha=0.1, strength=0.05, seed=1, …`).

    After Ctrl-C the run finishes its round and saves it; then it raises `KeyboardInterrupt`, whose `result` is the run
    so far. After SIGTERM it saves likewise and ends the program. A second Ctrl-C does not wait for the end of the
    round.
    """
    method = method_in(config) if method is None else method
    problem = Problem.of(data, model, loss, metric)
    arguments = {"method": {"name": method}, "run": {"out": str(out)} if out else {}}
    full_config = load_config(config, merge(from_keywords([method], settings), problem.tables(settings), arguments))
    with callbacks_with_progress(progress, callbacks) as all_callbacks:
        return raise_if_stopped(start_run(full_config, problem, all_callbacks))


def study(
    data: Any = None,
    model: ModelLike = None,
    *,
    grid: Mapping[str, Any] | None = None,
    cells: Mapping[str, Mapping[str, Any]] | None = None,
    method: str | None = None,
    seeds: int | Sequence[int] = 1,
    by: str | None = None,
    config: str | Path | None = None,
    out: str | Path | None = None,
    workers: int = 1,
    seconds: float = float("inf"),
    progress: bool | None = None,
    callbacks: Iterable[Any] | None = None,
    loss: PerSample | None = None,
    metric: Metric | None = None,
    **settings: Any,
) -> Study:
    """Train every combination of settings with every seed. The same call again resumes the study. Printing the result
    shows its table.

    Args:
        data, model, loss, metric: the learning problem, see `Problem`; or a `Problem` as `data` alone.
        grid: values by setting: `{"method": ["fedavg", "pfedlms:ratio=0.2"], "learning_rate": [0.03, 0.1]}`. A method
        that does not have a setting is trained without it.
        cells: instead of a grid, the settings of each row by its name: `{"small": {"method": "fedavg", "hidden": 32}}`.
        method: the method of all runs, unless grid or cells name others.
        seeds: the number of seeds, counted from `seed`, or a list of seeds.
        by: the measure that `best` chooses by: `v_acc`, `p_acc` or `g_acc`. Default: `v_acc` with `validation`, else
        `p_acc`.
        config: a TOML file with settings of all runs.
        out: the folder of the study, with one folder for each run in it. Without one nothing is written.
        workers: how many runs train at the same time, each in a process, on several GPUs each on one device. Needs
        `out`.
        seconds: after so many seconds no run is started; the same call again trains the remaining runs.
        progress, callbacks, settings: as in `run`.
    """
    if (grid is None) == (cells is None):
        raise UsageError(f"study: got {'neither' if grid is None else 'both'} grid and cells, expected one of them")
    if method is not None and "method" in (grid or {}):
        raise UsageError(f"method: got {method!r} beside methods of the grid; give it there")
    problem = Problem.of(data, model, loss, metric)
    method = method or method_in(config)
    rows, axes = grid_rows(grid, method) if grid is not None else (cell_rows(cells or {}, method), {})
    overrides = merge(from_keywords(methods_of(rows), settings), problem.tables(settings))
    planned = plan_study(config, overrides, rows, axes, seeds, by, problem)
    with callbacks_with_progress(progress, callbacks) as all_callbacks:
        return raise_if_stopped(planned.start(Path(out) if out else None, all_callbacks, workers, seconds))


def compare(
    data: Any = None,
    model: ModelLike = None,
    *,
    methods: Any = DEFAULT_METHODS,
    seeds: int | Sequence[int] = 3,
    **arguments: Any,
) -> Study:
    """Train several methods with several seeds on the same partitions. `arguments` are those of `study`.

    `methods` has names, names with settings (`"pfedlms:thresholds=1"`), or pairs `("pfedlms", {"thresholds": 1})`. A
    setting that only one of the methods has needs no more than its name. A setting that several of them have must say
    which method it is for: among `methods`, or as `pfedlms={"strength": 0.05}`.
    """
    return study(data, model, grid={"method": methods}, seeds=seeds, **arguments)


def sweep(data: Any = None, model: ModelLike = None, *, method: str | None = None, **settings: Any) -> Study:
    """Train one method with every combination of values: a `study` whose grid consists of the settings that have a list
    of values (`learning_rate=[0.03, 0.1], validation=0.1`)."""
    method = method or method_in(settings.get("config"))
    grid = {key: value for key, value in settings.items() if isinstance(value, LIST_TYPES) and key not in _LISTS}
    refuse_single_values(grid)
    fixed = {key: value for key, value in settings.items() if key not in grid}
    return study(data, model, grid=grid, method=method, **fixed)


_LISTS = ("seeds", "callbacks", "metric")
"""Arguments of `study` that may be lists themselves."""


def variant(text: str) -> Tables:
    """The settings, by section, of a method with settings as a comparison writes it: `pfedlms:thresholds=1`."""
    rows = list(variants(text).values())
    if len(rows) != 1:
        raise ConfigError([f"methods: got {text!r}, expected one method; {EXPECTED}"])
    return rows[0]


def resume(
    directory: str | Path,
    data: Any = None,
    model: ModelLike = None,
    progress: bool | None = None,
    callbacks: Iterable[Any] | None = None,
    data_dir: str | None = None,
    loss: PerSample | None = None,
    metric: Metric | None = None,
    workers: int = 1,
) -> Any:
    """Train the remaining rounds of the run in `directory`, or the remaining runs of the study there. Returns a `Run`
    or a `Study`. Objects that were given in Python (data, model, loss, metric, or a `Problem`) are needed again where
    anything remains to be trained. `data_dir` is the folder of the data set's files, if they were moved. Ctrl-C is as
    in `run`, `workers` as in `study`."""
    stored = load(directory, data, model, data_dir=data_dir, loss=loss, metric=metric)
    options = {"workers": workers} if isinstance(stored, Study) else {}
    return stored.resume(progress=progress, callbacks=callbacks, **options)


def load(
    directory: str | Path,
    data: Any = None,
    model: ModelLike = None,
    *,
    data_dir: str | None = None,
    loss: PerSample | None = None,
    metric: Metric | None = None,
) -> Run | Study:
    """The run or study in a folder, finished or not. Only its models need again what was given in Python."""
    problem = Problem.of(data, model, loss, metric)
    return (load_study if is_study(Path(directory)) else load_run)(Path(directory), problem, data_dir)


def export(
    directory: str | Path,
    file: str | Path,
    *,
    client: int | str | None = None,
    shared: bool = False,
    best: bool = False,
    data: Any = None,
    model: ModelLike = None,
    data_dir: str | None = None,
) -> None:
    """Write models of the run in `directory` at its latest checkpoint: `pfedlms.load(directory).export(file, …)`. The
    folder is enough, unless the model was given in Python. A client that took no part in the last round needs its data,
    to take that round's local steps; without data its model before these steps is written."""
    refuse_study(Path(directory), "export")
    run = load_run(directory, Problem.of(data, model), data_dir)
    run.export(file, client=client, shared=shared, best=best)
