"""Requests and replies between a server and a node: small checked envelopes around frames of the wire format.

    offset size
    0      4     magic "PFLE"
    4      1     version of this envelope
    5      1     kind: 0 request, 1 request to look, 2 reply
    6      2     reserved, zero
    8      8     run: digest of everything both ends must agree on
    16     4     client
    20     4     round
    24     8     trip: requests of a run are numbered, all clients' together
    32     8     length of the body in bytes
    40     4     CRC-32 (zlib's) of bytes 0–39 and the body

The body is a row of records, each 16 bytes and its data:

    0      1     code
    1      1     index: of an exchange, or of what was measured
    2      2     flags
    4      4     number: of a round or phase, or how many answers a node knows
    8      8     length of the data in bytes

Numbers are unsigned, little endian. A request lists the node's orders, in order. A reply has one record for each SEND
and TRAIN of its request, in their order, and ANSWERS_KNOWN; or REFUSED and, if it is the node's own, ANSWERS_KNOWN.
Every length is compared with the bytes received before memory is allocated. Codes are those of `engine.transport`.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum
from math import isfinite

from pfedlms.engine.transport import Code, Record, Split
from pfedlms.errors import (
    ChecksumError,
    DecodeError,
    KindError,
    MagicError,
    OversizedError,
    TruncatedError,
    VersionError,
    printable,
)
from pfedlms.wire.checksum import crc32

MAGIC = b"PFLE"
VERSION = 1
_HEADER = struct.Struct("<4sBBH8sIIQQ")
_CRC = struct.Struct("<I")
RECORD = struct.Struct("<BBHIQ")
TRAINED = struct.Struct("<Id")
MEASURED = struct.Struct("<ddI")
ENVELOPE_BYTES = _HEADER.size + _CRC.size
RECORD_BYTES = RECORD.size
LONGEST_TEXT = 2000
LARGEST_LOSS = 1e12
"""Of a sample. Sums over clients and rounds stay finite."""


class Kind(IntEnum):
    REQUEST = 0
    LOOK = 1
    """As REQUEST, but executed on a copy of the node's state."""
    REPLY = 2


class Why(IntEnum):
    """Why a node refuses."""

    BROKEN = 0
    """The request cannot be read, or a frame in it is not valid."""
    RUN = 1
    """It is of another run, or its ends differ in settings, model or w⁰."""
    CLIENT = 2
    """It is for another client."""
    STALE = 3
    """It is of a trip, round or phase that this node has finished."""
    ORDER = 4
    """It needs an answer, a message or local steps that this node does not have."""
    DIVERGED = 5
    """The node's loss or model is not finite any more."""
    FAILED = 6
    """The node or its connection failed."""


@dataclass(frozen=True)
class Envelope:
    kind: Kind
    run: bytes
    client: int
    round: int
    trip: int
    records: tuple[Record, ...]

    def encode(self) -> bytes:
        parts = []
        for each in self.records:
            parts += [RECORD.pack(each.code, each.index, each.flags, each.number, len(each.data)), each.data]
        body = b"".join(parts)
        header = _HEADER.pack(
            MAGIC, VERSION, self.kind, 0, self.run, self.client, self.round, self.trip, len(body)
        )  # fmt: skip
        return header + _CRC.pack(crc32(memoryview(body), crc32(memoryview(header)))) + body

    def reply(self, *records: Record) -> Envelope:
        """A reply to this request."""
        return Envelope(Kind.REPLY, self.run, self.client, self.round, self.trip, records)


def decode(data: bytes, most_records: int | None = None) -> Envelope:
    """Parse and check one envelope; raises the matching WireError if it is not valid, or as soon as there are more
    records than expected. Data of records are views."""
    view = memoryview(data).cast("B").toreadonly()
    if len(view) < ENVELOPE_BYTES:
        raise TruncatedError(f"envelope: got {len(view)} bytes, expected a header of {ENVELOPE_BYTES}")
    magic, version, kind, reserved, run, client, round, trip, length = _HEADER.unpack_from(view)
    if magic != MAGIC:
        raise MagicError(f"envelope: got magic {bytes(magic)!r}, expected {MAGIC!r}")
    if version != VERSION:
        raise VersionError(f"envelope: got version {version}, expected {VERSION}; update the older end")
    body = view[ENVELOPE_BYTES:]
    if len(body) != length:
        short = len(body) < length
        raise (TruncatedError if short else OversizedError)(f"envelope: got {len(body)} bytes, expected {length}")
    (checksum,) = _CRC.unpack_from(view, _HEADER.size)
    actual = crc32(body, crc32(view[: _HEADER.size]))
    if checksum != actual:
        raise ChecksumError(f"envelope: got checksum {checksum:08x}, expected {actual:08x}; it was changed on the way")
    if reserved:
        raise DecodeError(f"envelope: got {reserved} in reserved bytes, expected 0")
    if kind not in list(Kind):
        raise KindError(f"envelope: got kind {kind}, expected 0 to {max(Kind)}")
    return Envelope(Kind(kind), bytes(run), client, round, trip, _records(body, most_records))


