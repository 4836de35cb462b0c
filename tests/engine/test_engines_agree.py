"""Stacked and reference engine give the same federation, and both the one that a plain PyTorch loop gives."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from fractions import Fraction
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import factories
from factories import Post, seeded
from pfedlms.data import FederatedData, batch_positions
from pfedlms.data.batches import Augmentation
from pfedlms.engine import Evaluation
from pfedlms.methods import METHODS

ROUNDS, CLIENTS, SEED = 5, 10, 3
REFERENCE, UNEVEN, STACKED = 1, 7, 0
PULLED = ["pfedlms", "pfed1bs", "fedproto"]  # `ditto` uses running statistics for two models, `fedprox` is FedAvg


def dnn() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 24), nn.ReLU(), nn.Linear(24, 10))


def with_batch_norm() -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, 20), nn.BatchNorm1d(20), nn.ReLU(), nn.Linear(20, 12), nn.BatchNorm1d(12),
        nn.ReLU(), nn.Linear(12, 10),
    )  # fmt: skip


MODELS = {"dnn": dnn, "batch norm": with_batch_norm}


@pytest.fixture
def digits() -> FederatedData:
    return factories.digits(CLIENTS, SEED)


federate = partial(factories.federation, seed=SEED, local_steps=2, weight_decay=1e-3)


@dataclass
class Played:
    """Everything that can be seen of a federation from outside."""

    frames: list[bytes]
    correct: list[tuple[int, ...]] = field(default_factory=list)
    shared: list[tuple[int, ...] | None] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    traffic: list[tuple[int, ...]] = field(default_factory=list)
    state: dict[str, Any] = field(default_factory=dict)


def play(name: str, data: FederatedData, module: nn.Module, rounds: int = ROUNDS, **options: Any) -> Played:
    post = Post()
    federation = federate(name, data, module, link=post, **options)
    seen = Played(post.frames)
    federation.start()
    for _ in range(rounds):
        report = federation.play_round(evaluate_global=True)
        seen.losses.append(report.loss)
        seen.traffic.append(report.traffic.as_tuple())
        seen.shared.append(report.global_evaluation.correct if report.global_evaluation else None)
        seen.correct.append(federation.evaluate().correct)
    seen.state = federation.state()
    return seen


def tensors(value: Any, path: str = "") -> dict[str, Tensor]:
    """All tensors of a nested state, by their path."""
    if isinstance(value, Tensor):
        return {path: value}
    if isinstance(value, dict):
        return {name: found for key, part in value.items() for name, found in tensors(part, f"{path}/{key}").items()}
    return {}


@pytest.mark.parametrize("factory", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("name", METHODS)
def test_engines_agree(name: str, factory: Callable[[], nn.Module], digits: FederatedData) -> None:
    """Tolerance on parameters: none, every bit is the same. Momentum, running statistics and server state too."""
    module = seeded(factory)
    reference = play(name, digits, module, cohort_size=REFERENCE, momentum=0.5)
    for cohort_size in (STACKED, UNEVEN):
        other = play(name, digits, module, cohort_size=cohort_size, momentum=0.5)
        assert other.frames == reference.frames
        assert other.correct == reference.correct
        assert other.shared == reference.shared
        assert other.losses == reference.losses
        assert other.traffic == reference.traffic
        expected = tensors(reference.state)
        for path, value in tensors(other.state).items():
            assert torch.equal(value, expected[path]), path
    exchanges = len(federate(name, digits, module).method.exchanges)
    assert len(reference.frames) == ROUNDS * CLIENTS * exchanges
    moved = reference.state["params"] - nn.utils.parameters_to_vector(module.parameters())
    assert (moved.abs().amax(dim=1) > 0.01).all()  # everybody learned something, so there was something to agree on


@pytest.mark.parametrize("name", PULLED)
def test_no_pull_is_local_exactly(name: str, digits: FederatedData) -> None:
    """With running statistics; the battery of methods has the model without them."""
    module = seeded(with_batch_norm)
    alone = play("local", digits, module, momentum=0.5)
    unpulled = play(name, digits, module, momentum=0.5, strength=0.0)
    expected = tensors(alone.state)
    for path, value in tensors(unpulled.state).items():
        assert torch.equal(value, expected[path]), path
    assert unpulled.correct == alone.correct
    assert unpulled.losses == alone.losses
    assert unpulled.frames  # it still talks


def plain_loop(
    module: nn.Module, data: FederatedData, client: int, steps: int, *, momentum: float, weight_decay: float
) -> nn.Module:
    """One client's training as anybody would write it: a module, torch's own optimiser, one batch after another."""
    model = copy.deepcopy(module).train()
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum, weight_decay=weight_decay)
    own = data.train[client]
    for positions in batch_positions(SEED, client, len(own), 0, steps, 16):
        chosen = torch.from_numpy(own[positions])
        optimiser.zero_grad()
        F.cross_entropy(model(data.x[chosen]), data.y[chosen]).backward()
        optimiser.step()
    return model.eval()


@pytest.mark.parametrize("factory", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("cohort_size", [STACKED, REFERENCE])
@pytest.mark.parametrize(("momentum", "weight_decay"), [(0.0, 0.0), (0.9, 1e-2)])
def test_local_is_a_plain_pytorch_loop(
    factory: Callable[[], nn.Module], cohort_size: int, momentum: float, weight_decay: float, digits: FederatedData
) -> None:
    """And it takes (R + 1) E steps: E before the first round, then E in each."""
    rounds, local_steps = 4, 3
    module = seeded(factory)
    options = {"momentum": momentum, "weight_decay": weight_decay}
    federation = federate("local", digits, module, cohort_size=cohort_size, local_steps=local_steps, **options)
    federation.start()
    for _ in range(rounds):
        federation.play_round()
    measured = federation.evaluate()
    for client in (0, CLIENTS - 1):
        expected = plain_loop(module, digits, client, (rounds + 1) * local_steps, **options)
        got = federation.client_state_dict(client)
        assert got.keys() == expected.state_dict().keys()
        for name, value in expected.state_dict().items():
            torch.testing.assert_close(got[name], value, rtol=0, atol=1e-5)
        held = torch.from_numpy(digits.test[client])
        assert measured.correct[client] == int((expected(digits.x[held]).argmax(dim=1) == digits.y[held]).sum())
    one_more = plain_loop(module, digits, 0, (rounds + 1) * local_steps + 1, **options).state_dict()
    assert (
        max(float((got - one_more[name]).abs().max()) for name, got in federation.client_state_dict(0).items()) > 1e-4
    )


@pytest.mark.parametrize("cohort_size", [STACKED, REFERENCE])
def test_augmented_training_is_a_plain_loop_on_changed_images(cohort_size: int, digits: FederatedData) -> None:
    """Every client and step has draws of its own, from the start on; those are taken from `Augmentation` itself."""
    rounds, local_steps = 2, 3
    module = seeded(dnn)
    options = {"local_steps": local_steps, "weight_decay": 0.0, "augment": "crop+flip"}
    federation = federate("local", digits, module, cohort_size=cohort_size, **options)
    federation.start()
    for _ in range(rounds):
        federation.play_round()
    steps = (rounds + 1) * local_steps
    for client in (0, CLIENTS - 1):
        model, own = copy.deepcopy(module), digits.train[client]
        optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
        draws = Augmentation(SEED, crop=True, flip=True).draws((client,), 0, steps, 16, digits.x)
        for positions, changes in zip(batch_positions(SEED, client, len(own), 0, steps, 16), draws, strict=True):
            chosen = torch.from_numpy(own[positions])
            optimiser.zero_grad()
            x = Augmentation.apply(digits.x[chosen].unsqueeze(0), changes).squeeze(0)
            F.cross_entropy(model(x), digits.y[chosen]).backward()
            optimiser.step()
        for name, value in federation.client_state_dict(client).items():
            torch.testing.assert_close(value, model.state_dict()[name], rtol=0, atol=1e-5)


def gradient_of(module: nn.Module, flat: Tensor, data: FederatedData, client: int, step: int) -> Tensor:
    """∇f_k at a flat model, on the batch of local step `step`, by autograd on the module itself."""
    model = copy.deepcopy(module)
    nn.utils.vector_to_parameters(flat.clone(), model.parameters())
    own = data.train[client]
    chosen = torch.from_numpy(own[batch_positions(SEED, client, len(own), step, 1, 16)[0]])
    loss = F.cross_entropy(model(data.x[chosen]), data.y[chosen])
    return torch.cat([part.reshape(-1) for part in torch.autograd.grad(loss, list(model.parameters()))])


def one_step_rounds(name: str, data: FederatedData, module: nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    """States after the start and after round 1, with E = 1, momentum 0.9 and μ = 0.01."""
    federation = federate(name, data, module, local_steps=1, momentum=0.9, weight_decay=0.01)
    federation.start()
    before = federation.state()
    federation.play_round()
    return before, federation.state()


def test_momentum_is_kept_with_a_personal_model(digits: FederatedData) -> None:
    module = seeded(dnn)
    before, after = one_step_rounds("local", digits, module)
    for client in range(CLIENTS):
        theta, buffer = before["params"][client], before["momentum"][client]
        step = 0.9 * buffer + gradient_of(module, theta, digits, client, 1) + 0.01 * theta
        torch.testing.assert_close(after["momentum"][client], step, rtol=0, atol=1e-6)
        torch.testing.assert_close(after["params"][client], theta - 0.1 * step, rtol=0, atol=1e-6)


def test_momentum_is_forgotten_when_fedavg_replaces_the_model(digits: FederatedData) -> None:
    module = seeded(dnn)
    before, after = one_step_rounds("fedavg", digits, module)
    weights = torch.tensor(digits.samples, dtype=torch.float64)
    average = ((weights[:, None] * before["params"].double()).sum(dim=0) / weights.sum()).float()
    for client in range(CLIENTS):
        step = gradient_of(module, average, digits, client, 1) + 0.01 * average
        torch.testing.assert_close(after["momentum"][client], step, rtol=0, atol=1e-6)
        torch.testing.assert_close(after["params"][client], average - 0.1 * step, rtol=0, atol=1e-6)
    assert before["momentum"].abs().max() > 0.01  # so keeping it would have shown


@pytest.mark.parametrize("cohort_size", [STACKED, REFERENCE, UNEVEN])
def test_fedavg_averages_by_samples(cohort_size: int, digits: FederatedData) -> None:
    """With a learning rate of nearly zero a round is the exchange alone; the mean is worked out in exact fractions."""
    federation = federate("fedavg", digits, seeded(dnn), cohort_size=cohort_size, learning_rate=1e-30)
    federation.start()
    state = federation.state()
    models = torch.randn(state["params"].shape, generator=torch.Generator().manual_seed(1))
    federation.load({**state, "params": models})
    federation.play_round()
    exact = [
        sum(Fraction(n) * Fraction(value) for n, value in zip(digits.samples, column, strict=True))
        / sum(digits.samples)
        for column in models[:, :200].T.tolist()
    ]
    expected = torch.tensor([float(value) for value in exact], dtype=torch.float64).float()
    for own in federation.state()["params"]:
        assert torch.equal(own[:200], expected)


def correct_by_hand(module: nn.Module, data: FederatedData, client: int) -> int:
    held = torch.from_numpy(data.test[client])
    with torch.no_grad():
        return int((module.eval()(data.x[held]).argmax(dim=1) == data.y[held]).sum())


def test_global_accuracy_is_measured_before_the_local_steps_and_personal_accuracy_after(digits: FederatedData) -> None:
    """The average is taken from the frames themselves."""
    module = seeded(dnn)
    post = Post()
    federation = federate("fedavg", digits, module, link=post, local_steps=8, learning_rate=0.3)
    federation.start()
    shared = federation.play_round(evaluate_global=True).global_evaluation
    personal = federation.evaluate()
    models = np.stack([np.frombuffer(sent, dtype="<f4") for sent in post.payloads]).astype(np.float64)
    average = (np.array(digits.samples)[:, None] * models).sum(axis=0) / sum(digits.samples)
    common, own = copy.deepcopy(module), copy.deepcopy(module)
    nn.utils.vector_to_parameters(torch.from_numpy(average.astype(np.float32)), common.parameters())
    assert isinstance(shared, Evaluation)
    assert shared.correct == tuple(correct_by_hand(common, digits, client) for client in range(CLIENTS))
    for client in range(CLIENTS):
        own.load_state_dict(federation.client_state_dict(client))
        assert personal.correct[client] == correct_by_hand(own, digits, client)
    assert personal.accuracy > shared.accuracy + 5  # eight large steps on skewed data do not go unnoticed
