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
from pfedlms.data.partition import scheme_of
from pfedlms.engine import Federation, processes
from pfedlms.engine.criterion import Criterion
from pfedlms.engine.participation import Participation
from pfedlms.errors import DataError, PfedlmsError, UsageError, reason
from pfedlms.experiment.config import Config, as_constants
from pfedlms.experiment.memory import fitting_cohort, room_for_all
from pfedlms.experiment.problem import Problem, as_the_model_takes_them, checked_outputs, some_samples
from pfedlms.experiment.rules import constants, warn, without_effect, without_effect_on
from pfedlms.methods import METHODS
from pfedlms.models import CohortModel
from pfedlms.models.intake import taken
from pfedlms.settings import CUSTOM

NAMED = Problem()
"""The problem that a configuration names, with nothing given in Python."""


@contextmanager
def as_configured(config: Config) -> Iterator[None]:
    """Kernels, threads and cuDNN's algorithms as the configuration says; afterwards as they were."""
    cudnn = torch.backends.cudnn
    before = cudnn.benchmark, cudnn.deterministic
    cudnn.benchmark, cudnn.deterministic = config.run.fast, not config.run.fast
    kernels = plain() if config.run.reference else nullcontext()
    # Kernels and recordings are made for the GPU that is current.
    gpu = torch.cuda.device(config.run.device) if config.run.device.startswith("cuda:") else nullcontext()
    try:
        with torch_threads(config.run.threads or torch.get_num_threads()), kernels, gpu:
            yield
    finally:
        cudnn.benchmark, cudnn.deterministic = before


@dataclass(frozen=True)
class Ingredients:
    """The parts of a run, on the device and checked together."""

    model: CohortModel
    data: FederatedData
    criterion: Criterion


