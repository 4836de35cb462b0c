"""A data set before it is partitioned: the samples and labels that a user gave, as validated arrays."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from pfedlms.checks import IS_MASKED
from pfedlms.data.partition import SCHEMES, Indices
from pfedlms.errors import DataError, DataWarning, reason

Samples = NDArray[Any]
"""float32, or int64 where they are whole numbers."""
Constants = tuple[float, ...] | None

_MAX_CODE = 1000  # numbers from 0 to below this are class numbers, even if some are missing in between
_BLOCK = 1 << 16  # samples that are checked together


@dataclass(frozen=True)
class Pool:
    """Samples `x: [n, ...]` and class numbers `y: [n]`. For text, `y: [n, length]` is the next token at each position.
    Targets that are no classes are `y: [n, ...]`."""

    x: Samples
    y: NDArray[Any]
    classes: int
    """0: targets are no classes."""
    names: tuple[str, ...] = ()
    """Names of all classes, where labels were not given as class numbers."""
    owner: NDArray[np.int64] | None = None
    """`[n]`: the client of each sample, an index of `client_names`. None if the data name no clients."""
    client_names: tuple[str, ...] = ()
    client_indices: tuple[Indices | tuple[Indices, Indices], ...] = ()
    """Where a user gave clients one by one: the sample indices of each client, or its (train, test) indices."""
    mean: Constants = None
    """Images were normalised by `mean` and `std`, one number per channel. None: samples are as they were given."""
    std: Constants = None
    tokens: str = ""
    """For text: what a token is, one of `text.KINDS` or custom."""
    stride: int | None = None
    """For text: tokens from one window to the next; 0: as many as a window has."""

    @property
    def strata(self) -> NDArray[np.int64]:
        """What samples are partitioned and split by: the labels, or zeros where a target is not one class."""
        return self.y if self.classes and self.y.ndim == 1 else np.zeros(len(self.y), dtype=np.int64)

    def resolve_scheme(self, scheme: str) -> str:
        """The partition scheme that `scheme` means for these samples. `auto` is `given` where the data name clients;
        else `dirichlet`, or `iid` where targets are no classes."""
        if scheme == "auto":
            return "given" if self.owner is not None else "dirichlet" if self.classes else "iid"
        if scheme in ("dirichlet", "classes") and not self.classes:
            raise DataError(
                f"data.partition: got {scheme!r}, which divides classes, but targets are numbers; use iid, quantity or "
                "given"
            )
        if scheme == "given" and self.owner is None:
            raise DataError(
                "data.partition: got 'given', but the data name no clients; name a column with --set "
                f"data.owner_column=COLUMN (owner_column in Python), or use one of: {', '.join(SCHEMES[:-1])}"
            )
        return scheme

    @property
    def overlap(self) -> int | None:
        """For text: how many windows before a window share targets with it."""
        if self.stride is None:
            return None
        length: int = self.x.shape[1]
        return -(-length // (self.stride or length)) - 1

    def client_name(self, client: int) -> str:
        """What a client is called in messages: by its name, or else its number."""
        return repr(self.client_names[client]) if client < len(self.client_names) else str(client)

    def refuse_single_class(self) -> None:
        """Refuse the data of all clients if they have one class. Those of one client may."""
        if self.classes and self.y.ndim == 1 and bool((self.y == self.y[0]).all()):
            name = self.names[self.y[0]] if self.names else self.y[0]
            raise DataError(
                f"data: got labels that are all {name}, expected two classes or more; look where labels are taken from"
            )

    def split_in_order(self, windows: Indices, client: int, share: float = 0.25) -> tuple[Indices, Indices]:
        """Split one client's windows of text: the last ones are held out, and windows that overlap them are dropped."""
        assert self.overlap is not None  # it is set for text
        first = len(windows) - min(max(round(share * len(windows)), 1), len(windows) - 1)
        if first <= self.overlap:
            raise DataError(
                f"client {self.client_name(client)}: got {len(windows)} windows of text, of which {self.overlap} "
                "overlap those set aside, expected more; use a larger data.stride or data.min_tokens"
            )
        return windows[: first - self.overlap], windows[first:]


