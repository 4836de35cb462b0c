"""From a configuration, or from Python objects, to a federation that is ready to start."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from pfedlms import rng
from pfedlms.backend import plain, torch_threads
from pfedlms.data import Dealing, FederatedData, Given, Pool, from_pool, load_pool, read
from pfedlms.data.schemes import scheme_of
from pfedlms.engine import Federation
from pfedlms.engine.criterion import Criterion
from pfedlms.engine.participation import Participation
from pfedlms.engine.training import TrainSettings
from pfedlms.errors import ConfigError, DataError, PfedlmsError, UsageError, did_you_mean, reason
from pfedlms.experiment.checks import silenced, warn, without_effect, without_effect_on
from pfedlms.experiment.config import CUSTOM, Config, keys, of_others
from pfedlms.experiment.layers import Tables
from pfedlms.experiment.memory import fitting_cohort, room_for_all
from pfedlms.methods import METHODS
from pfedlms.models import CohortModel, build
from pfedlms.models.intake import check_batch_of_one, copied, outputs_of, taken
from pfedlms.models.zoo import seeded
from pfedlms.step.own import Metric, PerSample, over_clients

ModelLike = str | nn.Module | Callable[[], nn.Module] | None


@dataclass(frozen=True)
class Own:
    """Functions given in Python: outputs and targets of one client's batch to one number a sample."""

    loss: PerSample | None = None
    metric: Metric | None = None

    def read(self, data: Any) -> Any:
        """Data given in Python, checked once; targets are classes unless there is a loss for others."""
        return data if data is None or isinstance(data, str) else read(data, self.loss is not None)

    def into(self, tables: Tables) -> Tables:
        """The keys that say in a configuration that there are some."""
        given = {key: CUSTOM for key, function in vars(self).items() if function is not None}
        return {**tables, "train": {**tables.get("train", {}), **given}}

    def missing(self, config: Config) -> list[str]:
        """Which of them a configuration needs and are not here."""
        return [
            key for key, function in vars(self).items() if getattr(config.train, key) == CUSTOM and function is None
        ]


def python_overrides(data: Any, model: ModelLike, methods: Sequence[str], settings: Mapping[str, Any]) -> Tables:
    """Keyword arguments as sections and keys; a key is looked up in every section and in the methods' own. Data are the
    name of a data set, or what `read` made of them."""
    sections = {key: section for section, key in keys(methods) if key != "name"}
    own = {key: dict(value) for key, value in settings.items() if key in METHODS and isinstance(value, Mapping)}
    settings = {key: value for key, value in settings.items() if key not in own}
    alone = methods[0] if len(methods) == 1 else None
    unknown = [
        f"{key}: {of_others(key, alone) or f'unknown setting; {did_you_mean(key, sections)}'}"
        for key in settings
        if key not in sections
    ]
    if unknown:
        raise ConfigError(unknown)
    tables: Tables = {"data": {}, "model": {}, "train": {}, "method": {}, "run": {}, **own}
    for key, value in settings.items():
        tables[sections[key]][key] = _device_name(value) if isinstance(value, torch.device) else value
    if data is not None:
        tables["data"]["dataset"] = data if isinstance(data, str) else CUSTOM
        if isinstance(data, Given) and data.held:
            clients = len(data.held)
            if settings.get("clients", clients) != clients:
                raise ConfigError([f"clients: got {settings['clients']}, but data has {clients} clients; leave it out"])
            tables["data"]["clients"] = clients
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
    # Kernels and recordings are made for the GPU that is current.
    gpu = torch.cuda.device(config.run.device) if config.run.device.startswith("cuda:") else nullcontext()
    try:
        with torch_threads(config.run.threads or torch.get_num_threads()), kernels, gpu:
            yield
    finally:
        cudnn.benchmark, cudnn.deterministic = before


NOTHING_OWN = Own()


def given_in_python(tables: Mapping[str, Any]) -> list[str]:
    """What of a stored configuration was no name or number but an object: some of data, model, loss and metric."""
    places = {"data": ("data", "dataset"), "model": ("model", "name"), "loss": ("train", "loss"),
              "metric": ("train", "metric")}  # fmt: skip
    return [name for name, (section, key) in places.items() if tables.get(section, {}).get(key) == CUSTOM]


