"""Learning rates over the phases of a run, by hand."""

from __future__ import annotations

from math import sqrt
from typing import Any

import pytest

from pfedlms.train_settings import Schedule, TrainSettings


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        (Schedule(), [1, 1, 1, 1]),
        # Four phases, R = 3: the cosines of 0, 45, 90 and 135 degrees.
        (Schedule("cosine", rounds=3), [1, (1 + sqrt(0.5)) / 2, 0.5, (1 - sqrt(0.5)) / 2]),
        (Schedule("step", decay=0.5, decay_every=2), [1, 1, 0.5, 0.5, 0.25, 0.25, 0.125]),
        (Schedule("constant", warmup=3), [0.25, 0.5, 0.75, 1, 1]),
        # Three phases are left after the warm-up: 0, 60 and 120 degrees.
        (Schedule("cosine", warmup=2, rounds=4), [1 / 3, 2 / 3, 1, 0.75, 0.25]),
        (Schedule("step", warmup=1, decay=0.1, decay_every=1), [0.5, 1, 0.1, 0.01]),
        # A warm-up for the whole run reaches η in its last phase.
        (Schedule("cosine", warmup=2, rounds=2), [1 / 3, 2 / 3, 1]),
    ],
)
def test_the_factors_of_every_schedule_by_hand(schedule: Schedule, expected: list[float]) -> None:
    assert [schedule.factor(phase) for phase in range(len(expected))] == pytest.approx(expected, rel=1e-14)


def test_settings_that_a_schedule_does_not_use_make_no_difference() -> None:
    """A run of another length has the same schedule, unless it is a cosine."""

    def rates_of(**settings: Any) -> Schedule:
        return TrainSettings(**settings).rates

    assert rates_of(rounds=5, decay=0.3, decay_every=4) == Schedule()
    assert not rates_of(rounds=5).changes
    assert rates_of(schedule="step", rounds=5, decay=0.3) == rates_of(schedule="step", rounds=9, decay=0.3)
    assert rates_of(schedule="cosine", rounds=5, decay=0.3) == rates_of(schedule="cosine", rounds=5)
    assert rates_of(schedule="cosine", rounds=5) != rates_of(schedule="cosine", rounds=9)
    assert all(rates_of(**more).changes for more in ({"warmup": 1}, {"schedule": "step"}, {"schedule": "cosine"}))
