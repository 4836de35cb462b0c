"""The sketch of every round, and exchanges in which clients agree on a sketch of their models."""

from __future__ import annotations

from dataclasses import dataclass
from math import floor
from operator import itemgetter

import numpy as np
import torch
from numpy.typing import NDArray

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
    """Φ^r: the sketch of every round, the same on both ends; a fresh one every `refresh` rounds, or one for the whole
    run if that is 0."""

    layout: Layout
    ratio: float
    seed: int
    refresh: int
    allocation: float = 1.0

    def of(self, round: int, device: torch.device) -> Sketch:
        epoch = round // self.refresh if self.refresh else 0
        return sketch_of_round(self.layout, self.ratio, self.seed, epoch, device, self.allocation)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Entries kept of every layer."""
        return self.layout.sketch_sizes(self.ratio, self.allocation)

    @staticmethod
    def of_whole_model(task: Task, ratio: float) -> Sketches:
        """One sketch for the whole run, of the model as one vector of n entries, with max(1, ⌊ratio · n⌋) rows."""
        whole = task.layout.whole()
        kept = max(1, floor(ratio * task.layout.dim))
        # A ratio of m / N with N a power of two is exact in floating point, so the sketch has exactly m rows.
        return Sketches(whole, kept / whole.layers[0].pad, task.seed, refresh=0)


# Id, N_k, means and variances in the order they were received; a few numbers per client.
Gathered = list[tuple[int, int, NDArray[np.float32], NDArray[np.float32]]]


class AgreeOnThresholds(Exchange[Gathered]):
    """↑ mean and variance of each layer's sketch      ↓ μ̄ and σ̄ of all clients together; τ is a function of these."""

    def __init__(self, sketches: Sketches, quantiles: NDArray[np.float32], pooling: str) -> None:
        self._sketches, self._quantiles, self._pooling = sketches, quantiles, pooling
        layers = len(sketches.layout.layers)
        self.up = Message(0, (Floats("mean", layers), Floats("variance", layers, minimum=0)))
        self.down = Message(1, (Floats("mean", layers), Floats("deviation", layers, minimum=0)))

    def client_send(self, cohort: Cohort, round: int, work: ClientWork) -> tuple[Cohort, Tensors]:
        sketched = self._sketches.of(round, cohort.params.device).forward(cohort.params)
        means, variances = to_host(*statistics(sketched, self._sketches.sizes))
        fine = (torch.isfinite(means) & torch.isfinite(variances)).all(dim=1).tolist()
        if not all(fine):  # a model can be finite and yet too large to sketch
            raise DivergedError(
                f"round {round + 1}: the model of client {cohort.ids[fine.index(False)]} is too large to be sketched; "
                "lower train.learning_rate or method.strength"
            )
        return cohort.with_scratch(sketched=sketched), {"mean": means, "variance": variances}

    def server_open(self, server: Tensors, round: int) -> Gathered:
        return []

    def server_add(self, total: Gathered, ids: list[int], samples: list[int], values: Tensors) -> Gathered:
        means, variances = (values[name].numpy().copy() for name in ("mean", "variance"))
        return [*total, *zip(ids, samples, means, variances, strict=True)]

    def server_reply(self, server: Tensors, total: Gathered, round: int) -> tuple[Tensors, Tensors]:
        # Sums of floats depend on their order, so they are summed by ascending ids, not in the order of arrival.
        _, samples, means, variances = zip(*sorted(total, key=itemgetter(0)), strict=True)
        mean, deviation = pool_statistics(samples, np.stack(means), np.stack(variances), self._pooling)
        return server, {"mean": torch.from_numpy(mean), "deviation": torch.from_numpy(deviation)}

    def client_receive(self, cohort: Cohort, values: Tensors, round: int) -> Cohort:
        tau = thresholds_of(values["mean"], values["deviation"], self._quantiles)
        return cohort.with_heard(thresholds=tau, deviation=values["deviation"])


class VoteOnSymbols(Exchange[Vote]):
    """↑ the interval every sketched coordinate lies in      ↓ the interval the weighted majority chose

    It follows `AgreeOnThresholds` and uses its sketches.
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
