"""Positions as a Golomb code of their gaps, against the second implementation, and hostile bytes.
`test_second_implementation` tests that both read and refuse the same streams."""

from __future__ import annotations

from math import floor, log, log2, sqrt

import numpy as np
import plain_client as plain
import pytest

from pfedlms.errors import DecodeError
from pfedlms.wire import Message, Positions
from pfedlms.wire.golomb import Places, remainder_bits


def paper_bits(count: int, places: int) -> int:
    """b as in the paper, with logarithms; 0 where all places are chosen."""
    if count == places:
        return 0
    golden = (1 + sqrt(5)) / 2
    return max(0, 1 + floor(log2(log(golden - 1) / log(1 - count / places))))


def as_bytes(text: str) -> bytes:
    """Eight bits for each byte, the first one lowest."""
    padded = text + "0" * (-len(text) % 8)
    return bytes(int(padded[start : start + 8][::-1], 2) for start in range(0, len(padded), 8))


def encoded(positions: list[int] | np.ndarray, places: int) -> bytes:
    field = Positions("x", len(positions), places)
    values = {"x": np.asarray(positions, dtype=np.int64)}
    out = bytearray(b"\xff" * field.size(values))  # old bytes do not matter
    field.write(values, memoryview(out))
    return bytes(out)


def decoded(data: bytes, count: int, places: int) -> list[int]:
    """Read through a message, as in a frame."""
    return Message(0, (Positions("x", count, places),)).read(memoryview(data))["x"].tolist()


def test_three_positions_by_hand() -> None:
    """3 of 20: 0.85² = 0.72 and 0.85⁴ = 0.52, so b = 2. Positions 1, 2 and 19 have the gaps 1, 0 and 16: no one, a zero
    and 1 in two bits, the lower first; the same with 0; four ones, a zero and 0."""
    assert remainder_bits(3, 20) == 2
    assert encoded([1, 2, 19], 20) == bytes([0b11000010, 0b00000011])
    assert decoded(bytes([0b11000010, 0b00000011]), 3, 20) == [1, 2, 19]


# --- the code ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("places", [1, 2, 3, 10, 1000, 203_530, 9_799_844, 1 << 48])
def test_the_parameter_is_that_of_the_paper(places: int) -> None:
    for share in (1e-9, 1e-4, 1 / 400, 0.01, 0.1, 0.3, 0.381966, 0.381967, 0.5, 0.7, 1.0):
        count = max(1, floor(share * places))
        assert remainder_bits(count, places) == paper_bits(count, places), (count, places)


def test_positions_far_apart_are_read_as_written() -> None:
    """Gaps beyond 32 bits, a run of ones over many bytes, the last possible place; and shares of 3,000 places."""
    draw = np.random.default_rng(2)
    some = [(sorted(draw.choice(3000, count, replace=False).tolist()), 3000) for count in (1, 12, 300, 1500, 2999)]
    for positions, places in (
        *some,
        ([0, (1 << 48) - 1], 1 << 48),
        ([(1 << 48) - 1], 1 << 48),
        ([0, 1, 2, 3, 4, 5, 6, 99_999], 100_000),
        ([*range(400), 1999], 2000),
    ):
        data = encoded(positions, places)
        assert data == plain.Positions(len(positions), places).write(positions, [])
        assert decoded(data, len(positions), places) == positions


@pytest.mark.parametrize("places", range(1, 11))
def test_the_largest_size_is_reached_and_never_exceeded(places: int) -> None:
    """All choices of up to ten places have the bytes of the second implementation, are read as written, and the longest
    has `max_bytes`."""
    for count in range(1, places + 1):
        subsets = [[i for i in range(places) if chosen >> i & 1] for chosen in range(1 << places)]
        streams = {tuple(s): encoded(s, places) for s in subsets if len(s) == count}
        assert streams == {chosen: plain.Positions(count, places).write(chosen, []) for chosen in streams}
        assert max(map(len, streams.values())) == Positions("x", count, places).max_bytes
        assert all(decoded(stream, count, places) == list(chosen) for chosen, stream in streams.items())


def test_the_example_of_a_message_has_an_average_size() -> None:
    field = Positions("x", 2000, 200_000)
    example = Message(0, (field,)).example()
    assert np.array_equal(example["x"], field.example())  # the same in every run
    assert field.size(example) == pytest.approx(2000 * (6 + 1 / (1 - 0.99**64)) / 8, rel=0.01)
    assert field.size(example) < 0.96 * field.max_bytes
    for count, places in ((1, 1), (7, 7), (1, 100_000), (5, 6)):
        alone = Positions("x", count, places)
        assert len(encoded(alone.example(), places)) <= alone.max_bytes


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("positions", "at"), [([3, 3, 5], 1), ([5, 4, 9], 1), ([0, 1, 20], 2), ([-1, 2, 3], 0), ([0, 2, -5], 2)]
)
def test_positions_out_of_order_or_range_are_refused(positions: list[int], at: int) -> None:
    expected = rf"field 'x': got {positions[at]} at index {at}, expected ascending numbers from 0 to 19"
    with pytest.raises(ValueError, match=expected):
        encoded(positions, 20)


@pytest.mark.parametrize(("count", "places"), [(0, 5), (6, 5), (1, 0), (1, (1 << 48) + 1)])
def test_wrong_numbers_of_positions_are_refused(count: int, places: int) -> None:
    with pytest.raises(ValueError, match=f"field 'x': got {count} of {places} places, expected 1 up to all"):
        Positions("x", count, places)


def test_positions_beyond_the_last_place_are_refused() -> None:
    """The gaps 1, 0 and 17 lead to place 20 of 20; a long run of ones leads far beyond, without overflow."""
    assert decoded(as_bytes("010" + "000" + "1111" + "000"), 3, 20) == [1, 2, 19]
    for last in ("1111" + "010", "1" * 5 + "000", "1" * 3000 + "000"):
        with pytest.raises(DecodeError, match="got position 2 of 3 beyond the last place"):
            decoded(as_bytes("010" + "000" + last), 3, 20)
    with pytest.raises(DecodeError, match="got position 0 of 1 beyond"):
        decoded(as_bytes("1" * 70_000 + "0" * 60), 1, 1 << 48)


# --- a variable number of places --------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 9, 64, 300])
def test_places_are_read_as_written_within_the_largest_size(count: int) -> None:
    """Every number of chosen places, at the start and at the end, where the first gap is longest."""
    field = Places("x", count)
    for chosen in range(count + 1):
        for start in (0, count - chosen):
            mask = np.zeros(count, bool)
            mask[start : start + chosen] = True
            size = field.size({"x": mask})
            assert size <= field.max_bytes
            out = np.empty(size, np.uint8)
            field.write({"x": mask}, out.data)
            assert int.from_bytes(out[:4].tobytes(), "little") == chosen
            assert field.encoded_size(memoryview(out.tobytes() + b"more"), {}) == size
            assert field.read(memoryview(out.tobytes()), {}).tolist() == mask.tolist()
