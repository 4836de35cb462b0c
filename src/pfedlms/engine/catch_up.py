"""How a client that was absent for some rounds catches up, if its method tracks a model w.

The server sends whichever of these takes the fewest bytes:

    (a) the answers that the client missed, in order
    (b) the entries of w that changed since the w it has, with their new values
    (c) the entries of w that differ from w⁰, with their values, which also serves a client that lost its state
    (d) w

All of them lead to the same bits. (b), (c) and (d) also carry what the method tracks besides w, `Tracked.tracked`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
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
from pfedlms.wire.golomb import Count, Places

NEVER = -1  # stands for the round of an entry's last change, if it has never changed


@dataclass(frozen=True)
class AnswerLog:
    """What a server keeps for clients that come back.

    The latest answers by round, as many as take fewer bytes than the model. For every entry of w, the round of its last
    change. And a fingerprint of w after each of these rounds, by which a simulation sees that a client has this w.
    Fingerprints are kept only if clients are sampled: else a hash of w in every round costs more than it saves.
    """

    model_bytes: int
    frames: dict[int, bytes]
    changed: Tensor
    fingerprints: dict[int, int]

    def with_answer(self, round: int, answer: bytes, before: Tensor, after: Tensor) -> AnswerLog:
        """The log with the answer of a round; w `[dim]` is given before and after it."""
        frames, fingerprints = {**self.frames, round: answer}, dict(self.fingerprints)
        while sum(map(len, frames.values())) > self.model_bytes and len(frames) > 1:
            del frames[min(frames)]
        # Bits are compared, because a digest of w tells −0 from 0.
        moved = before.view(torch.int32) != after.view(torch.int32)
        if fingerprints:
            fingerprints[round] = fingerprints_of(after[None])[0]
            fingerprints = {n: own for n, own in fingerprints.items() if n < 0 or n >= min(frames) - 1}
        changed = self.changed.to(moved.device).masked_fill(moved, round)
        return AnswerLog(self.model_bytes, frames, changed, fingerprints)

    def missed(self, since: int, until: int) -> dict[int, bytes] | None:
        """The answers of rounds since … until − 1, or None if some of them are not kept."""
        rounds = range(since, until)
        return {number: self.frames[number] for number in rounds} if all(n in self.frames for n in rounds) else None

    def state(self) -> dict[str, Any]:
        """What a checkpoint has."""
        return {"frames": dict(self.frames), "changed": self.changed.cpu(), "fingerprints": dict(self.fingerprints)}


class CatchUp:
    """The messages (b), (c) and (d) of a method that tracks a model: the choice between them, and how a client applies
    them. Their kinds follow those of the one exchange: 3 is w, 5 changes since the client's w, 7 differences from w⁰.
    """

    def __init__(self, method: Method, digest: bytes) -> None:
        self._digest, self._initial = digest, method.task.initial
        self._sampled = method.task.participants < method.task.clients
        dim, kind = len(self._initial), 2 * len(method.exchanges) + 1
        tracked = method.tracked if isinstance(method, Tracked) else ()
        self._tracked = [part.name for part in tracked]
        parts = (Count("since"), Places("places", dim), MaskedRows("values", "places", dim, 1), *tracked)
        self.model = Message(kind, (Floats("model", dim), *tracked))
        self.changes, self.differences = Message(kind + 2, parts), Message(kind + 4, parts)
        self._on_host: _ModelOnHost | None = None
        self.messages = {message.kind: message for message in (self.model, self.changes, self.differences)}

    def new_log(self, state: dict[str, Any] | None = None) -> AnswerLog:
        """An empty log, or the one whose `state` a checkpoint has."""
        w = self._initial
        empty = {
            "frames": {},
            "changed": torch.full(w.shape, NEVER, dtype=torch.int32),
            "fingerprints": {-1: fingerprints_of(w[None])[0]} if self._sampled else {},
        }
        return AnswerLog(HEADER_BYTES + self.model.max_bytes, **(state or empty))

    def orders(self, since: int, round: int, log: AnswerLog, server: Tensors) -> tuple[Record, ...]:
        """What the server sends before round `round` to a client that knows the answers of all rounds below `since`, in
        the fewest bytes. A `since` below 0 means that the client has another model than its answers lead to. `server`
        is the server's state after the answers up to round − 1."""
        missed = log.missed(since, round) if since >= 0 else None
        best = sum(map(len, missed.values())) if missed is not None else None
        now, chosen = self._on_host, None
        if now is None or now.model is not server["model"] or now.log is not log:
            now = self._on_host = _ModelOnHost(server, log, self._initial, self._tracked)
        forms: list[tuple[Message, int, Callable[[], dict[str, Any]]]] = [
            (self.differences, now.count_differing, lambda: _entry_values(now.w, now.differs, 0)),
            (self.model, len(now.w), lambda: {"model": now.w}),
        ]
        if since >= 0:
            changes = now.changed_since(since), lambda: _entry_values(now.w, now.changed >= since, since)
            forms.insert(0, (self.changes, *changes))
        for message, entries, values_of in forms:
            # If the values alone take too many bytes, places need not be encoded.
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
        """The message that the kind in a frame names. If it names none of them, w, so that the reader refuses it."""
        return self.messages.get(data[5] if len(data) > 5 else -1, self.model)

    def receive(self, cohort: Cohort, message: Message, received: Received) -> Cohort:
        """Clients after one of these messages."""
        device = cohort.params.device
        values = {name: to_device(torch.from_numpy(value), device) for name, value in received.values.items()}
        if message is self.model:
            return self.adopt(cohort, values)
        base = cohort.state["model"] if message is self.changes else to_device(self._initial, device)
        return self.adopt(cohort, {**values, "model": torch.where(values["places"], values["values"][:, 0], base)})

    def adopt(self, cohort: Cohort, server: Tensors, rows: Sequence[int] | None = None) -> Cohort:
        """Clients, or some `rows` of them, with the w (`[dim]` or `[clients, dim]`) of `server` and what the method
        tracks besides it."""
        adopted, device = {}, cohort.params.device
        index = None if rows is None else to_device(torch.tensor(rows), device)
        for name in ("model", *self._tracked):
            value = to_device(server[name], device)
            expanded = value.expand(len(cohort.ids if rows is None else rows), *value.shape[-1:])
            adopted[name] = expanded.clone() if index is None else cohort.state[name].index_copy(0, index, expanded)
        return cohort.with_state(**adopted)


