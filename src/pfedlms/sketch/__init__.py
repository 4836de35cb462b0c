"""θ → Φθ and back: the sketch Φ of every layer, one fused pass per client and layer on the CPU."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import sqrt
from typing import Any

import numba
import numpy as np
import torch
from numba import get_thread_id, prange  # type: ignore[attr-defined]
from numpy.typing import NDArray
from torch import Tensor

from pfedlms import rng
from pfedlms.backend import compiled, shares_work, triton_kernels
from pfedlms.models.layout import Layout
from pfedlms.sketch.hadamard import fwht_, fwht_reference, fwht_row

__all__ = ["Sketch", "fwht_", "fwht_reference", "sketch_of_round"]

Array = NDArray[Any]


class Sketch:
    """Φ = 1/√m · S H D P for each layer of a layout, applied to many models at once.

    P pads a layer with zeros to N = pad, D flips signs, H is the unnormalised Walsh–Hadamard matrix and S keeps m
    rows. D and S are pure functions of (seed, epoch, layer), see `rng`. So ‖Φ‖ ≤ √(N/m), ΦΦᵀ = (N/m) I for a layer
    without padding, and ⟨Φx, u⟩ = ⟨x, Φᵀu⟩.

    Args:
        layout: layer table of the model.
        ratio: m / N; m = max(1, floor(ratio · N)).
        seed: the experiment's seed.
        epoch: round // refresh; another epoch is another Φ.
    """

    def __init__(self, layout: Layout, ratio: float, seed: int, epoch: int) -> None:
        self.sizes = layout.sketch_sizes(ratio)
        """m of every layer; a sketch is the concatenation of its layers' sketches."""
        layers = layout.layers
        self.dim = layout.dim
        self._sign_keys = [rng.stream(seed, "sketch-signs", epoch, index) for index in range(len(layers))]
        self._rows = np.concatenate(
            [
                rng.rows(rng.stream(seed, "sketch-rows", epoch, index), layer.pad.bit_length() - 1, m)
                for index, (layer, m) in enumerate(zip(layers, self.sizes, strict=True))
            ]
        )
        starts = np.concatenate([[0], np.cumsum(self.sizes)])
        # One row a layer: where its parameters start and end, its padded length, where its sketch starts and ends.
        self._table = np.array(
            [
                (layer.offset, layer.offset + layer.size, layer.pad, starts[index], starts[index + 1])
                for index, layer in enumerate(layers)
            ],
            dtype=np.int64,
        )
        self._scales = np.array([1 / sqrt(m) for m in self.sizes])
        self._device_layers: dict[torch.device, list[DeviceLayer]] = {}

    @cached_property
    def layers(self) -> Tensor:
        """The layer of every entry of a sketch, `[Σ m]`."""
        return torch.from_numpy(np.repeat(np.arange(len(self.sizes)), self.sizes))

    @cached_property
    def _signs(self) -> NDArray[np.int8]:
        """D of all layers, one sign a parameter; kernels on a GPU hash theirs where they use them."""
        sizes = (self._table[:, 1] - self._table[:, 0]).tolist()
        parts = [rng.signs(key, size) for key, size in zip(self._sign_keys, sizes, strict=True)]
        return np.concatenate(parts).astype(np.int8)  # a quarter of the memory to read in every transform

    @property
    def size(self) -> int:
        """Entries of a whole sketch, Σ m."""
        return sum(self.sizes)

    def forward(self, params: Tensor) -> Tensor:
        """Φθ: `[clients, dim]` → `[clients, Σ m]`."""
        _check_width("params", params, self.dim)
        if params.is_cuda and kernels_for(params) is not None:
            return self._forward_gpu(params)
        if params.device.type != "cpu":
            return self.forward_reference(params)
        theta = params.detach().contiguous().numpy()
        out = np.empty((len(theta), self.size), dtype=theta.dtype)
        host, kernel = self.on_host(theta.dtype), _forward_shared if shares_work() else _forward
        kernel(theta, host.signs, host.rows, host.table, host.scales, host.workspace(), out)
        return torch.from_numpy(out)

    def adjoint(self, sketched: Tensor) -> Tensor:
        """Φᵀu: `[clients, Σ m]` → `[clients, dim]`."""
        _check_width("sketched", sketched, self.size)
        if sketched.is_cuda and kernels_for(sketched) is not None:
            return self._adjoint_gpu(sketched)
        if sketched.device.type != "cpu":
            return self.adjoint_reference(sketched)
        u = sketched.detach().contiguous().numpy()
        out = np.empty((len(u), self.dim), dtype=u.dtype)
        host, kernel = self.on_host(u.dtype), _adjoint_shared if shares_work() else _adjoint
        kernel(u, host.signs, host.rows, host.table, host.scales, host.workspace(), out)
        return torch.from_numpy(out)

    def forward_reference(self, params: Tensor) -> Tensor:
        """The definition in plain torch, on any device; `forward` gives the same bits."""
        parts = []
        for (begin, end, pad, start, stop), scale in zip(self._table.tolist(), self._scales, strict=True):
            padded = params.new_zeros(len(params), pad)
            padded[:, : end - begin] = params[:, begin:end] * self._tensor(self._signs[begin:end], params)
            kept = fwht_reference(padded)[:, torch.from_numpy(self._rows[start:stop]).to(params.device)]
            parts.append(kept * torch.tensor(scale, dtype=params.dtype, device=params.device))
        return torch.cat(parts, dim=1)

    def adjoint_reference(self, sketched: Tensor) -> Tensor:
        """The adjoint in plain torch, on any device."""
        parts = []
        for (begin, end, pad, start, stop), scale in zip(self._table.tolist(), self._scales, strict=True):
            spread = sketched.new_zeros(len(sketched), pad)
            spread[:, torch.from_numpy(self._rows[start:stop]).to(sketched.device)] = sketched[:, start:stop]
            back = fwht_reference(spread)[:, : end - begin] * self._tensor(self._signs[begin:end], sketched)
            parts.append(back * torch.tensor(scale, dtype=sketched.dtype, device=sketched.device))
        return torch.cat(parts, dim=1)

    def _forward_gpu(self, params: Tensor) -> Tensor:
        kernels, parts = kernels_for(params), []
        for layer in self.on_device(params.device):
            whole = kernels.transform(params, layer.begin, layer.size, layer.pad, layer.key)
            parts.append(whole[:, layer.rows] * layer.scale)
        return torch.cat(parts, dim=1)

    def _adjoint_gpu(self, sketched: Tensor) -> Tensor:
        kernels = kernels_for(sketched)
        out = sketched.new_empty(len(sketched), self.dim)
        for layer in self.on_device(sketched.device):
            spread = sketched.new_zeros(len(sketched), layer.pad)
            spread[:, layer.rows] = sketched[:, layer.start : layer.start + len(layer.rows)]
            kernels.transform_back(spread, out, layer.begin, layer.size, layer.key, layer.scale)
        return out

    def on_device(self, device: torch.device) -> list[DeviceLayer]:
        """What GPU kernels need of every layer, sent to the device once."""
        if device not in self._device_layers:
            keys = torch.from_numpy(np.array(self._sign_keys, dtype=np.uint64).view(np.int64)).to(device)
            rows = torch.from_numpy(self._rows).to(device)
            self._device_layers[device] = [
                DeviceLayer(
                    begin, end - begin, pad, start, keys[index : index + 1], rows[start:stop], float(np.float32(scale))
                )
                for index, ((begin, end, pad, start, stop), scale) in enumerate(
                    zip(self._table.tolist(), self._scales, strict=True)
                )
            ]
        return self._device_layers[device]

    def on_host(self, dtype: np.dtype[np.generic]) -> HostLayers:
        """What CPU kernels need of all layers."""
        return HostLayers(self._signs, self._rows, self._table, self._scales.astype(dtype))

    def _tensor(self, values: NDArray[np.int8], like: Tensor) -> Tensor:
        return torch.from_numpy(values).to(device=like.device, dtype=like.dtype)


