"""FedProto: prototypes by hand, local steps by float64 autograd, and mean features by a plain loop."""

from __future__ import annotations

from dataclasses import replace
from math import nan

import torch
from torch import nn

from factories import (
    SMALL_DIM,
    SMALL_LAYERS,
    Work,
    cohort_of,
    digits,
    exchange_of,
    hold,
    normal,
    small_data,
    small_module,
    task_of,
    worker_of,
)
from pfedlms.methods.contract import Objective
from pfedlms.methods.fedproto import NearPrototypes
from pfedlms.train_settings import TrainSettings
from plain_loops import BODY, CLIENTS, HIDDEN, RATE, Loop, federate

COUNTS = torch.tensor([[9.0, 1.0, 0.0, 0.0], [1.0, 0.0, 2.0, 0.0], [100.0, 0.0, 5.0, 0.0]])
MEANS = torch.full((3, 4, 2), nan)  # means of classes that a client has no samples of must not matter
MEANS[0, 0], MEANS[0, 1] = torch.tensor([1.0, 2.0]), torch.tensor([4.0, -4.0])
MEANS[1, 0], MEANS[1, 2] = torch.tensor([3.0, 0.0]), torch.tensor([-2.0, 6.0])
MEANS[2, 0], MEANS[2, 2] = torch.tensor([5.0, 4.0]), torch.tensor([0.0, 2.0])


def test_prototypes_by_hand() -> None:
    """Three clients with 9, 1 and 100 samples of class 0 have the same weight; one has class 1, two have class 2, none
    has class 3."""
    exchange = exchange_of("fedproto", replace(task_of(9), classes=4, feature_size=2))
    cohort, work = cohort_of(torch.zeros(3, 1), samples=[10, 3, 105]), Work(features=(MEANS, COUNTS))
    (after,), _ = hold(exchange, cohort, work=work)
    assert after.heard["held"].tolist() == [True, True, True, False]
    assert after.heard["prototypes"].tolist() == [[3, 2], [4, -4], [-1, 4], [0, 0]]


def test_mean_features_against_a_plain_loop() -> None:
    """One sample after another through torch's own module in float64; clients of 9, 4 and 600 samples (more than an
    evaluation batch), each without one class."""
    data = small_data(9, 4, 600)
    params = normal(3, SMALL_DIM, seed=6)
    worker = worker_of(small_module(), data, TrainSettings(batch_size=4), seed=0)
    for ids in ([0, 1, 2], [1], [2]):
        cohort = cohort_of(params[ids], ids, [data.samples[k] for k in ids])
        means, counts = worker.class_features(cohort)
        for row, client in enumerate(ids):
            body = small_module().double()[:-1]
            nn.utils.vector_to_parameters(params[client, : SMALL_LAYERS[0]].double(), body.parameters())
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


def test_local_steps_follow_the_objective() -> None:
    """Of CE + λ MSE + μ/2 ‖θ‖² by float64 autograd through the whole model; some classes have no prototype."""
    loop, strength, run = Loop(digits(CLIENTS)), 0.7, federate("fedproto", strength=0.7)
    run.start()
    (cohort,), prototypes, held = run._clients.present, normal(10, HIDDEN, seed=7), torch.arange(10) % 3 > 0
    cohort = cohort.with_heard(prototypes=prototypes, held=held)
    after, _ = run._worker.train(cohort, run.method.objective(cohort, 0), phase=1)
    for client in range(3):
        model, body = cohort.params[client].double(), loop.module[:-1]
        for samples in loop.batches(client, 1):
            step = loop.gradient(model, samples)  # after which the module has these parameters
            features, labels = body(loop.data.x[samples].double()), loop.data.y[samples]
            goals = torch.where(held[labels][:, None], prototypes[labels].double(), features.detach())
            pull = torch.autograd.grad(strength * nn.functional.mse_loss(features, goals), [*body.parameters()])
            step[:BODY] += torch.cat([part.flatten() for part in pull])
            model = model - RATE * step
        torch.testing.assert_close(after.params[client].double(), model, rtol=1e-4, atol=1e-6)


def test_with_one_linear_layer_local_steps_are_those_of_cross_entropy_alone() -> None:
    """Its features are the samples, which have no gradient."""
    train, data = TrainSettings(local_steps=3, batch_size=4, weight_decay=0.0), small_data(9, 7)
    module = small_module()[:1]
    cohort = cohort_of(normal(2, SMALL_LAYERS[0]), samples=data.samples)
    worker = worker_of(module, data, train, seed=8)
    alone, _ = worker.train(cohort, Objective(), 1)
    pulled, _ = worker.train(cohort, NearPrototypes(normal(4, 4), torch.ones(4, dtype=torch.bool), 2.0), 1)
    assert torch.equal(pulled.params, alone.params)
