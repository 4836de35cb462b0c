"""Stacked and reference engine give the same federation, and both the one that a plain PyTorch loop gives."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import factories
from factories import Post, seeded, tensors
from pfedlms.data import FederatedData, batch_positions
from pfedlms.data.batches import Augmentation
from pfedlms.engine import Evaluation
from pfedlms.methods import METHODS

ROUNDS, CLIENTS, SEED = 3, 7, 3
REFERENCE, UNEVEN, STACKED = 1, 5, 0


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


@pytest.mark.parametrize("name", METHODS)
def test_engines_agree(name: str, digits: FederatedData) -> None:
    """Tolerance on parameters: none, every bit is the same. Momentum, running statistics and server state too."""
    module = seeded(with_batch_norm)
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
