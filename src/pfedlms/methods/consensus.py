"""The sketch of every round, and the exchanges in which clients agree on a sketch of their models."""

from __future__ import annotations

from dataclasses import dataclass
from math import floor
from operator import itemgetter

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pfedlms.aggregate import Vote, pool_statistics
from pfedlms.backend import to_host
from pfedlms.cohort import Cohort, Tensors
from pfedlms.errors import DivergedError
from pfedlms.methods.contract import ClientWork, Exchange, Task
from pfedlms.models.layout import Layout
from pfedlms.quantise import statistics, symbols_of, thresholds_of
from pfedlms.sketch import Sketch, sketch_of_round
from pfedlms.wire import Floats, Message, Symbols


@dataclass(frozen=True)
class Sketches:
    """Φ^r: the sketch of every round, the same for clients and server. It is fresh every `refresh` rounds; if that is
    0, there is one for the whole run."""

    layout: Layout
    ratio: float
    seed: int
    refresh: int
    allocation: float = 1.0

    def of(self, round: int, device: torch.device) -> Sketch:
        """The sketch of a round."""
        epoch = round // self.refresh if self.refresh else 0
        return sketch_of_round(self.layout, self.ratio, self.seed, epoch, device, self.allocation)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Sketch size of every layer."""
        return self.layout.sketch_sizes(self.ratio, self.allocation)

    @staticmethod
    def of_whole_model(task: Task, ratio: float) -> Sketches:
        """One sketch for the whole run, of the model as one vector of n entries, with max(1, ⌊ratio · n⌋) rows."""
        layout = task.layout.as_one_layer()
        rows = max(1, floor(ratio * task.layout.dim))
        # rows / N is exact in floating point, because N is a power of two: so the sketch has exactly this many rows.
        return Sketches(layout, rows / layout.layers[0].pad, task.seed, refresh=0)


def refuse_not_finite(cohort: Cohort, values: Tensor, round: int) -> None:
    """Raise DivergedError if a number computed of a client's sketch, `[clients, …]` on the host, is not finite: a model
    can be finite and yet too large to be sketched."""
    finite = torch.isfinite(values).all(dim=1).tolist()
    if not all(finite):
        raise DivergedError(
            f"round {round + 1}: the model or update of client {cohort.ids[finite.index(False)]} is not finite or too "
            "large to be sketched; lower train.learning_rate, method.strength or method.gain"
        )


Statistics = list[tuple[int, int, NDArray[np.float32], NDArray[np.float32]]]
"""Id, N_k, means and variances of every client, in the order of arrival; a few numbers per client."""


class AgreeOnThresholds(Exchange[Statistics]):
    """↑ mean and variance of each layer's sketch      ↓ μ̄ and σ̄ of all clients together; τ is a function of these."""

    def __init__(self, sketches: Sketches, quantiles: NDArray[np.float32], pooling: str) -> None:
        self._sketches, self._quantiles, self._pooling = sketches, quantiles, pooling
        layers = len(sketches.layout.layers)
        self.up = Message(0, (Floats("mean", layers), Floats("variance", layers, minimum=0)))
        self.down = Message(1, (Floats("mean", layers), Floats("deviation", layers, minimum=0)))

    def client_send(self, cohort: Cohort, round: int, work: ClientWork) -> tuple[Cohort, Tensors]:
        sketched = self._sketches.of(round, cohort.params.device).forward(cohort.params)
        means, variances = to_host(*statistics(sketched, self._sketches.sizes))
        refuse_not_finite(cohort, torch.cat([means, variances], dim=1), round)
        return cohort.with_scratch(sketched=sketched), {"mean": means, "variance": variances}

    def server_open(self, server: Tensors, round: int) -> Statistics:
        return []

    def server_add(self, total: Statistics, ids: list[int], samples: list[int], values: Tensors) -> Statistics:
        means, variances = (values[name].numpy().copy() for name in ("mean", "variance"))
        return [*total, *zip(ids, samples, means, variances, strict=True)]

    def server_reply(self, server: Tensors, total: Statistics, round: int) -> tuple[Tensors, Tensors]:
        # Sums of floats depend on their order, so they are summed by ascending ids, not in the order of arrival.
        _, samples, means, variances = zip(*sorted(total, key=itemgetter(0)), strict=True)
        mean, deviation = pool_statistics(samples, np.stack(means), np.stack(variances), self._pooling)
        return server, {"mean": torch.from_numpy(mean), "deviation": torch.from_numpy(deviation)}

    def client_receive(self, cohort: Cohort, values: Tensors, round: int) -> Cohort:
        tau = thresholds_of(values["mean"], values["deviation"], self._quantiles)
        return cohort.with_heard(thresholds=tau, deviation=values["deviation"])


class VoteOnSymbols(Exchange[Vote]):
    """↑ the interval in which every sketched coordinate lies      ↓ the interval that the weighted majority chose

    Uses the sketches and the thresholds of `AgreeOnThresholds`, which comes before it.
    """

    def __init__(self, sizes: tuple[int, ...], thresholds: int) -> None:
        self._sizes, self._thresholds = sizes, thresholds
        self.up, self.down = (Message(kind, (Symbols("symbols", sizes, thresholds + 1),)) for kind in (2, 3))

    def client_send(self, cohort: Cohort, round: int, work: ClientWork) -> tuple[Cohort, Tensors]:
        return cohort, {"symbols": symbols_of(cohort.scratch["sketched"], cohort.heard["thresholds"], self._sizes)}

    def server_open(self, server: Tensors, round: int) -> Vote:
        return Vote(sum(self._sizes), self._thresholds)

    def server_add(self, total: Vote, ids: list[int], samples: list[int], values: Tensors) -> Vote:
        total.add(values["symbols"].numpy(), samples)
        return total

    def server_reply(self, server: Tensors, total: Vote, round: int) -> tuple[Tensors, Tensors]:
        return server, {"symbols": torch.from_numpy(total.result())}

    def client_receive(self, cohort: Cohort, values: Tensors, round: int) -> Cohort:
        return cohort.with_heard(consensus=values["symbols"])
