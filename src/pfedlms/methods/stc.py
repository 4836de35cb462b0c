"""STC: Sattler, Wiedemann, Müller, Samek, "Robust and Communication-Efficient Federated Learning from Non-i.i.d. Data",
IEEE Transactions on Neural Networks and Learning Systems, 2020."""

from __future__ import annotations

from dataclasses import dataclass
from math import floor

import torch
from torch import Tensor

from pfedlms.backend import to_device
from pfedlms.cohort import Cohort, Tensors
from pfedlms.methods.contract import ClientWork, Exchange, Task, Tracked, go_on_from
from pfedlms.methods.server_optimizer import ServerOptimizer, ServerSettings
from pfedlms.settings import setting
from pfedlms.wire import Message, Positions, Scalar, Signs

_LOW = (1 << 32) - 1


@dataclass(frozen=True)
class STCSettings(ServerSettings):
    sparsity: float = setting(
        0.01, "p, share of the entries that a client sends; 1 sends a sign for every entry", above=0, maximum=1
    )
    sparsity_down: float = setting(0.0, "p of the server's answer; 0: as method.sparsity", minimum=0, maximum=1)
    gain: float = setting(
        1.0, "η, the server's step along its clients' mean update; 1 is the paper", minimum=0, server_only=True
    )


def ternary(x: Tensor, count: int) -> Tensors:
    """STC(x): of each row of x `[rows, dim]` the `count` entries of largest magnitude become ±μ, the others zero.

    positions: the entries kept, ascending (of equal magnitudes the first)      signs: +1 where x ≥ 0, else −1
    magnitude: μ, the mean of |x| over them

    """
    kept = largest(x, count)
    values = x.gather(1, kept)
    # In float64 the sum of some thousand float32 numbers of similar size is exact, whatever its order.
    total = values.abs().double().sum(dim=1, keepdim=True)
    # By a tensor: a GPU multiplies by the reciprocal of a number, which is not the same.
    magnitude = (total / total.new_full((), count)).float()
    return {"magnitude": magnitude, "signs": torch.where(values >= 0, 1.0, -1.0), "positions": kept}


def largest(x: Tensor, count: int) -> Tensor:
    """Places of the `count` entries of largest magnitude in every row of x `[rows, dim]`, ascending; of equal
    magnitudes the first.

    Bit patterns of non-negative floats have the order of the floats. A pattern followed by the reversed index is a
    unique key, so the result does not depend on how a device sorts equal magnitudes.
    """
    index = torch.arange(x.shape[1], device=x.device)
    keys = (x.abs().view(torch.int32).to(torch.int64) << 32) | (_LOW - index)
    return (_LOW - (keys.topk(count, dim=1, sorted=False).values & _LOW)).sort(dim=1).values


def moved(model: Tensor, sent: Tensors) -> Tensor:
    """w after an answer, `[dim]` or `[clients, dim]`: w + s μ at the places sent; others keep their bits, also −0."""
    places = sent["positions"].expand(*model.shape[:-1], -1)
    return model.scatter(-1, places, model.gather(-1, places) + sent["magnitude"] * sent["signs"])


def dense(sent: Tensors, dim: int) -> Tensor:
    """STC(x) as a vector again, `[…, dim]`; a product with ±1 is exact."""
    values = sent["magnitude"] * sent["signs"]
    return values.new_zeros(*values.shape[:-1], dim).scatter(-1, sent["positions"], values)


class TernaryUpdates(Exchange[tuple[Tensor, int]]):
    """↑ STC(x_k), x_k = θ_k − w + e_k, then e_k ← x_k − STC(x_k)
    ↓ STC(x), x = step(Σ p_k STC(x_k)) + e, then e ← x − STC(x); and w ← w + STC(x) on both ends"""

    def __init__(self, task: Task, settings: STCSettings) -> None:
        self._dim, self._device = task.layout.dim, torch.device(task.device)
        self._optimizer = ServerOptimizer(settings.gain, settings)
        shares = settings.sparsity, settings.sparsity_down or settings.sparsity
        self._up, self._down = (max(1, floor(share * self._dim)) for share in shares)
        self.up, self.down = (self._message(kind, count) for kind, count in enumerate((self._up, self._down)))

    def _message(self, kind: int, count: int) -> Message:
        parts = Scalar("magnitude", minimum=0), Signs("signs", count), Positions("positions", count, self._dim)
        self._names = [part.name for part in parts]
        return Message(kind, parts)

    def client_send(self, cohort: Cohort, round: int, work: ClientWork) -> tuple[Cohort, Tensors]:
        x = cohort.params - cohort.state["model"] + cohort.state["residual"]
        sent = ternary(x, self._up)
        return cohort.with_state(residual=x - dense(sent, self._dim)), sent

    def server_open(self, server: Tensors, round: int) -> tuple[Tensor, int]:
        return torch.zeros(self._dim, dtype=torch.float64, device=self._device), 0

    def server_add(
        self, total: tuple[Tensor, int], ids: list[int], samples: list[int], values: Tensors
    ) -> tuple[Tensor, int]:
        magnitude, signs, places = (to_device(values[name], self._device) for name in self._names)
        weights = to_device(torch.tensor(samples, dtype=torch.float64), self._device)
        updates = weights.unsqueeze(1) * (magnitude.double() * signs)
        for positions, update in zip(places, updates, strict=True):
            total[0].index_add_(0, positions, update)
        return total[0], total[1] + sum(samples)

    def server_reply(self, server: Tensors, total: tuple[Tensor, int], round: int) -> tuple[Tensors, Tensors]:
        moments, step = self._optimizer.step(server, total[0] / total[0].new_full((), total[1]))
        x = (step + server["residual"]).float()
        sent = {name: value.squeeze(0) for name, value in ternary(x.unsqueeze(0), self._down).items()}
        return {"model": moved(server["model"], sent), "residual": x - dense(sent, self._dim), **moments}, sent

    def client_receive(self, cohort: Cohort, values: Tensors, round: int) -> Cohort:
        received = {name: to_device(value, cohort.params.device) for name, value in values.items()}
        return go_on_from(cohort, moved(cohort.state["model"], received))


class STC(Tracked):
    """FedAvg whose updates travel in both directions as the signs of their largest entries with one magnitude. The
    sender, client or server, keeps the rest in a residual and sends it later.

    Limits: p = 1 sends signs of all entries, scaled by their mean magnitude, with error feedback. An update with no
    more than p n entries other than zero, all of one magnitude, arrives as it is. `gain` 1 is the paper; 0 only sends
    magnitudes of zero, and w stays.

    Where the paper is silent: the mean is weighted by N_k, as FedAvg's is; of equal magnitudes the first are kept, and
    always max(1, ⌊p n⌋) of them, so that a zero among them is sent as +μ and the residual takes it back; a client's
    residual loses what it has sent, also if the message is lost; an absent client keeps its residual.
    """

    name = "stc"
    paper = "Sattler et al., IEEE TNNLS 2020"
    personal = False
    about_last_steps = True
    Settings = STCSettings

    def __init__(self, task: Task, settings: STCSettings) -> None:
        super().__init__(task, settings)
        self.exchanges = (TernaryUpdates(task, settings),)

    def client_start(self, cohort: Cohort) -> Cohort:
        return super().client_start(cohort).with_state(residual=torch.zeros_like(cohort.params))

    def server_start(self) -> Tensors:
        model = self.task.initial.to(self.task.device)
        nothing = torch.zeros_like(model)
        return {
            "model": model,
            "residual": nothing,
            **ServerOptimizer(self.settings.gain, self.settings).start(nothing),
        }
