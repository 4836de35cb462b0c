"""Work that overlaps on a GPU; on a CPU it is done in order."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import TypeVar

import torch

First = TypeVar("First")
Second = TypeVar("Second")


@lru_cache
def streams(device: torch.device, purpose: str, count: int) -> list[torch.cuda.Stream]:
    return [torch.cuda.Stream(device) for _ in range(count)]  # type: ignore[no-untyped-call]


def overlapped(
    first: Callable[[], First], second: Callable[[], Second], device: torch.device, purpose: str
) -> tuple[First, Second]:
    """Both results; on a GPU both are computed at the same time, on two streams. Nested calls need different
    purposes."""
    if device.type != "cuda":
        return first(), second()
    current, (side,) = torch.cuda.current_stream(device), streams(device, purpose, 1)
    side.wait_stream(current)
    with torch.cuda.stream(side):
        one = first()
    two = second()
    current.wait_stream(side)
    return one, two
