"""Whether a shared model falls apart while the clients' own, which take local steps from it, still look fine."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

WINDOW = 5
"""Evaluations of which the median is looked at: one with unlucky participants says nothing."""
DROP = 0.8
"""A median below this share of the best one so far is a model that gets worse."""
LAG = 0.5
"""A median below this share of that of P-acc is a model of little use. (Where clients hold few classes each, half of
P-acc is nothing unusual early on: so only once the model no longer gets better.)"""


def falls_apart(shared: Sequence[float], personal: Sequence[float]) -> str | None:
    """What is wrong with the shared model after the last of some evaluations, by G-acc and P-acc in percent of all of
    them; None if nothing is."""
    if len(shared) < 2 * WINDOW:
        return None
    medians = [median(shared[end - WINDOW : end]) for end in range(WINDOW, len(shared) + 1)]
    now, best, own = medians[-1], max(medians), median(personal[-WINDOW:])
    if now < DROP * best:
        return f"G-acc has fallen from {best:.1f} % to {now:.1f} % while P-acc is {own:.1f} %"
    if now < LAG * own and now <= medians[-1 - WINDOW]:
        return f"G-acc stays at {now:.1f} % while P-acc is {own:.1f} %"
    return None
