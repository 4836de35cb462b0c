"""Work on long buffers, cut into pieces for several threads."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import TypeVar

import torch

Result = TypeVar("Result")

PIECE = 1 << 20  # bytes, at least; below, handing work over takes longer than doing it
WORKERS = 8  # more threads than this only wait for memory


def in_pieces(work: Callable[[int, int], Result], length: int) -> list[Result]:
    """`work(begin, end)` on pieces that make up the bytes [0, length); the results in order.

    Every piece begins at a multiple of 64. There is one piece, and no thread but the caller's, if the buffer is short
    or PyTorch is told to use one thread.
    """
    if length < 2 * PIECE or (workers := min(torch.get_num_threads(), WORKERS)) < 2:
        return [work(0, length)]
    pieces = min(2 * workers, length // PIECE)  # two for each, so that a thread that starts late delays the others less
    step = -(-length // (64 * pieces)) * 64
    begins = range(0, length, step)
    return list(_pool(os.getpid(), workers).map(work, begins, [min(begin + step, length) for begin in begins]))


@cache
def _pool(process: int, workers: int) -> ThreadPoolExecutor:
    """Threads that stay; a forked process, where they would not run, gets its own."""
    return ThreadPoolExecutor(workers, thread_name_prefix="pfedlms-wire")
