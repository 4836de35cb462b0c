"""Which client holds which samples: partitions by scheme, and stratified splits of a client's samples. Each scheme
draws from a stream of its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pfedlms.errors import DataError
from pfedlms.rng import generator, permutation, stream, streams, words_at

Indices = NDArray[np.int64]
Labels = NDArray[np.integer]
MAX_DRAWS = 100
_BLOCK = 4096  # clients whose samples are computed together when all are asked for
MAX_CACHED = 1 << 16  # clients whose splits stay in memory


class ClientSets(Sequence[Indices]):
    """Disjoint sets of samples, one per client, each ascending. They take two arrays: one number per client and one per
    sample. Where samples are stored client by client, the second array is not needed."""

    def __init__(self, owner: NDArray[np.int64], clients: int) -> None:
        """`owner: [samples]` is the client of each sample."""
        self.sizes = np.bincount(owner, minlength=clients)
        self._ends = np.cumsum(self.sizes)
        self._order = None if bool((owner[1:] >= owner[:-1]).all()) else np.argsort(owner, kind="stable")

    def __len__(self) -> int:
        return len(self.sizes)

    def defining_arrays(self) -> Iterator[NDArray[Any]]:
        """The arrays that decide which samples each client has, for a fingerprint."""
        yield self.sizes
        if self._order is not None:
            yield self._order

    def __getitem__(self, client: Any) -> Any:
        end, size = int(self._ends[client]), int(self.sizes[client])
        return np.arange(end - size, end) if self._order is None else self._order[end - size : end]


class Splits:
    """Every client's samples, split in two as `split` does it. A client's split is computed when it is first asked for;
    the latest ones stay in memory."""

    def __init__(
        self, samples: Sequence[Indices], labels: Labels, seed: int, share: float = 0.25, name: str = "split"
    ) -> None:
        self.samples, self._labels, self._seed, self._share, self._name = samples, labels, seed, share, name
        self.keys = np.array([stream(seed, name), round(share * 2**32)], dtype=np.uint64)
        """What the splits are drawn from: their stream and the share."""
        self.cache: dict[int, tuple[Indices, Indices]] = {}
        """By client: the samples it trains on, and those held out."""
        totals = client_sizes(samples)
        held_out = _held_out_sizes(totals, share)
        self.train, self.held_out = SplitSide(self, 0, totals - held_out), SplitSide(self, 1, held_out)

    def prefetch(self, clients: Sequence[int]) -> None:
        """Compute the splits of these clients together, which takes far less time than one after another."""
        missing = [client for client in clients if client not in self.cache]
        if not missing:
            return
        if isinstance(self.samples, SplitSide):
            self.samples.splits.prefetch(missing)
        samples = [self.samples[client] for client in missing]
        sizes = np.array([len(indices) for indices in samples])
        keys = streams(self._seed, self._name, np.array(missing))
        flat = np.concatenate(samples)
        mask = held_out_mask(self._labels[flat], sizes, keys, self._share)
        masks = np.split(mask, np.cumsum(sizes)[:-1])
        if len(self.cache) + len(missing) > MAX_CACHED:
            self.cache = {}
        for client, indices, out in zip(missing, samples, masks, strict=True):
            self.cache[client] = indices[~out], indices[out]


class SplitSide(Sequence[Indices]):
    """One side of all clients' splits: `side[k]` are the samples of client k, ascending."""

    def __init__(self, splits: Splits, side: int, sizes: Indices) -> None:
        self.splits, self._side, self.sizes = splits, side, sizes

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, client: Any) -> Any:
        if not -len(self) <= client < len(self):
            raise IndexError(f"client: got {client}, expected 0 to {len(self) - 1}")
        client = int(client) % len(self)
        self.splits.prefetch((client,))
        return self.splits.cache[client][self._side]

    def __iter__(self) -> Iterator[Indices]:
        for start in range(0, len(self), _BLOCK):
            block = range(start, min(start + _BLOCK, len(self)))
            self.splits.prefetch(block)
            yield from (self[client] for client in block)

    @property
    def exceeds_cache(self) -> bool:
        """Whether there are too many clients to keep the splits of all."""
        return len(self) > MAX_CACHED

    def defining_arrays(self) -> Iterator[NDArray[Any]]:
        """The arrays that decide the splits, for a fingerprint that need not draw the splits of all clients."""
        yield self.splits.keys
        samples = self.splits.samples
        yield from samples.defining_arrays() if isinstance(samples, ClientSets | SplitSide) else samples


