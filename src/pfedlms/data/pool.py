"""A data set before it is partitioned: samples and labels that users gave, as checked arrays."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from pfedlms.data.partition import Indices
from pfedlms.errors import DataError, reason

Samples = NDArray[Any]
"""float32, or int64 where they are whole numbers."""
Constants = tuple[float, ...] | None

_CODES = 1000  # up to here a number from 0 on is a class number, whatever is missing in between
_EXACT = 2.0**53  # from here on a float64 stands for several whole numbers
_SHOWN = 5  # values that a message names
_BLOCK = 1 << 16  # samples that are checked together


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
    """`[n]`: each sample's client as a place in `client_names`, where the data say so."""
    client_names: tuple[str, ...] = ()
    """Names of clients."""
    client_indices: tuple[Indices | tuple[Indices, Indices], ...] = ()
    """Where clients were given one by one: the indices of each, or its (train, test) indices."""
    mean: Constants = None
    """What images were normalised by, one number per channel, as is `std`; None: samples are as they were given."""
    std: Constants = None
    tokens: str = ""
    """Of windows of tokens: what a token is, one of `text.KINDS` or custom."""
    overlap: int | None = None
    """Of windows of tokens: so many windows before a window share targets with it."""

    @property
    def strata(self) -> NDArray[np.int64]:
        """What samples are partitioned and split by: labels, or nothing where a target is not one class."""
        return self.y if self.classes and self.y.ndim == 1 else np.zeros(len(self.y), dtype=np.int64)

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


def checked(parts: Sequence[tuple[str, Any, Any]], names: Sequence[str] = (), any_targets: bool = False) -> Pool:
    """The samples and labels of some parts, each with the name that errors call it; `names` of the classes, where they
    are known. With `any_targets`, for a custom loss, labels need not be classes."""
    called, given, targets = zip(*parts, strict=True)
    samples = [_numbers(x, name) for name, x in zip(called, given, strict=True)]
    labels: list[NDArray[Any]]
    if any_targets and not _are_classes(targets[0]):
        labels, classes, names = [_numbers(y, name, "targets") for name, y in zip(called, targets, strict=True)], 0, ()
    else:
        labels, classes, names = _labels(list(zip(called, targets, strict=True)), names)
    for name, x, y in zip(called, samples, labels, strict=True):
        if len(x) != len(y):
            raise DataError(f"{name}: got {len(x)} samples and {len(y)} labels, expected as many of each")
    x, y = _joined(called, samples, "samples"), _joined(called, labels, "targets")
    return Pool(x, y, classes, tuple(names))


def _numbers(value: Any, name: str, what: str = "samples") -> Samples:
    """Samples, or targets that are no classes, `[n, ...]`: float32, or int64 where they are whole numbers, such as
    token ids. Samples of bytes with three and more axes are images and become float32, as do booleans."""
    x = array_of(value, f"{name}: {what}")
    if x.ndim == 0 or len(x) == 0:
        raise DataError(f"{name}: got no {what}, expected an array [n, ...] with at least one")
    if x.dtype.kind not in "fiub":
        text = x.dtype.kind in "US" or isinstance(x.flat[0], str | bytes)
        raise DataError(
            f"{name}: got {what} {'that are text' if text else f'of type {x.dtype}'}, expected an array of numbers, "
            "all of one shape; turn text into token ids first, or use pfedlms.data.texts to predict the next token"
        )
    if x.dtype.kind in "iu" and not (what == "samples" and x.dtype == np.uint8 and x.ndim >= 3):
        if x.dtype == np.uint64 and x.max() > np.iinfo(np.int64).max:
            raise DataError(f"{name}: got {what} up to {x.max()}, expected whole numbers below 2^63")
        return np.require(x, np.int64, "C")
    with np.errstate(over="ignore"):  # too large a number becomes infinite, which is refused
        floats = np.require(x, np.float32, "C")
    # Some at a time: a file that is mapped may be larger than memory.
    if not all(np.isfinite(floats[start : start + _BLOCK]).all() for start in range(0, len(floats), _BLOCK)):
        raise DataError(f"{name}: {what} hold NaN or infinite values; clean them first")
    return floats


