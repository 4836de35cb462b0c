"""How many local steps a client takes in a phase, and how the learning rate changes over the phases of a run."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, cos, pi

SHAPES = ("constant", "cosine", "step")


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
