"""Custom methods may train and measure a second time, and have tensors of each client in a loss on features."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import factories
from factories import seeded
from pfedlms.cohort import Cohort
from pfedlms.methods import METHODS, register
from pfedlms.methods.contract import Method, Objective, PerClient
from pfedlms.methods.local import Local
from plain_loops import CLIENTS, Loop, network, played


def test_a_second_training_starts_with_the_momentum_of_its_cohort(monkeypatch: pytest.MonkeyPatch) -> None:
    """It keeps the momentum of the first training, unless the model is replaced."""

    class Twice(Local):
        name = "twice"
        forgets = False

        def after_training(self, cohort: Cohort, phase: int, work: Any) -> Cohort:
            start = cohort.with_model(cohort.params) if self.forgets else cohort
            return work.train(start, Objective(), phase)[0]

    class Forgetful(Twice):
        name, forgets = "forgetful", True

    def models(method: type[Method], momentum: float) -> Tensor:
        monkeypatch.setitem(METHODS, method.name, method)
        return played(method.name, 0, momentum=momentum)["params"]

    assert torch.equal(models(Twice, 0.0), models(Forgetful, 0.0))
    assert not torch.equal(models(Twice, 0.5), models(Forgetful, 0.5))
    data, loop = factories.digits(CLIENTS), Loop(factories.digits(CLIENTS))
    by_hand = [loop.steps(loop.steps(loop.initial, k, 0), k, 0) for k in range(data.clients)]
    np.testing.assert_allclose(models(Twice, 0.0), torch.stack(by_hand), rtol=0, atol=1e-5)


def test_losses_and_gradients_of_a_phase_are_those_of_its_local_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """With one local step: θ = start − η ∇f, on the batch that the phase trains on."""
    seen = []

    class Measured(Local):
        name = "measured"

        def client_start(self, cohort: Cohort) -> Cohort:
            return cohort.with_state(start=cohort.params)

        def after_training(self, cohort: Cohort, phase: int, work: Any) -> Cohort:
            start = cohort.state["start"]
            gradient = work.mean_gradient(cohort, start, phase)
            _, trained_on = work.train(cohort.with_model(start), Objective(), phase)
            torch.testing.assert_close(start - 0.1 * gradient, cohort.params, rtol=0, atol=1e-6)
            torch.testing.assert_close(work.losses(cohort, start, phase, 0), trained_on, rtol=0, atol=1e-6)
            shared = start[0], start[:1].expand_as(start)  # one model for all clients
            assert torch.equal(*(work.losses(cohort, each, phase, 0) for each in shared))
            assert torch.equal(*(work.mean_gradient(cohort, each, phase) for each in shared))
            seen.append(phase)
            return cohort.with_state(start=cohort.params)

    monkeypatch.setitem(METHODS, "measured", Measured)
    factories.played(factories.federation("measured", local_steps=1, weight_decay=0.0), 2)
    assert set(seen) == {0, 1, 2}


# --- features ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class OwnCentre(Objective):
    """Pulls the features of each client towards its own point."""

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
def test_a_loss_on_features_uses_the_tensors_of_each_client(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with convolutions, which run one client after another inside a cohort."""
    monkeypatch.setitem(METHODS, Centred.name, Centred)
    alone, together = (played(Centred.name, 1, module=module(), cohort_size=size)["params"] for size in (1, 0))
    assert torch.equal(alone, together)


@pytest.mark.parametrize("name", ["train", "data", "a:b", "a,b", "a/b", "fedavg"])
def test_a_name_that_is_read_as_something_else_is_not_registered(name: str) -> None:
    """A section of settings of that name would be taken for the method's own."""
    with pytest.raises(ValueError, match=f"got the name '{name}', expected|the name '{name}' is taken by FedAvg"):
        register(type("Named", (Local,), {"name": name}))
