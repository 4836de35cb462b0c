"""A study: a grid of settings × seeds, every run in a folder of its own, resumable, in parallel if asked for. A
comparison of methods and a sweep of settings are studies."""

from __future__ import annotations

import errno
import json
import re
import signal
import time
import tomllib
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from pfedlms.errors import RunDirectoryError, RunError, StorageError, UsageError
from pfedlms.experiment.callbacks import watching
from pfedlms.experiment.config import Config, keys, load_config
from pfedlms.experiment.grids import Axes, Cell, Plan
from pfedlms.experiment.loop import fixed_settings, leave
from pfedlms.experiment.prepare import NAMED, keeping_pools, rehearse
from pfedlms.experiment.problem import Problem, call
from pfedlms.experiment.runs import Run, begin, data_frame, load_run, open_run, plot_curves, resume_run
from pfedlms.experiment.store import RunDirectory, write_text
from pfedlms.experiment.workers import in_parallel
from pfedlms.report import runs as reported
from pfedlms.report.figures import by_setting
from pfedlms.report.results import comparison, results, results_json
from pfedlms.report.tables import Table, to_csv

SCHEMA = 1
MANIFEST = "study.json"
MANIFESTS = (MANIFEST, "compare.json", "sweep.json")
"""The file that makes a folder a study's; the others are of the last version."""
OF_THE_RESULT = ("seed", "lost", "quorum", "evaluate_every")
"""What of [run] changes what is measured."""
_KEPT_BYTES = 1 << 30
"""Models of a study without a folder are kept in memory while all of them take at most this."""


@dataclass
class Study:
    """Results of a study, in the order of its plan; printing it shows the table."""

    runs: list[Run]
    directory: Path | None
    axes: Axes
    """Settings, `section.key`, with their values; empty for a comparison of methods."""
    by: str
    """What the best is chosen by: v_acc, p_acc or g_acc."""
    planned: list[Config]
    signal: int = 0
    """The signal that interrupted it; 0: none."""
    problem: Problem = field(default=NAMED, compare=False)
    """What was given as Python objects; runs that are left need it."""

    def __repr__(self) -> str:
        """`Study(12 runs, in runs/compared)`; printing it shows more."""
        where = f", in {self.directory}" if self.directory else ""
        count = f"{len(self.runs)} run{'s' * (len(self.runs) != 1)}"
        return f"Study({count}{', interrupted' * self.interrupted}{where})"

    def __str__(self) -> str:
        return self.table()

    @property
    def interrupted(self) -> bool:
        """Whether runs are left to play."""
        unfinished = any(run.summary["status"] == "interrupted" for run in self.runs)
        return unfinished or len(self.runs) < len(self.planned)

    @property
    def broken(self) -> bool:
        """Whether any run ended early: a loss stopped being finite, or too many messages were lost."""
        return any(run.summary["status"] in ("diverged", "failed") for run in self.runs)

    @property
    def summaries(self) -> list[dict[str, Any]]:
        """Of all runs, each with the `name` of its row and its `directory`."""
        return [
            {**run.summary, "name": run.label, "directory": str(run.directory) if run.directory else None}
            for run in self.runs
        ]

    def section(self, by: str | None = None) -> reported.Section:
        """The study as tables, figures and the page take it."""
        kind = "Sweep" if self.axes else "Comparison"
        title = self.directory.name if self.directory else kind
        return reported.Section(title, self.runs, kind, self.axes, by or self.by)

    def cells(self, by: str | None = None) -> list[dict[str, Any]]:
        """One entry per row: `name`, `settings` (of the axes), `runs` (summaries) and `score`: the measure, mean of the
        last 10 evaluations, mean over seeds; None if not all its seeds finished."""
        found = []
        for cell in reported.cells(self.section(by)):
            first = cell.label.split(" ")[0]
            named = self.axes and first.split(":")[0] == cell.runs[0].settings["method"]["name"]  # several methods
            settings = {**({"method": first} if named else {}), **cell.settings}
            summaries = [run.summary for run in cell.runs]
            found.append({"name": cell.label, "settings": settings, "runs": summaries, "score": cell.score})
        return found

    def best(self, by: str | None = None) -> dict[str, Any] | None:
        """The cell with the highest score by v_acc, p_acc or g_acc, the first of several; None before any has one.
        Default: V-acc where samples are set aside (`data.validation`)."""
        scored = [cell for cell in self.cells(by) if cell["score"] is not None]
        return max(scored, key=lambda cell: float(cell["score"]), default=None)

    @property
    def at_edge(self) -> list[str]:
        """Where the best lies at the end of a list of three or more numbers and there are numbers beyond, which may be
        better."""
        best, found = self.best(), []
        for key, values in self.axes.items() if best else ():
            assert best is not None
            value, (section, _, name) = best["settings"][key], key.partition(".")
            if len(values) < 3 or not all(type(each) in (int, float) for each in values):
                continue
            limits = keys([best["runs"][0]["method"]])[section, name].metadata["limits"]
            if value in (min(values), max(values)) and value not in (limits["minimum"], limits["maximum"]):
                end, beyond = ("largest", "larger") if value == max(values) else ("smallest", "smaller")
                found.append(f"the best {key} is {value}, the {end} tried; try {beyond} ones")
        return found

    def as_table(self) -> Table:
        """The table, to be shown as text, on a terminal or in LaTeX."""
        return comparison(self.runs, self.section() if self.axes else None)

    def table(self) -> str:
        """The table as plain text."""
        return f"{self.as_table()}\n" if self.runs else "no runs yet\n"

    def to_latex(self) -> str:
        """The table for a paper (booktabs)."""
        return self.as_table().latex()

    def to_pandas(self) -> Any:
        """One row per run: what results.csv has (extra `pandas`)."""
        return data_frame(results(self.runs, [each.tables() for each in self.planned]))

    def plot(self, file: str | Path) -> None:
        """Draw accuracy against bytes, or against the setting with the most values; PNG, SVG or PDF (extra
        `report`)."""
        if not self.axes:
            plot_curves(self.runs, Path(file))
            return
        figure = by_setting(self.section(), self.as_table().title)
        if figure is not None:
            figure.save(Path(file))

    def report(self, file: str | Path) -> None:
        """One page to read and to share."""
        from pfedlms.report.page import write_page

        write_page([self.section()], Path(file))

    def resume(self, *, progress: bool | None = None, callbacks: Iterable[Any] | None = None) -> Study:
        """Play the runs that are left of a study with a folder."""
        if self.directory is None:
            raise UsageError("resume: this study has no folder; run it with out=DIR")
        with watching(progress, callbacks) as calls:
            return resume_all(self.directory, self.problem, calls).or_leave()

    def or_leave(self) -> Study:
        """The study, for callers in Python; or what a signal asked for, after everything is saved."""
        kept = self.directory is not None and self.interrupted
        leave(self.signal, self, call("resume_study", self.directory, self.planned[0].tables()) if kept else "")
        return self


