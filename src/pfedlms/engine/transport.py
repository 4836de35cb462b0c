"""What goes between the server and its clients, whatever carries it: requests down, an inbox up.

A transport has `carry(requests, inbox)`: it has all requests carried out, in order, and fills the inbox. Who waits for
whom is its business. `simulate.InProcess` is one, `deploy.nodes.Nodes` another.
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
    """Take in the server's answer of exchange `index` of round `number`."""
    MODEL = 1
    """Adopt the model that the answers up to that of round `number` lead to, sent whole or in parts."""
    SEND = 2
    """Send the message of exchange `index` of round `number`; in a reply, the message."""
    TRAIN = 3
    """Take the local steps of phase `number`; flags say what to measure. In a reply, N_k and the loss."""
    MEASURED = 4
    """What was measured with that."""
    ANSWERS_KNOWN = 5
    """How many answers the client has taken in, where its method tracks a model."""
    REFUSED = 6
    """Nothing was done; flags say why, the data in words."""


class Flag(IntEnum):
    FORCED = 1
    """Of MODEL: also for a client that believes to have it."""
    PERSONAL = 1
    """Of TRAIN: measure the trained model."""
    SHARED = 2
    """Of TRAIN: measure the shared model before it is trained."""


class Split(IntEnum):
    """What was measured."""

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
    """What brings clients up to date that have all taken in the same answers."""

    clients: tuple[int, ...]
    orders: tuple[Record, ...]
    fingerprint: Any = field(default=None, compare=False)
    """Of the model that the answers they know lead to."""
    leads_to: Tensors = field(default_factory=dict, compare=False)
    """What clients with that model have after these orders; a transport in the same process may take it from here."""


@dataclass(frozen=True)
class Request:
    """The same orders for some clients."""

    clients: tuple[int, ...]
    orders: tuple[Record, ...]
    catch_up: tuple[CatchUpOrders, ...] = ()
    """Before these orders, for clients that lack answers."""
    continues: bool = False
    """Whether these are the clients of the request before, in the middle of a round."""
    next_round: bool = False
    """Whether its bytes belong to the round after the one that is played now."""


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
    """What one trip brought back; a transport fills it. `Server.inbox` makes an empty one."""

    requests: tuple[Request, ...] = ()
    """What was asked for."""
    round: int = 0
    trip: int = 0
    claims: Mapping[int, int] = field(default_factory=dict)
    """N_k as clients have named it in this round before."""
    aggregation: Aggregation | None = None
    """Where messages are added up as they come in."""
    expected: int = 0
    """How many messages count as expected for the quorum."""
    trained: dict[int, tuple[int, float]] = field(default_factory=dict)
    """N_k and loss of the clients that trained."""
    measured: dict[Split, Counts] = field(default_factory=dict)
    answers_known: dict[int, int] = field(default_factory=dict)
    """How many answers clients have taken in."""
    failed: dict[int, str] = field(default_factory=dict)
    """Clients that did not do what they were asked for, and why; they are out of this round."""
    rejected: int = 0
    """Clients' messages that did not arrive or were refused."""
    unheard: int = 0
    """Answers that did not arrive or were refused."""
    traffic: Traffic = field(default_factory=Traffic)
    next_traffic: Traffic = field(default_factory=Traffic)
    """Of requests that belong to the next round already."""
    carried: tuple[int, int] = (0, 0)
    """Bytes that the transport carried to clients and from them, its own framing included."""
    events: list[Event] = field(default_factory=list)

    def count_up(self, request: Request, payload: int, messages: int = 1) -> None:
        """Messages of clients, `payload` bytes altogether."""
        traffic = self._traffic_of(request)
        traffic.up_payload += payload
        traffic.up_framing += messages * HEADER_BYTES

    def count_down(self, request: Request, order: Record, clients: int) -> None:
        """An answer to so many clients; other orders have no bytes."""
        if order.code != Code.ANSWER:
            return
        traffic = self._traffic_of(request)
        traffic.down_payload += clients * (len(order.data) - HEADER_BYTES)
        traffic.down_framing += clients * HEADER_BYTES

    def count_catch_up(self, request: Request, orders: Sequence[Record], clients: int) -> None:
        """What brings so many clients up to date, framing included."""
        self._traffic_of(request).catch_up += clients * sum(len(order.data) for order in orders)

    def _traffic_of(self, request: Request) -> Traffic:
        return self.next_traffic if request.next_round else self.traffic


def server_frame(message: Message, arrays: dict[str, Any], number: int, digest: bytes) -> bytes:
    """A frame of the server's."""
    return bytes(frame(message, arrays, round=number, sender=SERVER, samples=0, digest=digest))
