"""Non-IID partitions: Dirichlet shares of every class with a capacity, and stratified splits of a client's samples."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pfedlms.errors import DataError
from pfedlms.rng import generator, permutation, stream

Indices = NDArray[np.int64]
MAX_DRAWS = 100


def partition(
    labels: NDArray[np.integer], clients: int, alpha: float, seed: int, min_samples: int = 10
) -> list[Indices]:
    """Cut the samples `0..len(labels)−1` into `clients` disjoint sets that together hold every sample.

    For each class, shares are drawn from Dirichlet(α) over the clients; the shares of clients that already hold at
    least N / clients samples are set to zero and the rest renormalised. The whole draw is repeated until every client
    has `min_samples`, at most 100 times. A small α gives each client few classes, a large one an even mix.
    """
    total = len(labels)
    check_enough(total, clients, min_samples)
    smallest = 0
    for draw in range(MAX_DRAWS):
        sets = _draw(labels, clients, alpha, generator(stream(seed, "partition", draw)))
        if min(len(held) for held in sets) >= min_samples:
            return sets
        smallest = max(smallest, min(len(held) for held in sets))
    raise DataError(
        f"data.alpha: no partition of {total} samples over {clients} clients with α = {alpha} gave every client "
        f"data.min_samples = {min_samples} in {MAX_DRAWS} draws (the best draw's smallest client had {smallest}); "
        f"use fewer clients, a larger data.alpha or a smaller data.min_samples"
    )


def check_enough(total: int, clients: int, min_samples: int) -> None:
    if clients * max(1, min_samples) > total:
        raise DataError(
            f"data.clients: got {clients} clients with data.min_samples {min_samples} each, but there are only "
            f"{total} samples; "
            f"use at most {total // max(1, min_samples)} clients or a smaller data.min_samples"
        )


def _draw(labels: NDArray[np.integer], clients: int, alpha: float, random: np.random.Generator) -> list[Indices]:
    held: list[list[Indices]] = [[] for _ in range(clients)]
    counts = np.zeros(clients, dtype=np.int64)
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
        for client, part in enumerate(np.split(members, cuts)):
            held[client].append(part)
            counts[client] += len(part)
    return [np.sort(np.concatenate(parts)) for parts in held]


def split(
    labels: NDArray[np.integer], held: Indices, seed: int, client: int, share: float = 0.25, name: str = "split"
) -> tuple[Indices, Indices]:
    """Split one client's samples into those it trains on and a `share` (below 1) set aside, stratified by label where
    it can be; drawn from the stream `name`. By default (train, test).

    Set aside are round(share · n) samples (at least one on each side). Each class gives the floor of its quota; the
    missing ones come from the classes with the largest remainders. Classes that would have no training sample left come
    last, so that a class with one sample is trained on rather than only tested.
    """
    total = len(held)
    if total < 2:
        raise DataError(
            f"client {client} holds {total} sample(s), expected at least 2 to split into train and test; "
            "raise data.min_samples"
        )
    order = held[permutation(stream(seed, name, client), total)]
    classes, members = np.unique(labels[order], return_inverse=True)
    sizes = np.bincount(members, minlength=len(classes))
    wanted = min(max(round(share * total), 1), total - 1)
    quota = share * sizes
    take = np.floor(quota).astype(np.int64)
    take[np.lexsort((take - quota, take + 1 == sizes))[: wanted - take.sum()]] += 1
    aside = np.zeros(total, dtype=bool)
    for label, count in enumerate(take):
        aside[np.flatnonzero(members == label)[:count]] = True
    return np.sort(order[~aside]), np.sort(order[aside])
