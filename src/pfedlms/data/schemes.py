"""Ways to partition samples over clients: Dirichlet shares, some classes per client, all alike, skewed sizes, given.

Each is drawn from a stream of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pfedlms.data.partition import Sets, check_enough, partition
from pfedlms.errors import DataError
from pfedlms.rng import generator, permutation, stream

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
    """One of `SCHEMES`, or auto; see `scheme_of`."""
    classes_per_client: int = 2
    """Of the scheme `classes`."""
    newcomers: float = 0.0
    """Share of the clients that is held out of the run."""


def scheme_of(asked: str, owner: NDArray[np.int64] | None, classes: int = 1) -> str:
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
            f"data.owner_column=COLUMN, or use one of: {', '.join(SCHEMES[:-1])}"
        )
    return asked


def assign(
    labels: NDArray[np.integer], how: Partitioning, owner: NDArray[np.int64] | None = None, owners: Sequence[str] = ()
) -> Sets:
    """Cut the samples `0..len(labels)−1` into disjoint sets, one per client, that together hold every sample, each at
    least `how.min_samples`."""
    clients, seed, least = how.clients, how.seed, how.min_samples
    scheme = scheme_of(how.scheme, owner)
    if scheme != "given":
        check_enough(len(labels), clients, least)
    match scheme, owner:
        case "given", np.ndarray():
            return given(owner, owners, least)
        case "classes", _:
            return by_classes(labels, clients, how.classes_per_client, seed, least)
        case "iid", _:
            return iid(len(labels), clients, seed)
        case "quantity", _:
            return by_quantity(len(labels), clients, how.alpha, seed, least)
    return partition(labels, clients, how.alpha, seed, least)


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
