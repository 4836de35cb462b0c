"""Runs and studies as tables, files and plots: the only place of this room that knows `report`."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pfedlms.errors import StorageError, UsageError
from pfedlms.experiment.config import Config, differing
from pfedlms.experiment.store import write_atomically
from pfedlms.experiment.summary import MEASURES

if TYPE_CHECKING:
    from pfedlms.experiment.runs import Run
    from pfedlms.experiment.studies import Study

SCHEMA = 1


def table(study: Study) -> Any:
    """The table of a study, for a console."""
    from pfedlms.report.tables import comparison_table, sweep_table

    if study.axes:
        return sweep_table(study.cells(), study.best(), study.by)
    return comparison_table(study.summaries)


def text(study: Study) -> str:
    from pfedlms.report.tables import as_text

    return as_text(table(study)) if study.runs else "no runs yet\n"


def latex(study: Study) -> str:
    from pfedlms.report.tables import as_latex

    return as_latex(table(study))


def plot(study: Study, file: Path) -> None:
    from pfedlms.report.plots import accuracy_by_setting, check_plot
    from pfedlms.report.tables import set_up

    if not study.axes:
        plot_runs(study.runs, file)
        return
    check_plot(file)
    first, best = study.runs[0], study.best()
    if best:
        title = f"{first.config.method} on {set_up(first.config, first.summary, study.axes)}"
        accuracy_by_setting(study.cells(), best, study.by, file, title)


def plot_runs(runs: Sequence[Run], file: Path) -> None:
    from pfedlms.report.plots import accuracy_against_bytes, check_plot
    from pfedlms.report.tables import set_up

    check_plot(file)
    accuracy_against_bytes(runs, file, set_up(runs[0].config, runs[0].summary))


def page(study: Study, file: Path) -> None:
    from pfedlms.report.page import write

    if study.directory is None:
        raise UsageError("report: this study has no folder; run it with out=DIR")
    write([study.directory], file)


def results(runs: Sequence[Run], planned: Sequence[Config]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The settings that all runs have in common, and a row per run. Settings are those in which runs differ that were
    `planned`, so that columns stay the same until all are done."""
    same, own = differing(planned)
    keys = list(dict.fromkeys(key for each in own for key in each))
    return same, [
        {
            "name": run.label,
            **{name: run.summary[name] for name in ("method", "seed", "status", "rounds")},
            "settings": {key: value for key in keys if (value := run.config.flat().get(key)) is not None},
            **{name: run.summary.get(name) for name in MEASURES.values()},
            "everyone": (run.summary["everyone"] or {}).get("accuracy"),
            **{name: run.summary[name] for name in ("bytes_per_round", "total_bytes", "seconds")},
            "directory": run.directory.name if run.directory else None,
        }
        for run in runs
    ]


def flat_results(runs: Sequence[Run], planned: Sequence[Config]) -> list[dict[str, Any]]:
    """A column per number; settings under their names, None where a method does not have them."""
    rows = results(runs, planned)[1]
    settings = list(dict.fromkeys(key for row in rows for key in row["settings"]))
    flat = []
    for row in rows:
        line = {name: row[name] for name in ("name", "method", "seed", "status", "rounds")}
        line |= {key: row["settings"].get(key) for key in settings}
        for short, name in MEASURES.items():
            line |= {f"{short}_{which}": (row[name] or {}).get(which) for which in ("max", "last10", "final")}
        line |= {"everyone": row["everyone"]} | {f"{way}_per_round": n for way, n in row["bytes_per_round"].items()}
        flat.append(line | {name: row[name] for name in ("total_bytes", "seconds", "directory")})
    return flat


def write_results(
    directory: Path, runs: Sequence[Run], planned: Sequence[Config], axes: Mapping[str, Any], by: str
) -> None:
    """results.json and results.csv of the runs there are, each put in place at once; directories of runs are relative
    to this one."""
    same, rows = results(runs, planned)
    swept = {"axes": axes, "by": by} if axes else {}
    document = json.dumps({"schema": SCHEMA, **swept, "settings": same, "runs": rows}, indent=2) + "\n"
    try:
        for name, content in (("results.json", document), ("results.csv", _csv(flat_results(runs, planned)))):
            encoded = content.encode()
            write_atomically(directory / name, lambda file, encoded=encoded: file.write(encoded))  # type: ignore[misc]
    except OSError as error:
        raise StorageError(directory, error.strerror or str(error), resume=directory) from error


def _csv(rows: Iterable[Mapping[str, Any]]) -> str:
    rows = list(rows)
    written = io.StringIO()
    writer = csv.DictWriter(written, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return written.getvalue()
