"""pFed1BS: Cheng et al., "Personalized Federated Learning via One-Bit Random Sketching", 2026, the one-bit forerunner
of pFedLMS."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import floor

import torch
from torch import Tensor

from pfedlms.aggregate import Vote
from pfedlms.cohort import Cohort
from pfedlms.methods.contract import ClientWork, Exchange, Method, Objective, Task, Tensors
from pfedlms.models.layout import Layout
from pfedlms.settings import setting
from pfedlms.sketch import Sketch, sketch_of_round
from pfedlms.wire.fields import Message, Signs


@dataclass(frozen=True)
class PFed1BSSettings:
    """The section [method] of pFed1BS; its μ is train.weight_decay (the paper's 1e-5)."""

    ratio: float = setting(0.1, "m / n, sketch bits per parameter", above=0, maximum=1)
    strength: float = setting(5e-4, "λ, weight of the pull; 0 is `local` exactly", minimum=0)
    sharpness: float = setting(1e4, "γ: tanh(γ x) stands for sign(x); ∞ is the sign itself", above=0)


class MajorityOfSketches(Exchange[Vote]):
    """↑ sign(Φ θ_k), one bit each      ↓ v = sign(Σ N_k sign(Φ θ_k)), one bit each; an even split gives +1"""

    def __init__(self, sketch_on: Callable[[torch.device], Sketch], size: int) -> None:
        self._sketch_on, self._size = sketch_on, size
        self.up, self.down = (Message(kind, (Signs("signs", size),)) for kind in (0, 1))

    def client_send(self, cohort: Cohort, round: int, work: ClientWork) -> tuple[Cohort, Tensors]:
        return cohort, {"signs": self._sketch_on(cohort.params.device).forward(cohort.params)}

    def server_open(self, server: Tensors, round: int) -> Vote:
        return Vote(self._size, thresholds=1)

    def server_add(self, total: Vote, ids: list[int], samples: list[int], values: Tensors) -> Vote:
        total.add((values["signs"] > 0).to(torch.uint8).numpy(), samples)
        return total

    def server_reply(self, server: Tensors, total: Vote, round: int) -> tuple[Tensors, Tensors]:
        return server, {"signs": torch.from_numpy(total.result()).float() * 2 - 1}

    def client_receive(self, cohort: Cohort, values: Tensors, round: int) -> Cohort:
        return cohort.with_scratch(consensus=values["signs"])


class AlignedSigns(Objective):
    """λ Σ_i [log cosh(γ (Φθ)_i) / γ − v_i (Φθ)_i], whose gradient is λ Φᵀ(tanh(γ Φθ) − v)."""

    def __init__(self, sketch: Sketch, consensus: Tensor, settings: PFed1BSSettings) -> None:
        self._sketch, self._consensus, self._settings = sketch, consensus, settings

    def tensors(self) -> Tensors:
        return {"consensus": self._consensus}

    def gradient(self, params: Tensor) -> Tensor:
        sketched = self._sketch.forward(params)
        return self._sketch.adjoint(
            self._settings.strength * (torch.tanh(self._settings.sharpness * sketched) - self._consensus)
        )


class PFed1BS(Method):
    """Personal models pulled towards the majority of one-bit sketches of the whole model, under one sketch for the
    whole run."""

    name = "pfed1bs"
    paper = "Cheng et al., 2026"
    personal = True
    Settings = PFed1BSSettings

    def __init__(self, task: Task, settings: PFed1BSSettings) -> None:
        super().__init__(task, settings)
        whole = task.layout.whole()
        kept = max(1, floor(settings.ratio * task.layout.dim))
        # A ratio of m / N with N a power of two is exact in floating point, so the sketch has exactly m rows.
        self._sketch_on = partial(sketch_of_round, whole, kept / whole.layers[0].pad, task.seed, 0)
        self._kept = kept
        self.exchanges = (MajorityOfSketches(self._sketch_on, kept),)

    @property
    def sketched(self) -> tuple[Layout, tuple[int, ...]]:
        return self.task.layout.whole(), (self._kept,)

    def objective(self, cohort: Cohort, round: int) -> Objective:
        if self.settings.strength == 0:
            return Objective()
        return AlignedSigns(self._sketch_on(cohort.params.device), cohort.scratch["consensus"], self.settings)
