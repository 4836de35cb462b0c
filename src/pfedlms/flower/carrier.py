"""Delivers requests to nodes that go offline and come back, and collects their replies."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from pfedlms.errors import printable

WHO, CHECK, REQUEST = "query.who", "query.check", "train.request"
"""Kinds of messages: which place does the node have, what does it run, and a request of a run."""
CHECK_RECORD = "pfedlms check: "
"""Start of a log line with a result of a check, as JSON: text and wrong."""
_REFRESH = 3.0
"""Seconds between looks at which nodes are online."""
_POLL, _LONGEST_POLL = 0.5, 5.0
"""Shortest and longest pause between looks for replies, in seconds."""
_SENDS = 3
"""How many times a request is sent, within its timeout, to a node that is silent."""
_ASK_AGAIN = 60.0
"""Seconds after which a node without a place is asked again."""
_GRACE = 30.0
"""Seconds that a trip waits for a node that went offline."""


@dataclass(frozen=True)
class Failure:
    """What came instead of a reply."""

    text: str
    gone: bool = False
    """Whether the node is offline."""


@dataclass
class _Trip:
    """The requests of one trip."""

    waiting: dict[int, bytes]
    """Requests without a reply, by client."""
    replies: dict[int, bytes | str] = field(default_factory=dict)
    sent: dict[str, int] = field(default_factory=dict)
    """Clients by message id."""
    last_sent: dict[int, tuple[float, str]] = field(default_factory=dict)
    """When and by which message the request was sent last, for clients whose nodes are online since then."""
    last_online: dict[int, float] = field(default_factory=dict)
    """By client: when its node was online last."""


class Carrier:
    """A `deploy.Transport` to nodes with places.

    A place is one client number. Places are pinned to node ids. For free ones the carrier asks each node that comes
    online which place it has, and the first that names one has it. Nodes execute a repeated request only once, so a
    request is sent again to a node that has come back, and to one that was silent for a third of the timeout.
    `grid` is an `apps.FlowerGrid`; `query` makes the question of a kind to a node.
    """

    def __init__(
        self, grid: Any, clients: int, pinned: dict[int, int], say: Callable[[str], None],
        query: Callable[[str, int], bytes],
    ) -> None:  # fmt: skip
        self._grid, self._clients, self._say, self._query = grid, clients, say, query
        self.places = dict(pinned)
        """Nodes by client."""
        self._online: set[int] = set()
        self._refreshed = -_REFRESH
        self._queries: dict[str, tuple[int, float]] = {}
        """Open questions for a place: node and latest time of its answer, by message id."""
        self._without_place: dict[int, float] = {}
        """Nodes that have no place, with the time at which that was found."""
        self._abandoned: set[str] = set()
        """Messages whose replies nobody waits for. The service keeps a message until its reply is pulled."""

    def wait_for_nodes(self, wait: float, timeout: float) -> set[int]:
        """Wait until every place has a node, or no new node came for `wait` seconds. Each node has `timeout` seconds
        to name its place. Returns the clients whose nodes are online."""
        latest, before = time.monotonic(), set[int]()
        while len(clients := self._online_clients()) < self._clients:
            if not self._queries and time.monotonic() - latest >= wait:
                break
            self._refresh(timeout)
            if not clients <= before:
                latest, before = time.monotonic(), before | clients
            time.sleep(_POLL)
        return clients

    def survey(self, wait: float, timeout: float) -> dict[int, bytes | Failure]:
        """Wait for nodes, then ask all that are online what they run. Returns their answers by node."""
        self.wait_for_nodes(wait, timeout)
        queries = {node: self._query(CHECK, node) for node in self._grid.nodes()}
        answers: dict[int, bytes | Failure] = dict.fromkeys(queries, Failure(f"no reply within {timeout:g} s"))
        unanswered, end = self._grid.push(CHECK, queries, timeout), time.monotonic() + timeout
        while unanswered and time.monotonic() < end:
            for message_id, answer in self._grid.pull(unanswered).items():
                answers[unanswered.pop(message_id)] = answer
            time.sleep(_POLL)
        return answers

    def send(self, requests: dict[int, bytes], timeout: float) -> dict[int, bytes | str]:
        """See `deploy.Transport`."""
        trip, begun = _Trip(dict(requests)), time.monotonic()
        end = begun + timeout
        while trip.waiting and time.monotonic() < end:
            self._refresh(timeout)
            online, now = self._online_clients(), time.monotonic()
            trip.last_online |= dict.fromkeys(online, now)
            trip.last_sent = {client: last for client, last in trip.last_sent.items() if client in online}
            present = [client for client in trip.waiting if now - trip.last_online.get(client, -_GRACE) < _GRACE]
            if not self._queries and not present:
                break
            self._push(trip, online, end, timeout)
            for message_id, reply in self._grid.pull(trip.sent).items():
                self._receive(trip, message_id, trip.sent.pop(message_id), reply)
            time.sleep(_pause(time.monotonic() - begun, len(trip.waiting)))
        self._abandoned |= trip.sent.keys()
        for client in sorted(trip.waiting.keys() - self._online_clients()):
            trip.replies[client] = "its node is offline" if client in self.places else "no node has taken this place"
        return trip.replies

    def _online_clients(self) -> set[int]:
        return {client for client, node in self.places.items() if node in self._online}

    def _refresh(self, timeout: float) -> None:
        """Look which nodes are online, ask new ones for their places, and read their answers."""
        now = time.monotonic()
        if now - self._refreshed >= _REFRESH:
            self._online, self._refreshed = self._grid.nodes(), now
            self._abandoned -= self._grid.pull(self._abandoned).keys()
            known = {*self.places.values(), *(node for node, _ in self._queries.values())}
            known |= {node for node, since in self._without_place.items() if now - since < _ASK_AGAIN}
            new = sorted(self._online - known) if len(self.places) < self._clients else []
            if new:
                sent = self._grid.push(WHO, {node: self._query(WHO, node) for node in new}, timeout)
                self._queries |= {message_id: (node, now + timeout) for message_id, node in sent.items()}
        for message_id, answer in self._grid.pull(self._queries).items() if self._queries else ():
            self._assign_place(self._queries.pop(message_id)[0], answer)
        for message_id, (node, end) in list(self._queries.items()):
            if node not in self._online or now >= end:
                del self._queries[message_id]
                self._abandoned.add(message_id)
                if node in self._online:
                    self._without_place[node] = now

    def _assign_place(self, node: int, answer: bytes | Failure) -> None:
        """Give a node the place that it names, if that is free."""
        if isinstance(answer, Failure) and answer.gone:
            return
        text = printable(answer.text if isinstance(answer, Failure) else answer[:20].decode(errors="replace"))
        place = int(text) if text.isdecimal() else self._clients
        if isinstance(answer, Failure) or place >= self._clients:
            self._say(f"node {node}: got {text!r} for its place, expected a partition-id below {self._clients}")
        elif place in self.places:
            self._say(f"node {node}: says it is client {place}, which node {self.places[place]} is")
        else:
            self.places[place] = node
            self._say(f"client {place} is node {node}")
            return
        self._without_place[node] = time.monotonic()

    def _push(self, trip: _Trip, online: set[int], end: float, timeout: float) -> None:
        """Send the requests that were not sent since the client's node is online, or not for a third of the timeout."""
        now, clients = time.monotonic(), {node: client for client, node in self.places.items()}
        due = [
            client
            for client in sorted(online & trip.waiting.keys())
            if client not in trip.last_sent or now - trip.last_sent[client][0] >= timeout / _SENDS
        ]
        messages = {self.places[client]: trip.waiting[client] for client in due}
        # They expire with the trip: a node that comes back later would otherwise execute them first.
        sent = self._grid.push(REQUEST, messages, max(1.0, end - now)) if messages else {}
        for message_id, node in sent.items():
            trip.sent[message_id] = clients[node]
            trip.last_sent[clients[node]] = now, message_id

    def _receive(self, trip: _Trip, message_id: str, client: int, reply: bytes | Failure) -> None:
        _, last_message = trip.last_sent.get(client, (0.0, ""))
        # A failure of an older message says nothing.
        if client not in trip.waiting or (isinstance(reply, Failure) and message_id != last_message):
            return
        if isinstance(reply, Failure) and reply.gone:
            self._online.discard(self.places[client])
        else:
            trip.replies[client] = reply.text if isinstance(reply, Failure) else reply
            del trip.waiting[client]


def _pause(elapsed: float, waiting: int) -> float:
    """Seconds until the next look for replies, which costs one request per waiting node. The pause is a twentieth of
    the trip's time so far, and long enough for at most 50 requests per second."""
    return min(_LONGEST_POLL, max(_POLL, elapsed / 20, waiting / 50)) if waiting else 0.0