def _check_width(name: str, values: Tensor, width: int) -> None:
    if values.ndim != 2 or values.shape[1] != width:
        raise ValueError(
            f"{name}: got shape {tuple(values.shape)}, expected [clients, {width}]; the sketch is of another model"
        )


@dataclass(frozen=True)
class HostLayers:
    """A sketch as CPU kernels take it: D of all parameters, kept rows, scales 1/√m, and for every layer where its
    parameters start and end, its padded length, where its sketch starts and ends."""

    signs: NDArray[np.int8]
    rows: NDArray[np.int64]
    table: NDArray[np.int64]
    scales: Array

    def workspace(self) -> Array:
        """Room for the longest layer of one client, for each thread."""
        return np.empty((numba.get_num_threads(), int(self.table[:, 2].max())), dtype=self.scales.dtype)


@dataclass(frozen=True)
class DeviceLayer:
    """One layer's part of a sketch on a GPU: where it lies, its sign stream `key: [1]`, the rows kept and the scale
    1/√m."""

    begin: int
    size: int
    pad: int
    start: int
    key: Tensor
    rows: Tensor
    scale: float


def kernels_for(values: Tensor) -> Any:
    """The GPU kernels where they can work on `values`, else None."""
    return triton_kernels("sketch.gpu") if values.dtype == torch.float32 else None


