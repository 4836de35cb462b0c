"""A study: a grid of settings × seeds, every run in a folder of its own, resumable, in parallel if asked for. A
comparison of methods and a sweep of settings are studies."""

from __future__ import annotations

import errno
import json
import re
import signal
import tomllib
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

from pfedlms.errors import DivergedError, QuorumError, RunDirectoryError, StorageError, UsageError
from pfedlms.experiment import showing
from pfedlms.experiment.callbacks import watching
from pfedlms.experiment.config import Config, load_config
from pfedlms.experiment.grids import Axes, Cell, Plan, outermost
from pfedlms.experiment.loop import fixed_settings, leave
from pfedlms.experiment.prepare import NAMED, rehearse
from pfedlms.experiment.problem import Problem, call
from pfedlms.experiment.runs import Run, begin, data_frame, load_run, open_run, resume_run
from pfedlms.experiment.store import RunDirectory, write_atomically
from pfedlms.experiment.summary import MEASURES
from pfedlms.experiment.workers import in_parallel

SCHEMA = 1
MANIFEST = "study.json"
MANIFESTS = (MANIFEST, "compare.json", "sweep.json")
"""The file that makes a folder a study's; the others are of the last version."""
OF_THE_RESULT = ("seed", "lost", "quorum", "evaluate_every")
"""What of [run] changes what is measured: the last of them which evaluations maximum and last 10 are of."""
_KEPT_BYTES = 1 << 30
"""Of all models of a study that has no folder; beyond, they are not kept."""


@dataclass
class Study:
    """What a study reached, in the order it was planned; printing it shows the table."""

    runs: list[Run]
    directory: Path | None
    axes: Axes
    """Settings, `section.key`, with their values; empty for a comparison of methods."""
    by: str
    """What the best is chosen by: v_acc, p_acc or g_acc."""
    planned: list[Config]
    signal: int = 0
    """The signal that interrupted it; 0: none."""

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

    def cells(self, by: str | None = None) -> list[dict[str, Any]]:
        """One entry per row: `name`, `settings` (of the axes), `runs` (summaries) and `score`: the measure, mean of the
        last 10 evaluations, mean over seeds; None if not all its seeds finished."""
        rows: dict[str, dict[str, Any]] = {}
        for run in self.runs:
            flat = run.config.flat()
            first = run.label.split(" ")[0]
            named = self.axes and first.split(":")[0] == run.config.method  # several methods, each with these values
            chosen: dict[str, Any] = {"method": first} if named else {}
            chosen |= {key: flat.get(key) for key in self.axes}
            row = rows.setdefault(run.label, {"name": run.label, "settings": chosen, "runs": []})
            row["runs"].append(run.summary)
        for row in rows.values():
            scores = [(run.get(MEASURES[by or self.by]) or {}).get("last10") for run in row["runs"]]
            measured = [float(score) for score in scores if score is not None]
            whole = len(measured) == len(scores) and all(run["status"] == "finished" for run in row["runs"])
            row["score"] = mean(measured) if whole else None
        return list(rows.values())

    def best(self, by: str | None = None) -> dict[str, Any] | None:
        """The cell with the highest score by v_acc, p_acc or g_acc, the first of several; None before any has one.
        Default: V-acc where samples are set aside (`data.validation`)."""
        scored = [cell for cell in self.cells(by) if cell["score"] is not None]
        return max(scored, key=lambda cell: float(cell["score"])) if scored else None

    @property
    def at_edge(self) -> list[str]:
        """Where the best lies at the end of a list of three or more numbers and there are numbers beyond, which may be
        better."""
        best, found = self.best(), []
        for key, values in self.axes.items() if best else ():
            assert best is not None
            value = best["settings"][key]
            if value is None or len(values) < 3 or not _numbers(values):
                continue
            if value in (min(values), max(values)) and value not in outermost(best["runs"][0]["method"], key):
                end, beyond = ("largest", "larger") if value == max(values) else ("smallest", "smaller")
                found.append(f"the best {key} is {value}, the {end} tried; try {beyond} ones")
        return found

    def table(self) -> str:
        """The table as plain text."""
        return showing.text(self)

    def to_latex(self) -> str:
        """The table for a paper (booktabs)."""
        return showing.table(self).latex()

    def to_pandas(self) -> Any:
        """One row per run: what results.csv has (extra `pandas`)."""
        return data_frame(showing.flat_results(self.runs, self.planned))

    def plot(self, file: str | Path) -> None:
        """Draw accuracy against bytes, or against the setting with the most values; PNG, SVG or PDF (extra
        `report`)."""
        showing.plot(self, Path(file))

    def report(self, file: str | Path) -> None:
        """One page to read and to share."""
        showing.page(self, Path(file))

    def resume(self, *, progress: bool | None = None, callbacks: Iterable[Any] | None = None) -> Study:
        """Play the runs that are left of a study with a folder."""
        if self.directory is None:
            raise UsageError("resume: this study has no folder; run it with out=DIR")
        problem = self.runs[0].problem if self.runs else NAMED
        with watching(progress, callbacks) as calls:
            return resume_all(self.directory, problem, calls).or_leave()

    def or_leave(self) -> Study:
        """The study as its caller in Python gets it, or what a signal asked for once all is saved."""
        kept = self.directory is not None and self.interrupted
        leave(self.signal, self, call("resume_study", self.directory, first_tables(self.directory)) if kept else "")
        return self


