"""FedProto: Tan, Long, Liu, Zhou, Lu, Jiang, Zhang, "FedProto: Federated Prototype Learning across Heterogeneous
Clients", AAAI 2022.

Choices where the paper is silent: prototypes are taken over all training samples right before the local steps, and
count the same for every holder, as in the authors' code (the paper's equation weighs them by samples). A client
predicts with its own last layer, as the authors' code does for its figures without prototypes; the paper's other way,
the class of the nearest prototype, is not used here.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pfedlms.cohort import Cohort, Tensors
from pfedlms.errors import UsageError
from pfedlms.methods.contract import ClientWork, Exchange, Method, Objective, Task
from pfedlms.settings import setting
from pfedlms.wire import Mask, MaskedRows, Message


@dataclass(frozen=True)
class FedProtoSettings:
    strength: float = setting(1.0, "λ, weight of the distance to the prototypes; 0 is `local` exactly", minimum=0)


class MeanPrototypes(Exchange[tuple[Tensor, Tensor]]):
    """↑ mean feature of each class the client holds, and which it holds      ↓ their unweighted mean over the holders

    Features are what enters the last linear layer, taken over the training samples with the model as it is.
    """

    def __init__(self, task: Task, settings: FedProtoSettings) -> None:
        classes, width = self._shape = task.classes, task.feature_size
        fields = (Mask("held", classes), MaskedRows("prototypes", "held", classes, width))
        self.up, self.down = Message(0, fields), Message(1, fields)

    def client_send(self, cohort: Cohort, round: int, work: ClientWork) -> tuple[Cohort, Tensors]:
        means, counts = work.class_features(cohort)
        return cohort, {"held": counts > 0, "prototypes": means}

    def server_open(self, server: Tensors, round: int) -> tuple[Tensor, Tensor]:
        return torch.zeros(self._shape, dtype=torch.float64), torch.zeros(self._shape[0], 1, dtype=torch.int64)

    def server_add(
        self, total: tuple[Tensor, Tensor], ids: list[int], samples: list[int], values: Tensors
    ) -> tuple[Tensor, Tensor]:
        sums, holders = total[0].clone(), total[1] + values["held"].long().sum(dim=0).unsqueeze(1)
        for prototypes in values["prototypes"]:  # classes a client does not hold read as zero
            sums += prototypes.double()
        return sums, holders

    def server_reply(self, server: Tensors, total: tuple[Tensor, Tensor], round: int) -> tuple[Tensors, Tensors]:
        sums, holders = total
        return server, {"held": holders.squeeze(1) > 0, "prototypes": (sums / holders.clamp(min=1)).float()}

    def client_receive(self, cohort: Cohort, values: Tensors, round: int) -> Cohort:
        return cohort.with_heard(held=values["held"], prototypes=values["prototypes"])


@dataclass(frozen=True)
class NearPrototypes(Objective):
    """The task's loss + λ · mean squared distance of each sample's feature to the prototype of its class.

    The distance is that of each sample, as in the authors' code; the paper's is between mean features of the client and
    of all. A sample whose class has no prototype has distance zero and counts in the mean over the batch, likewise. (A
    client receives prototypes of all classes that it holds, unless its own message was lost.)
    """

    needs_features = True

    prototypes: Tensor
    held: Tensor
    strength: float

    def loss(self, features: Tensor, labels: Tensor) -> Tensor:
        distance = (features - self.prototypes[labels]).square().mean(dim=-1)
        return self.strength * torch.where(self.held[labels], distance, 0.0).mean(dim=1)


class FedProto(Method):
    """Clients keep their models, last layers included, and exchange only class prototypes: a few hundred floats,
    whatever the size of the model."""

    name = "fedproto"
    paper = "Tan et al., AAAI 2022"
    personal = True
    Settings, exchange = FedProtoSettings, MeanPrototypes

    def __init__(self, task: Task, settings: FedProtoSettings) -> None:
        if task.classes == 0:
            raise UsageError(
                "method.name: fedproto sends a mean feature of each class, but these targets are no classes; use "
                "another method, local or fedavg for instance"
            )
        if task.feature_size == 0:
            raise UsageError(
                "method.name: fedproto sends what enters the last linear layer, but this model has no linear layer"
            )
        super().__init__(task, settings)

    @staticmethod
    def head_layers(settings: FedProtoSettings) -> int:
        return 1

    def objective(self, cohort: Cohort, round: int) -> Objective:
        if self.settings.strength == 0:
            return Objective()
        return NearPrototypes(cohort.heard["prototypes"], cohort.heard["held"], self.settings.strength)
