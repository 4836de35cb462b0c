"""Requests and replies between the server and a node: envelopes with a checksum around frames of the wire format.

    offset size
    0      4     magic "PFLE"
    4      1     version of this envelope
    5      1     kind: 0 request, 1 request to measure only, 2 reply
    6      2     reserved, zero
    8      8     run: digest of everything the server and the node must agree on
    16     4     client
    20     4     round
    24     8     trip: its number, counted from the start of the run
    32     8     length of the body in bytes
    40     4     CRC-32 (zlib's) of bytes 0–39 and the body

The body is a sequence of records. Each is 16 bytes and its data:

    0      1     code, as in `engine.transport`
    1      1     index: of an exchange, or of the split that was measured
    2      2     flags
    4      4     number: of a round or phase, or of answers that the node knows
    8      8     length of the data in bytes

Numbers are unsigned, little endian. The records of a request are orders, which the node executes one after the other.
A reply has one record for each SEND and TRAIN of its request, in the same order, and ANSWERS_KNOWN. A refusal has
REFUSED and ANSWERS_KNOWN. Every length is compared with the bytes received before memory is allocated.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from math import isfinite

from pfedlms.engine.transport import Code, Flag, Record, Split
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
    printable,
)

MAGIC = b"PFLE"
VERSION = 1
_HEADER = struct.Struct("<4sBBH8sIIQQ")
_CRC = struct.Struct("<I")
RECORD = struct.Struct("<BBHIQ")
TRAINING = struct.Struct("<Id")
MEASUREMENT = struct.Struct("<ddI")
ENVELOPE_BYTES = _HEADER.size + _CRC.size
RECORD_BYTES = RECORD.size
MAX_TEXT_BYTES = 2000
MAX_LOSS = 1e12
"""Largest loss per sample. Sums over clients and rounds stay finite."""


class Kind(IntEnum):
    REQUEST = 0
    LOOK = 1
    """A request that the node executes on a copy of its state, to measure its model."""
    REPLY = 2


class Reason(IntEnum):
    """Reason a node refuses."""

    BROKEN = 0
    """The request cannot be read, or a frame in it is not valid."""
    RUN = 1
    """It is of another run, or server and node differ in settings, model or w⁰."""
    CLIENT = 2
    """It is for another client."""
    STALE = 3
    """It is of a trip, round or phase that this node has finished."""
    ORDER = 4
    """It needs an answer, a message or local steps that this node does not have."""
    DIVERGED = 5
    """The node's loss or model is not finite any more."""
    FAILED = 6
    """The node failed."""


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
        for record in self.records:
            header = RECORD.pack(record.code, record.index, record.flags, record.number, len(record.data))
            parts += [header, record.data]
        body = b"".join(parts)
        header = _HEADER.pack(
            MAGIC, VERSION, self.kind, 0, self.run, self.client, self.round, self.trip, len(body)
        )  # fmt: skip
        return header + _CRC.pack(zlib.crc32(body, zlib.crc32(header))) + body

    @property
    def refused(self) -> Record | None:
        """What says why a node refused; None in any other reply."""
        return self.records[0] if self.records and self.records[0].code == Code.REFUSED else None

    def reply(self, *records: Record) -> Envelope:
        """A reply to this request."""
        return Envelope(Kind.REPLY, self.run, self.client, self.round, self.trip, records)


def decode(data: bytes, most_records: int | None = None) -> Envelope:
    """Parse and check one envelope. Raises the matching WireError if it is not valid or has more than `most_records`.
    The data of its records are views."""
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
        error = TruncatedError if len(body) < length else OversizedError
        raise error(f"envelope: got {len(body)} bytes, expected {length}")
    (checksum,) = _CRC.unpack_from(view, _HEADER.size)
    actual = zlib.crc32(body, zlib.crc32(view[: _HEADER.size]))
    if checksum != actual:
        raise ChecksumError(f"envelope: got checksum {checksum:08x}, expected {actual:08x}; it was changed on the way")
    if reserved:
        raise DecodeError(f"envelope: got {reserved} in reserved bytes, expected 0")
    if kind not in list(Kind):
        raise KindError(f"envelope: got kind {kind}, expected 0 to {max(Kind)}")
    return Envelope(Kind(kind), bytes(run), client, round, trip, _records(body, most_records))


def _records(body: memoryview, most: int | None) -> tuple[Record, ...]:
    records, at = list[Record](), 0
    while at < len(body):
        count = len(records)
        if count == most:
            raise OversizedError(f"envelope: got more than {most} records, as follows from the request")
        if len(body) - at < RECORD_BYTES:
            raise TruncatedError(f"record {count}: got {len(body) - at} bytes, expected {RECORD_BYTES}")
        code, index, flags, number, length = RECORD.unpack_from(body, at)
        at += RECORD_BYTES
        if length > len(body) - at:
            raise TruncatedError(f"record {count}: got {len(body) - at} bytes of data, expected {length}")
        if code not in list(Code):
            raise DecodeError(f"record {count}: got code {code}, expected 0 to {max(Code)}")
        records.append(Record(Code(code), number, index, flags, body[at : at + length]))
        at += length
    return tuple(records)


def refusal(request: Envelope, reason: Reason, text: str, answers_known: int) -> bytes:
    """The encoded reply that the request was not executed."""
    refused = Record(Code.REFUSED, flags=reason, data=text.encode(errors="replace")[:MAX_TEXT_BYTES])
    return request.reply(refused, Record(Code.ANSWERS_KNOWN, answers_known)).encode()


def refusal_text(record: Record) -> str:
    """The reason and text of a REFUSED record, with control characters escaped."""
    name = Reason(record.flags).name if record.flags in list(Reason) else f"reason {record.flags}"
    text = bytes(record.data[:MAX_TEXT_BYTES]).decode(errors="replace")
    return f"{name.lower()}: {printable(text)}"


