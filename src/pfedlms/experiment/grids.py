"""Grids of settings: methods, each as it is or with settings of its own, × values of settings × seeds, as cells of a
study. `pfedlms:thresholds=1` and `stc:sparsity=0.05:sparsity_down=0.1` are methods with settings of their own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from pfedlms.errors import ConfigError
from pfedlms.experiment.config import (
    Config,
    Tables,
    keys,
    load_config,
    merge,
    nearest,
    of_method,
    read_toml,
)
from pfedlms.experiment.plugins import find_method
from pfedlms.experiment.schema import TrainSection
from pfedlms.experiment.summary import MEASURES
from pfedlms.methods import METHODS, Method
from pfedlms.settings import as_plain, parse, type_name

Axes = dict[str, list[Any]]
"""Settings, `section.key`, with the values they take."""
EXPECTED = "expected methods like fedavg, pfedlms:thresholds=1 or stc:sparsity=0.05:sparsity_down=0.1"
_EXAMPLE = "for example --set train.learning_rate=0.03,0.1"
_OF_ALL = ("rounds", "participation")
"""Keys of [train] that are the same for all methods that are compared."""
_ELSEWHERE = {
    "run.seed": "--seeds N says how many seeds",
    "run.out": "a study has one folder",
    "method.name": "a sweep is of one method",
    "data.dir": "a study is of one data set",
}


@dataclass(frozen=True)
class Cell:
    """A run of a study before it is played."""

    label: str
    """The name of its row: runs that differ in the seed alone share it."""
    config: Config


@dataclass(frozen=True)
class Plan:
    """All cells of a study, in their order."""

    cells: list[Cell]
    axes: Axes
    by: str
    """What the best cell is chosen by: v_acc, p_acc or g_acc."""


@dataclass(frozen=True)
class Variant:
    """A method with settings of its own."""

    name: str
    """The text given; names its row, its folders and its line in a plot."""
    method: str
    settings: Tables
    """By section and key."""


def plan(
    file: str | Path | None, overrides: Mapping[str, Mapping[str, Any]], methods: Any, axes: Axes | None = None,
    seeds: Any = 1, by: str | None = None,
) -> Plan:  # fmt: skip
    """One checked configuration for each variant, combination of values and seed; every problem of all of them is
    reported at once."""
    axes = axes or {}
    chosen, found = variants(methods)
    found += wrong_seeds(seeds) + _wrong_axes(axes)
    names = list(dict.fromkeys(each.method for each in chosen))
    given = merge(_named(read_toml(file), names), overrides)
    found += _ambiguous(given, names)
    if len(chosen) > 1:
        found += [
            f"[{name}]: not among the methods compared" for name in given if name in METHODS and name not in names
        ]
    cells: list[Cell] = []
    for each in chosen if not (wrong_seeds(seeds) or _wrong_axes(axes)) else ():
        for cell in _combinations(each.method, axes):
            tables = merge(_of(each, names, given), *_under(each.method, each.settings, cell))
            try:
                first = load_config(None, tables).run.seed
                numbers = range(first, first + seeds) if isinstance(seeds, int | np.integer) else seeds
                seeded = [load_config(None, merge(tables, {"run": {"seed": int(seed)}})) for seed in numbers]
                cells += [Cell(_label(each, cell, len(chosen) > 1 or not axes), config) for config in seeded]
            except ConfigError as error:
                found += [problem for problem in error.problems if problem not in found]
    measure, wrong = _measure(by, [each.config for each in cells])
    if found or wrong:
        raise ConfigError(found or wrong)
    return Plan(cells, axes, measure)


def given_cells(cells: Mapping[str, Mapping[str, Any]], file: str | Path | None, overrides: Tables, seeds: Any) -> Plan:
    """Cells that are given one by one: settings by the name of the row, as keywords or by section."""
    found = wrong_seeds(seeds)
    made: list[Cell] = []
    for name, settings in cells.items() if not found else ():
        try:
            named = settings.get("method", overrides["method"]["name"])
            own = _keyed(settings, str(named["name"] if isinstance(named, Mapping) else named))
            base = load_config(file, merge(overrides, own))
            numbers = range(base.run.seed, base.run.seed + seeds) if isinstance(seeds, int) else seeds
            made += [Cell(name, load_config(file, merge(overrides, own, {"run": {"seed": seed}}))) for seed in numbers]
        except ConfigError as error:
            found += [f"{name}: {problem}" for problem in error.problems]
    if found:
        raise ConfigError(found)
    return Plan(made, {}, _measure(None, [each.config for each in made])[0])


def _keyed(settings: Mapping[str, Any], method: str) -> Tables:
    """`{"method": "fedavg", "learning_rate": 0.1, "run.seed": 3}` as tables."""
    known = {key: (section, key) for section, key in keys([method])}
    known |= {f"{section}.{key}": (section, key) for section, key in keys([method])} | {"method": ("method", "name")}
    tables: Tables = {}
    unknown = []
    for key, value in settings.items():
        if isinstance(value, Mapping) and key in ("data", "model", "train", "method", "run"):
            tables = merge(tables, {key: value})
        elif key in known:
            section, name = known[key]
            tables.setdefault(section, {})[name] = value
        else:
            unknown.append(f"{key}: unknown setting; {nearest(key, known)}")
    if unknown:
        raise ConfigError(unknown)
    return tables


def split_grid(grid: Mapping[str, Any], method: str) -> tuple[Any, Axes]:
    """The methods of a grid (`method`, default: the one named), and its other settings as axes."""
    methods = grid.get("method", grid.get("methods", [method]))
    chosen, _ = variants(methods)
    known: dict[str, str] = {}
    for section, key in keys([each.method for each in chosen]):
        known |= {key: f"{section}.{key}", f"{section}.{key}": f"{section}.{key}"}
    given = {key: values for key, values in grid.items() if key not in ("method", "methods")}
    wrong = [f"grid: {key}: unknown setting; {nearest(key, known)}" for key in given if key not in known]
    wrong += [
        f"grid: {key}: got {values!r}, expected a list of values"
        for key, values in given.items()
        if not isinstance(values, (list, tuple, range, np.ndarray))
    ]
    if wrong:
        raise ConfigError(wrong)
    return methods, {known[key]: [as_plain(value) for value in values] for key, values in given.items()}


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


def check_swept(axes: Mapping[str, Any]) -> None:
    """A sweep has something to sweep."""
    if not any(len(values) for values in axes.values()):
        raise ConfigError([f"sweep: got no setting with several values, expected one or more, {_EXAMPLE}"])


def variants(given: Any) -> tuple[list[Variant], list[str]]:
    """The methods that `given` names, and everything wrong with it.

    `given` is a text with commas, or a sequence of texts and of pairs (method, {key: value}).
    """
    if isinstance(given, str):
        given = [given]
    if not isinstance(given, Iterable) or isinstance(given, Mapping | bytes):
        return [], [f"--methods: got {given!r}, {EXPECTED}"]
    found: list[Variant] = []
    problems: list[str] = []
    for each in given:
        if isinstance(each, str):
            texts = [text.strip() for text in each.split(",") if text.strip()]
        elif isinstance(each, Sequence) and len(each) == 2 and isinstance(each[1], Mapping):
            texts = [":".join([str(each[0]), *(f"{key}={_text(value)}" for key, value in each[1].items())])]
        else:
            problems.append(f"--methods: got {each!r}, {EXPECTED}")
            continue
        for text in texts:
            made, wrong = _variant(text)
            found.append(made)
            problems += wrong
    names = [each.name for each in found]
    if not names and not problems:
        problems.append("--methods: got none, expected at least one name")
    if len(set(names)) < len(names):
        problems.append(f"--methods: got {','.join(names)}, expected every method once; settings tell variants apart")
    return found, problems


def wrong_seeds(seeds: Any) -> list[str]:
    """What is wrong with a number of seeds, or with a list of them."""

    def whole(value: Any, least: int) -> bool:
        return isinstance(value, int | np.integer) and not isinstance(value, bool) and bool(value >= least)

    several = isinstance(seeds, Sequence | range | np.ndarray) and not isinstance(seeds, str)
    if whole(seeds, 1) or (several and len(seeds) and all(whole(each, 0) for each in seeds) and not _twice(seeds)):
        return []
    return [f"seeds: got {seeds!r}, expected a count of at least 1, or a list of different seeds, [1, 2, 3]"]


def outermost(method: str, key: str) -> tuple[float | None, float | None]:
    """The least and the greatest number that a setting takes, where it is declared to have any."""
    section, _, name = key.partition(".")
    limits = keys([method])[section, name].metadata["limits"]
    return limits["minimum"], limits["maximum"]


def _variant(text: str) -> tuple[Variant, list[str]]:
    method, *assignments = (part.strip() for part in text.split(":"))
    tables: Tables = {}
    problems: list[str] = []
    found = find_method(method)
    if found is None:
        return Variant(text, method, tables), problems  # the check of its configuration reports it
    known = {("train", each.name): each for each in fields(TrainSection) if each.name not in _OF_ALL}
    known |= {("method", each.name): each for each in fields(found.Settings)}
    places = {key: (section, key) for section, key in known} | {f"{s}.{k}": (s, k) for s, k in known}
    for assignment in assignments:
        key, equals, value = (part.strip() for part in assignment.partition("="))
        if not equals:
            problems.append(f"--methods: got {text!r}, expected {method}:key=value")
        elif key not in places:
            near = nearest(key, [key for _, key in known])
            problems.append(f"--methods: got {text!r}, but {key} is no setting that {method} can have alone; {near}")
        else:
            section, key = places[key]
            tables = merge(tables, {section: {key: parse(known[section, key], value)}})
    return Variant(":".join([method, *assignments]), method, tables), problems


def _text(value: Any) -> str:
    """As it would be written on the command line."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def _wrong_axes(axes: Axes) -> list[str]:
    found = [f"{key}: got several values, but {_ELSEWHERE[key]}" for key in axes if key in _ELSEWHERE]
    found += [f"{key}: got {values}, expected every value once" for key, values in axes.items() if _twice(values)]
    return found + [f"{key}: got no value, expected one or more" for key, values in axes.items() if not values]


