"""Signed requests. The server puts a seal, signed with its Ed25519 key, around each request; each node checks it.

docs/protocol.md, section 16, has the layout of the seal and the rules by which a node accepts a request.
`SigningTransport` wraps the server's transport, `SealedNode` wraps a node.
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
from pfedlms.deploy.envelope import Envelope, Kind, Reason, check_reply, decode, refusal_text
from pfedlms.errors import UsageError, WireError, printable

MAGIC = b"PFLS"
VERSION = 1
ANY_PLACE = 0xFFFFFFFF
_HEADER = struct.Struct("<4sBBH8sIIQQQ")
_SIGNATURE_BYTES = 64
_DOMAIN = b"pfedlms request 1\0"
SEAL_BYTES = _HEADER.size + _SIGNATURE_BYTES


class SealError(WireError):
    """A request is not signed, or not by the server of this node."""


class SealFlag(IntFlag):
    RESUME = 1
    """The server does not know which trip this node answered last."""
    QUERY = 2
    """A question to a node, not a request of a run."""


@dataclass(frozen=True)
class Seal:
    """What is signed with the content. In a query, `run` is Flower's number of the run and `trip` the node's id."""

    run: bytes
    place: int
    trip: int
    answered: int = 0
    """One more than the last trip to which this place has replied; 0: none."""
    flags: int = 0


def seal(key: Ed25519PrivateKey, about: Seal, content: bytes) -> bytes:
    """The content behind a signed header."""
    trips = about.trip, about.answered
    header = _HEADER.pack(MAGIC, VERSION, about.flags, 0, about.run, about.place, 0, *trips, len(content))
    return header + key.sign(_DOMAIN + header + content) + content


def unseal(data: bytes, key: Ed25519PublicKey | None) -> tuple[Seal, bytes]:
    """The seal and the content; raises SealError. Without a key, as in simulations, the signature is not checked."""
    if data[: len(MAGIC)] != MAGIC:
        raise SealError(f"the request is not signed: got magic {bytes(data[:4])!r}, expected {MAGIC!r}")
    if len(data) < SEAL_BYTES:
        raise SealError(f"seal: got {len(data)} bytes, expected at least {SEAL_BYTES}")
    _, version, flags, zero, run, place, also_zero, trip, answered, length = _HEADER.unpack_from(data)
    if version != VERSION:
        raise SealError(f"seal: got version {version}, expected {VERSION}; update the older end")
    header, content = bytes(data[: _HEADER.size]), bytes(data[SEAL_BYTES:])
    if len(content) != length:
        raise SealError(f"seal: got {len(content)} bytes of content, expected {length}")
    if key is not None:
        try:
            key.verify(bytes(data[_HEADER.size : SEAL_BYTES]), _DOMAIN + header + content)
        except InvalidSignature:
            remedy = "compare keys/server.pub here with the server's"
            raise SealError(f"the signature is not of this node's server; {remedy}") from None
    if zero or also_zero or flags & ~(SealFlag.RESUME | SealFlag.QUERY):
        raise SealError("seal: got reserved bits that are set, expected zeros; update the older end")
    return Seal(run, place, trip, answered, flags), content


# --- the server


class SigningTransport:
    """Signs requests with the server's private key and passes them on. `messages` are from `nodes.message_bytes`; `log`
    is called with one record per request."""

    def __init__(
        self, transport: Transport, key: Ed25519PrivateKey, messages: Sequence[int],
        log: Callable[[dict[str, Any]], None] = lambda record: None,
    ) -> None:  # fmt: skip
        self._transport, self._key, self._messages, self._log = transport, key, messages, log
        self._answered: dict[int, int] = {}
        """`Seal.answered` by place. A place that is missing here gets a request with the flag RESUME."""

    def send(self, requests: dict[int, bytes], timeout: float) -> dict[int, bytes | str]:
        envelopes = {client: decode(data) for client, data in requests.items()}
        begun = time.monotonic()
        sealed = {client: self._seal(envelopes[client], data) for client, data in requests.items()}
        replies = dict(self._transport.send(sealed, timeout))
        for client, request in envelopes.items():
            reply = replies.get(client)
            failure = describe_failure(request, reply, self._messages)
            # A node without a reply may have executed the request, and one that refused may have lost its state.
            if failure is not None:
                self._answered.pop(client, None)
            elif request.kind == Kind.REQUEST:
                self._answered[client] = request.trip + 1
            received = len(reply) if isinstance(reply, bytes) else 0
            self._log({
                "event": "request", "run": request.run.hex(), "round": request.round + 1, "trip": request.trip,
                "client": client, "sent": len(requests[client]), "received": received,
                "seconds": round(time.monotonic() - begun, 1), "result": failure or "replied",
            })  # fmt: skip
        return replies

    def _seal(self, request: Envelope, data: bytes) -> bytes:
        answered = self._answered.get(request.client, 0)
        flags = 0 if answered else SealFlag.RESUME
        return seal(self._key, Seal(request.run, request.client, request.trip, answered, flags), data)


def describe_failure(request: Envelope, reply: bytes | str | None, messages: Sequence[int]) -> str | None:
    """Why there is no valid reply, or the node refused; None if the node executed the request."""
    if not isinstance(reply, bytes):
        return f"no reply: {printable(reply)}" if reply else "no reply"
    try:
        refused = check_reply(request, reply, messages).refused
    except WireError as error:
        return str(error)
    return refusal_text(refused) if refused else None


def sign_query(key: Ed25519PrivateKey, run: int, kind: str, node: int) -> bytes:
    """A signed question to one node in one run of Flower."""
    return seal(key, _query_seal(run, node), kind.encode())


def _query_seal(run: int, node: int) -> Seal:
    return Seal(run.to_bytes(8, "little"), ANY_PLACE, node, flags=SealFlag.QUERY)


# --- a node


def check_query(data: bytes, key: Ed25519PublicKey | None, run: int, kind: str, node: int) -> None:
    """Raise SealError unless this is the server's question to this node in this run. Without a key, as in simulations,
    only the form is checked."""
    about, content = unseal(data, key)
    if key is not None and (about != _query_seal(run, node) or content != kind.encode()):
        raise SealError(f"the query is not {kind} to node {node} in run {run}; it was made for another one")


class SealedNode:
    """A node that executes only requests that its server has signed for it, in order. Without the server's public key
    signatures are not checked, for simulations."""

    def __init__(self, node: Node, key: Ed25519PublicKey | None) -> None:
        self._node, self._key = node, key

    def handle(self, data: bytes) -> bytes:
        """Handle a sealed request; see `deploy.Node.handle`."""
        try:
            about, content = unseal(data, self._key)
            request = decode(content)
        except WireError as error:
            return self._node.refuse(None, Reason.BROKEN, str(error))
        refused = self._check(about, request)
        return self._node.refuse(request, *refused) if refused else self._node.handle(content)

    def _check(self, about: Seal, request: Envelope) -> tuple[Reason, str] | None:
        """Why the node refuses a request whose signature is valid; None if it does not."""
        node, last = self._node, self._node.state.trip
        same = (about.run, about.place, about.trip) == (request.run, request.client, request.trip)
        if not same or about.flags & SealFlag.QUERY:
            return Reason.BROKEN, "the seal is not of this envelope: run, place or trip differ"
        if about.run != node.run or about.place != node.client:
            return None  # the node itself refuses, and says what differs
        if request.trip > last + 1 and about.answered > last + 1 and not about.flags & SealFlag.RESUME:
            has = f"the server has a reply of this node to trip {about.answered - 1}, the last one here is {last}"
            return Reason.ORDER, f"{has}: its state was lost or is an older copy; the next request resumes"
        return None


# --- keys


def private_key(file: Path) -> Ed25519PrivateKey:
    key: Ed25519PrivateKey = _load_key(file, lambda data: load_pem_private_key(data, None), Ed25519PrivateKey)
    return key


def public_key(file: Path) -> Ed25519PublicKey:
    key: Ed25519PublicKey = _load_key(file, load_pem_public_key, Ed25519PublicKey)
    return key


def _load_key(file: Path, load: Callable[[bytes], Any], kind: Any) -> Any:
    remedy = "./keys.sh server makes both keys on the server, nodes get keys/server.pub"
    try:
        key = load(file.read_bytes())
    except (OSError, ValueError) as error:
        raise UsageError(f"{file}: cannot be read as a key ({error}); {remedy}") from error
    if not isinstance(key, kind):
        raise UsageError(f"{file}: got another kind of key, expected an {kind.__name__}; {remedy}")
    return key