def client_sizes(samples: Sequence[Indices]) -> Indices:
    """How many samples each client has."""
    if isinstance(samples, ClientSets | SplitSide):
        return samples.sizes
    return np.array([len(indices) for indices in samples], dtype=np.int64)


# --- schemes ---

SCHEMES = ("dirichlet", "classes", "iid", "quantity", "given")


@dataclass(frozen=True)
class Partitioning:
    """How a pool of samples is partitioned over clients, and each client's samples are split."""

    clients: int
    alpha: float
    """Shares are drawn from a Dirichlet distribution with this parameter."""
    seed: int
    min_samples: int = 10
    """The smallest number of samples of a client."""
    validation: float = 0.0
    """Share of each client's training samples that is held out for validation."""
    scheme: str = "auto"
    """One of `SCHEMES`, or auto: see `Pool.resolve_scheme`."""
    classes_per_client: int = 2
    """For the scheme `classes`: how many classes each client has."""
    newcomers: float = 0.0
    """Share of the clients that takes no part in the run."""


def assign(
    labels: Labels, how: Partitioning, owner: NDArray[np.int64] | None = None, client_names: Sequence[str] = ()
) -> ClientSets:
    """Partition the samples `0..len(labels)−1` by one of `SCHEMES`: every sample to one client, and every client has at
    least `how.min_samples`. `owner` is needed for `given`."""
    clients, seed, least = how.clients, how.seed, how.min_samples
    if how.scheme == "given" and owner is not None:
        return by_owner(owner, client_names, least)
    if clients * max(1, least) > len(labels):
        raise DataError(
            f"data.clients: got {clients} clients with data.min_samples {least} each, but there are only {len(labels)} "
            f"samples; use at most {len(labels) // max(1, least)} clients or a smaller data.min_samples"
        )
    if how.scheme == "classes":
        return by_classes(labels, clients, how.classes_per_client, seed, least)
    if how.scheme == "iid":
        return iid(len(labels), clients, seed)
    if how.scheme == "quantity":
        return by_quantity(len(labels), clients, how.alpha, seed, least)
    return by_dirichlet(labels, clients, how.alpha, seed, least)


def by_dirichlet(labels: Labels, clients: int, alpha: float, seed: int, min_samples: int = 10) -> ClientSets:
    """Each class is divided among the clients by shares of its own.

    For each class, shares are drawn from Dirichlet(α) over the clients; the shares of clients that already hold at
    least N / clients samples are set to zero and the rest renormalised. The whole draw is repeated until every client
    has `min_samples`, at most 100 times. A small α gives each client few classes, a large one an even mix.
    """
    total, smallest = len(labels), 0
    for draw in range(MAX_DRAWS):
        owner, counts = _draw_dirichlet(labels, clients, alpha, generator(stream(seed, "partition", draw)))
        if counts.min() >= min_samples:
            return ClientSets(owner, clients)
        smallest = max(smallest, int(counts.min()))
    raise DataError(
        f"data.alpha: no partition of {total} samples over {clients} clients with α = {alpha} gave every client "
        f"data.min_samples = {min_samples} in {MAX_DRAWS} draws (the best draw's smallest client had {smallest}); "
        f"use fewer clients, a larger data.alpha or a smaller data.min_samples"
    )