def _records(body: memoryview, most: int | None) -> tuple[Record, ...]:
    found, at = list[Record](), 0
    while at < len(body):
        if len(found) == most:
            raise OversizedError(f"envelope: got more than {most} records, as follows from the request")
        if len(body) - at < RECORD_BYTES:
            raise TruncatedError(f"record {len(found)}: got {len(body) - at} bytes, expected {RECORD_BYTES}")
        code, index, flags, number, length = RECORD.unpack_from(body, at)
        at += RECORD_BYTES
        if length > len(body) - at:
            raise TruncatedError(f"record {len(found)}: got {len(body) - at} bytes of data, expected {length}")
        if code not in list(Code):
            raise DecodeError(f"record {len(found)}: got code {code}, expected 0 to {max(Code)}")
        found.append(Record(Code(code), number, index, flags, body[at : at + length]))
        at += length
    return tuple(found)


def refusal(request: Envelope, why: Why, text: str, answers_known: int | None = None) -> bytes:
    """A reply: the request was not executed. A transport makes one of Why.FAILED if it knows why a reply is missing.
    Only the node itself adds `answers_known`."""
    words = text.encode()[:LONGEST_TEXT]
    known = [] if answers_known is None else [Record(Code.ANSWERS_KNOWN, answers_known)]
    return request.reply(Record(Code.REFUSED, flags=why, data=words), *known).encode()


def reason(record: Record) -> str:
    """The text of a REFUSED record, harmless on a terminal."""
    name = Why(record.flags).name if record.flags in list(Why) else f"reason {record.flags}"
    words = bytes(record.data[:LONGEST_TEXT]).decode(errors="replace")
    if "got magic b'PFLS'" in words:
        words = (
            "its pfedlms does not know signed requests; update pfedlms there and run `pfedlms deploy upgrade FOLDER`"
        )
    return f"{name.lower()}: {printable(words)}"


def trained(phase: int, samples: int, loss: float) -> Record:
    return Record(Code.TRAIN, phase, data=TRAINED.pack(samples, loss))


def read_trained(record: Record) -> tuple[int, float]:
    """N_k and the loss."""
    if len(record.data) != TRAINED.size:
        raise DecodeError(f"trained: got {len(record.data)} bytes, expected {TRAINED.size}")
    samples, loss = TRAINED.unpack(record.data)
    if samples < 1 or not abs(loss) <= LARGEST_LOSS:
        raise DecodeError(
            f"trained: got {samples} samples and a loss of {loss}, expected some and a loss of at most {LARGEST_LOSS:g}"
        )
    return samples, loss


def measured(split: Split, correct: float, loss: float, samples: int) -> Record:
    return Record(Code.MEASURED, index=split, data=MEASURED.pack(correct, loss, samples))


def read_measured(record: Record, percent: bool) -> tuple[Split, tuple[float, float, int]]:
    """The split, correct predictions (or the sum of a custom metric), summed loss, and samples."""
    if record.index not in list(Split) or len(record.data) != MEASURED.size:
        raise DecodeError(f"measured: got {len(record.data)} bytes of {record.index}, expected {MEASURED.size}")
    correct, loss, samples = MEASURED.unpack(record.data)
    is_count = isfinite(correct) and correct.is_integer() and 0 <= correct <= samples
    if not (isfinite(correct) and abs(loss) <= LARGEST_LOSS * max(1, samples) and (is_count or not percent)):
        raise DecodeError(
            f"measured: got {correct} of {samples} with a loss of {loss}, expected a count of at most as many and "
            f"a loss of at most {LARGEST_LOSS:g} per sample"
        )
    return Split(record.index), (int(correct) if percent else correct, loss, samples)
