"""A federation's data: one pool of samples on the device and, for each client, which of them it trains, tests and
validates on."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from pfedlms.data.partition import Indices, partition, split
from pfedlms.errors import DataError
from pfedlms.rng import permutation, stream

Pair = tuple[ArrayLike, ArrayLike]


@dataclass(frozen=True)
class FederatedData:
    """Samples `x: [samples, ...]` float32, labels `y: [samples]` int64 (or targets that are no classes, see
    `from_targets`), and per client its train and test indices into them; validation indices too where a share was set
    aside, else none at all."""

    x: torch.Tensor
    y: torch.Tensor
    train: tuple[Indices, ...]
    test: tuple[Indices, ...]
    classes: int
    """0: targets are no classes."""
    validation: tuple[Indices, ...] = ()

    @property
    def clients(self) -> int:
        return len(self.train)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one sample."""
        return tuple(self.x.shape[1:])

    @property
    def outputs(self) -> int:
        """How many numbers a model gives for a sample: one a class, or as many as a target has."""
        return self.classes or prod(self.y.shape[1:])

    @property
    def samples(self) -> tuple[int, ...]:
        """N_k: training samples of every client."""
        return tuple(len(held) for held in self.train)

    def fingerprint(self) -> str:
        """Tells two federations' data apart: SHA-256 over samples, labels and who holds which."""
        digest = hashlib.sha256(str((self.x.shape, self.classes)).encode())
        for part in (self.x.cpu().numpy(), self.y.cpu().numpy(), *self.train, *self.test):
            digest.update(len(part).to_bytes(8, "little") + np.ascontiguousarray(part).tobytes())
        for own in self.validation:
            digest.update(b"validation" + len(own).to_bytes(8, "little") + own.tobytes())
        return digest.hexdigest()

    def to(self, device: torch.device) -> FederatedData:
        return replace(self, x=self.x.to(device), y=self.y.to(device))


def from_pool(
    x: ArrayLike,
    y: ArrayLike,
    clients: int,
    alpha: float,
    seed: int,
    min_samples: int = 10,
    validation: float = 0.0,
) -> FederatedData:
    """Partition one pool of samples over `clients` clients (Dirichlet(α), then 75/25 train/test, then the share
    `validation` of train set aside)."""
    samples, labels = _check(x, y, "data")
    sets = partition(labels, clients, alpha, seed, max(2, min_samples))
    held = (split(labels, own, seed, client) for client, own in enumerate(sets))
    return _federated(samples, labels, held, seed, validation)


def from_pairs(pairs: Sequence[tuple[Pair, Pair]], seed: int = 0, validation: float = 0.0) -> FederatedData:
    """Take every client's own ((x_train, y_train), (x_test, y_test)) as given, but for the share `validation` of train
    that is set aside, drawn by `seed`."""
    if not pairs:
        raise DataError("data: got no clients, expected one (train, test) pair per client")
    held: list[tuple[NDArray[np.float32], NDArray[np.int64]]] = []
    for client, parts in enumerate(pairs):
        for part, (x, y) in zip(("train", "test"), parts, strict=True):
            samples, labels = _check(x, y, f"client {client} {part}")
            if held and samples.shape[1:] != held[0][0].shape[1:]:
                raise DataError(
                    f"client {client} {part}: got samples of shape {samples.shape[1:]}, expected "
                    f"{held[0][0].shape[1:]} as for client 0"
                )
            held.append((samples, labels))
    x_all, y_all = (np.concatenate(arrays) for arrays in zip(*held, strict=True))
    places = np.split(np.arange(len(y_all)), np.cumsum([len(labels) for _, labels in held])[:-1])
    return _federated(x_all, y_all, zip(places[::2], places[1::2], strict=True), seed, validation)


def _federated(
    x: NDArray[np.float32], y: NDArray[np.int64], held: Iterable[tuple[Indices, Indices]], seed: int, validation: float
) -> FederatedData:
    train, test = zip(*held, strict=True)
    data = FederatedData(torch.from_numpy(x), torch.from_numpy(y), train, test, int(y.max()) + 1)
    return _validated(data, seed, validation) if validation else data


def _validated(data: FederatedData, seed: int, share: float) -> FederatedData:
    """With that share of everybody's training samples set aside; of a single one nothing."""
    labels, none = data.y.numpy(), np.empty(0, dtype=np.int64)
    train, validation = zip(
        *(
            split(labels, own, seed, client, share, "validation") if len(own) > 1 else (own, none)
            for client, own in enumerate(data.train)
        ),
        strict=True,
    )
    single = sum(not len(own) for own in validation)
    if single == data.clients:
        raise DataError(
            f"data.validation: got {share}, but every client holds a single training sample, expected one with 2 or "
            "more; leave data.validation out, or raise data.min_samples"
        )
    if single:
        warnings.warn(
            f"data.validation: {single} of {data.clients} clients hold a single training sample and set nothing aside; "
            "V-acc is of the others",
            stacklevel=2,
        )
    return replace(data, train=train, validation=validation)


