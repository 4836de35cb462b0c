"""A federation's data: one pool of samples on the device and, for each client, which of them it trains, tests and
validates on."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from math import prod

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from pfedlms.data.arrays import Arrays, checked
from pfedlms.data.partition import REMEMBERED, Indices, Part, Sets, Splits, sizes_of, split
from pfedlms.data.pool import Constants
from pfedlms.data.schemes import Partitioning, assign, scheme_of
from pfedlms.errors import DataError

Pair = tuple[ArrayLike, ArrayLike]


@dataclass(frozen=True)
class FederatedData:
    """Samples `x: [samples, ...]` float32 (int64 where they are whole numbers), labels `y: [samples]` int64 (or targets
    that are no classes, see `arrays.targets_of`), and per client its train and test indices into them; validation
    indices too where a share was set aside, else none at all."""

    x: torch.Tensor
    y: torch.Tensor
    train: Sequence[Indices]
    test: Sequence[Indices]
    classes: int
    """0: targets are no classes."""
    validation: Sequence[Indices] = ()
    names: tuple[str, ...] = ()
    """Of all classes, where they have any besides their numbers."""
    client_names: tuple[str, ...] = ()
    """Of all clients, where they have any besides their numbers."""
    scheme: str = "given"
    """How samples were partitioned, one of `schemes.SCHEMES`."""
    mean: Constants = None
    """What images were normalised by, one number per channel, as is `std`; None: samples are as they were given."""
    std: Constants = None

    @property
    def clients(self) -> int:
        return len(self.train)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one sample."""
        return tuple(self.x.shape[1:])

    @property
    def outputs(self) -> int:
        """How many numbers a model gives for a sample: one per class, or as many as a target has."""
        return self.classes or prod(self.y.shape[1:])

    @cached_property
    def samples(self) -> tuple[int, ...]:
        """N_k: training samples of every client."""
        return tuple(sizes_of(self.train).tolist())

    def find(self, clients: Sequence[int]) -> None:
        """Find the samples of these clients together, which takes far less time than one client after another."""
        for part in (self.train, self.test, self.validation):
            if isinstance(part, Part):
                part.find(clients)

    def fingerprint(self) -> str:
        """What tells these data from others, computed once."""
        return self._fingerprint

    @cached_property
    def _fingerprint(self) -> str:
        """SHA-256 over samples, labels and each client's indices, or what those are drawn by where clients are very
        many; also over the type of samples that are not float32, and over the names of classes, if they have any."""
        digest = hashlib.sha256(str((self.x.shape, self.classes)).encode())
        if self.names or self.x.dtype != torch.float32:
            digest.update(str((self.x.dtype, self.names)).encode())
        for whole in (self.x.cpu().numpy(), self.y.cpu().numpy()):
            digest.update(len(whole).to_bytes(8, "little"))
            digest.update(np.ascontiguousarray(whole).reshape(-1).view(np.uint8).data)
        drawn = self.train.drawn_from() if isinstance(self.train, Part) and self.clients > REMEMBERED else None
        for part in drawn or chain(self.train, self.test):
            digest.update(len(part).to_bytes(8, "little") + part.tobytes())
        for own in self.validation if drawn is None else ():
            digest.update(b"validation" + len(own).to_bytes(8, "little") + own.tobytes())
        return digest.hexdigest()

    def to(self, device: torch.device) -> FederatedData:
        return replace(self, x=self.x.to(device), y=self.y.to(device))


def from_pool(
    x: ArrayLike,
    y: ArrayLike,
    how: Partitioning,
    owner: NDArray[np.int64] | None = None,
    owners: Sequence[str] = (),
    names: Sequence[str] = (),
    mean: Constants = None,
    std: Constants = None,
) -> FederatedData:
    """Partition one pool of samples over clients (as in `schemes.assign`, then 75/25 train/test, then the share
    `how.validation` of train set aside). `names` of its classes, and the `mean` and `std` that it was normalised by,
    where they are known."""
    return replace(partitioned(checked([("data", x, y)], names), how, owner, owners), mean=mean, std=std)


def partitioned(
    pool: Arrays, how: Partitioning, owner: NDArray[np.int64] | None = None, owners: Sequence[str] = ()
) -> FederatedData:
    """`from_pool` of arrays that are checked."""
    scheme = scheme_of(how.scheme, owner, pool.classes)
    sets = assign(pool.strata, replace(how, scheme=scheme, min_samples=max(2, how.min_samples)), owner, owners)
    # Names that are the numbers say nothing.
    known = tuple(owners) if scheme == "given" and any(name != str(k) for k, name in enumerate(owners)) else ()
    return replace(held_by(pool, sets, how.seed, how.validation), client_names=known, scheme=scheme)


def from_pairs(pairs: Sequence[tuple[Pair, Pair]], seed: int = 0, validation: float = 0.0) -> FederatedData:
    """Take every client's own ((x_train, y_train), (x_test, y_test)) as given, but for the share `validation` of train
    that is set aside, drawn by `seed`."""
    if not pairs:
        raise DataError("data: got no clients, expected one (train, test) pair per client")
    names = [f"client {client} {part}" for client in range(len(pairs)) for part in ("train", "test")]
    parts = [part for client in pairs for part in client]
    pool = checked([(name, x, y) for name, (x, y) in zip(names, parts, strict=True)])
    places = pool.places()
    return held_by(pool, list(zip(places[::2], places[1::2], strict=True)), seed, validation)


def held_by(
    pool: Arrays, held: Sequence[Indices | tuple[Indices, Indices]], seed: int = 0, validation: float = 0.0
) -> FederatedData:
    """Data whose clients are given: each client's (train, test) indices, or all its indices, which are split 75/25."""
    train: Sequence[Indices]
    test: Sequence[Indices]
    if isinstance(held, Sets):
        splits = Splits(held, pool.strata, seed)
        train, test = splits.rest, splits.aside
    else:
        pairs = (
            own if isinstance(own, tuple) else split(pool.strata, own, seed, client) for client, own in enumerate(held)
        )
        train, test = zip(*pairs, strict=True)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")  # nothing here writes
        x, y = torch.from_numpy(pool.x), torch.from_numpy(pool.y)
    data = FederatedData(x, y, train, test, pool.classes, names=pool.names)
    return _validated(data, pool.strata, seed, validation) if validation else data


def _validated(data: FederatedData, strata: NDArray[np.int64], seed: int, share: float) -> FederatedData:
    """Set that share of each client's training samples aside, by `strata`; nothing of a single sample."""
    splits = Splits(data.train, strata, seed, share, "validation")
    single = int((splits.aside.sizes == 0).sum())
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
    return replace(data, train=splits.rest, validation=splits.aside)
