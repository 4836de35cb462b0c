"""Signed requests: a seal around the bytes of a request, made with the server's Ed25519 key and checked by each node.

    offset size
    0      4     magic "PFLS"
    4      1     version of this seal
    5      1     flags: 1 resume, 2 query
    6      2     reserved, zero
    8      8     run: that of the envelope; of a query, the carrier's number of the run
    16     4     place: the client of the envelope; of a query 0xFFFFFFFF
    20     4     reserved, zero
    24     8     trip: that of the envelope; of a query, the id of the node it is for
    32     8     answered: trips below this number that the server has a reply to from this place; 0: none
    40     8     length of the content in bytes
    48     64    Ed25519 signature of "pfedlms request 1", a zero byte, bytes 0–47 and the content
    112          content: the envelope; of a query, its name

Numbers are unsigned, little endian. docs/protocol.md has the rules by which a node accepts a request.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntFlag
from pathlib import Path

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import load_pem_private_key, load_pem_public_key

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
    run: bytes
    place: int
    trip: int
    answered: int = 0
    marks: int = 0

    def header(self, length: int) -> bytes:
        return _HEADER.pack(
            MAGIC, VERSION, self.marks, 0, self.run, self.place, 0, self.trip, self.answered, length
        )  # fmt: skip


def seal(key: Ed25519PrivateKey, about: Seal, content: bytes) -> bytes:
    """The content with a signed header in front of it."""
    header = about.header(len(content))
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


def _load(file: Path, load: object) -> object:
    try:
        return load(file.read_bytes())  # type: ignore[operator]
    except FileNotFoundError as error:
        raise UsageError(
            f"{file}: is missing; ./keys.sh server makes the pair on the server, nodes get server.pub"
        ) from error
    except (OSError, ValueError) as error:
        raise UsageError(f"{file}: cannot be read as a key ({error})") from error
