"""The transport to nodes: one envelope to each client of a trip, and the server's checks of the replies.

A node that does not reply in time, refuses, or replies with anything other than it was asked for is excluded from this
round. The server takes a reply completely or not at all. Limits that follow from the request are checked before a reply
is parsed. Valid reports that changed as no other client's did are warned of, and believed: nobody else can check them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import log10
from statistics import median
from typing import NamedTuple, Protocol

from pfedlms.deploy.envelope import (
    ENVELOPE_BYTES,
    LONGEST_TEXT,
    MEASURED,
    RECORD_BYTES,
    TRAINED,
    Envelope,
    Kind,
    Why,
    decode,
    read_measured,
    read_trained,
    reason,
)  # fmt: skip
from pfedlms.deploy.ground import Ground
from pfedlms.engine.transport import Code, Event, Flag, Inbox, Record, Request, Split
from pfedlms.errors import DecodeError, DigestError, OversizedError, RoundError, SenderError, WireError
from pfedlms.wire.frames import HEADER_BYTES

MOST_MEASURED = 10
"""Largest ratio of a client's evaluation samples to its training samples, where the server does not know its data."""
FEWEST, POINTS, FACTOR = 3, 60.0, 10.0
"""From so many clients on, a change of accuracy by so many points or of loss by this factor more than the median change
is warned of."""


class Transport(Protocol):
    """Delivers bytes."""

    def send(self, requests: dict[int, bytes], timeout: float) -> Mapping[int, bytes]:
        """Takes requests by client and returns replies by client, of those that replied within `timeout` seconds. A
        client without a reply is late, lost, or has not connected yet."""
        ...


