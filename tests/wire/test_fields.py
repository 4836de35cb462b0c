"""Field codecs and messages: bytes worked by hand, round trips, and what a reader refuses."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pfedlms.errors import DecodeError, OversizedError, TruncatedError
from pfedlms.wire import Field, Floats, Mask, MaskedRows, Message, Scalar, Signs, Symbols

quick = settings(deadline=None, max_examples=60)  # the first example may compile
finite = st.floats(width=32, allow_nan=False, allow_infinity=False)


def round_trip(fields: tuple[Field, ...], values: dict[str, Any]) -> dict[str, Any]:
    """The decoded values, once the bytes are as many as declared and encode again to themselves."""
    message = Message(0, fields)
    payload = message.encode(values)
    assert len(payload) <= message.max_bytes == sum(field.max_bytes for field in fields)
    decoded = message.decode(memoryview(payload))
    assert list(decoded) == [field.name for field in fields]
    assert message.encode(decoded) == payload
    return decoded


# Bytes worked by hand.


def test_symbols_by_hand() -> None:
    # Levels 3: 1 + 2*3 = 7 in 4 bits; then 2 + 0*3 + 1*9 = 11 in 5 bits. Each segment begins a byte.
    assert Symbols("x", (2, 3), 3).encode({"x": np.uint8([1, 2, 2, 0, 1])}).hex() == "070b"


def test_signs_by_hand() -> None:
    # +1 sets a bit, zero counts as +1: bits 0, 2 and 8.
    values = np.float32([1, -1, 0.0, -2, -3, -1, -1, -1e-30, 5])
    assert Signs("x", 9).encode({"x": values}).hex() == "0501"
    decoded = Signs("x", 9).decode(memoryview(bytes.fromhex("0501")), {})
    assert decoded.dtype == np.float32
    assert decoded.tolist() == [1, -1, 1, -1, -1, -1, -1, -1, 1]


def test_floats_by_hand() -> None:
    assert Floats("x", 2).encode({"x": np.float64([1, -2])}).hex() == "0000803f000000c0"
    assert Scalar("x").encode({"x": np.float32([0.5])}).hex() == "0000003f"


def test_masked_rows_by_hand() -> None:
    # Rows 1 and 2 of three: mask 0b110, then two floats a row.
    fields = (Mask("mask", 3), MaskedRows("rows", "mask", 3, 2))
    values = {"mask": np.array([False, True, True]), "rows": np.float32([[9, 9], [1, 2], [3, 4]])}
    payload = Message(0, fields).encode(values)
    assert payload.hex() == "06" + "0000803f00000040" + "0000404000008040"
    assert Message(0, fields).decode(memoryview(payload))["rows"].tolist() == [[0, 0], [1, 2], [3, 4]]


# Round trips.


@quick
@given(
    levels=st.integers(2, 256), segments=st.lists(st.integers(1, 90), min_size=1, max_size=4), seed=st.integers(0, 99)
)
def test_symbols(levels: int, segments: list[int], seed: int) -> None:
    symbols = np.random.default_rng(seed).integers(0, levels, sum(segments)).astype(np.uint8)
    decoded = round_trip((Symbols("x", tuple(segments), levels),), {"x": symbols})["x"]
    assert decoded.dtype == np.uint8
    np.testing.assert_array_equal(decoded, symbols)


@quick
@given(st.lists(st.sampled_from([-1.0, 1.0]), min_size=1, max_size=50))
def test_signs(values: list[float]) -> None:
    decoded = round_trip((Signs("x", len(values)),), {"x": np.float32(values)})["x"]
    assert decoded.tolist() == values


@quick
@given(st.lists(finite, max_size=20))
def test_floats(values: list[float]) -> None:
    decoded = round_trip((Floats("x", len(values)),), {"x": np.float32(values)})["x"]
    assert decoded.dtype == np.float32
    assert decoded.tobytes() == np.float32(values).tobytes()  # also the sign of a zero


@quick
@given(finite)
def test_scalar(value: float) -> None:
    assert round_trip((Scalar("x"),), {"x": np.float32([value])})["x"].tolist() == [value]


@quick
@given(st.lists(st.booleans(), min_size=1, max_size=40), st.integers(1, 5), st.data())
def test_masks_and_masked_rows(mask: list[bool], width: int, data: st.DataObject) -> None:
    row = st.lists(finite, min_size=width, max_size=width)
    rows = np.float32(data.draw(st.lists(row, min_size=len(mask), max_size=len(mask))))
    fields = (Mask("mask", len(mask)), MaskedRows("rows", "mask", len(mask), width))
    values = {"mask": np.array(mask), "rows": rows}
    decoded = round_trip(fields, values)
    assert decoded["mask"].tolist() == mask
    np.testing.assert_array_equal(decoded["rows"], np.where(np.array(mask)[:, None], rows, 0))
    assert len(Message(0, fields).encode(values)) == (len(mask) + 7) // 8 + 4 * width * sum(mask)


@pytest.mark.parametrize(
    "field",
    [Symbols("x", (5, 7), 3), Signs("x", 9), Floats("x", 4), Floats("x", 2, -1.0), Scalar("x", 1.0), Mask("x", 9)],
    ids=repr,
)
def test_examples_are_valid_and_of_the_largest_size(field: Field) -> None:
    payload = Message(0, (field,)).encode({"x": field.example()})
    assert len(payload) == field.max_bytes
    np.testing.assert_array_equal(Message(0, (field,)).decode(memoryview(payload))["x"], field.example())


def test_example_of_masked_rows() -> None:
    message = Message(0, (Mask("mask", 10), MaskedRows("rows", "mask", 10, 3)))
    assert len(message.encode(message.example())) == message.max_bytes == 2 + 120


# Refusals.


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("at", [0, 2])
def test_floats_that_are_not_finite(bad: float, at: int) -> None:
    values = np.zeros(3, np.float32)
    values[at] = bad
    with pytest.raises(DecodeError, match=rf"field 'x': got {bad} at position {at}, expected a finite number"):
        Floats("x", 3).decode(memoryview(values.tobytes()), {})


def test_floats_below_the_minimum() -> None:
    bounded = Floats("x", 2, minimum=0.0)
    with pytest.raises(DecodeError, match="at position 1, expected a finite number of at least 0"):
        bounded.decode(memoryview(struct.pack("<2f", 0.0, -1e-40)), {})  # subnormal numbers count, too
    assert bounded.decode(memoryview(struct.pack("<2f", -0.0, 0.0)), {}).tolist() == [0, 0]


def test_masked_rows_that_are_not_finite() -> None:
    message = Message(0, (Mask("mask", 2), MaskedRows("rows", "mask", 2, 1)))
    with pytest.raises(DecodeError, match="field 'rows': got nan"):
        message.decode(memoryview(b"\2" + struct.pack("<f", np.nan)))


@pytest.mark.parametrize("field", [Symbols("x", (3,), 3), Signs("x", 3), Mask("x", 3)], ids=repr)
def test_bits_after_the_end(field: Field) -> None:
    with pytest.raises(DecodeError, match="last byte 0x80"):
        field.decode(memoryview(b"\x80"), {})


def test_symbols_out_of_range() -> None:
    # Three symbols of 3 levels take 5 bits, and 27 … 31 stand for nothing.
    assert Symbols("x", (3,), 3).decode(memoryview(bytes([26])), {}).tolist() == [2, 2, 2]
    for value in range(27, 32):
        with pytest.raises(DecodeError, match=f"got {value}, expected below 3"):
            Symbols("x", (3,), 3).decode(memoryview(bytes([value])), {})


def test_a_payload_must_end_with_its_last_field() -> None:
    message = Message(0, (Floats("a", 1), Mask("mask", 3), MaskedRows("rows", "mask", 3, 1)))
    full = struct.pack("<f", 1.0) + b"\5" + struct.pack("<2f", 2.0, 3.0)
    assert message.decode(memoryview(full))["rows"].ravel().tolist() == [2, 0, 3]
    for length, missing in ((0, "a"), (3, "a"), (4, "mask"), (5, "rows"), (12, "rows")):
        with pytest.raises(TruncatedError, match=f"up to field '{missing}'"):
            message.decode(memoryview(full[:length]))
    with pytest.raises(OversizedError, match="got 14 bytes, expected 13"):
        message.decode(memoryview(full + b"\0"))
