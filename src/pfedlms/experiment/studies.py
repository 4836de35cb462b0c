"""A study: a grid of settings × seeds, every run in a folder of its own, resumable, in parallel if asked for. A
comparison of methods and a sweep of settings are studies."""

from __future__ import annotations

import json
import re
import signal
import time
import tomllib
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from pfedlms.errors import RunDirectoryError, RunError, StorageError, UsageError
from pfedlms.experiment.callbacks import watching
from pfedlms.experiment.config import Config, Tables, load_config, setting_fields
from pfedlms.experiment.loop import fingerprint, fixed_settings, or_leave
from pfedlms.experiment.prepare import NAMED_PROBLEM, cache_data_sets, federated, rehearse
from pfedlms.experiment.problem import Problem, how_to_resume
from pfedlms.experiment.runs import Run, data_frame, load_run, plot_curves
from pfedlms.experiment.store import MANIFEST, is_study
from pfedlms.experiment.workers import in_parallel
from pfedlms.files import write_text
from pfedlms.report import runs as reported
from pfedlms.report.figures import by_setting
from pfedlms.report.results import comparison, results, results_json
from pfedlms.report.tables import Table, to_csv
from pfedlms.settings import CUSTOM

Axes = dict[str, list[Any]]
"""Settings, `section.key`, with the values they take."""
SCHEMA = 1
OF_THE_RESULT = ("seed", "lost", "quorum", "evaluate_every")
"""What of [run] changes what is measured."""
_KEPT_BYTES = 1 << 30
"""Models of a study without a folder are kept in memory while all of them take at most this."""


