"""Work on long buffers, cut into pieces for several threads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from pfedlms.backend import spread, threads

Result = TypeVar("Result")

PIECE = 1 << 20  # bytes, at least: below, handing work over takes longer than doing it


def in_pieces(work: Callable[..., Result], *arrays: Any) -> list[Result]:
    """`work` on the same piece of every array; the results in the order of pieces.

    Arrays of one length (NumPy's, or memoryviews) are cut into two pieces a thread; short ones are one piece.
    """
    first = arrays[0]
    pieces = min(2 * threads(), first.nbytes // PIECE)
    if pieces < 2:
        return [work(*arrays)]
    step = -(-len(first) // (64 * pieces)) * 64  # whole cache lines
    results: dict[int, Result] = {}

    def on_piece(at: int) -> None:
        results[at] = work(*(array[at : at + step] for array in arrays))

    spread(on_piece, range(0, len(first), step))
    return [results[at] for at in sorted(results)]