# --- folders


def manifest_of(directory: Path) -> Path | None:
    """The file that makes a folder a study's; None where there is none."""
    return next((directory / name for name in MANIFESTS if (directory / name).is_file()), None)


def read_manifest(directory: Path) -> dict[str, Any]:
    """`runs` (configurations by folder), `names` (of rows, by folder), `axes` and `by`."""
    file = manifest_of(directory)
    if file is None:
        raise RunDirectoryError(f"{directory}: no study here ({', '.join(MANIFESTS)} are missing)")
    try:
        manifest = json.loads(file.read_text())
        schema = manifest.get("schema")
    except (OSError, ValueError, AttributeError) as error:
        raise RunDirectoryError(f"{directory}: {file.name} cannot be read ({error})") from error
    if schema != SCHEMA:
        raise RunDirectoryError(
            f"{directory}: got schema {schema!r}, expected {SCHEMA}; it is of another version of pfedlms"
        )
    return {"axes": {}, "by": "p_acc", "names": {}, **manifest}


def refuse_study(directory: Path, command: str) -> None:
    """A study's folder where a run's is expected: name its runs."""
    if manifest_of(directory) is not None:
        runs = list(read_manifest(directory)["runs"])
        shown = ", ".join(str(directory / name) for name in runs[:6]) + (", …" if len(runs) > 6 else "")
        raise UsageError(f"{directory}: holds {len(runs)} runs; {command} one of them: {shown}")


