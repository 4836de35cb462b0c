"""One method with every combination of some settings' values, and which of them is the best."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np

from pfedlms.errors import ConfigError
from pfedlms.experiment import study
from pfedlms.experiment.config import Config, keys, load_config, method_in
from pfedlms.experiment.layers import Tables, merge
from pfedlms.experiment.play import Progress
from pfedlms.experiment.prepare import NOTHING_OWN, ModelLike, Own, python_overrides
from pfedlms.experiment.study import Planned, Study, left, read_manifest, wrong_seeds
from pfedlms.experiment.watch import watching
from pfedlms.methods import METHODS, Method
from pfedlms.report import results as tables
from pfedlms.report.runs import Section
from pfedlms.settings import parse, type_name
from pfedlms.step.own import Metric, PerSample

MANIFEST = "sweep.json"
MEASURES = {"v_acc": "validation_accuracy", "p_acc": "accuracy", "g_acc": "global_accuracy"}
_EXAMPLE = "for example --set train.learning_rate=0.03,0.1"
_ELSEWHERE = {
    "run.seed": "--seeds N says how many seeds",
    "run.out": "a sweep has one folder",
    "method.name": "a sweep is of one method",
    "data.dir": "a sweep is of one data set",
}
Axes = dict[str, list[Any]]
"""Settings, `section.key`, with the values they take."""


@dataclass(frozen=True, repr=False)
class Sweep(Study):
    """The runs of a sweep, in the order of its values; `best` names the settings that did best."""

    axes: Axes = field(default_factory=dict)
    by: str = "v_acc"

    @property
    def cells(self) -> list[dict[str, Any]]:
        """One row a combination: its settings, `name`, `runs` and `score`: the measure, mean of the last 10
        evaluations, mean over seeds; None if not all its seeds finished."""
        rows: dict[str, dict[str, Any]] = {}
        for run in self.results:
            chosen = {key: _value(run.config, key) for key in self.axes}
            row = rows.setdefault(run.name, {"name": run.name, "settings": chosen, "runs": []})
            row["runs"].append(run.summary)
        for row in rows.values():
            scores = [(run.get(MEASURES[self.by]) or {}).get("last10") for run in row["runs"]]
            measured = [float(score) for score in scores if score is not None]
            whole = len(measured) == len(scores) and all(run["status"] == "finished" for run in row["runs"])
            row["score"] = mean(measured) if whole else None
        return list(rows.values())

    @property
    def best(self) -> dict[str, Any] | None:
        """The cell with the highest score, the first of several; None before any has one."""
        scored = [cell for cell in self.cells if cell["score"] is not None]
        return max(scored, key=lambda cell: float(cell["score"])) if scored else None

    @property
    def at_edge(self) -> list[str]:
        """Where the best lies at the end of a list of three or more numbers and there are numbers beyond, which may be
        better."""
        best, found = self.best, []
        for key, values in self.axes.items() if best else ():
            assert best is not None
            value = best["settings"][key]
            if len(values) < 3 or not _numbers(values) or value in _outermost(self.results[0].config.method, key):
                continue
            if value in (min(values), max(values)):
                end, beyond = ("largest", "larger") if value == max(values) else ("smallest", "smaller")
                found.append(f"the best {key} is {value}, the {end} tried; try {beyond} ones")
        return found

    def __str__(self) -> str:
        return str(tables.sweep(self.section)) if self.results else "no runs yet\n"

    @property
    def section(self) -> Section:
        """What tables, figures and the page know of it."""
        return Section(self.directory.name if self.directory else "sweep", self.results, "Sweep", self.axes, self.by)


def sweep(
    data: Any = None,
    model: ModelLike = None,
    *,
    method: str | None = None,
    by: str | None = None,
    seeds: int = 1,
    config: str | Path | None = None,
    out: str | Path | None = None,
    progress: Progress | bool | None = None,
    callbacks: Iterable[Any] | None = None,
    loss: PerSample | None = None,
    metric: Metric | None = None,
    **settings: Any,
) -> Sweep:
    """Run one method with every combination of values; what is not said here is as in `run`. Printing the result shows
    the table.

    Args:
        by: what the best is chosen by: `v_acc`, `p_acc` or `g_acc`. Default: `v_acc` with `validation`, else `p_acc`.
        seeds: how many seeds, from `seed` on; scores are means over them.
        settings: as in `run`; those with a list of values are swept (`learning_rate=[0.03, 0.1], validation=0.1`).
    """
    method = method or method_in(config)
    sections = {key: section for section, key in keys([method])}
    lists = {key: value for key, value in settings.items() if isinstance(value, list | tuple | range | np.ndarray)}
    fixed = {key: value for key, value in settings.items() if key not in lists or key not in sections}
    own = Own(loss, metric)
    data = own.read(data)  # once, for all runs
    overrides = own.into(python_overrides(data, model, [method], fixed))
    overrides["method"]["name"] = method
    axes = {f"{sections[key]}.{key}": [_plain(value) for value in lists[key]] for key in lists if key in sections}
    planned, chosen = plan(config, overrides, axes, seeds, by)
    with watching(progress, callbacks) as told:
        done = play(planned, axes, chosen, Path(out) if out else None, data, model, told, own)
    return left(done)


def split_values(assignments: Sequence[str], method: str) -> tuple[list[str], Axes]:
    """Of `section.key=value` texts those with one value, and those with several, `section.key=a,b,c`, as axes."""
    known = keys([method])
    single, axes = [], {}
    for text in assignments:
        place, _, values = text.partition("=")
        section, _, key = place.strip().partition(".")
        section = "method" if section == method else section
        declared = known.get((section, key))
        words = declared is not None and type_name(declared) == "str" and declared.metadata["choices"] is None
        if "," not in values or (declared is None and f"{section}.{key}" not in _ELSEWHERE) or words:
            single.append(text)
        else:
            parts = [part.strip() for part in values.split(",") if part.strip()]
            axes[f"{section}.{key}"] = [parse(declared, part) for part in parts] if declared else parts
    return single, axes


def plan(
    file: str | Path | None, overrides: Tables, axes: Axes, seeds: int, by: str | None
) -> tuple[list[Planned], str]:
    """One checked configuration for each combination and seed, and what the best is chosen by; every problem of all of
    them is reported at once."""
    found = [f"{key}: got several values, but {_ELSEWHERE[key]}" for key in axes if key in _ELSEWHERE]
    found += [f"{key}: got {values}, expected every value once" for key, values in axes.items() if _twice(values)]
    if not any(axes.values()):
        found.append(f"sweep: got no setting with several values, expected one or more, {_EXAMPLE}")
    found += wrong_seeds(seeds)
    planned: list[Planned] = []
    method = str(overrides.get("method", {}).get("name") or method_in(file))
    for values in product(*axes.values()) if not found else ():
        cell = dict(zip(axes, values, strict=True))
        tables = overrides
        for key, value in cell.items():
            section, _, name = key.partition(".")
            # Under the method's own name it comes on top of whatever a file says.
            place = method if section == "method" and method in METHODS else section
            tables = merge(tables, {place: {name: value}})
        try:
            first = load_config(file, tables).run.seed
            for seed in range(first, first + seeds):
                config = load_config(file, merge(tables, {"run": {"seed": seed}}))
                planned.append(Planned(_name(cell), config))
        except ConfigError as error:
            found += [problem for problem in error.problems if problem not in found]
    if not found:
        by, wrong = _measure(by, [each.config for each in planned])
        found += wrong
    if found or by is None:
        raise ConfigError(found)
    return planned, by


def _measure(by: str | None, configs: Sequence[Config]) -> tuple[str, list[str]]:
    """What the best is chosen by, and what is wrong with that."""
    validated = all(config.data.validation > 0 for config in configs)
    by = by or ("v_acc" if validated else "p_acc")
    shares = all(METHODS[config.method].global_model is not Method.global_model for config in configs)
    if by not in MEASURES:
        return by, [f"--by: got {by!r}, expected one of: {', '.join(MEASURES)}"]
    if by == "v_acc" and not validated:
        return by, ["--by: got v_acc, but data.validation is 0; set samples aside with --set data.validation=0.1"]
    if by == "g_acc" and not shares:
        return by, [f"--by: got g_acc, but {configs[0].method} has no shared model; choose by v_acc or p_acc"]
    return by, []


def play(
    planned: Sequence[Planned], axes: Axes, by: str, out: Path | None, data: Any, model: ModelLike, progress: Progress,
    own: Own = NOTHING_OWN,
) -> Sweep:  # fmt: skip
    """Execute planned runs; with a directory, every run has its own folder in it, and sweep.json the whole plan."""
    done = study.play(Sweep, planned, out, data, model, progress, MANIFEST, {"axes": axes, "by": by}, own)
    return _warned(done)


def resume_sweep(
    directory: Path, data: Any, model: ModelLike, progress: Progress, data_dir: str | None = None,
    own: Own = NOTHING_OWN,
) -> Sweep:  # fmt: skip
    """Finish every run of a sweep that is not finished yet."""
    manifest = read_manifest(directory / MANIFEST)
    more = {"axes": manifest["axes"], "by": manifest["by"]}
    return _warned(study.go_on(Sweep, directory, MANIFEST, data, model, progress, more, data_dir, own))


def _warned(done: Sweep) -> Sweep:
    for text in done.at_edge if not done.interrupted else ():
        warnings.warn(text, stacklevel=4)
    if done.by != "v_acc" and not done.interrupted:
        told = f"chosen by {done.by} on test samples, which flatters the best; data.validation=0.1 sets others aside"
        warnings.warn(told, stacklevel=4)
    return done


def _name(cell: Mapping[str, Any]) -> str:
    """`ratio=0.05 learning_rate=0.1`."""
    return " ".join(f"{key.partition('.')[2]}={_plain(value)}" for key, value in cell.items())


def _value(config: Config, key: str) -> Any:
    section, _, name = key.partition(".")
    return config.tables()[section][name]


def _outermost(method: str, key: str) -> tuple[float | None, float | None]:
    """The least and the greatest number that a setting takes, where it is declared to have any."""
    section, _, name = key.partition(".")
    limits = keys([method])[section, name].metadata["limits"]
    return limits["minimum"], limits["maximum"]


def _plain(value: Any) -> Any:
    """A number of NumPy's as Python's own."""
    return value.item() if isinstance(value, np.generic) else value


def _numbers(values: Sequence[Any]) -> bool:
    return all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)


def _twice(values: Sequence[Any]) -> bool:
    return len({repr(value) for value in values}) < len(values)
