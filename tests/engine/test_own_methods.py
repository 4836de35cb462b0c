"""FedProx, SCAFFOLD and Ditto against plain loops in float64, and the same for every size of cohorts."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import factories
from factories import seeded
from own_methods import Ditto, FedProx, Scaffold
from pfedlms.backend import torch_threads
from pfedlms.cohort import Cohort
from pfedlms.data import FederatedData, batch_positions
from pfedlms.engine import Federation
from pfedlms.engine.participation import Participation
from pfedlms.methods import METHODS
from pfedlms.methods.contract import Method, Objective, PerClient
from pfedlms.methods.local import Local

CLIENTS, SEED, ROUNDS, STEPS, BATCH, RATE, DECAY, SHARE = 20, 3, 4, 5, 16, 0.1, 1e-4, 0.5
STRENGTH = 0.3


def network(hidden: int = 24) -> nn.Module:
    return seeded(lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, hidden), nn.ReLU(), nn.Linear(hidden, 10)))


@pytest.fixture(autouse=True)
def _known(monkeypatch: pytest.MonkeyPatch) -> None:
    for method in (FedProx, Scaffold, Ditto):
        monkeypatch.setitem(METHODS, method.name, method)


def federate(name: str, module: nn.Module | None = None, **options: Any) -> Federation:
    chosen = {"local_steps": STEPS, "batch_size": BATCH, "learning_rate": RATE, "weight_decay": DECAY, **options}
    return factories.federation(name, factories.digits(CLIENTS), module or network(), seed=SEED, **chosen)


def played(name: str, rounds: int = ROUNDS, **options: Any) -> dict[str, Any]:
    federation = federate(name, **options)
    federation.start()
    for _ in range(rounds):
        federation.play_round()
    return federation.state()


# --- plain loops ------------------------------------------------------------------------------------------------------


class Loop:
    """Clients' local steps in float64, one client after another."""

    def __init__(self, data: FederatedData) -> None:
        self.data, self.module = data, deepcopy(network()).double()
        self.initial = nn.utils.parameters_to_vector(self.module.parameters()).detach()
        self.weights = torch.tensor([float(len(own)) for own in data.train], dtype=torch.float64)
        self.who = Participation(CLIENTS, SHARE, SEED)

    def steps(self, model: Tensor, client: int, phase: int, pull: Any = None) -> Tensor:
        """E steps from `model`; `pull` adds to the gradient."""
        own, model = self.data.train[client], model.clone()
        for positions in batch_positions(SEED, client, len(own), phase * STEPS, STEPS, BATCH):
            held = torch.from_numpy(own[positions])
            nn.utils.vector_to_parameters(model.clone(), self.module.parameters())
            loss = nn.functional.cross_entropy(self.module(self.data.x[held].double()), self.data.y[held])
            parts = torch.autograd.grad(loss, list(self.module.parameters()))
            gradient = torch.cat([part.flatten() for part in parts]) + DECAY * model
            model = model - RATE * (gradient if pull is None else gradient + pull(model))
        return model

    def mean(self, values: dict[int, Tensor]) -> Tensor:
        weights = self.weights[list(values)]
        return torch.stack(list(values.values())).T @ weights / weights.sum()

    def scaffold(self) -> dict[int, Tensor]:
        """Algorithm 1 of the paper with option II and a global step of 1, and weights N_k."""
        w, c = self.initial, torch.zeros_like(self.initial)
        controls = dict.fromkeys(range(CLIENTS), torch.zeros_like(c))
        for phase in range(ROUNDS + 1):
            trained, changes = {}, {}
            for k in self.who.of(phase):
                correction = c - controls[k]
                trained[k] = self.steps(w, k, phase, lambda model, by=correction: by)
                changes[k] = -c + (w - trained[k]) / (STEPS * RATE)
                controls[k] = controls[k] + changes[k]
            if phase == ROUNDS:
                return trained
            w = w + self.mean({k: trained[k] - w for k in trained})
            c = c + len(changes) / CLIENTS * self.mean(changes)
        raise AssertionError

    def ditto(self) -> dict[int, Tensor]:
        w, own = self.initial, dict.fromkeys(range(CLIENTS), self.initial)
        for phase in range(ROUNDS + 1):
            trained = {k: self.steps(w, k, phase) for k in self.who.of(phase)}
            for k in trained:
                own[k] = self.steps(own[k], k, phase, lambda model, w=w: STRENGTH * (model - w))
            if phase == ROUNDS:
                return {k: own[k] for k in trained}
            w = self.mean(trained)
        raise AssertionError

    def fedprox(self) -> dict[int, Tensor]:
        w = self.initial
        for phase in range(ROUNDS + 1):
            pull = None if phase == 0 else lambda model, w=w: STRENGTH * (model - w)
            trained = {k: self.steps(w, k, phase, pull) for k in self.who.of(phase)}
            if phase == ROUNDS:
                return trained
            w = self.mean(trained)
        raise AssertionError