def build_pool(parts: Sequence[tuple[str, Any, Any]], names: Sequence[str] = (), any_targets: bool = False) -> Pool:
    """One pool of several parts, validated. Each part is (its name in error messages, samples, labels); `names` are
    those of the classes, where they are known. With `any_targets`, for a custom loss, labels need not be classes, and
    whole numbers are never renumbered."""
    where = [name for name, _, _ in parts]
    samples = [_as_numbers(x, name) for name, x, _ in parts]
    labels = [as_array(y, f"{name}: labels") for name, _, y in parts]
    if any_targets and not _are_classes(labels):
        labels, classes, names = [_as_numbers(y, name, "targets") for name, y in zip(where, labels, strict=True)], 0, ()
    else:
        labels, classes, names = _class_labels(list(zip(where, labels, strict=True)), names)
    for name, x, y in zip(where, samples, labels, strict=True):
        if len(x) != len(y):
            raise DataError(f"{name}: got {len(x)} samples and {len(y)} labels, expected as many of each")
    return Pool(_concatenate(where, samples, "samples"), _concatenate(where, labels, "targets"), classes, tuple(names))


def _as_numbers(value: Any, name: str, what: str = "samples") -> Samples:
    """Samples, or targets that are no classes, as an array `[n, ...]`: int64 for whole numbers such as token ids, else
    float32. Bytes with three or more axes are images and become float32."""
    x = as_array(value, f"{name}: {what}")
    if x.ndim and len(x) == 0:
        raise DataError(f"{name}: got no {what}; leave out clients without any")
    if x.dtype.kind not in "fiub" or x.ndim == 0:
        raise DataError(
            f"{name}: got {what} of shape {x.shape} and type {x.dtype}, expected an array of numbers [n, ...]; turn "
            "text into token ids (or use pfedlms.data.texts), a table into floats "
            "(pandas.get_dummies(df).astype('float32')), a sparse matrix into toarray()"
        )
    if x.dtype.kind in "iu" and not (what == "samples" and x.dtype == np.uint8 and x.ndim >= 3):
        return np.require(x, np.int64, "C")
    with np.errstate(over="ignore"):  # too large a number becomes infinite, which is refused
        floats = np.require(x, np.float32, "C")
    # Block by block: a memory-mapped file may be larger than memory.
    if not all(np.isfinite(floats[start : start + _BLOCK]).all() for start in range(0, len(floats), _BLOCK)):
        raise DataError(f"{name}: {what} hold NaN or infinite values; clean them first")
    return floats


def _concatenate(where: Sequence[str], parts: Sequence[Samples], what: str) -> Samples:
    """All parts as one array, int64 if all of them are."""
    shape = parts[0].shape[1:]
    for name, x in zip(where, parts, strict=True):
        if x.shape[1:] != shape:
            raise DataError(
                f"{name}: got {what} of shape {x.shape[1:]}, expected {shape} as for {where[0]}; bring them to one "
                "shape"
            )
    if len(parts) == 1:  # it may be memory-mapped, so it is not copied
        return parts[0]
    integers = all(x.dtype == np.int64 for x in parts)
    return np.concatenate([x if integers else x.astype(np.float32, copy=False) for x in parts])


def as_array(value: Any, name: str) -> NDArray[Any]:
    """Tensors, arrays, nested lists and whatever else NumPy accepts, as an array. Pillow images become
    `[n, channels, height, width]` with values from 0 to 1. Objects that are numbers become numbers."""
    if isinstance(value, np.ma.MaskedArray):
        raise DataError(f"{name}: {IS_MASKED}")
    try:
        if isinstance(value, Sequence) and not isinstance(value, str | bytes):
            value = list(value)
            if any(isinstance(each, np.ma.MaskedArray) for each in value):
                raise DataError(f"{name}: {IS_MASKED}")
            if value and isinstance(value[0], torch.Tensor):
                value = torch.stack(value)
            elif value and callable(getattr(value[0], "getbands", None)):
                value = np.stack([_pixels(image, name) for image in value])
        if isinstance(value, torch.Tensor):
            value = value.detach().cpu().resolve_conj().resolve_neg()
            # NumPy has no bfloat16 and no floats of 8 bits.
            value = (value.float() if value.is_floating_point() else value).numpy()
        array = np.asarray(value)
        if array.dtype.kind == "O":  # columns of pandas' own types, for instance
            numbers = np.asarray(array.tolist())
            array = numbers if numbers.dtype.kind in "fiub" else array
        return array
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(
            f"{name} must be arrays of numbers, all of one shape ({reason(error)}); pad, cut or resize them to one"
        ) from error


