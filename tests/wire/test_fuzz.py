"""Mutated messages: 300,000 of them, the same ones in every run.

Without a repaired checksum none may be accepted. With a repaired checksum (a checksum is no authentication)
accepted messages must be well formed, and refused ones must raise a WireError, never another exception.
"""

from __future__ import annotations

import random
import struct
from collections import Counter
from dataclasses import dataclass

import numpy as np
import pytest

from factories import random_values, sealed
from pfedlms.errors import WireError
from pfedlms.wire import Bits, Floats, Mask, MaskedBytes, MaskedRows, Message, Positions, Scalar, Signs, Symbols
from pfedlms.wire.fields import Field, RowField
from pfedlms.wire.frames import Intake, Received, frame

BROKEN, REPAIRED = 150_000, 150_000
DIGEST, ROUND, SENDERS = bytes.fromhex("0123456789abcdef"), 5, (0, 1, 2)


@dataclass(frozen=True)
class Target:
    """An expected message and valid frames of it."""

    message: Message
    frames: tuple[bytes, ...]

    def accept(self, data: bytes) -> Received:
        return Intake(self.message, DIGEST, ROUND, SENDERS).accept(data)


def target(draw: np.random.Generator, kind: int, *fields: Field) -> Target:
    message = Message(kind, fields)
    frames = []
    for sender in SENDERS:
        header = {"round": ROUND, "sender": sender, "samples": 10 + sender, "digest": DIGEST}
        frames.append(frame(message, random_values(message, draw), **header))
    return Target(message, tuple(frames))


@pytest.fixture(scope="module")
def targets() -> list[Target]:
    draw = np.random.default_rng(1)
    voted = Bits("signs", 19), Floats("scale", 2, minimum=0)
    return [
        target(draw, 0, Floats("mean", 2), Floats("variance", 2, minimum=0)),
        target(draw, 2, Symbols("symbols", (5, 40), 3)),
        target(draw, 2, Symbols("symbols", (9, 3), 8)),
        target(draw, 2, Symbols("symbols", (16, 1), 10)),
        target(draw, 0, Floats("model", 3)),
        target(draw, 0, Signs("signs", 11), Scalar("norm", 0.0)),
        target(draw, 0, Mask("mask", 5), MaskedRows("rows", "mask", 5, 2)),
        target(draw, 1, Scalar("magnitude", 0.0), Signs("signs", 6), Positions("positions", 6, 90)),
        target(draw, 0, *voted, Mask("checked", 1), MaskedBytes("digest", "checked", 8)),
        target(draw, 1, *voted),
    ]


# Mutations make bytes from a frame and another one.

HEADER_FIELDS = ((0, 4), (4, 1), (5, 1), (6, 2), (8, 4), (12, 4), (16, 4), (20, 8), (28, 8), (36, 4))


