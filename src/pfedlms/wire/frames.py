"""Frames: a fixed header of 40 bytes before every payload, and the checks a receiver makes before it uses one.

    offset size
    0      4     magic "PFLM"
    4      1     protocol version
    5      1     kind: 2 · exchange for client → server, 2 · exchange + 1 for server → client
    6      2     reserved, zero
    8      4     round
    12     4     sender: the client's id, 0xFFFFFFFF for the server
    16     4     samples: the client's N_k, zero from the server
    20     8     payload length in bytes
    28     8     digest of what both ends must agree on
    36     4     CRC-32 (zlib's) of bytes 0–35 and the payload

Numbers are unsigned, little endian. The checksum finds accidents; it is no authentication.
"""

from __future__ import annotations

import hashlib
import struct
import zlib
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from pfedlms.errors import (
    ChecksumError,
    DecodeError,
    DigestError,
    KindError,
    MagicError,
    OversizedError,
    RoundError,
    SenderError,
    TruncatedError,
    VersionError,
    WireError,
)
from pfedlms.wire.checksum import crc32
from pfedlms.wire.codec import Buffer
from pfedlms.wire.fields import Array, Message, Values

MAGIC = b"PFLM"
VERSION = 1
SERVER = 0xFFFFFFFF
_HEADER = struct.Struct("<4sBBHIIIQ8s")
_CRC = struct.Struct("<I")
HEADER_BYTES = _HEADER.size + _CRC.size


def agreement_digest(agreement: Mapping[str, int | float | bool | str | bytes]) -> bytes:
    """First 8 bytes of SHA-256 over the lines `key=value\\n`, keys in ASCII order.

    Integers and booleans (1, 0) are written in decimal, floats as the 16 hex digits of their big-endian IEEE 754
    double, text as it is, bytes in hex.
    """
    lines = [f"{key}={_canonical(agreement[key])}\n" for key in sorted(agreement)]
    return hashlib.sha256("".join(lines).encode()).digest()[:8]


def _canonical(value: int | float | bool | str | bytes) -> str:
    if isinstance(value, float):
        return struct.pack(">d", value).hex()
    if isinstance(value, bytes):
        return value.hex()
    return str(int(value)) if isinstance(value, int) else value


def frame(
    message: Message,
    values: Values,
    *,
    round: int,
    sender: int,
    samples: int,
    digest: bytes,
    out: bytearray | memoryview | None = None,
) -> bytes | memoryview:
    """Encode `values` as one complete frame: bytes, or a view of the beginning of `out` until that is used again."""
    end = HEADER_BYTES + message.size(values)
    data = memoryview(bytearray(end) if out is None else out).cast("B")[:end]
    if len(data) < end:
        raise ValueError(f"out: got {len(data)} bytes, expected {end} or more")
    message.write(values, data[HEADER_BYTES:])
    _HEADER.pack_into(data, 0, MAGIC, VERSION, message.kind, 0, round, sender, samples, end - HEADER_BYTES, digest)
    _CRC.pack_into(data, _HEADER.size, _checksum(data))
    return bytes(data) if out is None else data


def frame_rows(
    message: Message,
    values: Values,
    *,
    round: int,
    senders: Sequence[int],
    samples: Sequence[int],
    digest: bytes,
    out: Array,
) -> None:
    """`frame` of every row of `values: [senders, …]`, of a message that is `in_rows`, into the rows of `out`, uint8
    `[senders, HEADER_BYTES + message.rows_size(values)]`."""
    message.write_rows(values, out[:, HEADER_BYTES:])
    length = out.shape[1] - HEADER_BYTES
    for row, sender, own in zip(out, senders, samples, strict=True):
        data = row.data
        _HEADER.pack_into(data, 0, MAGIC, VERSION, message.kind, 0, round, sender, own, length, digest)
        _CRC.pack_into(data, _HEADER.size, _checksum(data))


def _checksum(data: memoryview) -> int:
    return crc32(data[HEADER_BYTES:], zlib.crc32(data[: _HEADER.size]))


