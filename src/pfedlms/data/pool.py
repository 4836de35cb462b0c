"""A data set before it is partitioned: samples, classes with their names and, where the data say so, the client of each
sample."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pfedlms.data.partition import Indices
from pfedlms.errors import DataError

Samples = NDArray[Any]
Constants = tuple[float, ...] | None


@dataclass(frozen=True)
class Pool:
    """Samples `x: [n, ...]` and class numbers `y: [n]`; of windows of tokens `y: [n, length]`, the next token at each
    position; or targets that are no classes, `[n, ...]`."""

    x: Samples
    y: NDArray[Any]
    classes: int
    """0: targets are no classes."""
    names: tuple[str, ...] = ()
    """Of all classes, where they were given as something else than class numbers."""
    owner: NDArray[np.int64] | None = None
    """`[n]`: each sample's client as a place in `owners`, where the data say so."""
    owners: tuple[str, ...] = ()
    """Names of clients."""
    held: tuple[Indices | tuple[Indices, Indices], ...] = ()
    """Where clients were given one by one: the indices of each, or its (train, test) indices."""
    mean: Constants = None
    """What images were normalised by, one number per channel, as is `std`; None: samples are as they were given."""
    std: Constants = None
    sizes: tuple[int, ...] = ()
    """Of the parts that they were put together from, in order."""
    tokens: str = ""
    """Of windows of tokens: what a token is, one of `text.KINDS` or custom."""
    overlap: int | None = None
    """Of windows of tokens: so many windows before a window share targets with it."""

    @property
    def strata(self) -> NDArray[np.int64]:
        """What samples are partitioned and split by: labels, or nothing where a target is not one class."""
        return self.y if self.classes and self.y.ndim == 1 else np.zeros(len(self.y), dtype=np.int64)

    def places(self) -> list[Indices]:
        """The indices of each part."""
        return np.split(np.arange(len(self.y)), np.cumsum(self.sizes)[:-1])

    def cut_in_order(self, held: Indices, client: int, share: float = 0.25) -> tuple[Indices, Indices]:
        """Of one client's windows of tokens the last ones are set aside; those that overlap them are left out."""
        assert self.overlap is not None  # of windows of tokens
        first = len(held) - min(max(round(share * len(held)), 1), len(held) - 1)
        if first <= self.overlap:
            raise DataError(
                f"client {client}: got {len(held)} windows of text, of which {self.overlap} overlap those set aside, "
                "expected more; use a larger data.stride or data.min_tokens"
            )
        return held[: first - self.overlap], held[first:]


def normalised(
    raw: NDArray[np.uint8], mean: Constants = None, std: Constants = None, scale: float = 255.0
) -> tuple[NDArray[np.float32], Constants, Constants]:
    """x = (raw / scale − mean) / std of images `[n, channels, height, width]`, channel by channel, and the constants:
    those given, or the images' own."""
    if mean is None or std is None:
        mean, std = channel_statistics(raw)
    if len(mean) != raw.shape[1]:
        raise DataError(f"data.mean: got {len(mean)} numbers, expected {raw.shape[1]}, one per channel of the images")
    centre, spread = (np.array(each, dtype=np.float32).reshape(-1, 1, 1) for each in (mean, std))
    x = raw.astype(np.float32)
    x /= np.float32(scale)
    x -= centre
    x /= spread
    return x, mean, std


def constants(mean: Sequence[float] | None, std: Sequence[float] | None) -> tuple[Constants, Constants]:
    """`mean` and `std` as given, checked; empty ones count as not given."""
    found = [tuple(map(float, each)) if each is not None and len(each) else None for each in (mean, std)]
    for name, own in zip(("mean", "std"), found, strict=True):
        if own is not None and not (np.isfinite(own).all() and (name == "mean" or min(own) > 0)):
            above = " above 0" * (name == "std")
            raise DataError(f"data.{name}: got {own}, expected finite numbers{above}, one per channel")
    if sum(each is None for each in found) == 1 or len(found[0] or ()) != len(found[1] or ()):
        raise DataError(
            f"data.mean, data.std: got {found[0]} and {found[1]}, expected as many of each, one per channel; give both "
            "or leave both out"
        )
    return found[0], found[1]


def channel_statistics(raw: NDArray[np.uint8]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of each channel of images `[n, channels, height, width]`, as shares of 255.

    Both come from counts of the 256 values, so that they are the same on every machine. A channel with one value only
    is divided by 1.
    """
    values = np.arange(256)
    mean, std = [], []
    for channel in range(raw.shape[1]):
        counts = np.zeros(256, dtype=np.int64)
        for image in raw[:, channel]:  # one by one: NumPy counts in a copy eight times the size
            counts += np.bincount(image.reshape(-1), minlength=256)
        total, first, second = (int(counts @ values**power) for power in (0, 1, 2))
        mean.append(first / total / 255)
        std.append((max(total * second - first**2, 0) ** 0.5 / total / 255) or 1.0)
    return tuple(mean), tuple(std)


def numbered(values: Iterable[Any]) -> tuple[NDArray[np.int64], tuple[str, ...]]:
    """Distinct values numbered in their order, and their names: in the order of numbers where all are whole numbers, be
    they written as text, else in that of text."""
    if isinstance(values, np.ndarray) and values.dtype.kind in "iu":
        known, places = np.unique(values, return_inverse=True)
        return places.astype(np.int64), tuple(map(str, known.tolist()))
    given, keys = list(values), list[Any]()
    try:
        keys = [whole(value) for value in given]
    except ValueError:
        keys = [str(value) for value in given]
    place_of = {value: place for place, value in enumerate(sorted(set(keys)))}
    return np.array([place_of[value] for value in keys], dtype=np.int64), tuple(map(str, place_of))


def whole(value: Any) -> int:
    """The whole number that `value` is or spells, also as 2.0; ValueError if it does not. Truth values are names."""
    if isinstance(value, bool | np.bool_):
        raise ValueError
    if not isinstance(value, float | np.floating):
        with suppress(ValueError):
            return int(value)  # not by way of a float, which cuts long ones
        value = float(value)
    if not value.is_integer():
        raise ValueError
    return int(value)


def class_numbers(pool: Pool, names: tuple[str, ...]) -> NDArray[np.int64]:
    """Labels as positions in `names`: by their names, or as the numbers they are if none of them is a name."""
    places: list[int | None]
    if not pool.names:
        places = list(range(pool.classes))
    elif any(name in names for name in pool.names):
        places = [names.index(name) if name in names else None for name in pool.names]
    else:
        places = [int(name) if name.isdecimal() else None for name in pool.names]
    held = np.unique(pool.y)
    wrong = [
        pool.names[k] if pool.names else int(k) for k in held if (place := places[k]) is None or place >= len(names)
    ]
    if wrong:
        raise DataError(
            f"data: got the class {wrong[0]!r}, expected one of the classes {', '.join(names)}, or numbers from "
            f"0 to {len(names) - 1}"
        )
    numbers: NDArray[np.int64] = np.array([0 if place is None else place for place in places], dtype=np.int64)[pool.y]
    return numbers
