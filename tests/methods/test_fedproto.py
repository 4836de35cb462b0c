"""FedProto: prototypes by hand, the loss by hand and by autograd, and the features behind them by a plain loop."""

from __future__ import annotations

from dataclasses import replace
from math import nan

import pytest
import torch
from torch import Tensor, nn

from definitions import exact_module, exact_steps, small_batches
from factories import (
    SMALL_DIM,
    SMALL_LAYERS,
    Work,
    cohort_of,
    exchange_of,
    hold,
    method_of,
    normal,
    small_data,
    small_module,
    task_of,
    worker_of,
)
from pfedlms.methods import Task
from pfedlms.methods.contract import Objective
from pfedlms.methods.fedproto import NearPrototypes
from pfedlms.train_settings import TrainSettings


def task_for(classes: int, width: int) -> Task:
    return replace(task_of(SMALL_DIM), classes=classes, feature_size=width)


COUNTS = torch.tensor([[9.0, 1.0, 0.0, 0.0], [1.0, 0.0, 2.0, 0.0], [100.0, 0.0, 5.0, 0.0]])
MEANS = torch.full((3, 4, 2), nan)  # what a client does not hold must not matter
MEANS[0, 0], MEANS[0, 1] = torch.tensor([1.0, 2.0]), torch.tensor([4.0, -4.0])
MEANS[1, 0], MEANS[1, 2] = torch.tensor([3.0, 0.0]), torch.tensor([-2.0, 6.0])
MEANS[2, 0], MEANS[2, 2] = torch.tensor([5.0, 4.0]), torch.tensor([0.0, 2.0])


def test_prototypes_by_hand() -> None:
    """Class 0 has three holders with 9, 1 and 100 samples, who count the same; class 1 has one, class 2 two, class 3
    none. However the clients are grouped."""
    exchange, work = exchange_of("fedproto", task_for(4, 2)), Work(features=(MEANS, COUNTS))
    everyone = cohort_of(torch.zeros(3, 1), samples=[10, 3, 105])
    pair, single = cohort_of(torch.zeros(2, 1), [0, 1], [10, 3]), cohort_of(torch.zeros(1, 1), [2], [105])
    for cohorts in ([everyone], [pair, single]):
        after, _ = hold(exchange, cohorts, work=work)
        for cohort in after:
            assert cohort.heard["held"].tolist() == [True, True, True, False]
            assert cohort.heard["prototypes"].tolist() == [[3, 2], [4, -4], [-1, 4], [0, 0]]


def test_mean_features_against_a_plain_loop() -> None:
    """One sample after another through torch's own module in float64; clients of 9, 4 and 600 samples (more than an
    evaluation batch), each without one class."""
    data = small_data(9, 4, 600)
    params = normal(3, SMALL_DIM, seed=6)
    worker = worker_of(
        small_module(),
        data,
        TrainSettings(local_steps=1, batch_size=4, learning_rate=0.1, weight_decay=0.0),
        seed=0,
    )
    for ids in ([0, 1, 2], [1], [2]):
        cohort = cohort_of(params[ids], ids, [data.samples[k] for k in ids])
        means, counts = worker.class_features(cohort)
        for row, client in enumerate(ids):
            body = exact_module(params[client])[:-1]
            sums, seen = torch.zeros(4, 6, dtype=torch.float64), [0, 0, 0, 0]
            for index in data.train[client]:
                label = int(data.y[index])
                sums[label] += body(data.x[index].double()).detach()
                seen[label] += 1
            assert counts[row].tolist() == seen
            assert seen[client] == seen[3] == 0
            expected = sums / torch.tensor(seen).clamp(min=1)[:, None]
            torch.testing.assert_close(means[row].double(), expected, rtol=1e-5, atol=1e-6)
            assert not means[row, client].any()


@pytest.mark.parametrize("strength", [0.0, 0.7])
def test_local_steps_follow_the_objective(strength: float) -> None:
    """Three steps of CE + λ MSE + μ/2 ‖θ‖² against float64 autograd through the whole model; class 1 has no
    prototype."""
    data, train = (
        small_data(9, 12, 20),
        TrainSettings(local_steps=3, batch_size=8, learning_rate=0.2, weight_decay=0.03),
    )
    params, prototypes = 0.5 * normal(3, SMALL_DIM, seed=6), normal(4, 6, seed=7)
    held = torch.tensor([True, False, True, False])
    cohort = cohort_of(params, samples=data.samples).with_heard(prototypes=prototypes, held=held)
    objective = method_of("fedproto", task_for(4, 6), strength=strength).objective(cohort, 0)
    after, _ = worker_of(small_module(), data, train, seed=7).train(cohort, objective, phase=2)

    def pull(flat: Tensor, features: Tensor, labels: Tensor) -> Tensor:
        goals = [prototypes[y].double() if held[y] else f.detach() for f, y in zip(features, labels, strict=True)]
        return strength * nn.functional.mse_loss(features, torch.stack(goals))

    for client in range(3):
        expected = exact_steps(params[client], small_batches(data, client, 2, train, seed=7), train, pull)
        torch.testing.assert_close(after.params[client].double(), expected, rtol=1e-4, atol=1e-6)


def test_the_features_of_one_linear_layer_are_the_samples_and_pull_nothing() -> None:
    """So local steps are those of cross-entropy alone."""
    train, data = (
        TrainSettings(local_steps=3, batch_size=4, learning_rate=0.1, weight_decay=0.0),
        small_data(9, 7),
    )
    module = small_module()[:1]
    cohort = cohort_of(normal(2, SMALL_LAYERS[0]), samples=data.samples)
    worker = worker_of(module, data, train, seed=8)
    alone, _ = worker.train(cohort, Objective(), 1)
    pulled, _ = worker.train(cohort, NearPrototypes(normal(4, 4), torch.ones(4, dtype=torch.bool), 2.0), 1)
    assert torch.equal(pulled.params, alone.params)
