"""From a configuration, or from Python objects, to a federation that is ready to start."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import fields
from functools import partial
from typing import Any

import torch
from torch import nn

from pfedlms import rng
from pfedlms.backend import plain, torch_threads
from pfedlms.data import FederatedData, from_pairs, from_pool, load_dataset
from pfedlms.engine import Federation
from pfedlms.engine.participation import Participation
from pfedlms.engine.training import TrainSettings
from pfedlms.errors import ConfigError, DataError, UsageError, did_you_mean
from pfedlms.experiment.config import CUSTOM, Config, Tables, keys
from pfedlms.experiment.memory import fitting_cohort, room_for_all
from pfedlms.methods import METHODS
from pfedlms.models import CohortModel, build
from pfedlms.models.zoo import seeded

ModelLike = str | nn.Module | Callable[[], nn.Module] | None


def python_overrides(data: Any, model: ModelLike, methods: Sequence[str], settings: Mapping[str, Any]) -> Tables:
    """Keyword arguments as sections and keys; a key is looked up in every section and in the methods' own."""
    sections = {key: section for section, key in keys(methods) if key != "name"}
    own = {key: dict(value) for key, value in settings.items() if key in METHODS and isinstance(value, Mapping)}
    settings = {key: value for key, value in settings.items() if key not in own}
    unknown = [f"{key}: unknown setting; {did_you_mean(key, sections)}" for key in settings if key not in sections]
    if unknown:
        raise ConfigError(unknown)
    tables: Tables = {"data": {}, "model": {}, "train": {}, "method": {}, "run": {}, **own}
    for key, value in settings.items():
        tables[sections[key]][key] = value
    if data is not None:
        tables["data"]["dataset"] = data if isinstance(data, str) else CUSTOM
        if not isinstance(data, str) and not _is_pool(data) and hasattr(data, "__len__"):
            if settings.get("clients", len(data)) != len(data):
                raise ConfigError([f"clients: got {settings['clients']}, but data has {len(data)} pairs; leave it out"])
            tables["data"]["clients"] = len(data)
    if model is not None:
        tables["model"]["name"] = model if isinstance(model, str) else CUSTOM
    return tables


@contextmanager
def as_configured(config: Config) -> Iterator[None]:
    """Kernels, threads and cuDNN's algorithms as the configuration says; afterwards as they were."""
    cudnn = torch.backends.cudnn
    before = cudnn.benchmark, cudnn.deterministic
    cudnn.benchmark, cudnn.deterministic = config.run.fast, not config.run.fast
    kernels = plain() if config.run.reference else nullcontext()
    try:
        with torch_threads(config.run.threads or torch.get_num_threads()), kernels:
            yield
    finally:
        cudnn.benchmark, cudnn.deterministic = before


def train_settings(config: Config) -> TrainSettings:
    return TrainSettings(**{each.name: getattr(config.train, each.name) for each in fields(TrainSettings)})


def prepare(config: Config, data: Any = None, model: ModelLike = None) -> Federation:
    """Everything up to the first local step: device, data, partition, model, method."""
    device = _device(config.run.device)
    if config.run.fast and device.type == "cpu":
        warnings.warn("run.fast: compiles local steps on a GPU; on this CPU it does nothing", stacklevel=2)
    with as_configured(config):
        federated = _federated(config, data)
        try:
            cohort_model = CohortModel(module_of(config, model, federated), device, config.run.fast)
        except (RuntimeError, ValueError) as error:
            raise UsageError(f"model: cannot be built ({str(error).strip().splitlines()[0]})") from error
        _check_model(cohort_model, federated)
        if config.train.augment != "none" and len(federated.shape) != 3:
            raise UsageError(
                f"train.augment: got {config.train.augment!r}, but samples have shape {federated.shape}, expected "
                "images of (channels, height, width)"
            )
        federated, train = federated.to(device), train_settings(config)
        who = Participation(federated.clients, train.participation, config.run.seed)
        size = config.run.cohort_size or int(config.run.reference)
        size = size or fitting_cohort(cohort_model, federated, train.batch_size, who.count)
        make = partial(
            Federation, METHODS[config.method], config.settings, cohort_model, federated, train, config.run.seed,
            cohort_size=size, quorum=config.run.quorum, lost=config.run.lost,
        )  # fmt: skip
        federation = make()
        if device.type == "cpu" or room_for_all(federation, config.train):
            return federation
        return make(home=torch.device("cpu"))


def _device(name: str) -> torch.device:
    found = torch.cuda.is_available()
    if name == "cuda" and not found:
        raise UsageError("run.device: got 'cuda', but PyTorch finds no GPU here; use --device cpu or auto")
    return torch.device("cuda" if found and name != "cpu" else "cpu")


def _is_pool(data: Any) -> bool:
    """Two arrays, samples and labels, rather than two clients: labels are a row of plain numbers."""
    labels = data[1] if isinstance(data, tuple) and len(data) == 2 else ()
    numbers = isinstance(labels, Sequence) and len(labels) > 0 and isinstance(labels[0], int | float)
    return numbers or hasattr(labels, "shape")


def _federated(config: Config, data: Any) -> FederatedData:
    chosen = config.data
    if data is None or isinstance(data, str):
        if chosen.dataset == CUSTOM:
            raise UsageError(
                "data.dataset: 'custom' stands for data given in Python; name a data set, or use pfedlms.run(data, …)"
            )
        x, y = load_dataset(chosen.dataset, chosen.dir or None)
    elif _is_pool(data):
        x, y = data
    elif hasattr(data, "shape"):
        raise DataError(f"data: got one array of shape {tuple(data.shape)}, expected samples and labels, (x, y)")
    else:
        return from_pairs(data, config.run.seed, chosen.validation)
    return from_pool(x, y, chosen.clients, chosen.alpha, config.run.seed, chosen.min_samples, chosen.validation)


def module_of(config: Config, model: ModelLike, data: FederatedData) -> nn.Module:
    """The model every client trains, as given or by name."""
    key = rng.stream(config.run.seed, "initial")
    if isinstance(model, nn.Module):
        return copy.deepcopy(model)
    if callable(model):
        return seeded(model, key)
    if config.model.name == CUSTOM:
        raise UsageError("model.name: 'custom' stands for a model given in Python; name a model of `pfedlms models`")
    return build(config.model.name, data.shape, data.classes, config.model.hidden, key)


def _check_model(model: CohortModel, data: FederatedData) -> None:
    """Try two samples, so that a model that does not fit the data is found before anything is trained."""
    sample = data.x[data.train[0][[0, -1]]].to(model.device)
    try:
        with torch.no_grad():
            outputs = model.module.eval()(sample)
    except (RuntimeError, ValueError, TypeError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UsageError(
            f"model: fails on samples of shape {data.shape} ({reason}); "
            f"expected a module that takes [batch, *{data.shape}]"
        ) from error
    got = tuple(outputs.shape) if isinstance(outputs, torch.Tensor) else type(outputs).__name__
    if not isinstance(got, tuple) or len(got) != 2 or got[1] < data.classes:
        raise UsageError(
            f"model: got outputs of shape {got} for 2 samples, expected (2, at least {data.classes}): one number "
            "a class"
        )
