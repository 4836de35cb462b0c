"""What is kept of a run, comparison or sweep, to be looked at again; nothing is trained and no data are needed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pfedlms.engine import Traffic
from pfedlms.errors import RunDirectoryError
from pfedlms.experiment.compare import Comparison
from pfedlms.experiment.config import CUSTOM
from pfedlms.experiment.prepare import prepare
from pfedlms.experiment.record import mean_bytes, reached
from pfedlms.experiment.run import open_run
from pfedlms.experiment.store import RunDirectory
from pfedlms.experiment.study import Study, StudyRun, manifest_of, read_manifest, runs_of, stored_run
from pfedlms.experiment.sweep import Sweep


def stored_study(directory: Path) -> Study:
    """A comparison or sweep as far as it came."""
    file = manifest_of(directory)
    if file is None:
        raise RunDirectoryError(f"{directory}: no comparison or sweep here")
    manifest = read_manifest(file)
    names = manifest.get("names", {})
    done: list[StudyRun] = []
    for folder in manifest["runs"]:
        if not (directory / folder / "config.toml").is_file():
            continue
        config = open_run(directory / folder)[1].with_run(out=str(directory / folder))
        summary = stored_summary(directory / folder)
        if summary["rounds"]:
            done.append(stored_run(names.get(folder, config.method), config, summary))
    finished = sum(run.summary["status"] != "interrupted" for run in done)
    common: dict[str, Any] = {"results": done, "interrupted": finished < len(manifest["runs"])}
    if file.name == "sweep.json":
        return Sweep(runs_of(done), directory, axes=manifest["axes"], by=manifest["by"], **common)
    return Comparison(runs_of(done), directory, **common)


def stored_summary(directory: Path) -> dict[str, Any]:
    """The summary of a run; made from its metrics where its process wrote none, or went on after it did."""
    stored, config = open_run(directory)
    summary, metrics = stored.read_summary(), stored.read_metrics()
    last: dict[str, Any] = metrics[-1] if metrics else {"round": 0}
    if summary is not None and summary["rounds"] >= last["round"]:
        return summary
    checkpoint = stored.load_checkpoint()
    sent = last.get("bytes", asdict(Traffic()))
    made: dict[str, Any] = {
        "status": "interrupted", "method": config.method, "dataset": config.data.dataset, "model": config.model.name,
        "seed": config.run.seed, "clients": config.data.clients, "participation": config.train.participation,
        "rounds": last["round"], "evaluations": len(metrics),
        "accuracy": reached([record["p_acc"] for record in metrics]),
    }  # fmt: skip
    for key, name in (("v_acc", "validation_accuracy"), ("g_acc", "global_accuracy")):
        measured = [record[key] for record in metrics if record.get(key) is not None]
        if measured:
            made[name] = reached(measured)
    made |= {key: last[key] for key in ("rejected", "unheard", "transport") if key in last}
    return made | {
        "everyone": None,
        "bytes_per_round": {name: mean_bytes(total, last["round"]) for name, total in sent.items()},
        "total_bytes": sum(sent.values()),
        "seconds": last.get("seconds", 0.0),
        "parameters": _parameters(checkpoint) if checkpoint else 0,
    }


def _parameters(checkpoint: Mapping[str, Any]) -> int:
    """n; checkpoints of before it was in them have it in their models."""
    return int(checkpoint.get("parameters") or checkpoint["federation"]["params"].shape[1])


def clients_of(directory: Path, summary: dict[str, Any], data_dir: str | None = None) -> list[dict[str, Any]]:
    """A row a client: id, name if it has one, training samples, and P-acc after the last round, or in the last
    evaluation it was part of where the run did not finish. Samples are looked for in the data only with `data_dir`,
    for runs whose checkpoint does not tell; of nodes with data of their own they are what nodes said, and left out
    where none has said anything yet."""
    stored, config = open_run(directory, data_dir)
    untold = stored.on_nodes and config.data.dataset == CUSTOM
    samples: Sequence[int | None] | None = samples_said(stored, config.data.clients) if untold else samples_of(stored)
    if samples is None and data_dir and not untold:
        samples = prepare(config).data.samples
    accuracies: dict[int, float] = {}
    for record in stored.read_metrics():
        who = record.get("clients", range(len(record["client_acc"])))
        accuracies |= dict(zip(who, record["client_acc"], strict=True))
    if summary["everyone"]:
        accuracies = dict(enumerate(summary["everyone"]["client_acc"]))
    names = summary.get("client_names")
    return [
        {
            "client": client,
            **({"name": names[client]} if names else {}),
            **({"train samples": samples[client] if samples else None} if samples or not untold else {}),
            "P-acc": accuracies.get(client),
        }
        for client in range(summary["clients"])
    ]


def samples_of(stored: RunDirectory) -> list[int] | None:
    """Training samples of every client, as the checkpoint has them."""
    checkpoint = stored.load_checkpoint()
    return checkpoint.get("samples") if checkpoint else None


def samples_said(stored: RunDirectory, clients: int) -> list[int | None] | None:
    """Training samples as nodes named them, None of one that has not; None where nobody has."""
    checkpoint = stored.load_checkpoint()
    if checkpoint is None:
        return None
    said = checkpoint["federation"]["standing"]["samples"]
    return [said.get(client) for client in range(clients)] if said else None