class _ModelOnHost:
    """The server's w on the host, and what is known of its entries; made once for all clients of a round."""

    def __init__(self, server: Tensors, log: AnswerLog, initial: Tensor, tracked: Sequence[str]) -> None:
        self.model, self.log = server["model"], log
        self.w: NDArray[np.float32] = self.model.cpu().numpy()
        self.tracked = {name: server[name].cpu().numpy() for name in tracked}
        self.changed: NDArray[np.int32] = log.changed.cpu().numpy()
        """The round in which each entry changed last."""
        self._changes = np.bincount(self.changed - NEVER)  # entries of round `NEVER`, `NEVER` + 1, …
        self.differs: NDArray[np.bool_] = self.w.view(np.int32) != initial.numpy().view(np.int32)
        """Which entries are not those of w⁰."""
        self.count_differing = int(np.count_nonzero(self.differs))

    def changed_since(self, round: int) -> int:
        """How many entries have changed in this round or later."""
        return int(self._changes[round - NEVER :].sum())


def _entry_values(w: NDArray[np.float32], places: NDArray[np.bool_], since: int) -> dict[str, Any]:
    """The values of a message with some entries of w."""
    return {"since": np.array([since]), "places": places, "values": w[:, None]}


def fingerprints_of(models: Tensor) -> list[int]:
    """A number for every model of `[clients, dim]`, the same for equal models and on every device:
    Σ bits(w_i) g_i modulo 2^64 with random odd g."""
    factors = _factors(models.shape[1], models.device)
    return torch.stack([(model.view(torch.int32) * factors).sum() for model in models.contiguous()]).tolist()


@lru_cache(maxsize=4)
def _factors(count: int, device: torch.device) -> Tensor:
    words = rng.words(rng.stream(0, "fingerprints"), count) | np.uint64(1)
    return to_device(torch.from_numpy(words.view(np.int64)), device)