def training_record(phase: int, samples: int, loss: float) -> Record:
    return Record(Code.TRAIN, phase, data=TRAINING.pack(samples, loss))


def read_training(record: Record) -> tuple[int, float]:
    """N_k and the loss of a training record."""
    if len(record.data) != TRAINING.size:
        raise DecodeError(f"trained: got {len(record.data)} bytes, expected {TRAINING.size}")
    samples, loss = TRAINING.unpack(record.data)
    if samples < 1 or not abs(loss) <= MAX_LOSS:
        expected = f"expected some and a loss of at most {MAX_LOSS:g}"
        raise DecodeError(f"trained: got {samples} samples and a loss of {loss}, {expected}")
    return samples, loss


def measurement_record(split: Split, correct: float, loss: float, samples: int) -> Record:
    return Record(Code.MEASURED, index=split, data=MEASUREMENT.pack(correct, loss, samples))


def read_measurement(record: Record, percent: bool) -> tuple[Split, tuple[float, float, int]]:
    """The split, and its correct predictions (or the sum of a custom metric), summed loss and number of samples."""
    if record.index not in list(Split) or len(record.data) != MEASUREMENT.size:
        raise DecodeError(f"measured: got {len(record.data)} bytes of {record.index}, expected {MEASUREMENT.size}")
    correct, loss, samples = MEASUREMENT.unpack(record.data)
    is_count = isfinite(correct) and correct.is_integer() and 0 <= correct <= samples
    if not (isfinite(correct) and abs(loss) <= MAX_LOSS * max(1, samples) and (is_count or not percent)):
        expected = f"expected a count of at most as many and a loss of at most {MAX_LOSS:g} per sample"
        raise DecodeError(f"measured: got {correct} of {samples} with a loss of {loss}, {expected}")
    return Split(record.index), (int(correct) if percent else correct, loss, samples)


# --- a reply and its request


def largest_reply(request: Envelope, messages: Sequence[int]) -> tuple[int, int]:
    """Most bytes and most records that a reply to this request may have; `messages` is from `message_bytes`."""
    size, records = ENVELOPE_BYTES + RECORD_BYTES, 1  # ANSWERS_KNOWN
    for order in request.records:
        if order.code == Code.SEND:
            size += RECORD_BYTES + (messages[order.index] if order.index < len(messages) else 0)
            records += 1
        elif order.code == Code.TRAIN:
            counts = len(Split) * bool(order.flags & (Flag.PERSONAL | Flag.SHARED))
            size += RECORD_BYTES + TRAINING.size + counts * (RECORD_BYTES + MEASUREMENT.size)
            records += 1 + counts
    refusal_size = ENVELOPE_BYTES + 2 * RECORD_BYTES + MAX_TEXT_BYTES
    return max(size, refusal_size), max(records, 2)


def check_reply(request: Envelope, data: bytes, messages: Sequence[int]) -> Envelope:
    """Decode a reply and check that it is one to this request; raises WireError. `read_reply` checks its records."""
    size, records = largest_reply(request, messages)
    if len(data) > size:
        raise OversizedError(f"reply: got {len(data)} bytes, expected at most {size}, as follows from the request")
    reply = decode(data, records)
    if [record.code for record in reply.records].count(Code.ANSWERS_KNOWN) > 1:
        raise OversizedError("reply: got more than one ANSWERS_KNOWN")
    if reply.kind != Kind.REPLY:
        raise DecodeError("reply: got a request")
    if reply.run != request.run:
        raise DigestError(f"reply: got one of run {reply.run.hex()}, expected {request.run.hex()}")
    if reply.client != request.client:
        raise SenderError(f"reply: got one of client {reply.client}, expected {request.client}")
    if (reply.round, reply.trip) != (request.round, request.trip):
        if reply.refused and reply.refused.flags == Reason.BROKEN:  # the node could not read round and trip
            raise WireError(f"refused, {refusal_text(reply.refused)}")
        got = f"reply: got one to round {reply.round + 1}, trip {reply.trip}"
        raise RoundError(f"{got}, expected {request.round + 1}, {request.trip}")
    return reply


def read_reply(
    request: Envelope, reply: Envelope, percent: bool
) -> tuple[bytes | memoryview | None, tuple[int, float] | None, dict[Split, tuple[float, float, int]]]:
    """The node's message, its N_k and loss, and its measurements. Raises the matching WireError unless the reply has
    exactly what the request asked for. The message itself is not decoded."""
    if reply.refused:
        raise WireError(f"refused, {refusal_text(reply.refused)}")
    rest = [record for record in reply.records if record.code != Code.ANSWERS_KNOWN]
    frame, trained, counts = None, None, dict[Split, tuple[float, float, int]]()
    for order in request.records:
        if order.code not in (Code.SEND, Code.TRAIN):
            continue
        record = rest.pop(0) if rest else None
        if record is None or (record.code, record.number, record.index) != (order.code, order.number, order.index):
            raise DecodeError(f"reply: expected {order.code.name.lower()} {order.number}, got something else")
        if order.code == Code.SEND:
            frame = record.data
        else:
            trained = read_training(record)
            while order.flags and rest and rest[0].code == Code.MEASURED:
                split, count = read_measurement(rest.pop(0), percent)
                counts[split] = count
            if order.flags & Flag.PERSONAL and not counts.get(Split.TEST, (0, 0, 0))[2]:
                raise DecodeError("reply: got no measurement of the test split, expected one")
    if rest:
        raise DecodeError(f"reply: got {len(rest)} records that the server did not ask for")
    return frame, trained, counts
