"""What server and nodes derive from the configuration: the terms of the run, their digest, and the data, if any."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from pkgutil import resolve_name
from typing import Any

import numpy as np
import torch

from pfedlms.data import FederatedData, load_pool, read
from pfedlms.data.federated import from_client_indices
from pfedlms.data.partition import Indices, split
from pfedlms.data.pool import class_numbers
from pfedlms.data.sources import path_kind
from pfedlms.engine.terms import Terms
from pfedlms.errors import ConfigError, DataError
from pfedlms.experiment.config import Config
from pfedlms.experiment.loop import fixed_settings
from pfedlms.experiment.prepare import (
    NAMED_PROBLEM,
    RunParts,
    build_parts,
    execution_settings,
    load_named_pool,
    partition_pool,
)
from pfedlms.experiment.problem import Problem
from pfedlms.methods import METHODS
from pfedlms.settings import CUSTOM
from pfedlms.wire.frames import agreement_digest


class Ground:
    """What server and nodes derive from one configuration.

    Args:
        config: the same on all ends but for its section [run] (without run.seed) and data.dir.
        client: the node's client; None on the server.
        data: on a node, its own data; see `own_data`. Without them, the data set of the configuration is partitioned as
        in a simulation and a node uses its part.
        problem: model, loss and metric, where the configuration names none.
    """

    def __init__(
        self, config: Config, client: int | None = None, data: Any = None, problem: Problem = NAMED_PROBLEM
    ) -> None:  # fmt: skip
        self.config, self.client = config, client
        self.knows_samples = config.data.dataset != CUSTOM
        """Whether this end knows how many samples each client has."""
        if config.data.newcomers:
            raise ConfigError(["data.newcomers: is for simulations; on nodes a client that joins late measures itself"])
        self.parts: RunParts = build_parts(config, lambda: self._held(data, problem), problem)
        made, held, train = self.parts.model, self.parts.data, config.train
        with execution_settings(config):
            self.terms = Terms(
                METHODS[config.method], config.settings, made, held.clients, held.classes, train, config.run.seed
            )
        self.run = agreement_digest({"frames": self.terms.digest, **fixed_settings(config)})
        """Digest of everything both ends must agree on, including how clients train and the names of classes."""

    def _held(self, data: Any, problem: Problem) -> FederatedData:
        if self.knows_samples:
            if data is not None:
                raise ConfigError(
                    [
                        f"data.dataset: got {self.config.data.dataset!r}, which is partitioned over all nodes, but "
                        "this one has its own data; set data.dataset = 'custom', data.class_names and data.sample_shape"
                    ]
                )
            return partition_pool(self.config, load_named_pool(self.config))
        if self.client is None:
            return server_data(self.config)
        if data is None:
            raise ConfigError(["data.dataset: got 'custom', so every node needs data of its own; name them"])
        return own_data(self.config, self.client, data, problem)


def classes_and_shape(config: Config) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Names of classes and shape of a sample, as the configuration has them for nodes with data of their own."""
    chosen, found = config.data, []
    names = tuple(name.strip() for name in chosen.class_names.split(",") if name.strip())
    if len(names) < 2 or len(set(names)) < len(names):
        found.append(f"data.class_names: got {chosen.class_names!r}, expected two names or more, all different")
    sizes = chosen.sample_shape.lower().split("x")
    if not all(size.strip().isdecimal() and int(size) > 0 for size in sizes):
        found.append(f"data.sample_shape: got {chosen.sample_shape!r}, expected sizes such as 3x32x32")
    if found:
        raise ConfigError(found)
    return names, tuple(map(int, sizes))


def server_data(config: Config) -> FederatedData:
    """The server's data: no client's samples, but one sample of zeros to try a model on."""
    names, shape = classes_and_shape(config)
    place = np.zeros(1, dtype=np.int64)
    each_client = (place,) * config.data.clients
    # Whole numbers become floats if the model computes with them.
    x, y = (torch.zeros(size, dtype=torch.int64) for size in ((1, *shape), (1,)))
    validation = each_client if config.data.validation else ()
    return FederatedData(x, y, each_client, each_client, len(names), validation, names)


def own_data(config: Config, client: int, data: Any, problem: Problem = NAMED_PROBLEM) -> FederatedData:
    """A node's own data: `folder:PATH` or `file:PATH`; `module:function`, which is called and returns one of the next
    two; a data set as `pfedlms.run` takes one, split 75/25; or a pair (train, test). The result has these data for
    every client number, so that the node's own number has them."""
    names, shape = classes_and_shape(config)
    if isinstance(data, str) and path_kind(data):
        chosen = config.data
        pool = load_pool(data, chosen.dir or None, chosen.image_size, chosen.label_column)
    else:
        if isinstance(data, str):
            data = _call(data)
        pool = read([data], problem.loss is not None, all_clients=False)
    arrays = replace(pool, y=class_numbers(pool, names), classes=len(names), names=names)
    if arrays.x.shape[1:] != shape:
        raise DataError(
            f"data: got samples of shape {arrays.x.shape[1:]}, expected data.sample_shape = {config.data.sample_shape} "
            f"({prod(shape)} numbers)"
        )
    parts: Indices | tuple[Indices, Indices] = (
        pool.client_indices[0] if pool.client_indices else np.arange(len(arrays.y))
    )
    # Drawn from the client's own stream, as in a simulation.
    pair = parts if isinstance(parts, tuple) else split(arrays.strata, parts, config.run.seed, client)
    return from_client_indices(arrays, [pair] * config.data.clients, config.run.seed, config.data.validation)


def _call(name: str) -> Any:
    try:
        return resolve_name(name)()
    except Exception as error:  # the user's own code may raise anything
        raise DataError(
            f"data: {name!r} gave no data ({type(error).__name__}: {error}); expected folder:PATH, file:PATH, or "
            "module:function of a function without arguments that returns (train, test)"
        ) from error