# --- folders


def manifest_of(directory: Path) -> Path | None:
    """The file that makes a folder a study's; None where there is none."""
    return next((directory / name for name in MANIFESTS if (directory / name).is_file()), None)


def read_manifest(file: Path) -> dict[str, Any]:
    """`runs` (configurations by folder), `names` (of rows, by folder), `axes` and `by`."""
    try:
        manifest = json.loads(file.read_text())
        schema = manifest.get("schema")
    except (OSError, ValueError, AttributeError) as error:
        raise RunDirectoryError(f"{file.parent}: {file.name} cannot be read ({error})") from error
    if schema != SCHEMA:
        raise RunDirectoryError(
            f"{file.parent}: got schema {schema!r}, expected {SCHEMA}; it is of another version of pfedlms"
        )
    return {"axes": {}, "by": "p_acc", "names": {}, **manifest}


def first_tables(directory: Path | None) -> dict[str, Any]:
    """Settings of a study's first run, which has the same data and model as all others."""
    file = manifest_of(directory) if directory else None
    return tomllib.loads(next(iter(read_manifest(file)["runs"].values()))) if file else {}


def refuse_study(directory: Path, command: str) -> None:
    """A study's folder where a run's is expected: name its runs."""
    manifest = manifest_of(directory)
    if manifest is not None:
        runs = list(read_manifest(manifest)["runs"])
        shown = ", ".join(str(directory / name) for name in runs[:6]) + (", …" if len(runs) > 6 else "")
        raise UsageError(f"{directory}: holds {len(runs)} runs; {command} one of them: {shown}")


def load_study(directory: Path, problem: Problem = NAMED) -> Study:
    """A study as far as it came."""
    file = manifest_of(directory)
    if file is None:
        raise RunDirectoryError(f"{directory}: no study here ({', '.join(MANIFESTS)} are missing)")
    manifest = read_manifest(file)
    found = [
        load_run(directory / folder, problem, label=manifest["names"].get(folder, ""))
        for folder in manifest["runs"]
        if (directory / folder / "config.toml").is_file()
    ]
    planned = [_read_config(text) for text in manifest["runs"].values()]
    done = [run for run in found if run.summary["rounds"]]
    return Study(done, directory, manifest["axes"], manifest["by"], planned)


def _read_config(text: str) -> Config:
    return load_config(None, tomllib.loads(text), stored=True)


def same_run(planned: Config, stored: Config) -> bool:
    """Whether two configurations measure the same: all but where data lie and how a run is executed."""

    def of(config: Config) -> dict[str, Any]:
        run = {key: getattr(config.run, key) for key in OF_THE_RESULT}
        return {**fixed_settings(config), "rounds": config.train.rounds, **run}

    one, other = of(planned), of(stored)
    if not planned.data.mean:  # computed from the data when the run began
        other |= {"data.mean": "", "data.std": ""}
    return one == other


