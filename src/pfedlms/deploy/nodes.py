"""The transport to nodes: one envelope to each client of a trip, and the server's checks of the replies.

A node is excluded from the round if it does not reply in time, refuses, or replies with anything that it was not asked
for. The server accepts a reply completely or not at all. It checks the limits that follow from the request before it
parses a reply. A valid report that changed as no other client's report did causes a warning only: the server cannot
check it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import log10
from statistics import median
from typing import NamedTuple, Protocol

from pfedlms.deploy.envelope import Envelope, Kind, check_reply, read_reply
from pfedlms.deploy.run_setup import RunSetup
from pfedlms.engine.transport import Code, Event, Inbox, Record, Request, Split
from pfedlms.errors import DecodeError, WireError, printable
from pfedlms.wire.frames import HEADER_BYTES

MAX_EVALUATION_RATIO = 10
"""Largest ratio of a client's evaluation samples to its training samples, if the server does not know its data."""
MIN_CLIENTS_TO_COMPARE = 3
"""With fewer clients, their changes are not compared."""
UNUSUAL_POINTS, UNUSUAL_FACTOR = 60.0, 10.0
"""How far a client's change of accuracy (in points) or of loss (as a factor) may be from the median change of all."""


class Transport(Protocol):
    """Delivers requests to nodes."""

    def send(self, requests: dict[int, bytes], timeout: float) -> Mapping[int, bytes | str]:
        """Send the requests, which are given by client, and return the replies that came within `timeout` seconds, by
        client; a text in place of a reply says why there is none and that the client was not reached."""
        ...


class Nodes:
    """Sends the server's requests to nodes and checks their replies."""

    def __init__(self, setup: RunSetup, transport: Transport) -> None:
        self._setup, self._transport, self._timeout = setup, transport, setup.config.run.timeout
        self._percent, self._method = setup.parts.criterion.score is None, setup.terms.method
        self._messages = message_bytes(setup)
        self.counts: dict[tuple[int, int], int] = {}
        """Evaluation samples by client and split. A client must report the same number in the whole run."""
        self._reports: dict[int, Report] = {}
        """The clients' reports on their last local steps."""

    def carry(self, requests: Sequence[Request], inbox: Inbox, kind: Kind = Kind.REQUEST) -> None:
        """See `engine.transport`."""
        envelopes = {
            client: Envelope(kind, self._setup.run, client, inbox.round, inbox.trip, tuple(orders))
            for client, orders in sorted(_orders_by_client(requests).items())
        }
        encoded = {client: envelope.encode() for client, envelope in envelopes.items()}
        replies = self._transport.send(dict(encoded), self._timeout) if encoded else {}
        reached = set(envelopes)
        for client, envelope in envelopes.items():
            try:
                if (data := replies.get(client)) is None:
                    raise WireError(f"no reply within {self._timeout:g} s")
                if isinstance(data, str):
                    reached.discard(client)
                    raise WireError(f"no reply: {printable(data)}")
                reply = check_reply(envelope, data, self._messages)
                for record in reply.records:
                    if record.code == Code.ANSWERS_KNOWN:
                        inbox.answers_known[client] = record.number
                self._accept(envelope, reply, inbox)
            except WireError as error:
                why = str(error) if type(error) is WireError else f"{type(error).__name__}: {error}"
                inbox.failed[client] = why
                inbox.rejected += 1
                inbox.events.append(Event(inbox.round, client, "left_out", f"is left out: {why}"))
        self._warn_of_changes(inbox)
        self._count_down(requests, reached, inbox)
        down, up = (sum(len(data.get(client, b"")) for client in reached) for data in (encoded, replies))
        inbox.carried = down, up

    def _accept(self, request: Envelope, reply: Envelope, inbox: Inbox) -> None:
        """Put a reply into the inbox, or raise WireError. The message must be valid, and N_k the same in the whole
        reply, in earlier messages of the round and, if the server knows it, in the partition."""
        client, about_last = request.client, self._method.about_last_steps
        frame, trained, counts = read_reply(request, reply, self._percent)
        expected = None if about_last else inbox.claims.get(client)  # with such messages, a round is one trip
        if expected is None and self._setup.knows_samples:
            expected = self._setup.parts.data.samples[client]
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
        for split, count in counts.items():
            inbox.measured.setdefault(split, {})[client] = count

    def _check_counts(self, client: int, samples: int, counts: Mapping[Split, tuple[float, float, int]]) -> None:
        """Check the numbers of evaluation samples, which are the weights of the client's accuracies. They must be those
        that the server knows or that the client sent before; a first number must not be far above N_k."""
        data = self._setup.parts.data
        for split, (_, _, count) in counts.items():
            known = self.counts.get((client, split))
            if self._setup.knows_samples:
                indices = data.validation if split == Split.VALIDATION else data.test
                known = len(indices[client]) * data.positions
            most = MAX_EVALUATION_RATIO * samples * data.positions
            if count > most if known is None else count != known:
                expected = f"at most {most}" if known is None else f"{known} as before"
                raise DecodeError(f"measured: got {count} samples of {split.name.lower()}, expected {expected}")
        self.counts |= {(client, int(split)): count for split, (_, _, count) in counts.items()}

    def _warn_of_changes(self, inbox: Inbox) -> None:
        tested = inbox.measured.get(Split.TEST, {}) if self._percent else {}
        reports = {
            client: Report(*report, 100 * tested[client][0] / tested[client][2] if client in tested else None)
            for client, report in inbox.trained.items()
        }
        for client, text in unusual_changes(self._reports, reports).items():
            inbox.events.append(Event(inbox.round, client, "suspicious", f"reports {text}"))
        self._reports = reports or self._reports

    def _count_down(self, requests: Sequence[Request], reached: set[int], inbox: Inbox) -> None:
        """Count the bytes sent to the clients that were reached."""
        for request in requests:
            for missed in request.catch_up:
                inbox.count_catch_up(request, missed.orders, len(reached.intersection(missed.clients)))
            for order in request.orders:
                inbox.count_down(request, order, len(reached.intersection(request.clients)))


