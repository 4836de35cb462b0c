"""Wrong calls that users are likely to make: each is refused with a remedy before anything is written."""

from __future__ import annotations

import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from small import QUICK as SHORT
from small import Wrapped, X, Y, edit_config, linear, squared_error
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import pfedlms
from pfedlms.errors import ConfigError, DataError, PfedlmsError, UsageError
from pfedlms.experiment.config import load_config

QUICK: dict[str, Any] = {**SHORT, "method": "local", "rounds": 1}
FEW: dict[str, Any] = {**QUICK, "clients": 2}
NUMBERS = X[:, :2] - X[:, 2:]


class Mistyped(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return self.leyar(x)


class Complex(nn.Linear):
    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.other = nn.Parameter(torch.ones(2, dtype=torch.complex64))


class Recompute(nn.Linear):
    def forward(self, x: Tensor) -> Any:
        return checkpoint(super().forward, x, use_reentrant=False)


def with_hook(kind: str) -> nn.Module:
    module = linear()
    getattr(module.weight, kind)(lambda slope: None)
    return module


def embedding_model() -> nn.Module:
    return nn.Sequential(nn.Embedding(10, 2), nn.Flatten(), nn.Linear(8, 2))


def failing() -> nn.Module:
    raise KeyError("width")


def binary_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(outputs, targets, reduction="none")


def indexed(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets, reduction="none")


def loss(own: Any, **more: Any) -> dict[str, Any]:
    return {"data": (X, NUMBERS), "loss": own, **more}


SETTINGS: dict[str, tuple[dict[str, Any], str]] = {
    "several": (
        {"round": 3, "alfa": 1.0},
        r"round: unknown setting of local; did you mean rounds\?\nalfa: unknown setting",
    ),
    "of another method": (
        {"method": "fedavg", "strength": 0.1},
        "strength: unknown setting of fedavg; pfedlms settings",
    ),
    "patience": ({"patience": 3}, r"train\.patience: got 3 with data\.validation = 0; it follows V-acc"),
    "names": ({"data": "digtis", "model": "vgg9"}, r"data\.dataset: got 'digtis'(.|\n)*model\.name: got 'vgg9'"),
    "kind without a path": ({"data": "folder:"}, r"got 'folder:', expected one of: .*, folder:PATH, file:PATH"),
    "path without a kind": ({"data": "Makefile"}, "got 'Makefile', .* did you mean file:Makefile"),
    "folder without a kind": ({"data": "tests"}, "got 'tests', .* did you mean folder:tests"),
    "constants": ({"mean": "a,b", "std": "1"}, r"data\.mean: got 'a,b', expected a number per channel"),
    "all are newcomers": ({"newcomers": 1.0}, r"data\.newcomers: got 1\.0, expected"),
    "another device": ({"device": torch.device("mps")}, "run.device: got .*, expected one of: auto, cpu, cuda,"),
    "device below 0": ({"device": "cuda:-1"}, "run.device: got .*, expected one of: auto, cpu, cuda, cuda:N"),
}
DATA: dict[str, tuple[dict[str, Any], str]] = {
    "four arrays": ({"data": (X, Y, X, Y)}, r"^client 0: got one ndarray of shape .*, expected samples and labels \(x"),
    "client of three": ({"data": [(X, Y, Y)]}, "^client 0: got a tuple of 3, expected samples and labels"),
    "pairs": (
        {"data": list(zip(X, Y, strict=True))},
        r"^client 0: got labels of shape \(\) .*, expected one class per",
    ),
    "too few": ({"data": (X[:3], Y[:3])}, "got 2 clients with data.min_samples 10 each, but there are only 3 samples"),
    "too few numbers": (loss(squared_error, clients=60), r"use at most \d+ clients or a smaller data\.min_samples"),
    "no newcomer": ({"newcomers": 0.01}, r"data\.newcomers: got 0\.01, which is 0 of 2 clients"),
    "partition": ({"data": [(X, Y)] * 2, "partition": "iid"}, r"data\.partition: got 'iid', but data are given client"),
    "NaN": (loss(squared_error, data=(X, np.full((80, 2), np.nan))), "targets hold NaN"),
    "complex": (loss(squared_error, data=(X, NUMBERS.astype(complex))), "got targets of .* type complex128"),
    "no images": ({"augment": "crop"}, r"train\.augment: got 'crop', but samples have shape \(4,\)"),
}
MODELS: dict[str, tuple[dict[str, Any], str]] = {
    "class": ({"model": nn.Linear}, r"cannot be built \(.*'in_features'.*\); .*model=lambda: Linear\(…\)"),
    "factory that fails": ({"model": failing}, r"model: cannot be built \(KeyError: 'width'\)$"),
    "mistyped attribute": ({"model": lambda: Mistyped(4, 2)}, "fails on samples of shape .*AttributeError: .* 'leyar'"),
    "number": ({"model": 3}, "model: got 3, expected the name of a model, an nn.Module, or a function"),
    "no module": ({"model": lambda: "a model"}, "the factory returned str"),
    "embedding": ({"model": embedding_model, "data": (abs(X).round(), Y)}, r"type torch\.float32 \(.*Long, Int"),
    "too few outputs": ({"model": lambda: nn.Linear(4, 1)}, r"outputs of shape \(5, 1\) .* per class, 0 to 1$"),
    "nothing to train": ({"model": nn.Flatten}, "no trainable parameters"),
    "complex": ({"model": lambda: Complex(4, 2)}, "model: its parameter other is torch.complex64, but clients"),
    "hook of a parameter": ({"model": lambda: with_hook("register_hook")}, "weight has a hook of its gradient"),
    "hook of a module's parameter": ({"model": with_hook("register_hook")}, "use a hook of the module"),
    "hook after": ({"model": lambda: with_hook("register_post_accumulate_grad_hook")}, "parameter weight has a hook"),
    "checkpoint": ({"model": lambda: Recompute(4, 2)}, r"cannot be trained \(it computes parts of the forward"),
    "no gradient": (
        {"model": lambda: Wrapped(linear(), Tensor.detach)}, r"cannot be trained \(element 0 of tensors does not"
    ),
    "dict": ({"model": lambda: Wrapped(linear(), lambda out: {"a": out})}, "model: returns dict with 'a', expected a"),
    "batch of one": (
        {"model": lambda: nn.Sequential(linear(), nn.BatchNorm1d(2)), "batch_size": 1},
        r"train\.batch_size: got 1, .*use 2 or more, or group norm",
    ),
    "classes of numbers": (loss(squared_error, method="fedproto"), "fedproto sends a mean feature of each class"),
}  # fmt: skip
LOSSES: dict[str, tuple[dict[str, Any], str]] = {
    "mean": (loss(lambda o, t: squared_error(o, t).mean()), r"got shape \(\).*reduction='none'"),
    "number": (loss(lambda o, t: 1.0), "got float"),
    "failure": (loss(lambda o, t: 1 / 0), "loss: fails on outputs of shape .*division by zero"),
    "no gradient": (loss(lambda o, t: squared_error(o, t).detach()), "numbers without a gradient"),
    "name": (loss("mse"), "loss: got 'mse', expected a function"),
    "labels from 1": (
        {"data": (X, np.repeat([1, 2, 3], [60, 19, 1])), "loss": indexed, "model": lambda: nn.Linear(4, 3)},
        r"^loss: fails on .* \(.*out of bounds",
    ),
    "whole numbers": (loss(binary_loss, data=(X, (X[:, :2] > 0).astype(int))), r"^loss: fails on .*torch.int64 \("),
    "metric of numpy": ({"metric": lambda o, t: o.numpy()[:, 0]}, "^metric: got ndarray, expected a tensor"),
    "metric": ({"metric": ("name", 3)}, r"metric: got 3, expected a function .*, or a pair \(name, function\)"),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:.*torch.jit", "ignore:model. has torch.float64")
@pytest.mark.parametrize(
    ("given", "message"),
    [pytest.param(*each, id=name) for table in (SETTINGS, DATA, MODELS, LOSSES) for name, each in table.items()],
)
def test_a_wrong_run_is_refused_before_anything_is_written(given: dict[str, Any], message: str, tmp_path: Path) -> None:
    clients = {} if isinstance(given.get("data"), list) else {"clients": 2}
    settings = {"data": (X, Y), "model": linear, **QUICK, **clients, **given}
    with pytest.raises(PfedlmsError, match=message):
        pfedlms.run(out=tmp_path / "r", **settings)
    assert not (tmp_path / "r").exists()


STUDIES: dict[str, tuple[Any, dict[str, Any], str]] = {
    "no validation": (pfedlms.sweep, {"by": "v_acc", "rounds": [1, 2]}, "by: got v_acc, but data.validation is 0"),
    "no measure": (pfedlms.sweep, {"by": "acc", "rounds": [1, 2]}, "by: got 'acc', expected one of: p_acc, v_acc"),
    "no shared model": (pfedlms.sweep, {"by": "g_acc", "rounds": [1, 2]}, "local has no shared model"),
    "one value": (pfedlms.sweep, {"learning_rate": [0.1]}, "sweep: got no setting with several values"),
    "nothing to sweep": (pfedlms.sweep, {}, "sweep: got no setting with several values"),
    "wrong value": (pfedlms.sweep, {"learning_rate": [0.1, -1]}, "train.learning_rate: got -1"),
    "mistyped": (pfedlms.sweep, {"learning_rat": [0.1, 0.2]}, "did you mean learning_rate"),
    "no data": (pfedlms.compare, {"data": []}, "data: got a list of 0"),
    "no model": (pfedlms.compare, {"data": (X, Y), "model": failing}, "model: cannot be built (KeyError: 'width')"),
    "no methods": (pfedlms.compare, {"methods": []}, "got no run: rows []"),
    "no value": (
        pfedlms.compare,
        {"methods": "stc:sparsity"},
        "got 'method.sparsity', expected a setting and its value",
    ),
    "mistyped in a variant": (pfedlms.compare, {"methods": "pfedlms:treshold=1"}, "did you mean thresholds"),
}


@pytest.mark.parametrize(("call", "given", "message"), STUDIES.values(), ids=STUDIES)
def test_a_wrong_study_is_refused(call: Any, given: dict[str, Any], message: str) -> None:
    few = {key: value for key, value in FEW.items() if key != "method"} if call is pfedlms.compare else FEW
    with pytest.raises(PfedlmsError) as caught:
        call(**{**few, **given})
    assert message in str(caught.value)


def test_the_remedies_that_messages_name_work() -> None:
    several = (X[:, :2] > 0).astype(int)
    pfedlms.run((X, several.astype(np.float32)), linear, loss=binary_loss, **FEW)
    pfedlms.run((X, several), linear, loss=lambda o, t: binary_loss(o, t.float()), **FEW)
    pfedlms.run((X, Y), lambda: nn.Sequential(linear(), nn.GroupNorm(1, 2)), **{**FEW, "batch_size": 1})


class Weighted(nn.Module):
    """A loss that weights its parts by a parameter, as uncertainty weighting does."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.zeros(()))

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return squared_error(outputs, targets) * torch.exp(-self.scale) + self.scale


def test_parameters_that_a_loss_has_beside_the_model_are_warned_of() -> None:
    """They are never trained: those of the loss, and those of the module that was given, which clients copy."""
    given = linear()
    for own in (Weighted(), lambda o, t: squared_error(o, t) + given.weight.norm()):
        with pytest.warns(UserWarning, match="loss: depends on parameters besides the outputs, .* stay as they are"):
            pfedlms.run((X, NUMBERS), given, loss=own, **FEW)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pfedlms.run((X, NUMBERS), given, loss=Weighted().requires_grad_(False), **FEW)
        pfedlms.run((X, NUMBERS), given, loss=lambda o, t: squared_error(o, t) * given.weight.norm().detach(), **FEW)


def test_a_custom_loss_without_its_function_is_refused() -> None:
    with pytest.raises(UsageError, match=r"train\.loss: 'custom' stands for a function given in Python"):
        pfedlms.experiment.prepare.prepare(pfedlms.load_config(None, {"train": {"loss": "custom"}}))


@pytest.mark.parametrize("seeds", [[], 0, [-1], ["x"]])
def test_a_wrong_number_of_seeds_is_refused(seeds: Any) -> None:
    with pytest.raises(ConfigError, match=r"and seeds (\[\]|0);|run\.seed: got"):
        pfedlms.compare(seeds=seeds)


# --- settings that have no effect beside others ---

CLIENTS = [(X[:40], Y[:40]), (X[40:], Y[40:])]


WARNINGS: dict[str, tuple[Any, dict[str, Any], str | None]] = {
    "momentum": ((X, Y), {"optimizer": "adamw", "momentum": 0.9, "learning_rate": 0.001}, "train.momentum: 0.9 has no"),
    "decay": ((X, Y), {"decay": 0.5}, "train.decay: 0.5 has no effect with train.schedule = constant; it is for step"),
    "decay_every": ((X, Y), {"decay_every": 7, "schedule": "cosine"}, "train.decay_every: 7 has no effect with"),
    "alpha, iid": (
        (X, Y),
        {"alpha": 0.1, "partition": "iid"},
        "data.alpha: 0.1 has no effect with data.partition = iid",
    ),
    "min_samples": (CLIENTS, {"min_samples": 5}, "data.min_samples: 5 has no effect with data given client by client"),
    "tokens": ((X, Y), {"tokens": "bytes"}, "data.tokens: bytes has no effect with data that are no text; leave it"),
    "column": ((X, Y), {"label_column": "z"}, "data.label_column: z has no effect with data.dataset = custom; it is"),
    "hidden": ((X, Y), {"hidden": 7}, "model.hidden: 7 has no effect with model.name = custom; leave it out"),
    "mean": ((X, Y), {"mean": "0.1"}, "data.mean: 0.1 has no effect with data.dataset = custom; it is for"),
    "alpha, held": (CLIENTS, {"alpha": 0.1}, "data.alpha: 0.1 has no effect with data.partition = given; it is for"),
    "classes": (
        (X, Y),
        {"classes_per_client": 1},
        "data.classes_per_client: 1 has no effect with data.partition = diri",
    ),
    "rate of sgd": ((X, Y), {"optimizer": "adamw"}, "train.learning_rate: 0.1 is what sgd takes; adamw wants 0.001"),
    "all used": ((X, Y), {"momentum": 0.9, "alpha": 0.9, "schedule": "step", "decay": 0.5, "decay_every": 2}, None),
    "quantity": ((X, Y), {"alpha": 0.9, "partition": "quantity"}, None),
    "classes of classes": ((X, Y), {"classes_per_client": 1, "partition": "classes"}, None),
}


@pytest.mark.parametrize(("data", "settings", "text"), WARNINGS.values(), ids=list(WARNINGS))
def test_a_setting_without_effect_is_warned_about_once(data: Any, settings: Any, text: str | None) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pfedlms.run(data, linear, **settings, **(QUICK if data is CLIENTS else FEW))
    assert len(caught) == (text is not None)
    assert all(str(each.message).startswith(str(text)) for each in caught)


def test_a_batch_of_far_more_than_all_samples_is_warned_of() -> None:
    with pytest.warns(UserWarning, match="batch_size: 900 is far more than the 80 samples; a batch is always full"):
        pfedlms.run((X, Y), linear, **{**FEW, "batch_size": 900})


def test_a_resumed_run_does_not_repeat_the_warning(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=r"train\.decay: 0\.5 has no effect"):
        pfedlms.run((X, Y), linear, decay=0.5, out=tmp_path / "r", **FEW)
    done = pfedlms.load(tmp_path / "r")
    assert pfedlms.resume(tmp_path / "r").summary == done.summary  # it has finished, so no data are needed
    edit_config(tmp_path / "r", "rounds = 1", "rounds = 2")
    pfedlms.resume(tmp_path / "r", (X, Y), linear)  # warnings are errors here
    assert load_config(tmp_path / "r" / "config.toml").given >= {
        "train.decay"
    }  # a new run from this file would warn again


def test_a_study_warns_once_for_all_its_runs() -> None:
    settings = {**SHORT, "rounds": 1, "clients": 2, "partition": "iid", "alpha": 0.3, "learning_rate": 0.05}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pfedlms.compare((X, Y), linear, methods="local,fedavg:optimizer=adamw:momentum=0.9", seeds=2, **settings)
    texts = [str(each.message) for each in caught]
    assert sorted(text.partition(":")[0] for text in texts) == ["data.alpha", "train.momentum"]


def test_a_number_of_clients_that_contradicts_the_data_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "t.npz"
    np.savez(file, x=X, y=Y, client=np.arange(80) // 20)
    with pytest.raises(
        DataError, match=r"data\.clients: got 7, but the data say whose each sample is and name 4 clients"
    ):
        pfedlms.run(f"file:{file}", clients=7, **QUICK)
    for settings, clients in (({}, 4), ({"clients": 4}, 4), ({"clients": 3, "partition": "iid"}, 3)):
        assert pfedlms.run(f"file:{file}", **settings, **QUICK).summary["clients"] == clients


@pytest.mark.filterwarnings("ignore:chosen by p_acc")
def test_a_study_checks_all_its_data_before_it_trains(tmp_path: Path) -> None:
    """The second value asks for more clients than there are samples for."""
    trained: list[str] = []
    recorder = SimpleNamespace(on_round=lambda run, record: trained.append(run.name))
    for data, model in (((X, Y), linear), ("digits", None)):
        settings = {**QUICK, "clients": [2, 2000], "callbacks": [recorder], "out": tmp_path / "s"}
        with pytest.raises(DataError, match=r"data\.clients: got 2000"):
            pfedlms.sweep(data, model, **settings)
    assert not trained
    assert not (tmp_path / "s").exists()
