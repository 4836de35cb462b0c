"""Several runs in one folder: planned, played one after another, gone on with after an interruption, their results in
one place. A comparison and a sweep are studies."""

from __future__ import annotations

import errno
import json
import re
import signal
import tomllib
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from pfedlms.errors import DivergedError, QuorumError, RunDirectoryError, StorageError, UsageError
from pfedlms.experiment.checks import silenced
from pfedlms.experiment.config import Config
from pfedlms.experiment.play import Progress, Result, in_short, leave
from pfedlms.experiment.prepare import NOTHING_OWN, ModelLike, Own, in_python, rehearse
from pfedlms.experiment.results import write_results
from pfedlms.experiment.run import begin, open_run
from pfedlms.experiment.run import go_on as go_on_with
from pfedlms.experiment.store import RunDirectory, write_atomically

SCHEMA = 1
MANIFESTS = {"compare.json": "comparison", "sweep.json": "sweep"}
_KEPT_BYTES = 1 << 30
"""Of all models of a study that has no folder; beyond, they are not kept."""

Models = list[dict[str, torch.Tensor]]


@dataclass(frozen=True)
class Planned:
    """A run of a study before it is played."""

    name: str
    """Of its row: runs that differ in the seed alone share it."""
    config: Config


@dataclass(frozen=True)
class StudyRun:
    """A run of a study after it was played: what `Result` has, without the federation. With a folder, metrics and
    models are read from it when they are asked for."""

    name: str
    config: Config
    summary: dict[str, Any]
    directory: Path | None
    _metrics: Callable[[], list[dict[str, Any]]] = field(repr=False)
    _models: Callable[[], Models] = field(repr=False)

    def __repr__(self) -> str:
        return f"StudyRun({self.name} seed {self.summary['seed']}: {in_short(self.summary)})"

    @property
    def label(self) -> str:
        """What tables and figures call it."""
        return self.name

    @property
    def settings(self) -> dict[str, dict[str, Any]]:
        return self.config.tables()

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """One record an evaluation."""
        return self._metrics()

    @property
    def models(self) -> Models:
        """Every client's model as a state dict."""
        return self._models()


@dataclass(frozen=True)
class Study:
    """What a study reached, in the order it was planned; printing it shows the table."""

    runs: list[dict[str, Any]]
    """Summaries of the runs, each with `name` and `directory`."""
    directory: Path | None
    interrupted: bool = False
    signal: int = 0
    """The signal that interrupted it; 0: none."""
    results: list[StudyRun] = field(default_factory=list, repr=False)
    """The same runs with settings, metrics and models. Without a folder models are kept in memory while all of them
    take at most 1 GiB."""

    def __repr__(self) -> str:
        """`Comparison(12 runs, in runs/compared)`; printing it shows more."""
        where = f", in {self.directory}" if self.directory else ""
        count = f"{len(self.runs)} run{'s' * (len(self.runs) != 1)}"
        return f"{type(self).__name__}({count}{', interrupted' * self.interrupted}{where})"

    @property
    def broken(self) -> bool:
        """Whether any run ended early: a loss stopped being finite, or too many messages were lost."""
        return any(summary["status"] in ("diverged", "failed") for summary in self.runs)


Kind = TypeVar("Kind", bound=Study)


def left(done: Kind) -> Kind:
    """A study as its caller in Python gets it, or what a signal asked for once all is kept."""
    kept = done.directory is not None and done.interrupted
    call = in_python("resume_study", done.directory, first_tables(done.directory)) if kept and done.directory else ""
    leave(done.signal, done, call)
    return done


def first_tables(directory: Path) -> dict[str, Any]:
    """Settings of a study's first run, which has its data and model as all others do."""
    file = manifest_of(directory)
    return tomllib.loads(next(iter(read_manifest(file)["runs"].values()))) if file else {}


def wrong_seeds(seeds: Any) -> list[str]:
    """What is wrong with a number of seeds."""
    if isinstance(seeds, int | np.integer) and not isinstance(seeds, bool) and seeds >= 1:
        return []
    several = isinstance(seeds, Sequence | range) and not isinstance(seeds, str)
    remedy = "; the first seed is named by seed=…" * several
    return [f"seeds: got {seeds!r}, expected a count of at least 1{remedy}"]


def manifest_of(directory: Path) -> Path | None:
    """The file that makes a folder a study's; None where there is none."""
    return next((directory / name for name in MANIFESTS if (directory / name).is_file()), None)


def read_manifest(file: Path) -> dict[str, Any]:
    """`runs` (configurations by folder), `names` (of rows, by folder), and what the kind of study adds."""
    try:
        manifest = json.loads(file.read_text())
        schema = manifest.get("schema")
    except (OSError, ValueError, AttributeError) as error:
        raise RunDirectoryError(f"{file.parent}: {file.name} cannot be read ({error})") from error
    if schema != SCHEMA:
        raise RunDirectoryError(
            f"{file.parent}: got schema {schema!r}, expected {SCHEMA}; it is of another version of pfedlms"
        )
    return dict(manifest)