def load_study(directory: Path, problem: Problem = NAMED) -> Study:
    """A study, finished or not; runs without a finished round are left out."""
    manifest = read_manifest(directory)
    found = [
        load_run(directory / folder, problem, label=manifest["names"].get(folder, ""))
        for folder in manifest["runs"]
        if (directory / folder / "config.toml").is_file()
    ]
    planned = [_read_config(text) for text in manifest["runs"].values()]
    done = [run for run in found if run.summary["rounds"]]
    return Study(done, directory, manifest["axes"], manifest["by"], planned, problem=problem)


def _read_config(text: str) -> Config:
    return load_config(None, tomllib.loads(text), stored=True)


def same_run(planned: Config, stored: Config) -> bool:
    """Whether two configurations measure the same: all but where data are and how a run is executed."""

    def of(config: Config) -> dict[str, Any]:
        run = {key: getattr(config.run, key) for key in OF_THE_RESULT}
        return {**fixed_settings(config), "rounds": config.train.rounds, **run}

    one, other = of(planned), of(stored)
    if not planned.data.mean:  # computed from the data when the run began
        other |= {"data.mean": "", "data.std": ""}
    return one == other


# --- playing


@keeping_pools()
def play(
    made: Plan, problem: Problem = NAMED, out: Path | None = None, callbacks: Sequence[Any] = (), workers: int = 1,
    seconds: float = float("inf"),
) -> Study:  # fmt: skip
    """Play planned runs; with a directory, every run has its own folder in it, and study.json the whole plan. A folder
    that has these runs already, with the same settings, is resumed; other rows may be added to it. No run is begun
    after so many seconds."""
    deadline = time.monotonic() + seconds
    if workers < 1 or (workers > 1 and out is None):
        raise UsageError(f"workers: got {workers}, expected at least 1, and out=DIR where there are several")
    rehearse([each.config for each in made.cells], problem)
    if out is None:
        fresh = partial(begin, problem=problem, callbacks=callbacks)
        plays = [
            (each, partial(fresh, each.config.silenced().with_run(out=""), label=each.label)) for each in made.cells
        ]
        return _collect(plays, None, problem, made, (), deadline)
    folders = _folders(made.cells)
    _write_manifest(made, folders, out)
    places = {each.config.data.dir for each in made.cells}
    moved = places.pop() if len(places) == 1 else None  # the data may have been moved since a run began
    return resume_all(out, problem, callbacks, moved or None, workers, list(folders), deadline)


def _write_manifest(made: Plan, folders: Mapping[str, Cell], out: Path) -> None:
    """study.json of all runs, beside those that the folder holds already; runs of the same name must have the same
    settings."""
    if (out / "config.toml").exists():
        raise RunDirectoryError(f"{out}: holds a run already; name another out=DIR")
    before = read_manifest(out) if manifest_of(out) else {"runs": {}, "names": {}}
    for name, cell in folders.items():
        if name in before["runs"] and not same_run(cell.config, _read_config(before["runs"][name])):
            raise RunDirectoryError(
                f"{out}: holds runs already, {name} with other settings; resume them with `pfedlms resume {out}`, or "
                "name another out=DIR"
            )
    names = {name: each.label for name, each in folders.items()}
    texts = {name: each.config.with_run(out=str(out / name)).to_toml() for name, each in folders.items()}
    manifest = {"schema": SCHEMA, "axes": made.axes, "by": made.by, "names": before["names"] | names}
    runs = before["runs"] | {name: text for name, text in texts.items() if name not in before["runs"]}
    try:
        out.mkdir(parents=True, exist_ok=True)
        write_text(out / MANIFEST, json.dumps({**manifest, "runs": runs}, indent=2) + "\n")
    except OSError as error:
        raise RunDirectoryError(f"{out}: cannot be written ({error.strerror}); name another out=DIR") from error


@keeping_pools()
def resume_all(
    directory: Path, problem: Problem = NAMED, callbacks: Sequence[Any] = (), data_dir: str | None = None,
    workers: int = 1, chosen: Sequence[str] | None = None, deadline: float = float("inf"),
) -> Study:  # fmt: skip
    """Play every run of a study that is not finished yet, or those whose folders are `chosen`. Callers look at
    `Study.signal` themselves, or call `or_leave`."""
    manifest = read_manifest(directory)
    chosen = list(manifest["runs"]) if chosen is None else chosen
    plays: list[tuple[Cell, Callable[[], Run]]] = []
    for folder in chosen:
        stored = RunDirectory(directory / folder)
        if not stored.config.is_file():
            with stored:
                _create(stored, manifest["runs"][folder], directory)
        config = open_run(stored.path, data_dir)[1].with_run(out=str(stored.path))
        problem.check_complete(config, directory, "study")
        cell = Cell(manifest["names"].get(folder, config.method), config)
        plays.append((cell, partial(resume_run, stored.path, problem, callbacks, data_dir, cell.label)))
    made = Plan([cell for cell, _ in plays], manifest["axes"], manifest["by"])
    others: list[Run] = []
    if set(manifest["runs"]) - set(chosen):
        others = [run for run in load_study(directory).runs if run.directory and run.directory.name not in chosen]
    if workers > 1:
        together = in_parallel(made.cells, problem, callbacks, data_dir, workers, deadline)
        return _collect(together, directory, problem, made, others)
    return _collect(plays, directory, problem, made, others, deadline)


