"""What the server and every node derive from the same configuration: the terms of the run, its digest, and data."""

from __future__ import annotations

from dataclasses import replace
from pkgutil import resolve_name
from typing import Any

import numpy as np
import torch

from pfedlms.data import FederatedData, load_pool, read
from pfedlms.data.federated import from_client_indices
from pfedlms.data.partition import split
from pfedlms.data.pool import class_numbers
from pfedlms.data.sources import path_kind
from pfedlms.engine.terms import Terms
from pfedlms.errors import ConfigError, DataError
from pfedlms.experiment.config import Config
from pfedlms.experiment.loop import fixed_settings
from pfedlms.experiment.prepare import NAMED_PROBLEM, build_parts, execution_settings, load_named_pool, partition_pool
from pfedlms.experiment.problem import Problem
from pfedlms.methods import METHODS
from pfedlms.settings import CUSTOM
from pfedlms.wire.frames import agreement_digest


class RunSetup:
    """The model, data, terms and digest of a run, derived from its configuration.

    Args:
        config: the same on the server and all nodes, except for data.dir and the section [run] without run.seed.
        client: the client of this node; None on the server.
        data: on a node, its own data; see `own_data`. If None, the data set of the configuration is partitioned as in
            a simulation, and the node uses its part.
        problem: model, loss and metric, where the configuration names none.
    """

    def __init__(
        self, config: Config, client: int | None = None, data: Any = None, problem: Problem = NAMED_PROBLEM
    ) -> None:  # fmt: skip
        self.config, self.client = config, client
        self.knows_samples = config.data.dataset != CUSTOM
        """Whether the number of samples of each client follows from the configuration."""
        if config.data.newcomers:
            raise ConfigError(["data.newcomers: is for simulations; on nodes a client that joins late measures itself"])
        self.parts = build_parts(config, lambda: self._load_data(data, problem), problem)
        partition = self.parts.data
        with execution_settings(config):
            self.terms = Terms(
                METHODS[config.method], config.settings, self.parts.model, partition.clients, partition.classes,
                config.train, config.run.seed,
            )  # fmt: skip
        self.run = agreement_digest({"frames": self.terms.digest, **fixed_settings(config)})
        """Digest of everything the server and the nodes must agree on, such as local training and class names."""

    def _load_data(self, data: Any, problem: Problem) -> FederatedData:
        if self.knows_samples:
            if data is not None:
                got = f"got {self.config.data.dataset!r}, which is partitioned over all nodes"
                raise ConfigError([f"data.dataset: {got}; for data of a node's own, expected 'custom'"])
            return partition_pool(self.config, load_named_pool(self.config))
        if self.client is None:
            return server_data(self.config)
        if data is None:
            raise ConfigError(["data.dataset: got 'custom', so every node needs data of its own; name them"])
        return own_data(self.config, self.client, data, problem)


def classes_and_shape(config: Config) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Class names and shape of a sample, which the configuration states if nodes have their own data."""
    settings, problems = config.data, []
    names = tuple(name.strip() for name in settings.class_names.split(",") if name.strip())
    if len(names) < 2 or len(set(names)) < len(names):
        problems.append(f"data.class_names: got {settings.class_names!r}, expected two names or more, all different")
    sizes = settings.sample_shape.lower().split("x")
    if not all(size.strip().isdecimal() and int(size) > 0 for size in sizes):
        problems.append(f"data.sample_shape: got {settings.sample_shape!r}, expected sizes such as 3x32x32")
    if problems:
        raise ConfigError(problems)
    return names, tuple(map(int, sizes))


def server_data(config: Config) -> FederatedData:
    """Placeholder data of the server, which has no client's samples: one sample of zeros, to try the model on."""
    names, shape = classes_and_shape(config)
    indices = (np.zeros(1, dtype=np.int64),) * config.data.clients
    # Whole numbers become floats if the model computes with them.
    x, y = (torch.zeros(size, dtype=torch.int64) for size in ((1, *shape), (1,)))
    return FederatedData(x, y, indices, indices, len(names), indices if config.data.validation else (), names)


def own_data(config: Config, client: int, data: Any, problem: Problem = NAMED_PROBLEM) -> FederatedData:
    """The node's own data as a federation in which every client has them, so that the node's own client number does.

    `data` is one of: `folder:PATH` or `file:PATH`; a data set as `pfedlms.run` takes one, which is split 75/25; a pair
    (train, test); or `module:function`, a function that returns such a data set or pair.
    """
    names, shape = classes_and_shape(config)
    if isinstance(data, str) and path_kind(data):
        settings = config.data
        pool = load_pool(data, settings.dir or None, settings.image_size, settings.label_column)
    else:
        if isinstance(data, str):
            data = _call_user_function(data)
        pool = read([data], problem.loss is not None)
    arrays = replace(pool, y=class_numbers(pool, names), classes=len(names), names=names)
    if arrays.x.shape[1:] != shape:
        raise DataError(f"data: got samples of shape {arrays.x.shape[1:]}, expected data.sample_shape = {shape}")
    indices: Any = pool.client_indices[0] if pool.client_indices else np.arange(len(arrays.y))
    # The split is drawn from the client's own random stream, as in a simulation.
    train_test = indices if isinstance(indices, tuple) else split(arrays.strata, indices, config.run.seed, client)
    return from_client_indices(arrays, [train_test] * config.data.clients, config.run.seed, config.data.validation)


def _call_user_function(name: str) -> Any:
    try:
        return resolve_name(name)()
    except Exception as error:  # the user's own code may raise anything
        raise DataError(
            f"data: {name!r} gave no data ({type(error).__name__}: {error}); expected folder:PATH, file:PATH, or "
            "module:function of a function without arguments that returns (train, test)"
        ) from error
