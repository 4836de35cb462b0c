"""What the server and the clients of a run know before its first round."""

from __future__ import annotations

import hashlib
from typing import Any

import torch

from pfedlms.cohort import Cohort
from pfedlms.engine.catch_up import CatchUp
from pfedlms.engine.guard import guard_method
from pfedlms.engine.participation import Participation
from pfedlms.methods.contract import Method, Task
from pfedlms.models.forward import CohortModel
from pfedlms.settings import shared_settings
from pfedlms.step import optimizer_size
from pfedlms.train_settings import TrainSettings
from pfedlms.wire.frames import VERSION, agreement_digest


class Terms:
    """The method with its settings, the model with w⁰, the participants of each phase, how clients train, and the
    digest that every frame carries."""

    def __init__(
        self, method: type[Method], settings: Any, model: CohortModel, clients: int, classes: int,
        train: TrainSettings, seed: int,
    ) -> None:  # fmt: skip
        self.participation = Participation(clients, train.participation, seed)
        task = task_of(model, classes, self.participation, train, seed)
        self.method = guard_method(method(task, settings), train.weights)
        if (self.method.about_last_steps or self.method.tracks) and len(self.method.exchanges) != 1:
            raise ValueError(f"method: {method.name} is about the last steps, or tracks a model: it has one exchange")
        self.model, self.train, self.seed = model, train, seed
        self.digest = method_digest(self.method)
        self.catch_up = CatchUp(self.method, self.digest)
        """How absent clients of a method that tracks a model receive it."""
        self._momentum_size = optimizer_size(model.layout.dim, train.optimizer, train.momentum)

    def start(self, ids: tuple[int, ...], samples: tuple[int, ...]) -> Cohort:
        """Clients that take part for the first time."""
        return self.method.client_start(self.new_cohort(ids, samples))

    def new_cohort(self, ids: tuple[int, ...], samples: tuple[int, ...]) -> Cohort:
        """Clients that have not taken part yet, as `Method.client_start` takes them."""
        return self.model.cohort(ids, samples, self._momentum_size)


def task_of(model: CohortModel, classes: int, participation: Participation, train: TrainSettings, seed: int) -> Task:
    """The task as a method knows it."""
    return Task(
        layout=model.layout,
        classes=classes,
        feature_size=model.feature_size,
        seed=seed,
        initial=model.initial.cpu(),
        clients=participation.clients,
        participants=participation.count,
        learning_rate=train.learning_rate,
        weight_decay=train.weight_decay,
        schedule=train.rates,
        optimizer=train.optimizer,
        momentum=train.momentum,
        local_steps=train.local_steps,
        local_epochs=train.local_epochs,
        batch_size=train.batch_size,
        statistics=tuple(
            (name, value.numel()) for name, value in model.initial_buffers.items() if value.is_floating_point()
        ),
        device=model.device,
    )


def method_digest(method: Method) -> bytes:
    """Digest of what both ends must agree on: protocol, method and its settings, layer table, seed and w⁰."""
    task = method.task
    return agreement_digest(
        {
            "protocol": VERSION,
            "method": method.name,
            "layers": ",".join(f"{layer.offset}:{layer.size}" for layer in task.layout.layers),
            "classes": task.classes,
            "seed": task.seed,
            "initial": _sha256(task.initial),
            **{f"method.{key}": value for key, value in shared_settings(method.settings).items()},
            **{f"agreement.{key}": value for key, value in method.agreement().items()},
        }
    )


def _sha256(values: torch.Tensor) -> bytes:
    return hashlib.sha256(values.contiguous().numpy().astype("<f4").tobytes()).digest()
