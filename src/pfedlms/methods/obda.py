"""OBDA: Zhu, Du, Gündüz, Huang, "One-Bit Over-the-Air Aggregation for Communication-Efficient Federated Edge Learning:
Design and Convergence Analysis", IEEE Transactions on Wireless Communications, 2021. Run here digitally and without
noise.

Choices where the paper is silent: a gradient is averaged over the E batches of a round; μw is added to it before the
sign, as weight decay would be (the paper has no regulariser); the count is unweighted; ties and gradients that are zero
are decided as in `MajorityOfGradients`, so that both messages have one bit per parameter.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pfedlms import rng
from pfedlms.backend import to_device
from pfedlms.cohort import Cohort, Tensors
from pfedlms.methods.contract import ClientWork, Exchange, Task, Tracked, go_on_from
from pfedlms.settings import setting
from pfedlms.wire import Message, Signs


@dataclass(frozen=True)
class OBDASettings:
    step: float = setting(1e-3, "η of the sign step w ← w − η v; every coordinate moves by η per round", above=0)


class MajorityOfGradients(Exchange[Tensor]):
    """↑ sign of the gradient at w      ↓ v, the sign that most clients sent      then w ← w − η v everywhere

    The count is unweighted. A sign bit cannot be zero, so signs of zeros must cancel out:

    - Where its gradient is zero (the weights of an input that is always zero), client k sends + if k + round is even
      and − if it is odd. Half of such clients send each sign, and every client sends the opposite in the next round.
    - A tie is decided by a random sign, drawn in every even round from a stream named by the seed, and reversed in the
      odd round after it.

    With the same clients in every round, a weight without gradient is never further than η from its start. With
    changing participants it moves equally often in both directions.
    """

    def __init__(self, task: Task, settings: OBDASettings) -> None:
        self._task, self._step = task, settings.step
        self.up, self.down = (Message(kind, (Signs("signs", task.layout.dim),)) for kind in (0, 1))

    def client_send(self, cohort: Cohort, round: int, work: ClientWork) -> tuple[Cohort, Tensors]:
        model = cohort.state["model"]
        gradient = work.mean_gradient(cohort, model, round + 1) + self._task.weight_decay * model
        turns = torch.tensor([[1.0 - 2.0 * ((client + round) % 2)] for client in cohort.ids], device=gradient.device)
        return cohort, {"signs": torch.where(gradient == 0, turns, gradient)}

    def server_open(self, server: Tensors, round: int) -> Tensor:
        return torch.zeros(self._task.layout.dim, dtype=torch.int64)

    def server_add(self, total: Tensor, ids: list[int], samples: list[int], values: Tensors) -> Tensor:
        return total + values["signs"].to(torch.int64).sum(dim=0)

    def server_reply(self, server: Tensors, total: Tensor, round: int) -> tuple[Tensors, Tensors]:
        coin = torch.from_numpy(rng.signs(rng.stream(self._task.seed, "obda-coin", round // 2), len(total)))
        vote = torch.where(total == 0, -coin if round % 2 else coin, total.sign().float())
        return {"model": server["model"] - self._step * vote}, {"signs": vote}

    def client_receive(self, cohort: Cohort, values: Tensors, round: int) -> Cohort:
        vote = to_device(values["signs"], cohort.params.device)
        return go_on_from(cohort, cohort.state["model"] - self._step * vote)


class OBDA(Tracked):
    """signSGD with majority vote on one gradient per round, averaged over the E batches.

    Limits: with one client it is signSGD. P-acc is of a copy of w that each client trains for E steps on its own data;
    the copy is dropped when the next w comes.
    """

    name = "obda"
    paper = "Zhu et al., IEEE TWC 2021"
    personal = False
    Settings, exchange = OBDASettings, MajorityOfGradients
