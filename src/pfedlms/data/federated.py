"""A federation's data: one pool of samples on the device and, for each client, which of them it trains, tests and
validates on."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from math import prod
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from pfedlms.data.partition import ClientSets, Indices, Partitioning, Splits, SplitSide, assign, client_sizes, split
from pfedlms.data.pool import Constants, Pool
from pfedlms.errors import DataError
from pfedlms.rng import permutation, stream


@dataclass(frozen=True)
class FederatedData:
    """Samples `x: [samples, ...]`, float32, or int64 where they are whole numbers; labels `y: [samples]`, int64, or
    targets that are no classes; and for each client the indices of its train and test samples. `validation` is empty
    unless a share was held out."""

    x: torch.Tensor
    y: torch.Tensor
    train: Sequence[Indices]
    test: Sequence[Indices]
    classes: int
    """0: targets are no classes."""
    validation: Sequence[Indices] = ()
    names: tuple[str, ...] = ()
    """Names of all classes, where they are more than numbers."""
    client_names: tuple[str, ...] = ()
    """Names of all clients, where they are more than numbers."""
    scheme: str = "given"
    """How samples were partitioned, one of `partition.SCHEMES`."""
    mean: Constants = None
    """Images were normalised by `mean` and `std`, one number per channel. None: samples are as they were given."""
    std: Constants = None
    tokens: str = ""
    """For text: what a token is. Then `y: [samples, length]` is the next token at each position."""
    newcomers: tuple[tuple[Indices, Indices], ...] = ()
    """Train and test indices of each client that takes no part in the run."""
    newcomer_names: tuple[str, ...] = ()
    """Their names, where the data say which client is which."""

    @property
    def clients(self) -> int:
        return len(self.train)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one sample."""
        return tuple(self.x.shape[1:])

    @property
    def outputs(self) -> int:
        """How many numbers a model computes for a sample: one per class, or as many as a target has."""
        return self.classes or prod(self.y.shape[1:])

    @cached_property
    def samples(self) -> tuple[int, ...]:
        """N_k: training samples of every client."""
        return tuple(client_sizes(self.train).tolist())

    def prefetch(self, clients: Sequence[int]) -> None:
        """Compute the splits of these clients together, which takes far less time than one client after another."""
        for side in (self.train, self.test, self.validation):
            if isinstance(side, SplitSide):
                side.splits.prefetch(clients)

    @property
    def positions(self) -> int:
        """How many predictions a sample needs: a window of text needs one per token."""
        return prod(self.y.shape[1:]) if self.classes else 1

    def newcomer_data(self) -> FederatedData:
        """The data of the newcomers alone, numbered from 0."""
        train, test = zip(*self.newcomers, strict=True)
        return replace(self, train=train, test=test, validation=(), client_names=(), newcomers=())

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 over samples, labels and each client's indices; where there are very many clients, over what these
        are drawn from. The type of samples counts unless it is float32, names of classes where there are any."""
        digest = hashlib.sha256(str((self.x.shape, self.classes)).encode())
        if self.names or self.x.dtype != torch.float32:
            digest.update(str((self.x.dtype, self.names)).encode())
        for array in (self.x.cpu().numpy(), self.y.cpu().numpy()):
            digest.update(len(array).to_bytes(8, "little"))
            digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)

        def add(arrays: Iterable[NDArray[Any]], mark: bytes = b"") -> None:
            for array in arrays:
                digest.update(mark + len(array).to_bytes(8, "little") + array.tobytes())

        if isinstance(self.train, SplitSide) and self.train.exceeds_cache:
            add(self.train.defining_arrays())
        else:
            add(chain(self.train, self.test))
            add(self.validation, b"validation")
        add(chain.from_iterable(self.newcomers), b"newcomers")
        return digest.hexdigest()

    def to(self, device: torch.device) -> FederatedData:
        return replace(self, x=self.x.to(device), y=self.y.to(device))


def partitioned(pool: Pool, how: Partitioning) -> FederatedData:
    """Partition samples over clients as `assign` does it. Each client's samples are then split 75/25 into train and
    test, and the share `how.validation` of train is held out. Clients that were given one by one keep their samples."""
    sets: Sequence[Indices | tuple[Indices, Indices]] = pool.client_indices
    scheme = "given" if sets else pool.resolve_scheme(how.scheme)
    if pool.tokens and scheme != "given":
        raise DataError(f"data.partition: got {how.scheme!r}, but text belongs to its clients; leave it out")
    if not sets:
        least = max(2, how.min_samples)
        sets = assign(pool.strata, replace(how, scheme=scheme, min_samples=least), pool.owner, pool.client_names)
    names = (pool.client_names or tuple(map(str, range(len(sets))))) if scheme == "given" else ()
    data = from_client_indices(pool, sets, how.seed, how.validation)
    data = _separate_newcomers(replace(data, client_names=names, scheme=scheme), how)
    say_no_more_than_numbers = all(name == str(client) for client, name in enumerate(data.client_names))
    return replace(data, client_names=()) if say_no_more_than_numbers else data


def _separate_newcomers(data: FederatedData, how: Partitioning) -> FederatedData:
    """Take the share `how.newcomers` of the clients, drawn by the seed, out of the run."""
    count = round(how.newcomers * data.clients)
    if not how.newcomers:
        return data
    if not 0 < count < data.clients:
        raise DataError(
            f"data.newcomers: got {how.newcomers}, which is {count} of {data.clients} clients, expected at least one "
            "and one that stays"
        )
    drawn = permutation(stream(how.seed, "newcomers"), data.clients)
    newcomers, clients = (sorted(ids.tolist()) for ids in np.split(drawn, [count]))
    parts = ("train", "test", "validation", "client_names")
    remaining: dict[str, Any] = {
        name: tuple(getattr(data, name)[client] for client in clients) for name in parts if getattr(data, name)
    }
    return replace(
        data,
        **remaining,
        newcomers=tuple((data.train[client], data.test[client]) for client in newcomers),
        newcomer_names=tuple(data.client_names[client] for client in newcomers) if data.client_names else (),
    )


def from_client_indices(
    pool: Pool, indices: Sequence[Indices | tuple[Indices, Indices]], seed: int = 0, validation: float = 0.0
) -> FederatedData:
    """Data of clients whose samples are known: for each client its (train, test) indices, or all its indices, which are
    split 75/25. Then the share `validation` of train is held out. Windows of text are split in their order, other
    samples by `strata`."""
    train: Sequence[Indices]
    test: Sequence[Indices]
    held_out: Sequence[Indices] = ()
    if isinstance(indices, ClientSets) and pool.overlap is None:
        splits = Splits(indices, pool.strata, seed)
        train, test = splits.train, splits.held_out
    else:
        pairs = list[tuple[Indices, Indices]]()
        for k, part in enumerate(indices):
            if isinstance(part, tuple):
                pairs.append(part)
            elif pool.overlap is not None:
                pairs.append(pool.split_in_order(part, k))
            else:
                pairs.append(split(pool.strata, part, seed, k, client_name=pool.client_name(k)))
        train, test = zip(*pairs, strict=True)
    if validation and pool.overlap is not None:
        train, held_out = zip(*(pool.split_in_order(part, k, validation) for k, part in enumerate(train)), strict=True)
    elif validation:
        splits = Splits(train, pool.strata, seed, validation, "validation")
        if single := int((splits.held_out.sizes == 0).sum()):
            message = f"data.validation: {single} of {len(train)} clients hold a single training sample"
            if single == len(train):
                raise DataError(f"{message}, expected one with 2 or more; leave data.validation out")
            warnings.warn(f"{message} and set nothing aside; V-acc is of the others", stacklevel=2)
        train, held_out = splits.train, splits.held_out
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")  # nothing here writes
        x, y = torch.from_numpy(pool.x), torch.from_numpy(pool.y)
    return FederatedData(
        x, y, train, test, pool.classes, held_out, pool.names, mean=pool.mean, std=pool.std, tokens=pool.tokens
    )