def prepare(config: Config, problem: Problem = NAMED, shared: bool = False) -> Federation:
    """Everything up to the first local step: device, data, partition, model, loss, method. With `shared` its clients
    are shared out among the processes that torchrun started."""
    found = ingredients(config, lambda: federated(config, problem), problem)
    with as_configured(config):
        who = Participation(found.data.clients, config.train.participation, config.run.seed)
        size = config.run.cohort_size or int(config.run.reference)
        size = size or fitting_cohort(found.model, found.data, config.train.batch_size, who.count)
        several = shared and processes.size() > 1
        if several and size < who.count:  # all of them work at the same time
            size = max(1, size // processes.size())
        kind = processes.SharedFederation if several else Federation
        make = partial(
            kind, METHODS[config.method], config.settings, found.model, found.data, config.train, config.run.seed,
            cohort_size=size, quorum=config.run.quorum, lost=config.run.lost, criterion=found.criterion,
        )  # fmt: skip
        federation = make()
        if found.model.device.type == "cpu" or room_for_all(federation, config.train):
            return federation
        return make(home=torch.device("cpu"))


def ingredients(config: Config, data: Callable[[], FederatedData], problem: Problem = NAMED) -> Ingredients:
    """The model, its data and its criterion, checked together; `data` are read after everything else was checked."""
    device = _device(config.run.device)
    problem.check_given(config, "loss", "metric")
    if config.run.fast and device.type == "cpu":
        warnings.warn("run.fast: compiles local steps on a GPU; on this CPU it does nothing", stacklevel=3)
    warn(without_effect(config))
    with as_configured(config):
        held = data()
        try:
            module = taken(problem.module(config, held), some_samples(held), rng.stream(config.run.seed, "initial"))
            cohort_model = CohortModel(module, device, config.run.fast, config.model.precision == "bf16")
        except PfedlmsError:
            raise
        except Exception as error:  # it may be the user's own and raise anything
            raise UsageError(f"model: cannot be built ({reason(error)})") from error
        held = as_the_model_takes_them(module, held)
        criterion = problem.criterion(checked_outputs(cohort_model, held, config), held)
        if config.train.augment != "none" and (len(held.shape) != 3 or not held.x.is_floating_point()):
            raise UsageError(
                f"train.augment: got {config.train.augment!r}, but samples have shape {held.shape} and type "
                f"{held.x.dtype}, expected images of (channels, height, width), floats"
            )
        return Ingredients(cohort_model, held.to(device), criterion)


def _device(name: str) -> torch.device:
    found = torch.cuda.is_available()
    if name.startswith("cuda") and not found:
        raise UsageError(f"run.device: got {name!r}, but PyTorch finds no GPU here; set run.device to cpu or auto")
    kind, _, number = name.partition(":")
    if number and int(number) >= (count := torch.cuda.device_count()):
        known = " or ".join(f"cuda:{each}" for each in range(count)) if count < 3 else f"cuda:0 to cuda:{count - 1}"
        raise UsageError(f"run.device: got {name!r}, but PyTorch finds {count} GPU{'s' * (count > 1)}; use {known}")
    if kind == "auto":
        return torch.device("cuda" if found else "cpu")
    return torch.device(kind, int(number)) if number else torch.device(kind)


def federated(config: Config, problem: Problem) -> FederatedData:
    """The data of all clients, partitioned as the configuration says."""
    return partitioned(config, named_pool(config) if problem.given is None else problem.given)


_KEPT: dict[Any, Pool] | None = None


@contextmanager
def keeping_pools() -> Iterator[None]:
    """Within it, a data set is read once for all runs on it that follow each other."""
    global _KEPT
    before, _KEPT = _KEPT, {} if _KEPT is None else _KEPT
    try:
        yield
    finally:
        _KEPT = before


def named_pool(config: Config) -> Pool:
    """The data set that the configuration names, before it is partitioned."""
    chosen = config.data
    NAMED.check_given(config, "data")
    known = DATASETS.get(chosen.dataset)
    own = known is not None and chosen.mean == as_constants(known.mean) and chosen.std == as_constants(known.std)
    windows = Windows(chosen.tokens, chosen.window, chosen.stride, chosen.min_tokens)
    more: dict[str, Any] = {"text": chosen.text_column, "windows": windows}
    if chosen.mean and not own:
        more |= {"mean": constants(chosen.mean), "std": constants(chosen.std)}
    source = chosen.dataset, chosen.dir or None, chosen.image_size, chosen.label_column, chosen.owner_column
    if _KEPT is None:
        return load_pool(*source, **more)
    key = source, tuple(more.items())
    if key not in _KEPT:
        _KEPT.clear()  # one at a time: they may be large
        _KEPT[key] = load_pool(*source, **more)
    return _KEPT[key]


def with_constants(config: Config, data: FederatedData) -> Config:
    """With the mean and deviation by which images were normalised, where they were computed from the data."""
    mean, std = data.mean, data.std
    if config.data.mean or not mean or not std:
        return config
    return replace(config, data=replace(config.data, mean=as_constants(mean), std=as_constants(std)))


def normalisation(config: Config) -> dict[str, Any] | None:
    """How images were turned into samples, x = (raw / scale − mean) / std channel by channel; None for samples that
    are trained on as they are."""
    if not config.data.mean or config.data.dataset == CUSTOM:
        return None
    mean, std = constants(config.data.mean) or (), constants(config.data.std) or ()
    scale = DATASETS[config.data.dataset].scale if config.data.dataset in DATASETS else 255.0
    return {"mean": list(mean), "std": list(std), "scale": scale}


def partitioned(config: Config, pool: Pool) -> FederatedData:
    """A pool partitioned as the configuration says."""
    chosen, clients = config.data, len(pool.owners)
    if pool.held and chosen.partition not in ("auto", "given"):
        raise DataError(
            f"data.partition: got {chosen.partition!r}, but data are given client by client; leave it out, or give one "
            "pool (x, y)"
        )
    scheme = "given" if pool.held else scheme_of(chosen.partition, pool.owner, pool.classes)
    if scheme == "given" and not pool.held and "data.clients" in config.given and chosen.clients != clients:
        raise DataError(
            f"data.clients: got {chosen.clients}, but the data say whose each sample is and name {clients} "
            "clients; leave it out, or choose another data.partition"
        )
    warn(without_effect_on(config, scheme, bool(pool.tokens)))
    how = Partitioning(
        chosen.clients, chosen.alpha, config.run.seed, chosen.min_samples, chosen.validation, chosen.partition,
        chosen.classes_per_client, chosen.newcomers,
    )  # fmt: skip
    return partition(pool, how)


def rehearse(configs: Sequence[Config], problem: Problem = NAMED) -> int:
    """Before the first of several runs trains: all that can be wrong with its data and model, and with the partitions
    of the others. Settings without effect are named here, so the runs themselves can be silenced. Returns the number of
    parameters of the first one's model."""
    processes.refuse_multiple_processes("a study")
    first, *others = configs
    parameters = prepare(first, problem).model.layout.dim
    warned = set(without_effect(first))
    warn(text for config in others for text in without_effect(config) if text not in warned)
    seen, named = {(first.data, first.run.seed)}, {first.data}
    for config in others:
        if (config.data, config.run.seed) not in seen:
            federated(config.silenced() if config.data in named else config, problem)
            seen.add((config.data, config.run.seed))
            named.add(config.data)
    return parameters
