"""Work on long buffers, cut into pieces for several threads."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any, TypeVar

import torch

Result = TypeVar("Result")

PIECE = 1 << 20  # bytes, at least: below, handing work over takes longer than doing it
WORKERS = 8  # threads, at most: more of them only wait for memory


def in_pieces(work: Callable[..., Result], *arrays: Any) -> list[Result]:
    """`work` on the same piece of every array, one piece after another; the results in that order.

    Arrays of one length (NumPy's, or memoryviews) are cut into two pieces a thread. They are one piece, and stay with
    the thread that calls, where they are short or PyTorch is told to use one thread.
    """
    first = arrays[0]
    if first.nbytes < 2 * PIECE or (workers := min(torch.get_num_threads(), WORKERS)) < 2:
        return [work(*arrays)]
    pieces = min(2 * workers, first.nbytes // PIECE)
    step = -(-len(first) // (64 * pieces)) * 64  # whole cache lines
    cut = [[array[at : at + step] for at in range(0, len(first), step)] for array in arrays]
    return list(_pool(os.getpid(), workers).map(work, *cut))


@cache
def _pool(process: int, workers: int) -> ThreadPoolExecutor:
    """Threads that stay; a forked process, where they do not run, gets its own."""
    return ThreadPoolExecutor(workers, thread_name_prefix="pfedlms-wire")
