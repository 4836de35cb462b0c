"""A study: runs for every combination of settings and seeds, each in its own folder; they can be resumed and run in
parallel. A comparison of methods and a sweep of settings are studies."""

from __future__ import annotations

import json
import re
import signal
import time
import tomllib
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from pfedlms.errors import RunDirectoryError, RunError, StorageError, UsageError
from pfedlms.experiment.callbacks import callbacks_with_progress
from pfedlms.experiment.config import Config, Tables, load_config, setting_fields
from pfedlms.experiment.loop import fixed_settings, method_digest, other_parts, raise_if_stopped
from pfedlms.experiment.prepare import NAMED_PROBLEM, cache_data_sets, check_all_runs, load_client_data
from pfedlms.experiment.problem import Problem, resume_instruction
from pfedlms.experiment.runs import Run, data_frame, load_run, plot_curves
from pfedlms.experiment.store import MANIFEST, is_study
from pfedlms.experiment.workers import Outcomes, train_in_parallel
from pfedlms.files import write_text
from pfedlms.report import runs as reported
from pfedlms.report.figures import by_setting
from pfedlms.report.results import comparison, result_records, results_json
from pfedlms.report.tables import Table, to_csv

Axes = dict[str, list[Any]]
"""Settings, `section.key`, with the values they take."""
SCHEMA = 1
RUN_KEYS_OF_RESULT = ("seed", "lost", "quorum", "evaluate_every")
"""Keys of [run] that change what is measured."""
_MAX_MODEL_BYTES = 1 << 30
"""Models of a study without a folder stay in memory if all of them together take at most this."""