def _create(stored: RunDirectory, config: str, directory: Path) -> None:
    try:
        stored.create(config)
    except RunDirectoryError as error:
        cause = error.__cause__
        if isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT):
            raise StorageError(stored.path, str(cause.strerror), resume=directory) from error
        raise


def _collect(
    plays: Iterable[tuple[Cell, Callable[[], Run]]], directory: Path | None, problem: Problem, made: Plan,
    others: Sequence[Run] = (), deadline: float = float("inf"),
) -> Study:  # fmt: skip
    """Play all runs. One that diverges, loses too many messages, or whose process dies is marked and does not end the
    others. `others` are runs of the same folder that are not played now."""
    order = {(each.label, each.config.run.seed): place for place, each in enumerate(made.cells)}
    done: list[Run] = []
    stopped = 0
    try:
        for each, run_it in plays:
            if time.monotonic() > deadline:
                break
            try:
                run = run_it()
                stopped = run.stopped
            except StorageError as error:
                raise StorageError(error.path, error.reason, resume=directory) from error
            except RunError as error:
                if error.summary is None:
                    raise
                summary = dict(error.summary)
                warnings.warn(f"{each.label} seed {summary['seed']} {summary['status']}: {error}", stacklevel=2)
                run = Run(each.config, directory and Path(each.config.run.out), label=each.label, summary=summary)
                run.metrics = [] if directory is None else run.metrics
            size = 4 * run.summary["clients"] * run.summary["parameters"] * len(made.cells)
            run.release(keep_models=run.directory is None and size <= _KEPT_BYTES)
            done = sorted([*done, run], key=lambda run: order[run.label, run.config.run.seed])
            if directory is not None:
                _write_results(directory, [*others, *done], made)
            if stopped:
                break
    except KeyboardInterrupt:  # between two runs, or Ctrl-C pressed twice
        stopped = signal.SIGINT
    planned = [each.config for each in made.cells]
    found = Study(done, directory, made.axes, made.by, planned, int(stopped), problem)
    if found.axes and not found.interrupted:
        flatters = (
            f"chosen by {found.by} on test samples, which flatters the best; data.validation=0.1 sets others aside"
        )
        for text in [*found.at_edge, *([flatters] if found.by != "v_acc" else [])]:
            warnings.warn(text, stacklevel=4)
    return found


def _write_results(directory: Path, runs: Sequence[Run], made: Plan) -> None:
    """results.json and results.csv of all runs in the folder; settings in which they differ are those of the plan."""
    cells = {(each.label, each.config.run.seed): each.config for each in made.cells}
    planned = [cells.pop((run.label, run.config.run.seed), run.config) for run in runs]
    tables = [each.tables() for each in [*planned, *cells.values()]]
    swept = {"axes": made.axes, "by": made.by} if made.axes else {}
    try:
        write_text(directory / "results.json", json.dumps(results_json(runs, tables, **swept), indent=2) + "\n")
        write_text(directory / "results.csv", to_csv(results(runs, tables)))
    except OSError as error:
        raise StorageError(directory, error.strerror or str(error), resume=directory) from error


def _folders(cells: Sequence[Cell]) -> dict[str, Cell]:
    """A folder's name for every run: of characters that every shell and file system takes as they are."""
    folders: dict[str, Cell] = {}
    for number, each in enumerate(cells):
        stem = re.sub(r"[^\w.=+-]+", "-", each.label)
        name = f"{stem}-seed{each.config.run.seed}"
        folders[name if len(name) < 200 and name not in folders else f"run{number}-seed{each.config.run.seed}"] = each
    return folders
