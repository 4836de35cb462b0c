"""zlib's CRC-32, about ten times as fast where the processor has carry-less multiplication.

A CRC is the remainder of a polynomial over GF(2), the bits of the message being its coefficients, by P(x) of degree 32.
Putting n bits behind a message multiplies it by x^n, so 128 bits X, taken as two halves X₀ x^64 + X₁, and the 128 bits
D that stand d bits further on have the remainder of

    X₀ · (x^(64 + d) mod P)  +  X₁ · (x^d mod P)  +  D

which again has 128 bits: that is one *fold*. Four lanes, each 16 of every 64 bytes, run through the message and are
folded into one at the end; zlib continues with the 16 bytes of the result and the rest of the message. Numbers are
reflected as the CRC is, so the constants are x^(d ± 32). Gopal et al., "Fast CRC Computation for Generic Polynomials
Using PCLMULQDQ Instruction", Intel, 2009."""

from __future__ import annotations

import os
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from llvmlite import binding, ir  # type: ignore[import-untyped]
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numpy.typing import NDArray

from pfedlms.backend import compiled, row_memory, run_kernel

SHORTEST = 1 << 10  # bytes; zlib is as fast for fewer
_FAR = 0x154442BD4, 0x1C6E41596  # x^(512 + 32) and x^(512 − 32) mod P, reflected: 64 bytes further on
_NEAR = 0x1751997D0, 0x0CCAA009E  # x^(128 + 32) and x^(128 − 32): 16 bytes further on
_LANES, _STEP = 4, 64
alloca_once: Any = cgutils.alloca_once

# Numba compiles for this processor unless these variables name another one.
_CHOSEN = {"NUMBA_CPU_NAME", "NUMBA_CPU_FEATURES"} & set(os.environ)
HAS_KERNEL: bool = binding.get_host_cpu_features().get("pclmul", False) and not _CHOSEN


def crc32(data: memoryview, start: int = 0) -> int:
    """`zlib.crc32(data, start)`; `start` is the checksum of the bytes before."""
    short = len(data) < SHORTEST
    return zlib.crc32(data, start) if short else crc32_rows(np.frombuffer(data, np.uint8)[None], [start])[0]


def crc32_rows(rows: NDArray[np.uint8], starts: Sequence[int]) -> list[int]:
    """`crc32` of every row."""
    folded = rows.shape[1] // _STEP * _STEP if HAS_KERNEL and rows.shape[1] >= SHORTEST else 0
    if not folded:
        return [zlib.crc32(row.data, start) for row, start in zip(rows, starts, strict=True)]
    (flat, stride), out = row_memory(rows), np.empty((len(rows), 16), np.uint8)
    flat.flags.writeable = False  # numba compiles a kernel for read-only inputs and again for others
    # zlib's register is the complement of the checksum.
    registers = ~np.array(starts, dtype=np.uint32)
    run_kernel(_fold_rows, len(rows), folded // 4, flat, stride, folded, registers, out)
    ends = zip(rows[:, folded:], out, strict=True)
    return [zlib.crc32(rest.data, zlib.crc32(end.data, 0xFFFFFFFF)) for rest, end in ends]


def _define_fold(typing: Any, data: Any, at: Any, length: Any, register: Any, out: Any, to: Any) -> Any:
    """`out[to : to + 16]` ← the fold of `data[at : at + length]`, a multiple of 64 bytes, with `register` added to its
    first bytes."""
    signature = types.void(data, types.intp, types.intp, types.uint32, out, types.intp)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        wide, byte = ir.VectorType(ir.IntType(64), 2), ir.IntType(8)
        source = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        target = context.make_array(signature.args[4])(context, builder, arguments[4]).data
        _, at, length, register, _, to = arguments
        multiply = builder.module.declare_intrinsic(
            "llvm.x86.pclmulqdq", fnty=ir.FunctionType(wide, [wide, wide, byte])
        )

        def load(place: Any) -> Any:
            return builder.load(builder.bitcast(builder.gep(source, [place]), wide.as_pointer()), align=1)

        def fold(x: Any, constants: tuple[int, int], following: Any) -> Any:
            factors = ir.Constant(wide, list(constants))
            low, high = (builder.call(multiply, [x, factors, byte(half)]) for half in (0x00, 0x11))
            return builder.xor(builder.xor(low, high), following)

        lanes = []
        for lane in range(_LANES):
            slot = alloca_once(builder, wide)
            builder.store(load(builder.add(at, at.type(16 * lane))), slot)
            lanes.append(slot)
        first = builder.insert_element(ir.Constant(wide, [0, 0]), builder.zext(register, ir.IntType(64)), byte(0))
        builder.store(builder.xor(builder.load(lanes[0]), first), lanes[0])
        place = alloca_once(builder, at.type)
        builder.store(builder.add(at, at.type(_STEP)), place)
        check, body, done = (builder.append_basic_block(name) for name in ("check", "body", "done"))
        end = builder.add(at, length)
        builder.branch(check)
        builder.position_at_end(check)
        builder.cbranch(builder.icmp_signed("<", builder.load(place), end), body, done)
        builder.position_at_end(body)
        now = builder.load(place)
        for lane, slot in enumerate(lanes):
            builder.store(fold(builder.load(slot), _FAR, load(builder.add(now, at.type(16 * lane)))), slot)
        builder.store(builder.add(now, at.type(_STEP)), place)
        builder.branch(check)
        builder.position_at_end(done)
        folded = builder.load(lanes[0])
        for slot in lanes[1:]:
            folded = fold(folded, _NEAR, builder.load(slot))
        builder.store(folded, builder.bitcast(builder.gep(target, [to]), wide.as_pointer()), align=1)
        return context.get_dummy_value()

    return signature, generate


_fold: Any = intrinsic(_define_fold)


@compiled()
def _fold_rows(
    first: int, last: int, data: Any, stride: int, length: int, registers: NDArray[np.uint32], out: NDArray[np.uint8]
) -> None:
    """Fold the first `length` bytes of the rows `first` to `last` − 1 into 16 bytes each."""
    flat = out.reshape(-1)
    for row in range(first, last):
        _fold(data, row * stride, length, registers[row], flat, 16 * row)
