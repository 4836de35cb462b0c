"""How a client of a method that tracks a model gets it after rounds in which it took no part, in the fewest bytes of

    (a) the answers it missed, in order
    (b) the entries of w that changed since the w it has, with their new values
    (c) the entries of w that differ from w⁰, with their values, which also serves a client that lost its state
    (d) w

All of them lead to the same bits. (b), (c) and (d) also carry what the method tracks besides w, `Tracked.tracked`.
"""

from __future__ import annotations

import hashlib
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pfedlms.backend import to_device
from pfedlms.cohort import Cohort, Tensors
from pfedlms.methods.contract import Exchange, Method, Tracked
from pfedlms.wire.fields import Floats, MaskedRows, Message
from pfedlms.wire.frames import HEADER_BYTES, SERVER, Received, frame
from pfedlms.wire.places import Count, Places

NEVER = -1  # the round in which an entry changed that never did


class Sent(NamedTuple):
    """A frame of the server's."""

    message: Message
    round: int
    data: bytes


class Answers:
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
        self.changed = torch.where(moved, round, self.changed.to(moved.device)).to(torch.int32)
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
        self._down = method.exchanges[0].down if method.exchanges else None
        dim, kind = len(self._initial), 2 * len(method.exchanges) + 1
        tracked = method.tracked if isinstance(method, Tracked) else ()
        self._tracked = [part.name for part in tracked]
        parts = (Count("since"), Places("places", dim), MaskedRows("values", "places", dim, 1), *tracked)
        self.model = Message(kind, (Floats("model", dim), *tracked))
        self.changes, self.differences = Message(kind + 2, parts), Message(kind + 4, parts)
        self.messages = {each.kind: each for each in (self.model, self.changes, self.differences)}

    def answers(self) -> Answers:
        """An empty log."""
        return Answers(self._initial, HEADER_BYTES + self.model.max_bytes, self._sampled)

    def frames(self, since: int, round: int, log: Answers, server: Tensors) -> list[Sent]:
        """What a client that knows the answers of rounds below `since` is sent before round `round`, in the fewest
        bytes; with `since` below 0 it is known to have another model than these lead to. `server` is the server's
        state that the answers up to round − 1 lead to."""
        assert self._down is not None
        missed = log.missed(since, round) if since >= 0 else None
        best = sum(map(len, missed.values())) if missed is not None else None
        w = server["model"].cpu().numpy()
        tracked = {name: server[name].cpu().numpy() for name in self._tracked}
        forms: list[tuple[Message, dict[str, Any]]] = []
        if since >= 0:
            forms.append((self.changes, _parts(w, log.changed.cpu().numpy() >= since, since)))
        forms.append((self.differences, _parts(w, w.view(np.int32) != self._initial.numpy().view(np.int32), 0)))
        forms.append((self.model, {"model": w}))
        chosen = None
        for message, values in forms:
            # Values alone may be too many: then places need not be coded to see it.
            least = HEADER_BYTES + 4 * (int(values["places"].sum()) if "places" in values else len(w))
            if best is None or least < best:
                size = HEADER_BYTES + message.size({**values, **tracked})
                if best is None or size < best:
                    best, chosen = size, (message, {**values, **tracked})
        if chosen is None:
            assert missed is not None
            return [Sent(self._down, number, data) for number, data in missed.items()]
        message, values = chosen
        return [Sent(message, round - 1, from_server(message, values, round - 1, self._digest))]

    def message_of(self, data: bytes | memoryview) -> Message:
        """Which of the messages a frame says to be; w where it is none of them, so that a reader says what is wrong."""
        return self.messages.get(data[5] if len(data) > 5 else -1, self.model)

    def taken_in(
        self, exchange: Exchange[Any], cohort: Cohort, message: Message, received: Received, number: int
    ) -> Cohort:
        """Clients after an answer of a round, or after one of the messages that stand for all answers up to it."""
        values = {name: torch.from_numpy(value) for name, value in received.values.items()}
        if message.kind not in self.messages:
            return exchange.client_receive(cohort, values, number)
        here = {name: to_device(value, cohort.params.device) for name, value in values.items()}
        if message is self.model:
            own = here["model"]
        else:
            base = cohort.state["model"] if message is self.changes else to_device(self._initial, cohort.params.device)
            own = torch.where(here["places"], here["values"][:, 0], base)
        return self.adopted(cohort, {**here, "model": own})

    def adopted(self, cohort: Cohort, server: Tensors) -> Cohort:
        """Clients with the w (`[dim]` or `[clients, dim]`) of `server` and what is tracked besides."""
        taken = {}
        for name in ("model", *self._tracked):
            value = to_device(server[name], cohort.params.device)
            taken[name] = value.expand(len(cohort.ids), *value.shape[-1:]).clone()
        return cohort.with_state(**taken)


def _parts(w: NDArray[np.float32], places: NDArray[np.bool_], since: int) -> dict[str, Any]:
    """Values of the messages of some entries of w."""
    return {"since": np.array([since]), "places": places, "values": w[:, None]}


def from_server(message: Message, arrays: dict[str, Any], number: int, digest: bytes) -> bytes:
    """A frame of the server's."""
    return bytes(frame(message, arrays, round=number, sender=SERVER, samples=0, digest=digest))


def fingerprints_of(models: Tensor) -> list[bytes]:
    """8 bytes of every model, `[clients, dim]`, by which equal ones are known."""
    return [hashlib.blake2b(own, digest_size=8).digest() for own in models.contiguous().cpu().numpy()]
