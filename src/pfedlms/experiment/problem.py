"""A learning problem as one object: data, model, loss and metric, by name or given in Python; and the checks that they
fit each other."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from pfedlms import rng
from pfedlms.data import FederatedData, Pool, read
from pfedlms.engine.criterion import Criterion
from pfedlms.errors import ConfigError, PfedlmsError, UsageError, reason, resume_command
from pfedlms.experiment.digests import digest
from pfedlms.experiment.plugins import IMPORTED_MODULES
from pfedlms.methods import METHODS
from pfedlms.models import CohortModel, build
from pfedlms.models.intake import check_batch_of_one, check_trains, copy_module, layer_called_after_head, outputs_of
from pfedlms.models.zoo import seeded
from pfedlms.settings import CUSTOM
from pfedlms.step.custom import Metric, PerSample, check_function

if TYPE_CHECKING:
    from pfedlms.experiment.config import Config, Tables

ModelLike = str | nn.Module | Callable[[], nn.Module] | None
_SETTING_OF = {
    "data": ("data", "dataset"), "model": ("model", "name"), "loss": ("train", "loss"), "metric": ("train", "metric"),
}  # fmt: skip
"""The setting, by section and key, that names each part of a problem, or says that it was given in Python."""


@dataclass(frozen=True, eq=False)
class Problem:
    """A learning problem.

    Args:
        data: the name of a data set; or a data set to be partitioned, as arrays `(x, y)`, a torch or Hugging Face
        Dataset, or a tuple of two, (train, test), which are pooled and partitioned anew; or a list or dict of clients,
        each with a (train, test) pair or one data set. Default: the embedded digits.
        model: a name of the zoo, a factory that returns an `nn.Module`, or a module (its weights are w⁰). Default: the
        data set's own.
        loss: what local steps minimise in place of cross-entropy: a function of outputs `[batch, …]` and targets
        `[batch, …]` of one client that gives one number per sample. Targets may then be anything numeric.
        metric: what is measured in place of accuracy, likewise, or a pair of its name and such a function; the higher
        the better. Default: accuracy where targets are classes and outputs are one number per class, else minus the
        loss.
    """

    data: Any = None
    model: ModelLike = None
    loss: PerSample | None = None
    metric: Metric | None = None

    @classmethod
    def of(
        cls, data: Any = None, model: ModelLike = None, loss: PerSample | None = None, metric: Metric | None = None
    ) -> Problem:
        """The problem of these arguments; `data` may be a `Problem` already."""
        if not isinstance(data, cls):
            return cls(data, model, loss, metric)
        for name, argument in (("model", model), ("loss", loss), ("metric", metric)):
            if argument is not None:
                raise UsageError(f"{name}: got one beside a Problem, which has its own; put it into the Problem")
        return data

    @cached_property
    def own_pool(self) -> Pool | None:
        """Data given in Python, read and checked once; None if the configuration names a data set."""
        is_named = self.data is None or isinstance(self.data, str)
        return None if is_named else read(self.data, self.loss is not None)

    def tables(self, settings: Mapping[str, Any]) -> Tables:
        """The keys of a configuration that name the parts, or say that they were given in Python. `settings` beside
        them must not name a second data set, or another number of clients than the data have."""
        if self.data is not None and "dataset" in settings:
            raise ConfigError([f"dataset: got {settings['dataset']!r} beside data; give one of them"])
        tables: Tables = {"data": {}, "model": {}, "train": {}}
        for name, (section, key) in _SETTING_OF.items():
            part = getattr(self, name)
            if part is not None:
                tables[section][key] = part if isinstance(part, str) and section != "train" else CUSTOM
        if self.own_pool is not None and self.own_pool.client_indices:
            clients = tables["data"]["clients"] = len(self.own_pool.client_indices)
            if settings.get("clients", clients) != clients:
                raise ConfigError([f"clients: got {settings['clients']}, but data has {clients} clients; leave it out"])
            if self.own_pool.stride:  # the text of a new device is cut alike
                tables["data"]["stride"] = self.own_pool.stride
        return tables

    def check_given(self, config: Config, *names: str, directory: object = None) -> None:
        """Refuse 'custom' for data, model, loss or metric (default: any) where none is given in Python. `directory` is
        that of a run or study to be resumed."""
        tables = config.tables()
        for name in ("model", "loss", "metric") if directory else ():
            section, key = _SETTING_OF[name]
            part = getattr(self, name)
            if part is not None and not isinstance(part, str) and tables[section][key] != CUSTOM:
                raise UsageError(f"{directory}: this run has no {name} of its own; leave {name} out")
        for name in given_in_python(tables):
            if name not in (names or _SETTING_OF) or getattr(self, name) is not None:
                continue
            if directory:
                call = resume_call(directory, tables)
                raise UsageError(f"{directory}: this run's {name} was given in Python; resume it with {call}")
            what = {"data": "data", "model": "a model"}.get(name, "a function")
            place = ".".join(_SETTING_OF[name])
            raise UsageError(f"{place}: 'custom' stands for {what} given in Python; pass it there, {name}=…")

    def digests(self) -> dict[str, str]:
        """Short digests of the model, the loss and the metric that were given in Python. Data have a fingerprint. The
        weights of a module count; those that a function makes depend on the seed."""
        functions = {"loss": self.loss, "metric": self.metric}
        digests = {name: digest(function) for name, function in functions.items() if function is not None}
        if isinstance(self.model, nn.Module):
            digests["model"] = digest(self.model)
        elif callable(self.model):
            digests["model"] = digest(_build_module(self.model, 0), weights=False)
        return digests

    def module(self, config: Config, data: FederatedData) -> nn.Module:
        """The model every client trains, as given or by name, with its initial weights."""
        model, key = self.model, rng.stream(config.run.seed, "initial")
        if isinstance(model, nn.Module):
            return copy_module(model)
        if callable(model):
            return _build_module(model, key)
        if model is not None and not isinstance(model, str):
            raise UsageError(
                f"model: got {model!r}, expected the name of a model, an nn.Module, or a function that makes one"
            )
        self.check_given(config, "model")
        return build(config.model.name, data.shape, data.outputs, config.model.hidden, key)

    def criterion(self, outputs: torch.Tensor, data: FederatedData) -> Criterion:
        """Loss and metric, tried on the outputs of the model for `trial_samples`; with targets among which are the
        smallest and the largest, which a loss may refuse."""
        flat, width = data.y.reshape(-1), max(1, data.y[:1].numel())
        extremes = [int(flat.argmin()) // width, int(flat.argmax()) // width] if len(flat) else [0, 0]
        targets = data.y[[*data.train[0][[0, -1, 0]].tolist(), *extremes]].to(outputs.device)
        axes = data.y.ndim + 1
        classifies = data.classes > 0 and outputs.ndim == axes and outputs.shape[-1] >= data.classes
        functions = {
            name: None if function is None else check_function(name, function, outputs.clone(), targets)
            for name, function in (("loss", self.loss), ("metric", self.metric))
        }
        return Criterion(functions["loss"], functions["metric"], classifies, data.positions)


def given_in_python(tables: Mapping[str, Any]) -> list[str]:
    """Which of data, model, loss and metric were objects given in Python."""
    return [name for name, (section, key) in _SETTING_OF.items() if tables.get(section, {}).get(key) == CUSTOM]


def resume_instruction(directory: object, tables: Mapping[str, Any]) -> str:
    """How to resume the run or study in `directory`: the command, with the modules that it imports, or the Python call
    if objects were given in Python."""
    command = resume_command(directory) + "".join(f" --import {name}" for name in IMPORTED_MODULES)
    return resume_call(directory, tables) if given_in_python(tables) else command


def resume_call(directory: object, tables: Mapping[str, Any]) -> str:
    """The Python call that resumes the run or study in `directory`, with the objects that were given in Python."""
    names = given_in_python(tables)
    keywords = ("loss", "metric") if names[:1] == ["data"] else ("model", "loss", "metric")
    arguments = [f"{name}={name}" if name in keywords else name for name in names]
    return f"pfedlms.resume({', '.join([repr(str(directory)), *arguments])})"


def _build_module(factory: Callable[[], nn.Module], key: int) -> nn.Module:
    try:
        return seeded(factory, key)
    except PfedlmsError:
        raise
    except Exception as error:  # it is the user's own and may raise anything
        remedy = ""
        if isinstance(factory, type):
            remedy = f"; give a module, or a function without arguments, model=lambda: {factory.__name__}(…)"
        raise UsageError(f"model: cannot be built ({reason(error)}){remedy}") from error


# --- do data and model fit each other?


def match_input_type(model: nn.Module, data: FederatedData) -> FederatedData:
    """Data whose samples have the type that the model takes: integers for models that look them up in an embedding,
    floats for models that compute with them. Both are tried on the CPU, where a failure can be caught, on the samples
    with the smallest and the largest number at each position: none may be too large for an embedding."""
    if data.x.is_floating_point():
        return data
    flat = data.x.reshape(len(data.x), -1)
    extremes = data.x[sorted({*flat.argmin(dim=0).tolist(), *flat.argmax(dim=0).tolist()})]
    module = copy.deepcopy(model).cpu().eval()
    if (as_integers := _failure(module, extremes)) is None:
        return data
    if (as_floats := _failure(module, extremes.float())) is None:
        return replace(data, x=data.x.float())
    low, high = int(data.x.min()), int(data.x.max())
    raise UsageError(
        f"model: fails on samples of shape {data.shape}, whole numbers from {low} to {high} ({as_integers}; as floats: "
        f"{as_floats}); expected a module that takes [batch, *{data.shape}], with embeddings of at least {high + 1} "
        "entries"
    )


def _failure(module: nn.Module, samples: torch.Tensor) -> str | None:
    """Why a module cannot be called on samples; None if it can."""
    try:
        with torch.no_grad(), rng.forked_generators(samples.device):
            module(samples)
    except Exception as error:  # it is the user's own and may raise anything
        return reason(error)
    return None


def trial_samples(data: FederatedData) -> torch.Tensor:
    """A few samples, the first and the last of the first client in turn."""
    return data.x[data.train[0][[0, -1, 0, -1, 0]]]


def trial_outputs(model: CohortModel, data: FederatedData, config: Config) -> torch.Tensor:
    """The model's outputs for `trial_samples`; a model that does not fit the data is refused."""
    sample = trial_samples(data).to(model.device)
    try:
        with torch.no_grad(), rng.forked_generators(sample.device):
            outputs = outputs_of(model.module.eval()(sample))
    except PfedlmsError:
        raise
    except Exception as error:  # it is the user's own and may raise anything
        raise UsageError(
            f"model: fails on samples of shape {data.shape} and type {sample.dtype} ({reason(error)}); expected a "
            f"module that takes [batch, *{data.shape}]"
        ) from error
    got, count = tuple(outputs.shape), len(sample)
    if config.train.loss == CUSTOM:
        is_fitting, expected = got[:1] == (count,), f"({count}, …)"
    else:
        leading = (count, *data.y.shape[1:])
        is_fitting = got[:-1] == leading and got[-1] >= data.classes
        per = "token of the vocabulary" if data.tokens else f"class, 0 to {data.classes - 1}"
        expected = f"({', '.join(map(str, leading))}, at least {data.classes}): one number per {per}"
    if not is_fitting:
        remedy = "; of the shipped models gru and transformer take text" if data.tokens else ""
        raise UsageError(f"model: got outputs of shape {got} for {count} samples, expected {expected}{remedy}")
    if config.train.batch_size == 1:
        check_batch_of_one(model.module, sample)
    if config.model.name == CUSTOM:
        check_trains(model.module, sample)
        _warn_of_body_after_head(model, sample, config)
    return outputs


def _warn_of_body_after_head(model: CohortModel, sample: torch.Tensor, config: Config) -> None:
    """A module that registers its head first would share the head and keep a layer of its body."""
    head, layers = METHODS[config.method].head_layers(config.settings), [layer.name for layer in model.layout.layers]
    after = layer_called_after_head(model.module, layers, head, sample) if head else None
    if after is not None:
        warnings.warn(
            f"model: the head of {config.method} is what was registered last, {', '.join(layers[-head:])}, but {after} "
            "is called after it; register the layers in the order in which they are called",
            stacklevel=2,
        )