def in_python(function: str, directory: object, tables: Mapping[str, Any]) -> str:
    """The call that goes on with what is in `directory`, with all it needs again."""
    needed = given_in_python(tables)
    keyed = ("loss", "metric") if needed[:1] == ["data"] else ("model", "loss", "metric")
    given = [f"{name}={name}" if name in keyed else name for name in needed]
    return f"pfedlms.{function}({', '.join([repr(str(directory)), *given])})"


def train_settings(config: Config) -> TrainSettings:
    return TrainSettings(**{each.name: getattr(config.train, each.name) for each in fields(TrainSettings)})


@dataclass(frozen=True)
class Ingredients:
    """What the ends of a run are made of: on the device, and found to fit together."""

    model: CohortModel
    data: FederatedData
    train: TrainSettings
    criterion: Criterion


def prepare(config: Config, data: Any = None, model: ModelLike = None, own: Own = NOTHING_OWN) -> Federation:
    """Everything up to the first local step: device, data, partition, model, loss, method."""
    found = ingredients(config, lambda: _federated(config, data, own), model, own)
    with as_configured(config):
        who = Participation(found.data.clients, found.train.participation, config.run.seed)
        size = config.run.cohort_size or int(config.run.reference)
        size = size or fitting_cohort(found.model, found.data, found.train.batch_size, who.count)
        make = partial(
            Federation, METHODS[config.method], config.settings, found.model, found.data, found.train, config.run.seed,
            cohort_size=size, quorum=config.run.quorum, lost=config.run.lost, criterion=found.criterion,
        )  # fmt: skip
        federation = make()
        if found.model.device.type == "cpu" or room_for_all(federation, config.train):
            return federation
        return make(home=torch.device("cpu"))


def ingredients(
    config: Config, data: Callable[[], FederatedData], model: ModelLike = None, own: Own = NOTHING_OWN
) -> Ingredients:
    """The model and what it is trained on, tried on each other; `data` are read once all else is found to be there."""
    device = _device(config.run.device)
    for key in own.missing(config):
        raise UsageError(f"train.{key}: 'custom' stands for a function given in Python; use pfedlms.run(…, {key}=…)")
    if config.run.fast and device.type == "cpu":
        warnings.warn("run.fast: compiles local steps on a GPU; on this CPU it does nothing", stacklevel=3)
    warn(without_effect(config))
    with as_configured(config):
        federated = data()
        try:
            module = taken(
                module_of(config, model, federated), _sample(federated), rng.stream(config.run.seed, "initial")
            )
            cohort_model = CohortModel(module, device, config.run.fast)
        except PfedlmsError:
            raise
        except Exception as error:  # it may be the user's own and raise anything
            raise UsageError(f"model: cannot be built ({reason(error)})") from error
        federated = _as_the_model_takes_them(module, federated)
        criterion = _criterion(own, _checked_outputs(cohort_model, federated, config), federated)
        if config.train.augment != "none" and (len(federated.shape) != 3 or not federated.x.is_floating_point()):
            raise UsageError(
                f"train.augment: got {config.train.augment!r}, but samples have shape {federated.shape} and type "
                f"{federated.x.dtype}, expected images of (channels, height, width), floats"
            )
        return Ingredients(cohort_model, federated.to(device), train_settings(config), criterion)


def _device(name: str) -> torch.device:
    found = torch.cuda.is_available()
    if name.startswith("cuda") and not found:
        raise UsageError(f"run.device: got {name!r}, but PyTorch finds no GPU here; use --device cpu or auto")
    kind, _, number = name.partition(":")
    if number and int(number) >= (count := torch.cuda.device_count()):
        known = " or ".join(f"cuda:{each}" for each in range(count)) if count < 3 else f"cuda:0 to cuda:{count - 1}"
        raise UsageError(f"run.device: got {name!r}, but PyTorch finds {count} GPU{'s' * (count > 1)}; use {known}")
    if kind == "auto":
        return torch.device("cuda" if found else "cpu")
    return torch.device(kind, int(number)) if number else torch.device(kind)


def _device_name(device: torch.device) -> str:
    """As the setting has it; there is only one CPU."""
    return "cpu" if device.type == "cpu" else str(device)


