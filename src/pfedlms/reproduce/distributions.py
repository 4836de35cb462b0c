"""The paper's Figure 1: how the weights of a model's layers are distributed while FedAvg trains it."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import torch

from pfedlms.errors import UsageError
from pfedlms.experiment.config import Config, load_config
from pfedlms.experiment.layers import Tables
from pfedlms.experiment.play import Progress
from pfedlms.experiment.prepare import as_configured, prepare
from pfedlms.experiment.record import settled
from pfedlms.experiment.store import write_atomically
from pfedlms.reproduce.play import Where

ROUNDS = (0, 15, 99)
"""Counted from 0, as the paper does."""
BINS = 80


def distributions(dataset: str, where: Where, progress: Progress, quick: bool, seed: int = 0) -> dict[str, Any]:
    """Densities of every layer's weights in the shared model after the rounds of the figure, and its accuracy after
    every round; kept in the folder, and not made twice."""
    rounds = tuple(number // 10 for number in ROUNDS) if quick else ROUNDS
    run = {"seed": seed, "device": where.device, "evaluate_every": 1}
    data: dict[str, Any] = {"dataset": dataset, "dir": where.data_dir, "alpha": 0.5}
    tables: Tables = {"data": data, "method": {"name": "fedavg"}, "train": {"rounds": rounds[-1] + 1}, "run": run}
    config = load_config(None, tables)
    file = where.out / f"{dataset}_distributions_s{seed}{'_quick' * quick}.json"
    if file.is_file():
        kept: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        if kept["settings"] == _settings(config):
            return kept
        raise UsageError(f"{file}: was made with other settings; name another --out, or delete it")
    document = {"settings": _settings(config), **_measure(config, rounds, progress)}
    where.out.mkdir(parents=True, exist_ok=True)
    write_atomically(file, lambda opened: opened.write(json.dumps(document).encode()))
    return document


def _settings(config: Config) -> dict[str, Any]:
    return {**settled(config), "run.seed": config.run.seed}


def _measure(config: Config, rounds: tuple[int, ...], progress: Progress) -> dict[str, Any]:
    federation = prepare(config)
    stages: list[dict[str, Any]] = []
    curve: dict[str, list[float]] = {"round": [], "g_acc": []}
    with as_configured(config):
        progress.started(config, 0)
        federation.start()
        for number in range(rounds[-1] + 1):
            report = federation.play_round(evaluate_global=True)
            assert report.global_evaluation is not None
            curve["round"].append(number + 1)
            curve["g_acc"].append(report.global_evaluation.accuracy)
            if number in rounds:
                model = federation.shared_state_dict()
                assert model is not None
                stages.append({"round": number, "layers": _densities(model)})
    return {"stages": stages, "curve": curve}


def _densities(model: dict[str, torch.Tensor]) -> dict[str, dict[str, Any]]:
    """Of the weights of layers that have a matrix or more."""
    found = {}
    for name, values in model.items():
        if values.ndim > 1:
            flat = values.double().flatten().cpu().numpy()
            density, edges = np.histogram(flat, BINS, density=True)
            found[name] = {"density": density.tolist(), "edges": edges.tolist(), "deviation": float(flat.std())}
    return found
