"""The time of each stage of a round."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Stopwatch:
    """Seconds by stage. On a GPU every stage waits for the device at its end, so a profiled run is a little slower.
    Without a device it measures nothing and does not wait."""

    def __init__(self, device: torch.device | None = None) -> None:
        self.seconds: dict[str, float] = {}
        self.device = device

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Add the time of the block to `name`; the time of a stage inside another counts for both."""
        began = time.perf_counter()
        try:
            yield
        finally:
            if self.device is not None:
                if self.device.type == "cuda":
                    torch.cuda.synchronize(self.device)
                self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - began
