"""The fast Walsh–Hadamard transform H x, in place, on the rows of a tensor `[..., N]`, N a power of two.

H is the unnormalised matrix in natural (Sylvester) order: H[i, j] = (-1)^popcount(i & j), so H = Hᵀ and
H H = N I. It is never formed. log2(N) stages with strides h = 1, 2, 4, ..., N/2, *in that order*, replace
every pair (a, b) of elements h apart by (a + b, a - b).

The order is part of the wire protocol. Float addition is not associative, and a sketch that differs in its
last bit can fall on the other side of a threshold. So all paths here follow the same dataflow and agree to
the bit: `fwht_reference` is the definition, `fwht_row` the fast one.

How the fast one gets near the speed of a memory copy:

- A *butterfly* holds 8 vectors of 8 elements in registers and takes them through three stages (six on the
  first pass, which also mixes inside each vector), so memory is touched once per three stages. It computes
  exactly what the radix-2 stages compute.
- Blocks that fit in the L1 cache finish all their stages before wider strides begin; then blocks that fit in L2.
- The vectors are written as LLVM vector code, which becomes AVX, NEON, ... on the machine at hand. The same
  radix-8 pass as a plain numba loop over eight slices became scalar code and took twice as long.
"""

from __future__ import annotations

from typing import Any

import torch
from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.core.errors import TypingError
from numba.extending import intrinsic

from pfedlms.backend import backend_of, compiled, run_kernel
from pfedlms.checks import Array

MAX_SIZE = 1 << 24

_LANES = 8
_FIRST = 8 * _LANES  # elements that the first pass finishes in registers
_INNER = 1 << 12  # elements of a block that stays in L1 (16 KiB of float32)
_OUTER = 1 << 18  # elements of a block that stays in L2 (1 MiB of float32)
_TILE = 1 << 13  # columns per task where threads share a row


def _within(builder: Any, vector: Any) -> Any:
    """Emit the stages 1, 2, 4 between the lanes of one vector."""
    for stride in (1, 2, 4):
        partner = [lane ^ stride for lane in range(_LANES)]
        # Index lane + _LANES picks from the second operand of the shuffle: the difference.
        chosen = [lane + _LANES if lane & stride else lane for lane in range(_LANES)]
        swapped = builder.shuffle_vector(vector, vector, _lane_indices(partner))
        total, difference = builder.fadd(vector, swapped), builder.fsub(swapped, vector)
        vector = builder.shuffle_vector(total, difference, _lane_indices(chosen))
    return vector


def _lane_indices(indices: list[int]) -> Any:
    return ir.Constant(ir.VectorType(ir.IntType(32), len(indices)), indices)


def _butterfly(radix: int, *, within: bool = False) -> Any:
    """Make the numba intrinsic `(row, start, stride) -> None` for `radix` vectors of 8 elements, in place.

    Vector r is `row[start + r * stride : start + r * stride + 8]`. The stages are stride, 2 stride, ...,
    radix/2 stride, preceded by 1, 2, 4 if `within` (then stride must be 8, so that no stage is left out).
    """

    def typing(context: Any, row: Any, start: Any, stride: Any) -> Any:
        # Strides of the array are not looked at below: any other layout would be transformed wrongly.
        flat = isinstance(row, types.Array) and row.ndim == 1 and row.layout == "C"
        if not flat or row.dtype not in (types.float32, types.float64):
            raise TypingError(f"fwht_row: row is {row}; expected a contiguous 1-D array of float32 or float64")
        return types.void(row, types.intp, types.intp), generate

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array_type = signature.args[0]
        row, start, stride = arguments
        data = context.make_array(array_type)(context, builder, row).data
        vector_type = ir.VectorType(context.get_value_type(array_type.dtype), _LANES)
        # Rows begin anywhere: promise LLVM the alignment of one element, no more.
        align = array_type.dtype.bitwidth // 8

        places = []
        for index in range(radix):
            element = builder.gep(data, [builder.add(start, builder.mul(stride, stride.type(index)))])
            places.append(builder.bitcast(element, vector_type.as_pointer()))
        vectors = [builder.load(place, align=align) for place in places]
        if within:
            vectors = [_within(builder, vector) for vector in vectors]
        step = 1
        while step < radix:
            for low in range(radix):
                if not low & step:
                    a, b = vectors[low], vectors[low + step]
                    vectors[low], vectors[low + step] = builder.fadd(a, b), builder.fsub(a, b)
            step *= 2
        for vector, place in zip(vectors, places, strict=True):
            builder.store(vector, place, align=align)
        return context.get_dummy_value()

    return intrinsic(typing)


_butterfly_first = _butterfly(8, within=True)
_butterfly_8 = _butterfly(8)
_butterfly_4 = _butterfly(4)
_butterfly_2 = _butterfly(2)


