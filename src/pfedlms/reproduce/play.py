"""Cells played one after another, each in a folder of its own; what is finished is kept."""

from __future__ import annotations

import errno
import json
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pfedlms.errors import (
    ConfigError,
    DataError,
    DivergedError,
    QuorumError,
    RunDirectoryError,
    StorageError,
    UsageError,
)
from pfedlms.experiment.config import Config, load_config, merge
from pfedlms.experiment.runs import begin, load_run, open_run, resume_run
from pfedlms.experiment.store import RunDirectory
from pfedlms.methods import METHODS
from pfedlms.report.tables import counted
from pfedlms.reproduce.cells import Cell, measures, same_run

CURVE = ("round", "p_acc", "g_acc")
ROW = {"config", "status", "summary", "curve"}
ENDED = ("finished", "diverged")  # what failed, on a full disk for instance, goes on


@dataclass(frozen=True)
class Measured:
    """What a cell reached."""

    summary: Mapping[str, Any]
    curve: Mapping[str, Sequence[float]]
    """By evaluation: `round`, `p_acc`, `g_acc` where there is one, and `bytes` of all clients so far."""

    @property
    def finished(self) -> bool:
        return bool(self.summary["status"] == "finished")


@dataclass
class Played:
    """What became of cells."""

    measured: dict[Cell, Measured] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    """Why the cells of a data set stay open, by its name."""
    stopped: int = 0
    """The signal that interrupted; 0: none."""


@dataclass(frozen=True)
class Where:
    """Where data are and results go, and on what it is executed."""

    out: Path
    data_dir: str = ""
    device: str = "auto"

    def config(self, cell: Cell) -> Config:
        return cell.config(self.data_dir, out=str(self.out / cell.name), device=self.device)


def play(
    cells: Iterable[Cell], where: Where, callbacks: Sequence[Any], known: Sequence[Mapping[str, Any]] = (),
    say: Callable[[str], None] | None = None,
) -> Played:  # fmt: skip
    """Every cell that is in no folder yet and not among the rows that are `known` is trained; one that was interrupted
    goes on. A data set that is not there leaves its cells open and the others alone. After a signal nothing more is
    trained, but what there is already counts. `say` is told how many cells there are before the first is trained."""
    played, configs = Played(), {cell: where.config(cell) for cell in cells}
    asked = {_at_a_glance(config.tables()) for config in configs.values()}
    some = (row for row in known if _at_a_glance(row["config"]) in asked)
    rows = [(measures(config), row) for row in some if (config := config_of(row)) is not None]
    for cell, config in configs.items():
        wanted = measures(config)
        row = next((row for own, row in rows if own == wanted), None)
        if row is not None:
            played.measured[cell] = Measured({**row["summary"], "status": row["status"]}, row["curve"])
    if say is not None:
        _announce(configs, played, where, say)
    for cell, config in configs.items():
        if cell in played.measured:
            continue
        if cell.dataset in played.missing and not (where.out / cell.name).exists():
            continue
        if played.stopped and not _ended(where.out / cell.name):
            continue
        try:
            played.measured[cell], stopped = _one(config, cell.row, callbacks)
            RunDirectory(where.out / cell.name).name_row(cell.row + " (quick)" * cell.quick)
            played.stopped = played.stopped or stopped
        except DataError as error:
            played.missing[cell.dataset] = str(error)
    return played


def _announce(cells: Iterable[Cell], played: Played, where: Where, say: Callable[[str], None]) -> None:
    """How many cells each data set has, and how many of them are to be trained."""
    done = {cell: cell in played.measured or _ended(where.out / cell.name) for cell in cells}
    for dataset in dict.fromkeys(cell.dataset for cell in done):
        own = [ended for cell, ended in done.items() if cell.dataset == dataset]
        say(f"{dataset}: {counted(len(own), 'cell')}, {sum(own)} known or finished, {len(own) - sum(own)} to train")


def _ended(folder: Path) -> bool:
    """Whether there is a cell with nothing left to train."""
    summary = load_run(folder).summary if RunDirectory(folder).config.is_file() else None
    return summary is not None and summary["status"] in ENDED


def _one(config: Config, label: str, callbacks: Sequence[Any]) -> tuple[Measured, int]:
    """A cell, from its folder as far as that goes; and the signal that interrupted it."""
    stored, stopped = RunDirectory(Path(config.run.out)), 0
    there = stored.config.is_file()
    if there and not same_run(config, open_run(stored.path)[1]):
        raise RunDirectoryError(
            f"{stored.path}: holds a run with other settings than this cell has now; name another --out, or delete it"
        )
    summary = load_run(stored.path).summary if there else None
    if summary is None or summary["status"] not in ENDED:
        try:
            moved = config.data.dir or None
            if there:
                result = resume_run(stored.path, callbacks=callbacks, data_dir=moved, label=label)
            else:
                result = begin(config, callbacks=callbacks, label=label)
            summary, stopped = result.summary, result.stopped
        except (DivergedError, QuorumError) as error:
            summary = dict(error.summary or {})
            warnings.warn(f"{stored.path.name} {summary['status']}: {error}", stacklevel=2)
        except StorageError as error:
            raise StorageError(error.path, error.reason) from error
        except RunDirectoryError as error:
            cause = error.__cause__
            if isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT):
                raise StorageError(stored.path, str(cause.strerror)) from error
            raise
    return Measured(summary, curve_of(stored.read_metrics())), stopped


def curve_of(metrics: Sequence[Mapping[str, Any]]) -> dict[str, list[float]]:
    """Columns of a run's evaluations."""
    columns = {name: [record[name] for record in metrics] for name in CURVE if all(name in own for own in metrics)}
    return {**columns, "bytes": [sum(record["bytes"].values()) for record in metrics]}


def read_rows(given: Iterable[Path]) -> list[dict[str, Any]]:
    """Rows that were measured elsewhere: `config`, `status`, `summary`, `curve`, in JSON files of lists. Of a folder
    those files that are such lists."""
    rows: list[dict[str, Any]] = []
    for path in given:
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


def _at_a_glance(tables: Mapping[str, Any]) -> tuple[Any, ...]:
    """Data set, method and seed: they tell most rows apart, and a whole configuration need not be made of those."""
    data, method, run = (tables.get(section, {}) for section in ("data", "method", "run"))
    return data.get("dataset", Config.data.dataset), method.get("name"), run.get("seed", Config.run.seed)


def config_of(row: Mapping[str, Any]) -> Config | None:
    """Of a row; None if it has settings that are no more. One that came after it had its default, whatever is shipped
    for the data set by now."""
    method = row["config"].get("method", {}).get("name")
    if row.get("model") or method not in METHODS:  # a module that has no name here
        return None
    defaults = Config(method=method, settings=METHODS[method].Settings())
    try:
        return load_config(None, merge(defaults.tables(), row["config"]))
    except ConfigError:
        return None
