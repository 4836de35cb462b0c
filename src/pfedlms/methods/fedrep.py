"""FedRep: Collins, Hassani, Mokhtari, Shakkottai, "Exploiting Shared Representations for Personalized Federated
Learning", ICML 2021.

Algorithm 1 of the paper, and where this differs: the mean is weighted by N_k (`train.weights = uniform` is the
paper's); heads start from w⁰; the head is trained on the batches on which the body is trained after that; phase 0
trains both together once before that, as every method's clients do. The model that is evaluated has the body of the
client's own last steps, not yet averaged, as all methods' models here; the authors' code takes the average, and ends
with a round in which all clients train their heads alone. `train.clip` measures the gradients of all layers, also of
those that do not move.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pfedlms.cohort import Cohort
from pfedlms.methods.contract import ClientWork, Objective, PerClient
from pfedlms.methods.fedper import FedPer, FedPerSettings
from pfedlms.settings import setting


@dataclass(frozen=True)
class FedRepSettings(FedPerSettings):
    body_steps: int = setting(
        0, "steps of the body after the E steps of the head; 0: E. (The paper has many of the head, few of the body)",
        minimum=0,
    )  # fmt: skip


@dataclass(frozen=True)
class Frozen(Objective):
    """Entries `first` to `last` − 1 stay as they are in `model`; the others are trained on the task's loss."""

    model: PerClient
    """`[clients, dim]`."""
    first: int
    last: int

    def after_step(self, params: Tensor, step: int) -> Tensor:
        frozen = self.model.value[:, self.first : self.last]
        return torch.cat([params[:, : self.first], frozen, params[:, self.last :]], dim=1)


class FedRep(FedPer):
    """FedPer, with the head trained before the body:

        h_k ← E steps on f_k(b, h) over h, from the client's own head
        b_k ← `body_steps` steps on f_k(b, h_k) over b, from the shared body          ↑ b_k   ↓ b = Σ p_k b_k

    Sends the floats of the body up and down; a client keeps its head and takes E + `body_steps` steps a round. Limits:
    an empty head leaves only the steps of the body: with `body_steps` 0 it is `fedavg`, to the bit.
    """

    name = "fedrep"
    paper = "Collins et al., ICML 2021"
    Settings = FedRepSettings

    def objective(self, cohort: Cohort, round: int) -> Objective:
        return Frozen(PerClient(cohort.params), 0, self.body)

    def after_training(self, cohort: Cohort, phase: int, work: ClientWork) -> Cohort:
        if phase:
            dim = cohort.params.shape[1]
            frozen_head = Frozen(PerClient(cohort.params), self.body, dim) if self.body < dim else Objective()
            cohort, _ = work.train(cohort.with_model(cohort.params), frozen_head, phase, self.settings.body_steps)
        return super().after_training(cohort, phase, work)
