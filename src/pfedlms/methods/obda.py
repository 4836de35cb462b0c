"""OBDA: Zhu, Du, Gündüz, Huang, "One-Bit Over-the-Air Aggregation for Communication-Efficient Federated Edge Learning:
Design and Convergence Analysis", IEEE Transactions on Wireless Communications, 2021. Run here digitally and without
noise.
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
    step: float = setting(1e-3, "η of the sign step w ← w − η v; every coordinate moves by η a round", above=0)


class MajorityOfGradients(Exchange[Tensor]):
    """↑ sign of the gradient at w      ↓ v, the sign most clients sent      then w ← w − η v on both ends

    The count is unweighted. An even split is decided by a coin that is a function of seed and round, so that a message
    stays one bit a parameter (leaving ties at zero would make it ternary).
    """

    def __init__(self, task: Task, step: float) -> None:
        self._task, self._step = task, step
        self.up, self.down = (Message(kind, (Signs("signs", task.layout.dim),)) for kind in (0, 1))

    def client_send(self, cohort: Cohort, round: int, work: ClientWork) -> tuple[Cohort, Tensors]:
        model = cohort.state["model"]
        return cohort, {"signs": work.mean_gradient(cohort, model, round) + self._task.weight_decay * model}

    def server_open(self, server: Tensors, round: int) -> Tensor:
        return torch.zeros(self._task.layout.dim, dtype=torch.int64)

    def server_add(self, total: Tensor, ids: list[int], samples: list[int], values: Tensors) -> Tensor:
        return total + values["signs"].to(torch.int64).sum(dim=0)

    def server_reply(self, server: Tensors, total: Tensor, round: int) -> tuple[Tensors, Tensors]:
        coin = torch.from_numpy(rng.signs(rng.stream(self._task.seed, "obda-coin", round), len(total)))
        vote = torch.where(total == 0, coin, total.sign().float())
        return {"model": server["model"] - self._step * vote}, {"signs": vote}

    def client_receive(self, cohort: Cohort, values: Tensors, round: int) -> Cohort:
        vote = to_device(values["signs"], cohort.params.device)
        return go_on_from(cohort, cohort.state["model"] - self._step * vote)


class OBDA(Tracked):
    """signSGD with majority vote on one mini-batch gradient a round, averaged over the E batches.

    Limits: with one client it is signSGD. The paper has no regulariser; μw is added to the gradient before the sign,
    as weight decay would be. P-acc is of a copy of w that each client trains for E steps on its own data; the copy is
    dropped when the next w comes.
    """

    name = "obda"
    paper = "Zhu et al., IEEE TWC 2021"
    personal = False
    Settings = OBDASettings

    def __init__(self, task: Task, settings: OBDASettings) -> None:
        super().__init__(task, settings)
        self.exchanges = (MajorityOfGradients(task, settings.step),)
