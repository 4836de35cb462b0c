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
MAX_DRAWS = 100
_BLOCK = 4096  # clients whose samples are found together where all are asked for
REMEMBERED = 1 << 16  # clients whose samples are kept once they are found


class Sets(Sequence[Indices]):
    """Disjoint sets of samples, one per client, each ascending. They are found in two arrays, one word per client and
    one per sample; where samples are stored client by client, the second is not needed."""

    def __init__(self, owner: NDArray[np.int64], clients: int) -> None:
        """`owner: [samples]` is the client of each sample."""
        self.sizes = np.bincount(owner, minlength=clients)
        self._ends = np.cumsum(self.sizes)
        self._order = None if bool((owner[1:] >= owner[:-1]).all()) else np.argsort(owner, kind="stable")

    def __len__(self) -> int:
        return len(self.sizes)

    def drawn_from(self) -> Iterator[NDArray[Any]]:
        """All that decides which samples a client has."""
        yield self.sizes
        if self._order is not None:
            yield self._order

    def __getitem__(self, client: Any) -> Any:
        end, size = int(self._ends[client]), int(self.sizes[client])
        return np.arange(end - size, end) if self._order is None else self._order[end - size : end]


class Splits:
    """Every client's samples split in two, as `split` does it. A client's are found when they are asked for; those of
    the latest clients are kept."""

    def __init__(
        self, whole: Sequence[Indices], labels: NDArray[np.integer], seed: int, share: float = 0.25, name: str = "split"
    ) -> None:
        self.whole, self._labels, self._seed, self._share, self._name = whole, labels, seed, share, name
        self.keys = np.array([stream(seed, name), round(share * 2**32)], dtype=np.uint64)
        """By which splits are drawn: the name of their streams, and the share."""
        self.found: dict[int, tuple[Indices, Indices]] = {}
        """What is left of a client's samples, and what is set aside."""
        totals = sizes_of(whole)
        aside = _wanted(totals, share)
        self.rest, self.aside = Part(self, 0, totals - aside), Part(self, 1, aside)

    def prefetch(self, clients: Sequence[int]) -> None:
        """Find the samples of these clients together, which takes far less time than one after another."""
        missing = [client for client in clients if client not in self.found]
        if not missing:
            return
        if isinstance(self.whole, Part):
            self.whole.prefetch(missing)
        held = [self.whole[client] for client in missing]
        lengths = np.array([len(own) for own in held])
        keys = streams(self._seed, self._name, np.array(missing))
        flat = np.concatenate(held)
        aside = set_aside(self._labels[flat], lengths, keys, self._share)
        ends = np.cumsum(lengths)[:-1]
        parts = zip(np.split(flat, ends), np.split(aside, ends), strict=True)
        if len(self.found) + len(missing) > REMEMBERED:
            self.found = {}
        self.found |= {client: (own[~out], own[out]) for client, (own, out) in zip(missing, parts, strict=True)}


class Part(Sequence[Indices]):
    """One side of all clients' splits: `part[k]` are the samples of client k, ascending."""

    def __init__(self, splits: Splits, side: int, sizes: Indices) -> None:
        self._splits, self._side, self.sizes = splits, side, sizes

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, client: Any) -> Any:
        if not -len(self) <= client < len(self):
            raise IndexError(f"client: got {client}, expected 0 to {len(self) - 1}")
        client = int(client) % len(self)
        self.prefetch((client,))
        return self._splits.found[client][self._side]

    def __iter__(self) -> Iterator[Indices]:
        for start in range(0, len(self), _BLOCK):
            block = range(start, min(start + _BLOCK, len(self)))
            self.prefetch(block)
            yield from (self[client] for client in block)

    @property
    def many(self) -> bool:
        """Whether clients are so many that their samples are not all kept."""
        return len(self) > REMEMBERED

    def drawn_from(self) -> Iterator[NDArray[Any]]:
        """All that decides which samples a client has on either side, without drawing the splits of all clients."""
        yield self._splits.keys
        whole = self._splits.whole
        yield from whole.drawn_from() if isinstance(whole, Sets | Part) else whole

    def prefetch(self, clients: Sequence[int]) -> None:
        """See `Splits.prefetch`."""
        self._splits.prefetch(clients)