@pytest.mark.parametrize("name", ["fedprox", "scaffold", "ditto"])
def test_a_method_of_ones_own_is_its_plain_loop(name: str) -> None:
    """25 steps in float32 are within 2e-6; without the correction, or with another client's, they differ by 1e-2."""
    expected = getattr(Loop(factories.digits(CLIENTS)), name)()
    settings = {} if name == "scaffold" else {"strength": STRENGTH}
    for size in (1, 3, 20):
        state = played(name, participation=SHARE, cohort_size=size, **settings)
        assert state["trained"] == list(expected)
        for row, client in enumerate(expected):
            np.testing.assert_allclose(state["params"][row], expected[client], rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["fedprox", "scaffold", "ditto"])
@pytest.mark.parametrize("threads", [1, 2])
def test_clients_that_are_trained_in_parts(name: str, threads: int) -> None:
    """20 models of 75,000 parameters are more than a CPU's cache holds, so a cohort is split; to the bit as alone."""
    wide = network(1000)
    alone = played(name, 2, module=wide, cohort_size=1)["params"]
    with torch_threads(threads):
        assert len(federate(name, wide).model.parts(CLIENTS)) > 1
        assert torch.equal(played(name, 2, module=wide)["params"], alone)


# --- limits -----------------------------------------------------------------------------------------------------------


def test_without_strength_they_are_what_they_are_made_from() -> None:
    """A second training sees the batches of the first, so Ditto's personal models are those of local training."""
    for name, plain in (("fedprox", "fedavg"), ("ditto", "local")):
        assert torch.equal(played(name, strength=0.0)["params"], played(plain)["params"])
    own = played("ditto", strength=0.3)
    assert not torch.equal(own["params"], played("local")["params"])
    shared = played("fedavg")["params"]
    assert torch.equal(own["state"]["shared"], shared)  # the personal training leaves the shared model alone


def test_a_second_training_starts_with_the_momentum_it_is_given() -> None:
    """Two trainings in a row that keep model and momentum are one of both plans; a model taken up anew forgets it."""

    class Twice(Local):
        name = "twice"
        forgets = False

        def after_training(self, cohort: Cohort, phase: int, work: Any) -> Cohort:
            start = cohort.with_model(cohort.params) if self.forgets else cohort
            return work.train(start, Objective(), phase)[0]

    class Forgetful(Twice):
        name, forgets = "forgetful", True

    def models(method: type[Method], momentum: float) -> Tensor:
        METHODS[method.name] = method
        try:
            return played(method.name, 0, momentum=momentum)["params"]
        finally:
            del METHODS[method.name]

    assert torch.equal(models(Twice, 0.0), models(Forgetful, 0.0))
    assert not torch.equal(models(Twice, 0.5), models(Forgetful, 0.5))
    data, loop = factories.digits(CLIENTS), Loop(factories.digits(CLIENTS))
    by_hand = [loop.steps(loop.steps(loop.initial, k, 0), k, 0) for k in range(data.clients)]
    np.testing.assert_allclose(models(Twice, 0.0), torch.stack(by_hand), rtol=0, atol=1e-5)


# --- features ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class OwnCentre(Objective):
    """Features are drawn to a point of each client's own."""

    needs_features = True
    centre: PerClient

    def loss(self, features: Tensor, labels: Tensor) -> Tensor:
        return (features - self.centre.value.unsqueeze(1)).square().mean(dim=(1, 2))


class Centred(Local):
    name = "centred"

    def objective(self, cohort: Cohort, round: int) -> Objective:
        ids = torch.tensor(cohort.ids, dtype=torch.float32)
        return OwnCentre(PerClient(ids.unsqueeze(1).expand(-1, self.task.feature_size)))


def convolutional() -> nn.Module:
    return seeded(lambda: nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 64, 10)))


@pytest.mark.parametrize("module", [network, convolutional])
def test_a_loss_on_features_has_each_clients_own_tensors(
    module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """Convolutions run one client after another inside a cohort."""
    monkeypatch.setitem(METHODS, Centred.name, Centred)
    alone, together = (played(Centred.name, 1, module=module(), cohort_size=size)["params"] for size in (1, 0))
    assert torch.equal(alone, together)


def test_task_knows_the_number_of_local_steps() -> None:
    assert federate("local", local_steps=7).method.task.local_steps == 7
