"""EDEN: Vargaftik, Ben Basat, Portnoy, Mendelson, Ben-Itzhak, Mitzenmacher, "EDEN: Communication-Efficient and Robust
Distributed Mean Estimation for Federated Learning", ICML 2022.

Choices where the paper is silent: what is estimated is the mean of the updates, weighted by N_k; a vector is cut into
power-of-two chunks with one scale each; zero becomes the upper centroid; the answer is the model, 32 bits each. The
paper's statements are for a rotation drawn uniformly. One Hadamard rotation with random signs, which it uses in
practice as we do, is near to that for vectors of many entries of similar size, but it is not unbiased for every vector:
at one bit (2, 1, 0, …, 0) is read as (2.5, 0, 0, …, 0) whatever the signs are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from pfedlms import rng
from pfedlms.aggregate import WeightedMean
from pfedlms.backend import to_device
from pfedlms.cohort import Cohort, Tensors
from pfedlms.methods.contract import ClientWork, Exchange, Task, Tracked, go_on_from
from pfedlms.quantise import lloyd_max
from pfedlms.settings import setting
from pfedlms.sketch.hadamard import fwht_
from pfedlms.wire import Floats, Message, Symbols

SMALLEST_CHUNK = 1024


@dataclass(frozen=True)
class EDENSettings:
    bits: int = setting(1, "b, bits per coordinate", minimum=1, maximum=8)


def chunks_of(dim: int) -> tuple[tuple[int, int], ...]:
    """Cut a vector into (length, padded length) pieces: powers of two from large to small, and a padded rest below
    1,024.

    Padding the whole vector would waste up to half of the uplink; a scale of 32 bits for every piece costs little.
    """
    pieces, rest = [], dim
    while rest >= SMALLEST_CHUNK:
        size = 1 << (rest.bit_length() - 1)
        pieces.append((size, size))
        rest -= size
    if rest:
        pieces.append((rest, 1 << (rest - 1).bit_length()))
    return tuple(pieces)


class Codec:
    """x → (indices, scales) → x̂, with a rotation that is a function of seed, round and client.

    For a chunk of padded length d: y = H D x / √d, q = centroid nearest to √d y / ‖x‖, scale = ‖x‖² / ⟨q, y⟩, x̂ =
    scale · D H q / √d. The scale makes ⟨x̂, x⟩ = ‖x‖² for every rotation. Over uniform rotations this makes the estimate
    unbiased; over Hadamard rotations it is nearly so, except where a few entries are most of x.
    """

    def __init__(self, dim: int, bits: int, seed: int) -> None:
        self.chunks = chunks_of(dim)
        self._seed = seed
        centroids, boundaries = lloyd_max(1 << bits)
        self._centroids, self._boundaries = torch.from_numpy(centroids), torch.from_numpy(boundaries)

    def encode(self, x: Tensor, ids: Sequence[int], round: int) -> tuple[Tensor, Tensor]:
        """`[clients, dim]` → indices uint8 `[clients, Σ padded]` and scales `[clients, chunks]`."""
        indices, scales, at = [], [], 0
        for number, (length, padded) in enumerate(self.chunks):
            piece = x[:, at : at + length]
            flipped = pad(piece, (0, padded - length)) * self._signs(ids, round, number, padded, x.device)
            y = fwht_(flipped.contiguous()) / sqrt(padded)
            norm = piece.norm(dim=1, keepdim=True)
            unit = torch.where(norm > 0, y * (sqrt(padded) / norm.clamp(min=1e-38)), 0.0)
            index = torch.bucketize(unit, self._boundaries.to(x.device), right=True)
            product = (self._centroids.to(x.device)[index] * y).sum(dim=1, keepdim=True)
            scales.append(torch.where(norm > 0, norm**2 / product.clamp(min=1e-38), 0.0))
            indices.append(index.to(torch.uint8))
            at += length
        return torch.cat(indices, dim=1), torch.cat(scales, dim=1)

    def decode(self, indices: Tensor, scales: Tensor, ids: Sequence[int], round: int) -> Tensor:
        """x̂ `[clients, dim]` from what `encode` returns, on its device."""
        centroids = self._centroids.to(indices.device)
        parts, at = [], 0
        for number, (length, padded) in enumerate(self.chunks):
            q = centroids[indices[:, at : at + padded].long()] * scales[:, number : number + 1]
            back = fwht_(q.contiguous()) / sqrt(padded)
            parts.append((back * self._signs(ids, round, number, padded, indices.device))[:, :length])
            at += padded
        return torch.cat(parts, dim=1)

    def _signs(self, ids: Sequence[int], round: int, number: int, padded: int, device: torch.device) -> Tensor:
        """D of each client for a chunk, `[clients, padded]`. A GPU makes its own: that is faster than to copy them."""
        keys = np.array([rng.stream(self._seed, "eden", round, client, number) for client in ids], dtype=np.uint64)
        if device.type == "cpu":
            return torch.from_numpy(np.stack([rng.signs(int(key), padded) for key in keys]))
        return torch.stack(
            [rng.device_signs(key, padded) for key in to_device(torch.from_numpy(keys.view(np.int64)), device)]
        )


class QuantisedUpdates(Exchange[tuple[int, WeightedMean]]):
    """↑ θ_k − w, rotated and quantised, with one scale per chunk      ↓ w ← w + Σ p_k x̂_k, 32 bits each"""

    def __init__(self, task: Task, settings: EDENSettings) -> None:
        self._dim, self._device = task.layout.dim, torch.device(task.device)
        self._codec = Codec(self._dim, settings.bits, task.seed)
        padded = tuple(size for _, size in self._codec.chunks)
        indices = Symbols("indices", padded, 1 << settings.bits)
        self.up = Message(0, (indices, Floats("scales", len(padded), minimum=0)))
        self.down = Message(1, (Floats("model", self._dim),))

    def client_send(self, cohort: Cohort, round: int, work: ClientWork) -> tuple[Cohort, Tensors]:
        indices, scales = self._codec.encode(cohort.params - cohort.state["model"], cohort.ids, round)
        return cohort, {"indices": indices, "scales": scales}

    def server_open(self, server: Tensors, round: int) -> tuple[int, WeightedMean]:
        return round, WeightedMean(self._dim)

    def server_add(
        self, total: tuple[int, WeightedMean], ids: list[int], samples: list[int], values: Tensors
    ) -> tuple[int, WeightedMean]:
        round, update = total
        indices, scales = (to_device(values[name], self._device) for name in ("indices", "scales"))
        return round, update.add(samples, self._codec.decode(indices, scales, ids, round))

    def server_reply(self, server: Tensors, total: tuple[int, WeightedMean], round: int) -> tuple[Tensors, Tensors]:
        model = (server["model"].double() + total[1].result()).float()
        return {"model": model}, {"model": model}

    def client_receive(self, cohort: Cohort, values: Tensors, round: int) -> Cohort:
        return go_on_from(cohort, values["model"])


class EDEN(Tracked):
    """FedAvg whose updates travel as b-bit indices of a rotated vector. b → ∞ is FedAvg; the error at b = 1 is near
    π/2 − 1 of ‖x‖²."""

    name = "eden"
    paper = "Vargaftik et al., ICML 2022"
    personal = False
    about_last_steps, tracks = True, False  # every answer is w itself
    Settings, exchange = EDENSettings, QuantisedUpdates
