"""From a configuration and a problem to a federation that is ready to start."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from pfedlms import rng
from pfedlms.backend import plain, torch_threads
from pfedlms.data import DATASETS, FederatedData, Partitioning, Pool, Windows, load_pool
from pfedlms.data.federated import partitioned as partition
from pfedlms.engine import Federation, processes
from pfedlms.engine.criterion import Criterion
from pfedlms.engine.participation import Participation
from pfedlms.errors import DataError, PfedlmsError, UsageError, reason
from pfedlms.experiment.config import Config, format_constants
from pfedlms.experiment.memory import all_clients_fit, fitting_cohort
from pfedlms.experiment.problem import Problem, match_input_type, trial_outputs, trial_samples
from pfedlms.experiment.rules import ineffective_data_settings, ineffective_settings, parse_constants, warn_once
from pfedlms.methods import METHODS
from pfedlms.models import CohortModel
from pfedlms.models.intake import trainable_module
from pfedlms.settings import CUSTOM

_MAX_REPEATS = 10
"""A batch of more times all samples is warned of."""
NAMED_PROBLEM = Problem()
"""A problem of which nothing was given in Python: the configuration names its data and model."""


@contextmanager
def execution_settings(config: Config) -> Iterator[None]:
    """Set kernels, threads and cuDNN's algorithms as the configuration says, and restore them afterwards."""
    cudnn = torch.backends.cudnn
    earlier = cudnn.benchmark, cudnn.deterministic
    cudnn.benchmark, cudnn.deterministic = False, True
    kernels = plain() if config.run.reference else nullcontext()
    # Kernels and recordings are made for the GPU that is current.
    gpu = torch.cuda.device(config.run.device) if config.run.device.startswith("cuda:") else nullcontext()
    try:
        with torch_threads(config.run.threads or torch.get_num_threads()), kernels, gpu:
            yield
    finally:
        cudnn.benchmark, cudnn.deterministic = earlier


@dataclass(frozen=True)
class RunParts:
    """Model, data and criterion of a run, on the device and checked together."""

    model: CohortModel
    data: FederatedData
    criterion: Criterion