def _federated(config: Config, data: Any, own: Own) -> FederatedData:
    chosen = config.data
    if data is None or isinstance(data, str):
        return dealt(config, named_pool(config))
    given: Given = own.read(data)
    if given.held and chosen.partition not in ("auto", "given"):
        raise DataError(
            f"data.partition: got {chosen.partition!r}, but data are given client by client; leave it out, or give one "
            "pool (x, y)"
        )
    warn(without_effect_on(config, "given" if given.held else scheme_of(chosen.partition, None, given.pool.classes)))
    return given.federated(dealing(config))


def named_pool(config: Config) -> Pool:
    """The data set that the configuration names, before anybody holds a part of it."""
    chosen = config.data
    if chosen.dataset == CUSTOM:
        raise UsageError(
            "data.dataset: 'custom' stands for data given in Python; name a data set, or use pfedlms.run(data, …)"
        )
    return load_pool(chosen.dataset, chosen.dir or None, chosen.image_size, chosen.label_column, chosen.owner_column)


def dealt(config: Config, pool: Pool) -> FederatedData:
    """A pool dealt out to clients as the configuration says."""
    scheme, clients = scheme_of(config.data.partition, pool.owner), len(pool.owners)
    if scheme == "given" and "data.clients" in config.given and config.data.clients != clients:
        raise DataError(
            f"data.clients: got {config.data.clients}, but the data say whose each sample is and name {clients} "
            "clients; leave it out, or choose another data.partition"
        )
    warn(without_effect_on(config, scheme))
    return from_pool(pool.x, pool.y, dealing(config), pool.owner, pool.owners, pool.names, pool.mean, pool.std)


def dealing(config: Config) -> Dealing:
    """The settings that say how samples are dealt out."""
    chosen = config.data
    return Dealing(
        chosen.clients, chosen.alpha, config.run.seed, chosen.min_samples, chosen.validation, chosen.partition,
        chosen.classes_per_client,
    )  # fmt: skip


def rehearse(configs: Sequence[Config], data: Any, model: ModelLike, own: Own = NOTHING_OWN) -> None:
    """Before the first of several runs trains: all that can be wrong with its data and model, and with the way the
    others' data are dealt out. Settings without effect are named here, so the runs themselves can be `silenced`."""
    first, *others = configs
    prepare(first, data, model, own)
    said = set(without_effect(first))
    warn(text for config in others for text in without_effect(config) if text not in said)
    seen, told = {(first.data, first.run.seed)}, {first.data}
    pools: dict[Any, Pool] = {}
    for config in others:
        chosen = config.data
        if (chosen, config.run.seed) in seen:
            continue
        heard = silenced(config) if chosen in told else config
        seen.add((chosen, config.run.seed))
        told.add(chosen)
        if data is not None and not isinstance(data, str):
            _federated(heard, data, own)
            continue
        source = chosen.dataset, chosen.dir, chosen.image_size, chosen.label_column, chosen.owner_column
        if source not in pools:
            pools = {source: named_pool(config)}  # one at a time: they may be large
        dealt(heard, pools[source])


def module_of(config: Config, model: ModelLike, data: FederatedData) -> nn.Module:
    """The model every client trains, as given or by name."""
    key = rng.stream(config.run.seed, "initial")
    if isinstance(model, nn.Module):
        return copied(model)
    if callable(model):
        return _made(model, key)
    if model is not None and not isinstance(model, str):
        raise UsageError(
            f"model: got {model!r}, expected the name of a model, an nn.Module, or a function that makes one"
        )
    if config.model.name == CUSTOM:
        raise UsageError("model.name: 'custom' stands for a model given in Python; name a model of `pfedlms models`")
    return build(config.model.name, data.shape, data.outputs, config.model.hidden, key)


def _made(factory: Callable[[], nn.Module], key: int) -> nn.Module:
    try:
        return seeded(factory, key)
    except PfedlmsError:
        raise
    except Exception as error:  # it is the user's own and may raise anything
        remedy = ""
        if isinstance(factory, type):
            remedy = f"; give a module, or a function without arguments, model=lambda: {factory.__name__}(…)"
        raise UsageError(f"model: cannot be built ({reason(error)}){remedy}") from error


