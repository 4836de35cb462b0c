"""Definitions to compare the package with: Φ as a dense float64 matrix, entry by entry, and the smoothed penalty.
Random streams are those of wire/plain_client/, the second implementation of the protocol page."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from math import sqrt

import numpy as np
import torch
from plain_client import padded, row, signs, sketch_size, stream
from torch import Tensor

# --- the sketch -------------------------------------------------------------------------------------------------------


@cache
def hadamard(size: int) -> np.ndarray:
    """Sylvester's construction, H_2N = [[H, H], [H, −H]]: float64 `[size, size]`."""
    if size == 1:
        return np.ones((1, 1))
    half = hadamard(size // 2)
    return np.block([[half, half], [half, -half]])


def signs_of(count: int, seed: int, purpose: str, *counters: int) -> np.ndarray:
    """The first signs of a stream, float64."""
    return np.array(signs(stream(seed, purpose, *counters), count))


def rows_kept(size: int, kept: int, seed: int, epoch: int = 0, layer: int = 0) -> list[int]:
    """The rows of H that S keeps of a layer."""
    key = stream(seed, "sketch-rows", epoch, layer)
    return [row(key, padded(size).bit_length() - 1, i) for i in range(kept)]


def dense_phi(size: int, kept: int, seed: int, epoch: int = 0, layer: int = 0) -> np.ndarray:
    """Φ = 1/√m S H D P of one layer, float64 `[kept, size]`."""
    flips, rows = signs_of(size, seed, "sketch-signs", epoch, layer), rows_kept(size, kept, seed, epoch, layer)
    return hadamard(padded(size))[rows][:, :size] * flips / sqrt(kept)


@cache
def dense_model(sizes: tuple[int, ...], ratio: float, seed: int, epoch: int = 0) -> Tensor:
    """Φ of a model with these layers, float64 `[Σ m, dim]`."""
    layers = [dense_phi(size, sketch_size(size, ratio), seed, epoch, index) for index, size in enumerate(sizes)]
    return torch.block_diag(*map(torch.from_numpy, layers))


def layer_of_entry(sizes: Sequence[int], ratio: float) -> Tensor:
    """The layer that every entry of a sketch belongs to, `[Σ m]`."""
    return torch.tensor([index for index, size in enumerate(sizes) for _ in range(sketch_size(size, ratio))])


# --- the penalty ------------------------------------------------------------------------------------------------------


def votes_of(consensus: Tensor, levels: int) -> Tensor:
    """v_t(i) = +1 iff q̃(i) ≥ t: `[T, Σ m]`."""
    return torch.stack([torch.where(consensus >= t, 1.0, -1.0).double() for t in range(1, levels + 1)])


def smoothed(y: Tensor, tau: Tensor, rho: Tensor, votes: Tensor, layers: Tensor) -> Tensor:
    """R̃_ρ of one sketch `y: [Σ m]`, max over |u| ≤ 1 of ⟨u, z⟩ − ρ/2 ‖u‖² at u = clip(z/ρ); autograd follows it."""
    total = y.new_zeros(())
    for t in range(tau.shape[1]):
        z = y - tau[layers, t]
        u = (z / rho[layers]).clamp(-1, 1).detach()  # the maximiser: by Danskin's theorem its derivative drops out
        total = total + (u * z - rho[layers] / 2 * u**2 - votes[t] * z).sum()
    return total / tau.shape[1]


def penalty(sketched: Tensor, thresholds: Tensor, consensus: Tensor, layers: Tensor) -> Tensor:
    """R, summed over layers: `[clients, Σ m]` → `[clients]`."""
    total = sketched.new_zeros(len(sketched))
    for t, tau in enumerate(thresholds.unbind(dim=1), start=1):
        votes = torch.where(consensus >= t, 1.0, -1.0).to(sketched.dtype)
        total += (-votes * (sketched - tau[layers])).clamp(min=0).sum(dim=1)
    return 2 * total / thresholds.shape[1]


def smoothed_penalty(sketched: Tensor, thresholds: Tensor, widths: Tensor, consensus: Tensor, layers: Tensor) -> Tensor:
    """R̃_ρ, summed over layers: `[clients, Σ m]` → `[clients]`."""
    votes = votes_of(consensus, thresholds.shape[1])
    return torch.stack([smoothed(y, thresholds, widths, votes, layers) for y in sketched])
