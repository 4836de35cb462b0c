"""Writes folders of runs and studies in which every number is known."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from pfedlms.cli.stored import sections_of
from pfedlms.experiment.config import load_config
from pfedlms.report.runs import Section

KIB = 1024


def stored_run(label: str, summary: dict[str, Any], settings: Any = None, directory: Path | None = None) -> Any:
    return SimpleNamespace(label=label, summary=summary, settings=settings or {}, metrics=[], directory=directory)


def make_summary(
    method: str, accuracies: Sequence[float | None], *, seed: int = 0, kib: int = 0,
    clients: Sequence[float] = (50.0, 70.0), **more: Any,
) -> dict[str, Any]:  # fmt: skip
    """The summary.json of a run with an evaluation after every round."""
    sent = {"up_payload": kib * KIB, "up_framing": 0, "down_payload": kib * KIB, "down_framing": 0, "catch_up": 0}
    measured = [accuracy for accuracy in accuracies if accuracy is not None]
    reached = {"max": max(measured), "last10": sum(measured[-10:]) / len(measured[-10:]), "final": measured[-1]}
    return {
        "schema": 1, "status": "finished", "method": method, "dataset": "digits", "model": "dnn", "seed": seed,
        "clients": len(clients), "partition": "dirichlet", "participation": 1.0, "rounds": len(accuracies),
        "evaluations": len(accuracies),
        "accuracy": reached, "everyone": {"accuracy": 60.0, "client_acc": list(clients)}, "bytes_per_round": sent,
        "total_bytes": 2 * kib * KIB * len(accuracies), "rejected": 0, "seconds": 1.5, "parameters": 18910, **more,
    }  # fmt: skip


def write_run(
    folder: Path, method: str, accuracies: Sequence[float | None], *, seed: int = 0, kib: int = 0,
    clients: Sequence[float] = (50.0, 70.0), shared: Sequence[float] = (), settings: dict[str, Any] | None = None,
    **summary: Any,
) -> str:  # fmt: skip
    """A finished run that evaluated after every round; up and down `kib` KiB each in a round. Gives its config."""
    tables: dict[str, Any] = {"method": {"name": method}, "data": {"clients": len(clients)}, "run": {"seed": seed}}
    tables["train"] = {"rounds": len(accuracies)}
    for section, own in (settings or {}).items():
        tables[section] = {**tables.get(section, {}), **own}
    config = load_config(None, tables).to_toml()
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text(config)
    document = make_summary(method, accuracies, seed=seed, kib=kib, clients=clients, **summary)
    lines = []
    for number, accuracy in enumerate(accuracies, 1):
        record: dict[str, Any] = {"round": number, "p_acc": accuracy, "client_acc": list(clients)}
        record |= {"g_acc": shared[number - 1]} if shared else {}
        record["bytes"] = {name: number * each for name, each in document["bytes_per_round"].items()}
        lines.append(json.dumps(record))
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "summary.json").write_text(json.dumps(document))
    return config


def write_plan(folder: Path, runs: dict[str, tuple[str, str]], axes: Any = None, by: str = "p_acc") -> None:
    """The plan of runs made before: folder → name of its row and configuration."""
    names, configs = ({key: pair[at] for key, pair in runs.items()} for at in (0, 1))
    manifest = {"schema": 1, "names": names, "runs": configs, "axes": axes or {}, "by": by}
    (folder / "study.json").write_text(json.dumps(manifest))


def write_comparison(folder: Path, **summary: Any) -> Path:
    """local, fedavg and stc on two seeds each, by numbers that can be worked out by hand."""
    made: dict[str, tuple[str, str]] = {}
    for seed in (0, 1):
        up = float(seed)
        local = write_run(folder / f"l{seed}", "local", [50 + up, 60 + up], seed=seed, clients=(50.0, 70.0), **summary)
        more = {"kib": 1024, "clients": (80.0, 70.0), "shared": [60, 75], **summary}
        fedavg = write_run(folder / f"f{seed}", "fedavg", [70, 80 + 2 * up], seed=seed, **more)
        stc = write_run(folder / f"s{seed}", "stc", [65, 75], seed=seed, kib=64, clients=(45.0, 90.0), **summary)
        made |= {f"l{seed}": ("local", local), f"f{seed}": ("fedavg", fedavg), f"s{seed}": ("stc", stc)}
    write_plan(folder, made)
    return folder


def write_sweep(
    folder: Path, axes: dict[str, list[Any]], reached: Sequence[float], interrupted: Sequence[float] = ()
) -> Path:
    """A sweep of fedavg over settings of `train`, one evaluation per run; values of the last axis change first."""
    made = {}
    for at, (values, accuracy) in enumerate(zip(product(*axes.values()), reached, strict=True)):
        chosen = dict(zip(axes, values, strict=True))
        status = "interrupted" if accuracy in interrupted else "finished"
        config = write_run(folder / f"r{at}", "fedavg", [accuracy], kib=1, settings={"train": chosen}, status=status)
        made[f"r{at}"] = (" ".join(f"{key}={value}" for key, value in chosen.items()), config)
    named = {f"train.{key}": values for key, values in axes.items()}
    write_plan(folder, made, axes=named)
    return folder


def section_of(folder: Path) -> Section:
    """The one study there."""
    (section,) = sections_of([folder])[0]
    return section
