"""How a client of a method that tracks a model gets it after rounds in which it took no part, in the fewest bytes of

    (a) the answers it missed, in order
    (b) the entries of w that changed since the w it has, with their new values
    (c) the entries of w that differ from w⁰, with their values, which also serves a client that lost its state
    (d) w

All of them lead to the same bits. (b), (c) and (d) also carry what the method tracks besides w, `Tracked.tracked`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pfedlms import rng
from pfedlms.backend import to_device
from pfedlms.cohort import Cohort, Tensors
from pfedlms.engine.transport import Code, Flag, Record, server_frame
from pfedlms.methods.contract import Method, Tracked
from pfedlms.wire.fields import Floats, MaskedRows, Message
from pfedlms.wire.frames import HEADER_BYTES, Received
from pfedlms.wire.places import Count, Places

NEVER = -1  # the round in which an entry changed that never did


class AnswerLog:
    """What a server keeps for clients that come back: the latest answers by round, as many as are fewer bytes than the
    model; for every entry of w the round of its last change; and of the w after each of these rounds a fingerprint, by
    which a simulation sees that a client has it. Fingerprints are kept where clients are sampled: a hash of w in every
    round would cost more than the few replays it saves elsewhere."""

    def __init__(self, initial: Tensor, model_bytes: int, sampled: bool = True) -> None:
        self._model_bytes, self._sampled = model_bytes, sampled
        self.frames: dict[int, bytes] = {}
        self.changed = torch.full(initial.shape, NEVER, dtype=torch.int32)
        self.fingerprints = {-1: fingerprints_of(initial[None])[0]} if sampled else {}

    def add(self, round: int, answer: bytes, before: Tensor, after: Tensor) -> None:
        """The answer of a round, and w `[dim]` before and after it."""
        self.frames[round] = answer
        while sum(map(len, self.frames.values())) > self._model_bytes and len(self.frames) > 1:
            del self.frames[min(self.frames)]
        # Bits, because −0 is not 0 to a digest of w.
        moved = before.view(torch.int32) != after.view(torch.int32)
        self.changed = self.changed.to(moved.device).masked_fill(moved, round)
        if self._sampled:
            self.fingerprints[round] = fingerprints_of(after[None])[0]
        for number in [each for each in self.fingerprints if each + 1 < min(self.frames) and each >= 0]:
            del self.fingerprints[number]

    def missed(self, since: int, until: int) -> dict[int, bytes] | None:
        """The answers of rounds since … until − 1, or None where some of them are not kept."""
        numbers = range(since, until)
        return {number: self.frames[number] for number in numbers} if all(n in self.frames for n in numbers) else None

    def state(self) -> dict[str, Any]:
        """As a checkpoint keeps it."""
        return {"frames": dict(self.frames), "changed": self.changed.cpu(), "fingerprints": dict(self.fingerprints)}

    def load(self, state: dict[str, Any]) -> None:
        """Go on from `state()`."""
        self.frames, self.fingerprints = dict(state["frames"]), dict(state["fingerprints"])
        self.changed = state["changed"]


class CatchUp:
    """The messages (b), (c) and (d) of a method that tracks a model, the choice between them, and what a client makes
    of them. Kinds follow those of the one exchange: 3 is w, 5 changes since the client's w, 7 differences from w⁰."""

    def __init__(self, method: Method, digest: bytes) -> None:
        self._digest, self._initial = digest, method.task.initial
        self._sampled = method.task.participants < method.task.clients
        dim, kind = len(self._initial), 2 * len(method.exchanges) + 1
        tracked = method.tracked if isinstance(method, Tracked) else ()
        self._tracked = [part.name for part in tracked]
        parts = (Count("since"), Places("places", dim), MaskedRows("values", "places", dim, 1), *tracked)
        self.model = Message(kind, (Floats("model", dim), *tracked))
        self.changes, self.differences = Message(kind + 2, parts), Message(kind + 4, parts)
        self._last: _OnHost | None = None
        self.messages = {each.kind: each for each in (self.model, self.changes, self.differences)}

    def answers(self) -> AnswerLog:
        """An empty log."""
        return AnswerLog(self._initial, HEADER_BYTES + self.model.max_bytes, self._sampled)

    def orders(self, since: int, round: int, log: AnswerLog, server: Tensors) -> tuple[Record, ...]:
        """What a client that knows the answers of rounds below `since` is sent before round `round`, in the fewest
        bytes; with `since` below 0 it is known to have another model than these lead to. `server` is the server's
        state that the answers up to round − 1 lead to."""
        missed = log.missed(since, round) if since >= 0 else None
        best = sum(map(len, missed.values())) if missed is not None else None
        if self._last is None or self._last.model is not server["model"] or self._last.log_changed is not log.changed:
            tracked = {name: server[name].cpu().numpy() for name in self._tracked}
            self._last = _OnHost(server["model"], log.changed, self._initial, tracked)
        now, chosen = self._last, None
        forms: list[tuple[Message, int, Callable[[], dict[str, Any]]]] = [
            (self.differences, now.different, lambda: _parts(now.w, now.differs, 0)),
            (self.model, len(now.w), lambda: {"model": now.w}),
        ]
        if since >= 0:
            changes = now.changed_since(since), lambda: _parts(now.w, now.changed >= since, since)
            forms.insert(0, (self.changes, *changes))
        for message, entries, values_of in forms:
            # Values alone may be too many: then places need not be coded to see it.
            if best is None or HEADER_BYTES + 4 * entries < best:
                values = {**values_of(), **now.tracked}
                size = HEADER_BYTES + message.size(values)
                if best is None or size < best:
                    best, chosen = size, (message, values)
        if chosen is None:
            assert missed is not None
            return tuple(Record(Code.ANSWER, number, data=data) for number, data in missed.items())
        data = server_frame(*chosen, round - 1, self._digest)
        return (Record(Code.MODEL, round - 1, flags=Flag.FORCED * (since < 0), data=data),)

    def message_of(self, data: bytes | memoryview) -> Message:
        """Which of the messages a frame says to be; w where it is none of them, so that a reader says what is wrong."""
        return self.messages.get(data[5] if len(data) > 5 else -1, self.model)

    def taken_in(self, cohort: Cohort, message: Message, received: Received) -> Cohort:
        """Clients after one of these messages."""
        here = {name: to_device(torch.from_numpy(own), cohort.params.device) for name, own in received.values.items()}
        if message is self.model:
            return self.adopted(cohort, here)
        base = cohort.state["model"] if message is self.changes else to_device(self._initial, cohort.params.device)
        return self.adopted(cohort, {**here, "model": torch.where(here["places"], here["values"][:, 0], base)})

    def adopted(self, cohort: Cohort, server: Tensors, rows: Sequence[int] | None = None) -> Cohort:
        """Clients, or some `rows` of them, with the w (`[dim]` or `[clients, dim]`) of `server` and what is tracked
        besides."""
        taken, device = {}, cohort.params.device
        place = None if rows is None else to_device(torch.tensor(rows), device)
        for name in ("model", *self._tracked):
            value = to_device(server[name], device)
            here = value.expand(len(cohort.ids if rows is None else rows), *value.shape[-1:])
            taken[name] = here.clone() if place is None else cohort.state[name].index_copy(0, place, here)
        return cohort.with_state(**taken)


