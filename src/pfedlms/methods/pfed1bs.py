"""pFed1BS: Cheng et al., "Personalized Federated Learning with Bidirectional Communication Compression via One-Bit
Random Sketching", AAAI 2026, the one-bit forerunner of pFedLMS.

Choices where the paper is silent: the model is one vector, padded to a power of two, of which m = ⌊ratio · n⌋ rows are
kept; ties go to +1; μ is `train.weight_decay`, the same for every method.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pfedlms.aggregate import Vote
from pfedlms.cohort import Cohort, Tensors
from pfedlms.methods.consensus import Sketches, VoteOnSymbols
from pfedlms.methods.contract import ClientWork, Method, Objective, Task
from pfedlms.settings import setting
from pfedlms.sketch import Sketch
from pfedlms.wire import Message, Signs


@dataclass(frozen=True)
class PFed1BSSettings:
    """The section [method] of pFed1BS; its μ is train.weight_decay (the paper's 1e-5)."""

    ratio: float = setting(0.1, "m / n, sketch bits per parameter", above=0, maximum=1)
    strength: float = setting(5e-4, "λ, weight of the pull; 0 is `local` exactly", minimum=0)
    sharpness: float = setting(1e4, "γ: tanh(γ x) stands for sign(x); ∞ is the sign itself", above=0)


class VoteOnSigns(VoteOnSymbols):
    """↑ sign(Φ θ_k), one bit each      ↓ v = sign(Σ N_k sign(Φ θ_k)), one bit each; an even split gives +1"""

    def __init__(self, task: Task, settings: PFed1BSSettings) -> None:
        self._sketches = Sketches.of_whole_model(task, settings.ratio)
        self.sketched = self._sketches.layout, self._sketches.sizes
        super().__init__(self._sketches.sizes, thresholds=1)
        self.up, self.down = (Message(kind, (Signs("signs", *self._sketches.sizes),)) for kind in (0, 1))

    def client_send(self, cohort: Cohort, round: int, work: ClientWork) -> tuple[Cohort, Tensors]:
        return cohort, {"signs": self._sketches.of(round, cohort.params.device).forward(cohort.params)}

    def server_add(self, total: Vote, ids: list[int], samples: list[int], values: Tensors) -> Vote:
        total.add((values["signs"] > 0).to(torch.uint8).numpy(), samples)
        return total

    def server_reply(self, server: Tensors, total: Vote, round: int) -> tuple[Tensors, Tensors]:
        return server, {"signs": torch.from_numpy(total.result()).float() * 2 - 1}

    def client_receive(self, cohort: Cohort, values: Tensors, round: int) -> Cohort:
        return cohort.with_heard(consensus=values["signs"])


@dataclass(frozen=True)
class AlignedSigns(Objective):
    """λ Σ_i [log cosh(γ (Φθ)_i) / γ − v_i (Φθ)_i], whose gradient is λ Φᵀ(tanh(γ Φθ) − v)."""

    sketch: Sketch
    consensus: Tensor
    strength: float
    sharpness: float

    def gradient(self, params: Tensor) -> Tensor:
        sketched = self.sketch.forward(params)
        return self.sketch.adjoint(self.strength * (torch.tanh(self.sharpness * sketched) - self.consensus))


class PFed1BS(Method):
    """Personal models pulled towards the majority of one-bit sketches of the whole model, under one sketch for the
    whole run."""

    name = "pfed1bs"
    paper = "Cheng et al., AAAI 2026"
    personal = True
    Settings, exchange = PFed1BSSettings, VoteOnSigns

    def objective(self, cohort: Cohort, round: int) -> Objective:
        if self.settings.strength == 0:
            return Objective()
        sketch = Sketches.of_whole_model(self.task, self.settings.ratio).of(round, cohort.params.device)
        return AlignedSigns(sketch, cohort.heard["consensus"], self.settings.strength, self.settings.sharpness)
