"""The pull towards the consensus: the gradient of the smooth form of the paper's penalty.

For one layer with sketch y = Φθ, thresholds τ_1 < … < τ_T and consensus signs v_t(i) = +1 iff q̃(i) ≥ t:

    R(y)    = (2/T) Σ_t Σ_i max(0, −v_t(i) (y(i) − τ_t))
    R̃_ρ(y)  = (1/T) Σ_t Σ_i [huber_ρ(y(i) − τ_t) − v_t(i) (y(i) − τ_t)]
    ∇_y R̃_ρ = (1/T) Σ_t [clip((y − τ_t)/ρ, −1, 1) − v_t]

where huber_ρ(z) = max_{|u| ≤ 1} (u z − ρ u²/2) and ∇_θ = Φᵀ ∇_y. R is zero iff every y(i) lies in the closed interval
[τ_q̃(i), τ_q̃(i)+1]. ρ_l = ρ σ̄_l is relative to the layer's scale. Traps: R̃_ρ is not zero but −ρ/2 for each
coordinate and threshold where all is consistent; in an interval narrower than 2 ρ_l the gradient never vanishes; a
layer with σ̄ = 0 has no pull.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pfedlms.backend import backend_of
from pfedlms.pull import cpu
from pfedlms.sketch import Sketch


@dataclass(frozen=True, eq=False)
class Pull:
    """λ ∇R̃_ρ as a function of the models, for one round's sketch, thresholds and consensus."""

    sketch: Sketch
    """Φ of the round."""
    thresholds: Tensor
    """τ, `[layers, T]`."""
    deviations: Tensor
    """σ̄, `[layers]`."""
    consensus: Tensor
    """q̃, uint8 `[Σ m]`."""
    strength: float
    """λ; one step moves a sketched coordinate by up to 2 η λ N/m."""
    smoothing: float
    """ρ, in units of σ̄."""

    def gradient(self, params: Tensor) -> Tensor:
        """λ Φᵀ ∇_y R̃_ρ(Φθ): `[clients, dim]` → `[clients, dim]`; on the CPU kernels give the bits of the definition."""
        self.sketch.check("params", params, self.sketch.dim)
        where = backend_of(params)
        if where == "cpu":
            return cpu.gradient(self, params)
        if where == "gpu":
            from pfedlms.pull import gpu

            return gpu.gradient(self, params)
        tau, widths = self.thresholds.to(params.dtype), self.widths.to(params.dtype)
        slope = penalty_slope(self.sketch.forward(params), tau, widths, self.consensus, self.sketch.layers)
        return self.sketch.adjoint(slope * self.strength)

    @cached_property
    def widths(self) -> Tensor:
        """ρ_l of every layer, `[layers]`."""
        return self.smoothing * self.deviations

    @cached_property
    def rows_in_order(self) -> tuple[NDArray[np.int64], NDArray[np.uint8]]:
        """What a CPU wants prepared once a round."""
        return cpu.by_row(self)

    @cached_property
    def positions(self) -> Tensor:
        """What a GPU wants prepared once a round."""
        from pfedlms.pull import gpu

        return gpu.in_position_space(self)


def penalty_slope(sketched: Tensor, thresholds: Tensor, widths: Tensor, consensus: Tensor, layers: Tensor) -> Tensor:
    """∇_y R̃_ρ at `sketched: [clients, Σ m]`, with `thresholds: [layers, T]`, `widths: [layers]` (ρ_l), `consensus: [Σ
    m]` and `layers: [Σ m]`, the layer of every coordinate; in plain torch, on any device."""
    levels = thresholds.shape[1]
    rho = widths[layers]
    # Σ_t v_t = 2 q̃ − T, so the signs never have to be spelled out.
    total = (levels - 2.0 * consensus.to(sketched.dtype)).expand_as(sketched).clone()
    for tau in thresholds.unbind(dim=1):
        total += ((sketched - tau[layers]) / rho).clamp(-1, 1)
    return torch.where(rho > 0, total / levels, torch.zeros_like(total))
