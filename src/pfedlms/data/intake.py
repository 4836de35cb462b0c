"""Data that a user gives to `run` and `compare` in Python, as one pool of validated arrays.

    one data set              (x, y) · a torch Dataset · a Hugging Face Dataset              partitioned over clients
    two of them in a tuple    (train, test), and a DatasetDict or dict of such splits        pooled and partitioned
    a list or dict            clients, each a (train, test) pair or one data set             a single one is split 75/25

A tuple of two ((x, y), (x, y)) pairs is two clients.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from torch.utils.data import Dataset, IterableDataset, Subset, TensorDataset

from pfedlms.data.federated import FederatedData, partitioned
from pfedlms.data.partition import Indices, Partitioning
from pfedlms.data.pool import Pool, build_pool
from pfedlms.data.text import Windows, cut_windows
from pfedlms.errors import DataError

Pair = tuple[ArrayLike, ArrayLike]
SPLITS = ("train", "validation", "valid", "val", "dev", "test")
"""A dict that has `train` is one data set in several splits, which have these names, in small or capital letters."""
_LABEL_COLUMNS = ("label", "labels", "fine_label", "target", "targets", "y")
_SAMPLE_COLUMNS = ("image", "img", "input_ids", "features", "x")
_EXPECTED = (
    "expected samples and labels (x, y), as (df[FEATURES], df[LABEL]) of a table, or a Dataset with a length, as "
    "loader.dataset; two of these, (train, test); or a list or dict of clients, each with one or two of these; text is "
    "given by pfedlms.data.texts"
)


def read(data: Any, any_targets: bool = False) -> Pool:
    """The pool of a user's data, validated; a `Pool` is returned as it is. With `any_targets`, for a custom loss,
    labels need not be classes."""
    if isinstance(data, Pool):
        return data
    splits = _dataset_splits(data)
    return _pool_clients(data, any_targets) if splits is None else _pool_parts(splits, any_targets)[0]


def from_pool(x: ArrayLike, y: ArrayLike, how: Partitioning) -> FederatedData:
    """One pool of samples, partitioned over clients."""
    return partitioned(read((x, y)), how)


def from_pairs(pairs: Sequence[tuple[Pair, Pair]], seed: int = 0, validation: float = 0.0) -> FederatedData:
    """Each client has its own ((x_train, y_train), (x_test, y_test)). The share `validation` of train, drawn by `seed`,
    is held out."""
    return partitioned(read(list(pairs)), Partitioning(len(pairs), 1.0, seed, validation=validation))


def texts(
    clients: Mapping[str, str] | Sequence[str], tokens: Any = "characters", window: int = 80, stride: int = 0,
    min_tokens: int = 0, vocabulary: Sequence[str] = (),
) -> Pool:  # fmt: skip
    """The text of clients as data for `run`: windows of tokens, each with the next token at every position.

    Args:
        clients: the text of each client, by name or in a list.
        tokens: `characters`, `bytes`, or a tokenizer: an object with `encode`, or a function, that turns a text into
        whole numbers from 0 on. Its vocabulary is that of `get_vocab()` or `vocab_size`, else the numbers that occur.
        window: how many tokens a sample has.
        stride: how many tokens lie between the begins of two windows; 0: windows do not overlap.
        min_tokens: clients with fewer tokens are left out.
        vocabulary: the characters, where they are known, as in `Run.classes`; else those that occur.
    """
    by_name = clients if isinstance(clients, Mapping) else dict(enumerate(clients))
    by_client = {str(name): text for name, text in by_name.items()}
    if not by_client or isinstance(clients, str) or not all(isinstance(text, str) for text in by_client.values()):
        raise DataError(f"data: got {_describe(clients)}, expected the text of each client, as in {{'anna': 'Dear …'}}")
    pool = cut_windows(by_client, Windows(tokens, window, stride, min_tokens), names=vocabulary)
    assert pool.owner is not None  # every window belongs to a client
    indices = np.split(np.arange(len(pool.owner)), np.flatnonzero(np.diff(pool.owner)) + 1)
    return replace(pool, owner=None, client_indices=tuple(indices))


def _dataset_splits(data: Any) -> list[tuple[str, Any]] | None:
    """If `data` is one data set: its splits with their names in error messages, or itself as the only one. None for
    clients and anything else."""
    if _is_dataset(data):
        return [("data", data)]
    # A DatasetDict has column names for each of its splits, whatever the splits are called.
    is_dataset_dict = isinstance(getattr(data, "column_names", None), dict)
    if isinstance(data, Mapping) and (is_dataset_dict or "train" in {str(name).lower() for name in data}):
        others = [name for name in data if str(name).lower() not in SPLITS]
        if others and not is_dataset_dict:
            raise DataError(
                f"data: got a dict with train beside {others[0]!r}, expected {', '.join(SPLITS)} or clients"
            )
        return [(f"data, {name}", split) for name, split in data.items()]
    if isinstance(data, tuple) and len(data) == 2 and all(map(_is_dataset, data)):
        return list(zip(("data, train", "data, test"), data, strict=True))
    return None


def _pool_clients(data: Any, any_targets: bool) -> Pool:
    """The pool of a list, tuple or dict of clients."""
    by_name = isinstance(data, Mapping)
    # A tuple of three data sets may be (train, validation, test), which are no clients.
    if not (by_name or _is_sequence(data)) or not data or (isinstance(data, tuple) and any(map(_is_dataset, data))):
        raise _not_a_dataset("data", data)
    clients = data if by_name else dict(enumerate(data))
    parts = [_client_parts(f"client {name!r}", client) for name, client in clients.items()]
    pool, indices = _pool_parts([part for client in parts for part in client], any_targets)
    by_client = tuple((next(indices), next(indices)) if len(client) == 2 else next(indices) for client in parts)
    return replace(pool, client_indices=by_client, client_names=tuple(map(str, data)) if by_name else ())


def _client_parts(name: str, client: Any) -> list[tuple[str, Any]]:
    """One client's train and test data, or its only data set, with their names in error messages."""
    if _is_dataset(client):
        return [(name, client)]
    if isinstance(client, Mapping) and set(client) == {"train", "test"}:
        client = client["train"], client["test"]
    if _is_sequence(client) and len(client) == 2:
        return [(f"{name} train", client[0]), (f"{name} test", client[1])]
    raise _not_a_dataset(name, client)


