"""Grids of settings: methods × values of settings × seeds, as the planned runs of a study.

`pfedlms:thresholds=1` and `stc:sparsity=0.05:sparsity_down=0.1` are methods with settings of their own (variants).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from pfedlms.errors import ConfigError
from pfedlms.experiment.config import (
    Tables,
    as_written,
    for_method,
    from_keywords,
    keys,
    load_config,
    merge,
    nearest,
    places,
    read_toml,
)
from pfedlms.experiment.plugins import find_method
from pfedlms.experiment.prepare import NAMED
from pfedlms.experiment.problem import Problem
from pfedlms.experiment.runs import Run
from pfedlms.experiment.studies import Axes, Study
from pfedlms.methods import METHODS, Method
from pfedlms.report.runs import MEASURES
from pfedlms.settings import parse, to_python_number, type_name

EXPECTED = "expected methods like fedavg, pfedlms:thresholds=1 or stc:sparsity=0.05:sparsity_down=0.1"
_OF_ALL = ("rounds", "participation", "name")
"""Settings that no variant can have alone."""
_ELSEWHERE = {
    "run.seed": "seeds=N says how many seeds",
    "run.out": "a study has one folder",
    "method.name": "a sweep is of one method",
    "data.dir": "a study is of one data set",
}


def plan(
    file: str | Path | None, overrides: Mapping[str, Mapping[str, Any]], methods: Any, axes: Axes | None = None,
    seeds: Any = 1, by: str | None = None, problem: Problem = NAMED,
) -> Study:  # fmt: skip
    """One checked configuration for each variant, combination of values and seed; every problem of all of them is
    reported at once."""
    axes = axes or {}
    chosen, found = variants(methods)
    wrong = wrong_seeds(seeds) + _wrong_axes(axes)
    names = list(dict.fromkeys(own["method"]["name"] for own in chosen.values()))
    given = merge(_named(read_toml(file), names), overrides)
    found += wrong + _ambiguous(given, names)
    if len(chosen) > 1:
        found += [
            f"[{name}]: not among the methods compared" for name in given if name in METHODS and name not in names
        ]
    runs: list[Run] = []
    for name, own in () if wrong else chosen.items():
        method = own["method"]["name"]
        for values in _combinations(method, axes):
            texts = [f"{key.partition('.')[2]}={to_python_number(value)}" for key, value in values.items()]
            label = " ".join([*([name] if len(chosen) > 1 or not axes else []), *texts])
            own_values = ({key.partition(".")[0]: {key.partition(".")[2]: value}} for key, value in values.items())
            tables = merge(for_method(given, method, names), own, *own_values)
            qualified = merge(given, {method: own["method"]}).get(method)
            with _problems_to(found, lambda text, m=method, q=qualified: as_written(text, m, q)):  # type: ignore[misc]
                runs += _seeded(label, tables, seeds, problem)
    return _checked(runs, axes, by, found)


def given_cells(
    cells: Mapping[str, Mapping[str, Any]], file: str | Path | None, overrides: Tables, seeds: Any, problem: Problem
) -> Study:
    """Cells that are given one by one: settings by the name of the row, as keywords or by section."""
    found = wrong_seeds(seeds)
    made: list[Run] = []
    for name, settings in () if found else cells.items():
        default = overrides["method"]["name"]
        method = settings.get("method", default)
        with _problems_to(found, f"{name}: ".__add__):
            own = from_keywords([method.get("name", default) if isinstance(method, Mapping) else method], settings)
            made += _seeded(name, merge(read_toml(file), overrides, own), seeds, problem)
    return _checked(made, {}, None, found)


@contextmanager
def _problems_to(found: list[str], named: Callable[[str], str]) -> Iterator[None]:
    """Add the problems of a configuration to those that were found, each once."""
    try:
        yield
    except ConfigError as error:
        found += [problem for problem in map(named, error.problems) if problem not in found]


def _seeded(label: str, tables: Tables, seeds: Any, problem: Problem) -> list[Run]:
    """One run per seed."""
    first = load_config(None, tables).run.seed
    numbers = range(first, first + seeds) if isinstance(seeds, int | np.integer) else seeds
    configs = [load_config(None, merge(tables, {"run": {"seed": int(seed)}})) for seed in numbers]
    return [Run(config, None, problem, label) for config in configs]


def _checked(runs: list[Run], axes: Axes, by: str | None, found: list[str]) -> Study:
    """The study before its first run, unless something is wrong with it or with what the best is to be chosen by."""
    if found:
        raise ConfigError(found)
    validated = all(each.config.data.validation > 0 for each in runs)
    by = by or ("v_acc" if validated else "p_acc")
    alone = [each.config.method for each in runs if METHODS[each.config.method].global_model is Method.global_model]
    if by not in MEASURES:
        raise ConfigError([f"by: got {by!r}, expected one of: v_acc, p_acc, g_acc"])
    if by == "v_acc" and not validated:
        raise ConfigError(["by: got v_acc, but data.validation is 0; set samples aside with data.validation=0.1"])
    if by == "g_acc" and alone:
        raise ConfigError([f"by: got g_acc, but {alone[0]} has no shared model; choose by v_acc or p_acc"])
    return Study([], None, axes, by, runs)


def split_grid(grid: Mapping[str, Any], method: str) -> tuple[Any, Axes]:
    """The methods of a grid (`method`, default: the one named), and its other settings as axes."""
    methods = grid.get("method", grid.get("methods", [method]))
    known = places([own["method"]["name"] for own in variants(methods)[0].values()])
    given = {key: values for key, values in grid.items() if key not in ("method", "methods")}
    wrong = [f"grid: {key}: unknown setting; {nearest(key, known)}" for key in given if key not in known]
    wrong += [
        f"grid: {key}: got {values!r}, expected a list of values"
        for key, values in given.items()
        if not isinstance(values, (list, tuple, range, np.ndarray))
    ]
    if wrong:
        raise ConfigError(wrong)
    return methods, {
        ".".join(known[key]): [to_python_number(value) for value in values] for key, values in given.items()
    }


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
        example = "train.learning_rate=0.03,0.1"
        raise ConfigError([f"sweep: got no setting with several values, expected one or more, for example {example}"])


def variants(given: Any) -> tuple[dict[str, Tables], list[str]]:
    """The settings, by section, of the methods that `given` names, by name of the row; and everything wrong with it.
    `given` is a text with commas, or a sequence of texts and of pairs (method, {key: value})."""
    given = [given] if isinstance(given, str) else given
    if not isinstance(given, Iterable) or isinstance(given, Mapping | bytes):
        return {}, [f"methods: got {given!r}, {EXPECTED}"]
    found: dict[str, Tables] = {}
    problems: list[str] = []
    texts: list[str] = []
    for each in given:
        if isinstance(each, str):
            texts += [text.strip() for text in each.split(",") if text.strip()]
        elif isinstance(each, Sequence) and len(each) == 2 and isinstance(each[1], Mapping):
            as_text = {key: str(value).lower() if isinstance(value, bool) else value for key, value in each[1].items()}
            texts.append(":".join([str(each[0]), *(f"{key}={value}" for key, value in as_text.items())]))
        else:
            problems.append(f"methods: got {each!r}, {EXPECTED}")
    for text in texts:
        name, tables, wrong = _variant(text)
        if name in found:
            problems.append(f"methods: got {','.join(texts)}, expected every method once; settings tell variants apart")
        found[name] = tables
        problems += wrong
    if not texts and not problems:
        problems.append("methods: got none, expected at least one name")
    return found, problems


def _variant(text: str) -> tuple[str, Tables, list[str]]:
    method, *assignments = (part.strip() for part in text.split(":"))
    tables: Tables = {"method": {"name": method}}
    problems: list[str] = []
    if find_method(method) is None:
        return text, tables, problems  # the check of its configuration reports it
    known = {
        name: (section, key)
        for name, (section, key) in places([method]).items()
        if section in ("train", "method") and key not in _OF_ALL
    }
    for assignment in assignments:
        key, equals, value = (part.strip() for part in assignment.partition("="))
        if not equals:
            problems.append(f"methods: got {text!r}, expected {method}:key=value")
        elif key not in known:
            near = nearest(key, [name for name in known if "." not in name])
            problems.append(f"methods: got {text!r}, but {key} is no setting that {method} can have alone; {near}")
        else:
            section, key = known[key]
            tables = merge(tables, {section: {key: parse(keys([method])[section, key], value)}})
    return ":".join([method, *assignments]), tables, problems


def wrong_seeds(seeds: Any) -> list[str]:
    """What is wrong with a number of seeds, or with a list of them."""

    def whole(value: Any, least: int) -> bool:
        return isinstance(value, int | np.integer) and not isinstance(value, bool) and bool(value >= least)

    several = isinstance(seeds, Sequence | range | np.ndarray) and not isinstance(seeds, str)
    if whole(seeds, 1) or (several and len(seeds) and all(whole(each, 0) for each in seeds) and not _twice(seeds)):
        return []
    return [f"seeds: got {seeds!r}, expected a count of at least 1, or a list of different seeds, [1, 2, 3]"]


def _wrong_axes(axes: Axes) -> list[str]:
    found = [f"{key}: got several values, but {_ELSEWHERE[key]}" for key in axes if key in _ELSEWHERE]
    found += [f"{key}: got {values}, expected every value once" for key, values in axes.items() if _twice(values)]
    return found + [f"{key}: got no value, expected one or more" for key, values in axes.items() if not values]


def _twice(values: Iterable[Any]) -> bool:
    listed = [repr(to_python_number(value)) for value in values]
    return len(set(listed)) < len(listed)


def _combinations(method: str, axes: Axes) -> Iterator[dict[str, Any]]:
    """Every combination of the values that a method can have, without settings that only other methods have."""
    others = keys(METHODS).keys() - keys([method]).keys()
    own = {key: values for key, values in axes.items() if tuple(key.split(".", 1)) not in others}
    for values in product(*own.values()):
        yield dict(zip(own, values, strict=True))


def _named(tables: Tables, names: list[str]) -> Tables:
    """A file whose section [method] names one of the methods means that one."""
    own = tables.get("method")
    name = own.get("name") if isinstance(own, Mapping) else None
    if not isinstance(own, Mapping) or name not in names:
        return tables
    mine = {key: value for key, value in own.items() if key != "name"}
    return merge({name: mine}, {section: values for section, values in tables.items() if section != "method"})


def _ambiguous(given: Tables, names: list[str]) -> list[str]:
    """Settings of the section [method] that several of the methods read."""
    shared = given.get("method", {})
    found = []
    for key, value in shared.items() if isinstance(shared, Mapping) else ():
        readers = [name for name in names if ("method", key) in keys([name])]
        if len(readers) > 1 and key != "name":
            found.append(
                f"method.{key}: {', '.join(readers[:-1])} and {readers[-1]} have it; say whose it is, by "
                f"{readers[0]}.{key}={value} or by {readers[0]}:{key}={value} among the methods"
            )
    return found
