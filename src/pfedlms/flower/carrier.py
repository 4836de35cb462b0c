"""Carries requests to nodes that come, go and come back under another id, and their replies."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from pfedlms.deploy.envelope import Why, decode, refusal
from pfedlms.errors import printable
from pfedlms.flower.signing import content_of

WHO, CHECK, REQUEST = "query.who", "query.check", "train.request"
"""Kinds of messages: which place is yours, what do you run, and a request of `deploy`."""
CHECK_RECORD = "pfedlms check: "
"""What a line of the log begins with that has a record of a check, as JSON: text and wrong."""
_LOOK = 3.0
_POLL, _LONGEST_POLL = 0.5, 5.0
_AGAIN = 3
_STRANGER = 60.0
_GRACE = 30.0
"""Seconds: between looks at who is there; between looks at what came, at least and at most; into how many parts asking
again divides a timeout; how long a node without a place is left alone; how long one that went is waited for."""


@dataclass(frozen=True)
class Failure:
    """What came instead of a reply."""

    text: str
    gone: bool = False
    """Whether the node is not there any more."""


class Post(Protocol):
    """What an engine that knows nodes by ids of its own can do."""

    def nodes(self) -> set[int]:
        """Who is there."""
        ...

    def push(self, kind: str, letters: Mapping[int, bytes], ttl: float) -> dict[str, int]:
        """Send to nodes; who was sent what, by the name of the message."""
        ...

    def pull(self, names: Iterable[str]) -> dict[str, bytes | Failure]:
        """What has come in reply to messages; each once. Of one that is worth nothing any more, that it failed."""
        ...


@dataclass
class _Trip:
    """Requests on their way."""

    waiting: dict[int, bytes]
    replies: dict[int, bytes] = field(default_factory=dict)
    sent: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Client and node by the name of a message."""
    tried: dict[int, tuple[int, float, str]] = field(default_factory=dict)
    """Which node that is there a client's request was sent to last, when, and the name of the message."""
    seen: dict[int, float] = field(default_factory=dict)
    """When a client's node was there last."""


