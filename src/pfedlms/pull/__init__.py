"""The pull towards the consensus: the penalty of the paper, its smooth form and its gradient, each once.

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

from typing import Any

import numpy as np
import torch
from numba import get_thread_id, prange  # type: ignore[attr-defined]
from numpy.typing import NDArray
from torch import Tensor

from pfedlms.backend import compiled, shares_work
from pfedlms.sketch import Sketch, enter, gather, kernels_for, leave, scatter
from pfedlms.sketch.hadamard import fwht_row

Array = NDArray[Any]


class Pull:
    """λ ∇R̃_ρ as a function of the models, for one round's sketch, thresholds and consensus.

    Args:
        sketch: Φ of the round.
        thresholds: τ, `[layers, T]`.
        deviations: σ̄, `[layers]`.
        consensus: q̃, uint8 `[Σ m]`.
        strength: λ; one step moves a sketched coordinate by up to 2 η λ N/m.
        smoothing: ρ, in units of σ̄.
    """

    def __init__(
        self,
        sketch: Sketch,
        thresholds: Tensor,
        deviations: Tensor,
        consensus: Tensor,
        strength: float,
        smoothing: float,
    ) -> None:
        self._sketch, self._strength = sketch, strength
        self._thresholds, self._consensus, self._widths = thresholds, consensus, smoothing * deviations
        self._fused: _HostPull | _DevicePull | None = None
        if thresholds.device.type == "cpu":
            self._fused = _HostPull(sketch, thresholds, self._widths, consensus, strength)
        elif thresholds.is_cuda and (kernels := kernels_for(thresholds)) is not None:
            self._fused = _DevicePull(kernels, sketch, thresholds, self._widths, consensus, strength)

    def gradient(self, params: Tensor) -> Tensor:
        """λ Φᵀ ∇_y R̃_ρ(Φθ): `[clients, dim]` → `[clients, dim]`."""
        return self._fused.gradient(params) if self._fused is not None else self.gradient_in_parts(params)

    def gradient_in_parts(self, params: Tensor) -> Tensor:
        """The same, one operation after another, on any device; on the CPU with the same bits."""
        sketched = self._sketch.forward(params)
        layers = self._sketch.layers.to(params.device)
        slope = penalty_slope(sketched, self._thresholds, self._widths, self._consensus, layers)
        return self._sketch.adjoint(slope.mul_(self._strength))

    def tensors(self) -> dict[str, Tensor]:
        """Everything that changes from round to round, for replays of a recorded computation."""
        if isinstance(self._fused, _DevicePull):
            return self._fused.tensors()
        return {"thresholds": self._thresholds, "widths": self._widths, "consensus": self._consensus}


class _HostPull:
    """The same on a CPU: a layer of one client goes through sketch, slope and adjoint while it is in the cache."""

    def __init__(self, sketch: Sketch, thresholds: Tensor, widths: Tensor, consensus: Tensor, strength: float) -> None:
        self._sketch, self._strength = sketch, strength
        self._thresholds, self._widths = thresholds, widths
        host = sketch.on_host(np.dtype(np.float32))
        rows, table = host.rows, host.table
        # Kept rows in the order they lie in memory: the pull does not care which message entry a row is.
        order = np.concatenate([start + np.argsort(rows[start:stop]) for _, _, _, start, stop in table.tolist()])
        self._rows, self._consensus = rows[order], consensus.numpy()[order]

    def gradient(self, params: Tensor) -> Tensor:
        theta = params.detach().contiguous()
        kind = theta.numpy().dtype
        host, out = self._sketch.on_host(kind), torch.empty_like(theta)
        tau, widths = (value.to(theta.dtype).numpy() for value in (self._thresholds, self._widths))
        pull = _pull_shared if shares_work() else _pull
        pull(
            theta.numpy(), host.signs, self._rows, self._consensus, host.table, host.scales, tau, widths,
            kind.type(self._strength), host.workspace(), out.numpy(),
        )  # fmt: skip
        return out


class _DevicePull:
    """The same on a GPU: sketch, slope and adjoint of a layer without leaving registers in between.

    The consensus lies in position space, so that no row has to be gathered or scattered: q̃ where a row was kept, a
    mark elsewhere.
    """

    def __init__(
        self, kernels: Any, sketch: Sketch, thresholds: Tensor, widths: Tensor, consensus: Tensor, strength: float
    ) -> None:
        self._kernels, self._strength = kernels, strength
        self._layers = sketch.on_device(thresholds.device)
        self._thresholds, self._widths = thresholds.contiguous(), widths
        self._keys = torch.cat([layer.key for layer in self._layers])
        pads = [layer.pad for layer in self._layers]
        self._starts = [sum(pads[:index]) for index in range(len(pads))]
        self._kept = torch.full((sum(pads),), kernels.NOT_KEPT, dtype=torch.int16, device=thresholds.device)
        places = torch.cat([layer.rows + start for layer, start in zip(self._layers, self._starts, strict=True)])
        self._kept[places] = consensus.to(torch.int16)

    def gradient(self, params: Tensor) -> Tensor:
        out = torch.empty_like(params)
        for index, (layer, start) in enumerate(zip(self._layers, self._starts, strict=True)):
            self._kernels.pull_layer(
                params, out, layer.begin, layer.size, layer.pad, self._keys[index : index + 1],
                self._kept[start : start + layer.pad], self._thresholds[index], self._widths[index : index + 1],
                layer.scale, self._strength,
            )  # fmt: skip
        return out

    def tensors(self) -> dict[str, Tensor]:
        return {"thresholds": self._thresholds, "widths": self._widths, "kept": self._kept, "keys": self._keys}


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


@compiled()
def _pull(
    theta: Array, signs: Array, rows: Array, consensus: Array, table: Array, scales: Array, thresholds: Array,
    widths: Array, strength: Any, workspace: Array, out: Array,
) -> None:  # fmt: skip
    for client in range(len(theta)):
        for layer in range(len(table)):
            _pull_layer(
                theta[client], signs, rows, consensus, table[layer], scales[layer], thresholds[layer], widths[layer],
                strength, workspace[0], out[client],
            )  # fmt: skip


@compiled(parallel=True)
def _pull_shared(
    theta: Array, signs: Array, rows: Array, consensus: Array, table: Array, scales: Array, thresholds: Array,
    widths: Array, strength: Any, workspace: Array, out: Array,
) -> None:  # fmt: skip
    layers = len(table)
    for task in prange(len(theta) * layers):
        client, layer = task // layers, task % layers
        _pull_layer(
            theta[client], signs, rows, consensus, table[layer], scales[layer], thresholds[layer], widths[layer],
            strength, workspace[get_thread_id()], out[client],
        )  # fmt: skip


@compiled()
def _pull_layer(
    theta: Array, signs: Array, rows: Array, consensus: Array, place: Array, scale: Any, thresholds: Array,
    width: Any, strength: Any, workspace: Array, out: Array,
) -> None:  # fmt: skip
    """One layer of one client: sketch, slope, adjoint."""
    begin, end, pad, start, stop = place
    work, kept = workspace[:pad], np.empty(stop - start, theta.dtype)
    enter(theta[begin:end], signs[begin:end], work)
    fwht_row(work)
    gather(work, rows[start:stop], scale, kept)
    scatter(_slope(kept, consensus[start:stop], thresholds, width), rows[start:stop], strength, work)
    fwht_row(work)
    leave(work, signs[begin:end], scale, out[begin:end])


@compiled()
def _slope(sketched: Array, consensus: Array, thresholds: Array, width: Any) -> Array:
    """`penalty_slope` of one layer of one client; a loop for each threshold, because such loops become vector code."""
    kind = sketched.dtype.type
    levels, total = kind(len(thresholds)), np.zeros_like(sketched)
    if width > 0:
        for i in range(len(total)):
            total[i] = levels - kind(2) * kind(consensus[i])
        for tau in thresholds:
            for i in range(len(total)):
                step = (sketched[i] - tau) / width
                step = kind(-1) if step < kind(-1) else step  # so that NaN stays NaN
                total[i] += kind(1) if step > kind(1) else step
        for i in range(len(total)):
            total[i] /= levels
    return total


def penalty(sketched: Tensor, thresholds: Tensor, consensus: Tensor, layers: Tensor) -> Tensor:
    """R, summed over layers: `[clients, Σ m]` → `[clients]`."""
    total = sketched.new_zeros(len(sketched))
    for t, tau in enumerate(thresholds.unbind(dim=1), start=1):
        votes = torch.where(consensus >= t, 1.0, -1.0).to(sketched.dtype)
        total += (-votes * (sketched - tau[layers])).clamp(min=0).sum(dim=1)
    return 2 * total / thresholds.shape[1]


def smoothed_penalty(sketched: Tensor, thresholds: Tensor, widths: Tensor, consensus: Tensor, layers: Tensor) -> Tensor:
    """R̃_ρ, summed over layers: `[clients, Σ m]` → `[clients]`."""
    rho = widths[layers]
    total = sketched.new_zeros(len(sketched))
    for t, tau in enumerate(thresholds.unbind(dim=1), start=1):
        votes = torch.where(consensus >= t, 1.0, -1.0).to(sketched.dtype)
        z = sketched - tau[layers]
        huber = torch.where(z.abs() < rho, z**2 / (2 * rho), z.abs() - rho / 2)
        total += (huber - votes * z).sum(dim=1)
    return total / thresholds.shape[1]
