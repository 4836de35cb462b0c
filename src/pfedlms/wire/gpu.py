"""Frames in the memory of a GPU, for messages of plain floats; they have the bytes that `frames` gives them.

A frame is a row of 32-bit words; word 9 is the checksum. A CRC-32 is the remainder of a polynomial over GF(2), the bits
of the message being its coefficients, by P of degree 32. So it is a sum over the words: word i of W has the factor
x^(32 (W − i)) modulo P, and the first word and the sum are complemented. All words are multiplied and added at the same
time. As in zlib, bit 31 of a word stands for the lowest power.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from pfedlms.backend import to_device, to_host

CHECKSUM = 9  # the word of a frame that is its checksum
HEADER = CHECKSUM + 1
_POLYNOMIAL = 0xEDB88320  # P without x^32, reflected: bit 31 is x^0
_LANES, _TURNS = 1024, 16
_WORDS = _LANES * _TURNS  # of one program


def framed(headers: NDArray[np.uint8], values: Sequence[Tensor]) -> Tensor:
    """Build frames, int32 `[clients, words]`, from `headers: [clients, 40]` without checksums and `values`, float32
    `[clients, …]` on one device."""
    rows = [value.view(torch.int32) for value in values]
    head = to_device(torch.from_numpy(headers.view(np.int32)), rows[0].device)
    frames = torch.cat([head, *rows], dim=1)
    frames[:, CHECKSUM] = checked(frames)[:, 0]
    return frames


def opened(frames: Tensor) -> tuple[NDArray[np.uint8], bool]:
    """The headers of frames, `[clients, 40]` on the host, and whether all checksums are right and all floats finite."""
    head, found = to_host(frames[:, :HEADER], checked(frames))
    fine = torch.equal(head[:, CHECKSUM], found[:, 0]) and not found[:, 1].any()
    return head.numpy().view(np.uint8), fine


def checked(frames: Tensor) -> Tensor:
    """For each frame the CRC-32 of all words but the checksum, and 1 if one of its floats is not finite: int32
    `[clients, 2]`."""
    clients, words = frames.shape
    parts = triton.cdiv(words - 1, _WORDS)
    found = torch.zeros(clients, 2, dtype=torch.int32, device=frames.device)
    tables = _tables(parts, frames.device)
    _check[(parts, clients)](frames, words, *tables, found, CHECKSUM, LANES=_LANES, TURNS=_TURNS, num_warps=4)
    return found


@cache
def _tables(parts: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Tables of the factors from one turn to the next, from a lane to the end of its part, and from a part to the end
    of the frame. Entry b of a table is the factor times x^(31 − b), the power for which bit b of a word stands."""
    powers, bits = _powers(), 31 - np.arange(32)
    turns = powers[32 * _LANES + bits]
    lanes = powers[32 * (_LANES - np.arange(_LANES)) + bits[:, None]]
    ends = np.empty((parts, 32), dtype=np.uint32)
    ends[-1] = powers[bits]
    for part in range(parts - 2, -1, -1):
        ends[part] = ends[part + 1]
        for _ in range(_TURNS):
            ends[part] = _products(ends[part], turns)
    first, second, third = (torch.from_numpy(table.view(np.int32)).to(device) for table in (turns, lanes, ends))
    return first, second, third


@cache
def _powers() -> NDArray[np.uint32]:
    """x^n modulo P, n from 0."""
    found = [1 << 31]
    for _ in range(32 * _LANES + 31):
        found.append((found[-1] >> 1) ^ (_POLYNOMIAL if found[-1] & 1 else 0))
    return np.array(found, dtype=np.uint32)


def _products(words: NDArray[np.uint32], table: NDArray[np.uint32]) -> NDArray[np.uint32]:
    chosen = (words[:, None] >> np.arange(32, dtype=np.uint32)) & 1
    return np.asarray(np.bitwise_xor.reduce(chosen * table, axis=1), dtype=np.uint32)


@triton.jit
def _times(word, table, STEP: tl.constexpr):
    """`word` times the factor whose table entries lie `STEP` apart in `table`."""
    product = word ^ word
    for bit in tl.static_range(32):
        product ^= (0 - ((word >> bit) & 1)) & tl.load(table + bit * STEP)
    return product


@triton.jit
def _check(
    frames, words, turns, lanes, ends, found, CHECKSUM: tl.constexpr, LANES: tl.constexpr, TURNS: tl.constexpr
):  # fmt: skip
    """Process one part of one frame. The checksum is not counted among the words; only the first part may be short."""
    part, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    lane = tl.arange(0, LANES)
    first = words - 1 - (tl.num_programs(0) - part) * LANES * TURNS
    total, refused = tl.zeros((LANES,), tl.int32), tl.zeros((LANES,), tl.int32)
    for turn in range(TURNS):
        i = first + turn * LANES + lane
        after = (i >= CHECKSUM).to(tl.int32)
        word = tl.load(frames + row * words + i + after, mask=i >= 0, other=0)
        refused |= after & ((word & 0x7F800000) == 0x7F800000).to(tl.int32)
        total = _times(total, turns, 1) ^ word ^ tl.where(i == 0, -1, 0)
    total = _times(total, lanes + lane, LANES)
    summed = _times(tl.xor_sum(total, axis=0), ends + part * 32, 1) ^ tl.where(part == 0, -1, 0)
    tl.atomic_xor(found + 2 * row, summed)
    tl.atomic_or(found + 2 * row + 1, tl.max(refused, axis=0))