def _pixels(image: Any, name: str) -> NDArray[np.float32]:
    """A Pillow image as `[channels, height, width]`, from 0 to 1."""
    if image.mode in ("1", "P", "PA"):  # one bit, or numbers of a palette
        image = image.convert("L" if image.mode == "1" else "RGB")
    pixels = np.asarray(image)
    if pixels.dtype != np.uint8:
        raise DataError(
            f"{name}: got an image of mode {image.mode}, expected 8 bits per channel; give arrays instead, such as "
            "np.float32(image) / 65535"
        )
    pixels = pixels[np.newaxis] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)
    return pixels.astype(np.float32) / np.float32(255)


# --- labels ---


def _are_classes(columns: Sequence[NDArray[Any]]) -> bool:
    """Whether all targets are labels of classes: vectors of booleans, of names, or of class numbers."""
    if any(column.ndim != 1 or column.dtype.kind not in "iubUSO" for column in columns):
        return False
    numbers = [column for column in columns if column.dtype.kind in "iu" and len(column)]
    return not numbers or _are_class_numbers(np.concatenate(numbers))


def _are_class_numbers(labels: NDArray[Any]) -> bool:
    """Whether whole numbers are class numbers, from 0 on; some of them may be missing in between."""
    return bool(labels.min() == 0 and labels.max() < max(_MAX_CODE, len(labels)))


def _class_labels(
    parts: Sequence[tuple[str, Any]], names: Sequence[str]
) -> tuple[list[NDArray[np.int64]], int, tuple[str, ...]]:
    """Class numbers of several parts, the number of classes, and their names if they have any. All parts are numbered
    together: a number means the same class for all clients.

    Class numbers from 0 on stay as they are. Other whole numbers, texts and booleans are numbered in their order and
    keep their names. A one-hot row becomes the index of its one. With `names`, labels are indices of these.
    """
    columns = [label_column(value, name) for name, value in parts]
    first = columns[0]
    for (name, _), column in zip(parts, columns, strict=True):
        if (column.dtype.kind, column.shape[1:]) != (first.dtype.kind, first.shape[1:]):
            raise DataError(
                f"{name}: got labels of type {column.dtype} and shape {column.shape}, expected some like those of "
                f"{parts[0][0]}, {first.dtype} and {first.shape}"
            )
    if first.ndim == 2:
        return [column.argmax(axis=1) for column in columns], first.shape[1], tuple(names)
    if first.dtype.kind == "b":
        return [column.astype(np.int64) for column in columns], 2, ("False", "True")
    labels = np.concatenate(columns)
    if first.dtype.kind == "i" and names:
        for (name, _), column in zip(parts, columns, strict=True):
            if len(outside := column[(column < 0) | (column >= len(names))]):
                raise DataError(
                    f"{name}: got label {outside[0]}, expected 0 to {len(names) - 1}; leave samples without a label out"
                )
        return columns, len(names), tuple(names)
    if first.dtype.kind == "i" and _are_class_numbers(labels):
        return columns, int(labels.max()) + 1, ()
    numbers, values = number_values(labels)
    return np.split(numbers, np.cumsum([len(column) for column in columns])[:-1]), len(values), values


