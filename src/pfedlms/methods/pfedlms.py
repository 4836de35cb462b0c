"""pFedLMS: "pFedLMS: Personalized Federated Learning via Layer-Wise Multi-Threshold Random Sketching", the paper this
package implements. Its open choices are fixed in docs/protocol.md and at the settings below.

Clients keep their models. Each round they sketch every layer, agree on thresholds from its statistics (exchange A),
vote on which interval each sketched coordinate should lie in (exchange B), and are pulled towards that interval while
they train.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pfedlms.aggregate import Vote, pool_statistics
from pfedlms.cohort import Cohort
from pfedlms.errors import DivergedError
from pfedlms.methods.contract import ClientWork, Exchange, Method, Objective, Task, Tensors
from pfedlms.models.layout import Layout
from pfedlms.pull import Pull
from pfedlms.quantise import (
    lloyd_max,
    narrowest_interval,
    normal_quantiles,
    statistics,
    symbols_of,
    thresholds_of,
)
from pfedlms.settings import setting
from pfedlms.sketch import Sketch, sketch_of_round
from pfedlms.wire.fields import Floats, Message, Symbols


@dataclass(frozen=True)
class PFedLMSSettings:
    """The section [method] of pFedLMS."""

    thresholds: int = setting(
        7,
        "T, thresholds a layer; a symbol takes log2(T + 1) bits; T = 1 is one-bit voting at the mean",
        minimum=1,
        maximum=255,
    )
    ratio: float = setting(0.1, "m / N, sketch entries per padded parameter", above=0, maximum=1)
    strength: float = setting(
        0.05,
        "λ, weight of the pull; 0 is `local` exactly; 2 η λ / ratio beyond 0.2 can destroy the model",
        minimum=0,
    )
    smoothing: float = setting(0.1, "ρ in units of a layer's σ̄; 0 < ρ; 1.0 costs a point on MNIST", above=0)
    refresh: int = setting(1, "h, rounds between fresh sketches", minimum=1)
    spacing: str = setting(
        "quantile",
        "τ at equal shares of a normal (the paper), or where its Lloyd–Max quantiser has its boundaries",
        choices=lambda: ["quantile", "lloyd-max"],
    )
    layerwise: bool = setting(True, "a sketch and thresholds for every layer; false: one for the whole model")


@dataclass
class Gathered:
    """Statistics received so far, in the order of client ids; a few numbers a client."""

    samples: list[int] = field(default_factory=list)
    means: list[NDArray[np.float32]] = field(default_factory=list)
    variances: list[NDArray[np.float32]] = field(default_factory=list)


def check_finite_sketch(cohort: Cohort, means: Tensor, variances: Tensor, round: int) -> None:
    """A model can be finite and yet too large to sketch; stop where it is, and name it."""
    fine = (torch.isfinite(means) & torch.isfinite(variances)).all(dim=1).tolist()
    if not all(fine):
        raise DivergedError(
            f"round {round + 1}: the model of client {cohort.ids[fine.index(False)]} is too large to be sketched; "
            "lower train.learning_rate or method.strength"
        )


class AgreeOnThresholds(Exchange[Gathered]):
    """Exchange A: ↑ mean and variance of each layer's sketch      ↓ μ̄ and σ̄ of all clients together; τ is a function
    of these."""

    def __init__(self, sketches: Sketches, quantiles: NDArray[np.float32], layers: int) -> None:
        self._sketches, self._quantiles = sketches, quantiles
        self.up = Message(0, (Floats("mean", layers), Floats("variance", layers, minimum=0)))
        self.down = Message(1, (Floats("mean", layers), Floats("deviation", layers, minimum=0)))

    def client_send(self, cohort: Cohort, round: int, work: ClientWork) -> tuple[Cohort, Tensors]:
        sketch = self._sketches.of(round, cohort.params.device)
        sketched = sketch.forward(cohort.params)
        means, variances = statistics(sketched, sketch.sizes)
        check_finite_sketch(cohort, means, variances, round)
        return cohort.with_scratch(sketched=sketched), {"mean": means, "variance": variances}

    def server_open(self, server: Tensors, round: int) -> Gathered:
        return Gathered()

    def server_add(self, total: Gathered, ids: list[int], samples: list[int], values: Tensors) -> Gathered:
        return Gathered(
            total.samples + samples,
            [*total.means, values["mean"].numpy()],
            [*total.variances, values["variance"].numpy()],
        )

    def server_reply(self, server: Tensors, total: Gathered, round: int) -> tuple[Tensors, Tensors]:
        mean, deviation = pool_statistics(total.samples, np.concatenate(total.means), np.concatenate(total.variances))
        return server, {"mean": torch.from_numpy(mean), "deviation": torch.from_numpy(deviation)}

    def client_receive(self, cohort: Cohort, values: Tensors, round: int) -> Cohort:
        tau = thresholds_of(values["mean"].cpu().numpy(), values["deviation"].cpu().numpy(), self._quantiles)
        return cohort.with_scratch(
            thresholds=torch.from_numpy(tau).to(cohort.params.device), deviation=values["deviation"]
        )


class VoteOnSymbols(Exchange[Vote]):
    """Exchange B: ↑ the interval every sketched coordinate lies in      ↓ the interval the weighted majority chose."""

    def __init__(self, sizes: tuple[int, ...], thresholds: int) -> None:
        self._sizes, self._thresholds = sizes, thresholds
        symbols = Symbols("symbols", sizes, thresholds + 1)
        self.up, self.down = Message(2, (symbols,)), Message(3, (symbols,))

    def client_send(self, cohort: Cohort, round: int, work: ClientWork) -> tuple[Cohort, Tensors]:
        return cohort, {"symbols": symbols_of(cohort.scratch["sketched"], cohort.scratch["thresholds"], self._sizes)}

    def server_open(self, server: Tensors, round: int) -> Vote:
        return Vote(sum(self._sizes), self._thresholds)

    def server_add(self, total: Vote, ids: list[int], samples: list[int], values: Tensors) -> Vote:
        total.add(values["symbols"].numpy(), samples)
        return total

    def server_reply(self, server: Tensors, total: Vote, round: int) -> tuple[Tensors, Tensors]:
        return server, {"symbols": torch.from_numpy(total.result())}

    def client_receive(self, cohort: Cohort, values: Tensors, round: int) -> Cohort:
        return cohort.with_scratch(consensus=values["symbols"])


class Sketches:
    """Φ^r: the sketch of every round, the same on both ends."""

    def __init__(self, layout: Layout, ratio: float, seed: int, refresh: int) -> None:
        self._layout, self._ratio, self._seed, self._refresh = layout, ratio, seed, refresh

    def of(self, round: int, device: torch.device) -> Sketch:
        return sketch_of_round(self._layout, self._ratio, self._seed, round // self._refresh, device)


class PulledTowardsConsensus(Objective):
    """f_k + λ R̃_ρ: the gradient of the regulariser in closed form."""

    def __init__(self, pull: Pull) -> None:
        self._pull = pull

    def gradient(self, params: Tensor) -> Tensor:
        return self._pull.gradient(params)


class PFedLMS(Method):
    """One personal model per client; low-bit sketches up, a low-bit consensus down. λ = 0 is `local` exactly."""

    name = "pfedlms"
    paper = "pFedLMS: layer-wise multi-threshold random sketching"
    personal = True
    Settings = PFedLMSSettings

    def __init__(self, task: Task, settings: PFedLMSSettings) -> None:
        super().__init__(task, settings)
        self._layout = task.layout if settings.layerwise else task.layout.whole()
        self._sketches = Sketches(self._layout, settings.ratio, task.seed, settings.refresh)
        chosen = settings.spacing == "quantile"
        quantiles = normal_quantiles(settings.thresholds) if chosen else lloyd_max(settings.thresholds + 1)[1]
        self.exchanges = (
            AgreeOnThresholds(self._sketches, quantiles, len(self._layout.layers)),
            VoteOnSymbols(self._layout.sketch_sizes(settings.ratio), settings.thresholds),
        )
        self._warn(narrowest_interval(quantiles))

    @property
    def sketched(self) -> tuple[Layout, tuple[int, ...]]:
        return self._layout, self._layout.sketch_sizes(self.settings.ratio)

    def objective(self, cohort: Cohort, round: int) -> Objective:
        if self.settings.strength == 0:
            return Objective()
        heard = cohort.scratch
        sketch = self._sketches.of(round, cohort.params.device)
        return PulledTowardsConsensus(
            Pull(
                sketch,
                heard["thresholds"],
                heard["deviation"],
                heard["consensus"],
                self.settings.strength,
                self.settings.smoothing,
            )
        )

    def _warn(self, narrowest: float) -> None:
        chosen = self.settings
        if narrowest < 2 * chosen.smoothing:
            warnings.warn(
                f"method.smoothing: with {chosen.thresholds} thresholds the narrowest interval is {narrowest:.3g} "
                f"σ̄, less than 2ρ = {2 * chosen.smoothing:.3g} σ̄, "
                f"so the pull never vanishes there; use method.smoothing below {narrowest / 2:.2g} or fewer thresholds",
                stacklevel=3,
            )
        step = 2 * self.task.learning_rate * chosen.strength / chosen.ratio
        if step > 0.2:
            warnings.warn(
                f"method.strength: 2 η λ / ratio = {step:.3g}; "
                "beyond 0.2 a single step throws sketched coordinates past their interval and training can "
                f"break down; use method.strength of at most {0.1 * chosen.ratio / self.task.learning_rate:.2g}",
                stacklevel=3,
            )
