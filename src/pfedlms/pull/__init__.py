"""The pull towards the consensus: the gradient of the smooth form of the paper's penalty.

For one layer with sketch y = Φθ, thresholds τ_1 < … < τ_T and consensus signs v_t(i) = +1 iff q̃(i) ≥ t:

    R(y)    = (2/T) Σ_t Σ_i max(0, −v_t(i) (y(i) − τ_t))
    R̃_ρ(y)  = (1/T) Σ_t Σ_i [huber_ρ(y(i) − τ_t) − v_t(i) (y(i) − τ_t)]
    ∇_y R̃_ρ = (1/T) Σ_t [clip((y − τ_t)/ρ, −1, 1) − v_t]

where huber_ρ(z) = max_{|u| ≤ 1} (u z − ρ u²/2) and ∇_θ = Φᵀ ∇_y. R is zero iff every y(i) lies in the closed interval
[τ_q̃(i), τ_q̃(i)+1]. ρ_l = ρ σ̄_l is relative to the layer's scale. Traps: R̃_ρ is not zero but −ρ/2 for each
coordinate and threshold that agrees with the consensus; in an interval narrower than 2 ρ_l the gradient never vanishes;
a layer with σ̄ = 0 has no pull; a threshold beyond the float32 range is infinite, and together with an infinite ρ_l it
would give NaN.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property
from math import inf

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pfedlms.backend import backend_of, is_differentiated
from pfedlms.checks import Array, Values, as_tensor, like_input
from pfedlms.pull import cpu
from pfedlms.sketch import Sketch


@dataclass(frozen=True, eq=False, init=False, repr=False)
class Pull:
    """λ ∇R̃_ρ as a function of the models, for one round's sketch, thresholds and consensus.

    Thresholds, deviations and consensus are tensors on the sketch's device, or arrays.

    >>> sketch = Sketch.of_vector(8, ratio=0.5, seed=1)
    >>> pull = Pull(
    ...     sketch, np.float32([[-1, 0, 1]]), np.float32([1]), np.uint8([0, 1, 2, 3]), strength=0.05, smoothing=0.1
    ... )
    >>> pull
    Pull(8 → 4 entries, thresholds 3, strength 0.05, smoothing 0.1)
    >>> pull.gradient(np.zeros(8, np.float32)).shape
    (8,)
    """

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

    def __init__(
        self,
        sketch: Sketch,
        thresholds: Tensor | Array,
        deviations: Tensor | Array,
        consensus: Tensor | Array,
        strength: float,
        smoothing: float,
    ) -> None:
        device, layers = sketch.rows.device, len(sketch.shape.places)
        arguments = {"thresholds": thresholds, "deviations": deviations, "consensus": consensus}
        tau, sigma, agreed = (as_tensor(name, values, device).detach() for name, values in arguments.items())
        shapes, expected = (tau.shape[:1], sigma.shape, agreed.shape), ((layers,), (layers,), (sketch.size,))
        if shapes != expected or tau.ndim != 2 or agreed.dtype != torch.uint8:
            raise ValueError(
                f"thresholds, deviations, consensus: got {list(tau.shape)}, {list(sigma.shape)} and {agreed.dtype} "
                f"{list(agreed.shape)}, expected [{layers}, T], [{layers}] and torch.uint8 [{sketch.size}] for this "
                "sketch"
            )
        values = (sketch, tau, sigma, agreed, strength, smoothing)
        for field, value in zip(fields(Pull), values, strict=True):
            object.__setattr__(self, field.name, value)
        self.check_values()

    def check_values(self) -> None:
        """Raise ValueError for values that no round can produce. The check waits for a GPU, so the engine skips it:
        values of messages are checked when they are received."""
        if not (0 <= self.strength < inf and 0 < self.smoothing < inf):
            raise ValueError(
                f"strength, smoothing: got {self.strength!r} and {self.smoothing!r}, expected finite numbers, the "
                "strength at least 0, the smoothing above 0"
            )
        levels = self.thresholds.shape[1]
        tau = self.thresholds
        rising = levels > 0 and bool((tau[:, 1:] >= tau[:, :-1]).all()) and not tau.isnan().any()
        if not rising or not bool((self.deviations >= 0).all()):
            raise ValueError(
                "thresholds, deviations: got NaN, no or falling thresholds, or a negative deviation, expected at least "
                "one threshold for each layer, rising ones, and deviations of at least 0"
            )
        if bool((self.consensus > levels).any()):
            raise ValueError(
                f"consensus: got symbols up to {int(self.consensus.max())}, expected 0 to {levels}, the number of "
                "thresholds; vote with as many thresholds as there are here"
            )

    def __repr__(self) -> str:
        return (
            f"Pull({self.sketch.dim:,} → {self.sketch.size:,} entries, thresholds {self.thresholds.shape[1]}, strength "
            f"{self.strength:g}, smoothing {self.smoothing:g})"
        )

    def gradient(self, params: Values) -> Values:
        """λ Φᵀ ∇_y R̃_ρ(Φθ): `[clients, dim]` → `[clients, dim]`, or `[dim]` → `[dim]`. CPU kernels give the bits of the
        definition."""
        theta = self.sketch.check("params", params, self.sketch.dim)
        where = "plain" if is_differentiated(theta) else backend_of(theta)
        if where == "cpu":
            return like_input(params, cpu.gradient(self, theta))
        if where == "gpu":
            from pfedlms.pull import gpu

            return like_input(params, gpu.gradient(self, theta))
        tau, widths = self.thresholds.to(theta.dtype), self.widths.to(theta.dtype)
        slope = penalty_slope(self.sketch.forward(theta), tau, widths, self.consensus, self.sketch.layers)
        return like_input(params, self.sketch.adjoint(slope * self.strength))

    @cached_property
    def widths(self) -> Tensor:
        """ρ_l of every layer, `[layers]`: at most 2^126, and zero below 2^−126. So 1/ρ_l is a normal float32, and
        (y − τ)/ρ_l is not NaN where τ is infinite or y = τ."""
        wide = self.smoothing * self.deviations.to(torch.promote_types(self.deviations.dtype, torch.float32))
        return torch.where(wide < 2.0**-126, 0.0, wide.clamp(max=2.0**126))

    @cached_property
    def sorted_rows(self) -> tuple[NDArray[np.int64], NDArray[np.uint8]]:
        """Rows and consensus for the CPU kernel, computed once per round."""
        return cpu.sort_rows(self)

    @cached_property
    def positions(self) -> Tensor:
        """q̃ in int16 at its row of H, −1 at rows that are not kept: for the GPU kernel, computed once per round."""
        return self.sketch.scatter_to_rows(self.consensus.to(torch.int16))


def penalty_slope(sketched: Tensor, thresholds: Tensor, widths: Tensor, consensus: Tensor, layers: Tensor) -> Tensor:
    """∇_y R̃_ρ at `sketched: [clients, Σ m]`, with `thresholds: [layers, T]`, `widths: [layers]` (ρ_l), `consensus: [Σ
    m]` and `layers: [Σ m]`, the layer of every coordinate; in plain torch, on any device."""
    levels = thresholds.shape[1]
    rho = widths[layers]
    # Σ_t v_t = 2 q̃ − T, so the single signs are not needed.
    total = (levels - 2.0 * consensus.to(sketched.dtype)).expand_as(sketched).clone()
    for tau in thresholds.unbind(dim=1):
        total += ((sketched - tau[layers]) / rho).clamp(-1, 1)
    return torch.where(rho > 0, total / levels, torch.zeros_like(total))
