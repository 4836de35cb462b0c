"""STC: Sattler, Wiedemann, Müller, Samek, "Robust and Communication-Efficient Federated Learning from Non-i.i.d. Data",
IEEE Transactions on Neural Networks and Learning Systems, 2020."""

from __future__ import annotations

from dataclasses import dataclass
from math import floor

import torch
from torch import Tensor

from pfedlms.cohort import Tensors
from pfedlms.methods.contract import Task, Tracked
from pfedlms.methods.server_optimizer import ServerOptimizer, ServerSettings
from pfedlms.methods.sparse import CompressedUpdates, Compressor, largest_positions
from pfedlms.settings import setting
from pfedlms.wire import Scalar, Signs


@dataclass(frozen=True)
class STCSettings(ServerSettings):
    sparsity: float = setting(
        0.01, "p, share of the entries that a client sends; 1 sends a sign for every entry", above=0, maximum=1
    )
    sparsity_down: float = setting(0.0, "p of the server's answer; 0: as method.sparsity", minimum=0, maximum=1)
    gain: float = setting(
        1.0, "η, the server's step along its clients' mean update; 1 is the paper", minimum=0, server_only=True
    )


class Ternary(Compressor):
    """STC(x): the max(1, ⌊p n⌋) entries of largest magnitude become ±μ, the others zero.

    positions: the entries kept, ascending (of equal magnitudes the first)      signs: +1 where x ≥ 0, else −1
    magnitude: μ, the mean of |x| over them
    """

    def __init__(self, dim: int, share: float) -> None:
        self.count = max(1, floor(share * dim))
        super().__init__(self.count, dim, Scalar("magnitude", minimum=0), Signs("signs", self.count))

    def compress(self, x: Tensor) -> Tensors:
        positions = largest_positions(x, self.count)
        values = x.gather(1, positions)
        # In float64 the sum of some thousand float32 numbers of similar size is exact, whatever its order.
        total = values.abs().double().sum(dim=1, keepdim=True)
        # Divided by a tensor: by a number, a GPU would multiply by its reciprocal, which rounds differently.
        magnitude = (total / total.new_full((), self.count)).float()
        return {"magnitude": magnitude, "signs": torch.where(values >= 0, 1.0, -1.0), "positions": positions}

    def values(self, sent: Tensors) -> Tensor:
        return sent["magnitude"] * sent["signs"]


class TernaryUpdates(CompressedUpdates):
    """↑ STC(x_k), ↓ STC(x), as `CompressedUpdates` with β = 1; the step is the server optimiser's, of the mean."""

    def __init__(self, task: Task, settings: STCSettings) -> None:
        up, down = settings.sparsity, settings.sparsity_down or settings.sparsity
        super().__init__(Ternary(task.layout.dim, up), Ternary(task.layout.dim, down), decay=1.0)
        self._optimizer = ServerOptimizer(settings.gain, settings)

    def step(self, server: Tensors, total: Tensor, weight: int) -> tuple[Tensors, Tensor]:
        return self._optimizer.step(server, total / total.new_full((), weight))


class STC(Tracked):
    """FedAvg that sends, up and down, the signs of the largest entries of an update with one magnitude. The sender,
    client or server, keeps the rest in a residual and sends it later.

    Limits: p = 1 sends signs of all entries, scaled by their mean magnitude, with error feedback. An update with no
    more than p n entries other than zero, all of one magnitude, arrives as it is. `gain` 1 is the paper; 0 only sends
    magnitudes of zero, and w stays.

    Where the paper is silent: the mean is weighted by N_k, as FedAvg's is; of equal magnitudes the first are kept, and
    always max(1, ⌊p n⌋) of them, so that a zero among them is sent as +μ and the residual takes it back; a client's
    residual loses what it has sent, also if the message is lost; an absent client keeps its residual. Unlike the paper,
    whose server caches partial sums for clients that were absent, they are sent the answers they missed, what changed
    of w, or w, whichever is fewest bytes.
    """

    name = "stc"
    paper = "Sattler et al., IEEE TNNLS 2020"
    personal = False
    about_last_steps = True
    Settings, exchange = STCSettings, TernaryUpdates
    client_zeros, server_zeros, server_on_device = ("residual",), ("residual",), True

    def server_start(self) -> Tensors:
        start = super().server_start()
        return {**start, **ServerOptimizer(self.settings.gain, self.settings).start(start["model"])}
