"""Plans of studies: the runs for all methods × values of settings × seeds.

`pfedlms:thresholds=1` and `stc:sparsity=0.05:sparsity_down=0.1` are methods with settings of their own (variants).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from pfedlms.errors import ConfigError
from pfedlms.experiment.config import (
    Tables,
    ambiguity,
    from_keywords,
    keyword_places,
    load_config,
    merge,
    read_toml,
    restore_written_name,
    setting_fields,
    suggest_keyword,
    tables_for_method,
)
from pfedlms.experiment.plugins import find_method
from pfedlms.experiment.prepare import NAMED_PROBLEM
from pfedlms.experiment.problem import Problem
from pfedlms.experiment.runs import Run
from pfedlms.experiment.studies import Axes, Study
from pfedlms.methods import METHODS, Method
from pfedlms.report.runs import check_measure
from pfedlms.settings import parse, to_python_number, type_name

EXPECTED = "expected methods like fedavg, pfedlms:thresholds=1 or stc:sparsity=0.05:sparsity_down=0.1"
LIST_TYPES = (list, tuple, range, np.ndarray)
_SAME_FOR_ALL = ("rounds", "participation", "name")
"""Settings that must be the same for all methods of a comparison."""
_NOT_AXES = {
    "run.seed": "seeds=N says how many seeds",
    "run.out": "a study has one folder",
    "method.name": "a sweep is of one method",
    "data.dir": "a study is of one data set",
}
"""Settings that cannot have several values, and why."""


def plan_grid(
    file: str | Path | None, overrides: Mapping[str, Mapping[str, Any]], methods: Any, axes: Axes | None = None,
    seeds: Any = 1, by: str | None = None, problem: Problem = NAMED_PROBLEM,
) -> Study:  # fmt: skip
    """The study of every method, combination of values and seed; all problems are reported at once."""
    axes = axes or {}
    method_tables, problems = variants(methods)
    plan_problems = seed_problems(seeds, overrides) + _axis_problems(axes)
    plan_problems += _conflicts(axes, overrides, *method_tables.values())
    names = list(dict.fromkeys(tables["method"]["name"] for tables in method_tables.values()))
    common = merge(_assign_method_section(read_toml(file), names), overrides)
    problems += plan_problems + _ambiguity_problems(common, names)
    if len(method_tables) > 1:
        others = [name for name in common if name in METHODS and name not in names]
        problems += [f"[{name}]: not among the methods compared" for name in others]
    runs: list[Run] = []
    for row, own_tables in () if plan_problems else method_tables.items():
        method = own_tables["method"]["name"]
        for values in _combinations(method, axes):
            texts = [f"{key.partition('.')[2]}={to_python_number(value)}" for key, value in values.items()]
            label = " ".join([*([row] if len(method_tables) > 1 or not axes else []), *texts])
            value_tables = ({key.partition(".")[0]: {key.partition(".")[2]: value}} for key, value in values.items())
            tables = merge(tables_for_method(common, method, names), own_tables, *value_tables)
            own_section = merge(common, {method: own_tables["method"]}).get(method)
            with _collect_problems(problems, partial(restore_written_name, method=method, own_section=own_section)):
                runs += _runs_of_seeds(label, tables, seeds, problem)
    return _planned_study(runs, axes, by, problems)


def plan_cells(
    cells: Mapping[str, Mapping[str, Any]], file: str | Path | None, overrides: Tables, seeds: Any, by: str | None,
    problem: Problem,
) -> Study:  # fmt: skip
    """The study of cells given one by one: settings by the name of the row, as keywords or by section."""
    problems = seed_problems(seeds, overrides)
    runs: list[Run] = []
    for row, settings in () if problems else cells.items():
        default = overrides["method"]["name"]
        method = settings.get("method", default)
        with _collect_problems(problems, f"{row}: ".__add__):
            own = from_keywords([method.get("name", default) if isinstance(method, Mapping) else method], settings)
            runs += _runs_of_seeds(row, merge(read_toml(file), overrides, own), seeds, problem)
    return _planned_study(runs, {}, by, problems)


@contextmanager
def _collect_problems(problems: list[str], rewrite: Callable[[str], str]) -> Iterator[None]:
    """Add the problems of a configuration, rewritten, to `problems`, each once."""
    try:
        yield
    except ConfigError as error:
        problems += [problem for problem in map(rewrite, error.problems) if problem not in problems]


def _runs_of_seeds(label: str, tables: Tables, seeds: Any, problem: Problem) -> list[Run]:
    """One run for each seed."""
    first = load_config(None, tables).run.seed
    numbers = range(first, first + seeds) if isinstance(seeds, int | np.integer) else seeds
    configs = [load_config(None, merge(tables, {"run": {"seed": int(seed)}})) for seed in numbers]
    return [Run(config, None, problem, label) for config in configs]


def _planned_study(runs: list[Run], axes: Axes, by: str | None, problems: list[str]) -> Study:
    """The study before its first run; raises ConfigError for `problems`, or if `by` cannot be measured."""
    if problems:
        raise ConfigError(problems)
    validated = all(run.config.data.validation > 0 for run in runs)
    by = by or ("v_acc" if validated else "p_acc")
    unshared = [run.config.method for run in runs if METHODS[run.config.method].global_model is Method.global_model]
    check_measure(by)
    if by == "v_acc" and not validated:
        raise ConfigError(["by: got v_acc, but data.validation is 0; set samples aside with data.validation=0.1"])
    if by == "g_acc" and unshared:
        raise ConfigError([f"by: got g_acc, but {unshared[0]} has no shared model; choose by v_acc or p_acc"])
    return Study([], None, axes, by, runs)


def split_grid(grid: Mapping[str, Any], method: str) -> tuple[Any, Axes]:
    """The methods of a grid (default: `method`), and its other settings as axes."""
    methods = grid.get("method", grid.get("methods", [method]))
    places = keyword_places([tables["method"]["name"] for tables in variants(methods)[0].values()])
    axes = {key: values for key, values in grid.items() if key not in ("method", "methods")}
    problems = [f"grid: {key}: unknown setting; {suggest_keyword(key, places)}" for key in axes if key not in places]
    problems += [f"grid: {problem}" for key in axes if (problem := ambiguity(key, places))]
    problems += [
        f"grid: {key}: got {values!r}, expected a list of values"
        for key, values in axes.items()
        if not isinstance(values, LIST_TYPES)
    ]
    if problems:
        raise ConfigError(problems)
    return methods, {
        ".".join(places[key]): [to_python_number(value) for value in values] for key, values in axes.items()
    }


def split_values(assignments: Sequence[str], method: str) -> tuple[list[str], Axes]:
    """Separate `section.key=value` texts into those with one value, and axes for those with several, `a,b,c`."""
    declarations = setting_fields([method])
    single, axes = [], {}
    for text in assignments:
        place, _, values = text.partition("=")
        section, _, key = place.strip().partition(".")
        section = "method" if section == method else section
        declared = declarations.get((section, key))
        free_text = declared is not None and type_name(declared) == "str" and declared.metadata["choices"] is None
        if "," not in values or (declared is None and f"{section}.{key}" not in _NOT_AXES) or free_text:
            single.append(text)
        else:
            parts = [part.strip() for part in values.split(",") if part.strip()]
            axes[f"{section}.{key}"] = [parse(declared, part) for part in parts] if declared else parts
    return single, axes


def check_has_axes(axes: Mapping[str, Any]) -> None:
    """Raise ConfigError for a sweep in which no setting has several values."""
    if not any(len(values) for values in axes.values()):
        example = "train.learning_rate=0.03,0.1"
        raise ConfigError([f"sweep: got no setting with several values, expected one or more, for example {example}"])


def variants(methods: Any) -> tuple[dict[str, Tables], list[str]]:
    """The methods of a study, as settings by section for each name of a row; and everything wrong with `methods`, which
    is a text with commas, or a sequence of texts and of pairs (method, {key: value})."""
    methods = [methods] if isinstance(methods, str) else methods
    if not isinstance(methods, Iterable) or isinstance(methods, Mapping | bytes):
        return {}, [f"methods: got {methods!r}, {EXPECTED}"]
    rows: dict[str, Tables] = {}
    problems: list[str] = []
    texts: list[str] = []
    for method in methods:
        if isinstance(method, str):
            texts += [text.strip() for text in method.split(",") if text.strip()]
        elif isinstance(method, Sequence) and len(method) == 2 and isinstance(method[1], Mapping):
            name, settings = method
            values = {key: str(value).lower() if isinstance(value, bool) else value for key, value in settings.items()}
            texts.append(":".join([str(name), *(f"{key}={value}" for key, value in values.items())]))
        else:
            problems.append(f"methods: got {method!r}, {EXPECTED}")
    for text in texts:
        if "=" in text.partition(":")[0]:
            problems.append(
                f"methods: got {text!r}, expected the name of a method; its settings follow it with colons, as in "
                "sketchmean:ratio=0.3:answer=0.05"
            )
            continue
        row, tables, row_problems = _parse_variant(text)
        if row in rows:
            problems.append(f"methods: got {','.join(texts)}, expected every method once; settings tell variants apart")
        rows[row] = tables
        problems += row_problems
    if not texts and not problems:
        problems.append("methods: got none, expected at least one name")
    return rows, problems


def _parse_variant(text: str) -> tuple[str, Tables, list[str]]:
    """The name of the row, the settings by section, and the problems of one `method:key=value`."""
    method, *assignments = (part.strip() for part in text.split(":"))
    tables: Tables = {"method": {"name": method}}
    problems: list[str] = []
    if find_method(method) is None:
        return text, tables, problems  # the check of its configuration reports it
    places = {
        name: (section, key)
        for name, (section, key) in keyword_places([method]).items()
        if section in ("train", "method") and key not in _SAME_FOR_ALL
    }
    for assignment in assignments:
        key, equals, value = (part.strip() for part in assignment.partition("="))
        if not equals:
            problems.append(f"methods: got {text!r}, expected {method}:key=value")
        elif key not in places:
            remedy = suggest_keyword(key, [name for name in places if "." not in name])
            problems.append(f"methods: got {text!r}, but {key} is no setting that {method} can have alone; {remedy}")
        else:
            section, key = places[key]
            tables = merge(tables, {section: {key: parse(setting_fields([method])[section, key], value)}})
    return ":".join([method, *assignments]), tables, problems


def seed_problems(seeds: Any, overrides: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """What is wrong with a number of seeds, or with a list of seeds, beside these settings."""
    is_list = isinstance(seeds, Sequence | np.ndarray) and not isinstance(seeds, str)
    if is_list and "seed" in overrides.get("run", {}):
        seed = overrides["run"]["seed"]
        return [f"seeds: got {seeds!r} and run.seed={seed!r}, the first of a number of seeds; give one of them"]
    numbers, least = (list(seeds), 0) if is_list else ([seeds], 1)
    integers = [n for n in numbers if isinstance(n, int | np.integer) and not isinstance(n, bool) and n >= least]
    if numbers and len(integers) == len(numbers) and not _has_duplicates(numbers):
        return []
    return [f"seeds: got {seeds!r}, expected a count of at least 1, or a list of different seeds, [1, 2, 3]"]


def _axis_problems(axes: Axes) -> list[str]:
    problems = [f"{key}: got several values, but {_NOT_AXES[key]}" for key in axes if key in _NOT_AXES]
    problems += [
        f"{key}: got {values}, expected every value once" for key, values in axes.items() if _has_duplicates(values)
    ]
    return problems + [f"{key}: got no value, expected one or more" for key, values in axes.items() if not values]


def _conflicts(axes: Axes, *tables: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """One problem for each axis whose setting has a single value, too, in some table."""
    found = []
    for place, values in axes.items():
        section, _, key = place.partition(".")
        if place in _NOT_AXES:  # refused already
            continue
        sections = (section, *(METHODS if section == "method" else ()))
        single = [table[name][key] for table in tables for name in sections if key in table.get(name, {})]
        found += [f"{place}: got {single[0]!r} beside the values {values!r}; give one of them"] if single else []
    return found


def _has_duplicates(values: Iterable[Any]) -> bool:
    texts = [repr(to_python_number(value)) for value in values]
    return len(set(texts)) < len(texts)


def _combinations(method: str, axes: Axes) -> Iterator[dict[str, Any]]:
    """Every combination of values for a method, without the settings that only other methods have."""
    foreign = setting_fields(METHODS).keys() - setting_fields([method]).keys()
    own_axes = {key: values for key, values in axes.items() if tuple(key.split(".", 1)) not in foreign}
    for values in product(*own_axes.values()):
        yield dict(zip(own_axes, values, strict=True))


def _assign_method_section(tables: Tables, names: list[str]) -> Tables:
    """The tables of a file; a section [method] that names one of the methods becomes that method's own section."""
    section = tables.get("method")
    if not isinstance(section, Mapping) or section.get("name") not in names:
        return tables
    settings = {key: value for key, value in section.items() if key != "name"}
    return merge({section["name"]: settings}, {key: values for key, values in tables.items() if key != "method"})


def _ambiguity_problems(tables: Tables, names: list[str]) -> list[str]:
    """One problem for each setting of the section [method] that several of the methods have."""
    section = tables.get("method", {})
    problems = []
    for key, value in section.items() if isinstance(section, Mapping) else ():
        readers = [name for name in names if ("method", key) in setting_fields([name])]
        if len(readers) > 1 and key != "name":
            problems.append(
                f"method.{key}: {', '.join(readers[:-1])} and {readers[-1]} have it; say whose it is, by "
                f"{readers[0]}.{key}={value} or by {readers[0]}:{key}={value} among the methods"
            )
    return problems
