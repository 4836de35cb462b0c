"""Plans of studies: the runs of all rows × seeds. A row is a cell that was given, or a method with values of settings.

`pfedlms:thresholds=1` and `stc:sparsity=0.05:sparsity_down=0.1` are methods with settings of their own (variants).
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from pfedlms.errors import ConfigError, UsageError
from pfedlms.experiment.config import (
    Tables,
    from_keywords,
    from_texts,
    load_config,
    merge,
    read_toml,
    setting_fields,
    tables_for_method,
)
from pfedlms.experiment.plugins import find_method
from pfedlms.experiment.prepare import NAMED_PROBLEM
from pfedlms.experiment.problem import Problem
from pfedlms.experiment.runs import Run
from pfedlms.experiment.studies import Axes, Study
from pfedlms.methods import METHODS, Method
from pfedlms.report.runs import check_measure
from pfedlms.settings import to_python_value

EXPECTED = "expected methods like fedavg, pfedlms:thresholds=1 or stc:sparsity=0.05:sparsity_down=0.1"
LIST_TYPES = (list, tuple, range, np.ndarray)


def grid_rows(grid: Mapping[str, Any], method: str = "pfedlms") -> tuple[dict[str, Tables], Axes]:
    """The rows of a grid, settings by section for each name: every method (default: `method`) with every combination of
    values of the other settings, the axes. A method has no part in axes that only others have."""
    own_settings = variants(grid.get("method", grid.get("methods", [method])))
    values = {key: values for key, values in grid.items() if key not in ("method", "methods")}
    lists = {key: list(each) if isinstance(each, LIST_TYPES) else [each] for key, each in values.items()}
    methods = methods_of(own_settings)
    axes = split_axes(from_keywords(methods, lists))[1]
    known = [".".join(place) for place in setting_fields(methods)]
    if unknown := [place for place in axes if place not in known]:
        raise ConfigError([f"{place}: unknown setting of {', '.join(methods)}; leave it out" for place in unknown])
    rows = {}
    for name, own in own_settings.items():
        foreign = setting_fields(METHODS).keys() - setting_fields(methods_of({name: own})).keys()
        own_axes = [place for place in axes if tuple(place.split(".")) not in foreign]
        for combination in product(*(axes[place] for place in own_axes)):
            row, tables = [name] if len(own_settings) > 1 or not axes else [], own
            for place, value in zip(own_axes, combination, strict=True):
                section, key = place.split(".")
                row.append(f"{key}={value}")
                tables = merge(tables, {section: {key: value}})
            rows[" ".join(row)] = tables
    return rows, axes


def cell_rows(cells: Mapping[str, Mapping[str, Any]], method: str) -> dict[str, Tables]:
    """The rows of cells, whose settings are given as keywords or by section; of `method` unless they name another."""
    rows = {}
    for row, settings in cells.items():
        own = settings.get("method", method)
        own = own.get("name", method) if isinstance(own, Mapping) else own
        rows[row] = merge(from_keywords([own], settings), {"method": {"name": own}})
    return rows


def refuse_single_values(axes: Mapping[str, Any]) -> None:
    """Refuse a sweep in which no setting has several values: it would train one run without a word."""
    if not any(len(values) > 1 for values in axes.values()):
        raise UsageError(
            "sweep: got no setting with several values, expected at least one, as --learning-rate 0.03,0.1, or "
            "learning_rate=[0.03, 0.1] in Python; compare takes several methods"
        )


def methods_of(rows: Mapping[str, Tables]) -> list[str]:
    """The methods of rows, each once."""
    return list(dict.fromkeys(tables["method"]["name"] for tables in rows.values()))


def plan_study(
    file: str | Path | None, overrides: Mapping[str, Mapping[str, Any]], rows: Mapping[str, Tables], axes: Axes,
    seeds: Any = 1, by: str | None = None, problem: Problem = NAMED_PROBLEM,
) -> Study:  # fmt: skip
    """The study of rows with every seed; their settings come on top of the file and `overrides`. All problems are
    reported at once."""
    names = methods_of(rows)
    common = merge(_assign_method_section(read_toml(file), names), overrides)
    problems = _ambiguities(common, names)
    seeds = seeds if isinstance(seeds, int | np.integer) else list(dict.fromkeys(seeds))
    runs: list[Run] = []
    for label, own in rows.items():
        tables = merge(tables_for_method(common, own["method"]["name"], names), own)
        try:
            first = load_config(None, tables).run.seed
            for seed in seeds if isinstance(seeds, list) else range(first, first + seeds):
                config = load_config(None, merge(tables, {"run": {"seed": seed}}))
                runs.append(Run(config, None, problem, label))
        except ConfigError as error:
            problems += [each for each in error.problems if each not in problems]
    if not problems and not runs:
        problems = [f"got no run: rows {list(rows)}, values {axes} and seeds {seeds!r}; give at least one of each"]
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


def split_axes(tables: Tables) -> tuple[Tables, Axes]:
    """Separate the settings with one value from those with a list of values, the axes. Values for a setting of a method
    are for all methods that have it."""
    single: Tables = {}
    axes: Axes = {}
    for section, settings in tables.items():
        for key, values in settings.items():
            if isinstance(values, list):
                place = f"{'method' if section in METHODS else section}.{key}"
                axes[place] = list(dict.fromkeys(map(to_python_value, values)))
            else:
                single.setdefault(section, {})[key] = values
    return single, axes


def variants(methods: Any) -> dict[str, Tables]:
    """The methods of a study, as settings by section for each name of a row. `methods` is a text with commas, or a
    sequence or mapping of texts and of pairs (method, {key: value})."""
    texts: list[str] = []
    methods = methods.items() if isinstance(methods, Mapping) else methods
    for each in [methods] if isinstance(methods, str) else methods:
        if isinstance(each, str):
            texts += [text.strip() for text in each.split(",") if text.strip()]
        else:
            name, settings = each
            texts.append(":".join([name, *(f"{key}={value}" for key, value in settings.items())]))
    rows = {}
    for text in texts:
        method, *parts = (part.strip() for part in text.split(":"))
        own = setting_fields([method])  # where another section has the same key, the method's own is meant
        named = [f"method.{part}" if ("method", part.partition("=")[0].strip()) in own else part for part in parts]
        settings = from_texts([method], named if find_method(method) else [])  # the check reports an unknown method
        rows[":".join([method, *parts])] = merge(settings, {"method": {"name": method}})
    return rows


def _assign_method_section(tables: Tables, names: list[str]) -> Tables:
    """The tables of a file; a section [method] that names one of the methods becomes that method's own section."""
    settings = dict(tables.get("method", {}))
    name = settings.pop("name", None)
    if name not in names:
        return tables
    rest = {section: values for section, values in tables.items() if section != "method"}
    return merge({name: settings}, rest)


def _ambiguities(tables: Tables, names: list[str]) -> list[str]:
    """One problem for each setting of the section [method] that several of the methods have."""
    problems = []
    for key in tables.get("method", {}):
        owners = [f"{name}.{key}" for name in names if ("method", key) in setting_fields([name])]
        if len(owners) > 1:
            problems.append(f"method.{key}: may mean {' or '.join(owners)}; give the full name")
    return problems
