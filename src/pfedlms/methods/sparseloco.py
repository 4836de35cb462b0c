"""SparseLoCo: Sarfi, Thérien, Lidin, Belilovsky, "Communication Efficient LLM Pre-training with SparseLoCo", 2025.

The rule of the paper, Δ̂ = Q(Top-k(e)) of a decayed accumulator e ← β e + Δ, and where this differs: the paper's workers
gather each other's messages, here the server answers with the same rule and keeps what it has not sent, as STC's does;
positions are Golomb codes of all chunks together instead of 12 bits each; chunks are consecutive entries of a layer
(the authors' code has blocks of 64 × 64 of a matrix); local steps are those of [train], and no state of AdamW lasts
from round to round; the mean is weighted by N_k; the residual of an absent client does not decay, and a client whose
message is lost has taken it as sent. The paper leaves the four values of Q open (the authors' code takes the mean of
each bin, of bins of equal width around the mean of a tensor); see `Chunks`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pfedlms.cohort import Tensors
from pfedlms.methods.contract import Task, Tracked
from pfedlms.methods.sparse import CompressedUpdates, Compressor, largest_positions
from pfedlms.settings import setting
from pfedlms.wire import Floats, Symbols

_LEVELS = 4


@dataclass(frozen=True)
class SparseLoCoSettings:
    density: float = setting(0.01, "share of each chunk's entries that a client sends", above=0, maximum=1)
    density_down: float = setting(0.0, "the same of the server's answer; 0: as method.density", minimum=0, maximum=1)
    chunk: int = setting(4096, "entries of a chunk; the last of a layer is shorter", minimum=1)
    decay: float = setting(0.95, "β of the residuals; 1 keeps all that was not sent, 0 drops it", minimum=0, maximum=1)
    gain: float = setting(1.0, "α, the server's step along its clients' mean message", minimum=0, server_only=True)


class Chunks(Compressor):
    """Q(Top-k(x)): the largest entries of every chunk, each with one of its layer's four values.

    With m the mean magnitude of the entries kept in a layer, an entry below −m has code 0, below 0 code 1, below m code
    2, and else code 3. A code stands for the mean of the layer's entries that have it.
    """

    def __init__(self, task: Task, size: int, density: float) -> None:
        self._parts: list[tuple[int, int, int, int]] = []
        """Chunks of one length: first entry, number of chunks, entries of a chunk, and entries kept of a chunk."""
        kept = []
        for layer in task.layout.layers:
            full, rest = divmod(layer.size, size)
            chunks = (layer.offset, full, size), (layer.offset + full * size, 1, rest)
            parts = [(*chunk, max(1, int(density * chunk[2]))) for chunk in chunks if chunk[1] and chunk[2]]
            self._parts += parts
            kept.append(sum(count * k for _, count, _, k in parts))
        self._kept = kept
        """Entries kept of every layer."""
        levels, codes = Floats("levels", _LEVELS * len(kept)), Symbols("codes", (sum(kept),), _LEVELS)
        super().__init__(sum(kept), task.layout.dim, levels, codes)

    def positions(self, x: Tensor) -> Tensor:
        """The largest entries of every chunk of the rows of x `[rows, dim]`, ascending; of equal ones the first."""
        positions = []
        for start, count, length, k in self._parts:
            chunks = x[:, start : start + count * length].reshape(-1, length)
            starts = start + length * torch.arange(count, device=x.device).unsqueeze(1)
            positions.append((largest_positions(chunks, k).view(len(x), count, k) + starts).flatten(1))
        return torch.cat(positions, dim=1)

    def compress(self, x: Tensor) -> Tensors:
        positions = self.positions(x)
        layers = torch.split(x.gather(1, positions).double(), self._kept, dim=1)
        codes, levels = [], []
        for entries in layers:
            m = entries.abs().mean(dim=1, keepdim=True)
            code = (entries >= -m).long() + (entries >= 0).long() + (entries >= m).long()
            masks = [code == level for level in range(_LEVELS)]
            means = [(entries * mask).sum(dim=1) / mask.sum(dim=1).clamp(min=1) for mask in masks]
            codes.append(code.to(torch.uint8))
            levels.append(torch.stack(means, dim=1).float())
        return {"levels": torch.cat(levels, dim=1), "codes": torch.cat(codes, dim=1), "positions": positions}

    def values(self, sent: Tensors) -> Tensor:
        layer = torch.repeat_interleave(torch.tensor(self._kept)).to(sent["codes"].device)
        return sent["levels"].gather(-1, _LEVELS * layer + sent["codes"].long())


class SparseUpdates(CompressedUpdates):
    """↑ Δ̂_k = Q(Top-k(x_k)), ↓ the same of x, as `CompressedUpdates`; the step is α Σ p_k Δ̂_k."""

    def __init__(self, task: Task, settings: SparseLoCoSettings) -> None:
        up, down = settings.density, settings.density_down or settings.density
        super().__init__(Chunks(task, settings.chunk, up), Chunks(task, settings.chunk, down), settings.decay)
        self._gain = settings.gain

    def step(self, server: Tensors, total: Tensor, weight: int) -> tuple[Tensors, Tensor]:
        return {}, self._gain * total / weight


class SparseLoCo(Tracked):
    """FedAvg that sends the largest entries of each chunk of an update as 2-bit values; the sender keeps the rest in a
    residual that decays.

    Sends about `density` · n · (2 + bits of a position) bits and 16 bytes per layer, up and down; a client keeps w and
    a residual. Limits: β = 1 with a model of one layer in one chunk sends the places that `stc` sends. An update with
    at most two magnitudes among the entries kept of each sign and layer, one above and one below their mean, arrives as
    it is, if all others are zero. `gain` 0 never moves w.
    """

    name = "sparseloco"
    paper = "Sarfi et al., 2025"
    personal = False
    about_last_steps = True
    Settings, exchange = SparseLoCoSettings, SparseUpdates
    client_zeros, server_zeros = ("residual",), ("residual",)