class Nodes:
    """Carries requests of the server to nodes and checks their replies."""

    def __init__(self, ground: Ground, transport: Transport) -> None:
        self._ground, self._transport, self._timeout = ground, transport, ground.config.run.timeout
        self._percent, self._method = ground.parts.criterion.score is None, ground.terms.method
        self._messages = message_bytes(ground)
        self.counts: dict[tuple[int, int], int] = {}
        """The number of samples of each evaluation, by client and split; it stays the same in the whole run."""
        self._reported: dict[int, Reported] = {}
        """Reports of the last local steps."""

    def carry(self, requests: Sequence[Request], inbox: Inbox, kind: Kind = Kind.REQUEST) -> None:
        """See `engine.transport`."""
        by_client = _orders_by_client(requests)
        asked = {
            client: Envelope(kind, self._ground.run, client, inbox.round, inbox.trip, tuple(orders))
            for client, orders in sorted(by_client.items())
        }
        encoded = {client: envelope.encode() for client, envelope in asked.items()}
        replies = self._transport.send(dict(encoded), self._timeout) if encoded else {}
        reached = set(asked)
        for client, envelope in asked.items():
            try:
                if (data := replies.get(client)) is None:
                    raise WireError(f"no reply within {self._timeout:g} s")
                reply = check_reply(envelope, data, self._messages)
                # The transport could not reach the node, and says so: a node's own refusal has ANSWERS_KNOWN, too.
                if [each.code for each in reply.records] == [Code.REFUSED]:
                    reached.discard(client)
                for each in reply.records:
                    if each.code == Code.ANSWERS_KNOWN:
                        inbox.answers_known[client] = each.number
                self._take(envelope, reply, inbox)
            except WireError as error:
                why = str(error) if type(error) is WireError else f"{type(error).__name__}: {error}"
                inbox.failed[client] = why
                inbox.rejected += 1
                inbox.events.append(Event(inbox.round, client, "left_out", f"is left out: {why}"))
        self._warn_of_changes(inbox)
        self._count_down(requests, reached, inbox)
        inbox.carried = tuple(sum(len(each.get(client, b"")) for client in reached) for each in (encoded, replies))  # type: ignore[assignment]

    def _take(self, request: Envelope, reply: Envelope, inbox: Inbox) -> None:
        """Put a reply into the inbox, all of it or nothing: N_k must be the same in this reply, in earlier messages of
        this round and in a known partition, and the message must be valid."""
        client, about_last = request.client, self._method.about_last_steps
        frame, trained, counts = read_reply(request, reply, self._percent)
        expected = None if about_last else inbox.claims.get(client)  # their rounds are one trip
        if expected is None and self._ground.knows_samples:
            expected = self._ground.parts.data.samples[client]
        if trained is not None:
            if expected is not None and trained[0] != expected:
                raise DecodeError(f"samples: got {trained[0]}, expected {expected}, as before")
            expected = trained[0]
            self._check_counts(client, trained[0], counts)
        if frame is not None and inbox.aggregation is not None:
            if expected is not None:
                inbox.aggregation.claims[client] = expected
            inbox.aggregation.take(frame)
            inbox.count_up(inbox.requests[-1], len(frame) - HEADER_BYTES)
        if trained is not None:
            inbox.trained[client] = trained
        for split, found in counts.items():
            inbox.measured.setdefault(split, {})[client] = found

    def _check_counts(self, client: int, samples: int, counts: Mapping[Split, tuple[float, float, int]]) -> None:
        """The number of samples of an evaluation must be the one the server knows, else the one the client sent before,
        and not far above its training samples, because it is the weight of its accuracy."""
        data = self._ground.parts.data
        for split, (_, _, count) in counts.items():
            held = data.validation if split == Split.VALIDATION else data.test
            known = (
                len(held[client]) * data.positions if self._ground.knows_samples else self.counts.get((client, split))
            )
            if known is not None and count != known:
                raise DecodeError(f"measured: got {count} samples of {split.name.lower()}, expected {known} as before")
            if known is None and count > MOST_MEASURED * samples * data.positions:
                raise DecodeError(
                    f"measured: got {count} samples of {split.name.lower()}, expected at most {MOST_MEASURED} times "
                    f"the {samples} that the client trains on"
                )
        self.counts |= {(client, int(split)): count for split, (_, _, count) in counts.items()}

    def _warn_of_changes(self, inbox: Inbox) -> None:
        tested = inbox.measured.get(Split.TEST, {}) if self._percent else {}
        now = {
            client: Reported(*report, 100 * tested[client][0] / tested[client][2] if client in tested else None)
            for client, report in inbox.trained.items()
        }
        for client, text in unlike_others(self._reported, now).items():
            inbox.events.append(Event(inbox.round, client, "suspicious", f"reports {text}"))
        self._reported = now or self._reported

    def _count_down(self, requests: Sequence[Request], reached: set[int], inbox: Inbox) -> None:
        """Count bytes down. Nothing is sent to a client that no node has taken."""
        for request in requests:
            for missed in request.catch_up:
                inbox.count_catch_up(request, missed.orders, len(reached.intersection(missed.clients)))
            for order in request.orders:
                inbox.count_down(request, order, len(reached.intersection(request.clients)))


def _orders_by_client(requests: Sequence[Request]) -> dict[int, list[Record]]:
    """All orders of every client, in the order of requests."""
    work: dict[int, list[Record]] = {}
    for request in requests:
        for missed in request.catch_up:
            for client in missed.clients:
                work.setdefault(client, []).extend(missed.orders)
        for client in request.clients:
            work.setdefault(client, []).extend(request.orders)
    return work


def message_bytes(ground: Ground) -> list[int]:
    """Bytes of the largest frame that a client sends, by exchange."""
    return [HEADER_BYTES + each.up.max_bytes for each in ground.terms.method.exchanges]


def largest_reply(request: Envelope, messages: Sequence[int]) -> tuple[int, int]:
    """Bytes and records that a reply to this request may have; `messages` is as `message_bytes` returns it."""
    size, records = ENVELOPE_BYTES + RECORD_BYTES, 1  # ANSWERS_KNOWN
    for each in request.records:
        if each.code == Code.SEND:
            size += RECORD_BYTES + (messages[each.index] if each.index < len(messages) else 0)
            records += 1
        elif each.code == Code.TRAIN:
            counts = len(Split) * bool(each.flags & (Flag.PERSONAL | Flag.SHARED))
            size += RECORD_BYTES + TRAINED.size + counts * (RECORD_BYTES + MEASURED.size)
            records += 1 + counts
    refused = ENVELOPE_BYTES + 2 * RECORD_BYTES + LONGEST_TEXT
    return max(size, refused), max(records, 2)


