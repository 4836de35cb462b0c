"""z-SignFedAvg: Tang, Wang, Chang, "z-SignFedAvg: A Unified Stochastic Sign-Based Compression for Federated Learning",
AAAI 2024.

Choices where the paper is silent: what is sent is the update over the learning rate γ of the steps just taken, with
momentum and weight decay in it; the mean is unweighted, as in the paper, whatever N_k; noise comes from a stream of its
own for each client and round; the answer is the model, 32 bits each, or the number of +1, from which it follows.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from math import pi, sqrt
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pfedlms import rng
from pfedlms.backend import to_device
from pfedlms.cohort import Cohort, Tensors
from pfedlms.errors import UsageError
from pfedlms.methods.contract import ClientWork, Exchange, Task, Tracked, go_on_from
from pfedlms.settings import setting
from pfedlms.wire import Floats, Message, Scalar, Signs, Symbols


@dataclass(frozen=True)
class ZSignSettings:
    sigma: float = setting(
        0.1, "σ, size of the noise before the sign; 0 is signFedAvg and needs method.step", minimum=0
    )
    noise: str = setting(
        "uniform", "ξ_z: uniform on [−1, 1] (z = ∞) or gaussian (z = 1)", choices=lambda: ["uniform", "gaussian"]
    )
    step: float = setting(
        0.0, "server step η; 0: η_z σ, which makes the update unbiased where |update| / γ ≤ σ", minimum=0
    )
    downlink: str = setting(
        "model",
        "model: w, 32 bits each; sum: how many sent +1, log2(K + 1) bits each for K participants",
        choices=lambda: ["model", "sum"],
    )


class SumOfSigns(Exchange[tuple[Tensor, int]]):
    """↑ sign((w − θ_k)/γ + σ ξ_z)      ↓ w ← w − η γ mean      (or the sum itself, and every client does that step)

    γ is the learning rate of the steps the exchange is about: in round r those of phase r.
    """

    def __init__(self, task: Task, settings: ZSignSettings) -> None:
        self._task, self._settings = task, settings
        scale = {"uniform": 1.0, "gaussian": sqrt(pi / 2)}[settings.noise]
        self._server_step = settings.step or scale * settings.sigma
        dim = task.layout.dim
        self.up = Message(0, (Signs("signs", dim),))
        self.down = Message(1, (Floats("model", dim),))
        if settings.downlink == "sum":
            self.down = Message(1, (Symbols("positive", (dim,), task.participants + 1), Scalar("senders", minimum=1)))

    def client_send(self, cohort: Cohort, round: int, work: ClientWork) -> tuple[Cohort, Tensors]:
        update = (cohort.state["model"] - cohort.params) / self._task.rate(round)
        if self._settings.sigma:
            noise = np.stack([self._noise(client, round) for client in cohort.ids]).astype(np.float32)
            update = update + self._settings.sigma * torch.from_numpy(noise).to(update.device)
        return cohort, {"signs": update}

    def _noise(self, client: int, round: int) -> np.ndarray[Any, np.dtype[np.float64]]:
        key = rng.stream(self._task.seed, "zsign-noise", round, client)
        if self._settings.noise == "uniform":
            return 2 * rng.uniforms(key, self._task.layout.dim) - 1
        return rng.normals(key, self._task.layout.dim)

    def server_open(self, server: Tensors, round: int) -> tuple[Tensor, int]:
        return torch.zeros(self._task.layout.dim, dtype=torch.int32), 0

    def server_add(
        self, total: tuple[Tensor, int], ids: list[int], samples: list[int], values: Tensors
    ) -> tuple[Tensor, int]:
        return total[0] + (values["signs"] > 0).sum(dim=0, dtype=torch.int32), total[1] + len(ids)

    def server_reply(self, server: Tensors, total: tuple[Tensor, int], round: int) -> tuple[Tensors, Tensors]:
        positive, senders = total[0], torch.tensor([float(total[1])])
        model = self._step(server["model"], positive, senders, round)
        if self._settings.downlink == "sum":
            return {"model": model}, {"positive": positive.to(torch.uint8), "senders": senders}
        return {"model": model}, {"model": model}

    def client_receive(self, cohort: Cohort, values: Tensors, round: int) -> Cohort:
        if self._settings.downlink == "sum":
            positive, senders = (to_device(values[name], cohort.params.device) for name in ("positive", "senders"))
            return go_on_from(cohort, self._step(cohort.state["model"], positive, senders, round))
        return go_on_from(cohort, values["model"])

    def _step(self, model: Tensor, positive: Tensor, senders: Tensor, round: int) -> Tensor:
        """w − η γ (2 c / K − 1), if c of K clients sent +1."""
        return model - self._server_step * self._task.rate(round) * (2 * positive.float() / senders - 1)


class ZSign(Tracked):
    """FedAvg whose clients send the signs of their noisy updates, one bit per parameter. The noise makes the mean of
    the signs an estimate of the mean update.

    Limits: σ = 0 is signFedAvg; σ → ∞ with many clients is FedAvg (unbiased, and as noisy as σ is large). The mean is
    unweighted.
    """

    name = "zsign"
    paper = "Tang, Wang, Chang, AAAI 2024"
    personal = False
    about_last_steps = True
    Settings, exchange = ZSignSettings, SumOfSigns

    def __init__(self, task: Task, settings: ZSignSettings) -> None:
        self.tracks = settings.downlink == "sum"
        if settings.sigma == 0 and settings.step == 0:
            raise UsageError(
                "method.step: got 0 with method.sigma = 0, expected a server step above 0; "
                "without noise there is no natural one"
            )
        if settings.downlink == "sum" and task.participants > 255:
            raise UsageError(
                f"method.downlink: 'sum' takes at most 255 clients per round, got {task.participants}; use 'model'"
            )
        super().__init__(task, settings)

    def agreement(self) -> dict[str, int | float | str]:
        schedule = asdict(self.task.schedule) if self.task.schedule.changes else {}
        if not self.task.schedule.floor:
            schedule.pop("floor", None)  # a cosine down to 0 has the digest it had before there were floors
        return {"clients": self.task.participants, "learning_rate": self.task.learning_rate, **schedule}
