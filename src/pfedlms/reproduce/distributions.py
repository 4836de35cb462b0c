"""The paper's Figure 1: how the weights of a model's layers are distributed while FedAvg trains it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from pfedlms.experiment.runs import load_run
from pfedlms.reproduce.cells import Cell, short_fedavg
from pfedlms.reproduce.play import Played, Where, play

ROUNDS = (0, 15, 99)
"""Counted from 0, as the paper does."""
BINS = 80


def distributions(
    dataset: str,
    where: Where,
    progress: Sequence[Any],
    quick: bool,
    seed: int = 0,
    say: Callable[[str], None] | None = None,
) -> tuple[Played, dict[str, Any] | None]:
    """Densities of every layer's weights in the shared model after the rounds of the figure, and its accuracy after
    every round; None where not all cells came to their end. The first rounds are played again on the way to the later
    ones: so each model is that of a cell, which is kept, and goes on where it was interrupted."""
    rounds = tuple(number // 10 for number in ROUNDS) if quick else ROUNDS
    cells = {number: short_fedavg(dataset, 0.5, number + 1, seed) for number in rounds}
    played = play(cells.values(), where, progress, say=say)
    if not all(own in played.measured and played.measured[own].finished for own in cells.values()):
        return played, None
    stages = [{"round": number, "layers": _densities(_shared(where, own))} for number, own in cells.items()]
    curve = played.measured[cells[rounds[-1]]].curve
    return played, {"stages": stages, "curve": {key: curve[key] for key in ("round", "g_acc")}}


def _shared(where: Where, own: Cell) -> dict[str, torch.Tensor]:
    model = load_run(where.out / own.name).trained().shared()
    assert model is not None  # FedAvg has one
    return model


def _densities(model: dict[str, torch.Tensor]) -> dict[str, dict[str, Any]]:
    """Of the weights of layers that have a matrix or more."""
    found = {}
    for name, values in model.items():
        if values.ndim > 1:
            flat = values.double().flatten().cpu().numpy()
            density, edges = np.histogram(flat, BINS, density=True)
            found[name] = {"density": density.tolist(), "edges": edges.tolist(), "deviation": float(flat.std())}
    return found


def density_points(document: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What is drawn of the weights: a record a bin, of every layer after each round of the figure."""
    return [
        {"round": stage["round"], "layer": layer, "from": low, "to": high, "density": density}
        for stage in document["stages"]
        for layer, own in stage["layers"].items()
        for low, high, density in zip(own["edges"][:-1], own["edges"][1:], own["density"], strict=True)
    ]


def accuracy_points(document: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What is drawn of accuracy, its rounds counted from 0 as those of the densities are."""
    pairs = zip(document["curve"]["round"], document["curve"]["g_acc"], strict=True)
    return [{"round": number - 1, "g_acc": accuracy} for number, accuracy in pairs]