def check_reply(request: Envelope, data: bytes, messages: Sequence[int]) -> Envelope:
    """The envelope of a reply to this request, its records unchecked; raises WireError if it is none."""
    size, records = largest_reply(request, messages)
    if len(data) > size:
        raise OversizedError(f"reply: got {len(data)} bytes, expected at most {size}, as follows from the request")
    reply = decode(data, records)
    if [each.code for each in reply.records].count(Code.ANSWERS_KNOWN) > 1:
        raise OversizedError("reply: got more than one ANSWERS_KNOWN")
    if reply.kind != Kind.REPLY:
        raise DecodeError("reply: got a request")
    if reply.run != request.run:
        raise DigestError(f"reply: got one of run {reply.run.hex()}, expected {request.run.hex()}")
    if reply.client != request.client:
        raise SenderError(f"reply: got one of client {reply.client}, expected {request.client}")
    if (reply.round, reply.trip) != (request.round, request.trip):
        if reply.records and (reply.records[0].code, reply.records[0].flags) == (Code.REFUSED, Why.BROKEN):
            raise WireError(f"refused, {reason(reply.records[0])}")  # the node could not read round and trip
        raise RoundError(
            f"reply: got one to round {reply.round + 1}, trip {reply.trip}, expected {request.round + 1}, "
            f"{request.trip}"
        )
    return reply


def read_reply(
    request: Envelope, reply: Envelope, percent: bool
) -> tuple[bytes | memoryview | None, tuple[int, float] | None, dict[Split, tuple[float, float, int]]]:
    """A node's message, N_k with the loss, and its measurements, if the reply has exactly what was asked for; else
    raises the matching WireError. The message itself is not decoded."""
    if reply.records and reply.records[0].code == Code.REFUSED:
        raise WireError(f"refused, {reason(reply.records[0])}")
    rest = [each for each in reply.records if each.code != Code.ANSWERS_KNOWN]
    frame, trained, counts = None, None, dict[Split, tuple[float, float, int]]()
    for order in request.records:
        if order.code not in (Code.SEND, Code.TRAIN):
            continue
        own = rest.pop(0) if rest else None
        if own is None or (own.code, own.number, own.index) != (order.code, order.number, order.index):
            raise DecodeError(f"reply: expected {order.code.name.lower()} {order.number}, got something else")
        if order.code == Code.SEND:
            frame = own.data
        else:
            trained = read_trained(own)
            while order.flags and rest and rest[0].code == Code.MEASURED:
                split, found = read_measured(rest.pop(0), percent)
                counts[split] = found
            if order.flags & Flag.PERSONAL and not counts.get(Split.TEST, (0, 0, 0))[2]:
                raise DecodeError("reply: got no measurement of the test split, expected one")
    if rest:
        raise DecodeError(f"reply: got {len(rest)} records that the server did not ask for")
    return frame, trained, counts


class Reported(NamedTuple):
    samples: int
    loss: float
    accuracy: float | None = None
    """In percent; None where it was not measured, or is another metric."""


def unlike_others(before: Mapping[int, Reported], now: Mapping[int, Reported]) -> dict[int, str]:
    """What changed from one report to the next as no other client's report did, by client."""
    pairs = {client: (before[client], now[client]) for client in sorted(before.keys() & now.keys())}
    losses = {k: log10(new.loss / old.loss) for k, (old, new) in pairs.items() if old.loss > 0 and new.loss > 0}
    points = {
        client: new.accuracy - old.accuracy
        for client, (old, new) in pairs.items()
        if old.accuracy is not None and new.accuracy is not None
    }
    found = dict[int, str]()
    for client, (old, new) in pairs.items():
        texts = [f"{new.samples} training samples, {old.samples} before"] * (old.samples != new.samples)
        if _is_unlike(client, losses, log10(FACTOR)):
            texts.append(f"a loss of {new.loss:.4g}, {old.loss:.4g} before")
        if _is_unlike(client, points, POINTS):
            texts.append(f"an accuracy of {new.accuracy:.1f} %, {old.accuracy:.1f} % before")
        found |= {client: " and ".join(texts)} if texts else {}
    return found


def _is_unlike(client: int, changes: Mapping[int, float], most: float) -> bool:
    enough = client in changes and len(changes) >= FEWEST
    return enough and abs(changes[client] - median(changes.values())) > most
