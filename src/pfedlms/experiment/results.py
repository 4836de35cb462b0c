"""results.csv and results.json of a study: one row per run, with the settings in which runs differ."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pfedlms.errors import StorageError
from pfedlms.experiment.config import Config
from pfedlms.experiment.store import write_atomically
from pfedlms.report.results import results, results_json
from pfedlms.report.tables import to_csv

if TYPE_CHECKING:
    from pfedlms.experiment.study import StudyRun


def write_results(
    directory: Path, runs: Sequence[StudyRun], planned: Sequence[Config], more: Mapping[str, Any]
) -> None:
    """Both files of the runs there are, each put in place at once; directories of runs are relative to this one."""
    settings = [config.tables() for config in planned]
    document = results_json(runs, settings, **more)
    texts = {"results.json": json.dumps(document, indent=2) + "\n", "results.csv": to_csv(results(runs, settings))}
    try:
        for name, text in texts.items():
            write_atomically(directory / name, lambda file, text=text: file.write(text.encode()))  # type: ignore[misc]
    except OSError as error:
        raise StorageError(directory, error.strerror or str(error), resume=directory) from error
