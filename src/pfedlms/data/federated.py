"""A federation's data: one pool of samples on the device and, for each client, which of them it trains, tests and
validates on."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import chain
from math import prod
from typing import Any

import numpy as np
import torch

from pfedlms.data.partition import Indices, Part, Partitioning, Sets, Splits, assign, resolve_scheme, sizes_of, split
from pfedlms.data.pool import Constants, Pool
from pfedlms.errors import DataError
from pfedlms.rng import permutation, stream


@dataclass(frozen=True)
class FederatedData:
    """Samples `x: [samples, ...]` float32 (int64 where they are whole numbers), labels `y: [samples]` int64 (or targets
    that are no classes, see `arrays.numbers_of`), and per client its train and test indices into them; validation
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
    tokens: str = ""
    """Of windows of tokens: what a token is; their `y: [samples, length]` is the next token at each position."""
    newcomers: tuple[tuple[Indices, Indices], ...] = ()
    """Clients held out of the run: the train and test indices of each."""

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

    def prefetch(self, clients: Sequence[int]) -> None:
        """Find the samples of these clients together, which takes far less time than one client after another."""
        for part in (self.train, self.test, self.validation):
            if isinstance(part, Part):
                part.prefetch(clients)

    @property
    def positions(self) -> int:
        """Predictions for one sample: a window of tokens has one per token."""
        return prod(self.y.shape[1:]) if self.classes else 1

    def newcomer_data(self) -> FederatedData:
        """The data of the newcomers alone, numbered from 0."""
        train, test = zip(*self.newcomers, strict=True)
        return replace(self, train=train, test=test, validation=(), client_names=(), newcomers=())

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
        drawn = self.train.drawn_from() if isinstance(self.train, Part) and self.train.many else None
        for part in drawn or chain(self.train, self.test):
            digest.update(len(part).to_bytes(8, "little") + part.tobytes())
        for own in self.validation if drawn is None else ():
            digest.update(b"validation" + len(own).to_bytes(8, "little") + own.tobytes())
        for own in (part for newcomer in self.newcomers for part in newcomer):
            digest.update(b"newcomers" + len(own).to_bytes(8, "little") + own.tobytes())
        return digest.hexdigest()

    def to(self, device: torch.device) -> FederatedData:
        return replace(self, x=self.x.to(device), y=self.y.to(device))


def partitioned(pool: Pool, how: Partitioning) -> FederatedData:
    """Partition samples over clients (as in `assign`, then 75/25 train/test, then the share `how.validation` of train
    set aside). Of clients that were given one by one only the splits are drawn."""
    if pool.client_indices:
        data = from_client_indices(pool, pool.client_indices, how.seed, how.validation)
        return _hold_out(replace(data, client_names=pool.client_names), how)
    scheme = resolve_scheme(how.scheme, pool.owner, pool.classes)
    if pool.tokens and scheme != "given":
        raise DataError(f"data.partition: got {how.scheme!r}, but text belongs to its clients; leave it out")
    least = max(2, how.min_samples)
    sets = assign(pool.strata, replace(how, scheme=scheme, min_samples=least), pool.owner, pool.client_names)
    # Names that are the numbers say nothing.
    known = (
        pool.client_names
        if scheme == "given" and any(name != str(k) for k, name in enumerate(pool.client_names))
        else ()
    )
    data = from_client_indices(pool, sets, how.seed, how.validation)
    return _hold_out(replace(data, client_names=known, scheme=scheme), how)


def _hold_out(data: FederatedData, how: Partitioning) -> FederatedData:
    """The share `how.newcomers` of the clients, drawn by the seed, takes no part in the run."""
    count = round(how.newcomers * data.clients)
    if not how.newcomers:
        return data
    if not 0 < count < data.clients:
        raise DataError(
            f"data.newcomers: got {how.newcomers}, which is {count} of {data.clients} clients, expected at least one, "
            "and one that stays; change it or data.clients"
        )
    drawn = permutation(stream(how.seed, "newcomers"), data.clients)
    leaving, staying = (sorted(some.tolist()) for some in np.split(drawn, [count]))
    parts = ("train", "test", "validation", "client_names")
    kept: dict[str, Any] = {
        name: tuple(getattr(data, name)[client] for client in staying) for name in parts if getattr(data, name)
    }
    return replace(data, **kept, newcomers=tuple((data.train[client], data.test[client]) for client in leaving))


def from_client_indices(
    pool: Pool, held: Sequence[Indices | tuple[Indices, Indices]], seed: int = 0, validation: float = 0.0
) -> FederatedData:
    """Data whose clients are given: each client's (train, test) indices, or all its indices, which are split 75/25;
    then the share `validation` of train is set aside. Windows of text are cut in their order, others by `strata`."""
    train: Sequence[Indices]
    test: Sequence[Indices]
    aside: Sequence[Indices] = ()
    if isinstance(held, Sets) and pool.overlap is None:
        splits = Splits(held, pool.strata, seed)
        train, test = splits.rest, splits.aside
    else:
        cut = partial(split, pool.strata, seed=seed) if pool.overlap is None else pool.cut_in_order
        pairs = (own if isinstance(own, tuple) else cut(own, client=client) for client, own in enumerate(held))
        train, test = zip(*pairs, strict=True)
    if validation and pool.overlap is not None:
        train, aside = zip(*(pool.cut_in_order(own, k, validation) for k, own in enumerate(train)), strict=True)
    elif validation:
        splits = Splits(train, pool.strata, seed, validation, "validation")
        _check_aside(splits.aside.sizes, validation)
        train, aside = splits.rest, splits.aside
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")  # nothing here writes
        x, y = torch.from_numpy(pool.x), torch.from_numpy(pool.y)
    return FederatedData(
        x, y, train, test, pool.classes, aside, pool.names, mean=pool.mean, std=pool.std, tokens=pool.tokens
    )


def _check_aside(sizes: Indices, share: float) -> None:
    """Of a single training sample nothing is set aside."""
    single = int((sizes == 0).sum())
    if single == len(sizes):
        raise DataError(
            f"data.validation: got {share}, but every client holds a single training sample, expected one with 2 or "
            "more; leave data.validation out, or raise data.min_samples"
        )
    if single:
        warnings.warn(
            f"data.validation: {single} of {len(sizes)} clients hold a single training sample and set nothing aside; "
            "V-acc is of the others",
            stacklevel=3,
        )