@dataclass(frozen=True, eq=False)
class _OnHost:
    """The server's w and what is known of its entries, on the host: once for all clients of a round."""

    model: Tensor
    log_changed: Tensor
    initial: Tensor
    tracked: dict[str, NDArray[Any]]

    @cached_property
    def w(self) -> NDArray[np.float32]:
        return self.model.cpu().numpy()

    @cached_property
    def changed(self) -> NDArray[np.int32]:
        """The round in which each entry changed last."""
        return self.log_changed.cpu().numpy()

    @cached_property
    def _changes(self) -> NDArray[np.int64]:
        """How many entries changed last in round `NEVER`, `NEVER` + 1, …"""
        return np.bincount(self.changed - NEVER)

    def changed_since(self, round: int) -> int:
        """How many entries have changed in this round or later."""
        return int(self._changes[round - NEVER :].sum())

    @cached_property
    def differs(self) -> NDArray[np.bool_]:
        """Which entries are not those of w⁰."""
        return np.not_equal(self.w.view(np.int32), self.initial.numpy().view(np.int32))

    @cached_property
    def different(self) -> int:
        return int(np.count_nonzero(self.differs))


def _parts(w: NDArray[np.float32], places: NDArray[np.bool_], since: int) -> dict[str, Any]:
    """Values of the messages of some entries of w."""
    return {"since": np.array([since]), "places": places, "values": w[:, None]}


def fingerprints_of(models: Tensor) -> list[int]:
    """A number of every model, `[clients, dim]`, by which equal ones are known: Σ bits(w_i) g_i modulo 2^64 with random
    odd g, which has the same value on every device."""
    factors = _factors(models.shape[1], models.device)
    return torch.stack([(own.view(torch.int32) * factors).sum() for own in models.contiguous()]).tolist()


@lru_cache(maxsize=4)
def _factors(count: int, device: torch.device) -> Tensor:
    words = rng.words(rng.stream(0, "fingerprints"), count) | np.uint64(1)
    return to_device(torch.from_numpy(words.view(np.int64)), device)
