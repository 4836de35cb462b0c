"""Several methods, as they are or with settings of their own, × seeds on the same partitions: one table."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pfedlms.errors import ConfigError
from pfedlms.experiment import study
from pfedlms.experiment.config import keys, load_config, of_method
from pfedlms.experiment.layers import Tables, merge, read_toml
from pfedlms.experiment.play import Progress
from pfedlms.experiment.prepare import NOTHING_OWN, ModelLike, Own, python_overrides
from pfedlms.experiment.study import Planned, Study, left, wrong_seeds
from pfedlms.experiment.variants import Variant, variants
from pfedlms.experiment.watch import watching
from pfedlms.methods import METHODS
from pfedlms.report.results import comparison
from pfedlms.step.own import Metric, PerSample

MANIFEST = "compare.json"


@dataclass(frozen=True, repr=False)
class Comparison(Study):
    """The runs of a comparison, in the order methods and seeds were given."""

    def __str__(self) -> str:
        return str(comparison(self.results)) if self.results else "no runs yet\n"


def compare(
    data: Any = None,
    model: ModelLike = None,
    *,
    methods: Any = ("local", "fedavg", "pfedlms", "sketchvote"),
    seeds: int = 3,
    config: str | Path | None = None,
    out: str | Path | None = None,
    progress: Progress | bool | None = None,
    callbacks: Iterable[Any] | None = None,
    loss: PerSample | None = None,
    metric: Metric | None = None,
    **settings: Any,
) -> Comparison:
    """Run every method with `seeds` seeds (from `seed` on); data, model, progress, callbacks, loss, metric and settings
    as in `run`.
    Printing the result shows the table.

    `methods` has names, names with settings (`"pfedlms:thresholds=1"`), or pairs `("pfedlms", {"thresholds": 1})`. A
    setting that only one of the methods has goes to that one; one that several have must say whose it is, there or as
    `pfedlms={"strength": 0.05}`.
    """
    chosen, _ = variants(methods)
    own = Own(loss, metric)
    data = own.read(data)  # once, for all runs
    overrides = own.into(python_overrides(data, model, [each.method for each in chosen], settings))
    planned = plan(config, overrides, methods, seeds)
    with watching(progress, callbacks) as told:
        done = play(planned, Path(out) if out else None, data, model, told, own)
    return left(done)


def plan(
    file: str | Path | None, overrides: Mapping[str, Mapping[str, Any]], methods: Any, seeds: int
) -> list[Planned]:
    """One checked configuration for each variant and seed; every problem of all of them is reported at once."""
    chosen, found = variants(methods)
    wrong = wrong_seeds(seeds)
    found += wrong
    names = list(dict.fromkeys(each.method for each in chosen))
    given = merge(_named(read_toml(Path(file)) if file else {}, names), overrides)
    found += _ambiguous(given, names)
    found += [f"[{name}]: not among the methods compared" for name in given if name in METHODS and name not in names]
    planned = []
    for each in chosen:
        own = {each.method if section == "method" else section: values for section, values in each.settings.items()}
        tables = merge(_of(each, names, given), own)
        try:
            first = load_config(None, tables).run.seed
            seeded = (merge(tables, {"run": {"seed": seed}}) for seed in range(first, first + (1 if wrong else seeds)))
            planned += [Planned(each.name, load_config(None, one)) for one in seeded]
        except ConfigError as error:
            found += [problem for problem in error.problems if problem not in found]
    if found:
        raise ConfigError(found)
    return planned


def _named(tables: Tables, names: list[str]) -> Tables:
    """A file whose section [method] names one of the methods means that one."""
    own = tables.get("method")
    name = own.get("name") if isinstance(own, Mapping) else None
    if not isinstance(own, Mapping) or name not in names:
        return tables
    mine = {key: value for key, value in own.items() if key != "name"}
    rest = {section: values for section, values in tables.items() if section != "method"}
    return merge({name: mine}, rest)


def _ambiguous(given: Tables, names: list[str]) -> list[str]:
    """Settings of the section [method] that several of the methods read."""
    shared = given.get("method", {})
    found = []
    for key, value in shared.items() if isinstance(shared, Mapping) else ():
        readers = [name for name in names if ("method", key) in keys([name])]
        if len(readers) > 1 and key != "name":
            whose = f"{', '.join(readers[:-1])} and {readers[-1]}"
            first = readers[0]
            found.append(
                f"method.{key}: {whose} have it; say whose it is, by --set {first}.{key}={value} or by "
                f"{first}:{key}={value} among the methods"
            )
    return found


def _of(variant: Variant, names: list[str], given: Tables) -> Tables:
    """What was given, as far as it is for one variant's method."""
    shared = given.get("method", {})
    tables = {section: values for section, values in given.items() if section not in METHODS}
    if isinstance(shared, Mapping):
        tables["method"] = {**of_method(variant.method, names, shared), "name": variant.method}
    own = {variant.method: given[variant.method]} if variant.method in given else {}
    return merge(tables, own)


def play(
    planned: list[Planned], out: Path | None, data: Any, model: ModelLike, progress: Progress, own: Own = NOTHING_OWN
) -> Comparison:
    """Execute planned runs; with a directory, every run has its own folder in it, and compare.json the whole plan."""
    return study.play(Comparison, planned, out, data, model, progress, MANIFEST, {}, own)


def resume_comparison(
    directory: Path, data: Any, model: ModelLike, progress: Progress, data_dir: str | None = None,
    own: Own = NOTHING_OWN,
) -> Comparison:  # fmt: skip
    """Finish every run of a comparison that is not finished yet."""
    return study.go_on(Comparison, directory, MANIFEST, data, model, progress, {}, data_dir, own)
