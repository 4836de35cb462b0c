"""Plain loops over clients with local steps in float64, and the federations that are compared with them: 20 clients,
half of them in a round."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

import factories
from pfedlms.data import FederatedData, batch_positions
from pfedlms.engine import Federation
from pfedlms.engine.participation import Participation

CLIENTS, SEED, ROUNDS, STEPS, BATCH, RATE, DECAY, SHARE = 20, 3, 4, 5, 16, 0.1, 1e-4, 0.5
HIDDEN = 24
BODY = 64 * HIDDEN + HIDDEN
"""Entries of the first layer."""


def network(hidden: int = HIDDEN) -> nn.Module:
    layers = lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, hidden), nn.ReLU(), nn.Linear(hidden, 10))  # noqa: E731
    return factories.seeded(layers)


def federate(name: str, module: nn.Module | None = None, **options: Any) -> Federation:
    chosen = {"local_steps": STEPS, "batch_size": BATCH, "learning_rate": RATE, "weight_decay": DECAY, **options}
    return factories.federation(name, factories.digits(CLIENTS), module or network(), seed=SEED, **chosen)


def played(name: str, rounds: int = ROUNDS, **options: Any) -> dict[str, Any]:
    return factories.played(federate(name, **options), rounds).state()


class Loop:
    """Clients' local steps, and means over clients."""

    def __init__(self, data: FederatedData) -> None:
        self.data, self.module = data, deepcopy(network()).double()
        self.initial = nn.utils.parameters_to_vector(self.module.parameters()).detach()
        self.weights = torch.tensor([float(len(own)) for own in data.train], dtype=torch.float64)
        self.participants = Participation(CLIENTS, SHARE, SEED)

    def gradient(self, model: Tensor, samples: Tensor) -> Tensor:
        nn.utils.vector_to_parameters(model.clone(), self.module.parameters())
        loss = nn.functional.cross_entropy(self.module(self.data.x[samples].double()), self.data.y[samples])
        parts = torch.autograd.grad(loss, list(self.module.parameters()))
        return torch.cat([part.flatten() for part in parts]) + DECAY * model

    def batches(self, client: int, phase: int, steps: int = STEPS, each_phase: int = STEPS) -> list[Tensor]:
        own = self.data.train[client]
        drawn = batch_positions(SEED, client, len(own), phase * each_phase, steps, BATCH)
        return [torch.from_numpy(own[positions]) for positions in drawn]

    def steps(
        self, model: Tensor, client: int, phase: int, pull: Callable[[Tensor], Tensor] | None = None,
        steps: int = STEPS, moves: slice = slice(None), each_phase: int = STEPS, rate: float = RATE,
    ) -> Tensor:  # fmt: skip
        """Steps from `model`; `pull` adds to the gradient, and only the entries in `moves` move. A phase has
        `each_phase` batches."""
        model = model.clone()
        for samples in self.batches(client, phase, steps, each_phase):
            gradient = self.gradient(model, samples)
            gradient = gradient if pull is None else gradient + pull(model)
            model[moves] = model[moves] - rate * gradient[moves]
        return model

    def mean(self, values: dict[int, Tensor]) -> Tensor:
        weights = self.weights[list(values)]
        return torch.stack(list(values.values())).T @ weights / weights.sum()
