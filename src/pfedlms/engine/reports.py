"""What a round measures: bytes, accuracies and seconds; and whether the shared model gets worse."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from math import exp, inf
from statistics import median

import torch

Counts = dict[int, tuple[float, float, int]]
"""By client: correct predictions (or summed scores), summed loss, and samples."""


@dataclass
class Traffic:
    """Bytes that were sent, summed over all clients."""

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


@dataclass(frozen=True)
class Evaluation:
    """Clients' models on their own samples of one split, by default the test samples."""

    ids: tuple[int, ...]
    """Clients that have such samples."""
    correct: tuple[float, ...]
    """Correct predictions; with a custom metric, its sums."""
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


def mean_loss(samples_and_losses: Iterable[tuple[int, float]]) -> float:
    """The mean of clients' losses weighted by their samples, from (N_k, loss) in the order of ids. They are added one
    after another, so that the sum is the same for every grouping."""
    total, weight = 0.0, 0
    for samples, loss in samples_and_losses:
        total += samples * loss
        weight += samples
    return total / weight


def evaluation_of_counts(counts: Mapping[int, tuple[float, float, int]], percent: bool) -> Evaluation | None:
    """The evaluation of all clients that have samples; None if no client has any."""
    ids = tuple(client for client in sorted(counts) if counts[client][2])
    if not ids:
        return None
    loss = 0.0
    for client in ids:
        loss += counts[client][1]
    correct, tested = (tuple(counts[client][part] for client in ids) for part in (0, 2))
    return Evaluation(ids, correct, tested, loss / sum(tested), percent=percent)  # type: ignore[arg-type]


def personal_evaluation(tested: Counts, validated: Counts, percent: bool) -> Evaluation | None:
    """The evaluation of clients' own models on their test and validation splits."""
    evaluation = evaluation_of_counts(tested, percent)
    return evaluation and replace(evaluation, validation=evaluation_of_counts(validated, percent))


class Stopwatch:
    """Seconds by stage. On a GPU every stage waits for the device at its end, so a profiled run is a little slower.
    Without a device it measures nothing and does not wait."""

    def __init__(self, device: torch.device | None = None) -> None:
        self.seconds: dict[str, float] = {}
        self.device = device

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Add the time of the block to `name`. The time of a stage inside another counts for both."""
        began = time.perf_counter()
        try:
            yield
        finally:
            if self.device is not None:
                if self.device.type == "cuda":
                    torch.cuda.synchronize(self.device)
                self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - began


# --- a shared model that gets worse; the clients' own, which take local steps from it, may still look fine -----------

WINDOW = 5
"""Evaluations over which medians are taken, because one with unlucky participants says nothing."""
DROP = 0.8
"""A median of G-acc below this share of the best one so far means that the model gets worse."""
LAG = 0.5
"""A median of G-acc below this share of that of P-acc means a model of little use. This counts only once the model no
longer gets better: if clients hold few classes each, half of P-acc is not unusual in early rounds."""


def shared_model_problem(shared: Sequence[float], personal: Sequence[float]) -> str | None:
    """What is wrong with the shared model after the last evaluation, given G-acc and P-acc of all evaluations in
    percent; None if nothing is."""
    if len(shared) < 2 * WINDOW:
        return None
    medians = [median(shared[end - WINDOW : end]) for end in range(WINDOW, len(shared) + 1)]
    now, best, personal_now = medians[-1], max(medians), median(personal[-WINDOW:])
    if now < DROP * best and max(shared[-WINDOW:]) < best:
        return f"G-acc has fallen from {best:.1f} % to {now:.1f} % while P-acc is {personal_now:.1f} %"
    if len(shared) >= 4 * WINDOW and now < LAG * personal_now and now <= medians[-1 - WINDOW]:
        return f"G-acc stays at {now:.1f} % while P-acc is {personal_now:.1f} %"
    return None