def prepare(config: Config, problem: Problem = NAMED_PROBLEM, shared: bool = False) -> Federation:
    """A federation before its first local step: device, data, partition, model, loss and method. With `shared` its
    clients are distributed over the processes that torchrun started."""
    parts = build_parts(config, lambda: load_client_data(config, problem), problem)
    if config.train.batch_size > _MAX_REPEATS * len(parts.data.y):
        warnings.warn(
            f"train.batch_size: {config.train.batch_size:,} is far more than the {len(parts.data.y):,} samples; a "
            "batch is always full, so every step repeats a client's samples many times",
            stacklevel=2,
        )
    with execution_settings(config):
        participation = Participation(parts.data.clients, config.train.participation, config.run.seed)
        size = config.run.cohort_size or int(config.run.reference)
        size = size or fitting_cohort(parts.model, parts.data, config.train.batch_size, participation.count)
        distributed = shared and processes.size() > 1
        if distributed and size < participation.count:  # all processes train at the same time
            size = max(1, size // processes.size())
        cls = processes.SharedFederation if distributed else Federation
        build = partial(
            cls, METHODS[config.method], config.settings, parts.model, parts.data, config.train, config.run.seed,
            cohort_size=size, quorum=config.run.quorum, lost=config.run.lost, criterion=parts.criterion,
        )  # fmt: skip
        federation = build()
        if parts.model.device.type == "cpu" or all_clients_fit(federation, config.train):
            return federation
        return build(home=torch.device("cpu"))


def build_parts(config: Config, data: Callable[[], FederatedData], problem: Problem = NAMED_PROBLEM) -> RunParts:
    """Model, data and criterion, checked together; `data` is called after everything else was checked."""
    device = _device(config.run.device)
    problem.check_given(config, "loss", "metric")
    warn_once(ineffective_settings(config))
    with execution_settings(config):
        client_data = data()
        try:
            module = problem.module(config, client_data)
            module = trainable_module(module, trial_samples(client_data), rng.stream(config.run.seed, "initial"))
            cohort_model = CohortModel(module, device, config.model.precision == "bf16")
        except PfedlmsError:
            raise
        except Exception as error:  # it may be the user's own and raise anything
            raise UsageError(f"model: cannot be built ({reason(error)})") from error
        client_data = match_input_type(module, client_data)
        criterion = problem.criterion(trial_outputs(cohort_model, client_data, config), client_data)
        if config.train.augment != "none" and (len(client_data.shape) != 3 or not client_data.x.is_floating_point()):
            raise UsageError(
                f"train.augment: got {config.train.augment!r}, but samples have shape {client_data.shape} and type "
                f"{client_data.x.dtype}, expected images of (channels, height, width), floats"
            )
        return RunParts(cohort_model, client_data.to(device), criterion)


def _device(name: str) -> torch.device:
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    kind, _, number = name.partition(":")
    if kind == "cuda" and int(number or 0) >= count:
        names = "".join(f", cuda:{gpu}" for gpu in range(count))
        raise UsageError(f"run.device: got {name!r}, but PyTorch finds {count or 'no'} GPUs; use cpu, auto{names}")
    if kind == "auto":
        return torch.device("cuda" if count else "cpu")
    return torch.device(name)


def load_client_data(config: Config, problem: Problem) -> FederatedData:
    """The data of all clients, partitioned as the configuration says."""
    return partition_pool(config, load_named_pool(config) if problem.own_pool is None else problem.own_pool)


_POOL_CACHE: dict[Any, Pool] | None = None
"""The data set read last, inside `cache_data_sets`."""


@contextmanager
def cache_data_sets() -> Iterator[None]:
    """Inside this context, consecutive runs on the same data set read it once."""
    global _POOL_CACHE
    earlier, _POOL_CACHE = _POOL_CACHE, {} if _POOL_CACHE is None else _POOL_CACHE
    try:
        yield
    finally:
        _POOL_CACHE = earlier


def load_named_pool(config: Config) -> Pool:
    """The data set that the configuration names, before it is partitioned."""
    chosen = config.data
    NAMED_PROBLEM.check_given(config, "data")
    source = chosen.dataset, chosen.dir or None, chosen.image_size, chosen.label_column, chosen.owner_column
    windows = Windows(chosen.tokens, chosen.window, chosen.stride, chosen.min_tokens)
    options: dict[str, Any] = {"text": chosen.text_column, "windows": windows}
    if chosen.mean:
        options |= {"mean": parse_constants(chosen.mean), "std": parse_constants(chosen.std)}
    cache = {} if _POOL_CACHE is None else _POOL_CACHE
    key = source, tuple(options.items())
    if key not in cache:
        cache.clear()  # one at a time: they may be large
        cache[key] = load_pool(*source, **options)
    return cache[key]


def with_normalisation(config: Config, data: FederatedData) -> Config:
    """The configuration with the mean and deviation of images, if these were computed from the data."""
    mean, std = data.mean, data.std
    if config.data.mean or not mean or not std:
        return config
    return replace(config, data=replace(config.data, mean=format_constants(mean), std=format_constants(std)))


def normalisation(config: Config) -> dict[str, Any] | None:
    """How images were turned into samples, x = (raw / scale − mean) / std channel by channel; None for samples that
    were not normalised."""
    if not config.data.mean or config.data.dataset == CUSTOM:
        return None
    mean, std = parse_constants(config.data.mean) or (), parse_constants(config.data.std) or ()
    scale = DATASETS[config.data.dataset].scale if config.data.dataset in DATASETS else 255.0
    return {"mean": list(mean), "std": list(std), "scale": scale}


def partition_pool(config: Config, pool: Pool) -> FederatedData:
    """The pool of all clients, partitioned as the configuration says."""
    chosen, clients = config.data, len(pool.client_names)
    pool.refuse_single_class()
    if pool.client_indices and chosen.partition not in ("auto", "given"):
        raise DataError(
            f"data.partition: got {chosen.partition!r}, but data are given client by client; leave it out, or give one "
            "pool (x, y)"
        )
    scheme = "given" if pool.client_indices else pool.resolve_scheme(chosen.partition)
    if scheme == "given" and not pool.client_indices and "data.clients" in config.given and chosen.clients != clients:
        raise DataError(
            f"data.clients: got {chosen.clients}, but the data say whose each sample is and name {clients} "
            "clients; leave it out, or choose another data.partition"
        )
    warn_once(ineffective_data_settings(config, scheme, bool(pool.tokens), bool(pool.client_indices)))
    how = Partitioning(
        chosen.clients, chosen.alpha, config.run.seed, chosen.min_samples, chosen.validation, chosen.partition,
        chosen.classes_per_client, chosen.newcomers,
    )  # fmt: skip
    return partition(pool, how)


def check_all_runs(configs: Sequence[Config], problem: Problem) -> None:
    """Check all runs of a study before the first one trains: data and model of the first, and the partitions of the
    others; warn about settings without effect, once for all."""
    processes.refuse_multiple_processes("a study")
    first, *others = configs
    prepare(first, problem)
    warned = set(ineffective_settings(first))
    warn_once(text for config in others for text in ineffective_settings(config) if text not in warned)
    partitions, sections = {(first.data, first.run.seed)}, {first.data}
    for config in others:
        if (config.data, config.run.seed) not in partitions:
            load_client_data(config.quiet() if config.data in sections else config, problem)
            partitions.add((config.data, config.run.seed))
            sections.add(config.data)
