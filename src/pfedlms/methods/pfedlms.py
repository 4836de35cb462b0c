"""pFedLMS: Zhang, Hou, Cheng, Feng, Gong, "Communication-Efficient Personalized Federated Learning via Layer-Wise
Multi-Threshold Random Sketching", the paper this package implements.

Choices where the paper is silent: a layer is a module that owns parameters, padded to a power of two; ρ is in units of
the layer's σ̄; votes use the integers N_k and ties go up; statistics are float32, thresholds computed from them on every
end; E steps are E mini-batches. docs/protocol.md fixes all of it to the bit.

Clients keep their models. Each round they sketch every layer, agree on thresholds from its statistics (exchange A),
vote on which interval each sketched coordinate should lie in (exchange B), and are pulled towards that interval while
they train.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass

from pfedlms.cohort import Cohort
from pfedlms.methods.consensus import AgreeOnThresholds, Sketches, VoteOnSymbols
from pfedlms.methods.contract import Method, Objective, Task
from pfedlms.pull import Pull
from pfedlms.quantise import lloyd_max, narrowest_interval, normal_quantiles
from pfedlms.settings import setting


@dataclass(frozen=True)
class PFedLMSSettings:
    thresholds: int = setting(
        7,
        "T, thresholds per layer; a symbol takes log2(T + 1) bits; T = 1 is one-bit voting at the mean",
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
    absolute: bool = setting(
        False, "ρ is one number for all layers, as in the theorem, not in units of σ̄", optional=True
    )
    refresh: int = setting(1, "h, rounds between fresh sketches", minimum=1)
    spacing: str = setting(
        "quantile",
        "τ at equal shares of a normal (the paper), or where its Lloyd–Max quantiser has its boundaries",
        choices=lambda: ["quantile", "lloyd-max"],
    )
    pooling: str = setting(
        "mean",
        "how the server pools the clients' statistics: mean (the paper), or median, which one client cannot move far",
        choices=lambda: ["mean", "median"],
        server_only=True,
    )
    layerwise: bool = setting(True, "a sketch and thresholds for every layer; false: one for the whole model")


class PulledTowardsConsensus(Pull, Objective):
    """f_k + λ R̃_ρ: the gradient of the regulariser in closed form."""

    def check_values(self) -> None:
        """Check nothing: the values come from messages, which are checked when they are decoded."""


class PFedLMS(Method):
    """One personal model per client; low-bit sketches up, a low-bit consensus down. λ = 0 is `local` exactly."""

    name = "pfedlms"
    paper = "Zhang et al., Layer-Wise Multi-Threshold Random Sketching"
    personal = True
    Settings = PFedLMSSettings

    def __init__(self, task: Task, settings: PFedLMSSettings) -> None:
        super().__init__(task, settings)
        layout = task.layout if settings.layerwise else task.layout.as_one_layer()
        self._sketches = Sketches(layout, settings.ratio, task.seed, settings.refresh)
        count, by_quantile = settings.thresholds, settings.spacing == "quantile"
        quantiles = normal_quantiles(count) if by_quantile else lloyd_max(count + 1)[1]
        self.sketched = self._sketches.layout, self._sketches.sizes
        self.exchanges = (
            AgreeOnThresholds(self._sketches, quantiles, settings.pooling),
            VoteOnSymbols(self._sketches.sizes, count),
        )
        self._warn(narrowest_interval(quantiles))

    def objective(self, cohort: Cohort, round: int) -> Objective:
        return self.pull(cohort, round) if self.settings.strength else Objective()

    def pull(self, cohort: Cohort, round: int) -> PulledTowardsConsensus:
        """λ R̃_ρ towards what the cohort's clients agreed on in this round."""
        settings, heard, scale = self.settings, cohort.heard, cohort.heard["deviation"]
        if settings.absolute:
            scale = (scale > 0).to(scale.dtype)  # a layer without deviation has no pull in either case
        return PulledTowardsConsensus(
            self._sketches.of(round, cohort.params.device), heard["thresholds"], scale, heard["consensus"],
            settings.strength, settings.smoothing,
        )  # fmt: skip

    def _warn(self, narrowest: float) -> None:
        settings = self.settings
        if narrowest < 2 * settings.smoothing and not settings.absolute:
            warnings.warn(
                f"method.smoothing: with {settings.thresholds} thresholds the narrowest interval is {narrowest:.3g} "
                f"σ̄, less than 2ρ = {2 * settings.smoothing:.3g} σ̄, "
                f"so the pull never vanishes there; use method.smoothing below {narrowest / 2:.2g} or fewer thresholds",
                stacklevel=3,
            )
        step = 2 * self.task.learning_rate * settings.strength / settings.ratio
        # AdamW's steps are about η long, whatever the gradient. The factor allows for rounding.
        if step > 0.2 * (1 + 1e-9) and self.task.optimizer == "sgd":
            warnings.warn(
                f"method.strength: 2 η λ / ratio = {step:.3g}; "
                "beyond 0.2 a single step throws sketched coordinates past their interval and training can "
                f"break down; use method.strength of at most {0.1 * settings.ratio / self.task.learning_rate:.2g}",
                stacklevel=3,
            )