@dataclass
class Study:
    """A study and its results so far, in the order of its plan; printing it shows the table."""

    runs: list[Run]
    """Those that have results."""
    directory: Path | None
    axes: Axes
    """Settings, `section.key`, with their values; empty for a comparison of methods."""
    by: str
    """What the best is chosen by: v_acc, p_acc or g_acc."""
    planned: list[Run]
    """All runs, as they were before this process played them."""
    stopped: int = 0
    """The signal that interrupted it; 0: none."""
    others: list[Run] = field(default_factory=list)
    """Runs of the same folder that another call has planned."""

    def __repr__(self) -> str:
        """`Study(12 runs, in runs/compared)`; printing it shows more."""
        where = f", in {self.directory}" if self.directory else ""
        count = f"{len(self.runs)} run{'s' * (len(self.runs) != 1)}"
        return f"Study({count}{', interrupted' * self.interrupted}{where})"

    def __str__(self) -> str:
        return self.table()

    @property
    def settings(self) -> Tables:
        """The configuration of its first run, by section."""
        return self.planned[0].settings

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
            limits = setting_fields([best["runs"][0]["method"]])[section, name].metadata["limits"]
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
        return data_frame(results(self.runs, self._as_planned(self.runs)))

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

    def resume(
        self, *, progress: bool | None = None, callbacks: Iterable[Any] | None = None, workers: int = 1
    ) -> Study:
        """Play the runs that are left of a study with a folder."""
        if self.directory is None:
            raise UsageError("resume: this study has no folder; run it with out=DIR")
        with watching(progress, callbacks) as calls:
            return or_leave(self.train(calls, workers))

    @cache_data_sets()
    def start(
        self, out: Path | None = None, callbacks: Sequence[Any] = (), workers: int = 1, seconds: float = float("inf")
    ) -> Study:
        """Play planned runs; with a directory, every run has its own folder in it, and study.json the whole plan. A
        folder that has these runs already, with the same settings, is resumed; other rows may be added to it. No run is
        begun after so many seconds."""
        deadline = time.monotonic() + seconds
        if workers < 1 or (workers > 1 and out is None):
            raise UsageError(f"workers: got {workers}, expected at least 1, and out=DIR where there are several")
        parameters = rehearse([run.config for run in self.planned], self.planned[0].problem)
        if out is None:
            alone = [Run(run.config.silenced().with_run(out=""), None, run.problem, run.label) for run in self.planned]
            return replace(self, planned=alone).train(callbacks, workers, deadline)
        made = self._stored_in(out)
        made._check_same_problem(parameters)
        return made.train(callbacks, workers, deadline)

    def _check_same_problem(self, parameters: int) -> None:
        """Refuse runs that finished earlier on other data, or with another model of the user's own, than those given:
        one table would show both."""
        known: dict[Any, str | None] = {}
        for run in (run for run in self.planned if run.finished):
            key = run.config.data, run.config.run.seed
            stored = run.summary.get("data_fingerprint")
            if stored is not None and key not in known:
                known[key] = fingerprint(run.config, federated(run.config.silenced(), run.problem))
            other_model = run.config.model.name == CUSTOM and run.summary["parameters"] != parameters
            if other_model or (stored is not None and known[key] != stored):
                other = "with another model than the one" if other_model else "on other data than those"
                raise RunDirectoryError(
                    f"{run.directory}: was trained {other} given; give the same as before, or name another out=DIR"
                )

    @cache_data_sets()
    def train(self, callbacks: Sequence[Any] = (), workers: int = 1, deadline: float = float("inf")) -> Study:
        """Play every run that is not finished yet, for callers that look at `stopped` themselves. One that diverges,
        loses too many messages, or whose process dies is marked and does not end the others."""
        planned = [run.reread() for run in self.planned]
        done = {place: run for place, run in enumerate(planned) if run.finished}
        left = [run for place, run in enumerate(planned) if place not in done]
        for run in left:
            run.problem.check_complete(run.config, self.directory)
        found = replace(self, runs=list(done.values()), stopped=0)
        found._write_results()
        plays = in_parallel(left, callbacks, workers, deadline) if workers > 1 else _in_turn(left, callbacks, deadline)
        try:
            for run, play in plays:
                played = self._played(run, play)
                size = 4 * played.summary["clients"] * played.summary["parameters"] * len(self.planned)
                played.release(keep_models=played.directory is None and size <= _KEPT_BYTES)
                done[planned.index(run)] = played
                found = replace(found, runs=[done[place] for place in sorted(done)], stopped=played.stopped)
                found._write_results()
                if played.stopped:
                    break
        except KeyboardInterrupt:  # between two runs, or Ctrl-C pressed twice
            found = replace(found, stopped=int(signal.SIGINT))
        except StorageError as error:
            if self.directory is not None:
                error.resume_with(f"`{how_to_resume(self.directory, self.settings)}`")
            raise
        if found.axes and not found.interrupted:
            for text in found.at_edge:
                warnings.warn(text, stacklevel=4)
            if self.by != "v_acc":
                flatters = "which flatters the best; data.validation=0.1 sets others aside"
                warnings.warn(f"chosen by {self.by} on test samples, {flatters}", stacklevel=4)
        return found

    @staticmethod
    def _played(run: Run, play: Callable[[], Run]) -> Run:
        try:
            return play()
        except RunError as error:
            if error.summary is None or isinstance(error, StorageError):
                raise
            summary = dict(error.summary)
            warnings.warn(f"{run.label} seed {summary['seed']} {summary['status']}: {error}", stacklevel=3)
            return Run(run.config, run.directory, run.problem, run.label, None if run.directory else [], summary)

    def _stored_in(self, out: Path) -> Study:
        """With a folder: study.json has all runs, beside those that it holds already; runs of the same name must have
        the same settings."""
        if (out / "config.toml").exists():
            raise RunDirectoryError(f"{out}: holds a run already; name another out=DIR")
        problem, folders = self.planned[0].problem, _folders(self.planned)
        fresh: dict[str, Any] = {"runs": {}, "names": {}, "axes": self.axes}
        before = read_manifest(out) if is_study(out) else fresh
        if bool(before["axes"]) != bool(self.axes):
            held, given = ("a sweep" if axes else "a comparison" for axes in (before["axes"], self.axes))
            raise RunDirectoryError(f"{out}: holds {held}, and this is {given}; name another out=DIR")
        for name in folders.keys() & before["runs"].keys():
            stored = tomllib.loads(before["runs"][name])
            if not same_run(folders[name].config, load_config(None, stored, stored=True)):
                raise RunDirectoryError(
                    f"{out}: holds runs already, {name} with other settings; resume them with "
                    f"`{how_to_resume(out, stored)}`, or name another out=DIR"
                )
        names = before["names"] | {name: run.label for name, run in folders.items()}
        texts = {name: run.config.with_run(out=str(out / name)).to_toml() for name, run in folders.items()}
        manifest = {"schema": SCHEMA, "axes": self.axes, "by": self.by, "names": names}
        manifest["runs"] = before["runs"] | texts | before["runs"]  # those that it holds stay as they are
        try:
            out.mkdir(parents=True, exist_ok=True)
            write_text(out / MANIFEST, json.dumps(manifest, indent=2) + "\n")
        except OSError as error:
            raise RunDirectoryError(f"{out}: cannot be written ({error.strerror}); name another out=DIR") from error
        places = {run.config.data.dir for run in self.planned}
        moved = places.pop() if len(places) == 1 else None  # the data may have been moved since a run began
        whole = load_study(out, problem, moved)
        runs = {run.directory.name: run for run in whole.planned if run.directory}
        others = [run for run in whole.runs if run.directory and run.directory.name not in folders]
        return replace(whole, runs=[], planned=[runs[name] for name in folders], others=others)

    def _as_planned(self, runs: Sequence[Run]) -> list[Tables]:
        """The settings of these runs, then of those that are left, as they were planned: those that differ stay the
        same until all are done."""
        planned = {(run.label, run.config.run.seed): run for run in self.planned}
        shown = [planned.pop((run.label, run.config.run.seed), run) for run in runs]
        return [run.settings for run in [*shown, *planned.values()]]

    def _write_results(self) -> None:
        """results.json and results.csv of all runs in the folder."""
        if self.directory is None or not self.runs:
            return
        runs = [*self.others, *self.runs]
        settings, swept = self._as_planned(runs), {"axes": self.axes, "by": self.by} if self.axes else {}
        document = results_json(runs, settings, **swept)
        try:
            write_text(self.directory / "results.json", json.dumps(document, indent=2) + "\n")
            write_text(self.directory / "results.csv", to_csv(results(runs, settings)))
        except OSError as error:
            raise StorageError(self.directory, error.strerror or str(error)) from error


