"""Runs and studies as tables, files and plots: the only place of this room that knows `report`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pfedlms.errors import StorageError
from pfedlms.experiment.config import Config
from pfedlms.experiment.store import write_atomically

if TYPE_CHECKING:
    from pfedlms.experiment.runs import Run
    from pfedlms.experiment.studies import Study
    from pfedlms.report.runs import Section
    from pfedlms.report.tables import Table


def section(study: Study, title: str = "") -> Section:
    """A study as the report room takes it."""
    from pfedlms.report.runs import Section

    kind = "Sweep" if study.axes else "Comparison"
    name = title or (study.directory.name if study.directory else kind)
    return Section(name, study.runs, kind, study.axes, study.by)


def table(study: Study) -> Table:
    """The table of a study."""
    from pfedlms.report.results import comparison, sweep

    return sweep(section(study)) if study.axes else comparison(study.runs)


def text(study: Study) -> str:
    return f"{table(study)}\n" if study.runs else "no runs yet\n"


def plot(study: Study, file: Path) -> None:
    """Accuracy against bytes; of a sweep, against the setting with the most values."""
    from pfedlms.report.charts import check_file
    from pfedlms.report.figures import by_setting
    from pfedlms.report.results import set_up

    if not study.axes:
        plot_runs(study.runs, file)
        return
    check_file(file)
    first = study.runs[0]
    figure = by_setting(section(study), f"{first.config.method} on {set_up(first, study.axes)}")
    if figure is not None:
        figure.save(file)


def plot_runs(runs: Sequence[Run], file: Path) -> None:
    """Accuracy against bytes, one line per label."""
    from pfedlms.report.charts import check_file
    from pfedlms.report.figures import accuracy_curves
    from pfedlms.report.results import set_up

    check_file(file)
    figure = accuracy_curves(runs, against="bytes", title=set_up(runs[0]))
    if figure is not None:
        figure.save(file)


def page(study: Study, file: Path) -> None:
    """One page to read."""
    from pfedlms.report.page import write_page

    write_page([section(study)], file)


def flat_results(runs: Sequence[Run], planned: Sequence[Config]) -> list[dict[str, Any]]:
    """One record per run, for results.csv and data frames."""
    from pfedlms.report.results import results

    return results(runs, [each.tables() for each in planned])


def write_results(
    directory: Path, runs: Sequence[Run], planned: Sequence[Config], axes: Mapping[str, Any], by: str
) -> None:
    """results.json and results.csv of the runs there are, each put in place at once; directories of runs are relative
    to this one."""
    from pfedlms.report.results import results_json
    from pfedlms.report.tables import to_csv

    swept = {"axes": axes, "by": by} if axes else {}
    document = results_json(runs, [each.tables() for each in planned], **swept)
    contents = {
        "results.json": json.dumps(document, indent=2) + "\n",
        "results.csv": to_csv(flat_results(runs, planned)),
    }
    try:
        for name, content in contents.items():
            encoded = content.encode()
            write_atomically(directory / name, lambda file, encoded=encoded: file.write(encoded))  # type: ignore[misc]
    except OSError as error:
        raise StorageError(directory, error.strerror or str(error), resume=directory) from error
