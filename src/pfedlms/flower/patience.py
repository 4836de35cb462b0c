"""A run goes on after rounds in which too few nodes answered."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pfedlms.errors import QuorumError


def persist(serve: Callable[[], Any], attempts: int, say: Callable[[str], None]) -> None:
    """Call `serve` until it ends; QuorumError if the same round fails so many times."""
    left = attempts
    stuck: object = None
    while True:
        try:
            serve()
            return
        except QuorumError as error:
            played = (error.summary or {}).get("rounds")
            left = (left if played == stuck else attempts) - 1
            stuck = played
            if not left:
                raise
            say(f"pfedlms: {error}; {left} more attempts")