@dataclass
class Study:
    """A study and its results so far, in the order of its plan; printing it shows the table."""

    runs: list[Run]
    """The runs that have results."""
    directory: Path | None
    axes: Axes
    """Settings, `section.key`, with their values; empty for a comparison of methods."""
    by: str
    """The measure that the best is chosen by: v_acc, p_acc or g_acc."""
    planned: list[Run]
    """All runs, in their state before this process trained them."""
    stopped: int = 0
    """The signal that interrupted it; 0: none."""
    others: list[Run] = field(default_factory=list)
    """Runs of the same folder that an earlier call has planned."""

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
    def _configs(self) -> list[Config]:
        return [run.config for run in self.planned]

    @property
    def interrupted(self) -> bool:
        """Whether runs remain to be trained."""
        unfinished = any(run.interrupted for run in self.runs)
        return unfinished or len(self.runs) < len(self.planned)

    @property
    def broken(self) -> bool:
        """Whether any run ended early: a loss stopped being finite, or too many messages were lost."""
        return any(run.summary["status"] in ("diverged", "failed") for run in self.runs)

    @property
    def summaries(self) -> list[dict[str, Any]]:
        """The summaries of all runs, each with the `name` of its row and its `directory`."""
        return [
            {**run.summary, "name": run.label, "directory": str(run.directory) if run.directory else None}
            for run in self.runs
        ]

    def section(self, by: str | None = None) -> reported.Section:
        """The study in the form that tables, figures and the report take."""
        kind = "Sweep" if self.axes else "Comparison"
        title = self.directory.name if self.directory else kind
        reported.check_measure(by or self.by)
        return reported.Section(title, self.runs, kind, self.axes, by or self.by)

    def cells(self, by: str | None = None) -> list[dict[str, Any]]:
        """One entry per row: `name`, `settings` (of the axes), `runs` (summaries) and `score`: the measure, mean of the
        last 10 evaluations, mean over seeds; None if not all its seeds finished."""
        cells = []
        for cell in reported.combinations(self.section(by)):
            summaries = [run.summary for run in cell.runs]
            cells.append({"name": cell.label, "settings": cell.settings, "runs": summaries, "score": cell.score})
        return cells

    def best(self, by: str | None = None) -> dict[str, Any] | None:
        """The cell with the highest score by v_acc, p_acc or g_acc, the first if several have it; None if no cell has a
        score. Default: V-acc where samples are set aside (`data.validation`)."""
        scored = [cell for cell in self.cells(by) if cell["score"] is not None]
        return max(scored, key=lambda cell: float(cell["score"]), default=None)

    @property
    def at_edge(self) -> list[str]:
        """A sentence for each setting whose best value is the smallest or largest of three or more."""
        best, sentences = self.best(), []
        for key, values in self.axes.items() if best else ():
            assert best is not None
            value, (section, _, name) = best["settings"][key], key.partition(".")
            if len(values) < 3 or not all(type(number) in (int, float) for number in values):
                continue
            limits = setting_fields([best["runs"][0]["method"]])[section, name].metadata["limits"]
            if value in (min(values), max(values)) and value not in (limits["minimum"], limits["maximum"]):
                end, beyond = ("largest", "larger") if value == max(values) else ("smallest", "smaller")
                sentences.append(f"the best {key} is {value}, the {end} tried; try {beyond} ones")
        return sentences

    def as_table(self) -> Table:
        """The table, to be shown as text, on a terminal or in LaTeX."""
        return comparison(self.runs, self.section() if self.axes else None)

    def table(self) -> str:
        """The table as plain text."""
        return f"{self.as_table()}\n" if self.runs else "no runs yet\n"

    def to_latex(self, columns: Sequence[str] = ()) -> str:
        """The table for a paper (booktabs), or some of its columns: `["p_acc_last10", "total_bytes"]`, named as in
        results.csv or as on the screen."""
        return self.as_table().select(columns).latex()

    def to_pandas(self) -> Any:
        """One row per run, as in results.csv (extra `pandas`)."""
        return data_frame(result_records(self.runs))

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
        """Train the remaining runs of a study with a folder."""
        if self.directory is None:
            raise UsageError("resume: this study has no folder; run it with out=DIR")
        with callbacks_with_progress(progress, callbacks) as all_callbacks:
            return raise_if_stopped(self.train(all_callbacks, workers))

    @cache_data_sets()
    def start(
        self, out: Path | None = None, callbacks: Sequence[Any] = (), workers: int = 1, seconds: float = float("inf")
    ) -> Study:
        """Train the planned runs. With a directory, every run has its own folder in it, and study.json has the plan. A
        directory that holds these runs already, with the same settings, is resumed; new rows are added to it. No run is
        started after so many seconds."""
        deadline = time.monotonic() + seconds
        if workers < 1 or (workers > 1 and out is None):
            raise UsageError(f"workers: got {workers}, expected at least 1, and out=DIR where there are several")
        check_all_runs(self._configs, self.planned[0].problem)
        if out is None:
            runs = [Run(run.config.quiet().with_run(out=""), None, run.problem, run.label) for run in self.planned]
            return replace(self, planned=runs)._train(callbacks, workers, deadline)
        return self._create_folder(out)._train(callbacks, workers, deadline)

    def _check_same_problem(self, dataset: str = "") -> None:
        """Refuse a folder that has runs on other data, or of another model, loss, metric or code of a method given in
        Python, than those given now: one table would show both. `dataset` is the data set of all runs, if they have
        one; its path may be another than before."""
        problem = self.planned[0].problem
        digests, fingerprints = problem.digests(), dict[Any, set[str]]()
        for run in (run for run in [*self.planned, *self.others] if run.has_started):
            other = other_parts(run.summary, digests | method_digest(run.config))
            if "data_fingerprint" in run.summary and not other:
                data, seed = replace(run.config.data, dataset=dataset or run.config.data.dataset), run.config.run.seed
                if (data, seed) not in fingerprints:
                    client_data = load_client_data(replace(run.config.quiet(), data=data), problem)
                    # Of whole numbers a model that calculates takes floats, and their fingerprint is stored.
                    as_floats = replace(client_data, x=client_data.x.float())
                    fingerprints[data, seed] = {client_data.fingerprint, as_floats.fingerprint}
                if run.summary["data_fingerprint"] not in fingerprints[data, seed]:
                    other = "was trained on other data than given now"
            if other:
                raise RunDirectoryError(f"{run.directory}: {other}; give the same as before, or name another out=DIR")

    @cache_data_sets()
    def train(self, callbacks: Sequence[Any] = (), workers: int = 1) -> Study:
        """Train every run of a folder that is not finished yet, for callers that look at `stopped` themselves."""
        remaining = [run for run in self.planned if not run.reload().finished]
        for run in remaining:
            run.problem.check_given(run.config, directory=self.directory)
        if remaining:
            self._check_same_problem()
        return self._train(callbacks, workers)

    def _train(self, callbacks: Sequence[Any] = (), workers: int = 1, deadline: float = float("inf")) -> Study:
        """Train every run that is not finished yet. A run that diverges, that loses too many messages, or whose process
        dies is marked as such; the others go on."""
        planned = [run.reload() for run in self.planned]
        done = {place: run for place, run in enumerate(planned) if run.finished}
        remaining = [run for place, run in enumerate(planned) if place not in done]
        study = replace(self, runs=list(done.values()), stopped=0)
        study._write_results()
        outcomes = _train_in_turn(remaining, callbacks, deadline)
        if workers > 1:
            outcomes = train_in_parallel(remaining, callbacks, workers, deadline)
        try:
            for run, get_result in outcomes:
                result = self._result_or_failure(run, get_result)
                size = 4 * result.summary["clients"] * result.summary["parameters"] * len(self.planned)
                result.release(keep_models=result.directory is None and size <= _MAX_MODEL_BYTES)
                done[planned.index(run)] = result
                stopped = study.stopped or result.stopped
                study = replace(study, runs=[done[place] for place in sorted(done)], stopped=stopped)
                study._write_results()
                if study.stopped and workers == 1:  # several workers end their rounds, too
                    break
        except KeyboardInterrupt:  # between two runs, or Ctrl-C pressed twice
            study = replace(study, stopped=int(signal.SIGINT))
        except StorageError as error:
            if self.directory is not None:
                error.resume_with(f"`{resume_instruction(self.directory, self.settings)}`")
            raise
        finally:
            outcomes.close()  # ends worker processes, for which Python would wait at its exit
        if study.axes and not study.interrupted:
            for text in study.at_edge:
                warnings.warn(text, stacklevel=4)
            if self.by != "v_acc":
                flatters = "which flatters the best; data.validation=0.1 sets others aside"
                warnings.warn(f"chosen by {self.by} on test samples, {flatters}", stacklevel=4)
        return study

    @staticmethod
    def _result_or_failure(run: Run, get_result: Callable[[], Run]) -> Run:
        """The trained run; after an error that does not end the study, the run with the summary of its failure."""
        try:
            return get_result()
        except RunError as error:
            if error.summary is None or isinstance(error, StorageError):
                raise
            summary = dict(error.summary)
            warnings.warn(f"{run.label} seed {summary['seed']} {summary['status']}: {error}", stacklevel=3)
            return Run(run.config, run.directory, run.problem, run.label, None if run.directory else [], summary)

    def _create_folder(self, out: Path) -> Study:
        """The study with its folder, new or from earlier calls: study.json then has these runs beside those that it had
        already. Nothing is written where they do not belong into one table."""
        if (out / "config.toml").exists():
            raise RunDirectoryError(f"{out}: holds a run already; name another out=DIR")
        problem, folders = self.planned[0].problem, _folder_names(self.planned)
        empty: dict[str, Any] = {"runs": {}, "names": {}, "axes": self.axes}
        earlier = read_manifest(out) if is_study(out) else empty
        if bool(earlier["axes"]) != bool(self.axes):
            there, this = ("a sweep" if axes else "a comparison" for axes in (earlier["axes"], self.axes))
            raise RunDirectoryError(f"{out}: holds {there}, and this is {this}; name another out=DIR")
        stored = {name: load_config(None, tomllib.loads(text), stored=True) for name, text in earlier["runs"].items()}
        self._refuse_other_settings(out, stored, earlier["names"], folders)
        names = earlier["names"] | {name: run.label for name, run in folders.items()}
        texts = {name: run.config.with_run(out=str(out / name)).to_toml() for name, run in folders.items()}
        manifest = {"schema": SCHEMA, "axes": self.axes, "by": self.by, "names": names}
        manifest["runs"] = earlier["runs"] | texts | earlier["runs"]  # in their order; earlier runs stay as they are
        data_dirs = {run.config.data.dir for run in self.planned}
        data_dir = data_dirs.pop() if len(data_dirs) == 1 else None  # the data may have been moved since a run began
        stored_study = load_study(out, problem, data_dir, manifest)
        runs = {run.directory.name: run for run in stored_study.planned if run.directory}
        others = [run for run in stored_study.runs if run.directory and run.directory.name not in folders]
        study = replace(stored_study, runs=[], planned=[runs[name] for name in folders], others=others)
        datasets = [{config.data.dataset for config in side} for side in (self._configs, stored.values())]
        is_varied = "data.dataset" in self.axes or any(len(names) > 1 for names in datasets)
        study._check_same_problem("" if is_varied else self._configs[0].data.dataset)
        try:
            out.mkdir(parents=True, exist_ok=True)
            write_text(out / MANIFEST, json.dumps(manifest, indent=2) + "\n")
        except OSError as error:
            raise RunDirectoryError(f"{out}: cannot be written ({error.strerror}); name another out=DIR") from error
        return study

    def _refuse_other_settings(
        self, out: Path, stored: dict[str, Config], labels: dict[str, str], folders: dict[str, Run]
    ) -> None:
        """Refuse a folder that has these rows with other settings, or only runs of another problem."""
        for (name, there), (folder, run) in product(stored.items(), folders.items()):
            is_same_row = name == folder or labels.get(name) == run.label
            if is_same_row and (differing := _differing_settings(run.config.with_run(seed=there.run.seed), there)):
                raise RunDirectoryError(
                    f"{out}: holds runs already, {name} with another {', '.join(differing)}; resume them with "
                    f"`{resume_instruction(out, there.tables())}`, or name another out=DIR"
                )
        this, earlier = (_problem_settings(configs) for configs in (self._configs, list(stored.values())))
        differing = [key for key in this.keys() & earlier.keys() - self.axes.keys() if this[key] != earlier[key]]
        if differing:
            raise RunDirectoryError(
                f"{out}: holds runs with another {', '.join(sorted(differing))}; name another out=DIR, or for both in "
                "one table, name both in one call of pfedlms.study"
            )

    def _write_results(self) -> None:
        """Write results.json and results.csv of all runs in the folder."""
        if self.directory is None or not self.runs:
            return
        runs = [*self.others, *self.runs]
        document = results_json(runs, **({"axes": self.axes, "by": self.by} if self.axes else {}))
        try:
            write_text(self.directory / "results.json", json.dumps(document, indent=2) + "\n")
            write_text(self.directory / "results.csv", to_csv(result_records(runs)))
        except OSError as error:
            raise StorageError(self.directory, error.strerror or str(error)) from error


