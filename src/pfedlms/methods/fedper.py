"""FedPer: Arivazhagan, Aggarwal, Singh, Choudhary, "Federated Learning with Personalization Layers", 2019.

Algorithms 1 and 2 of the paper, and where this differs: E steps instead of epochs; heads start from w⁰ with all clients
(the paper's clients draw their own); a client that returns after an absence continues with the head it left with.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pfedlms.backend import to_device
from pfedlms.cohort import Cohort, Tensors
from pfedlms.errors import UsageError
from pfedlms.methods.contract import ClientWork, FieldMeans, Means, Method, Task
from pfedlms.settings import setting
from pfedlms.wire import Floats, Message


@dataclass(frozen=True)
class FedPerSettings:
    head: int = setting(
        1,
        "layers of the head, from the last one, which stay with each client; 0 shares all layers: `fedavg`",
        minimum=0,
    )


class BodyAverage(FieldMeans):
    """↑ b_k, the body of θ_k = (b_k, h_k)      ↓ b = Σ p_k b_k      then θ_k ← (b, h_k)"""

    def __init__(self, size: int) -> None:
        self._size = size
        self.up, self.down = (Message(kind, (Floats("body", size),)) for kind in (0, 1))

    def client_send(self, cohort: Cohort, round: int, work: ClientWork) -> tuple[Cohort, Tensors]:
        return cohort, {"body": cohort.params[:, : self._size]}

    def server_reply(self, server: Tensors, total: Means, round: int) -> tuple[Tensors, Tensors]:
        return server, {"body": total["body"].result().float()}

    def client_receive(self, cohort: Cohort, values: Tensors, round: int) -> Cohort:
        head = cohort.state["head"]
        body = to_device(values["body"], head.device).expand(len(head), -1)
        return cohort.with_model(torch.cat([body, head], dim=1))


class FedPer(Method):
    """FedAvg of all layers except the last ones, the head, which stays with each client; both are trained together.

    Sends the floats of the body up and down; a client keeps its head. Layers are those of the layer table, in the order
    of their registration, and running statistics of batch norm stay local. Limits: an empty head is `fedavg`, to the
    bit. A head of all layers would be `local`, and is refused.
    """

    name = "fedper"
    paper = "Arivazhagan et al., 2019"
    personal = True
    about_last_steps = True
    Settings = FedPerSettings

    def __init__(self, task: Task, settings: FedPerSettings) -> None:
        super().__init__(task, settings)
        layers = task.layout.layers
        if settings.head >= len(layers):
            raise UsageError(
                f"method.head: got {settings.head}, expected at most {len(layers) - 1}, because the model has "
                f"{len(layers)} layers and one must be shared; use method local to share none"
            )
        self.body = sum(layer.size for layer in layers[: len(layers) - settings.head])
        """Number of entries of the body, the first part of the model, which is shared."""
        self.exchanges = (BodyAverage(self.body),)

    @staticmethod
    def head_layers(settings: FedPerSettings) -> int:
        return settings.head

    def client_start(self, cohort: Cohort) -> Cohort:
        return self._with_head(cohort)

    def client_rest(self, cohort: Cohort) -> Cohort:
        return cohort.without_model()

    def after_training(self, cohort: Cohort, phase: int, work: ClientWork) -> Cohort:
        return self._with_head(cohort)

    def global_model(self, cohort: Cohort) -> Tensor | None:
        return None if self.settings.head else cohort.params

    def _with_head(self, cohort: Cohort) -> Cohort:
        return cohort.with_state(head=cohort.params[:, self.body :].clone())
