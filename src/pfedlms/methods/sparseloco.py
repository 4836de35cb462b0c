"""SparseLoCo: Sarfi, Thérien, Lidin, Belilovsky, "Communication Efficient LLM Pre-training with SparseLoCo", 2025.

The rule of the paper, Δ̂ = Q(Top-k(e)) of a decayed accumulator e ← β e + Δ, and where this differs: the paper's workers
gather each other's messages, here the server answers with the same rule and keeps what it has not sent, as STC's does;
positions are Golomb codes of all chunks together instead of 12 bits each; chunks are consecutive entries of a layer
(the authors' code has blocks of 64 × 64 of a matrix); local steps are those of [train], and no state of AdamW lasts
from round to round; the mean is weighted by N_k; the residual of an absent client does not decay, and a client whose
message is lost has taken it as sent. The paper leaves the four values of Q open (the authors' code takes the mean of
each bin, of bins of equal width around the mean of a tensor); see `compressed`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pfedlms.backend import to_device
from pfedlms.cohort import Cohort, Tensors
from pfedlms.methods.contract import ClientWork, Exchange, Task, Tracked, go_on_from
from pfedlms.methods.stc import largest
from pfedlms.settings import setting
from pfedlms.wire import Floats, Message, Positions, Symbols

_LEVELS = 4


@dataclass(frozen=True)
class SparseLoCoSettings:
    density: float = setting(0.01, "share of each chunk's entries that a client sends", above=0, maximum=1)
    density_down: float = setting(0.0, "the same of the server's answer; 0: as method.density", minimum=0, maximum=1)
    chunk: int = setting(4096, "entries of a chunk; the last of a layer is shorter", minimum=1)
    decay: float = setting(0.95, "β of the residuals; 1 keeps all that was not sent, 0 drops it", minimum=0, maximum=1)
    gain: float = setting(1.0, "α, the server's step along its clients' mean message", minimum=0, server_only=True)


class Chunks:
    """Which entries of a vector are kept, and with which values."""

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
        self.dim = task.layout.dim

    def positions(self, x: Tensor) -> Tensor:
        """The largest entries of every chunk of the rows of x `[rows, dim]`, ascending; of equal ones the first."""
        found = []
        for at, count, each, few in self._parts:
            chunks = x[:, at : at + count * each].reshape(-1, each)
            starts = at + each * torch.arange(count, device=x.device).unsqueeze(1)
            found.append((largest(chunks, few).view(len(x), count, few) + starts).flatten(1))
        return torch.cat(found, dim=1)

    def compressed(self, x: Tensor) -> Tensors:
        """Q(Top-k(x)) of the rows of x. With m the mean magnitude of the entries kept in a layer, a code is 0 below −m,
        1 to 0, 2 below m and 3 from there on; it stands for the mean of the layer's entries that have it."""
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
        """What was sent for each position, `[…, kept]`."""
        layer = torch.repeat_interleave(torch.tensor(self.kept)).to(sent["codes"].device)
        return sent["levels"].gather(-1, _LEVELS * layer + sent["codes"].long())

    def moved(self, model: Tensor, sent: Tensors) -> Tensor:
        """A model after a message, `[dim]` or `[clients, dim]`."""
        places, values = (part.expand(*model.shape[:-1], -1) for part in (sent["positions"], self.values(sent)))
        return model.scatter(-1, places, model.gather(-1, places) + values)

    def message(self, kind: int) -> Message:
        fields = Floats("levels", _LEVELS * len(self.kept)), Symbols("codes", (sum(self.kept),), _LEVELS)
        return Message(kind, (*fields, Positions("positions", sum(self.kept), self.dim)))


class SparseUpdates(Exchange[tuple[Tensor, int]]):
    """↑ Δ̂_k = Q(Top-k(x_k)), x_k = θ_k − w + β e_k, then e_k ← x_k − Δ̂_k
    ↓ the same of x = α Σ p_k Δ̂_k + β e, then e ← x − Δ̂; and w ← w + Δ̂ on both ends"""

    def __init__(self, task: Task, settings: SparseLoCoSettings) -> None:
        self._decay, self._gain, self._dim = settings.decay, settings.gain, task.layout.dim
        shares = settings.density, settings.density_down or settings.density
        self._up, self._down = (Chunks(task, settings.chunk, share) for share in shares)
        self.up, self.down = self._up.message(0), self._down.message(1)

    def client_send(self, cohort: Cohort, round: int, work: ClientWork) -> tuple[Cohort, Tensors]:
        x = cohort.params - cohort.state["model"] + self._decay * cohort.state["residual"]
        sent = self._up.compressed(x)
        return cohort.with_state(residual=x - self._up.moved(torch.zeros_like(x), sent)), sent

    def server_open(self, server: Tensors, round: int) -> tuple[Tensor, int]:
        return torch.zeros(self._dim, dtype=torch.float64), 0

    def server_add(
        self, total: tuple[Tensor, int], ids: list[int], samples: list[int], values: Tensors
    ) -> tuple[Tensor, int]:
        for weight, positions, update in zip(samples, values["positions"], self._up.values(values), strict=True):
            total[0].index_add_(0, positions, weight * update.double())
        return total[0], total[1] + sum(samples)

    def server_reply(self, server: Tensors, total: tuple[Tensor, int], round: int) -> tuple[Tensors, Tensors]:
        x = (self._gain * total[0] / total[1] + self._decay * server["residual"]).float()
        sent = {name: value.squeeze(0) for name, value in self._down.compressed(x.unsqueeze(0)).items()}
        residual = x - self._down.moved(torch.zeros_like(x), sent)
        return {"model": self._down.moved(server["model"], sent), "residual": residual}, sent

    def client_receive(self, cohort: Cohort, values: Tensors, round: int) -> Cohort:
        received = {name: to_device(value, cohort.params.device) for name, value in values.items()}
        return go_on_from(cohort, self._down.moved(cohort.state["model"], received))


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
    Settings = SparseLoCoSettings

    def __init__(self, task: Task, settings: SparseLoCoSettings) -> None:
        super().__init__(task, settings)
        self.exchanges = (SparseUpdates(task, settings),)

    def client_start(self, cohort: Cohort) -> Cohort:
        return super().client_start(cohort).with_state(residual=torch.zeros_like(cohort.params))

    def server_start(self) -> Tensors:
        return {**super().server_start(), "residual": torch.zeros_like(self.task.initial)}
