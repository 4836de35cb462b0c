"""What is read for a page: runs by themselves, comparisons and sweeps, from their folders; no data are needed."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pfedlms.errors import PfedlmsError, RunDirectoryError
from pfedlms.experiment.config import Config
from pfedlms.experiment.config import differing as compared
from pfedlms.experiment.runs import load_run
from pfedlms.experiment.store import RunDirectory
from pfedlms.experiment.studies import manifest_of, read_manifest

_DEPTH = 4  # folders in folders that are looked into for runs
_NOT_NAMED = ("run.", "data.dir")
"""Settings that say how and where a run was executed, not what it is."""


@dataclass(frozen=True)
class Run:
    """One run as it is stored."""

    name: str
    """Of its row: runs that differ in the seed alone share it."""
    config: Config
    summary: dict[str, Any]
    metrics: list[dict[str, Any]]
    directory: Path

    @property
    def seed(self) -> int:
        return self.config.run.seed

    @property
    def percent(self) -> bool:
        """Whether accuracy is measured, and no metric of the user's own."""
        return "metric" not in self.summary

    @property
    def client_accuracies(self) -> dict[int, float]:
        """P-acc of every client that was measured: after the last round, or in the last evaluation it was part of."""
        found: dict[int, float | None] = {}
        for record in self.metrics:
            values = record.get("client_acc") or []
            found |= dict(zip(record.get("clients", range(len(values))), values, strict=True))
        everyone = self.summary.get("everyone") or {}
        found |= dict(enumerate(everyone.get("client_acc") or []))
        return {client: value for client, value in sorted(found.items()) if value is not None}

    def client_name(self, client: int) -> str:
        names = self.summary.get("client_names") or ()
        return str(names[client]) if client < len(names) else f"client {client}"


@dataclass(frozen=True)
class Part:
    """A part of the page: a study, or runs by themselves that share data and model."""

    title: str
    kind: str
    """comparison, sweep or runs."""
    runs: tuple[Run, ...]
    axes: dict[str, list[Any]] | None = None
    """Of a sweep: its settings with the values they take."""
    by: str = "p_acc"
    """Of a sweep: what the best is chosen by."""

    @property
    def all_rows(self) -> dict[str, list[Run]]:
        """Every run by the name of its row, in the order they first appear."""
        rows: dict[str, list[Run]] = {}
        for run in self.runs:
            rows.setdefault(run.name, []).append(run)
        return rows

    @property
    def rows(self) -> dict[str, list[Run]]:
        """Those that count: the finished ones of a row, or what there is where none finished."""
        return {
            name: [run for run in runs if run.summary["status"] == "finished"] or runs
            for name, runs in self.all_rows.items()
        }


@dataclass(frozen=True)
class Gathered:
    """All that a page is made of."""

    parts: tuple[Part, ...]
    left_out: tuple[str, ...]
    """What could not be read, or has nothing to show yet, and why."""

    @property
    def runs(self) -> list[Run]:
        return [run for part in self.parts for run in part.runs]


def gather(directories: Iterable[str | Path]) -> Gathered:
    """Runs, comparisons and sweeps in these folders; one that holds others is taken apart. What cannot be read is left
    out, with a warning, as long as anything can."""
    given = [Path(each) for each in directories]
    parts: list[Part] = []
    alone: list[Run] = []
    left_out: list[str] = []
    for folder in dict.fromkeys(found.resolve() for each in given for found in _holding(each)):
        shown = next((each / folder.relative_to(each.resolve()) for each in given if _inside(folder, each)), folder)
        manifest = manifest_of(folder)
        if manifest is not None:
            part = _study(shown, manifest, left_out)
            if part.runs:
                parts.append(part)
        else:
            alone += _read(shown, None, left_out)
    parts += _by_problem(alone)
    for reason in left_out:
        warnings.warn(f"left out of the page: {reason}", stacklevel=2)
    if not parts:
        names = ", ".join(map(str, given))
        raise RunDirectoryError(
            f"{names}: no run with an evaluation here, expected folders of runs, comparisons or sweeps; "
            "pfedlms run, compare and sweep make them (--out DIR)"
        )
    return Gathered(tuple(parts), tuple(left_out))


def _inside(folder: Path, given: Path) -> bool:
    return folder.is_relative_to(given.resolve())


