"""The warning that a shared model falls apart."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import pfedlms
from factories import task_of
from pfedlms.engine.reports import shared_model_problem
from pfedlms.methods.sketchvote import SketchVote, SketchVoteSettings

RISING = [10.0 * n for n in range(1, 9)]


@pytest.mark.parametrize(
    ("shared", "personal", "wrong"),
    [
        ([*RISING, *[80.0] * 8], 90.0, None),
        ([*RISING, 20.0, 80, 75, 20, 80, 82], 90.0, None),  # two unlucky evaluations
        ([*RISING, *[80.0] * 4, *[60.0] * 5], 90.0, "has fallen from 80.0 % to 60.0 %"),
        ([*RISING, *[80.0] * 4, *[60.0] * 5], 40.0, "has fallen from 80.0 % to 60.0 %"),
        ([*RISING, *[60.0] * 1], 90.0, None),
        ([float(n) for n in range(1, 20)], 90.0, None),  # low, but it still gets better
        ([30.0] * 20, 90.0, "stays at 30.0 %"),
        ([30.0] * 19, 90.0, None),  # too early to tell
        ([50.0] * 20, 90.0, None),
    ],
)
def test_the_rule_by_examples(shared: list[float], personal: float, wrong: str | None) -> None:
    found = shared_model_problem(shared, [personal] * len(shared))
    assert found is None if wrong is None else wrong in str(found)


@pytest.mark.parametrize(
    ("settings", "advice"),
    [
        ({"method": "fedavg", "server_step": 8.0}, "use sketchmean where few do"),
        ({"method": "sketchmean", "gain": 200.0}, r"raise method\.answer and method\.ratio"),
    ],
)
def test_a_run_warns_once(settings: dict[str, Any], advice: str) -> None:
    """With a far too long step w diverges, while local steps from it still learn something."""
    with pytest.warns(UserWarning, match=f"the shared model falls apart.*{advice}") as warned:
        pfedlms.run(rounds=24, seed=1, **settings)
    assert sum("falls apart" in str(each.message) for each in warned) == 1


def test_sketchvote_warns_if_few_clients_take_part() -> None:
    known = task_of(16, clients=20)
    with pytest.warns(UserWarning, match="3 of 20 clients take part .* use sketchmean"):
        SketchVote(replace(known, participants=3), SketchVoteSettings())
    SketchVote(replace(known, participants=4), SketchVoteSettings())