def flip_bits(draw: random.Random, data: bytes, other: bytes) -> bytes:
    changed = bytearray(data)
    for _ in range(draw.choice((1, 1, 2, 5))):
        changed[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    return bytes(changed)


def set_bytes(draw: random.Random, data: bytes, other: bytes) -> bytes:
    changed = bytearray(data)
    for _ in range(draw.choice((1, 1, 3))):
        changed[draw.randrange(len(data))] = draw.choice((0, 1, 127, 128, 255, draw.randrange(256)))
    return bytes(changed)


def payload_bytes(draw: random.Random, data: bytes, other: bytes) -> bytes:
    at = draw.randrange(40, len(data))
    new = draw.randbytes(draw.randint(1, len(data) - at))
    return data[:at] + new + data[at + len(new) :]


def truncate(draw: random.Random, data: bytes, other: bytes) -> bytes:
    return data[: draw.randrange(len(data))]


def extend(draw: random.Random, data: bytes, other: bytes) -> bytes:
    return data + draw.randbytes(draw.choice((1, 1, 2, 8, 60)))


def splice(draw: random.Random, data: bytes, other: bytes) -> bytes:
    at = draw.randint(0, len(data))
    return data[:at] + other[draw.choice((at, draw.randint(0, len(other)))) :]


def edit_header(draw: random.Random, data: bytes, other: bytes) -> bytes:
    at, size = draw.choice(HEADER_FIELDS)
    most = (1 << 8 * size) - 1
    now = int.from_bytes(data[at : at + size], "little")
    value = draw.choice((0, 1, 2, 3, most, most >> 1, now + 1, now - 1, 1 << draw.randrange(8 * size)))
    return data[:at] + (value & most).to_bytes(size, "little") + data[at + size :]


def random_bytes(draw: random.Random, data: bytes, other: bytes) -> bytes:
    start = draw.choice((0, 0, 4, 5, 36))
    return data[:start] + draw.randbytes(draw.randrange(100))


MUTATIONS = (flip_bits, set_bytes, payload_bytes, truncate, extend, splice, edit_header, random_bytes)
# With a valid checksum these can give valid messages; the others change the length, which few messages allow.
CAN_PASS = ("flip_bits", "set_bytes", "payload_bytes", "splice", "edit_header")


def repaired(draw: random.Random, data: bytes) -> bytes:
    """The same with a valid checksum, and half of the time with a valid length."""
    if len(data) < 40:
        return data
    if draw.random() < 0.5:
        data = data[:20] + struct.pack("<Q", len(data) - 40) + data[28:]
    return sealed(data)


def mutants(seed: int, targets: list[Target], count: int):  # type: ignore[no-untyped-def]
    """`count` times (draw, receiver, mutated bytes, mutation); no frame that is unchanged."""
    draw = random.Random(seed)
    sent = {data for each in targets for data in each.frames}
    made = 0
    while made < count:
        mutate = MUTATIONS[made % len(MUTATIONS)]
        receiver = draw.choice(targets)
        other = draw.choice(draw.choice(targets).frames if draw.random() < 0.5 else receiver.frames)
        data = mutate(draw, draw.choice(receiver.frames), other)
        if data not in sent:
            made += 1
            yield draw, receiver, data, mutate.__name__


def outcomes(seed: int, targets: list[Target], count: int, repair: bool) -> tuple[Counter[str], Counter[str]]:
    """Numbers of refused mutants by error and of accepted ones by mutation; accepted ones are well formed."""
    refused, accepted = Counter[str](), Counter[str]()
    for draw, receiver, broken, mutation in mutants(seed, targets, count):
        data = repaired(draw, broken) if repair else broken
        try:
            received = receiver.accept(data)
        except WireError as error:
            refused[type(error).__name__] += 1
        else:
            check_well_formed(receiver.message, received, data)
            accepted[mutation] += 1
    return refused, accepted


def test_no_changed_message_is_accepted(targets: list[Target]) -> None:
    refused, accepted = outcomes(1, targets, BROKEN, repair=False)
    assert accepted == {}
    assert set(refused) == {"TruncatedError", "OversizedError", "MagicError", "VersionError", "ChecksumError"}
    assert refused["ChecksumError"] > BROKEN // 4


def test_repaired_messages_are_well_formed_or_refused(targets: list[Target]) -> None:
    """All errors that one message can cause occur, and enough mutants are accepted to be meaningful."""
    refused, accepted = outcomes(2, targets, REPAIRED, repair=True)
    names = "Truncated Oversized Magic Version Digest Kind Round Sender Decode"
    assert set(refused) == {f"{name}Error" for name in names.split()}
    assert refused["DecodeError"] > 1000
    assert min(accepted[name] for name in CAN_PASS) > 500, accepted


def test_rows_are_accepted_exactly_when_each_of_them_is(targets: list[Target]) -> None:
    """A mutant at any place among valid frames of its length: all rows are accepted or none, as one by one."""
    refused: Counter[bool] = Counter()
    in_rows = [each for each in targets if all(isinstance(part, RowField) for part in each.message.fields)]
    for draw, receiver, broken, _ in mutants(3, in_rows, 30_000):
        data = repaired(draw, broken) if draw.random() < 0.9 else broken
        rows = [each for each in receiver.frames if len(each) == len(data)][:2]
        if len(data) < 40 or not rows:
            continue
        rows.insert(draw.randrange(len(rows) + 1), data)
        one_by_one = Intake(receiver.message, DIGEST, ROUND, SENDERS)
        try:
            expected = [one_by_one.accept(each) for each in rows]
        except WireError:
            expected = None
        together = Intake(receiver.message, DIGEST, ROUND, SENDERS)
        got = together.accept_rows(np.array([list(each) for each in rows], dtype=np.uint8))
        assert (got is None) == (expected is None), data.hex()
        for row, other in enumerate(expected or ()):
            assert got is not None
            assert (got.senders[row], got.samples[row]) == (other.sender, other.samples)
            assert {name: value[row].tobytes() for name, value in got.values.items()} == {
                name: value.tobytes() for name, value in other.values.items()
            }
        # An accepted sender is refused the second time.
        again = together.accept_rows(np.array([list(rows[0])], dtype=np.uint8))
        assert got is None or again is None
        refused[got is None] += 1
    assert min(refused[True], refused[False]) > 1000, refused


def check_well_formed(message: Message, received: Received, data: bytes) -> None:
    assert received.sender in SENDERS
    assert 1 <= received.samples <= 0xFFFFFFFF
    assert len(data) - 40 <= message.max_bytes
    for field in message.fields:
        values = received.values[field.name]
        assert (values.dtype, values.shape) == (field.dtype, field.shape)
        if type(field) is Symbols:
            assert values.max() < field.levels
        elif type(field) is Positions:
            assert 0 <= values[0] < values[-1] < field.places
            assert np.diff(values).min() > 0
        else:
            assert np.isfinite(values).all()
            assert values.min() >= getattr(field, "minimum", -np.inf)
    # Each value has one encoding, so the decoded values give the same bytes.
    header = {"round": ROUND, "sender": received.sender, "samples": received.samples, "digest": DIGEST}
    assert frame(message, received.values, **header) == data
