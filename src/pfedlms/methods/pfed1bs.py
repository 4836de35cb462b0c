"""pFed1BS: Cheng et al., "Personalized Federated Learning with Bidirectional Communication Compression via One-Bit
Random Sketching", AAAI 2026, the one-bit forerunner of pFedLMS.

Choices where the paper is silent: the model is one vector, padded to a power of two, of which m = ⌊ratio · n⌋ rows are
kept; ties go to +1; μ is `train.weight_decay`, the same for every method.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import floor

import torch
from torch import Tensor

from pfedlms.cohort import Cohort
from pfedlms.methods.consensus import Sketches, VoteOnSigns, model
from pfedlms.methods.contract import Method, Objective, Task
from pfedlms.settings import setting
from pfedlms.sketch import Sketch


@dataclass(frozen=True)
class PFed1BSSettings:
    """The section [method] of pFed1BS; its μ is train.weight_decay (the paper's 1e-5)."""

    ratio: float = setting(0.1, "m / n, sketch bits per parameter", above=0, maximum=1)
    strength: float = setting(5e-4, "λ, weight of the pull; 0 is `local` exactly", minimum=0)
    sharpness: float = setting(1e4, "γ: tanh(γ x) stands for sign(x); ∞ is the sign itself", above=0)


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
    Settings = PFed1BSSettings

    def __init__(self, task: Task, settings: PFed1BSSettings) -> None:
        super().__init__(task, settings)
        whole = task.layout.whole()
        kept = max(1, floor(settings.ratio * task.layout.dim))
        # A ratio of m / N with N a power of two is exact in floating point, so the sketch has exactly m rows.
        self._sketches = Sketches(whole, kept / whole.layers[0].pad, task.seed, refresh=0)
        self.sketched = self._sketches.layout, self._sketches.sizes
        self.exchanges = (VoteOnSigns(0, model, self._sketches),)

    def objective(self, cohort: Cohort, round: int) -> Objective:
        if self.settings.strength == 0:
            return Objective()
        sketch = self._sketches.of(round, cohort.params.device)
        return AlignedSigns(sketch, cohort.heard["consensus"], self.settings.strength, self.settings.sharpness)
