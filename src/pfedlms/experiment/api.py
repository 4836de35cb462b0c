"""The functions that users call: run, study, compare, sweep, resume, load and export."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pfedlms.errors import ConfigError, UsageError
from pfedlms.experiment.callbacks import watching
from pfedlms.experiment.config import Tables, from_keywords, load_config, merge, method_in
from pfedlms.experiment.cost import bits_table, method_of
from pfedlms.experiment.grids import EXPECTED, check_swept, given_cells, plan, split_grid, variants
from pfedlms.experiment.loop import or_leave
from pfedlms.experiment.prepare import prepare
from pfedlms.experiment.problem import ModelLike, Problem
from pfedlms.experiment.runs import Run, begin, load_run
from pfedlms.experiment.schema import COMPARED
from pfedlms.experiment.store import manifest_of
from pfedlms.experiment.studies import Study, load_study, refuse_study, same_run
from pfedlms.step.custom import Metric, PerSample

__all__ = [
    "Run", "Study", "bits_table", "compare", "export", "load", "method_of", "prepare", "resume", "resume_study", "run",
    "same_run", "study", "sweep", "variant",
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
        data, model, loss, metric: what is to be learnt, see `Problem`; or a `Problem` as `data` alone.
        method: name of the method. None, the default, is the one `config` names, or pfedlms.
        config: a TOML file with settings.
        out: run directory; without one nothing is written.
        progress: True shows it, False does not. Default: on a terminal and in a notebook.
        callbacks: objects with `on_round`, `on_evaluation` or `on_end`; see `pfedlms.Callback`.
        settings: any key of a section (`rounds=50, alpha=0.1, strength=0.05, seed=1, …`).

    After Ctrl-C the round ends and is saved; then `KeyboardInterrupt` is raised, whose `result` is the run so far.
    SIGTERM ends the program likewise. A second Ctrl-C does not wait for the end of the round.
    """
    method = method_in(config) if method is None else method
    problem = Problem.of(data, model, loss, metric)
    problem.check_clients(settings)
    more = {"method": {"name": method}, "run": {"out": str(out)} if out else {}}
    checked = load_config(config, merge(from_keywords([method], settings), problem.tables(), more))
    with watching(progress, callbacks) as calls:
        return or_leave(begin(checked, problem, calls))


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
    """Train every combination of settings with every seed; the same call again resumes it. Printing the result shows
    its table.

    Args:
        data, model, loss, metric: what is to be learnt, see `Problem`; or a `Problem` as `data` alone.
        grid: values by setting: `{"method": ["fedavg", "pfedlms:ratio=0.2"], "learning_rate": [0.03, 0.1]}`. A setting
        that a method does not have is left out for it.
        cells: instead of a grid, the settings of each row by its name: `{"small": {"method": "fedavg", "hidden": 32}}`.
        method: the method of all runs, unless grid or cells name others.
        seeds: how many, from `seed` on, or a list of them.
        by: what `best` chooses by: `v_acc`, `p_acc` or `g_acc`. Default: `v_acc` with `validation`, else `p_acc`.
        config: a TOML file with settings of all runs.
        out: the folder of the study; every run has its own in it. Without one nothing is written.
        workers: how many runs at the same time, in as many processes; on several GPUs one device each. Needs `out`.
        seconds: begin no run after that; the same call again plays the runs that are left.
        progress, callbacks, settings: as in `run`.
    """
    if (grid is None) == (cells is None):
        raise UsageError(f"study: got {'neither' if grid is None else 'both'} grid and cells, expected one of them")
    problem = Problem.of(data, model, loss, metric)
    problem.check_clients(settings)
    method = method or method_in(config)
    methods, axes = ([method], {}) if grid is None else split_grid(grid, method)
    names = [own["method"]["name"] for own in variants(methods)[0].values()]
    overrides = merge(from_keywords(names, settings), problem.tables())
    if cells is not None:
        made = given_cells(cells, config, merge(overrides, {"method": {"name": method}}), seeds, problem)
    else:
        made = plan(config, overrides, methods, axes, seeds, by, problem)
    with watching(progress, callbacks) as calls:
        return or_leave(made.begin(Path(out) if out else None, calls, workers, seconds))


def compare(
    data: Any = None,
    model: ModelLike = None,
    *,
    methods: Any = COMPARED,
    seeds: int | Sequence[int] = 3,
    **more: Any,
) -> Study:
    """Train several methods with several seeds on the same partitions: a `study`, which takes `more`.

    `methods` has names, names with settings (`"pfedlms:thresholds=1"`), or pairs `("pfedlms", {"thresholds": 1})`. A
    setting that only one of the methods has goes to that one; one that several have must say whose it is, there or as
    `pfedlms={"strength": 0.05}`.
    """
    return study(data, model, grid={"method": methods}, seeds=seeds, **more)


def sweep(data: Any = None, model: ModelLike = None, *, method: str | None = None, **settings: Any) -> Study:
    """Train one method with every combination of values: a `study` whose grid are the settings with a list of values
    (`learning_rate=[0.03, 0.1], validation=0.1`)."""
    method = method or method_in(settings.get("config"))
    grid = {key: value for key, value in settings.items() if isinstance(value, _SEVERAL) and key not in _OTHERS}
    check_swept(grid)
    fixed = {key: value for key, value in settings.items() if key not in grid}
    return study(data, model, grid=grid, method=method, **fixed)


_SEVERAL, _OTHERS = (list, tuple, range, np.ndarray), ("seeds", "callbacks", "metric")


def variant(text: str) -> Tables:
    """The settings, by section, of a method as a comparison names it: `pfedlms:thresholds=1`."""
    found, problems = variants(text)
    if problems or len(found) != 1:
        raise ConfigError(problems or [f"methods: got {text!r}, expected one method; {EXPECTED}"])
    return next(iter(found.values()))


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
    """Play the rounds that are left of the run in `directory`, or the runs that are left of the study: a `Run` or a
    `Study`. Data, model, loss and metric (or a `Problem`) are needed again if they were given in Python and rounds are
    left. `data_dir` is the folder of the data set's files, if they were moved. Ctrl-C as in `run`, `workers` as in
    `study`."""
    found = load(directory, data, model, data_dir=data_dir, loss=loss, metric=metric)
    several = {"workers": workers} if isinstance(found, Study) else {}
    return found.resume(progress=progress, callbacks=callbacks, **several)


resume_study = resume
"""The same by the name it had for studies."""


def load(
    directory: str | Path,
    data: Any = None,
    model: ModelLike = None,
    *,
    data_dir: str | None = None,
    loss: PerSample | None = None,
    metric: Metric | None = None,
) -> Run | Study:
    """The run or study in a folder, finished or not. Objects that were given in Python are needed again only for
    models."""
    problem = Problem.of(data, model, loss, metric)
    several = manifest_of(Path(directory)) is not None
    return (load_study if several else load_run)(Path(directory), problem, data_dir)


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
    """Write models of the run in `directory`, as of its latest checkpoint: `pfedlms.load(directory).export(file, …)`.
    The folder is enough, unless the model was given in Python. Clients that took no part in the last round need their
    data, for its local steps; without data their model is the one before these steps."""
    refuse_study(Path(directory), "export")
    found = load_run(directory, Problem.of(data, model), data_dir)
    found.export(file, client=client, shared=shared, best=best)