def play(
    kind: type[Kind], planned: Sequence[Planned], out: Path | None, data: Any, model: ModelLike, progress: Progress,
    manifest: str, more: Mapping[str, Any], own: Own = NOTHING_OWN,
) -> Kind:  # fmt: skip
    """Execute planned runs; with a directory, every run has its own folder in it, and the manifest the whole plan,
    with `more`, which `kind` takes besides what every study has."""
    rehearse([each.config for each in planned], data, model, own)
    if out is None:
        fresh = partial(begin, progress=progress, data=data, model=model, own=own)
        plays = [(each, partial(fresh, silenced(each.config).with_run(out=""))) for each in planned]
        return _collect(kind, plays, None, data, model, progress, more)
    if manifest_of(out) or (out / "config.toml").exists():
        raise RunDirectoryError(f"{out}: holds runs already; go on with `pfedlms resume {out}`, or name another --out")
    folders = _folders(planned)
    runs = {name: each.config.with_run(out=str(out / name)).to_toml() for name, each in folders.items()}
    names = {name: each.name for name, each in folders.items()}
    content = json.dumps({"schema": SCHEMA, **more, "names": names, "runs": runs}, indent=2) + "\n"
    try:
        out.mkdir(parents=True, exist_ok=True)
        write_atomically(out / manifest, lambda file: file.write(content.encode()))
    except OSError as error:
        raise RunDirectoryError(f"{out}: cannot be written ({error.strerror}); name another --out") from error
    return go_on(kind, out, manifest, data, model, progress, more, own=own)


def go_on(
    kind: type[Kind], directory: Path, manifest: str, data: Any, model: ModelLike, progress: Progress,
    more: Mapping[str, Any], data_dir: str | None = None, own: Own = NOTHING_OWN,
) -> Kind:  # fmt: skip
    """Finish every run of a study that is not finished yet."""
    plan = read_manifest(directory / manifest)
    names = plan.get("names", {})
    plays = []
    for folder, text in plan["runs"].items():
        stored = RunDirectory(directory / folder)
        if not stored.config.is_file():
            with stored:
                _create(stored, text, directory)
        config = open_run(stored.path, data_dir)[1]
        each = Planned(names.get(folder, config.method), config.with_run(out=str(stored.path)))
        plays.append((each, partial(go_on_with, stored.path, data, model, progress, data_dir=data_dir, own=own)))
    return _collect(kind, plays, directory, data, model, progress, more)


def _create(stored: RunDirectory, config: str, directory: Path) -> None:
    try:
        stored.create(config)
    except RunDirectoryError as error:
        cause = error.__cause__
        if isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT):
            raise StorageError(stored.path, str(cause.strerror), resume=directory) from error
        raise


def _collect(
    kind: type[Kind], plays: Sequence[tuple[Planned, Callable[[], Result]]], directory: Path | None, data: Any,
    model: ModelLike, progress: Progress, more: Mapping[str, Any],
) -> Kind:  # fmt: skip
    """Play all runs. One that diverges, or loses too many messages, is marked and does not take the others with it."""
    done: list[StudyRun] = []
    came = 0
    try:
        for each, play in plays:
            progress.named(each.name if each.name != each.config.method else "")
            try:
                result = play()
            except (DivergedError, QuorumError) as error:
                summary = dict(error.summary or {})
                ended = f"{each.name} seed {summary['seed']} {summary['status']}"
                warnings.warn(f"{ended}: {error}", stacklevel=2)
                done.append(_after(each, summary, None, directory, data, model, len(plays)))
            except StorageError as error:
                raise StorageError(error.path, error.reason, resume=directory) from error
            else:
                done.append(_after(each, result.summary, result, directory, data, model, len(plays)))
                came = result.stopped
            if directory is not None:
                write_results(directory, done, [each.config for each, _ in plays], more)
            if came:
                break
    except KeyboardInterrupt:  # between two runs, or Ctrl-C pressed twice
        came = signal.SIGINT
    unfinished = any(run.summary["status"] == "interrupted" for run in done)
    missing = unfinished or len(done) < len(plays)
    return kind(runs_of(done), directory, interrupted=missing, signal=int(came), results=done, **more)


def runs_of(done: Sequence[StudyRun]) -> list[dict[str, Any]]:
    """Summaries with the name of the row and the run's directory."""
    return [
        {**run.summary, "name": run.name, "directory": str(run.directory) if run.directory else None} for run in done
    ]


def stored_run(
    name: str, config: Config, summary: dict[str, Any], data: Any = None, model: ModelLike = None
) -> StudyRun:
    """A run in the folder `run.out`."""
    folder = Path(config.run.out)
    models = partial(_stored_models, folder, data, model, config.data.dir or None)
    return StudyRun(name, config, summary, folder, RunDirectory(folder).read_metrics, models)


def _after(
    each: Planned, summary: dict[str, Any], result: Result | None, directory: Path | None, data: Any, model: ModelLike,
    runs: int,
) -> StudyRun:  # fmt: skip
    if directory is not None:
        return stored_run(each.name, each.config, summary, data, model)
    metrics = result.metrics if result else []
    models = None
    if result and 4 * summary["clients"] * summary["parameters"] * runs <= _KEPT_BYTES:
        models = result.models
    return StudyRun(each.name, each.config, summary, None, lambda: metrics, partial(_kept, models))


def _stored_models(folder: Path, data: Any, model: ModelLike, data_dir: str | None) -> Models:
    from pfedlms.experiment.export import open_checkpoint  # which knows studies, too

    return open_checkpoint(folder, data, model, data_dir).models()


def _kept(models: Models | None) -> Models:
    if models is None:
        raise UsageError("models: were not kept in memory (a failed run, or more than 1 GiB of them); give out=DIR")
    return models


def _folders(planned: Sequence[Planned]) -> dict[str, Planned]:
    """A folder's name for every run: of characters that every shell and file system takes as they are."""
    folders: dict[str, Planned] = {}
    for number, each in enumerate(planned):
        stem = re.sub(r"[^\w.=+-]+", "-", each.name)
        name = f"{stem}-seed{each.config.run.seed}"
        folders[name if len(name) < 200 and name not in folders else f"run{number}-seed{each.config.run.seed}"] = each
    return folders
