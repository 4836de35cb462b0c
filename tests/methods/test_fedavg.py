"""FedAvg: the weighted mean by hand, distributed gradient descent as its limit, and the server's step and momentum."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from factories import cohort_of, federation, hold, normal, overheard, small_data, small_module, task_of
from pfedlms.methods.fedavg import Average, FedAvg, FedAvgSettings
from pfedlms.methods.server_optimizer import ServerOptimizer, ServerSettings
from pfedlms.wire.frames import SERVER


def test_mean_by_hand() -> None:
    """(1 · (4, 0) + 2 · (−2, 3) + 5 · (0, 2)) / 8 = (0, 2), for all clients, however they are grouped."""
    params, samples = torch.tensor([[4.0, 0.0], [-2.0, 3.0], [0.0, 2.0]]), [1, 2, 5]
    groups = [
        [cohort_of(params, samples=samples)],
        [cohort_of(params[:1], [0], [1]), cohort_of(params[1:], [1, 2], [2, 5])],
    ]
    for cohorts in groups:
        after, _ = hold(Average(2), cohorts)
        assert [row for cohort in after for row in cohort.params.tolist()] == [[0.0, 2.0]] * 3


def test_the_mean_is_taken_in_float64() -> None:
    """2^24 + 1 + 1 is lost one by one in float32, and 2^24 stays."""
    params = torch.tensor([[2.0**24], [1.0], [1.0], [2.0]])
    (after,), _ = hold(Average(1), cohort_of(params))
    assert after.params[0].item() == 2.0**22 + 1


def test_equal_models_stay_as_they_are() -> None:
    model = normal(50, seed=1)
    (after,), _ = hold(Average(50), cohort_of(model.expand(3, -1).clone(), samples=[3, 5, 6]))
    assert torch.equal(after.params, model.expand(3, -1))


def test_shared_statistics_are_averaged_and_counted() -> None:
    """Two clients with N = 1 and 3; running means 0 and 4 have the weighted mean 3; two floats more travel each way."""
    cohort = replace(
        cohort_of(torch.zeros(2, 3), samples=[1, 3]),
        buffers={
            "mean": torch.tensor([[0.0], [4.0]]),
            "var": torch.tensor([[1.0], [9.0]]),
            "count": torch.tensor([1, 2]),
        },
    )
    plain, shared = Average(3), Average(3, (("mean", 1), ("var", 1)))
    (after,), _ = hold(shared, cohort)
    assert after.buffers["mean"].tolist() == [[3.0], [3.0]]
    assert after.buffers["var"].tolist() == [[7.0], [7.0]]
    assert after.buffers["count"].tolist() == [1, 2], "what is not a float stays"
    assert shared.up.max_bytes - plain.up.max_bytes == shared.down.max_bytes - plain.down.max_bytes == 8
    (alone,), _ = hold(plain, cohort)
    assert alone.buffers["mean"].tolist() == [[0.0], [4.0]], "without sharing they stay local"


# --- the server's step and momentum -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("step", "momentum"), [(0.5, 0.0), (1.0, 0.9), (1.7, 0.3)])
def test_steps_and_momentum_in_float64(step: float, momentum: float) -> None:
    """u ← βu + (mean − w), w ← w + ηu over five rounds, in NumPy; statistics are averaged and nothing else."""
    samples = np.array([2.0, 3.0, 7.0])
    method = FedAvg(task_of(6, initial=normal(6, seed=1)), FedAvgSettings(server_step=step, server_momentum=momentum))
    server, w, u = method.server_start(), normal(6, seed=1).double().numpy(), np.zeros(6)
    exchange = Average(6, (("mean", 1),), ServerOptimizer(step, ServerSettings(server_momentum=momentum)))
    for round in range(5):
        params, own = normal(3, 6, seed=10 + round), normal(3, 1, seed=20 + round)
        cohort = replace(cohort_of(params, samples=[2, 3, 7]), buffers={"mean": own})
        (after,), server = hold(exchange, cohort, server, round=round)
        u = momentum * u + (np.average(params.double().numpy(), axis=0, weights=samples) - w)
        w = w + step * u
        np.testing.assert_allclose(after.params.double().numpy(), np.tile(w, (3, 1)), rtol=1e-5, atol=1e-6)
        mean = np.average(own.double().numpy(), axis=0, weights=samples)
        np.testing.assert_allclose(after.buffers["mean"].numpy(), np.tile(mean, (3, 1)), rtol=1e-6)
        assert torch.equal(after.params[0], server["model"])


def test_step_and_momentum_are_those_of_the_settings() -> None:
    """E = 1 and full batches: what is sent down is PyTorch's gradient descent with momentum on all samples, float64."""
    data, rate, step, momentum = small_data(8, 8, 8), 0.2, 1.5, 0.8
    train = {"local_steps": 1, "batch_size": 8, "learning_rate": rate, "weight_decay": 0.0}
    with overheard() as messages:
        chosen = federation("fedavg", data, small_module(), server_step=step, server_momentum=momentum, **train)
        chosen.start()
        for _ in range(5):
            chosen.play_round()
    module = small_module().double()
    everything = torch.tensor([index for held in data.train for index in held])
    descent = torch.optim.SGD(module.parameters(), lr=step * rate, momentum=momentum)
    for sent in (sent.values["model"] for sent in messages if sent.sender == SERVER):
        descent.zero_grad()
        nn.functional.cross_entropy(module(data.x[everything].double()), data.y[everything]).backward()
        descent.step()
        expected = nn.utils.parameters_to_vector(module.parameters()).detach()
        torch.testing.assert_close(torch.from_numpy(sent).double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("chosen", [{"server_step": 0.5}, {"server_momentum": 0.1}])
def test_the_server_keeps_w_and_u_only_where_it_needs_them(chosen: dict[str, float]) -> None:
    task = task_of(2, initial=torch.tensor([3.0, -1.0]))
    assert FedAvg(task, FedAvgSettings()).server_start() == {}
    start = FedAvg(task, FedAvgSettings(**chosen)).server_start()
    assert {name: value.tolist() for name, value in start.items()} == {"model": [3.0, -1.0], "update": [0.0, 0.0]}
