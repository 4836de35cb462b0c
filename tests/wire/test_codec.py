"""The codec against vectors worked by hand and against the big-integer arithmetic of the second implementation."""

from __future__ import annotations

from typing import Any

import numpy as np
import plain_client as plain
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pfedlms.errors import DecodeError
from pfedlms.wire import Mask, Message, Signs, Symbols, kernels
from pfedlms.wire.codec import block_shape, pack, packed_size, unpack

ALL_LEVELS = range(2, 257)


def u8(*values: int) -> np.ndarray:
    return np.array(values, np.uint8)


def random_symbols(count: int, levels: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, count, levels]).integers(0, levels, count).astype(np.uint8)


HAND = [
    # bits 0, 2, 3 of the first byte: 1 + 4 + 8 = 0x0d; bit 8 is bit 0 of the second.
    pytest.param(2, [1, 0, 1, 1, 0, 0, 0, 0, 1], "0d01", id="2"),
    # Octal 07654321 = 000 111 110 101 | 100 011 010 001 = 0x1f5 8d1, low byte first; then 5 alone.
    pytest.param(8, [1, 2, 3, 4, 5, 6, 7, 0, 5], "d1581f05", id="8"),
    # A block of 29 symbols in bit_length(3**29 - 1) = 46 bits, value 1. Then 2 + 1*3 = 5 in bit_length(8) = 4
    # bits, from bit 46 on: bits 46 and 48, that is bit 6 of byte 5 (0x40) and bit 0 of byte 6 (0x01).
    pytest.param(3, [1] + [0] * 28 + [2, 1], "01000000004001", id="3-two-blocks"),
    # 2 * 3**28 = 45,753,584,909,922 = 0x299c d62c fe62: the last symbol of a block weighs most.
    pytest.param(3, [0] * 28 + [2], "62fe2cd69c29", id="3-full"),
    # Fifteen nines: 10**15 - 1 = 0x3 8d7e a4c6 7fff in 50 bits; then 7 in 4 bits, from bit 50 on: the seventh
    # byte is 0x3 + (7 << 2) = 0x1f.
    pytest.param(10, [9] * 15 + [7], "ff7fc6a47e8d1f", id="10-two-blocks"),
]


@pytest.mark.parametrize(("levels", "symbols", "expected"), HAND)
def test_symbols_are_packed_as_worked_by_hand(levels: int, symbols: list[int], expected: str) -> None:
    assert pack(u8(*symbols), levels).hex() == expected
    assert unpack(bytes.fromhex(expected), len(symbols), levels).tolist() == symbols


# Against the definition.


@pytest.mark.parametrize("levels", ALL_LEVELS)
def test_every_number_of_levels_agrees_with_the_definition(levels: int) -> None:
    size = plain.block_size(levels)
    assert block_shape(levels) == (size, plain.width(size, levels))
    for count in (1, size - 1, size, 8 * size + 7, 8 * size + 8, 17 * size + 1):
        symbols = random_symbols(count, levels)
        data = pack(symbols, levels)
        assert data == plain.pack(symbols.tolist(), levels)
        assert len(data) == packed_size(count, levels)
        np.testing.assert_array_equal(unpack(data, count, levels), symbols)


@settings(deadline=None)
@given(levels=st.integers(2, 256), count=st.integers(0, 200), data=st.data())
def test_arbitrary_bytes_are_refused_or_canonical(levels: int, count: int, data: st.DataObject) -> None:
    """Bytes are refused, or they are the only encoding of valid symbols."""
    size = packed_size(count, levels)
    received = data.draw(st.binary(min_size=size, max_size=size))
    try:
        symbols = unpack(received, count, levels)
    except DecodeError:
        return
    assert symbols.shape == (count,)
    assert symbols.max(initial=0) < levels
    assert plain.pack(symbols.tolist(), levels) == received


# Refused bytes and arguments.


@pytest.mark.parametrize("levels", [3, 8])
@pytest.mark.parametrize("change", [-1, 1])
def test_wrong_length_is_refused(levels: int, change: int) -> None:
    data = pack(random_symbols(1000, levels), levels)
    wrong = data[:change] if change < 0 else data + b"\0"
    with pytest.raises(DecodeError, match=f"got {len(wrong)} bytes, expected {len(data)}"):
        unpack(wrong, 1000, levels)


@pytest.mark.parametrize("count", [1, 29, 29 * 100, 29 * 100 + 5])
def test_a_block_value_that_is_too_large_is_refused(count: int) -> None:
    """The first invalid value in each block, full or short."""
    for block, start in enumerate(range(0, count, 29)):
        length = min(29, count - start)
        bad = (3**length << 46 * block).to_bytes(packed_size(count, 3), "little")
        with pytest.raises(DecodeError, match=rf"block {block}: got {3**length}, expected below 3\*\*{length} "):
            unpack(bad, count, 3)
        largest = (3**length - 1 << 46 * block).to_bytes(packed_size(count, 3), "little")
        assert unpack(largest, count, 3)[start : start + length].tolist() == [2] * length


@pytest.mark.parametrize(("levels", "count", "used"), [(8, 1, 3), (2, 9, 1), (3, 4, 7), (10, 18, 4)])
def test_bits_after_the_end_are_refused(levels: int, count: int, used: int) -> None:
    # (10, 18): a block of 50 bits and three symbols in 10 make 60 = 7*8 + 4.
    data = bytearray(pack(np.zeros(count, np.uint8), levels))
    for bit in range(used, 8):
        data[-1] = 1 << bit
        with pytest.raises(DecodeError, match=f"got last byte 0x{1 << bit:02x}, expected only its lowest {used}"):
            unpack(data, count, levels)