class Carrier:
    """A `deploy.Transport`. Nodes are asked which place is theirs when they first appear, or places are pinned to ids.

    A request is made to be sent twice, so it is sent again to who has come back, and to who is silent for a third of
    the time it has.
    """

    def __init__(
        self, post: Post, clients: int, pinned: Mapping[int, int] | None = None,
        say: Callable[[str], None] = lambda text: None, clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep, query: Callable[[str, int], bytes] = lambda kind, node: b"",
    ) -> None:  # fmt: skip
        self._post, self._clients, self._pinned = post, clients, dict(pinned or {})
        self._say, self._clock, self._sleep, self._query = say, clock, sleep, query
        self._claims: dict[int, int] = {}
        """Clients by node, as nodes say it, in the order they came."""
        self._owners: dict[int, int] = {}
        """Nodes by client: who has a place keeps it for as long as it is online."""
        self._survey = False
        """Whether all nodes are asked which place is theirs, pinned or not."""
        self._online: set[int] = set()
        self._ever_online: set[int] = set()
        self._looked = -_LOOK
        self._asked: dict[str, tuple[int, float]] = {}
        """Nodes that were asked who they are, by the name of the message, and until when they can say."""
        self._strangers: dict[int, float] = {}
        """Nodes that have no place, and when that was found."""
        self._owed: set[str] = set()
        """Messages that nobody waits for any more. An engine keeps them until what came of them was taken."""

    def gather(self, wait: float, timeout: float) -> set[int]:
        """Wait until every place is taken, or nobody new came for `wait` seconds; which places are. A node that is
        there has `timeout` seconds to say which is its own."""
        latest, before = self._clock(), set[int]()
        while len(there := self._there()) < self._clients and (self._asked or self._clock() - latest < wait):
            self._look_around(timeout)
            if not there <= before:
                latest, before = self._clock(), before | there
            self._sleep(_POLL)
        return there

    def survey(self, wait: float, timeout: float) -> set[int]:
        """As `gather`; and every node that is online has said which place is its own, or had `timeout` seconds."""
        self._survey = True
        self.gather(wait, timeout)
        self._looked = -_LOOK  # who came last is asked, too
        self._look_around(timeout)
        while self._asked:
            self._sleep(_POLL)
            self._look_around(timeout)
        return self._there()

    def ask(self, kind: str, timeout: float) -> dict[int, bytes | Failure]:
        """The same question to all who are there; what they say, by client."""
        there = {node: client for client, node in self.places.items() if node in self._online}
        names = self._post.push(kind, {node: self._query(kind, node) for node in there}, timeout)
        said: dict[int, bytes | Failure] = {}
        end = self._clock() + timeout
        while names and self._clock() < end:
            for name, each in self._post.pull(names).items():
                said[there[names.pop(name)]] = each
            self._sleep(_POLL * bool(names))
        return said | {there[node]: Failure(f"no reply within {timeout:g} s") for node in names.values()}

    def send(self, requests: dict[int, bytes], timeout: float) -> dict[int, bytes]:
        """As `deploy.Transport` has it. Who is late is not in it; who is known to be gone refuses, in words."""
        trip, begun = _Trip(dict(requests)), self._clock()
        end = begun + timeout
        while trip.waiting and self._clock() < end:
            self._look_around(timeout)
            there, now = self._there(), self._clock()
            trip.seen |= dict.fromkeys(there, now)
            trip.tried = {client: last for client, last in trip.tried.items() if client in there}
            if not self._asked and not any(now - trip.seen.get(client, -_GRACE) < _GRACE for client in trip.waiting):
                break
            self._push(trip, there, end, timeout)
            for name, said in self._post.pull(trip.sent).items():
                self._take(trip, name, *trip.sent.pop(name), said)
            self._sleep(_pause(self._clock() - begun, len(trip.waiting)))
        self._owed |= trip.sent.keys()
        for client in sorted(trip.waiting.keys() - self._there()):
            self._refuse(trip, client, self._why_absent(client))
        return trip.replies

    def _why_absent(self, client: int) -> str:
        if client not in self.places:
            return "no node has taken this place"
        return "its node is gone" if self.places[client] in self._ever_online else "its node was not online yet"

    @property
    def places(self) -> dict[int, int]:
        """Nodes by client. A place moves to another node that claims it only once its owner is not online."""
        for node, client in self._claims.items():
            owner = self._owners.get(client)
            keeps = owner is not None and owner in self._online and self._claims.get(owner) == client
            if not keeps and (node in self._online or owner is None or self._claims.get(owner) != client):
                self._owners[client] = node
        held = {client: node for client, node in self._owners.items() if self._claims.get(node) == client}
        return held | self._pinned

    @property
    def strangers(self) -> set[int]:
        """Nodes that are there and have no place; those that rival somebody who is there are in `rivals`."""
        placed = {*self.places.values(), *(node for nodes in self.rivals.values() for node in nodes)}
        return (self._online & (self._strangers.keys() | self._claims.keys())) - placed

    @property
    def rivals(self) -> dict[int, list[int]]:
        """Places that several nodes say are theirs, and which nodes that are online do."""
        said = self._claims | {node: client for client, node in self._pinned.items()}
        by_place = {client: sorted(n for n in self._online if said.get(n) == client) for client in range(self._clients)}
        return {client: nodes for client, nodes in by_place.items() if len(nodes) > 1}

    def _there(self) -> set[int]:
        return {client for client, node in self.places.items() if node in self._online}

    def _look_around(self, timeout: float) -> None:
        """Who is there now, and which places newcomers have."""
        now = self._clock()
        if now - self._looked >= _LOOK:
            before, self._online, self._looked = self._online, self._post.nodes(), now
            self._ever_online |= self._online
            self._owed -= self._post.pull(self._owed).keys()
            # Who was away may have been given another place.
            known = (self._claims.keys() & before) | set(self._pinned.values())
            known |= {node for node, _ in self._asked.values()}
            known |= {node for node, since in self._strangers.items() if now - since < _STRANGER}
            fresh = sorted(self._online - known) if self._survey or len(self._pinned) < self._clients else []
            if fresh:
                sent = self._post.push(WHO, {node: self._query(WHO, node) for node in fresh}, timeout)
                self._asked |= {name: (node, now + timeout) for name, node in sent.items()}
        for name, said in self._post.pull(self._asked).items() if self._asked else ():
            self._place(self._asked.pop(name)[0], said)
        for name, (node, end) in list(self._asked.items()):
            if node not in self._online or now >= end:
                del self._asked[name]
                self._owed.add(name)
                self._strangers |= {node: now} if node in self._online and node not in self._claims else {}

    def _place(self, node: int, said: bytes | Failure) -> None:
        if isinstance(said, Failure) and said.gone:
            return
        text = printable(said.text if isinstance(said, Failure) else said[:20].decode(errors="replace"))
        if isinstance(said, Failure) or not text.isdecimal() or int(text) >= self._clients:
            self._strangers[node] = self._clock()
            self._say(f"node {node}: got {text!r} for its place, expected a partition-id below {self._clients}")
            return
        place, before = int(text), self.places.get(int(text))
        self._claims.pop(node, None)
        self._claims[node] = place
        if place in self._pinned:
            self._say(f"node {node}: says it is client {place}, whose place belongs to node {before}")
        elif self.places[place] != node:
            self._say(f"node {node}: says it is client {place}, whose place node {before} has and keeps while online")
        elif before != node:
            self._say(f"client {place} is node {node}" + ("" if before is None else f", before node {before}"))

    def _push(self, trip: _Trip, there: set[int], end: float, timeout: float) -> None:
        """Requests that have not gone to the node that is there now, or not lately."""
        now, places, letters = self._clock(), self.places, dict[int, bytes]()
        whose = {node: client for client, node in places.items()}
        for client in sorted(there & trip.waiting.keys()):
            last, since, _ = trip.tried.get(client, (None, now, ""))
            if last != places[client] or now - since >= timeout / _AGAIN:
                letters[places[client]] = trip.waiting[client]
        # Old ones are worth nothing: a node would work through them first when it comes back.
        sent = self._post.push(REQUEST, letters, max(1.0, end - now)) if letters else {}
        for name, node in sent.items():
            trip.sent[name] = whose[node], node
            trip.tried[whose[node]] = node, now, name

    def _take(self, trip: _Trip, name: str, client: int, node: int, said: bytes | Failure) -> None:
        if client not in trip.waiting:
            return
        if isinstance(said, bytes):
            trip.replies[client] = said
            del trip.waiting[client]
        elif name == trip.tried.get(client, (0, 0.0, ""))[2]:  # else it is about an older one
            if said.gone:
                self._online.discard(node)
            else:
                self._refuse(trip, client, said.text)

    def _refuse(self, trip: _Trip, client: int, text: str) -> None:
        trip.replies[client] = refusal(decode(content_of(trip.waiting.pop(client))), Why.FAILED, printable(text))


def _pause(elapsed: float, waiting: int) -> float:
    """Seconds until the next look for replies, which costs one request per node that is waited for: a twentieth of the
    time it has taken so far, and as many as keep the requests below 50 per second."""
    return min(_LONGEST_POLL, max(_POLL, elapsed / 20, waiting / 50)) if waiting else 0.0
