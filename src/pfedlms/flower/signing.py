"""Signed requests: a seal around the bytes of a request, made with the server's Ed25519 key and checked by each node.

docs/protocol.md, section 16, has the layout of the seal and the rules by which a node accepts a request. Both ends are
layers around bytes: a transport that signs requests, and a node that checks them.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntFlag
from pathlib import Path
from typing import Any

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import load_pem_private_key, load_pem_public_key

from pfedlms.deploy import Node, Transport
from pfedlms.deploy.envelope import Envelope, Kind, Reason, decode, refusal, refusal_text
from pfedlms.deploy.nodes import check_reply
from pfedlms.engine.transport import Code
from pfedlms.errors import UsageError, WireError

MAGIC = b"PFLS"
VERSION = 1
ANY_PLACE = 0xFFFFFFFF
_HEADER = struct.Struct("<4sBBH8sIIQQQ")
_SIGNATURE_BYTES = 64
_DOMAIN = b"pfedlms request 1\0"
SEAL_BYTES = _HEADER.size + _SIGNATURE_BYTES


class SealError(WireError):
    """A request is not signed, or not by the server of this node."""


class Mark(IntFlag):
    RESUME = 1
    """The server does not know which trip this node answered last."""
    QUERY = 2
    """Not a request of a run: the server asks who a node is, or what it runs."""


@dataclass(frozen=True)
class Seal:
    """What is signed with the content. Of a query, `run` is the carrier's number of the run, `trip` the node's id."""

    run: bytes
    place: int
    trip: int
    answered: int = 0
    """Trips below this number that the server has a reply to from this place; 0: none."""
    marks: int = 0


def seal(key: Ed25519PrivateKey, about: Seal, content: bytes) -> bytes:
    """The content with a signed header in front of it."""
    header = _HEADER.pack(
        MAGIC, VERSION, about.marks, 0, about.run, about.place, 0, about.trip, about.answered, len(content)
    )
    return header + key.sign(_DOMAIN + header + content) + content


def unseal(data: bytes, key: Ed25519PublicKey | None) -> tuple[Seal, bytes]:
    """What is signed, and the content; raises SealError. Without a key, as in simulations, the form is checked."""
    if data[: len(MAGIC)] != MAGIC:
        raise SealError(
            f"the request is not signed (got magic {bytes(data[:4])!r}, expected {MAGIC!r}); if it is the server's, "
            "run `pfedlms deploy upgrade` there"
        )
    if len(data) < SEAL_BYTES:
        raise SealError(f"seal: got {len(data)} bytes, expected at least {SEAL_BYTES}")
    _, version, marks, zero, run, place, also_zero, trip, answered, length = _HEADER.unpack_from(data)
    if version != VERSION:
        raise SealError(f"seal: got version {version}, expected {VERSION}; update the older end")
    header, content = bytes(data[: _HEADER.size]), bytes(data[SEAL_BYTES:])
    if len(content) != length:
        raise SealError(f"seal: got {len(content)} bytes of content, expected {length}")
    if key is not None:
        try:
            key.verify(bytes(data[_HEADER.size : SEAL_BYTES]), _DOMAIN + header + content)
        except InvalidSignature:
            raise SealError(
                "the signature is not of this node's server; compare keys/server.pub here with the server's"
            ) from None
    if zero or also_zero or marks & ~(Mark.RESUME | Mark.QUERY):
        raise SealError("seal: got reserved bits that are set, expected zeros; update the older end")
    return Seal(run, place, trip, answered, marks), content


def content_of(data: bytes) -> bytes:
    """What is inside a seal, unchecked; what has none, as it is."""
    return data[SEAL_BYTES:] if data[: len(MAGIC)] == MAGIC else data


# --- the server's end


class SigningTransport:
    """Signs requests on their way out.

    Args:
        transport: what carries the signed requests.
        key: the server's.
        messages: bytes of the largest frame of each exchange; see `deploy.nodes.message_bytes`.
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
        sealed = {client: self._sealed(client, asked[client], data) for client, data in requests.items()}
        replies = dict(self._transport.send(sealed, timeout))
        for client, request in asked.items():
            reply = replies.get(client)
            why = "no reply" if reply is None else refused(request, reply, self._messages)
            # A node that did not answer may have carried the request out, and one that refused may have lost its state.
            if why is not None:
                self._answered.pop(client, None)
            elif request.kind == Kind.REQUEST:
                self._answered[client] = request.trip + 1
            self._note({
                "event": "request", "run": request.run.hex(), "round": request.round + 1, "trip": request.trip,
                "client": client, "sent": len(requests[client]), "received": len(reply or b""),
                "seconds": round(time.monotonic() - begun, 1), "result": why or "replied",
            })  # fmt: skip
        return replies

    def _sealed(self, client: int, asked: Envelope, data: bytes) -> bytes:
        known = self._answered.get(client)
        marks = Mark.RESUME if known is None else 0
        return seal(self._key, Seal(asked.run, client, asked.trip, known or 0, marks), data)


