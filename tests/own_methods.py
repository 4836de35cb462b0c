"""FedProx, SCAFFOLD and Ditto as docs/methods.md teaches to write them; each under 50 lines."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pfedlms.cohort import Cohort, Tensors
from pfedlms.methods.contract import ClientWork, FieldMeans, Means, Objective, PerClient, Task, Tracked, go_on_from
from pfedlms.methods.fedavg import FedAvg, FedAvgSettings
from pfedlms.settings import setting
from pfedlms.wire import Floats, Message

# --- FedProx: Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith, MLSys 2020 -------------------------------------------------


@dataclass(frozen=True)
class Proximal(Objective):
    """The task's loss + λ/2 ‖θ − w‖²."""

    anchor: PerClient
    strength: float

    def gradient(self, params: Tensor) -> Tensor:
        return self.strength * (params - self.anchor.value)


class FedProx(FedAvg):
    """FedAvg whose local steps are pulled towards the model they start from. λ = 0 is `fedavg`."""

    name, paper = "fedprox", "Li et al., MLSys 2020"

    @dataclass(frozen=True)
    class Settings(FedAvgSettings):
        strength: float = setting(0.1, "λ; 0 is `fedavg`", minimum=0)

    def objective(self, cohort: Cohort, round: int) -> Objective:
        return Proximal(PerClient(cohort.params), self.settings.strength)


# --- SCAFFOLD: Karimireddy, Kale, Mohri, Reddi, Stich, Suresh, ICML 2020 ----------------------------------------------


class Controlled(FieldMeans):
    """↑ θ_k − w, Δc_k      ↓ w ← w + Σ p_k (θ_k − w), c ← c + (participants / clients) Σ p_k Δc_k"""

    def __init__(self, task: Task) -> None:
        self._share, dim = task.participants / task.clients, task.layout.dim
        self.up = Message(0, (Floats("update", dim), Floats("change", dim)))
        self.down = Message(1, (Floats("model", dim), Floats("control", dim)))

    def client_send(self, cohort: Cohort, round: int, work: ClientWork) -> tuple[Cohort, Tensors]:
        return cohort, {"update": cohort.params - cohort.state["model"], "change": cohort.state["change"]}

    def server_reply(self, server: Tensors, total: Means, round: int) -> tuple[Tensors, Tensors]:
        model = server["model"] + total["update"].result().float()
        control = server["control"] + self._share * total["change"].result().float()
        after = {"model": model, "control": control}
        return after, after

    def client_receive(self, cohort: Cohort, values: Tensors, round: int) -> Cohort:
        return go_on_from(cohort, values["model"]).with_heard(control=values["control"])


@dataclass(frozen=True)
class Corrected(Objective):
    """The task's gradient − c_k + c."""

    correction: PerClient

    def gradient(self, params: Tensor) -> Tensor:
        return self.correction.value


class Scaffold(Tracked):
    """c_k ← c_k − c + (w − θ_k) / (E η) after the local steps (option II of the paper)."""

    name, paper, personal = "scaffold", "Karimireddy et al., ICML 2020", False
    about_last_steps, tracks = True, False

    @dataclass(frozen=True)
    class Settings:
        """None."""

    def __init__(self, task: Task, settings: Any) -> None:
        super().__init__(task, settings)
        self.exchanges = (Controlled(task),)

    def client_start(self, cohort: Cohort) -> Cohort:
        zeros = torch.zeros_like(cohort.params)
        return super().client_start(cohort).with_state(control=zeros, change=zeros)

    def server_start(self) -> Tensors:
        return {**super().server_start(), "control": torch.zeros_like(self.task.initial)}

    def objective(self, cohort: Cohort, round: int) -> Objective:
        return Corrected(PerClient(cohort.heard["control"] - cohort.state["control"]))

    def after_training(self, cohort: Cohort, phase: int, work: ClientWork) -> Cohort:
        control = cohort.heard.get("control", torch.zeros_like(cohort.params[0]))  # none before the first answer
        walked = (cohort.state["model"] - cohort.params) / (self.task.local_steps * self.task.rate(phase))
        change = walked - control
        return cohort.with_state(control=cohort.state["control"] + change, change=change)


# --- Ditto: Li, Hu, Beirami, Smith, ICML 2021 -------------------------------------------------------------------------


class Averaged(FieldMeans):
    """↑ θ_k, the shared model after local steps      ↓ w = Σ p_k θ_k"""

    def __init__(self, dim: int) -> None:
        self.up, self.down = (Message(kind, (Floats("model", dim),)) for kind in (0, 1))

    def client_send(self, cohort: Cohort, round: int, work: ClientWork) -> tuple[Cohort, Tensors]:
        return cohort, {"model": cohort.state["shared"]}

    def server_reply(self, server: Tensors, total: Means, round: int) -> tuple[Tensors, Tensors]:
        model = total["model"].result().float()
        return {"model": model}, {"model": model}

    def client_receive(self, cohort: Cohort, values: Tensors, round: int) -> Cohort:
        return go_on_from(cohort, values["model"])


class Ditto(Tracked):
    """FedAvg, and beside it a personal model v_k trained on f_k + λ/2 ‖v − w‖². λ = 0 is `local`."""

    name, paper, personal = "ditto", "Li et al., ICML 2021", True
    about_last_steps, tracks = True, False

    @dataclass(frozen=True)
    class Settings:
        strength: float = setting(0.1, "λ; 0 is `local`", minimum=0)

    def __init__(self, task: Task, settings: Any) -> None:
        super().__init__(task, settings)
        self.exchanges = (Averaged(task.layout.dim),)

    def client_start(self, cohort: Cohort) -> Cohort:
        return super().client_start(cohort).with_state(shared=cohort.params, own=cohort.params)

    def after_training(self, cohort: Cohort, phase: int, work: ClientWork) -> Cohort:
        towards = Proximal(PerClient(cohort.state["model"]), self.settings.strength)
        own, _ = work.train(cohort.with_model(cohort.state["own"]), towards, phase)
        return own.with_state(shared=cohort.params, own=own.params)
