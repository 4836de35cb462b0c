"""Fields and messages: bytes worked by hand, round trips, and refused values and payloads."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pfedlms.errors import DecodeError, OversizedError, TruncatedError
from pfedlms.wire import Bits, Floats, Mask, MaskedBytes, MaskedRows, Message, Positions, Scalar, Signs, Symbols
from pfedlms.wire.fields import Field
from pfedlms.wire.golomb import Count

quick = settings(deadline=None, max_examples=60)  # the first example may compile
finite = st.floats(width=32, allow_nan=False, allow_infinity=False)


def encoded(values: dict[str, Any], *fields: Field) -> bytes:
    message = Message(0, fields)
    payload = bytearray(message.size(values))
    message.write(values, memoryview(payload))
    return bytes(payload)


def decoded(payload: bytes, *fields: Field) -> Any:
    """The values of all fields, or the value of the only one."""
    values = Message(0, fields).read(memoryview(payload).toreadonly())
    assert list(values) == [field.name for field in fields]
    return values if len(fields) > 1 else values[fields[0].name]


def round_trip(fields: tuple[Field, ...], values: dict[str, Any]) -> dict[str, Any]:
    """The decoded values. Their size is as declared, and they encode to the same bytes."""
    message = Message(0, fields)
    payload = encoded(values, *fields)
    assert len(payload) <= message.max_bytes == sum(field.max_bytes for field in fields)
    new = message.read(memoryview(payload))
    assert encoded(new, *fields) == payload
    for field in fields:
        assert (new[field.name].dtype, new[field.name].shape) == (field.dtype, field.shape)
    return new


# Bytes worked by hand.


def test_bits_are_sent_unchanged() -> None:
    bits = Bits("bits", 11)
    packed = np.array([0b10110001, 0b101], dtype=np.uint8)
    assert encoded({"bits": packed}, bits) == bytes([0b10110001, 0b101])
    signs = np.array([1, -1, -1, -1, 1, 1, -1, 1, 1, -1, 1], dtype=np.float32)
    assert encoded({"bits": signs}, Signs("bits", 11)) == encoded({"bits": packed}, bits)
    assert decoded(bytes([0b10110001, 0b101]), bits).tolist() == [0b10110001, 0b101]
    with pytest.raises(DecodeError, match="got last byte 0x0d, expected only its lowest 3 bits in use"):
        decoded(bytes([0, 0b1101]), bits)
    with pytest.raises(ValueError, match="got last byte 0x0d, expected only its lowest 3 bits in use"):
        encoded({"bits": np.array([0, 0b1101], dtype=np.uint8)}, bits)
    assert round_trip((Bits("full", 16),), {"full": np.array([255, 255], dtype=np.uint8)})["full"].tolist() == [255] * 2


def test_masked_bytes_are_sent_or_omitted() -> None:
    fields = Mask("there", 1), MaskedBytes("digest", "there", 3)
    digest = np.array([1, 2, 255], dtype=np.uint8)
    assert encoded({"there": np.array([True]), "digest": digest}, *fields) == bytes([1, 1, 2, 255])
    assert encoded({"there": np.array([False]), "digest": digest}, *fields) == bytes([0])
    for there in (True, False):
        values = round_trip(fields, {"there": np.array([there]), "digest": digest})
        assert values["digest"].tolist() == (digest.tolist() if there else [0, 0, 0])
    with pytest.raises(TruncatedError, match="expected at least 4 up to field 'digest'"):
        decoded(bytes([1, 1, 2]), *fields)
    with pytest.raises(OversizedError):
        decoded(bytes([0, 1, 2, 255]), *fields)


# Round trips.


@quick
@given(st.lists(st.booleans(), min_size=1, max_size=40), st.integers(1, 5), st.data())
def test_masks_and_masked_rows_are_read_as_written(mask: list[bool], width: int, data: st.DataObject) -> None:
    row = st.lists(finite, min_size=width, max_size=width)
    rows = np.float32(data.draw(st.lists(row, min_size=len(mask), max_size=len(mask))))
    fields = (Mask("mask", len(mask)), MaskedRows("rows", "mask", len(mask), width))
    values = {"mask": np.array(mask), "rows": rows}
    result = round_trip(fields, values)
    assert result["mask"].tolist() == mask
    np.testing.assert_array_equal(result["rows"], np.where(np.array(mask)[:, None], rows, 0))
    assert len(encoded(values, *fields)) == (len(mask) + 7) // 8 + 4 * width * sum(mask)


@pytest.mark.parametrize(
    "field",
    [Symbols("x", (5, 7), 3), Signs("x", 9), Floats("x", 4), Floats("x", 2, -1.0), Scalar("x", 2.0), Mask("x", 9)],
    ids=repr,
)
def test_examples_are_valid_and_of_the_largest_size(field: Field) -> None:
    example = Message(0, (field,)).example()
    payload = encoded(example, field)
    assert len(payload) == field.max_bytes
    np.testing.assert_array_equal(decoded(payload, field), example["x"])


@pytest.mark.parametrize("offset", range(4))
def test_floats_may_start_at_any_byte(offset: int) -> None:
    """After a mask of one byte floats are not aligned in any buffer; they are read into an aligned copy."""
    fields = (Mask("mask", 3), Floats("x", 50))
    values = {"mask": np.ones(3, bool), "x": np.random.default_rng(1).normal(size=50).astype(np.float32)}
    payload = bytearray(offset + 1 + 4 * 50)
    part = memoryview(payload)[offset:]
    Message(0, fields).write(values, part)
    assert part == b"\7" + values["x"].tobytes()
    assert decoded(part, *fields)["x"].tobytes() == values["x"].tobytes()
    rows = np.frombuffer(part, np.uint8)[None, 1:]
    assert fields[1].read_rows(rows).flags.aligned


@pytest.mark.parametrize("threads", [1, 3])
def test_long_vectors_are_divided_among_threads(monkeypatch: pytest.MonkeyPatch, threads: int) -> None:
    monkeypatch.setattr("pfedlms.backend._WORTH_WAKING", 1 << 8)
    torch.set_num_threads(threads)
    values = np.random.default_rng(2).normal(size=5000).astype(np.float32)
    assert round_trip((Floats("x", 5000),), {"x": values})["x"].tobytes() == values.tobytes()
    for at in (0, 1023, 1024, 4999):
        bad = values.copy()
        bad[at:] = np.inf  # also in every later piece
        with pytest.raises(DecodeError, match=f"got inf at position {at}, expected"):
            decoded(bad.tobytes(), Floats("x", 5000))


# Refusals.


@pytest.mark.parametrize(
    ("field", "shape"),
    [(Floats("x", 3), (1,)), (Symbols("x", (2, 3), 3), (4,)), (Mask("x", 3), (1, 3)), (Positions("x", 2, 20), (3,))],
    ids=repr,
)  # fmt: skip
def test_values_of_another_shape_are_refused(field: Field, shape: tuple[int, ...]) -> None:
    expected = rf"field 'x': got shape \[{', '.join(map(str, shape))}\], expected \[{field.shape[0]}\]"
    with pytest.raises(ValueError, match=expected):
        encoded({"x": np.zeros(shape, field.dtype)}, field)


@pytest.mark.parametrize(
    ("field", "value", "got"),
    [(Symbols("x", (2,), 3), [256, 1], "256, which is no uint8"), (Symbols("x", (1,), 3), [np.nan], "nan, which is no"),
     (Positions("x", 2, 20), [1.9, 4.2], "1.9, which is no int64"), (Mask("x", 2), [2, 0], "2, which is no bool"),
     (Signs("x", 3), [1, 0, np.nan], "nan, expected numb"), (Count("x"), [2**32], "4294967296, expected a whole")],
    ids=str,
)  # fmt: skip
def test_values_that_would_change_are_refused(field: Field, value: list[Any], got: str) -> None:
    for own in (value, np.array(value)):
        with pytest.raises(ValueError, match=f"field 'x': got {got}"):
            encoded({"x": own}, field)


def test_equal_values_of_another_type_are_accepted() -> None:
    for dtype in (np.int64, np.float64, np.dtype(">i4"), np.bool_):
        ones = np.array([1, 0], dtype)
        assert encoded({"x": ones}, Symbols("x", (2,), 2)) == encoded({"x": ones}, Mask("x", 2)) == b"\1"
        assert encoded({"x": ones}, Floats("x", 2)) == struct.pack("<2f", 1, 0)
    assert encoded({"x": np.array([0.1])}, Floats("x", 1)) == struct.pack("<f", 0.1)


def test_names_of_fields_must_differ() -> None:
    with pytest.raises(ValueError, match=r"fields: got the names \['x', 'x'\], expected different"):
        Message(0, (Floats("x", 1), Mask("x", 1)))


@pytest.mark.parametrize("field", [Symbols("x", (5, 3), 8), Positions("x", 2, 20)], ids=repr)
def test_a_buffer_of_another_size_is_refused(field: Field) -> None:
    values = Message(0, (field,)).example()
    size = field.size(values)
    for buffer in (size - 1, size + 1):
        with pytest.raises(ValueError, match=f"field 'x': got {buffer} bytes to write to, expected {size}"):
            field.write(values, memoryview(bytearray(buffer)))


def test_floats_below_the_minimum_are_refused() -> None:
    bounded = Floats("x", 2, minimum=0.0)
    with pytest.raises(DecodeError, match="at position 1, expected a finite number of at least 0"):
        decoded(struct.pack("<2f", 0.0, -1e-40), bounded)  # subnormal numbers count, too
    assert decoded(struct.pack("<2f", -0.0, 0.0), bounded).tolist() == [0, 0]


def test_a_payload_must_end_with_its_last_field() -> None:
    fields = (Floats("a", 1), Mask("mask", 3), MaskedRows("rows", "mask", 3, 1))
    full = struct.pack("<f", 1.0) + b"\5" + struct.pack("<2f", 2.0, 3.0)
    assert decoded(full, *fields)["rows"].ravel().tolist() == [2, 0, 3]
    for length, missing in ((0, "a"), (3, "a"), (4, "mask"), (5, "rows"), (12, "rows")):
        with pytest.raises(TruncatedError, match=f"up to field '{missing}'"):
            decoded(full[:length], *fields)
    with pytest.raises(OversizedError, match="got 14 bytes, expected 13"):
        decoded(full + b"\0", *fields)