def _in_turn(runs: Sequence[Run], callbacks: Sequence[Any], deadline: float) -> Iterator[tuple[Run, Callable[[], Run]]]:
    """Each run with the function that plays it; no run is begun after the deadline."""
    for run in runs:
        if time.monotonic() > deadline:
            return
        yield run, partial(run.train, callbacks, begins=not run.begun)


# --- folders


def read_manifest(directory: Path) -> dict[str, Any]:
    """`runs` (configurations by folder), `names` (of rows, by folder), `axes` and `by`."""
    try:
        manifest: dict[str, Any] = json.loads((directory / MANIFEST).read_text())
        schema = manifest.get("schema")
    except (OSError, ValueError, AttributeError) as error:
        raise RunDirectoryError(f"{directory}: {MANIFEST} cannot be read ({error})") from error
    if schema != SCHEMA:
        raise RunDirectoryError(
            f"{directory}: got schema {schema!r}, expected {SCHEMA}; it is of another version of pfedlms"
        )
    missing = [key for key in ("runs", "names", "axes", "by") if key not in manifest]
    if missing:
        raise RunDirectoryError(f"{directory}: {MANIFEST} has no {', '.join(missing)}")
    return manifest


def refuse_study(directory: Path, command: str) -> None:
    """A study's folder where a run's is expected: name its runs."""
    if is_study(directory):
        runs = list(read_manifest(directory)["runs"])
        shown = ", ".join(str(directory / name) for name in runs[:6]) + (", …" if len(runs) > 6 else "")
        raise UsageError(f"{directory}: holds {len(runs)} runs; {command} one of them: {shown}")


def load_study(directory: Path, problem: Problem = NAMED_PROBLEM, data_dir: str | None = None) -> Study:
    """A study, finished or not; runs without a finished round are planned, but have no results."""
    manifest = read_manifest(directory)
    planned = [
        load_run(directory / folder, problem, data_dir, manifest["names"].get(folder, ""), planned)
        for folder, planned in manifest["runs"].items()
    ]
    played = [run for run in planned if run.begun and run.summary["rounds"]]
    return Study(played, directory, manifest["axes"], manifest["by"], planned)


def same_run(planned: Config, stored: Config) -> bool:
    """Whether two configurations measure the same: all but where data are and how a run is executed."""

    def of(config: Config) -> dict[str, Any]:
        run = {key: getattr(config.run, key) for key in OF_THE_RESULT}
        return {**fixed_settings(config), "rounds": config.train.rounds, **run}

    one, other = of(planned), of(stored)
    if not planned.data.mean:  # computed from the data when the run began
        other |= {"data.mean": "", "data.std": ""}
    return one == other


def _folders(runs: Sequence[Run]) -> dict[str, Run]:
    """A folder's name for every run: of characters that every shell and file system takes as they are."""
    folders: dict[str, Run] = {}
    for number, each in enumerate(runs):
        stem = re.sub(r"[^\w.=+-]+", "-", each.label)
        name = f"{stem}-seed{each.config.run.seed}"
        folders[name if len(name) < 200 and name not in folders else f"run{number}-seed{each.config.run.seed}"] = each
    return folders
