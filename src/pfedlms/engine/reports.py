"""What a round measures: bytes and accuracies."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from math import exp, inf

Counts = dict[int, tuple[float, float, int]]
"""By client: correct predictions (or summed scores), summed loss, and samples."""


@dataclass
class Traffic:
    """Bytes that were sent, all clients together."""

    up_payload: int = 0
    up_framing: int = 0
    down_payload: int = 0
    down_framing: int = 0
    catch_up: int = 0
    """Bytes for catching up, sent to clients that had missed answers; framing included."""

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(*(a + b for a, b in zip(self.as_tuple(), other.as_tuple(), strict=True)))

    def as_tuple(self) -> tuple[int, int, int, int, int]:
        return (self.up_payload, self.up_framing, self.down_payload, self.down_framing, self.catch_up)

    @property
    def total(self) -> int:
        return sum(self.as_tuple())


@dataclass(frozen=True)
class Evaluation:
    """Clients' models on their own samples of one split, by default the test samples."""

    ids: tuple[int, ...]
    """Clients that have such samples."""
    correct: tuple[float, ...]
    """Whole numbers; with a custom metric, its sums."""
    tested: tuple[int, ...]
    loss: float
    """Mean over all samples."""
    validation: Evaluation | None = None
    """The same models on validation samples, if any client has some."""
    percent: bool = True
    """Whether it is accuracy in percent; a custom metric is a plain mean over samples."""

    @property
    def accuracy(self) -> float:
        """Σ correct / Σ samples, in percent."""
        return self._unit * sum(self.correct) / sum(self.tested)

    @property
    def perplexity(self) -> float:
        """exp of the mean loss per sample, or of windows of tokens per token."""
        return exp(self.loss) if self.loss < 700 else inf

    @property
    def per_client(self) -> list[float]:
        return [self._unit * right / total for right, total in zip(self.correct, self.tested, strict=True)]

    @property
    def _unit(self) -> float:
        return 100.0 if self.percent else 1.0


@dataclass
class RoundReport:
    """What one round measured."""

    participants: tuple[int, ...]
    """Clients that trained in it."""
    loss: float
    """Task loss of the local steps: mean over the participants, weighted by their samples."""
    traffic: Traffic
    rejected: int
    """Clients' messages that did not arrive or were refused."""
    astray: int
    """Clients' messages that were not counted because their senders track another model than the server."""
    unheard: int
    """Answers that did not arrive or were refused."""
    global_evaluation: Evaluation | None = None
    evaluated: bool = False
    """Whether this round was to be measured."""
    left_out: dict[int, str] = field(default_factory=dict)
    """Clients excluded from an exchange or a phase since the last evaluation, and why."""
    limited: tuple[int, ...] = ()
    """Clients whose weight was limited since then."""


def mean_loss(found: Iterable[tuple[int, float]]) -> float:
    """Mean of clients' losses weighted by their samples: (N_k, loss) in the order of ids. Added one after another, so
    that the sum is the same for every grouping."""
    total, weight = 0.0, 0
    for samples, loss in found:
        total += samples * loss
        weight += samples
    return total / weight


def summed(found: Mapping[int, tuple[float, float, int]], percent: bool) -> Evaluation | None:
    """The sum of all clients' counts; None if no client has samples."""
    ids = tuple(client for client in sorted(found) if found[client][2])
    if not ids:
        return None
    loss = 0.0
    for client in ids:
        loss += found[client][1]
    correct, tested = (tuple(found[client][part] for client in ids) for part in (0, 2))
    return Evaluation(ids, correct, tested, loss / sum(tested), percent=percent)  # type: ignore[arg-type]


def evaluation(tested: Counts, validated: Counts, percent: bool) -> Evaluation | None:
    """Clients' own models on their test and validation splits."""
    found = summed(tested, percent)
    return found and replace(found, validation=summed(validated, percent))
