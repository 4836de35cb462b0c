"""Folders of runs and studies as sections of the page; no data are needed."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path

from pfedlms.errors import PfedlmsError, RunDirectoryError
from pfedlms.experiment.runs import load_run
from pfedlms.experiment.studies import manifest_of, read_manifest
from pfedlms.report.runs import RunLike, Section, by_problem

_DEPTH = 4
"""Folders in folders that are searched for runs."""


def sections_of(directories: Iterable[str | Path]) -> tuple[list[Section], list[str]]:
    """The studies in these folders and the single runs, by problem; and what was left out, with the reason. What cannot
    be read is left out, with a warning, as long as anything can."""
    given = [Path(each) for each in directories]
    sections: list[Section] = []
    alone: list[RunLike] = []
    left_out: list[str] = []
    for folder in dict.fromkeys(found.resolve() for each in given for found in _holding(each)):
        inside = (each for each in given if folder.is_relative_to(each.resolve()))
        shown = next((each / folder.relative_to(each.resolve()) for each in inside), folder)
        if manifest_of(folder) is None:
            alone += _read(shown, None, left_out)
            continue
        manifest = read_manifest(folder)
        names, axes = manifest["names"], manifest["axes"]
        runs = [run for name in manifest["runs"] for run in _read(shown / name, names.get(name), left_out)]
        if runs:
            sections.append(Section(folder.name, runs, "Sweep" if axes else "Comparison", axes, manifest["by"]))
    sections += by_problem(alone)
    for reason in left_out:
        warnings.warn(f"left out of the page: {reason}", stacklevel=2)
    if not sections:
        raise RunDirectoryError(
            f"{', '.join(map(str, given))}: no run with an evaluation here, expected folders of runs, comparisons or "
            "sweeps; pfedlms run, compare and sweep make them (--out DIR)"
        )
    return sections, left_out


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


def _read(directory: Path, label: str | None, left_out: list[str]) -> list[RunLike]:
    """The run there, unless it cannot be read or has no evaluation yet."""
    try:
        run = load_run(directory, label=label or "")
        evaluated = bool(run.summary and run.metrics)
    except (PfedlmsError, KeyError, TypeError) as error:  # of another version, or cut off
        left_out.append(str(error) if isinstance(error, PfedlmsError) else f"{directory}: cannot be read ({error!r})")
        return []
    if not evaluated:
        left_out.append(f"{directory}: no evaluation yet")
        return []
    return [run]