def _check(x: ArrayLike, y: ArrayLike, name: str) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    try:
        samples, raw = np.asarray(x, dtype=np.float32), np.asarray(y)
    except (ValueError, TypeError) as error:
        raise DataError(f"{name}: samples and labels must be arrays of numbers ({error})") from error
    whole = raw.dtype.kind in "iub" or (
        raw.dtype.kind == "f" and bool(np.isfinite(raw).all() and (raw == raw.round()).all())
    )
    if raw.ndim != 1 or not whole:
        raise DataError(
            f"{name}: got labels of shape {raw.shape} and type {raw.dtype}, expected a vector of class numbers"
        )
    labels = raw.astype(np.int64)
    if len(samples) != len(labels) or len(labels) == 0:
        raise DataError(
            f"{name}: got {len(samples)} samples and {len(labels)} labels, expected as many of each and at least one"
        )
    if labels.min() < 0:
        raise DataError(f"{name}: got label {labels.min()}, expected classes numbered from 0")
    if not np.isfinite(samples).all():
        raise DataError(f"{name}: samples hold NaN or infinite values; clean them first")
    return np.ascontiguousarray(samples), labels


def are_classes(y: Any) -> bool:
    """Whether targets are labels of classes: a vector of whole numbers, truth values or names."""
    raw = np.asarray(y)
    return raw.ndim == 1 and raw.dtype.kind in "iubUSO" and not (raw.dtype.kind == "i" and bool((raw < 0).any()))


def from_targets(
    data: Any, pooled: bool, clients: int, seed: int, min_samples: int = 10, validation: float = 0.0
) -> FederatedData:
    """The same as `from_pool` (where `pooled`) or `from_pairs`, for targets that are no classes, `[samples, …]`: whole
    numbers stay int64, all others become float32. A pool is dealt out evenly at random, since shares of classes have no
    meaning; nothing is stratified."""
    if pooled:
        parts = [("data", data)]
    else:
        named = ((f"client {client}", pair) for client, pair in enumerate(data))
        parts = [
            (f"{who} {part}", own) for who, pair in named for part, own in zip(("train", "test"), pair, strict=True)
        ]
    targets = [_targets(y, name) for name, (_, y) in parts]
    for (name, _), own in zip(parts, targets, strict=True):
        if own.shape[1:] != targets[0].shape[1:] or own.dtype != targets[0].dtype:
            raise DataError(
                f"{name}: got targets of shape {own.shape[1:]} and type {own.dtype}, expected {targets[0].shape[1:]} "
                f"and {targets[0].dtype} as before"
            )
    # Everything else about samples is as if all of them were of one class.
    alike = [(x, np.zeros(len(own), dtype=np.int64)) for (_, (x, _)), own in zip(parts, targets, strict=True)]
    if pooled:
        samples, labels = _check(*alike[0], "data")
        held = (
            split(labels, own, seed, client)
            for client, own in enumerate(_dealt(len(labels), clients, seed, min_samples))
        )
        made = _federated(samples, labels, held, seed, validation)
    else:
        made = from_pairs(list(zip(alike[::2], alike[1::2], strict=True)), seed, validation)
    return replace(made, y=torch.from_numpy(np.concatenate(targets)), classes=0)


def _dealt(total: int, clients: int, seed: int, min_samples: int) -> list[Indices]:
    """Samples 0..total − 1 over clients, at random and as evenly as they come."""
    if total < clients * max(2, min_samples):
        raise DataError(
            f"data.clients: got {clients} clients with data.min_samples {min_samples} each, but there are only {total} "
            f"samples; use at most {total // max(2, min_samples)} clients or a smaller data.min_samples"
        )
    return [np.sort(own) for own in np.array_split(permutation(stream(seed, "partition", 0), total), clients)]


def _targets(y: Any, name: str) -> NDArray[Any]:
    raw = np.asarray(y)
    if raw.ndim == 0 or raw.dtype.kind not in "iubf":
        raise DataError(
            f"{name}: got targets of shape {raw.shape} and type {raw.dtype}, expected numbers, one or more a sample"
        )
    if raw.dtype.kind == "f" and not np.isfinite(raw).all():
        raise DataError(f"{name}: targets hold NaN or infinite values; clean them first")
    return np.ascontiguousarray(raw, dtype=np.int64 if raw.dtype.kind in "iu" else np.float32)
