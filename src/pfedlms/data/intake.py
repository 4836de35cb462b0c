"""Data given to `run` and `compare` in Python, as one pool of checked arrays and each client's samples in it.

    one data set              (x, y) · a torch Dataset · a Hugging Face Dataset              partitioned over clients
    two of them in a tuple    (train, test), and a DatasetDict or dict of such splits        pooled and partitioned
    a list or dict            clients, each a (train, test) pair or one data set             theirs; one is split 75/25

A tuple of two ((x, y), (x, y)) pairs is two clients.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset

from pfedlms.data.federated import FederatedData, partitioned
from pfedlms.data.file import read_columns, texts_in
from pfedlms.data.partition import Indices, Partitioning
from pfedlms.data.pool import Pool, checked
from pfedlms.data.text import Windows, windows_of
from pfedlms.errors import DataError, reason

Pair = tuple[ArrayLike, ArrayLike]
SPLITS = ("train", "validation", "valid", "val", "dev", "test")
"""Names of splits; a dict that has a train and nothing but these is one data set, cut into them."""
_LABELS = ("label", "labels", "fine_label", "target", "targets", "y")
_SAMPLES = ("image", "img", "input_ids", "features", "x")
_EXPECTED = (
    "expected the name of a data set, arrays (x, y), a Dataset, (train, test), or a list or dict of clients, each with "
    "a (train, test) pair or one data set"
)


def read(data: Any, any_targets: bool = False, all_clients: bool = True) -> Pool:
    """The given data, read and checked; a `Pool` is returned as it is. With `any_targets`, for a custom loss, labels
    need not be classes. Without `all_clients` they may be of a single class."""
    if isinstance(data, Pool):
        return data
    parts = _splits(data)
    pool = _clients(data, any_targets) if parts is None else _pooled(parts, any_targets)[0]
    only = np.unique(pool.y)
    if all_clients and pool.classes and len(only) == 1:
        called = pool.names[only[0]] if pool.names else only[0]
        raise DataError(
            f"data: got labels that are all {called}, expected two classes or more; look where labels are taken from"
        )
    return pool


def from_pool(x: ArrayLike, y: ArrayLike, how: Partitioning) -> FederatedData:
    """One pool of samples, partitioned over clients."""
    return partitioned(read((x, y), all_clients=False), how)


def from_pairs(pairs: Sequence[tuple[Pair, Pair]], seed: int = 0, validation: float = 0.0) -> FederatedData:
    """Every client's own ((x_train, y_train), (x_test, y_test)), but for the share `validation` of train that is set
    aside, drawn by `seed`."""
    return partitioned(read(list(pairs), all_clients=False), Partitioning(len(pairs), 1.0, seed, validation=validation))


def texts(
    clients: Mapping[str, str] | Sequence[str] | Path, tokens: Any = "characters", window: int = 80, stride: int = 0,
    min_tokens: int = 0, vocabulary: Sequence[str] = (),
) -> Pool:  # fmt: skip
    """Text of clients as data for `run`: windows of tokens, each with the next token at every position.

    Args:
        clients: the text of each client, by name or in a list; or a file with a client and a text column.
        tokens: `characters`, `bytes`, or a tokenizer: an object with `encode`, or a function, from a text to whole
        numbers from 0. Its vocabulary is known by `get_vocab()` or `vocab_size`, else by the numbers that occur.
        window: tokens of one sample.
        stride: tokens from one window to the next; 0: windows do not overlap.
        min_tokens: clients with fewer tokens are left out.
        vocabulary: of characters, where it is known, as `Run.classes` has it; else those that occur.
    """
    if isinstance(clients, Path):
        held = texts_in(clients, read_columns(clients))
        if not held:
            raise DataError(f"{clients}: got no text, expected a column called text and one of clients")
    else:
        held = dict(clients) if isinstance(clients, Mapping) else {str(k): own for k, own in enumerate(clients)}
    if not held or isinstance(clients, str) or not all(isinstance(own, str) for own in held.values()):
        raise DataError(f"data: got {_what(clients)}, expected the text of each client, as in {{'anna': 'Dear …'}}")
    pool = windows_of(held, Windows(tokens, window, stride, min_tokens), names=vocabulary)
    assert pool.owner is not None  # every window belongs to a client
    places = np.split(np.arange(len(pool.owner)), np.flatnonzero(np.diff(pool.owner)) + 1)
    return replace(pool, owner=None, client_indices=tuple(places))


def _splits(data: Any) -> list[tuple[str, Any]] | None:
    """The parts of one data set, by the names that errors call them: itself, or train, test and the like. None for
    clients and anything else."""
    if _is_one(data):
        return [("data", data)]
    # A DatasetDict names columns for each of its splits, whatever these are called.
    tables = isinstance(getattr(data, "column_names", None), dict)
    if isinstance(data, Mapping) and (tables or ("train" in data and set(data) <= set(SPLITS))):
        return [(f"data, {name}", own) for name, own in data.items()]
    if isinstance(data, tuple) and len(data) == 2 and all(map(_is_one, data)):
        return list(zip(("data, train", "data, test"), data, strict=True))
    return None


def _clients(data: Any, any_targets: bool) -> Pool:
    """A list, tuple or dict of clients."""
    named = isinstance(data, Mapping)
    if not (named or _is_row(data)) or not len(data) or (not named and all(map(_is_array, data))):
        raise _refusal("data", data, _EXPECTED)
    if not named and all(map(_is_labelled, data)):
        more = f", and {len(data[0]) - 2} more per sample, which cannot be used" * (len(data[0]) > 2)
        raise DataError(
            f"data: got {_what(data)} samples, each with its label{more}; expected all samples and all labels: "
            "([row[0] for row in data], [row[1] for row in data])"
        )
    if isinstance(data, tuple) and any(map(_is_one, data)):
        raise DataError(
            f"data: got {_what(data)} that are not all (train, test) pairs, expected two data sets, (train, test); put "
            "clients into a list"
        )
    called = [f"client {name!r}" for name in data] if named else [f"client {place}" for place in range(len(data))]
    parts = [_of_client(name, own) for name, own in zip(called, data.values() if named else data, strict=True)]
    pool, places = _pooled([part for own in parts for part in own], any_targets)
    held = tuple((next(places), next(places)) if len(own) == 2 else next(places) for own in parts)
    return replace(pool, client_indices=held, client_names=tuple(map(str, data)) if named else ())


def _of_client(name: str, own: Any) -> list[tuple[str, Any]]:
    """One client's parts: (train, test), or all it has."""
    if _is_one(own):
        return [(name, own)]
    if isinstance(own, Mapping) and set(own) == {"train", "test"}:
        own = own["train"], own["test"]
    if _is_row(own) and len(own) == 2:
        return [(f"{name} {part}", each) for part, each in zip(("train", "test"), own, strict=True)]
    raise _refusal(name, own, "expected a (train, test) pair or one data set, arrays (x, y) or a Dataset each")