@lru_cache(maxsize=12)
def sketch_of_round(layout: Layout, ratio: float, seed: int, epoch: int) -> Sketch:
    """The sketch of one epoch, kept for other cohorts and exchanges; this round's and the next one's of some seeds
    fit."""
    return Sketch(layout, ratio, seed, epoch)


# Loops over one contiguous array each, because those become vector code; indices into matrices do not.


@compiled()
def enter(theta: Array, signs: Array, work: Array) -> None:
    """work ← D P θ of one layer."""
    for i in range(len(theta)):
        work[i] = theta[i] * theta.dtype.type(signs[i])
    work[len(theta) :] = 0


@compiled()
def leave(work: Array, signs: Array, scale: Any, out: Array) -> None:
    """out ← scale · Pᵀ D work of one layer."""
    for i in range(len(out)):
        out[i] = work[i] * out.dtype.type(signs[i]) * scale


@compiled()
def gather(work: Array, rows: Array, scale: Any, out: Array) -> None:
    """out ← scale · S work."""
    for j in range(len(rows)):
        out[j] = work[rows[j]] * scale


@compiled()
def scatter(values: Array, rows: Array, scale: Any, work: Array) -> None:
    """work ← scale · Sᵀ values."""
    work[:] = 0
    for j in range(len(rows)):
        work[rows[j]] = values[j] * scale


@compiled()
def _forward_layer(theta: Array, signs: Array, rows: Array, place: Array, scale: Any, work: Array, out: Array) -> None:
    begin, end, pad, start, stop = place
    enter(theta[begin:end], signs[begin:end], work[:pad])
    fwht_row(work[:pad])
    gather(work, rows[start:stop], scale, out[start:stop])


@compiled()
def _adjoint_layer(u: Array, signs: Array, rows: Array, place: Array, scale: Any, work: Array, out: Array) -> None:
    begin, end, pad, start, stop = place
    scatter(u[start:stop], rows[start:stop], u.dtype.type(1), work[:pad])
    fwht_row(work[:pad])
    leave(work, signs[begin:end], scale, out[begin:end])


@compiled()
def _forward(
    theta: Array, signs: Array, rows: Array, table: Array, scales: Array, workspace: Array, out: Array
) -> None:
    for client in range(len(theta)):
        for layer in range(len(table)):
            _forward_layer(theta[client], signs, rows, table[layer], scales[layer], workspace[0], out[client])


@compiled(parallel=True)
def _forward_shared(
    theta: Array, signs: Array, rows: Array, table: Array, scales: Array, workspace: Array, out: Array
) -> None:
    layers = len(table)
    for task in prange(len(theta) * layers):
        client, layer = task // layers, task % layers
        work = workspace[get_thread_id()]
        _forward_layer(theta[client], signs, rows, table[layer], scales[layer], work, out[client])


@compiled()
def _adjoint(u: Array, signs: Array, rows: Array, table: Array, scales: Array, workspace: Array, out: Array) -> None:
    for client in range(len(u)):
        for layer in range(len(table)):
            _adjoint_layer(u[client], signs, rows, table[layer], scales[layer], workspace[0], out[client])


@compiled(parallel=True)
def _adjoint_shared(
    u: Array, signs: Array, rows: Array, table: Array, scales: Array, workspace: Array, out: Array
) -> None:
    layers = len(table)
    for task in prange(len(u) * layers):
        client, layer = task // layers, task % layers
        work = workspace[get_thread_id()]
        _adjoint_layer(u[client], signs, rows, table[layer], scales[layer], work, out[client])
