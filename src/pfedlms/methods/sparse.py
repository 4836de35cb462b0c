"""An exchange in which clients and server send only the largest entries of an update, and keep the rest as a
residual."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from pfedlms.backend import to_device
from pfedlms.cohort import Cohort, Tensors
from pfedlms.methods.contract import ClientWork, Exchange, go_on_from
from pfedlms.wire import Message, Positions
from pfedlms.wire.fields import Field

_LOW = (1 << 32) - 1


def largest_positions(x: Tensor, count: int) -> Tensor:
    """Positions of the `count` entries of largest magnitude in every row of x `[rows, dim]`, ascending; of equal
    magnitudes the first.

    Bit patterns of non-negative floats have the same order as the floats. A pattern followed by the reversed index is a
    unique key, so the result does not depend on how a device sorts equal magnitudes.
    """
    index = torch.arange(x.shape[1], device=x.device)
    keys = (x.abs().view(torch.int32).to(torch.int64) << 32) | (_LOW - index)
    return (_LOW - (keys.topk(count, dim=1, sorted=False).values & _LOW)).sort(dim=1).values


def add_at(model: Tensor, positions: Tensor, values: Tensor) -> Tensor:
    """`model: [dim]` or `[clients, dim]` with `values` added at `positions`; all other entries keep their bits, even
    −0."""
    index = positions.expand(*model.shape[:-1], -1)
    return model.scatter(-1, index, model.gather(-1, index) + values)


class Compressor(ABC):
    """C(x): some entries of x, with fewer bits each, as the fields of a message; one field is "positions"."""

    def __init__(self, count: int, dim: int, *fields: Field) -> None:
        self.fields = (*fields, Positions("positions", count, dim))

    @abstractmethod
    def compress(self, x: Tensor) -> Tensors:
        """The values of the fields for each row of x `[rows, dim]`."""

    @abstractmethod
    def values(self, sent: Tensors) -> Tensor:
        """The value that was sent for each position, `[…, count]`."""

    def compress_one(self, x: Tensor) -> Tensors:
        """`compress` of x `[dim]`."""
        return {name: value.squeeze(0) for name, value in self.compress(x.unsqueeze(0)).items()}

    def add_to(self, model: Tensor, sent: Tensors) -> Tensor:
        """`model`, `[dim]` or `[clients, dim]`, plus what was sent."""
        return add_at(model, sent["positions"], self.values(sent))

    def unsent(self, x: Tensor, sent: Tensors) -> Tensor:
        """x minus what was sent of it: the residual."""
        return x - self.add_to(torch.zeros_like(x), sent)


class CompressedUpdates(Exchange[tuple[Tensor, int]]):
    """↑ C(x_k), x_k = θ_k − w + β e_k, then e_k ← x_k − C(x_k)
    ↓ C(x), x = step(Σ p_k C(x_k)) + β e, then e ← x − C(x); server and clients: w ← w + C(x)"""

    def __init__(self, up: Compressor, down: Compressor, decay: float) -> None:
        self._up, self._down, self._decay = up, down, decay
        self.up, self.down = Message(0, self._up.fields), Message(1, self._down.fields)

    @abstractmethod
    def step(self, server: Tensors, total: Tensor, weight: int) -> tuple[Tensors, Tensor]:
        """The server's state besides w and e, and its step, `[dim]` in float64, from Σ N_k C(x_k) and Σ N_k."""

    def client_send(self, cohort: Cohort, round: int, work: ClientWork) -> tuple[Cohort, Tensors]:
        x = cohort.params - cohort.state["model"] + self._decay * cohort.state["residual"]
        sent = self._up.compress(x)
        return cohort.with_state(residual=self._up.unsent(x, sent)), sent

    def server_open(self, server: Tensors, round: int) -> tuple[Tensor, int]:
        return torch.zeros_like(server["model"], dtype=torch.float64), 0

    def server_add(
        self, total: tuple[Tensor, int], ids: list[int], samples: list[int], values: Tensors
    ) -> tuple[Tensor, int]:
        sent = {name: to_device(value, total[0].device) for name, value in values.items()}
        weights = to_device(torch.tensor(samples, dtype=torch.float64), total[0].device)
        updates = weights[:, None] * self._up.values(sent).double()
        for positions, update in zip(sent["positions"], updates, strict=True):
            total[0].index_add_(0, positions, update)
        return total[0], total[1] + sum(samples)

    def server_reply(self, server: Tensors, total: tuple[Tensor, int], round: int) -> tuple[Tensors, Tensors]:
        moments, step = self.step(server, *total)
        x = (step + self._decay * server["residual"]).float()
        sent = self._down.compress_one(x)
        model, residual = self._down.add_to(server["model"], sent), self._down.unsent(x, sent)
        return {"model": model, "residual": residual, **moments}, sent

    def client_receive(self, cohort: Cohort, values: Tensors, round: int) -> Cohort:
        sent = {name: to_device(value, cohort.params.device) for name, value in values.items()}
        return go_on_from(cohort, self._down.add_to(cohort.state["model"], sent))
