"""The runs of a table: from rows that were measured elsewhere, from the study's folder, and trained where both have
none."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pfedlms
from papers.pfedlms.experiments import Settings, merged
from papers.pfedlms.sheets import Runs, Sheets
from pfedlms.errors import ConfigError, DataError, UsageError
from pfedlms.methods import METHODS
from pfedlms.report.tables import count_text

ROW = {"config", "status", "summary", "curve"}
ENDED = ("finished", "diverged")
"""Runs with another status are resumed."""


@dataclass(frozen=True)
class Wanted:
    """What of an experiment is asked for, and how it is executed."""

    out: Path
    datasets: tuple[str, ...] = ()
    """Empty: those of the paper."""
    methods: tuple[str, ...] = ()
    """Empty: all rows."""
    seeds: tuple[int, ...] = (0, 1, 2)
    quick: bool = False
    rows: Sequence[Mapping[str, Any]] = ()
    """Measured elsewhere."""
    data_dir: str = ""
    device: str = "auto"
    workers: int = 1
    progress: bool | None = None
    callbacks: Sequence[Any] = ()
    say: Callable[[str], None] = lambda text: None
    """Gets a sentence before something is trained."""


@dataclass
class Outcome:
    """The results of an experiment."""

    sheets: Sheets = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    """Why cells have no run, by data set."""
    broken: int = 0
    """Runs that diverged, or lost too many messages."""
    signal: int = 0
    """The signal that interrupted; 0: none."""


def gather(cells: Mapping[str, Settings], wanted: Wanted, outcome: Outcome) -> Runs:
    """The run of every cell and seed: from `wanted.rows` that have its settings, else from the study of the data set
    and α, which trains what is not there yet, seed by seed. A data set without files leaves its cells open."""
    executed: Settings = {"data": {"dir": wanted.data_dir}, "run": {"device": wanted.device}}
    cells = {name: merged(own, executed) for name, own in cells.items()}
    configs = {
        (name, seed): pfedlms.load_config(None, merged(own, {"run": {"seed": seed}}))
        for seed in wanted.seeds
        for name, own in cells.items()
    }
    first = next(iter(configs.values()))
    data, model = first.data, first.model.name
    shipped = pfedlms.load_config(None, {"data": {"dataset": data.dataset}}).model.name
    folder = wanted.out / f"{data.dataset}{f'-{model}' * (model != shipped)}-a{data.alpha:g}"
    known = _known(configs, wanted.rows)
    stored = pfedlms.load(folder) if (folder / "study.json").is_file() else None
    for run in stored.runs if isinstance(stored, pfedlms.Study) else ():
        key = run.label, run.config.run.seed
        ended = run.summary["status"] in ENDED
        if ended and key in configs and key not in known and pfedlms.same_run(configs[key], run.config):
            known[key] = run
    left = len(configs) - len(known)
    wanted.say(f"{data.dataset}: {count_text(len(configs), 'cell')}, {len(known)} known or finished, {left} to train")
    for seed in wanted.seeds:
        todo = {name: own for name, own in cells.items() if (name, seed) not in known}
        if not todo or outcome.signal or data.dataset in outcome.missing:
            continue
        trained: pfedlms.Study | None = None
        try:
            trained = pfedlms.study(
                cells=todo, seeds=[seed], out=folder, workers=wanted.workers, progress=wanted.progress,
                callbacks=wanted.callbacks,
            )  # fmt: skip
        except DataError as error:
            outcome.missing[data.dataset] = str(error)
        except KeyboardInterrupt as error:
            outcome.signal, trained = 2, getattr(error, "result", None)
        known |= {(run.label, seed): run for run in (trained.runs if trained else ())}
    outcome.broken += sum(run.summary["status"] in ("diverged", "failed") for run in known.values())
    return {name: [known[name, seed] for seed in wanted.seeds if (name, seed) in known] for name in cells}


def read_rows(paths: Iterable[Path]) -> list[dict[str, Any]]:
    """Rows that were measured elsewhere: `config`, `status`, `summary` and `curve`, in JSON files with a list of them.
    Of a folder all files that have such a list."""
    rows: list[dict[str, Any]] = []
    for path in paths:
        for file in sorted(path.glob("*.json")) if path.is_dir() else [path]:
            try:
                found = json.loads(file.read_text(encoding="utf-8"))
            except (OSError, ValueError) as error:
                raise UsageError(f"--rows: {file} cannot be read ({error})") from error
            sound = isinstance(found, list) and all(isinstance(row, dict) and row.keys() >= ROW for row in found)
            if not sound and file == path:
                raise UsageError(f"--rows: {file} is no list of rows with {', '.join(sorted(ROW))}")
            rows += [row for row in found if row["summary"]] if sound else []
    return rows


def _known(
    configs: Mapping[tuple[str, int], pfedlms.Config], rows: Sequence[Mapping[str, Any]]
) -> dict[tuple[str, int], pfedlms.Run]:
    """The runs of rows that have the settings of a cell, the first of several."""
    known: dict[tuple[str, int], pfedlms.Run] = {}
    for (name, seed), config in configs.items():
        short = _in_short(config.tables())
        alike = ((row, config_of(row)) for row in rows if _in_short(row["config"]) == short)
        found = next(((row, own) for row, own in alike if own is not None and pfedlms.same_run(config, own)), None)
        if found is not None:
            row, own = found
            columns = zip(*row["curve"].values(), strict=True)
            records = [dict(zip(row["curve"], values, strict=True)) for values in columns]
            metrics = [{**record, "bytes": {"all": record["bytes"]}} for record in records]
            summary = {**row["summary"], "status": row["status"]}
            known[name, seed] = pfedlms.Run(own, label=name, metrics=metrics, summary=summary)
    return known


def _in_short(tables: Mapping[str, Any]) -> tuple[Any, ...]:
    """Data set, method and seed."""
    data, method, run = (tables.get(section, {}) for section in ("data", "method", "run"))
    return data.get("dataset", "digits"), method.get("name"), run.get("seed", 0)


def config_of(row: Mapping[str, Any]) -> pfedlms.Config | None:
    """The configuration of a row; None if it has settings that no longer exist. A setting that is newer than the row
    had its default, whatever is shipped for the data set by now."""
    method = row["config"].get("method", {}).get("name")
    if row.get("model") or method not in METHODS:  # a model that was given in Python
        return None
    defaults = pfedlms.Config(method=method, settings=METHODS[method].Settings())
    try:
        return pfedlms.load_config(None, merged(defaults.tables(), row["config"]), stored=True)
    except ConfigError:
        return None
