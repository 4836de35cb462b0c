"""Runs with a custom loss, metric or module, or another schedule: how they resume, what is measured and refused."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from small import Crash, CrashAt, Wrapped, X, Y, assert_same_run, edit_config, linear, squared_error
from torch import Tensor, nn

import pfedlms
from factories import same
from pfedlms.errors import RunDirectoryError, UsageError

QUICK: dict[str, Any] = {"clients": 4, "local_steps": 4, "batch_size": 16, "threads": 1, "min_samples": 2}
CLASSES = (X, Y)
NUMBERS = (X, X @ np.random.default_rng(1).normal(size=(4, 2)).astype(np.float32))


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def closeness(outputs: Tensor, targets: Tensor) -> Tensor:
    return ((outputs - targets).abs() < 0.5).float().mean(dim=-1)


def test_a_resumed_run_with_a_custom_loss_equals_an_uninterrupted_run(tmp_path: Path) -> None:
    settings = {**QUICK, "method": "fedavg", "rounds": 6, "checkpoint_every": 2}
    own = {"loss": squared_error, "metric": closeness}
    pfedlms.run(NUMBERS, linear, out=tmp_path / "whole", **own, **settings)
    with pytest.raises(Crash):
        pfedlms.run(NUMBERS, linear, out=tmp_path / "cut", callbacks=[CrashAt(3)], **own, **settings)
    with pytest.raises(UsageError, match=r"this run's loss was given in Python.*loss=loss"):
        pfedlms.resume(tmp_path / "cut", NUMBERS, linear)
    with pytest.raises(UsageError, match=r"this run's metric was given in Python"):
        pfedlms.resume(tmp_path / "cut", NUMBERS, linear, loss=squared_error)
    pfedlms.resume(tmp_path / "cut", NUMBERS, linear, **own)
    assert_same_run(tmp_path / "cut", tmp_path / "whole")


def test_a_run_without_a_custom_loss_is_not_resumed_with_one(tmp_path: Path) -> None:
    pfedlms.run(CLASSES, network, out=tmp_path / "run", rounds=2, **QUICK)
    edit_config(tmp_path / "run", "rounds = 2", "rounds = 3")
    with pytest.raises(UsageError, match="this run has no loss of its own; leave loss out"):
        pfedlms.resume(tmp_path / "run", CLASSES, network, loss=nn.CrossEntropyLoss(reduction="none"))


class Noisy(nn.Linear):
    """Draws from PyTorch's generator in every call, also in an evaluation."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + torch.randn(4))


@pytest.mark.parametrize("method", ["fedavg", "fedproto"])
def test_a_module_with_random_draws_depends_on_the_seed_of_the_run_only(method: str) -> None:
    summaries = []
    for seed in (1, 2):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            before = torch.get_rng_state()
            result = pfedlms.run(CLASSES, lambda: Noisy(4, 2), method=method, rounds=2, **QUICK)
            assert torch.equal(before, torch.get_rng_state())
        summaries.append((result.accuracy, [model["weight"].tolist() for model in result.models]))
    assert summaries[0] == summaries[1]


class Registered(nn.Module):
    """Two layers, the head registered before or after the body."""

    def __init__(self, head_first: bool) -> None:
        super().__init__()
        for name in ("head", "body") if head_first else ("body", "head"):
            setattr(self, name, nn.Linear(4, 8) if name == "body" else nn.Linear(8, 2))

    def forward(self, x: Tensor) -> Any:
        return self.head(self.body(x).relu())


@pytest.mark.parametrize("method", ["fedper", "fedrep", "fedproto"])
def test_a_head_that_is_registered_before_the_body_is_warned_of(method: str) -> None:
    settings = {**QUICK, "method": method, "rounds": 1}
    pfedlms.run(CLASSES, Registered(head_first=False), **settings)
    pfedlms.run(CLASSES, Registered(head_first=True), **{**settings, "method": "fedavg"})
    with pytest.warns(
        UserWarning, match=rf"head of {method} is what was registered last, body, but head is called after"
    ):
        pfedlms.run(CLASSES, Registered(head_first=True), **settings)


@pytest.mark.parametrize(("schedule", "allowed"), [("cosine", False), ("step", True), ("constant", True)])
def test_a_run_can_be_extended_unless_its_rates_depend_on_its_length(
    schedule: str, allowed: bool, tmp_path: Path
) -> None:
    settings = {**QUICK, "schedule": schedule, "method": "fedavg", **({"decay_every": 2} if schedule == "step" else {})}
    pfedlms.run(CLASSES, network, out=tmp_path / "run", rounds=3, **settings)
    edit_config(tmp_path / "run", "rounds = 3", "rounds = 5")
    if not allowed:
        with pytest.raises(RunDirectoryError, match=r"it was made with train\.rounds = 3; put that back"):
            pfedlms.resume(tmp_path / "run", CLASSES, network)
        return
    pfedlms.resume(tmp_path / "run", CLASSES, network)
    pfedlms.run(CLASSES, network, out=tmp_path / "whole", rounds=5, **settings)
    assert_same_run(tmp_path / "run", tmp_path / "whole")


