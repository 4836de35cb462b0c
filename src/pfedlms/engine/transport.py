"""What the server and its clients exchange, whatever carries it: requests to clients, and an inbox of their replies.

A transport is an object with `carry(requests, inbox)`, which has all requests carried out, in order, and fills the
inbox. How it waits for clients is its own business. `simulate.InProcess` and `deploy.nodes.Nodes` are transports.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Literal

from pfedlms.cohort import Tensors
from pfedlms.engine.aggregation import Aggregation
from pfedlms.engine.reports import Counts, Traffic
from pfedlms.wire.fields import Message
from pfedlms.wire.frames import HEADER_BYTES, SERVER, frame


class Code(IntEnum):
    """What a client is to do (up to TRAIN), and what it reports."""

    ANSWER = 0
    """Apply the server's answer of exchange `index` of round `number`."""
    MODEL = 1
    """Adopt the model that the answers up to that of round `number` lead to; the data have all of it, or a part."""
    SEND = 2
    """Send the message of exchange `index` of round `number`. In a reply: that message."""
    TRAIN = 3
    """Take the local steps of phase `number`; flags say what to measure. In a reply: N_k and the loss."""
    MEASURED = 4
    """What was measured in TRAIN."""
    ANSWERS_KNOWN = 5
    """How many answers the client has applied, if its method tracks a model."""
    REFUSED = 6
    """The client did nothing; flags and data say why, the data in words."""


class Flag(IntEnum):
    """Options of an order."""

    FORCED = 1
    """With MODEL: also for a client that believes to have this model."""
    PERSONAL = 1
    """With TRAIN: measure the trained model."""
    SHARED = 2
    """With TRAIN: measure the shared model before it is trained."""


class Split(IntEnum):
    """What a measurement is of: the client's own model on one of its splits, or the shared model on its test split."""

    TEST = 0
    VALIDATION = 1
    SHARED = 2


@dataclass(frozen=True)
class Record:
    """An order to a client, or one thing it reports."""

    code: Code
    number: int = 0
    index: int = 0
    flags: int = 0
    data: bytes | memoryview = b""


@dataclass(frozen=True)
class CatchUpOrders:
    """Orders that bring clients up to date which all know the same answers."""

    clients: tuple[int, ...]
    orders: tuple[Record, ...]
    fingerprint: Any = field(default=None, compare=False)
    """Fingerprint of the model that the answers they know lead to."""
    leads_to: Tensors = field(default_factory=dict, compare=False)
    """What clients with that model have after these orders. A transport in the same process may copy it."""


@dataclass(frozen=True)
class Request:
    """Orders, the same for all clients of the request."""

    clients: tuple[int, ...]
    orders: tuple[Record, ...]
    catch_up: tuple[CatchUpOrders, ...] = ()
    """What clients that lack answers are sent before these orders."""
    continues: bool = False
    """Whether these are the clients of the request before, in the middle of a round."""
    next_round: bool = False
    """Whether its bytes count for the round after the one that is played now."""


@dataclass(frozen=True)
class Event:
    """Something about one client that a caller may want to log."""

    round: int
    client: int
    kind: Literal[
        "left_out", "message_refused", "answer_lost", "out_of_sync", "weight_limited", "too_large", "suspicious"
    ]
    text: str

    def __str__(self) -> str:
        return f"round {self.round + 1}: client {self.client} {self.text}"


@dataclass
class Inbox:
    """What one trip brought back. `Server.inbox` makes an empty one, and a transport fills it."""

    requests: tuple[Request, ...] = ()
    """What clients were asked for."""
    round: int = 0
    trip: int = 0
    claims: Mapping[int, int] = field(default_factory=dict)
    """N_k as clients stated it earlier in this round."""
    aggregation: Aggregation | None = None
    """Adds messages up as they arrive."""
    expected: int = 0
    """How many messages the quorum expects."""
    trained: dict[int, tuple[int, float]] = field(default_factory=dict)
    """N_k and loss of the clients that trained."""
    measured: dict[Split, Counts] = field(default_factory=dict)
    answers_known: dict[int, int] = field(default_factory=dict)
    """How many answers clients have applied."""
    failed: dict[int, str] = field(default_factory=dict)
    """Clients that did not do what they were asked for, and why; they are excluded from this round."""
    rejected: int = 0
    """Clients' messages that did not arrive or were refused."""
    unheard: int = 0
    """Answers that did not arrive or were refused."""
    traffic: Traffic = field(default_factory=Traffic)
    next_traffic: Traffic = field(default_factory=Traffic)
    """The traffic of requests that belong to the next round already."""
    carried: tuple[int, int] = (0, 0)
    """Bytes that the transport carried to clients and from clients, its own framing included."""
    events: list[Event] = field(default_factory=list)

    def refuse(self, round: int, client: int, error: Exception) -> None:
        """Count a client's message that was refused."""
        text = f"is left out of this exchange: {type(error).__name__}: {error}"
        self.rejected += 1
        self.events.append(Event(round, client, "message_refused", text))

    def count_up(self, request: Request, payload: int, messages: int = 1) -> None:
        """Count messages of clients with `payload` bytes altogether."""
        traffic = self._traffic_of(request)
        traffic.up_payload += payload
        traffic.up_framing += messages * HEADER_BYTES

    def count_down(self, request: Request, order: Record, clients: int) -> None:
        """Count an answer to so many clients; other orders have no bytes."""
        if order.code != Code.ANSWER:
            return
        traffic = self._traffic_of(request)
        traffic.down_payload += clients * (len(order.data) - HEADER_BYTES)
        traffic.down_framing += clients * HEADER_BYTES

    def count_catch_up(self, request: Request, orders: Sequence[Record], clients: int) -> None:
        """Count the orders that bring so many clients up to date, framing included."""
        self._traffic_of(request).catch_up += clients * sum(len(order.data) for order in orders)

    def _traffic_of(self, request: Request) -> Traffic:
        return self.next_traffic if request.next_round else self.traffic


def server_frame(message: Message, arrays: dict[str, Any], number: int, digest: bytes) -> bytes:
    """A frame with the server as its sender."""
    return bytes(frame(message, arrays, round=number, sender=SERVER, samples=0, digest=digest))
