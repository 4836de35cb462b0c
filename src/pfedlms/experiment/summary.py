"""The summary of a run, computed from its configuration, its metrics, facts about data and model, and how it ended."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from math import isfinite
from typing import Any

import numpy as np
import torch

from pfedlms import __version__
from pfedlms.experiment.config import Config
from pfedlms.experiment.prepare import normalisation
from pfedlms.report.runs import score_text

SCHEMA = 1
Metrics = Sequence[Mapping[str, Any]]
"""The lines of metrics.jsonl."""


def summarise(
    config: Config, metrics: Metrics, facts: Mapping[str, Any], status: str, totals: Mapping[str, Any]
) -> dict[str, Any]:
    """The content of summary.json.

    Args:
        facts: what is known of data and model, see `ActiveRun._facts`.
        status: finished, interrupted, diverged or failed.
        totals: `round`, `bytes`, `seconds`, … at the end of the run, as in a line of metrics.jsonl.
    """
    rounds, sent = totals["round"], totals["bytes"]
    metric = facts.get("metric") or next((line["metric"] for line in metrics if "metric" in line), None)
    summary: dict[str, Any] = {
        "schema": SCHEMA,
        "status": status,
        "method": config.method,
        "dataset": config.data.dataset,
        "model": config.model.name,
        "seed": config.run.seed,
        "clients": facts.get("clients", config.data.clients),
        **{key: facts[key] for key in ("classes", "client_names", "partition", "tokens") if facts.get(key)},
        "participation": config.train.participation,
        "rounds": rounds,
        **({"metric": metric} if metric else {}),
        "evaluations": len(metrics),
        "accuracy": measure_summary([line["p_acc"] for line in metrics]),
    }
    if config.data.validation:
        summary["validation_accuracy"] = measure_summary([line.get("v_acc") for line in metrics])
        best = best_of(metrics)
        summary["best"] = best and {name: best[name] for name in ("round", "v_acc", "p_acc")}
    if config.train.patience:
        summary["stopped_early"] = out_of_patience(config, metrics) and rounds < config.train.rounds
    shared = [line["g_acc"] for line in metrics if "g_acc" in line]
    if shared:
        summary["global_accuracy"] = measure_summary(shared)
    for key, name in (("perplexity", "perplexity"), ("g_perplexity", "global_perplexity")):
        if any(key in line for line in metrics):
            summary[name] = measure_summary([line.get(key) for line in metrics], lowest=True)
    constants = normalisation(config)
    return summary | {
        "everyone": None,
        "bytes_per_round": {name: _mean_bytes(total, rounds) for name, total in sent.items()},
        "total_bytes": sum(sent.values()),
        **{key: totals[key] for key in ("rejected", "astray", "unheard", "seconds") if key in totals},
        "parameters": facts.get("parameters", 0),
        **{key: facts[key] for key in ("data_fingerprint", "digests") if key in facts},
        **({"normalisation": constants} if constants else {}),
        **({"environment": facts["environment"]} if "environment" in facts else {}),
        **({"transport": totals["transport"]} if "transport" in totals else {}),
    }


def best_of(metrics: Metrics) -> Mapping[str, Any] | None:
    """The first evaluation with the highest V-acc; None if no evaluation has a V-acc."""
    return max(_lines_with_v_acc(metrics), key=lambda line: float(line["v_acc"]), default=None)


def out_of_patience(config: Config, metrics: Metrics) -> bool:
    """Whether V-acc has not risen for `train.patience` evaluations."""
    validated, best = _lines_with_v_acc(metrics), best_of(metrics)
    patience = config.train.patience
    return bool(patience) and best is not None and len(validated) > validated.index(best) + patience


def _lines_with_v_acc(metrics: Metrics) -> list[Mapping[str, Any]]:
    return [line for line in metrics if line.get("v_acc") is not None]


def measure_summary(measured: Sequence[float | None], lowest: bool = False) -> dict[str, float | None]:
    """Maximum (or minimum) over evaluations, mean of the last 10, and the last one. Evaluations without a value are
    skipped; null if none has one."""
    values = [value for value in measured if value is not None]
    name, best = ("min", min) if lowest else ("max", max)
    if not values:
        return {name: None, "last10": None, "final": None}
    tail = values[-10:]
    return {name: best(values), "last10": sum(tail) / len(tail), "final": values[-1]}


def finite_or_none(record: Mapping[str, Any]) -> dict[str, Any]:
    """A record whose NaN and infinite numbers, which JSON does not have, are None; also those in lists."""

    def convert(value: Any) -> Any:
        if isinstance(value, list):
            return [convert(item) for item in value]
        return None if isinstance(value, float) and not isfinite(value) else value

    return {key: convert(value) for key, value in record.items()}


def _mean_bytes(total: int, rounds: int) -> int | float:
    """Bytes per round: an int if it is a whole number; 0 before the first round."""
    return total / rounds if rounds and total % rounds else total // max(1, rounds)


def one_line_summary(summary: Mapping[str, Any]) -> str:
    """A run in one line: method, data set, clients, rounds, and accuracy as the mean of the last 10 evaluations."""
    value, metric = summary["accuracy"]["last10"], summary.get("metric")
    score = "nothing measured" if value is None else f"{metric or 'P-acc'} {score_text(value, summary)}"
    averaged = min(10, summary.get("evaluations") or 10)
    score += f", mean of the last {averaged}" if value is not None and averaged > 1 else ""
    status = f" ({summary['status']})" * (summary["status"] != "finished")
    rounds, clients = (f"{summary[key]} {key[:-1]}{'s' * (summary[key] != 1)}" for key in ("rounds", "clients"))
    return f"{summary['method']} on {summary['dataset']}, {clients}, {rounds}{status}: {score}"


def environment(device: torch.device) -> dict[str, str]:
    """Versions, kind of machine and training device; nothing that identifies a machine or its user."""
    device_name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return {
        "pfedlms": __version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "numpy": np.__version__,
        "system": f"{platform.system()} {platform.machine()}",
        "device": device_name,
    }