@compiled()
def _wide_stages(row: Array, unit: int, first: int, last: int) -> None:
    """Stages unit, 2 unit, ..., size/2 on columns first..last of the row seen as `[size / unit, unit]`."""
    stride = unit
    while stride < row.size:
        radix = min(8, row.size // stride)
        for group in range(0, row.size, radix * stride):
            for column in range(group, group + stride, unit):
                for start in range(column + first, column + last, _LANES):
                    if radix == 8:
                        _butterfly_8(row, start, stride)
                    elif radix == 4:
                        _butterfly_4(row, start, stride)
                    else:
                        _butterfly_2(row, start, stride)
        stride *= radix


@compiled()
def fwht_row(row: Array) -> None:
    """H x of one row `[N]`, in place; for use inside other kernels.

    Equal, to the bit, to `row[:] = fwht_reference(torch.from_numpy(row))`. The row must be contiguous and
    float32 or float64 (checked when the caller compiles), its size a power of two (unchecked: check it where
    the value enters).
    """
    size = row.size
    if size < _FIRST:
        stride = 1
        while stride < size:
            for low in range(size):
                if not low & stride:
                    a, b = row[low], row[low + stride]
                    row[low] = a + b
                    row[low + stride] = a - b
            stride *= 2
        return
    inner = min(size, _INNER)
    outer = min(size, _OUTER)
    for outer_start in range(0, size, outer):
        for inner_start in range(outer_start, outer_start + outer, inner):
            block = row[inner_start : inner_start + inner]
            for start in range(0, inner, _FIRST):
                _butterfly_first(block, start, _LANES)
            _wide_stages(block, _FIRST, 0, _FIRST)
        _wide_stages(row[outer_start : outer_start + outer], inner, 0, inner)
    for first in range(0, outer, min(outer, _TILE)):
        _wide_stages(row, outer, first, first + min(outer, _TILE))


@compiled()
def _rows(first: int, last: int, matrix: Array) -> None:
    """Transform the rows `first` to `last` − 1 of `[rows, N]`."""
    for index in range(first, last):
        fwht_row(matrix[index])


@compiled()
def _widest_stages(first: int, last: int, matrix: Array) -> None:
    """Stages `_OUTER`, 2 `_OUTER`, ..., N/2 of `[rows, N]`, whose tasks are `_TILE` columns of a row each."""
    tiles = _OUTER // _TILE
    for task in range(first, last):
        column = task % tiles * _TILE
        _wide_stages(matrix[task // tiles], _OUTER, column, column + _TILE)


def fwht_(values: torch.Tensor) -> torch.Tensor:
    """Replace each row x of `values: [..., N]` by H x, in place, and return `values`.

    N is a power of two up to 2^24; contiguous, outside autograd. Equal, to the bit, to
    `values.copy_(fwht_reference(values))`, whatever the number of rows and threads; that slow expression is also what
    runs where there is no kernel (see `backend_of`).
    """
    size = _check_size(values)
    where = backend_of(values)
    if where == "gpu" and size > 1:
        from pfedlms.sketch import gpu

        return values.copy_(gpu.fwht(values.view(-1, size)).view_as(values))
    if where != "cpu":
        return values.copy_(fwht_reference(values))
    matrix, block = values.view(-1, size).numpy(), min(size, _OUTER)
    blocks = matrix.reshape(-1, block)
    run_kernel(_rows, len(blocks), block, blocks)
    if size > block:
        run_kernel(_widest_stages, len(matrix) * (block // _TILE), size // block * _TILE, matrix)
    return values


def fwht_reference(values: torch.Tensor) -> torch.Tensor:
    """H x for each row x of `values: [..., N]`, out of place: the definition, for any device and dtype.

    In real numbers `values @ H` with H[i, j] = (-1)^popcount(i & j); in floats the stages below define it.
    """
    size = _check_size(values)
    result = values.clone()
    stride = 1
    while stride < size:
        a, b = result.view(*values.shape[:-1], size // (2 * stride), 2, stride).unbind(-2)
        result = torch.stack((a + b, a - b), dim=-2)
        stride *= 2
    return result.view(values.shape)


def _check_size(values: torch.Tensor) -> int:
    """N, the size of the last axis; raise ValueError if it is not a power of two in range."""
    size = values.shape[-1] if values.ndim else 0
    if not 1 <= size <= MAX_SIZE or size & (size - 1):
        raise ValueError(
            f"Walsh–Hadamard transform: values has shape {tuple(values.shape)}; expected a last axis whose "
            f"size is a power of two from 1 to {MAX_SIZE}; pad it with zeros, or transform it in parts"
        )
    return size
