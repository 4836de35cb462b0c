"""results.csv and results.json of a study: one row a run, with the settings in which runs differ."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pfedlms.errors import StorageError
from pfedlms.experiment.config import Config
from pfedlms.experiment.store import write_atomically

if TYPE_CHECKING:
    from pfedlms.experiment.study import StudyRun

SCHEMA = 1
_ACCURACIES = {"p_acc": "accuracy", "v_acc": "validation_accuracy", "g_acc": "global_accuracy"}
_NOT_COMPARED = ("run.out", "run.seed", "method.name")


def write_results(
    directory: Path, runs: Sequence[StudyRun], planned: Sequence[Config], more: Mapping[str, Any]
) -> None:
    """Both files of the runs there are, each put in place at once; directories of runs are relative to this one.
    Settings are those in which runs differ that were `planned`, so that columns stay the same until all are done."""
    same, differing = compared(planned)
    rows = [
        {
            "name": run.name,
            "method": run.summary["method"],
            "seed": run.summary["seed"],
            "status": run.summary["status"],
            "rounds": run.summary["rounds"],
            "settings": own,
            **{name: run.summary.get(name) for name in _ACCURACIES.values()},
            "everyone": (run.summary["everyone"] or {}).get("accuracy"),
            "bytes_per_round": run.summary["bytes_per_round"],
            "total_bytes": run.summary["total_bytes"],
            "seconds": run.summary["seconds"],
            "directory": run.directory.name if run.directory else None,
        }
        for run, own in zip(runs, differing, strict=False)
    ]
    document = {"schema": SCHEMA, **more, "settings": same, "runs": rows}
    try:
        for name, text in (("results.json", json.dumps(document, indent=2) + "\n"), ("results.csv", _csv(rows))):
            write_atomically(directory / name, lambda file, text=text: file.write(text.encode()))  # type: ignore[misc]
    except OSError as error:
        raise StorageError(directory, error.strerror or str(error), resume=directory) from error


def compared(configs: Sequence[Config]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The settings all have in common, and for each configuration those in which they are not all alike; seed, method
    and folder of a run stand elsewhere."""
    flat = [
        {f"{section}.{key}": value for section, own in config.tables().items() for key, value in own.items()}
        for config in configs
    ]
    keys = [key for key in dict.fromkeys(key for own in flat for key in own) if key not in _NOT_COMPARED]
    same = {key: flat[0][key] for key in keys if all(key in own and own[key] == flat[0].get(key) for own in flat)}
    return same, [{key: own[key] for key in keys if key in own and key not in same} for own in flat]


def _csv(rows: Sequence[Mapping[str, Any]]) -> str:
    """A column a number; settings under their names, empty where a method does not have them."""
    settings = list(dict.fromkeys(key for row in rows for key in row["settings"]))
    text = io.StringIO()
    flat = []
    for row in rows:
        line = {name: row[name] for name in ("name", "method", "seed", "status", "rounds")}
        line |= {key: row["settings"].get(key) for key in settings}
        for short, name in _ACCURACIES.items():
            line |= {f"{short}_{which}": (row[name] or {}).get(which) for which in ("max", "last10", "final")}
        line |= {"everyone": row["everyone"]} | {f"{way}_per_round": n for way, n in row["bytes_per_round"].items()}
        flat.append(line | {name: row[name] for name in ("total_bytes", "seconds", "directory")})
    writer = csv.DictWriter(text, list(flat[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(flat)
    return text.getvalue()
