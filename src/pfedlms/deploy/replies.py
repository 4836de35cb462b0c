"""What a server believes of a node's reply."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from pfedlms.deploy.envelope import (
    Code,
    Envelope,
    Flag,
    Kind,
    Split,
    Why,
    decode,
    read_measured,
    read_trained,
    reason,
)
from pfedlms.deploy.ground import Ground
from pfedlms.errors import DecodeError, DigestError, RoundError, SenderError, WireError
from pfedlms.wire.frames import Intake


@dataclass(frozen=True)
class Reply:
    """What a node says that did what it was asked for."""

    frame: bytes | None = None
    """Its message."""
    samples: int = 0
    """N_k."""
    loss: float = 0.0
    """Of its local steps."""
    counts: Mapping[Split, tuple[float, float, int]] = field(default_factory=dict)
    """What it measured; see `read_measured`."""


def checked(request: Envelope, data: bytes) -> Envelope:
    """A reply to this request, not yet looked into; raises the WireError that says why it is none."""
    said = decode(data)
    if said.kind != Kind.REPLY:
        raise DecodeError("reply: got a request")
    if said.run != request.run:
        raise DigestError(f"reply: got one of run {said.run.hex()}, expected {request.run.hex()}")
    if said.client != request.client:
        raise SenderError(f"reply: got one of client {said.client}, expected {request.client}")
    if (said.round, said.trip) != (request.round, request.trip):
        if said.records and (said.records[0].code, said.records[0].flags) == (Code.REFUSED, Why.BROKEN):
            raise WireError(f"refused, {reason(said.records[0])}")  # a node that could not read which one it was
        raise RoundError(
            f"reply: got one to round {said.round + 1}, trip {said.trip}, expected {request.round + 1}, {request.trip}"
        )
    return said


def answers_heard(said: Envelope, before: int, most: int) -> int:
    """How many answers a node says to know; what cannot be is not believed."""
    found = [each.number for each in said.records if each.code == Code.HEARD]
    return found[0] if len(found) == 1 and found[0] <= most else before


def is_carriers(said: Envelope) -> bool:
    """Whether who carries messages says that the node could not be reached; what a node says has HEARD in it."""
    return [each.code for each in said.records] == [Code.REFUSED]


class Reader:
    """Takes a reply whole or not at all."""

    def __init__(self, ground: Ground) -> None:
        self._terms, self._percent = ground.terms, ground.parts.criterion.score is None
        self._known = ground.parts.data.samples if ground.knows_samples else None

    def read(self, request: Envelope, said: Envelope, claims: Mapping[int, int]) -> Reply:
        """What a node says, if it is all that it was asked for and nothing else; `claims` are the N_k that messages of
        this round named. Raises the WireError that says what is wrong with it."""
        if said.records and said.records[0].code == Code.REFUSED:
            raise WireError(f"refused, {reason(said.records[0])}")
        rest = [each for each in said.records if each.code != Code.HEARD]
        reply = Reply()
        for each in request.records:
            if each.code not in (Code.SEND, Code.TRAIN):
                continue
            own = rest.pop(0) if rest else None
            if own is None or (own.code, own.number, own.index) != (each.code, each.number, each.index):
                raise DecodeError(f"reply: expected {each.code.name.lower()} {each.number}, got something else")
            if each.code == Code.SEND:
                message = self._terms.method.exchanges[each.index].up
                intake = Intake(message, self._terms.digest, each.number, (request.client,))
                samples = intake.accept(own.data).samples
                reply = replace(reply, frame=bytes(own.data))
            else:
                samples, loss = read_trained(own)
                counts = {}
                while rest and rest[0].code == Code.MEASURED:
                    split, found = read_measured(rest.pop(0), self._percent)
                    counts[split] = found
                _check_asked(each.flags, counts)
                reply = replace(reply, loss=loss, counts=counts)
            self._check_claim(request.client, samples, reply.samples, claims)
            reply = replace(reply, samples=samples)
        if rest:
            raise DecodeError(f"reply: got {len(rest)} records that nobody asked for")
        return reply

    def _check_claim(self, client: int, samples: int, before: int, claims: Mapping[int, int]) -> None:
        """N_k must be what this reply, a message of this round or the deal said before."""
        expected = before or None
        if expected is None and not self._terms.method.about_last_steps:  # whose rounds are one trip
            expected = claims.get(client)
        if expected is None and self._known is not None:
            expected = self._known[client]
        if expected is not None and samples != expected:
            raise DecodeError(f"samples: got {samples}, expected {expected}, as was said before")


def _check_asked(flags: int, counts: Mapping[Split, tuple[float, float, int]]) -> None:
    """Whether this was to be measured, and was."""
    personal, shared = bool(flags & Flag.PERSONAL), bool(flags & Flag.SHARED)
    asked = [Split.TEST, Split.VALIDATION] * personal + [Split.SHARED] * shared
    tested = counts[Split.TEST][2] if Split.TEST in counts else 0
    if not set(counts) <= set(asked) or (personal and not tested):
        raise DecodeError(
            f"reply: got measurements of {', '.join(each.name.lower() for each in counts) or 'nothing'}, expected "
            f"{', '.join(each.name.lower() for each in asked) or 'none'}"
        )