def _joined(called: Sequence[str], parts: Sequence[Samples], what: str) -> Samples:
    """Several parts as one; whole numbers only if all of them are."""
    like = parts[0].shape[1:]
    for name, x in zip(called, parts, strict=True):
        if x.shape[1:] != like:
            raise DataError(
                f"{name}: got {what} of shape {x.shape[1:]}, expected {like} as for {called[0]}; bring them to "
                "one shape"
            )
    if len(parts) == 1:  # which may be mapped
        return parts[0]
    whole = all(x.dtype == np.int64 for x in parts)
    return np.concatenate([x if whole else x.astype(np.float32, copy=False) for x in parts])


def array_of(value: Any, name: str) -> NDArray[Any]:
    """Tensors, arrays, nested lists and whatever NumPy takes, as an array; images of Pillow become
    `[n, channels, height, width]` from 0 to 1."""
    try:
        if isinstance(value, Sequence) and not isinstance(value, str | bytes):
            value = list(value)
            if value and isinstance(value[0], torch.Tensor):
                value = torch.stack(value)
            elif value and callable(getattr(value[0], "getbands", None)):
                value = np.stack([_pixels(image) for image in value])
        if isinstance(value, torch.Tensor):
            value = value.detach().cpu().resolve_conj().resolve_neg()
            # NumPy has no numbers of 8 and 16 bits but its own half.
            value = (value.float() if value.is_floating_point() else value).numpy()
        return np.asarray(value)
    except Exception as error:  # whatever an object raises that is asked for its numbers
        raise DataError(
            f"{name} must be arrays of numbers, all of one shape ({reason(error)}); pad, cut or resize them to one"
        ) from error


def _pixels(image: Any) -> NDArray[Any]:
    """An image of Pillow as `[channels, height, width]`."""
    if image.mode in ("1", "P", "PA"):  # one bit, or numbers of a palette
        image = image.convert("L" if image.mode == "1" else "RGB")
    pixels = np.asarray(image)
    pixels = pixels[np.newaxis] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)
    return pixels.astype(np.float32) / np.float32(255) if pixels.dtype == np.uint8 else pixels


# --- labels ---


def _are_classes(y: Any) -> bool:
    """Whether targets are labels of classes: a vector of whole numbers from 0 on, truth values or names."""
    raw = np.asarray(y)
    return raw.ndim == 1 and raw.dtype.kind in "iubUSO" and not (raw.dtype.kind == "i" and bool((raw < 0).any()))


def _labels(
    parts: Sequence[tuple[str, Any]], names: Sequence[str]
) -> tuple[list[NDArray[np.int64]], int, tuple[str, ...]]:
    """Class numbers of several parts, the number of classes, and their names where they have any. Parts are numbered
    together: a number means the same class for all clients.

    Class numbers from 0 on stay what they are. Other whole numbers, texts and booleans are numbered in their order and
    keep their names; rows of a single one (one-hot) stand for its place. With `names`, labels are places in them.
    """
    read = [(name, *column_of(value, name)) for name, value in parts]
    first, kind, like = read[0]
    for name, own, column in read:
        if own != kind or column.shape[1:] != like.shape[1:]:
            got = [f"{k} {c.shape[1]} wide" if k == "one-hot" else k for k, c in ((own, column), (kind, like))]
            raise DataError(f"{name}: got labels that are {got[0]}, expected {got[1]} as for {first}")
    columns = [column for _, _, column in read]
    if kind == "one-hot":
        return [column.argmax(axis=1) for column in columns], like.shape[1], tuple(names)
    if kind == "booleans":
        return [column.astype(np.int64) for column in columns], 2, ("False", "True")
    if kind == "numbers" and names:
        for name, _, column in read:
            if len(outside := column[(column < 0) | (column >= len(names))]):
                raise DataError(
                    f"{name}: got label {outside[0]}, expected 0 to {len(names) - 1} for the classes "
                    f"{_some(names)}; leave samples without a label out"
                )
        return columns, len(names), tuple(names)
    together = np.concatenate(columns)
    if kind == "numbers" and together.min() == 0 and together.max() < max(_CODES, len(together)):
        return columns, int(together.max()) + 1, ()
    numbers, found = numbered(together)
    return np.split(numbers, np.cumsum([len(column) for column in columns])[:-1]), len(found), found


