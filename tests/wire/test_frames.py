"""Frames: the header by hand, and each check of an intake with a frame that fails it."""

from __future__ import annotations

import hashlib
import math
import struct
import tracemalloc
import zlib
from typing import Any

import numpy as np
import pytest

from factories import sealed
from pfedlms.errors import (
    ChecksumError,
    DecodeError,
    DigestError,
    OversizedError,
    SenderError,
    TruncatedError,
    WireError,
)
from pfedlms.wire import Floats, Message
from pfedlms.wire.frames import HEADER_BYTES, Intake, agreement_digest, frame, frame_rows

DIGEST = bytes(range(1, 9))
STATISTICS = Message(0, (Floats("mean", 2), Floats("variance", 2, minimum=0)))
VALUES = {"mean": np.float32([0.5, -2]), "variance": np.float32([1, 0])}


def valid_frame(**changes: Any) -> bytes:
    header = {"round": 3, "sender": 1, "samples": 17, "digest": DIGEST, **changes}
    return frame(STATISTICS, VALUES, **header)


VALID = valid_frame()


def with_bytes(data: bytes, at: int, new: bytes) -> bytes:
    return sealed(data[:at] + new + data[at + len(new) :])


def intake(message: Message = STATISTICS, senders: tuple[int, ...] = (0, 1, 2)) -> Intake:
    return Intake(message, DIGEST, 3, senders)


# The header.


def test_the_bytes_of_a_frame_by_hand() -> None:
    payload = bytes.fromhex("0000003f000000c00000803f00000000")
    header = bytes.fromhex("50464c4d 01 00 0000 03000000 01000000 11000000 1000000000000000 0102030405060708")
    assert header + struct.pack("<I", zlib.crc32(header + payload)) + payload == VALID


def test_a_buffer_can_be_reused() -> None:
    buffer = bytearray(b"?" * 90)
    for values in (VALUES, {"mean": VALUES["variance"], "variance": VALUES["variance"]}):
        header = {"round": 3, "sender": 1, "samples": 17, "digest": DIGEST}
        there = frame(STATISTICS, values, **header, out=buffer)
        assert isinstance(there, memoryview)
        assert there.obj is buffer
        assert bytes(there) == frame(STATISTICS, values, **header) == buffer[:56]
        assert buffer[56:] == b"?" * 34
        row = {name: array[2] for name, array in STATISTICS.empty_values(4).items()}
        received = intake().accept(there, row)
        assert all(received.values[name] is row[name] for name in row)
        assert {name: value.tolist() for name, value in row.items()} == {n: v.tolist() for n, v in values.items()}
    with pytest.raises(ValueError, match="out: got 55 bytes, expected 56 or more"):
        valid_frame(out=bytearray(55))


def test_accepted_values_do_not_change_with_the_buffer() -> None:
    buffer = bytearray(VALID)
    received = intake().accept(buffer)
    assert all(value.flags.writeable for value in received.values.values())
    buffer[:] = bytes(len(buffer))
    assert received.values["mean"].tolist() == [0.5, -2]


def test_the_largest_numbers_of_a_header_are_accepted() -> None:
    largest = 0xFFFFFFFE
    data = frame(STATISTICS, VALUES, round=0xFFFFFFFF, sender=largest, samples=0xFFFFFFFF, digest=DIGEST)
    received = Intake(STATISTICS, DIGEST, 0xFFFFFFFF, (largest,)).accept(data)
    assert (received.sender, received.samples) == (largest, 0xFFFFFFFF)


# Errors with their texts; the vectors have a frame for every check.

u64 = struct.Struct("<Q").pack
REFUSED = [
    pytest.param(b"", TruncatedError, "got 0 bytes, expected a header of 40", id="nothing"),
    pytest.param(VALID[:40], TruncatedError, "payload: got 0 bytes, expected 16", id="payload-missing"),
    pytest.param(with_bytes(VALID[:-4], 20, u64(12)), TruncatedError, "up to field 'variance'", id="field-cut"),
    pytest.param(with_bytes(VALID + b"\0", 20, u64(17)), OversizedError, "got 17 bytes", id="one-byte-more-declared"),
    pytest.param(
        with_bytes(VALID[:-1], 20, u64(14)), OversizedError, "payload: got 15 bytes, expected 14", id="less-declared"
    ),
    pytest.param(with_bytes(VALID, 20, u64((1 << 64) - 1)), OversizedError, "expected at most 16", id="length-2^64-1"),
    pytest.param(VALID[:-1] + b"\1", ChecksumError, "changed on the way", id="payload-changed"),
    pytest.param(
        valid_frame(digest=bytes(8)), DigestError, "got 0000000000000000, expected 0102030405060708", id="digest"
    ),
    pytest.param(valid_frame(sender=3), SenderError, "got 3, which takes no part", id="unknown-sender"),
    pytest.param(with_bytes(VALID, 40, struct.pack("<f", math.nan)), DecodeError, "'mean': got nan", id="mean-nan"),
]


