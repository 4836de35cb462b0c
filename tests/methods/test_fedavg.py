"""FedAvg: distributed gradient descent as its limit, shared statistics, and the server's step and momentum."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from factories import (
    cohort_of,
    digits,
    exchange_of,
    federation,
    hold,
    method_of,
    recorded_messages,
    small_data,
    small_module,
    task_of,
)
from pfedlms.wire.frames import SERVER
from plain_loops import CLIENTS, ROUNDS, SHARE, Loop, played


def test_shared_statistics_are_averaged_and_counted() -> None:
    """Two clients with N = 1 and 3; running means 0 and 4 have the weighted mean 3; messages have two floats more."""
    cohort = replace(
        cohort_of(torch.zeros(2, 3), samples=[1, 3]),
        buffers={
            "mean": torch.tensor([[0.0], [4.0]]),
            "var": torch.tensor([[1.0], [9.0]]),
            "count": torch.tensor([1, 2]),
        },
    )
    task = replace(task_of(3), statistics=(("mean", 1), ("var", 1)))
    plain, shared = (exchange_of("fedavg", task, share_statistics=each) for each in (False, True))
    (after,), _ = hold(shared, cohort)
    assert after.buffers["mean"].tolist() == [[3.0], [3.0]]
    assert after.buffers["var"].tolist() == [[7.0], [7.0]]
    assert after.buffers["count"].tolist() == [1, 2], "a buffer of integers is not averaged"
    assert shared.up.max_bytes - plain.up.max_bytes == shared.down.max_bytes - plain.down.max_bytes == 8
    (alone,), _ = hold(plain, cohort)
    assert alone.buffers["mean"].tolist() == [[0.0], [4.0]], "without sharing they are not averaged"


@pytest.mark.parametrize(("step", "momentum", "counts"), [(1.0, 0.0, (6, 4, 12)), (1.5, 0.8, (8, 8, 8))])
def test_one_step_on_all_samples_is_distributed_gradient_descent(
    step: float, momentum: float, counts: tuple[int, ...]
) -> None:
    """E = 1 and full batches: the models in the answers are those of PyTorch's gradient descent with the server's
    momentum on all samples together, in float64."""
    data, rate = small_data(*counts), 0.2
    train = {"local_steps": 1, "batch_size": max(counts), "learning_rate": rate, "weight_decay": 0.0}
    with recorded_messages() as messages:
        run = federation("fedavg", data, small_module(), server_step=step, server_momentum=momentum, **train)
        for _ in range(5):
            run.play_round()
    module = small_module().double()
    everything = torch.tensor([index for held in data.train for index in held])
    descent = torch.optim.SGD(module.parameters(), lr=step * rate, momentum=momentum)
    sent_down = [sent.values["model"] for sent in messages if sent.sender == SERVER]
    assert len(sent_down) == 5
    for sent in sent_down:
        descent.zero_grad()
        nn.functional.cross_entropy(module(data.x[everything].double()), data.y[everything]).backward()
        descent.step()
        expected = nn.utils.parameters_to_vector(module.parameters()).detach()
        torch.testing.assert_close(torch.from_numpy(sent).double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("settings", [{"server_step": 0.5}, {"server_momentum": 0.1}])
def test_the_server_keeps_w_and_u_only_if_it_needs_them(settings: dict[str, float]) -> None:
    task = task_of(2, initial=torch.tensor([3.0, -1.0]))
    assert method_of("fedavg", task).server_start() == {}
    start = method_of("fedavg", task, **settings).server_start()
    assert {name: value.tolist() for name, value in start.items()} == {"model": [3.0, -1.0], "update": [0.0, 0.0]}


@pytest.mark.parametrize("kind", ["adam", "yogi"])
def test_a_run_with_a_server_optimizer_is_a_plain_loop(kind: str) -> None:
    """Algorithm 2 of Reddi et al. with weights N_k: the first update is that of phase 0, from w⁰."""
    loop = Loop(digits(CLIENTS))
    w, u, v = loop.initial, torch.zeros_like(loop.initial), torch.full_like(loop.initial, 0.01**2)
    for phase in range(ROUNDS):
        mean = loop.mean({k: loop.steps(w, k, phase) - w for k in loop.participants.of(phase)})
        u = 0.9 * u + (1 - 0.9) * mean
        v = 0.99 * v + 0.01 * mean**2 if kind == "adam" else v - 0.01 * mean**2 * torch.sign(v - mean**2)
        w = w + 0.1 * u / (v.sqrt() + 0.01)
    settings = {"server_optimizer": kind, "server_momentum": 0.9, "server_step": 0.1, "server_epsilon": 0.01}
    server = played("fedavg", participation=SHARE, **settings)["server"]
    for name, expected in (("model", w), ("update", u), ("square", v)):
        np.testing.assert_allclose(server[name], expected, rtol=0, atol=2e-6)
    assert (w - loop.initial).abs().max() > 0.05
