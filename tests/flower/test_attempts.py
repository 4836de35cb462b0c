"""Rounds in which too few nodes answer are tried again, each as often as is said."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pfedlms.deploy.coordinator import persist
from pfedlms.errors import QuorumError


def failing(played: Iterator[int]) -> None:
    """One call of `serve`: too few answer after so many rounds, or the run ends."""
    rounds = next(played, None)
    if rounds is not None:
        error = QuorumError("too few")
        error.summary = {"rounds": rounds}
        raise error


def test_a_round_that_was_played_gives_all_attempts_back() -> None:
    said: list[str] = []
    played = iter([0, 0, 3, 3, 7, 7])
    persist(lambda: failing(played), 3, said.append)
    assert [line[-15:] for line in said] == [f"{left} more attempts" for left in (2, 1, 2, 1, 2, 1)]


def test_the_same_round_is_not_tried_forever() -> None:
    said: list[str] = []
    played = iter([2, 5, 5, 5])
    with pytest.raises(QuorumError, match="too few"):
        persist(lambda: failing(played), 3, said.append)
    assert len(said) == 3
    assert next(played, "none left") == "none left"
