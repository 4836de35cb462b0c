"""Both ends of a signed run: a transport that signs requests and checks replies, and a node that checks requests.

Both are layers around bytes. Neither knows how a run is played.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from pfedlms.deploy import Node, Transport
from pfedlms.deploy.envelope import Envelope, Kind, Why, decode, refusal
from pfedlms.engine.transport import Code
from pfedlms.errors import WireError
from pfedlms.flower.limits import made_harmless
from pfedlms.flower.seal import ANY_PLACE, Mark, Seal, SealError, seal, unseal


class SigningTransport:
    """Signs requests on their way out; replies that break a limit are replaced by a refusal on their way in.

    Args:
        transport: what carries the signed requests.
        key: the server's.
        messages: bytes of the largest frame of each exchange; see `limits.largest_reply`.
        note: called with one record per request, for logs.
    """

    def __init__(
        self, transport: Transport, key: Ed25519PrivateKey, messages: Sequence[int],
        note: Callable[[dict[str, Any]], None] = lambda record: None,
    ) -> None:  # fmt: skip
        self._transport, self._key, self._messages, self._note = transport, key, messages, note
        self._answered: dict[int, int] = {}
        """By place, one more than the trip that was answered last. A place that is not in it is sent a resume."""

    def send(self, requests: dict[int, bytes], timeout: float) -> dict[int, bytes]:
        asked = {client: decode(data) for client, data in requests.items()}
        begun = time.monotonic()
        came = self._transport.send(
            {client: self._sealed(client, asked[client], data) for client, data in requests.items()}, timeout
        )
        replies = {client: made_harmless(requests[client], data, self._messages) for client, data in came.items()}
        for client, request in asked.items():
            self._remember(client, request, replies.get(client))
            self._note(_record(request, requests[client], replies.get(client), time.monotonic() - begun))
        return replies

    def _sealed(self, client: int, asked: Envelope, data: bytes) -> bytes:
        known = self._answered.get(client)
        marks = Mark.RESUME if known is None else 0
        return seal(self._key, Seal(asked.run, client, asked.trip, known or 0, marks), data)

    def _remember(self, client: int, asked: Envelope, reply: bytes | None) -> None:
        """A node that did not answer may have carried the request out, and one that refused may have lost its state."""
        if reply is None or refused(reply) is not None:
            self._answered.pop(client, None)
        elif asked.kind == Kind.REQUEST:
            self._answered[client] = asked.trip + 1


def query(key: Ed25519PrivateKey, run: int, kind: str, node: int) -> bytes:
    """A signed question to one node, in one run of the carrier."""
    return seal(key, Seal(run.to_bytes(8, "little"), ANY_PLACE, node, marks=Mark.QUERY), kind.encode())


def check_query(data: bytes, key: Ed25519PublicKey | None, run: int, kind: str, node: int) -> None:
    """Raise SealError unless this is the server's question to this node in this run. Without a key, as in simulations,
    the form alone is checked."""
    about, content = unseal(data, key)
    expected = Seal(run.to_bytes(8, "little"), ANY_PLACE, node, marks=Mark.QUERY)
    if key is not None and (about != expected or content != kind.encode()):
        raise SealError(f"the query is not {kind} to node {node} in run {run}; it was made for another one")


class SealedNode:
    """A node that answers only what its server has signed for it, in order.

    Args:
        node: executes requests. It knows the last trip that it answered, and the SHA-256 of that request.
        key: the server's public key; None: signatures are not checked, for simulations.
    """

    def __init__(self, node: Node, key: Ed25519PublicKey | None) -> None:
        self._node, self._key = node, key

    def handle(self, data: bytes) -> bytes:
        """As `deploy.Node.handle`, of a sealed request."""
        heard = self._node.state.answers_known
        try:
            about, content = unseal(data, self._key)
            asked = decode(content)
        except WireError as error:
            nothing = Envelope(Kind.REQUEST, self._node.run, self._node.client, 0, 0, ())
            return refusal(nothing, Why.BROKEN, str(error), heard)
        found = self._objection(about, asked, content)
        return refusal(asked, *found, heard) if found else self._node.handle(content)

    def _objection(self, about: Seal, asked: Envelope, content: bytes) -> tuple[Why, str] | None:
        """Why a request whose signature is right is refused all the same."""
        node, last = self._node, self._node.state.trip
        if (about.run, about.place, about.trip) != (asked.run, asked.client, asked.trip) or about.marks & Mark.QUERY:
            return Why.BROKEN, "the seal is not of this envelope: run, place or trip differ"
        if about.run != node.run or about.place != node.client:
            return None  # the node itself names what differs, and refuses
        if asked.kind == Kind.REQUEST and asked.trip == last and hashlib.sha256(content).digest() != node.state.request:
            return Why.STALE, f"got another request for trip {last}, which this node has answered"
        if asked.trip > last + 1 and about.answered > last + 1 and not about.marks & Mark.RESUME:
            return Why.ORDER, (
                f"the server has a reply of this node to trip {about.answered - 1}, the last one here is {last}: its "
                "state was lost or is an older copy; the next request resumes"
            )
        return None


def refused(reply: bytes) -> str | None:
    """The reason, if a reply is a refusal or cannot be read."""
    try:
        said = decode(reply)
    except WireError as error:
        return str(error)
    first = said.records[0] if said.records else None
    return bytes(first.data).decode(errors="replace") if first and first.code == Code.REFUSED else None


def kinds(envelope: Envelope) -> dict[str, int]:
    """Bytes by kind of record."""
    found: dict[str, int] = {}
    for each in envelope.records:
        found[each.code.name.lower()] = found.get(each.code.name.lower(), 0) + len(each.data)
    return found


def _record(asked: Envelope, request: bytes, reply: bytes | None, seconds: float) -> dict[str, Any]:
    """What happened to one request."""
    result = "no reply" if reply is None else refused(reply) or "replied"
    return {
        "event": "request", "run": asked.run.hex(), "round": asked.round + 1, "trip": asked.trip,
        "client": asked.client, "sent": len(request), "received": len(reply or b""), "seconds": round(seconds, 1),
        "result": result,
    }  # fmt: skip