class Received(NamedTuple):
    """A frame that passed every check."""

    sender: int
    samples: int
    values: dict[str, Array]
    payload_bytes: int


class Intake:
    """Checks the frames of one direction of one exchange; of `senders` (clients of the round, or the server alone) each
    is accepted once. Both ends must have the same `digest`."""

    def __init__(self, message: Message, digest: bytes, round: int, senders: Collection[int]) -> None:
        self._message, self._digest, self._round, self._senders = message, digest, round, senders
        self._seen: set[int] = set()

    def accept(self, data: Buffer, into: Values | None = None) -> Received:
        """Parse and check one frame; raises the matching WireError if it is not valid.

        Values are decoded into the arrays of `into` (a row of `Message.room`), else into new ones; a refused frame may
        leave anything there. Every length is compared with the bytes received and the limit before memory is
        allocated.
        """
        sender, samples, payload = self._opened(memoryview(data).cast("B").toreadonly(), self._seen)
        values = self._message.read(payload, into)
        self._seen.add(sender)
        return Received(sender, samples, values, len(payload))

    def accept_rows(self, frames: Array, into: Values) -> list[Received] | None:
        """`accept` of every row of `frames`, uint8 `[senders, size]`, into the rows of `into`, if all of them are
        acceptable; else None, and no sender counts as seen: accept them one after another to learn what is wrong."""
        seen, found = set(self._seen), []
        try:
            for row, data in enumerate(frames):
                sender, samples, payload = self._opened(data.data.toreadonly(), seen)
                values = {name: value[row] for name, value in into.items()}
                found.append(Received(sender, samples, values, len(payload)))
                seen.add(sender)
        except WireError:
            return None
        if not self._message.read_rows(frames[:, HEADER_BYTES:], into):
            return None
        self._seen = seen
        return found

    def _opened(self, view: memoryview, seen: Collection[int]) -> tuple[int, int, memoryview]:
        """Sender, samples and payload of a frame whose header is right; `seen` have sent one before."""
        if len(view) < HEADER_BYTES:
            raise TruncatedError(f"frame: got {len(view)} bytes, expected a header of {HEADER_BYTES}")
        magic, version, kind, reserved, round, sender, samples, length, digest = _HEADER.unpack_from(view)
        if magic != MAGIC:
            raise MagicError(f"magic: got {bytes(magic)!r}, expected {MAGIC!r}")
        if version != VERSION:
            raise VersionError(f"version: got {version}, expected {VERSION}; update the older end")
        payload = view[HEADER_BYTES:]
        if length > self._message.max_bytes:
            raise OversizedError(f"payload: got {length} bytes, expected at most {self._message.max_bytes}")
        if len(payload) > length:
            raise OversizedError(f"payload: got {len(payload)} bytes, expected {length}")
        if len(payload) < length:
            raise TruncatedError(f"payload: got {len(payload)} bytes, expected {length}")
        (checksum,), actual = _CRC.unpack_from(view, _HEADER.size), _checksum(view)
        if checksum != actual:
            raise ChecksumError(
                f"checksum: got {checksum:08x}, expected {actual:08x}; the frame was changed on the way"
            )
        if reserved:
            raise DecodeError(f"reserved: got {reserved}, expected 0")
        if digest != self._digest:
            raise DigestError(
                f"digest: got {digest.hex()}, expected {self._digest.hex()}; "
                "the ends differ in model, method, settings, seed or w⁰"
            )
        if kind != self._message.kind:
            raise KindError(f"kind: got {kind}, expected {self._message.kind}")
        if round != self._round:
            raise RoundError(f"round: got {round}, expected {self._round}")
        if sender not in self._senders:
            raise SenderError(f"sender: got {sender}, which takes no part in this exchange")
        if sender in seen:
            raise SenderError(f"sender: got a second message of {sender} in one exchange")
        if (samples == 0) != (sender == SERVER):
            raise DecodeError(
                f"samples: got {samples} from sender {sender}, expected at least 1 from a client and 0 from the server"
            )
        return sender, samples, payload
