"""What a round measures: bytes and accuracies."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Traffic:
    """Bytes that were sent, all clients together."""

    up_payload: int = 0
    up_framing: int = 0
    down_payload: int = 0
    down_framing: int = 0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(*(a + b for a, b in zip(self.as_tuple(), other.as_tuple(), strict=True)))

    def as_tuple(self) -> tuple[int, int, int, int]:
        return (self.up_payload, self.up_framing, self.down_payload, self.down_framing)

    @property
    def total(self) -> int:
        return sum(self.as_tuple())


@dataclass(frozen=True)
class Evaluation:
    """Every client's model on its own test samples."""

    correct: tuple[int, ...]
    tested: tuple[int, ...]
    loss: float

    @property
    def accuracy(self) -> float:
        """Σ correct / Σ test samples, in percent."""
        return 100.0 * sum(self.correct) / sum(self.tested)

    @property
    def per_client(self) -> list[float]:
        return [100.0 * right / total for right, total in zip(self.correct, self.tested, strict=True)]


@dataclass
class RoundReport:
    """What one round measured."""

    loss: float
    traffic: Traffic
    rejected: int
    global_evaluation: Evaluation | None = None
