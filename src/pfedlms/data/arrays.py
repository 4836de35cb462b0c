"""Samples and labels given by users, as checked arrays: numbers `[n, ...]`, and classes 0 to C − 1 with their names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from pfedlms.data.pool import Pool, numbered
from pfedlms.errors import DataError, reason

Samples = NDArray[np.float32 | np.int64]

_CODES = 1000  # up to here a number from 0 on is a class number, whatever is missing in between
_EXACT = 2.0**53  # from here on a float64 stands for several whole numbers
_SHOWN = 5  # values that a message names
_BLOCK = 1 << 16  # samples that are checked together


def checked(parts: Sequence[tuple[str, Any, Any]], names: Sequence[str] = (), any_targets: bool = False) -> Pool:
    """The samples and labels of some parts, each with the name that errors call it; `names` of the classes, where they
    are known. With `any_targets`, for a custom loss, labels need not be classes."""
    samples = [(name, numbers_of(x, name)) for name, x, _ in parts]
    given = [(name, y) for name, _, y in parts]
    labels: list[NDArray[Any]]
    if any_targets and not are_classes(given[0][1]):
        labels, classes, names = [numbers_of(y, name, "targets") for name, y in given], 0, ()
    else:
        labels, classes, names = labels_of(given, names)
    for (name, x), y in zip(samples, labels, strict=True):
        if len(x) != len(y):
            raise DataError(f"{name}: got {len(x)} samples and {len(y)} labels, expected as many of each")
    x, y = _joined(samples), _joined([(name, own) for (name, _), own in zip(given, labels, strict=True)], "targets")
    return Pool(x, y, classes, tuple(names), sizes=tuple(map(len, labels)))


def numbers_of(value: Any, name: str, what: str = "samples") -> Samples:
    """Samples, or targets that are no classes, `[n, ...]`: float32, or int64 where they are whole numbers, such as
    token ids. Samples of bytes with three and more axes are images and become float32, as do booleans; images of
    Pillow become `[n, channels, height, width]` from 0 to 1."""
    x = array_of(value, f"{name}: {what}")
    if x.ndim == 0 or len(x) == 0:
        raise DataError(f"{name}: got no {what}, expected an array [n, ...] with at least one")
    if x.dtype.kind in "US" or (x.dtype.kind == "O" and isinstance(x.flat[0], str | bytes)):
        raise DataError(
            f"{name}: got {what} that are text, expected numbers; turn them into token ids first, whole numbers "
            "[n, length], or use pfedlms.data.texts to predict the next token of running text"
        )
    if x.dtype.kind not in "fiub":
        raise DataError(
            f"{name}: got {what} of type {x.dtype}, expected an array of numbers, all {what} of one shape; pad, cut or "
            "resize them to one, and keep nothing but numbers"
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


def _joined(parts: Sequence[tuple[str, Samples]], what: str = "samples") -> Samples:
    """Several parts, each with the name that errors call it, as one; whole numbers only if all of them are."""
    first, like = parts[0]
    for name, x in parts:
        if x.shape[1:] != like.shape[1:]:
            raise DataError(
                f"{name}: got {what} of shape {x.shape[1:]}, expected {like.shape[1:]} as for {first}; "
                "bring them to one shape"
            )
    if len(parts) == 1:
        return like
    whole = all(x.dtype == np.int64 for _, x in parts)
    arrays = [x if whole else x.astype(np.float32, copy=False) for _, x in parts]
    return np.concatenate(arrays)


def are_classes(y: Any) -> bool:
    """Whether targets are labels of classes: a vector of whole numbers from 0 on, truth values or names."""
    raw = np.asarray(y)
    return raw.ndim == 1 and raw.dtype.kind in "iubUSO" and not (raw.dtype.kind == "i" and bool((raw < 0).any()))


Labels = tuple[list[NDArray[np.int64]], int, tuple[str, ...]]
"""Class numbers of some parts, the number of classes, and their names where they have any."""


def labels_of(parts: Sequence[tuple[str, Any]], names: Sequence[str] = ()) -> Labels:
    """The labels of several parts, numbered together: a number means the same class for all clients.

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
    numbers, found = numbered(together.tolist())
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
            f"{name}: {len(missing)} {what}s are missing, the first in sample {missing[0]} (from 0); fill them in, or "
            "leave those samples out"
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
                    "need a loss for them, in Python run(…, loss=…)"
                )
            return "numbers", np.array(values).astype(np.int64)
        case types:
            raise DataError(f"{name}: got {what}s of the types {_some(types)}, {expected}")


def _is_missing(value: Any) -> bool:
    """None, NaN, pandas' NA, or a text without a character."""
    if isinstance(value, float | str):
        return value != value or (isinstance(value, str) and not value.strip())
    return value is None or type(value).__name__ == "NAType"


def array_of(value: Any, name: str) -> NDArray[Any]:
    """Tensors, arrays, nested lists, images of Pillow and whatever NumPy takes, as an array."""
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


def _some(values: Sequence[Any]) -> str:
    return ", ".join(map(str, values[:_SHOWN])) + ", …" * (len(values) > _SHOWN)
