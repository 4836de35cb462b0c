"""Envelopes: their bytes, and changed envelopes, which cause a typed error or a refusal."""

from __future__ import annotations

import random
import struct
import tracemalloc
import zlib
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from fleet import Fleet, make_config, serve_run

from pfedlms.deploy.envelope import (
    ENVELOPE_BYTES,
    Code,
    Envelope,
    Kind,
    Reason,
    Record,
    Split,
    decode,
    measurement_record,
    read_measurement,
    read_training,
    refusal,
    refusal_text,
    training_record,
)  # fmt: skip
from pfedlms.deploy.nodes import Nodes
from pfedlms.deploy.run_setup import RunSetup
from pfedlms.engine.server import Server
from pfedlms.errors import DecodeError, KindError, MagicError, OversizedError, TruncatedError, VersionError, WireError

SOME = Envelope(
    Kind.REQUEST, b"12345678", 3, 7, 1 << 40,
    (Record(Code.ANSWER, 7, 1, 0, b"an answer"), Record(Code.TRAIN, 8, flags=3), Record(Code.SEND, 8)),
)  # fmt: skip


def with_checksum(data: bytes) -> bytes:
    """The envelope with a valid checksum."""
    whole = bytearray(data)
    if len(whole) >= ENVELOPE_BYTES:
        whole[40:44] = struct.pack("<I", zlib.crc32(bytes(whole[:40]) + bytes(whole[44:])))
    return bytes(whole)


def mutated(data: bytes, random_: random.Random) -> bytes:
    """A few bytes changed, inserted, removed or repeated; half of the time with valid length and checksum."""
    found = bytearray(data)
    for _ in range(random_.randint(1, 4)):
        at = random_.randrange(len(found) + 1)
        match random_.randrange(5):
            case 0:
                found[at : at + 1] = bytes([random_.randrange(256)])
            case 1:
                found[at:at] = random_.randbytes(random_.randint(1, 9))
            case 2:
                del found[at : at + random_.randint(1, 30)]
            case 3:
                found[at : at + 8] = struct.pack("<Q", random_.choice([0, 1, 1 << 31, 1 << 32, 1 << 62, (1 << 64) - 1]))
            case 4:
                found += found[at:]
    if random_.random() < 0.5 and len(found) >= ENVELOPE_BYTES:
        found[32:40] = struct.pack("<Q", len(found) - ENVELOPE_BYTES)
        return with_checksum(bytes(found))
    return bytes(found)


def test_the_bytes_of_an_envelope_by_hand() -> None:
    envelope = Envelope(Kind.REPLY, b"12345678", 2, 3, 4, (Record(Code.ANSWERS_KNOWN, 5, 1, 6, b"data"),))
    body = bytes([Code.ANSWERS_KNOWN, 1, 6, 0, 5, 0, 0, 0, 4]) + bytes(7) + b"data"
    header = b"PFLE\x01\x02\0\0" + b"12345678" + struct.pack("<IIQQ", 2, 3, 4, 20)
    assert envelope.encode() == header + struct.pack("<I", zlib.crc32(header + body)) + body
    assert decode(SOME.encode()) == SOME
    assert SOME.reply().kind == Kind.REPLY


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (b"", TruncatedError),
        (with_checksum(b"X" + SOME.encode()[1:]), MagicError),
        (with_checksum(SOME.encode()[:4] + b"\x02" + SOME.encode()[5:]), VersionError),
        (SOME.encode() + b"\0", OversizedError),
        (SOME.encode()[:-1], TruncatedError),
        (with_checksum(SOME.encode()[:5] + b"\x09" + SOME.encode()[6:]), KindError),
        (with_checksum(SOME.encode()[:6] + b"\x01" + SOME.encode()[7:]), DecodeError),
        (with_checksum(SOME.encode()[:44] + b"\x63" + SOME.encode()[45:]), DecodeError),
    ],
)
def test_errors_are_typed(data: bytes, error: type[WireError]) -> None:
    with pytest.raises(error):
        decode(data)