def _holding(directory: Path, depth: int = _DEPTH) -> Iterator[Path]:
    """The folders of runs and studies in `directory`, itself or below; not those of a study's runs."""
    if manifest_of(directory) is not None or (directory / "config.toml").is_file():
        yield directory
    elif not directory.is_dir():
        raise RunDirectoryError(f"{directory}: there is no such folder; expected one of a run, comparison or sweep")
    elif depth:
        for each in sorted(directory.iterdir()):
            if each.is_dir() and not each.name.startswith("."):
                yield from _holding(each, depth - 1)


def _study(directory: Path, file: Path, left_out: list[str]) -> Part:
    manifest = read_manifest(file)
    names = manifest.get("names", {})
    runs: list[Run] = []
    for folder in manifest["runs"]:
        runs += _read(directory / folder, names.get(folder), left_out)
    kind = "sweep" if manifest["axes"] else "comparison"
    title = directory.resolve().name
    if kind != "sweep":
        return Part(title, kind, tuple(runs))
    return Part(title, kind, tuple(runs), axes=manifest["axes"], by=manifest["by"])


def _read(directory: Path, name: str | None, left_out: list[str]) -> list[Run]:
    """The run there, unless it cannot be read or has measured nothing yet."""
    try:
        stored = load_run(directory)
        config, summary, metrics = stored.config, stored.summary, stored.metrics
    except (PfedlmsError, KeyError, TypeError) as error:  # of another version, or cut off
        left_out.append(str(error) if isinstance(error, PfedlmsError) else f"{directory}: cannot be read ({error!r})")
        return []
    if not metrics:
        left_out.append(f"{directory}: no evaluation yet")
        return []
    return [Run(name or config.method, config, summary, metrics, directory)]


def _by_problem(runs: Sequence[Run]) -> list[Part]:
    """Runs by themselves, those on the same data and model together; a row that has no name of its own is named by its
    method and, where that does not tell rows apart, by the settings in which they differ."""
    problems: dict[str, list[Run]] = {}
    for run in runs:
        problems.setdefault(repr((_data(run.config), run.config.model)), []).append(run)
    parts = []
    for members in problems.values():
        differing = compared([run.config for run in members])[1]
        named = [
            replace(
                run, name=RunDirectory(run.directory).row or " ".join([run.config.method, *_told(run, own, members)])
            )
            for run, own in zip(members, differing, strict=True)
        ]
        seen: set[tuple[str, int]] = set()
        told_apart = []
        for run in named:
            if (run.name, run.seed) in seen:
                run = replace(run, name=f"{run.name} ({run.directory.name})")
            seen.add((run.name, run.seed))
            told_apart.append(run)
        first = members[0].config
        parts.append(Part(f"{first.data.title} · {first.model.name}", "runs", tuple(told_apart)))
    return _titled(parts)


def _titled(parts: Sequence[Part]) -> list[Part]:
    """Parts of the same title have the settings of data and model in which they differ in it, too."""
    found = []
    for part in parts:
        alike = [other.runs[0].config for other in parts if other.title == part.title]
        differing = compared(alike)[1][alike.index(part.runs[0].config)] if len(alike) > 1 else {}
        keys = [key for key in differing if key.startswith(("data.", "model.")) and key != "data.dir"]
        told = ", ".join(f"{key.partition('.')[2]} {differing[key]}" for key in keys)
        found.append(replace(part, title=f"{part.title} · {told}") if told else part)
    return found


def _told(run: Run, own: dict[str, Any], members: Sequence[Run]) -> list[str]:
    """Settings in which a run differs from others of its method."""
    same_method = [other.config.tables() for other in members if other.config.method == run.config.method]
    told = []
    for key, value in own.items():
        section, _, name = key.partition(".")
        if not key.startswith(_NOT_NAMED) and any(tables[section].get(name) != value for tables in same_method):
            told.append(f"{name}={value}")
    return told


def _data(config: Config) -> dict[str, Any]:
    return {key: value for key, value in config.tables()["data"].items() if key != "dir"}


def local_of(run: Run, part: Part, everything: Gathered) -> Run | None:
    """The run of `local` with the same clients as this one: same data, model and seed, as many rounds. One that trains
    as this one does is taken before others, and one of the same part before those of other parts."""
    same = [
        other
        for other in (*part.runs, *everything.runs)
        if other.config.method == "local"
        and (_data(other.config), other.config.model, other.seed) == (_data(run.config), run.config.model, run.seed)
        and other.config.train.rounds == run.config.train.rounds
        and other.percent == run.percent
    ]
    alike = [other for other in same if other.config.train == run.config.train]
    return next(iter([*alike, *same]), None)
