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
from pfedlms.methods.sparse import CompressedUpdates, Compressor, largest
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
    """Q(Top-k(x)): the largest entries of every chunk, with one of four values of their layer.

    With m the mean magnitude of the entries kept in a layer, a code is 0 below −m, 1 to 0, 2 below m and 3 from there
    on; it stands for the mean of the layer's entries that have it.
    """

    def __init__(self, task: Task, size: int, density: float) -> None:
        self._parts: list[tuple[int, int, int, int]] = []
        """First entry, chunks, entries of a chunk, and those kept of it."""
        kept = []
        for layer in task.layout.layers:
            whole, rest = divmod(layer.size, size)
            parts = [(layer.offset, whole, size), (layer.offset + whole * size, 1, rest)]
            own = [(at, count, each, max(1, int(density * each))) for at, count, each in parts if count and each]
            self._parts += own
            kept.append(sum(count * few for _, count, _, few in own))
        self.kept = tuple(kept)
        """Entries kept of every layer."""
        levels, codes = Floats("levels", _LEVELS * len(kept)), Symbols("codes", (sum(kept),), _LEVELS)
        super().__init__(sum(kept), task.layout.dim, levels, codes)

    def positions(self, x: Tensor) -> Tensor:
        """The largest entries of every chunk of the rows of x `[rows, dim]`, ascending; of equal ones the first."""
        found = []
        for at, count, each, few in self._parts:
            chunks = x[:, at : at + count * each].reshape(-1, each)
            starts = at + each * torch.arange(count, device=x.device).unsqueeze(1)
            found.append((largest(chunks, few).view(len(x), count, few) + starts).flatten(1))
        return torch.cat(found, dim=1)

    def compress(self, x: Tensor) -> Tensors:
        positions = self.positions(x)
        layers = torch.split(x.gather(1, positions).double(), list(self.kept), dim=1)
        codes, levels = [], []
        for own in layers:
            m = own.abs().mean(dim=1, keepdim=True)
            code = (own >= -m).long() + (own >= 0).long() + (own >= m).long()
            has = [code == level for level in range(_LEVELS)]
            means = [(own * each).sum(dim=1) / each.sum(dim=1).clamp(min=1) for each in has]
            codes.append(code.to(torch.uint8))
            levels.append(torch.stack(means, dim=1).float())
        return {"levels": torch.cat(levels, dim=1), "codes": torch.cat(codes, dim=1), "positions": positions}

    def values(self, sent: Tensors) -> Tensor:
        layer = torch.repeat_interleave(torch.tensor(self.kept)).to(sent["codes"].device)
        return sent["levels"].gather(-1, _LEVELS * layer + sent["codes"].long())


class SparseUpdates(CompressedUpdates):
    """↑ Δ̂_k = Q(Top-k(x_k)), ↓ the same of x, as `CompressedUpdates`; the step is α Σ p_k Δ̂_k."""

    def __init__(self, task: Task, settings: SparseLoCoSettings) -> None:
        shares = settings.density, settings.density_down or settings.density
        super().__init__((Chunks(task, settings.chunk, share) for share in shares), settings.decay)
        self._gain = settings.gain

    def step(self, server: Tensors, total: Tensor, weight: int) -> tuple[Tensors, Tensor]:
        return {}, self._gain * total / weight


class SparseLoCo(Tracked):
    """FedAvg whose updates travel as 2-bit values of each chunk's largest entries; the sender keeps the rest in a
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