def _refusal(name: str, data: Any, expected: str) -> DataError:
    """What is wrong with something that is no data set, and the remedy."""
    if isinstance(data, DataLoader):
        return DataError(f"{name}: got a DataLoader, expected the data set it draws from; pass loader.dataset")
    if isinstance(data, Iterator | IterableDataset) or hasattr(data, "column_names"):
        return DataError(
            f"{name}: got {_what(data)}, whose samples come one after another, expected all of them; collect them into "
            "arrays (x, y) first, or load the data set without streaming"
        )
    if isinstance(data, str):
        return DataError(f"{name}: got a text, {expected}; text is given by pfedlms.data.texts({{'anna': 'Dear …'}})")
    if _is_array(data):
        return DataError(
            f"{name}: got one array of shape {tuple(data.shape)}, expected samples and labels as a tuple, (x, y)"
        )
    if _is_row(data) and len(data) > 2 and all(map(_is_array, data)):
        row = "(x, y), or a (train, test) pair of them, ((x_train, y_train), (x_test, y_test))"
        return DataError(f"{name}: got {_what(data)} arrays, expected samples and labels, {row}")
    return DataError(f"{name}: got {_what(data)}, {expected}")


def _what(value: Any) -> str:
    kind = type(value).__name__
    return f"a {kind} of {len(value)}" if isinstance(value, tuple | list | Mapping) else f"an object of type {kind}"


# --- what an object is ------------------------------------------------------------------------------------------------


def _is_one(data: Any) -> bool:
    """Whether this is one data set: a Dataset, a table, or samples and labels."""
    if isinstance(data, Dataset) or _is_table(data):
        return not isinstance(data, IterableDataset)
    samples_and_labels = isinstance(data, tuple | list) and len(data) == 2
    return samples_and_labels and (_is_array(data[0]) or _is_row(data[0])) and _is_labels(data[1])


def _is_table(data: Any) -> bool:
    """Whether this is a Hugging Face Dataset, known by what it can do."""
    known = isinstance(getattr(data, "column_names", None), list) and hasattr(data, "features")
    return known and hasattr(data, "__len__") and hasattr(data, "__getitem__")


def _is_array(data: Any) -> bool:
    return isinstance(getattr(data, "shape", None), tuple) and not _is_table(data) and not isinstance(data, Dataset)