@pytest.mark.parametrize(("data", "error", "text"), REFUSED)
def test_a_wrong_frame_is_refused_with_its_error(data: bytes, error: type[WireError], text: str) -> None:
    receiver = intake()
    with pytest.raises(error) as caught:
        receiver.accept(data)
    assert type(caught.value) is error
    assert text in str(caught.value)
    assert receiver.accept(VALID).sender == 1  # a refused frame changes nothing


def test_checks_have_the_order_of_the_page() -> None:
    """A frame fails all checks and is corrected step by step; errors have the order of docs/protocol.md, section 8."""
    wrong = struct.pack("<4sBBHIIIQ8s", b"XXXX", 9, 9, 9, 9, 9, 0, 1 << 40, bytes(8)) + bytes(4)
    wrong += struct.pack("<4f", math.nan, 0, 0, 0)
    corrected, order = bytearray(wrong), list[str]()
    true = VALID
    fixes = [(0, 4), (4, 5), (20, 28), None, (6, 8), (28, 36), (5, 6), (8, 12), (12, 16), (16, 20), (40, 56)]
    for fix in fixes:
        with pytest.raises(WireError) as caught:
            intake().accept(bytes(corrected))
        order.append(type(caught.value).__name__.removesuffix("Error"))
        if fix is not None:
            corrected[fix[0] : fix[1]] = true[fix[0] : fix[1]]
        if "Checksum" in order:
            corrected[:] = sealed(bytes(corrected))
    assert " ".join(order) == "Magic Version Oversized Checksum Decode Digest Kind Round Sender Decode Decode"
    assert bytes(corrected) == true


# One message from each sender.


def test_a_repeated_sender_is_refused() -> None:
    receiver = intake()
    accepted = [receiver.accept(VALID).sender]
    for again in (VALID, valid_frame(samples=99)):
        with pytest.raises(SenderError, match="a second message of 1 in one exchange"):
            receiver.accept(again)
    accepted += [receiver.accept(valid_frame(sender=k)).sender for k in (0, 2)]
    assert accepted == [1, 0, 2]


# Frames of all clients at once.


def test_rows_have_the_frames_of_single_messages() -> None:
    message = Message(0, (Floats("model", 1000), Floats("statistics", 77)))
    draw = np.random.default_rng(0)
    rows = {part.name: draw.standard_normal((3, part.count), dtype=np.float32) for part in message.fields}
    header = {"round": 2, "digest": DIGEST}
    expected = [
        frame(message, {name: own[row] for name, own in rows.items()}, sender=sender, samples=sender + 1, **header)
        for row, sender in enumerate((1, 4, 9))
    ]
    out = np.empty((3, HEADER_BYTES + message.max_bytes), np.uint8)
    frame_rows(message, rows, senders=[1, 4, 9], samples=[2, 5, 10], out=out, **header)
    assert [own.tobytes() for own in out] == expected
    received = Intake(message, DIGEST, 2, {1, 4, 9}).accept_rows(out)
    assert received is not None
    assert (received.senders, received.samples) == ([1, 4, 9], [2, 5, 10])
    assert all(np.array_equal(received.values[name], own) for name, own in rows.items())


# Memory.


@pytest.mark.parametrize("length", [1 << 20, (1 << 64) - 1])
def test_a_false_length_allocates_no_memory(length: int) -> None:
    data, receiver = with_bytes(VALID, 20, u64(length)), intake()
    with pytest.raises(WireError):  # memory that the first call keeps (caches, names) is not counted
        receiver.accept(data)
    tracemalloc.start()
    try:
        with pytest.raises(WireError):
            receiver.accept(data)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 50_000


# The digest.


def test_the_digest_of_an_agreement_by_hand() -> None:
    text = "a=0\nb=3fb999999999999a\nb.x=1\nc=00ff\nd=text\ne=-7\n"
    values = {"e": -7, "d": "text", "c": b"\x00\xff", "b.x": True, "b": 0.1, "a": False}
    assert agreement_digest(values) == hashlib.sha256(text.encode()).digest()[:8]
    numpys = {"e": np.int32(-7), "d": np.str_("text"), "c": np.bytes_(b"\x00\xff"), "b.x": np.True_, "a": np.False_}
    assert agreement_digest({**numpys, "b": np.float64(0.1)}) == agreement_digest(values)
    assert agreement_digest({"a": np.float32(1)}) == agreement_digest({"a": 1.0})