def test_classes_with_another_loss_keep_accuracy() -> None:
    smooth = nn.CrossEntropyLoss(label_smoothing=0.1, reduction="none")
    result = pfedlms.run((X, X[:, 0] > 0), network, method="fedproto", loss=smooth, rounds=20, alpha=10.0, **QUICK)
    assert "metric" not in result.summary
    assert 70 < result.accuracy <= 100


def test_without_a_metric_the_score_is_minus_the_loss() -> None:
    """A model by name has as many outputs as a target has numbers; samples without classes are partitioned evenly."""
    result = pfedlms.run(NUMBERS, "dnn", method="fedavg", loss=squared_error, hidden=8, rounds=2, **QUICK)
    assert result.federation.model.layout.dim == 4 * 8 + 8 + 8 * 2 + 2
    data = result.federation.data
    assert (data.classes, data.scheme, data.samples) == (0, "iid", (15, 15, 15, 15))
    assert torch.equal(data.y, torch.from_numpy(NUMBERS[1]))
    assert result.metrics[-1]["p_acc"] == -result.metrics[-1]["test_loss"]
    assert result.summary["metric"] == result.metrics[-1]["metric"] == "-loss"


WRAPPERS = {
    "a dict": lambda outputs: {"loss": None, "logits": outputs},
    "an object": lambda outputs: SimpleNamespace(logits=outputs),
    "outputs in float64": lambda outputs: outputs.double(),
}


@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
def test_a_model_with_wrapped_outputs_trains_like_one_without(wrap: Any) -> None:
    settings = {**QUICK, "rounds": 3, "seed": 1}
    wrapped, bare = (
        pfedlms.run(CLASSES, lambda made=made: Wrapped(network(), made), **settings) for made in (wrap, lambda x: x)
    )
    for own, other in zip(wrapped.models, bare.models, strict=True):
        for name, value in other.items():
            torch.testing.assert_close(own[name], value)


@pytest.mark.filterwarnings("ignore")  # of the compiler, where it meets a rule of vmap
def test_a_compiled_module_trains_like_its_module() -> None:
    settings = {**QUICK, "method": "fedavg", "rounds": 2}
    plain = pfedlms.run(CLASSES, network, **settings)
    compiled = pfedlms.run(CLASSES, lambda: torch.compile(network(), backend="eager"), **settings)
    for own, other in zip(plain.models, compiled.models, strict=True):
        torch.testing.assert_close({f"_orig_mod.{name}": value for name, value in own.items()}, dict(other))


@pytest.mark.parametrize("kind", ["double", "half"])
def test_parameters_of_another_type_become_float32(kind: str) -> None:
    module = getattr(nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)), kind)()
    with pytest.warns(UserWarning, match=r"model: has torch\.\w+; clients train in float32"):
        result = pfedlms.run(CLASSES, module, rounds=2, **QUICK)
    assert {value.dtype for value in result.models[0].values()} == {torch.float32, torch.int64}
    assert next(module.parameters()).dtype != torch.float32  # the caller's module is not changed


def lazy() -> nn.Module:
    return nn.Sequential(nn.LazyLinear(8), nn.LazyBatchNorm1d(), nn.ReLU(), nn.LazyLinear(2))


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
def test_lazy_modules_are_initialised_by_the_seed_of_the_run(tmp_path: Path) -> None:
    run = pfedlms.run(CLASSES, lazy, rounds=1, seed=0, out=tmp_path, **QUICK)
    first = run.federation.model.initial
    again, other = (
        pfedlms.run(CLASSES, lazy, rounds=1, seed=seed, **QUICK).federation.model.initial for seed in (0, 1)
    )
    loaded = pfedlms.load(tmp_path, CLASSES, lazy)
    assert same(loaded.model(0).state_dict(), run.models[0])
    assert first.shape == (4 * 8 + 8 + 16 + 8 * 2 + 2,)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert pfedlms.run(CLASSES, nn.LazyLinear(2), rounds=1, **QUICK).federation.model.initial.shape == (10,)
    with pytest.raises(UsageError, match=r"model: cannot be copied .*give a function that makes it"):
        pfedlms.run(CLASSES, lazy(), rounds=1, **QUICK)  # its buffers do not exist yet
