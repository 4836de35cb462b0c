"""FedAvg: McMahan, Moore, Ramage, Hampson, Agüera y Arcas, "Communication-Efficient Learning of Deep Networks from
Decentralized Data", AISTATS 2017."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pfedlms.methods.base import ClientWork, Exchange, Method, Task, Tensors, weighted_sum
from pfedlms.models.cohort import Cohort
from pfedlms.wire.fields import Floats, Message


class Average(Exchange[tuple[Tensor, int]]):
    """↑ θ_k      ↓ w = Σ p_k θ_k      then θ_k ← w"""

    def __init__(self, dim: int) -> None:
        self._dim = dim
        self.up = Message(0, (Floats("model", dim),))
        self.down = Message(1, (Floats("model", dim),))

    def client_send(self, cohort: Cohort, round: int, work: ClientWork) -> tuple[Cohort, Tensors]:
        return cohort, {"model": cohort.params}

    def server_open(self, server: Tensors, round: int) -> tuple[Tensor, int]:
        return torch.zeros(self._dim, dtype=torch.float64), 0

    def server_add(
        self, total: tuple[Tensor, int], ids: list[int], samples: list[int], values: Tensors
    ) -> tuple[Tensor, int]:
        return weighted_sum(samples, values["model"], total[0]), total[1] + sum(samples)

    def server_reply(self, server: Tensors, total: tuple[Tensor, int], round: int) -> tuple[Tensors, Tensors]:
        return server, {"model": (total[0] / total[1]).float()}

    def client_receive(self, cohort: Cohort, values: Tensors, round: int) -> Cohort:
        return cohort.with_model(values["model"])


class FedAvg(Method):
    """The clients' models are averaged every round and all clients go on from the average.

    Sends n float32 up and n down. With one local step a round and full batches it is distributed gradient descent.
    """

    name = "fedavg"
    paper = "McMahan et al., AISTATS 2017"
    personal = False

    @dataclass(frozen=True)
    class Settings:
        """No settings of its own."""

    def __init__(self, task: Task, settings: Settings) -> None:
        super().__init__(task, settings)
        self._average = Average(task.layout.dim)

    @property
    def exchanges(self) -> tuple[Exchange[Any], ...]:
        return (self._average,)

    def global_model(self, cohort: Cohort) -> Tensor | None:
        return cohort.params