def _is_row(data: Any) -> bool:
    return isinstance(data, Sequence) and not isinstance(data, str | bytes)


def _is_labels(data: Any) -> bool:
    """Labels rather than a data set: an array, or a row of numbers or names; a list of rows of numbers, too."""
    if not _is_row(data):
        return _is_array(data)
    first = data[0] if len(data) else None
    if isinstance(data, list) and isinstance(first, list):
        return bool(first) and _is_label(first[0])
    return first is None or _is_label(first) or getattr(first, "shape", None) == (1,)


def _is_label(value: Any) -> bool:
    """A single number or name."""
    return isinstance(value, int | float | str | bytes) or getattr(value, "shape", None) == ()


def _is_labelled(value: Any) -> bool:
    """A sample with its label."""
    pair = isinstance(value, tuple | list) and len(value) > 1 and _is_label(value[1])
    return pair and not _is_label(value[0])


# --- one data set as samples and labels -------------------------------------------------------------------------------


def _pooled(parts: Sequence[tuple[str, Any]], any_targets: bool) -> tuple[Pool, Iterator[Indices]]:
    """Some data sets as one, each with the name that errors call it, and the indices of each."""
    rows = [(name, *_arrays(data, name)) for name, data in parts]
    names: Sequence[str] = ()
    for name, _, _, own in rows:
        if own and names and list(own) != list(names):
            raise DataError(
                f"{name}: got the classes {', '.join(own)}, expected {', '.join(names)} as for {rows[0][0]}; bring "
                "them into one order"
            )
        names = names or own
    pool = checked([(name, x, y) for name, x, y, _ in rows], names, any_targets)
    return pool, iter(np.split(np.arange(len(pool.y)), np.cumsum([len(x) for _, x, _, _ in rows])[:-1]))


def _arrays(data: Any, name: str) -> tuple[Any, Any, Sequence[str]]:
    """Samples, labels and the names of the classes, where the data set knows them."""
    if not _is_one(data):
        raise _refusal(name, data, "expected one data set, arrays (x, y) or a Dataset")
    if _is_table(data):
        return _of_table(data, name)
    if isinstance(data, TensorDataset) and len(data.tensors) == 2:
        return data.tensors[0], data.tensors[1], ()
    return (*_of_items(data, name), _known_classes(data)) if isinstance(data, Dataset) else (data[0], data[1], ())


def _known_classes(data: Any) -> Sequence[str]:
    """As torchvision's data sets have them, unless labels are changed on the way."""
    while isinstance(data, Subset):
        data = data.dataset
    names = getattr(data, "classes", None)
    known = isinstance(names, list | tuple) and all(isinstance(each, str) for each in names)
    return names if known and getattr(data, "target_transform", None) is None else ()  # type: ignore[return-value]


def _of_items(data: Any, name: str) -> tuple[list[Any], list[Any]]:
    """All items of a map-style data set, in one pass."""
    samples, labels, place = [], [], 0
    try:  # the data set's own code may raise anything
        for place in range(len(data)):
            item = data[place]
            if isinstance(item, Mapping):
                own, label = _named_columns(list(item), name)
                item = item[own], item[label]
            if not isinstance(item, tuple | list) or len(item) != 2:
                raise DataError(f"{name}: item {place} is {_what(item)}, expected a pair: a sample and its label")
            samples.append(item[0])
            labels.append(item[1])
    except DataError:
        raise
    except Exception as error:
        raise DataError(f"{name}: item {place} cannot be read ({reason(error)})") from error
    return samples, labels


def _of_table(data: Any, name: str) -> tuple[Any, Any, Sequence[str]]:
    own, label = _named_columns(data.column_names, name)
    try:
        samples, labels = data[own], data[label]
    except Exception as error:  # whatever decoding or a transform raises
        raise DataError(f"{name}: the columns {own} and {label} cannot be read ({reason(error)})") from error
    return samples, labels, getattr((data.features or {}).get(label), "names", None) or ()


def _named_columns(columns: Sequence[Any], name: str) -> tuple[Any, Any]:
    """Which column holds the samples, and which the labels."""
    label = next((each for each in _LABELS if each in columns), None)
    others = [each for each in columns if each not in (*_LABELS, "coarse_label")]
    own = others[0] if len(others) == 1 else next((each for each in _SAMPLES if each in others), None)
    if label is None or own is None:
        raise DataError(
            f"{name}: got the columns {', '.join(map(str, columns))}, expected one of {', '.join(_LABELS)} and one "
            f"other or one of {', '.join(_SAMPLES)}; say which are samples and labels, for example (ds['x'], ds['y'])"
        )
    return own, label