def _draw_dirichlet(
    labels: Labels, clients: int, alpha: float, random: np.random.Generator
) -> tuple[NDArray[np.int64], Indices]:
    """The client of each sample, and how many samples each client has."""
    owner, counts = np.empty(len(labels), dtype=np.int64), np.zeros(clients, dtype=np.int64)
    capacity = len(labels) / clients
    for label in np.unique(labels):
        members = random.permutation(np.flatnonzero(labels == label))
        open_clients = counts < capacity
        shares = random.dirichlet(np.full(clients, alpha)) * open_clients
        # For very small α all mass can lie on clients that are full; the open ones then share evenly.
        ends = np.cumsum(shares if shares.sum() > 0 else open_clients)
        # Divided by the last sum itself, the end of the last open client is exactly 1, and full clients after it get
        # nothing.
        cuts = np.floor(ends[:-1] / ends[-1] * len(members)).astype(np.int64)
        sizes = np.diff(cuts, prepend=0, append=len(members))
        owner[members] = np.repeat(np.arange(clients), sizes)
        counts += sizes
    return owner, counts


def iid(total: int, clients: int, seed: int) -> ClientSets:
    """All samples shuffled and cut into parts whose sizes differ by one at most."""
    return ClientSets(
        _owners_in_order(permutation(stream(seed, "partition-iid"), total), _even_sizes(total, clients)), clients
    )


def _even_sizes(total: int, parts: int) -> NDArray[np.int64]:
    """Sizes that differ by one at most, the larger ones first."""
    return total // parts + (np.arange(parts) < total % parts)


def _owners_in_order(order: NDArray[np.int64], sizes: NDArray[np.int64]) -> NDArray[np.int64]:
    """The client of each sample: client 0 gets the first `sizes[0]` samples of `order`, client 1 the next, …"""
    owner = np.empty(len(order), dtype=np.int64)
    owner[order] = np.repeat(np.arange(len(sizes)), sizes)
    return owner


def by_quantity(total: int, clients: int, alpha: float, seed: int, min_samples: int = 10) -> ClientSets:
    """All samples shuffled; every client gets `min_samples`, and of the rest shares drawn from Dirichlet(α) over the
    clients. A small α gives a few clients most of the samples, a large one equal sizes; all have the same classes."""
    shares = generator(stream(seed, "partition-quantity")).dirichlet(np.full(clients, alpha))
    ends = np.cumsum(shares if shares.sum() > 0 else np.ones(clients))  # for the very smallest α there are no shares
    spare = np.floor(ends / ends[-1] * (total - clients * min_samples)).astype(np.int64)
    sizes = np.diff(spare, prepend=0) + min_samples
    return ClientSets(_owners_in_order(permutation(stream(seed, "partition-quantity-order"), total), sizes), clients)


def by_classes(labels: Labels, clients: int, classes: int, seed: int, min_samples: int = 10) -> ClientSets:
    """Every client holds samples of exactly `classes` classes, every class to some client, and sizes are near even.

    The clients · classes places are given to classes by their size, one after another to the class with the most
    samples per place, so that places have about the same number of samples. Then each class, in random order, takes the
    clients that lack most classes, ties drawn at random; its shuffled samples are divided evenly among them.
    """
    values, members, sizes = np.unique(labels, return_inverse=True, return_counts=True)
    holders = _holders_per_class(sizes, clients, classes)
    random = generator(stream(seed, "partition-classes"))
    owner = np.empty(len(labels), dtype=np.int64)
    missing = np.full(clients, classes)
    for label in random.permutation(len(values)):
        takers = np.lexsort((random.random(clients), -missing))[: holders[label]]
        missing[takers] -= 1
        samples = random.permutation(np.flatnonzero(members == label))
        owner[samples] = np.repeat(takers, _even_sizes(len(samples), len(takers)))
    sets = ClientSets(owner, clients)
    if (smallest := int(sets.sizes.min())) < min_samples:
        raise DataError(
            f"data.classes_per_client: with {classes} classes for each of {clients} clients the smallest got "
            f"{smallest} of {len(labels)} samples, expected data.min_samples = {min_samples}"
        )
    return sets