@pytest.mark.parametrize("levels", [1, 257, 3.0, "3"])
def test_levels_out_of_range_are_refused(levels: Any) -> None:
    for call in (lambda: unpack(b"\0", 1, levels), lambda: pack(u8(0), levels)):
        with pytest.raises(ValueError, match=r"levels: got .*, expected a whole number from 2 to 256"):
            call()


@pytest.mark.parametrize("levels", [2, 3, 8, 255])
@pytest.mark.parametrize("at", [0, 777, 999])
def test_a_symbol_out_of_range_is_refused(levels: int, at: int) -> None:
    symbols = random_symbols(1000, levels)
    symbols[at:] = levels
    for given_as in (symbols, torch.from_numpy(symbols)):
        with pytest.raises(ValueError, match=rf"symbols\[{at}\]: got {levels}, expected a value below {levels}"):
            pack(given_as, levels)


@pytest.mark.parametrize(
    "symbols",
    [np.zeros(4, np.int8), [0, 1], torch.zeros(4), np.zeros((2, 2), np.uint8)],
    ids=str,
)
def test_symbols_of_another_type_or_shape_are_refused(symbols: object) -> None:
    with pytest.raises(ValueError, match=r"symbols: got .*, expected (uint8 of shape \[count\]|an array)"):
        pack(symbols, 3)


# Types of arguments.


@pytest.mark.parametrize("levels", [8, 3])
def test_tensors_and_views_pack_like_their_copy(levels: int) -> None:
    symbols = random_symbols(3000, levels)
    expected = plain.pack(symbols[::3].tolist(), levels)
    assert pack(symbols[::3], levels) == expected
    assert pack(symbols[::-1][2::3][::-1], levels) == expected
    assert pack(torch.from_numpy(symbols)[::3], levels) == expected
    frozen = symbols[::3].copy()
    frozen.flags.writeable = False
    assert pack(frozen, levels) == expected
    assert pack(symbols[::3], np.int64(levels)) == expected
    assert pack(symbols[1:], levels) == plain.pack(symbols[1:].tolist(), levels)  # not aligned to a word


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_tensor_on_a_gpu_is_packed() -> None:
    symbols = random_symbols(3000, 3)
    assert pack(torch.from_numpy(symbols).cuda(), 3) == plain.pack(symbols.tolist(), 3)


# Segments within longer arrays.


def slice_of_larger(count: int) -> tuple[np.ndarray, np.ndarray]:
    """An array of bytes, and `count` of them in its middle, not aligned to a word."""
    whole = np.full(count + 40, 77, np.uint8)
    return whole, whole[19 : 19 + count]


def unchanged_outside(whole: np.ndarray) -> bool:
    return bool((whole[:19] == 77).all() and (whole[-21:] == 77).all())


@pytest.mark.parametrize("levels", [2, 3, 4, 8, 10, 128, 255, 256])
def test_segments_change_nothing_outside_them(levels: int) -> None:
    unit = 8 * plain.block_size(levels)
    for counts in [(n,) for n in (0, 1, 7, 63, 64, 65, 64 + unit, 65 + unit, 72 + 2 * unit)] + [
        (5, 0, 1, 64 + unit, 3, 200),
        (64 + unit, 64 + unit),
        (),
    ]:
        field = Symbols("x", counts, levels)
        symbols = random_symbols(sum(counts), levels)
        parts = np.split(symbols, np.cumsum(counts)[:-1]) if counts else []
        expected = b"".join(plain.pack(part.tolist(), levels) for part in parts)
        assert (field.shape, field.max_bytes) == ((len(symbols),), len(expected))
        stream, packed = slice_of_larger(field.max_bytes)
        field.write({"x": symbols}, packed.data)
        assert packed.tobytes() == expected
        assert unchanged_outside(stream)
        np.testing.assert_array_equal(field.read(packed.data, {}), symbols)


@pytest.mark.parametrize(("kind", "zero"), [(Mask, 0), (Signs, -1)])
def test_masks_and_signs_are_symbols_of_two_levels(kind: type[Mask], zero: int) -> None:
    for count in range(150):
        symbols = random_symbols(count, 2)
        field, values = kind("x", count), np.where(symbols == 1, 1, zero).astype(kind.dtype)
        stream, packed = slice_of_larger(packed_size(count, 2))
        field.write({"x": values}, packed.data)
        assert packed.tobytes() == plain.pack(symbols.tolist(), 2)
        assert unchanged_outside(stream)
        np.testing.assert_array_equal(field.read(packed.data, {}), values)


def test_each_kernel_is_compiled_once() -> None:
    """Compilation takes a fraction of a second; no type of input must cause another one."""
    symbols = random_symbols(100, 2)
    for levels in (3, 8):
        for given_as in (symbols, torch.from_numpy(symbols), np.frombuffer(symbols.tobytes(), np.uint8)):
            data = pack(given_as, levels)
            for received in (data, bytearray(data)):
                unpack(received, 100, levels)
    message = Message(0, (Symbols("x", (60, 40), 3),))
    for values in (symbols, symbols.astype(np.float32), np.frombuffer(symbols.tobytes(), np.uint8)):
        payload = bytearray(message.max_bytes)
        message.write({"x": values}, memoryview(payload))
        for received in (memoryview(payload), memoryview(payload).toreadonly()):
            message.read(received)
    for kernel in (kernels.pack_rows, kernels.unpack_rows):
        assert len(kernel.signatures) == 1