def label_column(value: Any, name: str, what: str = "label") -> NDArray[Any]:
    """A column of labels, or of clients, `[n]`: int64, text or booleans. One-hot rows stay `[n, classes]`."""
    y = as_array(value, f"{name}: {what}s")
    if y.ndim == 2 and y.shape[1] == 1:
        y = y[:, 0]
    if y.ndim == 2 and len(y) and np.isin(y, (0, 1)).all() and (y.sum(axis=1) == 1).all():
        return y.astype(np.int64)
    if y.ndim != 1 or len(y) == 0 or y.dtype.kind not in "fiubUSO":
        raise DataError(
            f"{name}: got {what}s of shape {y.shape} and type {y.dtype}, expected one class per sample: a vector of "
            "class numbers or names, or one-hot rows; samples come first, (x, y), and other targets need a loss of "
            "your own (loss=…)"
        )
    if y.dtype.kind in "iub":
        return y if y.dtype.kind == "b" else y.astype(np.int64)
    values: list[Any] = [label.decode(errors="replace") if isinstance(label, bytes) else label for label in y.tolist()]
    if missing := [row for row, label in enumerate(values) if _is_missing(label)]:
        raise DataError(
            f"{name}: {len(missing)} {what}{'s are' if len(missing) != 1 else ' is'} missing, the first in sample "
            f"{missing[0]} (from 0); fill in what is missing, or leave those samples out"
        )
    if y.dtype.kind == "f":
        if broken := [label for label in values if not (label.is_integer() and abs(label) < 2**53)]:
            raise DataError(
                f"{name}: got {what}s such as {broken[0]}, expected class numbers or names; numbers to be predicted as "
                "they are need a loss, which is given in Python: pfedlms.run((x, y), model, loss=…)"
            )
        return y.astype(np.int64)
    if (types := {type(label).__name__ for label in values}) != {"str"}:
        raise DataError(f"{name}: got {what}s of the types {', '.join(sorted(types))}, expected numbers or names")
    return np.array(values)


def _is_missing(value: Any) -> bool:
    """Whether a value is None, NaN, pandas' NA or blank text."""
    if isinstance(value, str):
        return not value.strip()
    return value is None or type(value).__name__ == "NAType" or bool(value != value)


def number_values(values: NDArray[Any]) -> tuple[NDArray[np.int64], tuple[str, ...]]:
    """Number the distinct values in ascending order; returns the number of each value and the names by number. Whole
    numbers are ordered as numbers, everything else as text. Text counts as whole numbers if all of it is spelled as
    these are written, so that different texts stay different: 007 is not 7."""
    keys = values
    if values.dtype.kind not in "iu":
        texts = [str(value) for value in values.tolist()]
        keys = np.array(texts)
        with suppress(ValueError):
            integers = [int(text) for text in texts]
            keys = np.array(integers, dtype=object) if [str(number) for number in integers] == texts else keys
    names, numbers = np.unique(keys, return_inverse=True)
    return numbers.astype(np.int64), tuple(map(str, names.tolist()))


def class_numbers(pool: Pool, names: tuple[str, ...], warns: bool = False) -> NDArray[np.int64]:
    """The labels of a pool as indices of `names`: by their names, or as numbers if none of them is among `names` and
    these are no numbers themselves, of which it `warns` if asked to."""
    labels = pool.names or tuple(map(str, range(pool.classes)))
    present = [labels[k] for k in np.unique(pool.y)]
    by_name = any(name in names for name in present) or all(name.lstrip("-").isdecimal() for name in names)
    known = names if by_name else tuple(map(str, range(len(names))))
    numbers = {name: number for number, name in enumerate(known)}
    if unknown := [name for name in present if name not in numbers]:
        shown = repr(unknown[0]) if pool.names else unknown[0]
        or_numbers = "" if by_name else f", or numbers from 0 to {len(names) - 1}"
        raise DataError(f"data: got the class {shown}, expected one of the classes {', '.join(names)}{or_numbers}")
    if warns and not by_name:
        meant = ", ".join(f"{number} for {name}" for number, name in enumerate(names[:3])) + ", …" * (len(names) > 3)
        warnings.warn(f"data: labels are numbers, in the order of the classes: {meant}", DataWarning, stacklevel=3)
    places: NDArray[np.int64] = np.array([numbers.get(name, 0) for name in labels], dtype=np.int64)[pool.y]
    return places