def _holders_per_class(sizes: Indices, clients: int, classes: int) -> NDArray[np.int64]:
    """How many clients hold each class: at least one, at most as many as there are clients and samples of it."""
    most, total = np.minimum(sizes, clients), clients * classes
    if not 1 <= classes <= len(sizes) or total < len(sizes) or total > most.sum():
        raise DataError(
            f"data.classes_per_client: got {classes} for {clients} clients, expected {-(-len(sizes) // clients)} to "
            f"{most.sum() // clients}, so that each of {len(sizes)} classes has a client, with a sample of it"
        )
    # One more holder of a class is worth the samples that each of its holders had before; the highest come first.
    worth = [size / np.arange(1, limit) for size, limit in zip(sizes, most, strict=True)]
    label = np.repeat(np.arange(len(sizes)), most - 1)
    chosen = np.argsort(-np.concatenate(worth), kind="stable")[: total - len(sizes)]
    return 1 + np.bincount(label[chosen], minlength=len(sizes))


def by_owner(owner: NDArray[np.int64], client_names: Sequence[str], min_samples: int = 10) -> ClientSets:
    """Every sample to the client it belongs to, `owner: [n]`. The names are for error messages."""
    counts = np.bincount(owner, minlength=len(client_names))
    if too_small := int((counts < min_samples).sum()):
        smallest = int(np.argmin(counts))
        raise DataError(
            f"data.min_samples: got {min_samples}, but {too_small} of {len(counts)} given clients hold fewer samples "
            f"(client {client_names[smallest] if client_names else smallest}: {counts[smallest]})"
        )
    return ClientSets(owner, len(counts))


# --- splits ---


def split(
    labels: Labels, samples: Indices, seed: int, client: int, share: float = 0.25, name: str = "split",
    client_name: str = "",
) -> tuple[Indices, Indices]:  # fmt: skip
    """Split one client's samples, ascending, into those it trains on and a held-out `share` (below 1), stratified by
    label where possible; drawn from the stream `name`. By default (train, test). Errors name the client as
    `client_name`, if it has one.

    round(share · n) samples are held out, at least one on each side. Each class gives the floor of its quota; the
    missing ones come from the classes with the largest remainders. Classes that would have no training sample left come
    last, so that a class with one sample is trained on rather than only tested.
    """
    if len(samples) < 2:
        raise DataError(
            f"client {client_name or client}: got {len(samples)} sample{'s' * (not len(samples))}, expected at least 2 "
            "to split, or a (train, test) pair"
        )
    key = streams(seed, name, np.array([client]))
    mask = held_out_mask(labels[samples], np.array([len(samples)]), key, share)
    return samples[~mask], samples[mask]


def held_out_mask(labels: Labels, lengths: Indices, keys: NDArray[np.uint64], share: float) -> NDArray[np.bool_]:
    """Which samples of several clients are held out, see `split`. `labels` are those of one client after another, of
    `lengths: [clients]`; `keys: [clients]` are the streams that order each client's samples."""
    client = np.repeat(np.arange(len(lengths)), lengths)
    place = np.arange(len(labels)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    order = np.lexsort((words_at(keys[client], place), labels, client))
    sorted_client, sorted_label = client[order], labels[order]
    # A group is one class of one client.
    first = np.ones(len(labels), dtype=bool)
    first[1:] = (sorted_client[1:] != sorted_client[:-1]) | (sorted_label[1:] != sorted_label[:-1])
    begins = np.flatnonzero(first)
    sizes, group_client = np.diff(begins, append=len(labels)), sorted_client[begins]
    quota = share * sizes
    take = np.floor(quota).astype(np.int64)
    floors = np.bincount(group_client, weights=take, minlength=len(lengths)).astype(np.int64)
    missing = _held_out_sizes(lengths, share) - floors
    by_remainder = np.lexsort((take - quota, take + 1 == sizes, group_client))
    groups = np.bincount(group_client, minlength=len(lengths))
    rank = np.arange(len(begins)) - np.repeat(np.cumsum(groups) - groups, groups)
    take[by_remainder] += rank < missing[group_client]
    mask = np.empty(len(labels), dtype=bool)
    mask[order] = np.arange(len(labels)) - np.repeat(begins, sizes) < np.repeat(take, sizes)
    return mask


def _held_out_sizes(totals: Indices, share: float) -> Indices:
    """How many samples each client holds out; a client with one sample holds out none."""
    sizes: Indices = np.clip(np.rint(share * totals), 1, np.maximum(totals - 1, 1)).astype(np.int64)
    return np.where(totals > 1, sizes, 0)