def _combinations(method: str, axes: Axes) -> Iterator[dict[str, Any]]:
    """Every combination of the values that a method can have; what only other methods have is left out."""
    known = keys([method])
    others = keys(METHODS).keys() - known.keys()
    own = {key: values for key, values in axes.items() if tuple(key.split(".", 1)) not in others}
    for values in product(*own.values()):
        yield dict(zip(own, values, strict=True))


def _under(method: str, settings: Tables, cell: Mapping[str, Any]) -> Iterator[Tables]:
    """A variant's settings and a combination's values, under the method's own name, so that they come on top of
    whatever a file says."""
    known = find_method(method) is not None
    yield {method if section == "method" and known else section: values for section, values in settings.items()}
    for key, value in cell.items():
        section, _, name = key.partition(".")
        yield {method if section == "method" and known else section: {name: value}}


def _label(variant: Variant, cell: Mapping[str, Any], named: bool) -> str:
    """`ratio=0.05 learning_rate=0.1`, after the variant's name where there are several."""
    values = (f"{key.partition('.')[2]}={as_plain(value)}" for key, value in cell.items())
    return " ".join([*([variant.name] if named else []), *values])


def _measure(by: str | None, configs: Sequence[Config]) -> tuple[str, list[str]]:
    """What the best is chosen by, and what is wrong with that."""
    validated = all(config.data.validation > 0 for config in configs)
    by = by or ("v_acc" if validated else "p_acc")
    shares = all(METHODS[config.method].global_model is not Method.global_model for config in configs)
    if by not in MEASURES:
        return by, [f"--by: got {by!r}, expected one of: v_acc, p_acc, g_acc"]
    if by == "v_acc" and not validated:
        return by, ["--by: got v_acc, but data.validation is 0; set samples aside with --set data.validation=0.1"]
    if by == "g_acc" and not shares:
        return by, [f"--by: got g_acc, but {configs[0].method} has no shared model; choose by v_acc or p_acc"]
    return by, []


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
    others = {name for name in METHODS if name != variant.method} if len(names) > 1 else set()
    tables = {section: values for section, values in given.items() if section not in others}
    if isinstance(shared, Mapping):
        tables["method"] = {**of_method(variant.method, names, shared), "name": variant.method}
    return tables


def _twice(values: Iterable[Any]) -> bool:
    listed = [repr(as_plain(value)) for value in values]
    return len(set(listed)) < len(listed)