# --- playing


def play(
    made: Plan, problem: Problem = NAMED, out: Path | None = None, callbacks: Sequence[Any] = (), workers: int = 1
) -> Study:
    """Play planned runs; with a directory, every run has its own folder in it, and study.json the whole plan. A folder
    that has these runs already, with the same settings, is resumed; other rows may be added to it."""
    if workers < 1 or (workers > 1 and out is None):
        raise UsageError(f"workers: got {workers}, expected at least 1, and out=DIR where there are several")
    rehearse([each.config for each in made.cells], problem)
    if out is None:
        fresh = partial(begin, problem=problem, callbacks=callbacks)
        plays = [
            (each, partial(fresh, each.config.silenced().with_run(out=""), label=each.label)) for each in made.cells
        ]
        return _collect(plays, None, made)
    if (out / "config.toml").exists():
        raise RunDirectoryError(f"{out}: holds a run already; name another --out")
    folders = _folders(made.cells)
    before = _agreeing(out, folders)
    names = {name: each.label for name, each in folders.items()}
    texts = {name: each.config.with_run(out=str(out / name)).to_toml() for name, each in folders.items()}
    stored = before.get("runs", {})
    runs = {**stored, **{name: text for name, text in texts.items() if name not in stored}}
    manifest = {"schema": SCHEMA, "axes": made.axes, "by": made.by, "names": {**before.get("names", {}), **names}}
    content = json.dumps({**manifest, "runs": runs}, indent=2) + "\n"
    try:
        out.mkdir(parents=True, exist_ok=True)
        write_atomically(out / MANIFEST, lambda file: file.write(content.encode()))
    except OSError as error:
        raise RunDirectoryError(f"{out}: cannot be written ({error.strerror}); name another --out") from error
    places = {each.config.data.dir for each in made.cells}
    moved = places.pop() if len(places) == 1 else None  # the data may lie elsewhere than when a run began
    return _resume(out, list(folders), problem, callbacks, moved or None, workers)


def _agreeing(out: Path, folders: Mapping[str, Cell]) -> dict[str, Any]:
    """The manifest of a folder that holds a study already, whose runs of the same names have the same settings."""
    file = manifest_of(out)
    if file is None:
        return {}
    before = read_manifest(file)
    for name, cell in folders.items():
        text = before["runs"].get(name)
        if text is not None and not same_run(cell.config, _read_config(text)):
            raise RunDirectoryError(
                f"{out}: holds runs already, {name} with other settings; resume them with `pfedlms resume {out}`, or "
                "name another --out"
            )
    return before


def resume_all(
    directory: Path, problem: Problem = NAMED, callbacks: Sequence[Any] = (), data_dir: str | None = None,
    workers: int = 1,
) -> Study:  # fmt: skip
    """`resume_study` for callers that look at `Study.signal` themselves."""
    file = manifest_of(directory)
    if file is None:
        raise RunDirectoryError(f"{directory}: no study here ({', '.join(MANIFESTS)} are missing)")
    return _resume(directory, list(read_manifest(file)["runs"]), problem, callbacks, data_dir, workers)


def _resume(
    directory: Path, chosen: Sequence[str], problem: Problem, callbacks: Sequence[Any], data_dir: str | None,
    workers: int,
) -> Study:  # fmt: skip
    """Play every one of these runs that is not finished yet."""
    file = manifest_of(directory)
    assert file is not None
    manifest = read_manifest(file)
    plays: list[tuple[Cell, Callable[[], Run]]] = []
    for folder in chosen:
        stored = RunDirectory(directory / folder)
        if not stored.config.is_file():
            with stored:
                _create(stored, manifest["runs"][folder], directory)
        config = open_run(stored.path, data_dir)[1].with_run(out=str(stored.path))
        cell = Cell(manifest["names"].get(folder, config.method), config)
        plays.append((cell, partial(resume_run, stored.path, problem, callbacks, data_dir, cell.label)))
    made = Plan([cell for cell, _ in plays], manifest["axes"], manifest["by"])
    others: list[Run] = []
    if set(manifest["runs"]) - set(chosen):
        others = [run for run in load_study(directory).runs if run.directory and run.directory.name not in chosen]
    if workers > 1:
        return _collect(in_parallel(made.cells, problem, callbacks, data_dir, workers), directory, made, others)
    return _collect(plays, directory, made, others)


