"""SCAFFOLD: Karimireddy, Kale, Mohri, Reddi, Stich, Suresh, "SCAFFOLD: Stochastic Controlled Averaging for Federated
Learning", ICML 2020.

Algorithm 1 of the paper with option II for the control variates, and where this differs: means are weighted by N_k
(`train.weights = uniform` is the paper's), so that with few participants c is the mean of the c_k only approximately;
clients send θ_k instead of θ_k − w, for the same bytes; with momentum β the steps of a round are divided by what their
gradients are multiplied with in sum instead of E (β = 0 is the paper's E). The paper has no lost messages: here |S|
counts the messages that arrive, and a client whose message is lost keeps its new c_k, which c then lacks. `train.clip`
clips corrected gradients, and c_k follows from the clipped steps.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pfedlms.cohort import Cohort, Tensors
from pfedlms.errors import UsageError
from pfedlms.methods.contract import ClientWork, FieldMeans, Means, Objective, PerClient, Task, Tracked, go_on_from
from pfedlms.settings import setting
from pfedlms.wire import Floats, Message


@dataclass(frozen=True)
class ScaffoldSettings:
    server_step: float = setting(
        1.0, "η_g, the server's step along its clients' mean update; 1 takes the mean itself", above=0, server_only=True
    )


class ControlledAverage(FieldMeans):
    """↑ θ_k, Δc_k      ↓ w ← w + η_g Σ p_k (θ_k − w),  c ← c + |S| / clients · Σ p_k Δc_k

    S are the clients whose messages arrived.
    """

    def __init__(self, task: Task, settings: ScaffoldSettings) -> None:
        self._clients, self._step, dim = task.clients, settings.server_step, task.layout.dim
        self.up = Message(0, (Floats("model", dim), Floats("change", dim)))
        self.down = Message(1, (Floats("model", dim), Floats("control", dim)))

    def client_send(self, cohort: Cohort, round: int, work: ClientWork) -> tuple[Cohort, Tensors]:
        return cohort, {"model": cohort.params, "change": cohort.state["change"]}

    def server_reply(self, server: Tensors, total: Means, round: int) -> tuple[Tensors, Tensors]:
        mean, w = total["model"].result(), server["model"].double()
        model = (mean if self._step == 1 else w + self._step * (mean - w)).float()
        share, change = total["change"].clients / self._clients, total["change"].result()
        control = (server["control"] + share * change).float()
        state = {"model": model, "control": control}
        return state, state

    def client_receive(self, cohort: Cohort, values: Tensors, round: int) -> Cohort:
        after = go_on_from(cohort, values["model"]).with_heard(control=values["control"])
        return after.with_state(change=torch.zeros_like(cohort.params))


@dataclass(frozen=True)
class Corrected(Objective):
    """The task's gradient − c_k + c."""

    correction: PerClient
    """c − c_k, `[clients, dim]`."""

    def gradient(self, params: Tensor) -> Tensor:
        return self.correction.value


class Scaffold(Tracked):
    """FedAvg whose local steps are corrected by the difference between all clients' gradients and the client's own:

        θ ← θ − η (∇f_k(θ) − c_k + c),  E steps from w;  then  c_k ← c_k − c + (w − θ_k) / (E η)

    Sends 2 n floats up and 2 n down; a client keeps c_k. Limits: while all control variates are zero it is `fedavg`,
    to the bit; so is a client alone. Weight decay is part of f_k. Refuses AdamW, whose steps are no multiples of
    gradients.
    """

    name = "scaffold"
    paper = "Karimireddy et al., ICML 2020"
    personal = False
    about_last_steps, tracks = True, False  # every answer is w and c themselves
    Settings, exchange = ScaffoldSettings, ControlledAverage
    client_zeros, server_zeros = ("control", "change"), ("control",)

    def __init__(self, task: Task, settings: ScaffoldSettings) -> None:
        super().__init__(task, settings)
        if task.optimizer != "sgd":
            raise UsageError(
                f"train.optimizer: got {task.optimizer!r}, expected 'sgd' with scaffold, whose control variates are "
                "the local steps divided by η; use sgd, or another method"
            )

    def client_rest(self, cohort: Cohort) -> Cohort:
        resting = super().client_rest(cohort)
        return replace(resting, state={"control": resting.state["control"]})  # the change was sent

    def objective(self, cohort: Cohort, round: int) -> Objective:
        return Corrected(PerClient(cohort.heard["control"] - cohort.state["control"]))

    def after_training(self, cohort: Cohort, phase: int, work: ClientWork) -> Cohort:
        control = cohort.heard.get("control", torch.zeros_like(cohort.params[0]))  # none before the first answer
        steps = [[self._effective_steps(self.task.steps_of(samples))] for samples in cohort.samples]
        mean_step = (cohort.state["model"] - cohort.params) / torch.tensor(steps, device=control.device)
        change = mean_step / self.task.rate(phase) - control
        return cohort.with_state(control=cohort.state["control"] + change, change=change)

    def _effective_steps(self, steps: int) -> float:
        """The sum of the factors by which E steps multiply their gradients: E, or Σ (1 − β^j) / (1 − β), j = 1 … E."""
        beta = self.task.momentum
        return float(steps) if beta == 0 else sum((1 - beta**j) / (1 - beta) for j in range(1, steps + 1))
