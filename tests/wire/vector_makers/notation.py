"""Numbers as vectors.json writes them, and numbers to write: integers of the package's own generator."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np

from pfedlms import rng

SAMPLES = (5, 17, 12)  # N_k; client 1 and clients 0 + 2 weigh the same, so that votes can tie


def word(value: int) -> str:
    return f"{int(value):016x}"


def bits32(values: Any) -> list[str]:
    return [f"{pattern:08x}" for pattern in np.asarray(values, dtype=np.float32).view(np.uint32).ravel().tolist()]


def bits64(value: float) -> str:
    return struct.pack(">d", value).hex()


def sign_text(values: np.ndarray) -> str:
    return "".join("+" if value > 0 else "-" for value in values)


def floats(count: int, *name: int) -> np.ndarray:
    """Multiples of 2^-24 in [-1/2, 1/2), exact in float32."""
    return ((rng.words(rng.stream(2024, "vectors", *name), count) >> np.uint64(40)) / 2**24 - 0.5).astype(np.float32)


def symbols(count: int, levels: int, *name: int) -> np.ndarray:
    return (rng.words(rng.stream(2024, "vectors", *name), count) % np.uint64(levels)).astype(np.uint8)
