"""Work that overlaps on a GPU; on a CPU it is done in order."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import TypeVar

import torch

First = TypeVar("First")
Second = TypeVar("Second")
Result = TypeVar("Result")

_STREAMS = 8


@lru_cache
def _streams(device: torch.device, purpose: str, count: int) -> list[torch.cuda.Stream]:
    return [torch.cuda.Stream(device) for _ in range(count)]  # type: ignore[no-untyped-call]


def beside(
    first: Callable[[], First], second: Callable[[], Second], device: torch.device, purpose: str
) -> tuple[First, Second]:
    """Both results; on a GPU the first is computed on a stream beside the second. Calls inside one another need
    different purposes."""
    if device.type != "cuda":
        return first(), second()
    here, (side,) = torch.cuda.current_stream(device), _streams(device, purpose, 1)
    side.wait_stream(here)
    with torch.cuda.stream(side):
        one = first()
    two = second()
    here.wait_stream(side)
    return one, two


def each(count: int, work: Callable[[int], Result], device: torch.device) -> list[Result]:
    """`work(0)`, `work(1)`, …; on a GPU on several streams in turn, so that small kernels overlap."""
    if device.type != "cuda" or count == 1:
        return [work(index) for index in range(count)]
    here, streams = torch.cuda.current_stream(device), _streams(device, "each", min(count, _STREAMS))
    results = []
    for index in range(count):
        stream = streams[index % len(streams)]
        stream.wait_stream(here)
        with torch.cuda.stream(stream):
            results.append(work(index))
    for stream in streams:
        here.wait_stream(stream)
    return results
