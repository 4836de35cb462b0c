"""Where a server stands between two trips: all it needs to make the next requests, byte for byte."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any

from pfedlms.cohort import Tensors
from pfedlms.engine.reports import Traffic

Counts = dict[int, tuple[float, float, int]]
"""Correct predictions (or summed scores), summed loss and samples of clients."""
TO_START, TO_GATHER = -2, -1
"""Stages before the exchanges: nobody has trained yet; nobody was asked for messages of this round yet."""


@dataclass(frozen=True)
class Standing:
    """Frozen, so that a trip that fails leaves it as it was."""

    trip: int = 0
    round: int = 0
    """Rounds that are played."""
    stage: int = TO_START
    """The exchange whose messages are here."""
    server: Tensors = field(default_factory=dict)
    """The method's state before the round now played."""
    current: Tensors = field(default_factory=dict)
    """After the exchanges of this round so far."""
    before: Tensors = field(default_factory=dict)
    """Before the round played last."""
    said: tuple[bytes, ...] = ()
    """Answers of this round so far."""
    last: tuple[bytes, ...] = ()
    """Answers of the round played last."""
    answers: dict[str, Any] = field(default_factory=dict)
    """What is kept for clients that come back, `Answers.state`."""
    heard: dict[int, int] = field(default_factory=dict)
    """How many answers clients know."""
    astray: tuple[int, ...] = ()
    """Who was found in this round to track another model."""
    asked: tuple[int, ...] = ()
    """Who was to send in the exchange that is next."""
    inbox: dict[int, bytes] = field(default_factory=dict)
    """What they sent: frames, each checked."""
    claims: dict[int, int] = field(default_factory=dict)
    """N_k as clients named it in this round."""
    samples: dict[int, int] = field(default_factory=dict)
    """N_k as clients named it last, in any round."""
    losses: dict[int, tuple[int, float]] = field(default_factory=dict)
    """N_k and loss of those who trained last."""
    tested: Counts = field(default_factory=dict)
    validated: Counts = field(default_factory=dict)
    shared: Counts = field(default_factory=dict)
    traffic: Traffic = field(default_factory=Traffic)
    """Of the round now played."""
    ahead: Traffic = field(default_factory=Traffic)
    """What belongs to the round after it already."""
    left_out: dict[int, str] = field(default_factory=dict)
    """Who was left out of something since the last evaluation, and why."""
    left_out_next: dict[int, str] = field(default_factory=dict)
    """Who will be left out of the first exchange of the next round."""
    weakened: tuple[int, ...] = ()
    """Who weighed less than it claimed since then."""
    rejected: int = 0
    """Replies that did not come or were refused in this round."""
    rounds: int = 0
    evaluate_every: int = 1
    """What the next trip goes by: a run that is prolonged sends again what it had sent before."""
    carried: tuple[int, int] = (0, 0)
    """Bytes of all envelopes of the run, to nodes and from them."""

    def state(self) -> dict[str, Any]:
        """As a checkpoint keeps it."""
        kept = {each.name: getattr(self, each.name) for each in fields(self)}
        for name in ("server", "current", "before"):
            kept[name] = {key: value.cpu() for key, value in kept[name].items()}
        return {**kept, "traffic": list(self.traffic.as_tuple()), "ahead": list(self.ahead.as_tuple())}

    @classmethod
    def of(cls, state: dict[str, Any], like: Tensors) -> Standing:
        """Of `state()`, with tensors where those of `like` are."""
        kept = cls(**{each.name: state[each.name] for each in fields(cls)})
        placed = {
            name: {key: value.to(like[key].device) for key, value in getattr(kept, name).items()}
            for name in ("server", "current", "before")
        }
        return replace(kept, **placed, traffic=Traffic(*state["traffic"]), ahead=Traffic(*state["ahead"]))  # type: ignore[arg-type]
