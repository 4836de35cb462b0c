"""DeComFL: Li, Ying, Liu, Dong, Yang, "Achieving Dimension-Free Communication in Federated Learning via Zeroth-Order
Optimization", ICLR 2025.

The paper's algorithm with K local updates of P perturbations each, and where this differs: differences are central, as
in the authors' code (the algorithm box has forward ones); perturbations are signs instead of normal numbers, so that
server and clients add the same bits; they are named by seed, round and step, so that the server sends no seeds; the
mean is weighted by N_k (`train.weights = uniform` is the paper's); a client that was absent is sent the scalars that it
missed, as in the paper, or w where that is fewer bytes. η is the same in all rounds: schedule, momentum, weight decay
and clipping of [train] only change the ordinary steps that P-acc is of."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pfedlms import rng
from pfedlms.backend import to_device
from pfedlms.cohort import Cohort, Tensors
from pfedlms.errors import UsageError
from pfedlms.methods.contract import ClientWork, FieldMeans, Means, Task, Tracked, go_on_from
from pfedlms.settings import setting
from pfedlms.wire import Floats, Message


@dataclass(frozen=True)
class DeComFLSettings:
    updates: int = setting(1, "K, local updates of a client in a round, each on a batch of its own", minimum=1)
    perturbations: int = setting(10, "P, directions of an update; a client sends K · P numbers", minimum=1)
    smoothing: float = setting(1e-3, "μ, how far w is moved along a direction to measure the slope", above=0)
    step: float = setting(
        1e-3, "η of an update; of n parameters it must be about P / n of what suits SGD, as slopes are noisy", above=0
    )


class Slopes(FieldMeans):
    """K times, from x = w:  g_p = (f_k(x + μ z_p) − f_k(x − μ z_p)) / 2μ,  x ← x − η/P Σ g_p z_p,  p = 1 … P
    ↑ all g      ↓ their weighted means ḡ, and w ← w − η/P Σ ḡ z on both ends

    z_p of update u in round r are the signs of the stream (seed, "decomfl", r, u, p), the same for all clients.
    """

    def __init__(self, task: Task, settings: DeComFLSettings) -> None:
        self._task, self._settings = task, settings
        count = settings.updates * settings.perturbations
        self.up, self.down = (Message(kind, (Floats("slopes", count),)) for kind in (0, 1))

    def client_send(self, cohort: Cohort, round: int, work: ClientWork) -> tuple[Cohort, Tensors]:
        x, mu, slopes = cohort.state["model"], self._settings.smoothing, []
        for update in range(self._settings.updates):
            g = []
            for p in range(self._settings.perturbations):
                move = mu * self._direction(round, update, p, x.device)
                above, below = (work.losses(cohort, point, round + 1, update) for point in (x + move, x - move))
                g.append((above - below) / (2 * mu))
            slopes += g
            x = self._apply_update(x, torch.stack(g, dim=-1), round, update)
        return cohort, {"slopes": torch.stack(slopes, dim=1)}

    def server_reply(self, server: Tensors, total: Means, round: int) -> tuple[Tensors, Tensors]:
        slopes = total["slopes"].result().float()
        return {"model": self._apply_answer(server["model"], slopes, round)}, {"slopes": slopes}

    def client_receive(self, cohort: Cohort, values: Tensors, round: int) -> Cohort:
        slopes = to_device(values["slopes"], cohort.params.device)
        return go_on_from(cohort, self._apply_answer(cohort.state["model"], slopes, round))

    def _apply_answer(self, model: Tensor, slopes: Tensor, round: int) -> Tensor:
        """w, `[dim]` or `[clients, dim]`, after the K updates with slopes ḡ."""
        for update, g in enumerate(torch.split(slopes, self._settings.perturbations)):
            model = self._apply_update(model, g, round, update)
        return model

    def _apply_update(self, model: Tensor, slopes: Tensor, round: int, update: int) -> Tensor:
        """x − η/P Σ g_p z_p, with slopes `[P]` or `[clients, P]`."""
        steps = (self._settings.step / self._settings.perturbations) * slopes
        for p in range(self._settings.perturbations):
            model = model - steps[..., p : p + 1] * self._direction(round, update, p, model.device)
        return model

    def _direction(self, round: int, update: int, p: int, device: torch.device) -> Tensor:
        """z_p, `[dim]`."""
        key = rng.stream(self._task.seed, "decomfl", round, update, p)
        return to_device(torch.from_numpy(rng.signs(key, self._task.layout.dim)), device)


class DeComFL(Tracked):
    """Zeroth-order descent on w: clients measure slopes along random directions that server and clients know. A message
    contains only these slopes, whatever the size of the model.

    Sends K · P floats up and as many down, and takes 2 K P forward passes and no backward pass; a client keeps w. P-acc
    is of a copy of w that each client trains for E ordinary steps. Limits: on a linear loss a slope is exact for every
    μ; with all n axes for directions it would be gradient descent, with P of n its variance is about n / P times the
    gradient's square, and the rounds it takes grow with n / P.
    """

    name = "decomfl"
    paper = "Li et al., ICLR 2025"
    personal = False
    Settings, exchange = DeComFLSettings, Slopes

    def __init__(self, task: Task, settings: DeComFLSettings) -> None:
        super().__init__(task, settings)
        most = 1 if task.local_epochs else task.local_steps
        if settings.updates > most:
            raise UsageError(
                f"method.updates: got {settings.updates}, expected at most {most}, because each update has the batch "
                "of one local step; take more train.local_steps, or fewer updates (with train.local_epochs: 1)"
            )