def _train_in_turn(runs: Sequence[Run], callbacks: Sequence[Any], deadline: float) -> Outcomes:
    """Runs for `train`, which starts each by asking for its result; no run is started after the deadline."""
    for run in runs:
        if time.monotonic() > deadline:
            return
        yield run, partial(run.train, callbacks, new=not run.has_started)


# --- folders


def read_manifest(directory: Path) -> dict[str, Any]:
    """The content of study.json: `runs` (configurations by folder), `names` (of rows, by folder), `axes` and `by`."""
    try:
        manifest: dict[str, Any] = json.loads((directory / MANIFEST).read_text())
        schema = manifest.get("schema")
    except (OSError, ValueError, AttributeError) as error:
        raise RunDirectoryError(f"{directory}: {MANIFEST} cannot be read ({error})") from error
    if schema != SCHEMA:
        raise RunDirectoryError(
            f"{directory}: got schema {schema!r}, expected {SCHEMA}; it is of another version of pfedlms"
        )
    return manifest


def refuse_study(directory: Path, command: str) -> None:
    """Raise an error that names the runs, if the folder of a study is given where one of a run is expected."""
    if is_study(directory):
        runs = [name for name in read_manifest(directory)["runs"] if (directory / name).is_dir()]
        shown = ", ".join(str(directory / name) for name in runs[:6]) + (", …" if len(runs) > 6 else "")
        raise UsageError(f"{directory}: holds {len(runs)} runs; {command} one of them: {shown}")