def sizes_of(held: Sequence[Indices]) -> Indices:
    """How many samples each client has."""
    return held.sizes if isinstance(held, Sets | Part) else np.array([len(own) for own in held], dtype=np.int64)


# --- schemes ---

SCHEMES = ("dirichlet", "classes", "iid", "quantity", "given")


@dataclass(frozen=True)
class Partitioning:
    """How a pool of samples is partitioned over clients, and each client's samples are split."""

    clients: int
    alpha: float
    """Of the Dirichlet distribution that shares are drawn from."""
    seed: int
    min_samples: int = 10
    """The smallest number of samples of a client."""
    validation: float = 0.0
    """Share of each client's training samples that is set aside."""
    scheme: str = "auto"
    """One of `SCHEMES`, or auto; see `resolve_scheme`."""
    classes_per_client: int = 2
    """Of the scheme `classes`."""
    newcomers: float = 0.0
    """Share of the clients that is held out of the run."""


def resolve_scheme(asked: str, owner: NDArray[np.int64] | None, classes: int = 1) -> str:
    """The scheme that `asked` means: auto is given where the data name clients, else dirichlet, or iid where
    targets are no classes (`classes` 0)."""
    if asked == "auto":
        return "given" if owner is not None else "dirichlet" if classes else "iid"
    if asked in ("dirichlet", "classes") and not classes:
        raise DataError(
            f"data.partition: got {asked!r}, which divides classes, but targets are numbers; use iid, quantity or given"
        )
    if asked == "given" and owner is None:
        raise DataError(
            "data.partition: got 'given', but the data name no clients; name a column with --set "
            f"data.owner_column=COLUMN (owner_column in Python), or use one of: {', '.join(SCHEMES[:-1])}"
        )
    return asked


def assign(
    labels: NDArray[np.integer], how: Partitioning, owner: NDArray[np.int64] | None = None, owners: Sequence[str] = ()
) -> Sets:
    """Cut the samples `0..len(labels)−1` into disjoint sets, one per client, that together hold every sample, each at
    least `how.min_samples`."""
    clients, seed, least = how.clients, how.seed, how.min_samples
    scheme = resolve_scheme(how.scheme, owner)
    if scheme == "given" and owner is not None:
        return given(owner, owners, least)
    if clients * max(1, least) > len(labels):
        raise DataError(
            f"data.clients: got {clients} clients with data.min_samples {least} each, but there are only {len(labels)} "
            f"samples; use at most {len(labels) // max(1, least)} clients or a smaller data.min_samples"
        )
    if scheme == "classes":
        return by_classes(labels, clients, how.classes_per_client, seed, least)
    if scheme == "iid":
        return iid(len(labels), clients, seed)
    if scheme == "quantity":
        return by_quantity(len(labels), clients, how.alpha, seed, least)
    return partition(labels, clients, how.alpha, seed, least)


def partition(labels: NDArray[np.integer], clients: int, alpha: float, seed: int, min_samples: int = 10) -> Sets:
    """Cut the samples `0..len(labels)−1` into `clients` disjoint sets that together hold every sample.

    For each class, shares are drawn from Dirichlet(α) over the clients; the shares of clients that already hold at
    least N / clients samples are set to zero and the rest renormalised. The whole draw is repeated until every client
    has `min_samples`, at most 100 times. A small α gives each client few classes, a large one an even mix.
    """
    total, smallest = len(labels), 0
    for draw in range(MAX_DRAWS):
        owner, counts = _draw(labels, clients, alpha, generator(stream(seed, "partition", draw)))
        if counts.min() >= min_samples:
            return Sets(owner, clients)
        smallest = max(smallest, int(counts.min()))
    raise DataError(
        f"data.alpha: no partition of {total} samples over {clients} clients with α = {alpha} gave every client "
        f"data.min_samples = {min_samples} in {MAX_DRAWS} draws (the best draw's smallest client had {smallest}); "
        f"use fewer clients, a larger data.alpha or a smaller data.min_samples"
    )