def _orders_by_client(requests: Sequence[Request]) -> dict[int, list[Record]]:
    """All orders of each client, in the order of the requests."""
    by_client: dict[int, list[Record]] = {}
    for request in requests:
        for missed in request.catch_up:
            for client in missed.clients:
                by_client.setdefault(client, []).extend(missed.orders)
        for client in request.clients:
            by_client.setdefault(client, []).extend(request.orders)
    return by_client


def message_bytes(setup: RunSetup) -> list[int]:
    """Bytes of the largest frame that a client sends, by exchange."""
    return [HEADER_BYTES + exchange.up.max_bytes for exchange in setup.terms.method.exchanges]


class Report(NamedTuple):
    samples: int
    loss: float
    accuracy: float | None = None
    """In percent; None if it was not measured or the metric is another one."""


def unusual_changes(before: Mapping[int, Report], now: Mapping[int, Report]) -> dict[int, str]:
    """By client, what changed from its last report to this one as in no other client's reports."""
    losses, points, texts = dict[int, float](), dict[int, float](), dict[int, list[str]]()
    for client in sorted(before.keys() & now.keys()):
        old, new = before[client], now[client]
        if old.samples != new.samples:
            texts[client] = [f"{new.samples} training samples, {old.samples} before"]
        if old.loss > 0 and new.loss > 0:
            losses[client] = log10(new.loss / old.loss)
        if old.accuracy is not None and new.accuracy is not None:
            points[client] = new.accuracy - old.accuracy
    for client in _outliers(losses, log10(UNUSUAL_FACTOR)):
        text = f"a loss of {now[client].loss:.4g}, {before[client].loss:.4g} before"
        texts.setdefault(client, []).append(text)
    for client in _outliers(points, UNUSUAL_POINTS):
        text = f"an accuracy of {now[client].accuracy:.1f} %, {before[client].accuracy:.1f} % before"
        texts.setdefault(client, []).append(text)
    return {client: " and ".join(changes) for client, changes in texts.items()}


def _outliers(changes: Mapping[int, float], limit: float) -> list[int]:
    """The clients whose change is further than the limit from the median of all."""
    if len(changes) < MIN_CLIENTS_TO_COMPARE:
        return []
    middle = median(changes.values())
    return [client for client, change in changes.items() if abs(change - middle) > limit]
