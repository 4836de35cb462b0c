"""How clients train: the settings of the section [train], and what follows from them: how many local steps a client
takes in a phase, and how the learning rate changes over the phases of a run."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, cos, pi

from pfedlms.settings import CUSTOM, setting


def steps_of(samples: int, batch_size: int, steps: int, epochs: float) -> int:
    """Local steps of a client with so many training samples: `steps`, or, with `epochs`, ⌈epochs · samples / batch⌉.

    >>> [steps_of(samples, 32, 20, epochs=0.5) for samples in (1, 64, 65, 1000)]
    [1, 1, 2, 16]
    """
    return max(1, ceil(epochs * samples / batch_size)) if epochs else steps


@dataclass(frozen=True)
class Schedule:
    """The learning rate of a phase as a share of η; phase 0 is the start, phase r + 1 the steps of round r.

    In the first `warmup` phases it rises in a straight line: (p + 1) / (warmup + 1). From then on, q phases later,

        constant   1
        cosine     floor + (1 − floor) (1 + cos(π q / Q)) / 2, Q = rounds + 1 − warmup phases in all
        step       decay^⌊q / decay_every⌋

    What a shape does not read is left at its default, so that equal schedules are equal.
    """

    shape: str = "constant"
    warmup: int = 0
    rounds: int = 0
    """R, of a cosine."""
    decay: float = 1.0
    decay_every: int = 1
    floor: float = 0.0
    """Of a cosine: the share of η it approaches; 0: above 0 to the last."""

    def factor(self, phase: int) -> float:
        """Above 0 and at most 1, in float64."""
        if phase < self.warmup:
            return (phase + 1) / (self.warmup + 1)
        since = phase - self.warmup
        if self.shape == "cosine":
            last = max(0, self.rounds - self.warmup)
            return self.floor + (1 - self.floor) * (1 + cos(pi * min(since, last) / (last + 1))) / 2
        return self.decay ** (since // self.decay_every)

    @property
    def changes(self) -> bool:
        """Whether any two phases may differ."""
        return self != Schedule()


@dataclass(frozen=True, kw_only=True)
class TrainSettings:
    """How clients train, the same for every method: the section [train]."""

    rounds: int = setting(200, "R, communication rounds; clients also train before the first", minimum=1)
    participation: float = setting(
        1.0, "share of the clients that take part in a round: max(1, round(share · K)) of them", above=0, maximum=1
    )
    max_weight: float = setting(
        1.0,
        "f, largest share one client may have of all weight in an exchange: N_k counts as min(N_k, c), c the largest "
        "whole number with c ≤ f · Σ min(N_j, c); with fewer than 1/f messages all weigh the same; 1: no limit",
        above=0,
        maximum=1,
    )
    max_scale: float = setting(
        0.0,
        "largest scale of a message, in multiples of the median over all senders; the server refuses a larger one and "
        "names its sender; needs 3 messages; 0: no limit",
        minimum=0,
    )
    weights: str = setting(
        "samples",
        "what a client counts for where the server takes a mean or a vote: its training samples N_k, or all the same",
        choices=("samples", "uniform"),
    )
    local_steps: int = setting(20, "E, steps of a client in a round", minimum=1)
    local_epochs: float = setting(
        0.0,
        "passes of a client over its own samples in a round instead of E steps: ⌈epochs · N_k / batch⌉ steps; 0: E",
        minimum=0,
    )
    batch_size: int = setting(64, "samples of one step", minimum=1)
    learning_rate: float = setting(0.1, "η, learning rate of the local steps", above=0)
    momentum: float = setting(
        0.0, "momentum of the local steps; 0: none; adamw has moments of its own instead", minimum=0, below=1
    )
    weight_decay: float = setting(1e-4, "μ, weight decay, for every method", minimum=0)
    optimizer: str = setting(
        "sgd",
        "the local steps; adamw (β 0.9 and 0.999, ε 1e-8, decay decoupled) needs a learning rate of about 0.001",
        choices=("sgd", "adamw"),
    )
    clip: float = setting(
        0.0, "largest norm of a client's gradient, the method's pull included, decay not; 0: none", minimum=0
    )
    schedule: str = setting(
        "constant",
        "η over the rounds: constant; half a cosine down to train.floor at the last round, so train.rounds cannot "
        "change on resume; or times train.decay every train.decay_every rounds",
        choices=("constant", "cosine", "step"),
    )
    floor: float = setting(
        0.1,
        "of the schedule cosine: the share of η at which it ends; 0 ends at nearly 0, where the last local steps no "
        "longer personalise the model",
        minimum=0,
        maximum=1,
    )
    warmup: int = setting(0, "rounds in which η rises in a straight line, before its schedule; 0: none", minimum=0)
    decay: float = setting(0.1, "of the schedule step: what η is multiplied by", above=0, maximum=1)
    decay_every: int = setting(50, "of the schedule step: after how many rounds", minimum=1)
    loss: str = setting(
        "cross-entropy", "what local steps minimise, unless a loss is given in Python",
        choices=("cross-entropy", CUSTOM),
    )  # fmt: skip
    metric: str = setting(
        "auto",
        "what is measured, unless a metric is given in Python: accuracy, or minus the loss where there are no classes",
        choices=("auto", CUSTOM),
    )
    augment: str = setting(
        "none", "how training images are changed at random: moved by up to 4 pixels, mirrored, or both",
        choices=("none", "crop", "flip", "crop+flip"),
    )  # fmt: skip
    patience: int = setting(
        0,
        "stop when V-acc has not risen for so many evaluations; needs data.validation; the best round so far is kept "
        "(best.pt); 0: never",
        minimum=0,
    )

    def steps_of(self, samples: int) -> int:
        """Local steps of a phase, of a client with so many training samples."""
        return steps_of(samples, self.batch_size, self.local_steps, self.local_epochs)

    @property
    def rates(self) -> Schedule:
        """The schedule, with only the settings that its shape uses."""
        if self.schedule == "cosine":
            return Schedule("cosine", self.warmup, rounds=self.rounds, floor=self.floor)
        if self.schedule == "step":
            return Schedule("step", self.warmup, decay=self.decay, decay_every=self.decay_every)
        return Schedule(self.schedule, self.warmup)
