"""Reports that are valid but changed as no other client's did. The server warns of them and names the client; it
believes them all the same, because nobody else can check them."""

from __future__ import annotations

from collections.abc import Mapping
from math import log10
from statistics import median
from typing import NamedTuple

FEWEST = 3
"""Clients that are needed to say what the others' reports did."""
POINTS = 60.0
"""Largest difference between a client's change of accuracy and the median change, in points."""
FACTOR = 10.0
"""Largest ratio between a client's change of loss and the median change."""


class Reported(NamedTuple):
    samples: int
    loss: float
    accuracy: float | None = None
    """In percent; None where it was not measured, or is another metric."""


def suspicious(before: Mapping[int, Reported], now: Mapping[int, Reported]) -> dict[int, str]:
    """What changed, by client, from one report to the next."""
    found = dict[int, list[str]]()
    pairs = {client: (before[client], now[client]) for client in sorted(before.keys() & now.keys())}
    losses, points = dict[int, float](), dict[int, float]()
    for client, (old, new) in pairs.items():
        if old.samples != new.samples:
            found.setdefault(client, []).append(f"{new.samples} training samples, {old.samples} before")
        if old.loss > 0 and new.loss > 0:
            losses[client] = log10(new.loss / old.loss)
        if old.accuracy is not None and new.accuracy is not None:
            points[client] = new.accuracy - old.accuracy
    for client in _unlike_others(losses, log10(FACTOR)):
        old, new = pairs[client]
        found.setdefault(client, []).append(f"a loss of {new.loss:.4g}, {old.loss:.4g} before")
    for client in _unlike_others(points, POINTS):
        old, new = pairs[client]
        found.setdefault(client, []).append(f"an accuracy of {new.accuracy:.1f} %, {old.accuracy:.1f} % before")
    return {client: " and ".join(texts) for client, texts in sorted(found.items())}


def _unlike_others(changes: Mapping[int, float], most: float) -> list[int]:
    if len(changes) < FEWEST:
        return []
    middle = median(changes.values())
    return [client for client, change in changes.items() if abs(change - middle) > most]
