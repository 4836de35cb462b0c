"""Runs with another optimizer, schedule, loss or kind of module than the default: resumed, measured, refused."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from small import Crash, Crashing, stored_metrics
from torch import Tensor, nn

import pfedlms
from pfedlms.errors import PfedlmsError, RunDirectoryError, UsageError

FEATURES, WIDTH, CLIENTS = 6, 2, 4
QUICK: dict[str, Any] = {"clients": CLIENTS, "local_steps": 4, "batch_size": 16, "threads": 1}


def samples(count: int = 400) -> np.ndarray:
    return np.random.default_rng(0).normal(size=(count, FEATURES))


def regression(count: int = 400) -> tuple[np.ndarray, np.ndarray]:
    """A linear map of the samples, with noise of standard deviation 0.1."""
    draw, x = np.random.default_rng(1), samples(count)
    return x, x @ draw.normal(size=(FEATURES, WIDTH)) + 0.1 * draw.normal(size=(count, WIDTH))


def classes(count: int = 400) -> tuple[np.ndarray, np.ndarray]:
    x = samples(count)
    return x, (x[:, 0] > 0).astype(np.int64) + (x[:, 1] > 0)


def linear() -> nn.Module:
    return nn.Linear(FEATURES, WIDTH)


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.ReLU(), nn.Linear(8, 3))


def squares(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).square().mean(dim=-1)


def closeness(outputs: Tensor, targets: Tensor) -> Tensor:
    return ((outputs - targets).abs() < 0.5).float().mean(dim=-1)


def assert_same(one: Path, other: Path) -> None:
    assert stored_metrics(one) == stored_metrics(other)
    states = [torch.load(folder / "checkpoint.pt", weights_only=True)["federation"] for folder in (one, other)]
    for name in ("params", "momentum"):
        assert torch.equal(states[0][name], states[1][name])


def test_resumed_with_a_loss_of_ones_own_is_uninterrupted(tmp_path: Path) -> None:
    settings = {**QUICK, "method": "fedavg", "rounds": 6, "checkpoint_every": 2}
    own = {"loss": squares, "metric": closeness}
    pfedlms.run(regression(), linear, out=tmp_path / "whole", **own, **settings)
    with pytest.raises(Crash):
        pfedlms.run(regression(), linear, out=tmp_path / "cut", callbacks=[Crashing(3)], **own, **settings)
    with pytest.raises(UsageError, match=r"this run's loss was given in Python.*loss=loss"):
        pfedlms.resume(tmp_path / "cut", regression(), linear)
    with pytest.raises(UsageError, match=r"this run's metric was given in Python"):
        pfedlms.resume(tmp_path / "cut", regression(), linear, loss=squares)
    pfedlms.resume(tmp_path / "cut", regression(), linear, **own)
    assert_same(tmp_path / "cut", tmp_path / "whole")


def test_a_loss_is_not_taken_up_half_way(tmp_path: Path) -> None:
    pfedlms.run(classes(), network, out=tmp_path / "run", rounds=2, **QUICK)
    config = tmp_path / "run" / "config.toml"
    config.write_text(config.read_text().replace("rounds = 2", "rounds = 3"))
    with pytest.raises(UsageError, match="this run has no loss of its own; leave loss out"):
        pfedlms.resume(tmp_path / "run", classes(), network, loss=squares)


@pytest.mark.parametrize(("schedule", "longer"), [("cosine", False), ("step", True), ("constant", True)])
def test_a_run_can_be_prolonged_where_its_rates_do_not_depend_on_its_length(
    schedule: str, longer: bool, tmp_path: Path
) -> None:
    settings = {**QUICK, "schedule": schedule, "method": "fedavg", **({"decay_every": 2} if schedule == "step" else {})}
    pfedlms.run(classes(), network, out=tmp_path / "run", rounds=3, **settings)
    config = tmp_path / "run" / "config.toml"
    config.write_text(config.read_text().replace("rounds = 3", "rounds = 5"))
    if not longer:
        with pytest.raises(RunDirectoryError, match=r"it was made with train\.rounds = 3; put that back"):
            pfedlms.resume(tmp_path / "run", classes(), network)
        return
    pfedlms.resume(tmp_path / "run", classes(), network)
    pfedlms.run(classes(), network, out=tmp_path / "whole", rounds=5, **settings)
    assert_same(tmp_path / "run", tmp_path / "whole")


# --- a loss of one's own ---


def test_regression_reaches_what_plain_pytorch_reaches() -> None:
    """FedAvg against one model on all training samples: both to the noise, whose variance is 0.01."""
    result = pfedlms.run(
        regression(2000), linear, method="fedavg", loss=squares, rounds=40, optimizer="adamw", learning_rate=0.02,
        weight_decay=0.0, schedule="cosine", **QUICK,
    )  # fmt: skip
    data = result.federation.data
    train, test = (torch.from_numpy(np.concatenate(held)) for held in (data.train, data.test))
    model = linear()
    optimiser = torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.0)
    for _ in range(600):
        optimiser.zero_grad()
        squares(model(data.x[train]), data.y[train]).mean().backward()
        optimiser.step()
    with torch.no_grad():
        plain = float(squares(model(data.x[test]), data.y[test]).mean())
    assert plain == pytest.approx(0.01, rel=0.15)
    assert result.metrics[-1]["test_loss"] == pytest.approx(plain, rel=0.05)
    assert result.metrics[-1]["p_acc"] == -result.metrics[-1]["test_loss"]
    assert result.summary["metric"] == result.metrics[-1]["metric"] == "-loss"
    assert result.accuracy == pytest.approx(np.mean([record["p_acc"] for record in result.metrics[-10:]]))


def test_scores_are_means_over_samples() -> None:
    """By hand, from the models."""
    result = pfedlms.run(
        regression(), linear, method="local", loss=squares, metric=closeness, rounds=3, validation=0.2, **QUICK
    )
    data, total, per_client = result.federation.data, 0.0, []
    for model, held in zip(result.models, data.test, strict=True):
        own = linear()
        own.load_state_dict(model)
        with torch.no_grad():
            scores = closeness(own(data.x[torch.from_numpy(held)]), data.y[torch.from_numpy(held)])
        total += float(scores.sum())
        per_client.append(float(scores.mean()))
    assert result.summary["metric"] == "closeness"
    assert result.metrics[-1]["p_acc"] == pytest.approx(total / sum(map(len, data.test)))
    assert result.metrics[-1]["client_acc"] == pytest.approx(per_client)
    assert 0 < result.metrics[-1]["v_acc"] <= 1
    assert result.validation_accuracy is not None


def test_a_pool_without_classes_is_dealt_out_evenly() -> None:
    x, y = regression(402)
    result = pfedlms.run((x, y), linear, method="local", loss=squares, rounds=1, **QUICK)
    data = result.federation.data
    held = [np.sort(np.concatenate(both)) for both in zip(data.train, data.test, strict=True)]
    assert sorted(map(len, held)) == [100, 100, 101, 101]
    assert np.array_equal(np.sort(np.concatenate(held)), np.arange(402))
    assert not np.array_equal(held[0], np.arange(len(held[0])))
    assert torch.equal(data.y, torch.from_numpy(y).float())
    assert data.classes == 0


def test_classes_with_another_loss_keep_accuracy() -> None:
    smooth = nn.CrossEntropyLoss(label_smoothing=0.1, reduction="none")
    result = pfedlms.run(classes(), network, method="fedproto", loss=smooth, rounds=20, alpha=10.0, **QUICK)
    assert "metric" not in result.summary
    assert 70 < result.accuracy <= 100


def test_a_model_by_name_has_as_many_outputs_as_a_target() -> None:
    result = pfedlms.run(regression(), "dnn", method="fedavg", loss=squares, hidden=8, rounds=2, **QUICK)
    assert result.federation.model.layout.dim == FEATURES * 8 + 8 + 8 * WIDTH + WIDTH


NO_NUMBERS = np.full((400, 2), np.nan)


@pytest.mark.parametrize(
    ("targets", "given", "message"),
    [
        (
            None,
            {"loss": lambda outputs, targets: squares(outputs, targets).mean()},
            r"got shape \(\).*reduction='none'",
        ),
        (None, {"loss": lambda outputs, targets: squares(outputs, targets)[:2]}, "expected one number per sample"),
        (None, {"loss": lambda outputs, targets: 1.0}, "got float"),
        (None, {"loss": lambda outputs, targets: 1 / 0}, "loss: fails on outputs of shape .*division by zero"),
        (None, {"loss": lambda outputs, targets: squares(outputs, targets).detach()}, "numbers without a gradient"),
        (None, {"loss": lambda outputs, targets: outputs > targets}, "numbers without a gradient"),
        (None, {"loss": "mse"}, "loss: got 'mse', expected a function"),
        (NO_NUMBERS, {}, "targets hold NaN"),
        (NO_NUMBERS.astype(complex), {}, "got targets of type complex128, expected an array of numbers"),
        (None, {"clients": 200}, r"use at most \d+ clients or a smaller data.min_samples"),
        (None, {"method": "fedproto"}, "fedproto sends a mean feature of each class, but these targets are no classes"),
    ],
)
def test_a_wrong_loss_or_target_is_named(targets: Any, given: dict[str, Any], message: str) -> None:
    data = regression() if targets is None else (samples(), targets)
    with pytest.raises(PfedlmsError, match=message):
        pfedlms.run(data, linear, rounds=1, **{**QUICK, "loss": squares, **given})


def test_a_loss_named_in_a_file_alone_is_refused() -> None:
    with pytest.raises(UsageError, match=r"train\.loss: 'custom' stands for a function given in Python"):
        pfedlms.experiment.prepare.prepare(pfedlms.load_config(None, {"train": {"loss": "custom"}}))


# --- modules as they come ---


class Named(nn.Module):
    """Returns what `wrap` makes of the outputs."""

    def __init__(self, wrap: Any = lambda outputs: outputs) -> None:
        super().__init__()
        self.layers, self.wrap = network(), wrap

    def forward(self, x: Tensor) -> Any:
        return self.wrap(self.layers(x))


ALIKE = {
    "a dict": lambda: Named(lambda outputs: {"loss": None, "logits": outputs}),
    "an object": lambda: Named(lambda outputs: SimpleNamespace(logits=outputs)),
    "outputs in float64": lambda: Named(lambda outputs: outputs.double()),
}


@pytest.mark.parametrize("factory", ALIKE.values(), ids=ALIKE)
def test_outputs_may_be_wrapped(factory: Any) -> None:
    """And are trained as if they were not."""
    settings = {**QUICK, "rounds": 3, "seed": 1}
    wrapped, bare = pfedlms.run(classes(), factory, **settings), pfedlms.run(classes(), Named, **settings)
    for own, other in zip(wrapped.models, bare.models, strict=True):
        for name, value in other.items():
            torch.testing.assert_close(own[name], value)


@pytest.mark.parametrize("kind", ["double", "half", "bfloat16"])
def test_parameters_of_another_type_become_float32(kind: str) -> None:
    module = getattr(nn.Sequential(nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)), kind)()
    with pytest.warns(UserWarning, match=r"model: has torch\.\w+; clients train in float32"):
        result = pfedlms.run(classes(), module, rounds=2, **QUICK)
    assert {value.dtype for value in result.models[0].values()} == {torch.float32, torch.int64}
    assert next(module.parameters()).dtype != torch.float32  # which is the caller's


class Casting(Named):
    def forward(self, x: Tensor) -> Any:
        return self.layers(x.double())


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:.*torch.jit", "ignore:model. has torch.float64")
@pytest.mark.parametrize(
    ("model", "message"),
    [
        (lambda: torch.jit.script(network()), r"model: is scripted or traced .*give the module it was made from"),
        (lambda: nn.Sequential(torch.jit.trace(network(), torch.zeros(1, FEATURES))), "model: is scripted or traced"),
        (lambda: Named(lambda outputs: {"scores": outputs}), "model: returns dict with 'scores', expected a tensor"),
        (lambda: Named(lambda outputs: (outputs,)), "model: returns tuple, expected a tensor"),
        (lambda: Casting().double(), "its parameters are float32 here, so leave casts to other types out of it"),
    ],
)
def test_modules_that_are_not_taken_get_a_remedy(model: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        pfedlms.run(classes(), model, rounds=1, **QUICK)


def lazy() -> nn.Module:
    return nn.Sequential(nn.LazyLinear(8), nn.LazyBatchNorm1d(), nn.ReLU(), nn.LazyLinear(3))


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
def test_lazy_modules_are_initialised_by_the_runs_seed() -> None:
    first, again, other = (
        pfedlms.run(classes(), model, rounds=1, seed=seed, **QUICK).federation.model.initial
        for model, seed in ((lazy, 0), (lazy, 0), (lazy, 1))
    )
    assert first.shape == (FEATURES * 8 + 8 + 16 + 8 * 3 + 3,)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert pfedlms.run(classes(), nn.LazyLinear(3), rounds=1, **QUICK).federation.model.initial.shape == (21,)
    with pytest.raises(UsageError, match=r"model: cannot be copied .*give a function that makes it"):
        pfedlms.run(classes(), lazy(), rounds=1, **QUICK)  # buffers that are not there yet


def test_batch_norm_with_a_batch_of_one_gets_a_remedy() -> None:
    settings = {**QUICK, "batch_size": 1, "rounds": 1}
    normalised = nn.Sequential(nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    with pytest.raises(UsageError, match=r"train\.batch_size: got 1, .*use 2 or more, or group norm"):
        pfedlms.run(classes(), normalised, **settings)
    grouped = nn.Sequential(nn.Linear(FEATURES, 8), nn.GroupNorm(2, 8), nn.Linear(8, 3))
    assert pfedlms.run(classes(), grouped, **settings).accuracy > 0
