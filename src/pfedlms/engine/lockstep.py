"""Federations that play their rounds side by side, so that the local steps of all of them run as one stack.

Whoever plays is a generator: it yields the steps that are due, is sent back what was trained, and returns its result.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import TypeVar

from pfedlms.engine.local import Steps, Trained, train_together
from pfedlms.errors import DivergedError

Outcome = TypeVar("Outcome")
Playing = Generator[Steps, Trained, Outcome]


def alone(playing: Playing[Outcome]) -> Outcome:
    """Take every step at once; the result of one that plays alone."""
    (outcome,) = side_by_side([playing])
    if isinstance(outcome, DivergedError):
        raise outcome
    return outcome


def side_by_side(playing: Sequence[Playing[Outcome]]) -> list[Outcome | DivergedError]:
    """Results in the order given. One that diverges drops out and does not take the others with it; any other error
    ends all of them."""
    outcomes: dict[int, Outcome | DivergedError] = {}
    due: dict[int, Steps] = {}

    def go_on(number: int, trained: Trained | None) -> None:
        try:
            due[number] = next(playing[number]) if trained is None else playing[number].send(trained)
        except StopIteration as end:
            outcomes[number] = end.value
        except DivergedError as error:
            outcomes[number] = error

    try:
        for number in range(len(playing)):
            go_on(number, None)
        while due:
            numbers = sorted(due)
            results = train_together([due.pop(number) for number in numbers])
            for number, trained in zip(numbers, results, strict=True):
                go_on(number, trained)
    finally:
        for each in playing:
            each.close()
    return [outcomes[number] for number in range(len(playing))]