def _not_a_dataset(name: str, data: Any) -> DataError:
    return DataError(f"{name}: got {_describe(data)}, {_EXPECTED}")


def _describe(value: Any) -> str:
    kind = type(value).__name__
    if _is_array(value):
        return f"one {kind} of shape {tuple(value.shape)}"
    return f"a {kind} of {len(value)}" if isinstance(value, tuple | list | Mapping) else f"an object of type {kind}"


# --- what an object is ---


def _is_dataset(data: Any) -> bool:
    """Whether this is one data set: a Dataset, a table, or samples and labels."""
    if isinstance(data, Dataset) or _is_table(data):
        return not isinstance(data, IterableDataset)
    samples_and_labels = isinstance(data, tuple | list) and len(data) == 2
    return samples_and_labels and (_is_array(data[0]) or _is_sequence(data[0])) and _are_labels(data[1])


def _is_table(data: Any) -> bool:
    """Whether this is a Hugging Face Dataset, judged by its attributes."""
    has_columns = isinstance(getattr(data, "column_names", None), list)
    return has_columns and all(hasattr(data, name) for name in ("features", "__len__", "__getitem__"))


def _is_array(data: Any) -> bool:
    return isinstance(getattr(data, "shape", None), tuple) and not _is_table(data) and not isinstance(data, Dataset)


def _is_sequence(data: Any) -> bool:
    return isinstance(data, Sequence) and not isinstance(data, str | bytes)


