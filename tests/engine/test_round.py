"""One round: its loss, divergence, and clients with very little data. Its bytes: methods/test_battery.py."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import factories
import pfedlms
from factories import played, small_data, small_module
from pfedlms.errors import DivergedError
from pfedlms.methods import METHODS

federation = partial(factories.federation, module=small_module(), local_steps=2, batch_size=8)


class BatchStatistics(nn.Module):
    """Batch norm without running statistics: in evaluation, too, an output depends on the whole batch."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head = nn.BatchNorm1d(64, track_running_stats=False), nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Any:
        return self.head(self.norm(x.flatten(1))) + 100  # beside which the differences are small


@pytest.mark.parametrize("method", ["local", "fedavg", "fedproto"])
def test_clients_of_different_sizes_are_measured_on_their_own_samples_alone(method: str) -> None:
    """Padding would be in the statistics of small clients; clients one by one have none."""
    settings: dict[str, Any] = {"rounds": 2, "clients": 5, "alpha": 0.5, "local_steps": 2, "batch_size": 8}
    runs = [pfedlms.run("digits", BatchStatistics, method=method, cohort_size=size, **settings) for size in (0, 1)]
    assert len({len(own) for own in runs[0].federation.data.test}) > 1
    for stacked, alone in zip(*(run.metrics for run in runs), strict=True):
        assert stacked["client_acc"] == alone["client_acc"]
        assert stacked["test_loss"] == pytest.approx(alone["test_loss"], rel=1e-6)
    held = runs[0].federation.data
    for client, own in enumerate(held.test):
        with torch.no_grad():
            right = runs[0].model(client)(held.x[own]).argmax(1) == held.y[own]
        assert runs[0].metrics[-1]["client_acc"][client] == pytest.approx(100 * right.float().mean().item())


class Drawing(nn.Linear):
    """Draws its weights from NumPy and the scale of its samples from Python."""

    def __init__(self) -> None:
        super().__init__(64, 10)
        self.weight.data = torch.from_numpy(np.random.normal(size=(10, 64))).float()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.flatten(1) * random.random())


def test_draws_from_numpy_and_python_follow_the_seed_of_the_run() -> None:
    starts, ends = [], []
    for seed in (1, 1, 2):
        np.random.seed(len(ends))
        random.seed(len(ends))
        run = pfedlms.run("digits", Drawing, method="local", rounds=1, clients=2, local_steps=1, seed=seed)
        starts.append(run.federation.model.initial)
        ends.append(run.models[0]["weight"])
    for first, same, other in (starts, ends):
        assert torch.equal(first, same)
        assert not torch.equal(first, other)


def test_the_loss_of_a_round_is_weighted_by_samples() -> None:
    """Steps are too small to move a model, and use every sample equally often: the mean over all samples."""
    data, model = small_data(8, 32), small_module()
    data.x[data.train[1]] *= 5  # so that the two clients' losses differ
    got = federation("local", data, local_steps=4, learning_rate=1e-30, weight_decay=0.0).play_round().loss
    seen = np.concatenate(data.train)
    expected = nn.functional.cross_entropy(model.double()(data.x[seen].double()), data.y[seen]).item()
    assert got == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("cohort_size", [0, 1, 2])
def test_divergence_is_reported_with_round_and_client(cohort_size: int) -> None:
    """Only client 2 has infinite samples."""
    data = small_data(20, 20, 20, 20)
    data.x[data.train[2]] = np.inf
    with pytest.raises(DivergedError, match=r"before round 1.* client 2 .*train\.learning_rate"):
        federation("local", data, cohort_size=cohort_size).start()


@pytest.mark.parametrize("counts", [(30, 1, 3), (20,)], ids=["three clients", "one client"])
@pytest.mark.parametrize("name", METHODS)
def test_clients_with_one_class_or_few_samples_take_part(name: str, counts: tuple[int, ...]) -> None:
    """The first client has a single class, others have one and three samples; a batch has eight."""
    data = small_data(*counts)
    for own in (data.train[0], data.test[0]):
        data.y[own] = 1
    run = played(federation(name, data, local_steps=5), 2)
    report, measured = run.play_round(), run.evaluate()
    assert np.isfinite([report.loss, measured.loss]).all()
    assert measured.tested == (3,) * len(counts)
    moved = run.state()["params"] - run.model.initial
    assert (moved.abs().amax(dim=1) > 0).all()
    if METHODS[name].personal:
        assert measured.correct[0] == 3  # its only class