def _create(stored: RunDirectory, config: str, directory: Path) -> None:
    try:
        stored.create(config)
    except RunDirectoryError as error:
        cause = error.__cause__
        if isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT):
            raise StorageError(stored.path, str(cause.strerror), resume=directory) from error
        raise


def _collect(
    plays: Iterable[tuple[Cell, Callable[[], Run]]], directory: Path | None, made: Plan, others: Sequence[Run] = ()
) -> Study:
    """Play all runs. One that diverges, or loses too many messages, is marked and does not end the others. `others` are
    runs of the same folder that are not played now."""
    planned = [each.config for each in made.cells]
    done: list[Run] = []
    came = 0
    try:
        for each, run_it in plays:
            try:
                run = run_it()
                came = run.stopped
            except (DivergedError, QuorumError) as error:
                summary = dict(error.summary or {})
                warnings.warn(f"{each.label} seed {summary['seed']} {summary['status']}: {error}", stacklevel=2)
                run = Run(each.config, directory and Path(each.config.run.out), label=each.label, summary=summary)
                run.metrics = [] if directory is None else run.metrics
            except StorageError as error:
                raise StorageError(error.path, error.reason, resume=directory) from error
            _release(run, len(made.cells))
            done.append(run)
            if directory is not None:
                _write_results(directory, [*others, *_ordered(done, made)], made)
            if came:
                break
    except KeyboardInterrupt:  # between two runs, or Ctrl-C pressed twice
        came = signal.SIGINT
    found = Study(_ordered(done, made), directory, made.axes, made.by, planned, int(came))
    _warn(found)
    return found


def _write_results(directory: Path, runs: Sequence[Run], made: Plan) -> None:
    """results.json and results.csv of all runs in the folder; settings in which they differ are those of the plan."""
    cells = {(each.label, each.config.run.seed): each.config for each in made.cells}
    planned = [cells.pop((run.label, run.config.run.seed), run.config) for run in runs]
    showing.write_results(directory, runs, [*planned, *cells.values()], made.axes, made.by)


def _release(run: Run, runs: int) -> None:
    """Models of a run that has no folder are kept while those of all runs take at most 1 GiB."""
    size = 4 * run.summary["clients"] * run.summary["parameters"] * runs
    run.release(keep_models=run.directory is None and size <= _KEPT_BYTES)


def _ordered(done: Sequence[Run], made: Plan) -> list[Run]:
    """Runs in the order of the plan, whichever ended first."""
    places = {(each.label, each.config.run.seed): place for place, each in enumerate(made.cells)}
    return sorted(done, key=lambda run: places[run.label, run.config.run.seed])


def _warn(done: Study) -> None:
    """What one should know before believing the best of a sweep."""
    if not done.axes or done.interrupted:
        return
    for text in done.at_edge:
        warnings.warn(text, stacklevel=5)
    if done.by != "v_acc":
        told = f"chosen by {done.by} on test samples, which flatters the best; data.validation=0.1 sets others aside"
        warnings.warn(told, stacklevel=5)


def _folders(cells: Sequence[Cell]) -> dict[str, Cell]:
    """A folder's name for every run: of characters that every shell and file system takes as they are."""
    folders: dict[str, Cell] = {}
    for number, each in enumerate(cells):
        stem = re.sub(r"[^\w.=+-]+", "-", each.label)
        name = f"{stem}-seed{each.config.run.seed}"
        folders[name if len(name) < 200 and name not in folders else f"run{number}-seed{each.config.run.seed}"] = each
    return folders


def _numbers(values: Sequence[Any]) -> bool:
    return all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)