def test_impossible_numbers_in_a_reply_are_refused() -> None:
    assert read_training(training_record(1, 7, 0.5)) == (7, 0.5)
    assert read_measurement(measurement_record(Split.TEST, 3, 1.5, 4), percent=True) == (Split.TEST, (3, 1.5, 4))
    metric = measurement_record(Split.SHARED, -2.5, 1.5, 4)
    assert read_measurement(metric, percent=False) == (Split.SHARED, (-2.5, 1.5, 4))
    for samples, loss in ((0, 1.0), (3, float("inf"))):
        with pytest.raises(DecodeError):
            read_training(training_record(1, samples, loss))
    for correct, loss in ((5, 1.0), (-1, 1.0), (2.5, 1.0), (float("nan"), 1.0), (2, float("nan"))):
        with pytest.raises(DecodeError):
            read_measurement(measurement_record(Split.TEST, correct, loss, 4), percent=True)
    for record in (Record(Code.TRAIN, data=b"1"), Record(Code.MEASURED, index=9, data=bytes(20))):
        with pytest.raises(DecodeError):
            (read_training if record.code == Code.TRAIN else lambda each: read_measurement(each, True))(record)


def test_a_refusal_has_a_reason_and_a_short_text() -> None:
    refused, known = decode(refusal(SOME, Reason.ORDER, "é" * 5000, answers_known=4)).records
    assert refusal_text(refused).startswith("order: éé")
    assert len(refusal_text(refused)) < 2000
    assert known == Record(Code.ANSWERS_KNOWN, 4)
    refused, _ = decode(refusal(SOME, Reason.FAILED, "no file a\udcff", answers_known=4)).records  # of no encoding
    assert refusal_text(refused) == "failed: no file a?"


def test_a_false_length_allocates_no_memory() -> None:
    huge = SOME.encode()[:32] + struct.pack("<Q", 1 << 62) + SOME.encode()[40:]
    within = bytearray(SOME.encode())
    within[52:60] = struct.pack("<Q", 1 << 62)
    tracemalloc.start()
    try:
        for data in (huge, with_checksum(bytes(within))):
            with pytest.raises(TruncatedError):
                decode(data)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("method", ["pfedlms", "sketchvote"])
def test_every_changed_envelope_is_an_error_or_a_refusal(method: str, tmp_path: Path) -> None:
    """Changed requests at a node, and changed replies at the server."""
    random_ = random.Random(5)
    config = make_config(method, tmp_path / "run", train={"rounds": 2})
    fleet = Fleet(config, tmp_path / "nodes")
    serve_run(config, fleet)
    pairs = [trip[1] for trip in fleet.trips]
    refused = errors = 0
    with Fleet(config, tmp_path / "other").node(1) as node:
        for number in range(1500):
            answer = decode(node.handle(mutated(pairs[number % len(pairs)][0], random_)))
            assert answer.kind == Kind.REPLY
            refused += answer.records[0].code == Code.REFUSED
    assert refused > 1300
    setup = RunSetup(config)
    server = Server(setup.terms)
    state = replace(server.begin(), ask_ahead=True)
    (_, reply), arrived = pairs[0], {}
    assert reply is not None
    nodes = Nodes(setup, SimpleNamespace(send=lambda requests, timeout: {1: arrived["now"]}))
    for _ in range(2000):
        inbox = server.inbox(state, server.outbox(state))
        arrived["now"] = mutated(reply, random_)
        nodes.carry(inbox.requests, inbox)
        assert (1 in inbox.failed) != (1 in inbox.trained)  # accepted as a whole or not at all
        assert inbox.aggregation is not None
        assert inbox.aggregation.valid == len(inbox.trained)
        errors += 1 in inbox.failed
    assert errors > 1800