def _are_labels(data: Any) -> bool:
    """Whether these are labels rather than a data set: an array, numbers or names in a sequence, or a list of lists of
    numbers."""
    if not _is_sequence(data):
        return _is_array(data)
    first = data[0] if data else 0
    if isinstance(data, list) and isinstance(first, list) and first:
        first = first[0]
    return isinstance(first, int | float | str | bytes) or getattr(first, "shape", None) in ((), (1,))


# --- one data set as samples and labels ---


def _pool_parts(parts: Sequence[tuple[str, Any]], any_targets: bool) -> tuple[Pool, Iterator[Indices]]:
    """The pool of several data sets, each with its name in error messages; and the indices of each in the pool."""
    arrays = [(name, *_samples_and_labels(data, name)) for name, data in parts]
    known = [(name, list(names)) for name, _, _, names in arrays if names]
    if differing := [name for name, names in known if names != known[0][1]]:
        raise DataError(f"{differing[0]}: got other classes than {known[0][0]}, expected the same in the same order")
    classes = known[0][1] if known else ()
    pool = build_pool([(name, x, y) for name, x, y, _ in arrays], classes, any_targets)
    return pool, iter(np.split(np.arange(len(pool.y)), np.cumsum([len(x) for _, x, _, _ in arrays])[:-1]))


def _samples_and_labels(data: Any, name: str) -> tuple[Any, Any, Sequence[str]]:
    """Samples, labels and the names of the classes, where the data set knows them."""
    if not _is_dataset(data):
        raise _not_a_dataset(name, data)
    if _is_table(data):
        sample, label = _find_columns(data.column_names, name)
        return data[sample], data[label], getattr((data.features or {}).get(label), "names", None) or ()
    if isinstance(data, TensorDataset) and len(data.tensors) == 2:
        return data.tensors[0], data.tensors[1], ()
    if isinstance(data, Dataset):
        return *_read_items(data, name), _class_names(data)
    return data[0], data[1], ()


def _class_names(data: Any) -> Sequence[str]:
    """The names of classes as torchvision's data sets have them, unless a transform changes the labels."""
    while isinstance(data, Subset):
        data = data.dataset
    names = getattr(data, "classes", None)
    are_names = isinstance(names, list | tuple) and all(isinstance(name, str) for name in names)
    return names if are_names and getattr(data, "target_transform", None) is None else ()  # type: ignore[return-value]


def _read_items(data: Any, name: str) -> tuple[list[Any], list[Any]]:
    """Samples and labels of a map-style data set, in one pass."""
    items = [data[place] for place in range(len(data))]
    if items and isinstance(items[0], Mapping):
        sample, label = _find_columns(list(items[0]), name)
        items = [(item[sample], item[label]) for item in items]
    for place, item in enumerate(items):
        if not isinstance(item, tuple | list) or len(item) != 2:
            raise DataError(
                f"{name}: item {place} is {_describe(item)}, expected a pair: a sample, one tensor, and its label; "
                "flatten several parts, put one after the other, and split them in the model's forward"
            )
    return [item[0] for item in items], [item[1] for item in items]


def _find_columns(columns: Sequence[Any], name: str) -> tuple[Any, Any]:
    """The column of the samples, and that of the labels."""
    label = next((column for column in _LABEL_COLUMNS if column in columns), None)
    others = [column for column in columns if column not in (*_LABEL_COLUMNS, "coarse_label")]
    sample = others[0] if len(others) == 1 else next((column for column in _SAMPLE_COLUMNS if column in others), None)
    if label is None or sample is None:
        raise DataError(
            f"{name}: got the columns {', '.join(map(str, columns))}, expected one of {', '.join(_LABEL_COLUMNS)} and "
            f"one other or one of {', '.join(_SAMPLE_COLUMNS)}; say which are samples and labels, for example "
            "(ds['x'], ds['y'])"
        )
    return sample, label