def _as_the_model_takes_them(model: nn.Module, data: FederatedData) -> FederatedData:
    """Samples of whole numbers as they are, for models that look them up; as floats for those that calculate with them,
    which is found out by trying. Tried are the samples that hold the least and the greatest number of each place, so
    that no number is too large for an embedding, and on the CPU, where that is an error one can go on after."""
    if data.x.is_floating_point():
        return data
    flat = data.x.reshape(len(data.x), -1)
    extremes = data.x[sorted({*flat.argmin(dim=0).tolist(), *flat.argmax(dim=0).tolist()})]
    module = copy.deepcopy(model).cpu().eval()
    if (as_they_are := _failure(module, extremes)) is None:
        return data
    if (as_floats := _failure(module, extremes.float())) is None:
        return replace(data, x=data.x.float())
    low, high = int(data.x.min()), int(data.x.max())
    raise UsageError(
        f"model: fails on samples of shape {data.shape}, whole numbers from {low} to {high} ({as_they_are}; as floats: "
        f"{as_floats}); expected a module that takes [batch, *{data.shape}], with embeddings of at least {high + 1} "
        f"entries{', and no number below 0' * (low < 0)}"
    )


def _failure(module: nn.Module, samples: torch.Tensor) -> str | None:
    """Why a module cannot be called on samples, or None."""
    try:
        with torch.no_grad():
            module(samples)
    except Exception as error:  # it is the user's own and may raise anything
        return reason(error)
    return None


def _sample(data: FederatedData) -> torch.Tensor:
    """A few samples, the first and the last of the first client in turn."""
    return data.x[data.train[0][[0, -1, 0, -1, 0]]]


def _checked_outputs(model: CohortModel, data: FederatedData, config: Config) -> torch.Tensor:
    """Try some samples, so that a model that does not fit the data is found before anything is trained."""
    sample = _sample(data).to(model.device)
    try:
        with torch.no_grad():
            outputs = outputs_of(model.module.eval()(sample))
    except PfedlmsError:
        raise
    except Exception as error:  # it is the user's own and may raise anything
        why = reason(error)
        remedy = "; its parameters are float32 here, so leave casts to other types out of it" * ("dtype" in why)
        if sample.is_floating_point() and _failure(model.module, sample.long()) is None:
            remedy = "; it takes whole numbers, such as token ids: give samples as integers, x.astype(np.int64)"
        raise UsageError(
            f"model: fails on samples of shape {data.shape} ({why}); "
            f"expected a module that takes [batch, *{data.shape}]{remedy}"
        ) from error
    got, count, own = tuple(outputs.shape), len(sample), config.train.loss == CUSTOM
    if not own and (len(got) != 2 or got[1] < data.classes):
        raise UsageError(
            f"model: got outputs of shape {got} for {count} samples, expected ({count}, at least {data.classes}): one "
            f"number a class{_gaps(data, got)}"
        )
    if own and got[:1] != (count,):
        raise UsageError(f"model: got outputs of shape {got} for {count} samples, expected ({count}, …)")
    if config.train.batch_size == 1:
        check_batch_of_one(model.module, sample)
    return outputs


def _gaps(data: FederatedData, got: tuple[int, ...]) -> str:
    """What to do where outputs are enough for the classes that occur, but not for their numbers."""
    found = np.unique(data.y.cpu().numpy()).tolist()
    if len(got) != 2 or data.names or not len(found) <= got[1] < data.classes:
        return ""
    shown = ", ".join(map(str, found[:5])) + ", …" * (len(found) > 5)
    return (
        f". Of the class numbers 0 to {data.classes - 1} only {len(found)} occur ({shown}); if these are all, number "
        "them without gaps: y = np.unique(y, return_inverse=True)[1]"
    )


def _criterion(own: Own, outputs: torch.Tensor, data: FederatedData) -> Criterion:
    """What is minimised and measured, tried on the outputs of `_sample`."""
    targets = data.y[data.train[0][[0, -1, 0, -1, 0]]].to(outputs.device)
    classifies = data.classes > 0 and outputs.ndim == 2 and outputs.shape[1] >= data.classes
    made = {
        name: None if function is None else over_clients(name, function, outputs.clone(), targets)
        for name, function in vars(own).items()
    }
    return Criterion(made["loss"], made["metric"], classifies)