def column_of(value: Any, name: str, what: str = "label") -> tuple[str, NDArray[Any]]:
    """What labels, or clients, are, and they themselves `[n]`: numbers, texts or booleans; one-hot rows are
    `[n, classes]`."""
    y = array_of(value, f"{name}: {what}s")
    if y.ndim == 2 and y.shape[1] == 1:
        y = y[:, 0]
    if y.ndim == 2 and y.dtype.kind in "fiub" and len(y) and y.shape[1] > 1:
        if bool(((y == 0) | (y == 1)).all()) and bool((y.sum(axis=1) == 1).all()):
            return "one-hot", y
        raise DataError(
            f"{name}: got {what}s of shape {y.shape} and type {y.dtype} that are no one-hot rows, expected one class "
            "per sample: a vector [n] of class numbers or names, or for such targets a loss of your own (loss=…); "
            "samples come first, (x, y)"
        )
    expected = "expected a vector of class numbers or names, one kind"
    if y.ndim != 1 or y.dtype.kind not in "fiubUSO":
        raise DataError(f"{name}: got {what}s of shape {y.shape} and type {y.dtype}, {expected}")
    if len(y) == 0:
        raise DataError(f"{name}: got no {what}s, expected one for each sample")
    if y.dtype.kind in "iu":
        return "numbers", y.astype(np.int64)
    values: list[Any] = [each.decode(errors="replace") if isinstance(each, bytes) else each for each in y.tolist()]
    if missing := [row for row, each in enumerate(values) if _is_missing(each)]:
        raise DataError(
            f"{name}: {len(missing)} {what}{'s are' if len(missing) != 1 else ' is'} missing, the first in sample "
            f"{missing[0]} (from 0); fill in what is missing, or leave those samples out"
        )
    match sorted({type(each).__name__ for each in values}):
        case ["str"]:
            return "texts", np.array(values)
        case ["bool"]:
            return "booleans", np.array(values)
        case ["int"]:
            return "numbers", np.array(values)
        case ["float"]:
            if broken := [each for each in values if not each.is_integer() or abs(each) >= _EXACT]:
                raise DataError(
                    f"{name}: got {what}s such as {_some(broken)}, {expected}; numbers to be predicted as they are "
                    "need a loss, which is given in Python: pfedlms.run((x, y), model, loss=…)"
                )
            return "numbers", np.array(values).astype(np.int64)
        case types:
            raise DataError(f"{name}: got {what}s of the types {_some(types)}, {expected}")


def _is_missing(value: Any) -> bool:
    """None, NaN, pandas' NA, or a text without a character."""
    if isinstance(value, float | str):
        return value != value or (isinstance(value, str) and not value.strip())
    return value is None or type(value).__name__ == "NAType"


def _some(values: Sequence[Any]) -> str:
    return ", ".join(map(str, values[:_SHOWN])) + ", …" * (len(values) > _SHOWN)


def numbered(values: Iterable[Any]) -> tuple[NDArray[np.int64], tuple[str, ...]]:
    """Distinct values numbered in their order, and their names: in the order of numbers where all are whole numbers, be
    they written as text, else in that of text."""
    if isinstance(values, np.ndarray) and values.dtype.kind in "iu":
        known, places = np.unique(values, return_inverse=True)
        return places.astype(np.int64), tuple(map(str, known.tolist()))
    given, keys = list(values), list[Any]()
    try:
        keys = [_whole(value) for value in given]
    except ValueError:
        keys = [str(value) for value in given]
    place_of = {value: place for place, value in enumerate(sorted(set(keys)))}
    return np.array([place_of[value] for value in keys], dtype=np.int64), tuple(map(str, place_of))


def _whole(value: Any) -> int:
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
    given = pool.names or tuple(map(str, range(pool.classes)))
    by_name = pool.names and any(name in names for name in pool.names)
    known = names if by_name else tuple(map(str, range(len(names))))
    if wrong := [given[k] for k in np.unique(pool.y) if given[k] not in known]:
        shown = repr(wrong[0]) if pool.names else wrong[0]
        raise DataError(
            f"data: got the class {shown}, expected one of the classes {', '.join(names)}, or numbers from 0 to "
            f"{len(names) - 1}"
        )
    places = {name: place for place, name in enumerate(known)}
    numbers: NDArray[np.int64] = np.array([places.get(name, 0) for name in given], dtype=np.int64)[pool.y]
    return numbers