def refused(request: Envelope, data: bytes, messages: Sequence[int]) -> str | None:
    """The reason, if a reply is a refusal or is not valid."""
    try:
        reply = check_reply(request, data, messages)
    except WireError as error:
        return str(error)
    is_refusal = bool(reply.records) and reply.records[0].code == Code.REFUSED
    return refusal_text(reply.records[0]) if is_refusal else None


def query(key: Ed25519PrivateKey, run: int, kind: str, node: int) -> bytes:
    """A signed question to one node, in one run of the carrier."""
    return seal(key, _of_query(run, node), kind.encode())


def _of_query(run: int, node: int) -> Seal:
    return Seal(run.to_bytes(8, "little"), ANY_PLACE, node, marks=Mark.QUERY)


# --- a node's end


def check_query(data: bytes, key: Ed25519PublicKey | None, run: int, kind: str, node: int) -> None:
    """Raise SealError unless this is the server's question to this node in this run. Without a key, as in simulations,
    the form alone is checked."""
    about, content = unseal(data, key)
    if key is not None and (about != _of_query(run, node) or content != kind.encode()):
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
        known = self._node.state.answers_known
        try:
            about, content = unseal(data, self._key)
            asked = decode(content)
        except WireError as error:
            nothing = Envelope(Kind.REQUEST, self._node.run, self._node.client, 0, 0, ())
            return refusal(nothing, Reason.BROKEN, str(error), known)
        found = self._objection(about, asked)
        return refusal(asked, *found, known) if found else self._node.handle(content)

    def _objection(self, about: Seal, asked: Envelope) -> tuple[Reason, str] | None:
        """Reason a request whose signature is right is refused all the same."""
        node, last = self._node, self._node.state.trip
        if (about.run, about.place, about.trip) != (asked.run, asked.client, asked.trip) or about.marks & Mark.QUERY:
            return Reason.BROKEN, "the seal is not of this envelope: run, place or trip differ"
        if about.run != node.run or about.place != node.client:
            return None  # the node itself names what differs, and refuses
        if asked.trip > last + 1 and about.answered > last + 1 and not about.marks & Mark.RESUME:
            return Reason.ORDER, (
                f"the server has a reply of this node to trip {about.answered - 1}, the last one here is {last}: its "
                "state was lost or is an older copy; the next request resumes"
            )
        return None


# --- keys


def private_key(file: Path) -> Ed25519PrivateKey:
    key = _load(file, lambda data: load_pem_private_key(data, None))
    if not isinstance(key, Ed25519PrivateKey):
        raise UsageError(f"{file}: got no Ed25519 private key; ./keys.sh server makes one")
    return key


def public_key(file: Path) -> Ed25519PublicKey:
    key = _load(file, load_pem_public_key)
    if not isinstance(key, Ed25519PublicKey):
        raise UsageError(f"{file}: got no Ed25519 public key; copy keys/server.pub from the server")
    return key


def _load(file: Path, load: Callable[[bytes], object]) -> object:
    try:
        return load(file.read_bytes())
    except FileNotFoundError as error:
        raise UsageError(
            f"{file}: is missing; ./keys.sh server makes the pair on the server, nodes get server.pub"
        ) from error
    except (OSError, ValueError) as error:
        raise UsageError(f"{file}: cannot be read as a key ({error})") from error