def _draw(
    labels: NDArray[np.integer], clients: int, alpha: float, random: np.random.Generator
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


def iid(total: int, clients: int, seed: int) -> Sets:
    """All samples shuffled and cut into parts whose sizes differ by one at most."""
    return Sets(_cut(permutation(stream(seed, "partition-iid"), total), _even(total, clients)), clients)


def _even(total: int, parts: int) -> NDArray[np.int64]:
    """Sizes that differ by one at most, the larger ones first."""
    return total // parts + (np.arange(parts) < total % parts)


def _cut(order: NDArray[np.int64], sizes: NDArray[np.int64]) -> NDArray[np.int64]:
    """The client of each sample, where clients get so many samples of `order` one after another."""
    owner = np.empty(len(order), dtype=np.int64)
    owner[order] = np.repeat(np.arange(len(sizes)), sizes)
    return owner


def by_quantity(total: int, clients: int, alpha: float, seed: int, min_samples: int = 10) -> Sets:
    """All samples shuffled; every client gets `min_samples`, and of the rest shares drawn from Dirichlet(α) over the
    clients. A small α gives a few clients most of the samples, a large one equal sizes; all have the same classes."""
    shares = generator(stream(seed, "partition-quantity")).dirichlet(np.full(clients, alpha))
    ends = np.cumsum(shares if shares.sum() > 0 else np.ones(clients))  # for the very smallest α there are no shares
    spare = np.floor(ends / ends[-1] * (total - clients * min_samples)).astype(np.int64)
    sizes = np.diff(spare, prepend=0) + min_samples
    return Sets(_cut(permutation(stream(seed, "partition-quantity-order"), total), sizes), clients)


def by_classes(labels: NDArray[np.integer], clients: int, classes: int, seed: int, min_samples: int = 10) -> Sets:
    """Every client holds samples of exactly `classes` classes, every class to some client, and sizes are near even.

    The clients · classes places are given to classes by their size, one after another to the class with the most
    samples per place, so that places have about the same number of samples. Then each class, in random order, takes the
    clients that lack most classes, ties drawn at random; its shuffled samples are divided evenly among them.
    """
    values, members, sizes = np.unique(labels, return_inverse=True, return_counts=True)
    places = _places(sizes, clients, classes)
    random = generator(stream(seed, "partition-classes"))
    owner = np.empty(len(labels), dtype=np.int64)
    lacking = np.full(clients, classes)
    for label in random.permutation(len(values)):
        takers = np.lexsort((random.random(clients), -lacking))[: places[label]]
        lacking[takers] -= 1
        samples = random.permutation(np.flatnonzero(members == label))
        owner[samples] = np.repeat(takers, _even(len(samples), len(takers)))
    sets = Sets(owner, clients)
    if (smallest := int(sets.sizes.min())) < min_samples:
        raise DataError(
            f"data.classes_per_client: with {classes} classes for each of {clients} clients the smallest got "
            f"{smallest} of {len(labels)} samples, expected data.min_samples = {min_samples}; use fewer clients, more "
            "data.classes_per_client or a smaller data.min_samples"
        )
    return sets


def _places(sizes: NDArray[np.integer], clients: int, classes: int) -> NDArray[np.int64]:
    """How many clients hold each class: one at least, and neither more than there are clients nor than it has
    samples."""
    most, wanted = np.minimum(sizes, clients), clients * classes
    if not 1 <= classes <= len(sizes) or wanted < len(sizes) or wanted > most.sum():
        raise DataError(
            f"data.classes_per_client: got {classes} for {clients} clients, expected {-(-len(sizes) // clients)} to "
            f"{most.sum() // clients}, so that each of the {len(sizes)} classes has a client and each of its clients "
            "a sample; change it or data.clients"
        )
    # What each further place of a class is worth: samples per place before it. The most valuable ones are given.
    worth = [size / np.arange(1, limit) for size, limit in zip(sizes, most, strict=True)]
    label = np.repeat(np.arange(len(sizes)), most - 1)
    given = np.argsort(-np.concatenate(worth), kind="stable")[: wanted - len(sizes)]
    return 1 + np.bincount(label[given], minlength=len(sizes))


def given(owner: NDArray[np.int64], owners: Sequence[str], min_samples: int = 10) -> Sets:
    """Every sample to the client it belongs to, `owner: [n]`; their names are for errors."""
    counts = np.bincount(owner, minlength=len(owners))
    if (poor := np.flatnonzero(counts < min_samples)).size:
        smallest = int(np.argmin(counts))
        raise DataError(
            f"data.min_samples: got {min_samples}, but {poor.size} of {len(counts)} given clients hold fewer samples "
            f"(client {owners[smallest] if owners else smallest}: {counts[smallest]}); use a smaller data.min_samples, "
            "at least 2, or leave such clients out of the data"
        )
    return Sets(owner, len(counts))


# --- splits ---


def split(
    labels: NDArray[np.integer], held: Indices, seed: int, client: int, share: float = 0.25, name: str = "split"
) -> tuple[Indices, Indices]:
    """Split one client's samples, ascending, into those it trains on and a `share` (below 1) set aside, stratified by
    label where it can be; drawn from the stream `name`. By default (train, test).

    Set aside are round(share · n) samples (at least one on each side). Each class gives the floor of its quota; the
    missing ones come from the classes with the largest remainders. Classes that would have no training sample left come
    last, so that a class with one sample is trained on rather than only tested.
    """
    if len(held) < 2:
        raise DataError(
            f"client {client} holds {len(held)} sample(s), expected at least 2 to split into train and test; "
            "give it more, or raise data.min_samples"
        )
    key = streams(seed, name, np.array([client]))
    aside = set_aside(labels[held], np.array([len(held)]), key, share)
    return held[~aside], held[aside]


def set_aside(
    labels: NDArray[np.integer], lengths: Indices, keys: NDArray[np.uint64], share: float
) -> NDArray[np.bool_]:
    """Which samples of several clients are set aside; see `split`. `labels` are those of one client after another, of
    `lengths: [clients]`, and `keys: [clients]` name the streams that order each client's samples."""
    client = np.repeat(np.arange(len(lengths)), lengths)
    place = np.arange(len(labels)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    order = np.lexsort((words_at(keys[client], place), labels, client))
    sorted_client, sorted_label = client[order], labels[order]
    # A group is one class of one client.
    first = np.ones(len(labels), dtype=bool)
    first[1:] = (sorted_client[1:] != sorted_client[:-1]) | (sorted_label[1:] != sorted_label[:-1])
    begins = np.flatnonzero(first)
    sizes, of = np.diff(begins, append=len(labels)), sorted_client[begins]
    quota = share * sizes
    take = np.floor(quota).astype(np.int64)
    missing = _wanted(lengths, share) - np.bincount(of, weights=take, minlength=len(lengths)).astype(np.int64)
    by_remainder = np.lexsort((take - quota, take + 1 == sizes, of))
    groups = np.bincount(of, minlength=len(lengths))
    rank = np.arange(len(of)) - np.repeat(np.cumsum(groups) - groups, groups)
    take[by_remainder] += rank < missing[of]
    aside = np.empty(len(labels), dtype=bool)
    aside[order] = np.arange(len(labels)) - np.repeat(begins, sizes) < np.repeat(take, sizes)
    return aside


def _wanted(totals: Indices, share: float) -> Indices:
    """How many samples clients set aside; none of a single one."""
    wanted: Indices = np.clip(np.rint(share * totals), 1, np.maximum(totals - 1, 1)).astype(np.int64)
    return np.where(totals > 1, wanted, 0)