def load_study(
    directory: Path,
    problem: Problem = NAMED_PROBLEM,
    data_dir: str | None = None,
    manifest: dict[str, Any] | None = None,
) -> Study:
    """The study in a folder, finished or not, with the plan in study.json or that in `manifest`. A run without a
    finished round is planned, but has no results."""
    manifest = manifest or read_manifest(directory)
    planned = [
        load_run(directory / folder, problem, data_dir, manifest["names"].get(folder, ""), planned)
        for folder, planned in manifest["runs"].items()
    ]
    runs = [run for run in planned if run.has_started and run.summary["rounds"]]
    return Study(runs, directory, manifest["axes"], manifest["by"], planned)


def same_run(planned: Config, stored: Config) -> bool:
    """Whether two configurations give the same results; the folder of the data and the device may differ."""
    return not _differing_settings(planned, stored)


def _differing_settings(planned: Config, stored: Config) -> list[str]:
    """The settings, `section.key`, in which two configurations differ so that their results may."""

    def compared(config: Config) -> dict[str, Any]:
        run = {f"run.{key}": getattr(config.run, key) for key in RUN_KEYS_OF_RESULT}
        return {**fixed_settings(config), "train.rounds": config.train.rounds, **run}

    # Without a mean in the plan, the run computed it from the data when it began.
    computed = {} if planned.data.mean else {"data.mean": "", "data.std": ""}
    here, there = compared(planned), compared(stored) | computed
    return [key for key in here | there if here.get(key) != there.get(key)]


def _problem_settings(configs: Sequence[Config]) -> dict[str, Any]:
    """The settings of data, model, loss and metric that all configurations have in common."""
    places = ("data.", "model.", "train.loss", "train.metric")
    flat = [fixed_settings(config) for config in configs] or [{}]
    common = {key: value for key, value in flat[0].items() if all(each.get(key) == value for each in flat)}
    return {key: value for key, value in common.items() if key.startswith(places)}


def _folder_names(runs: Sequence[Run]) -> dict[str, Run]:
    """The runs by the names of their folders, in characters that every shell and file system accepts."""
    folders: dict[str, Run] = {}
    for number, run in enumerate(runs):
        stem = re.sub(r"[^\w.=+-]+", "-", run.label)
        name = f"{stem}-seed{run.config.run.seed}"
        folders[name if len(name) < 200 and name not in folders else f"run{number}-seed{run.config.run.seed}"] = run
    return folders
