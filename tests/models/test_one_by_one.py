"""Clients that run one by one: on several threads unless their order matters, always with the same bits."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from factories import CPU, normal, squares
from pfedlms.backend import torch_threads
from pfedlms.models import CohortModel
from pfedlms.models.one_by_one import OneByOne

CLIENTS, BATCH = 5, 4


def convolutional(*more: nn.Module) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), *more, nn.Flatten(), nn.Linear(16 * 64, 10)
    )


class Counting(nn.Module):
    """Computes something else in every second call."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.convolution = 0, convolutional()

    def forward(self, x: Tensor) -> Any:
        self.calls += 1
        return self.convolution(x) * (1 + self.calls % 2)


class Uncopyable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lock, self.convolution = threading.Lock(), convolutional()

    def forward(self, x: Tensor) -> Any:
        return self.convolution(x)


class Noisy(nn.Module):
    """Draws from NumPy, whose generator all threads share."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = convolutional()

    def forward(self, x: Tensor) -> Any:
        return self.convolution(x) + np.random.rand()


def hooked() -> nn.Module:
    module = convolutional()
    module[0].register_forward_hook(lambda *_: None)
    return module


class Step:
    """Losses, gradients and running statistics of a training step of all clients, `group` at a time."""

    def __init__(self, module: nn.Module, group: int, threads: int, batch: int = BATCH) -> None:
        self.model = CohortModel(module, CPU)
        cohort = self.model.cohort(tuple(range(CLIENTS)), (1,) * CLIENTS)
        params = cohort.params + 0.1 * normal(*cohort.params.shape, seed=1)
        x, labels = normal(CLIENTS, batch, 3, 8, 8, seed=2), torch.zeros(CLIENTS, batch, dtype=torch.int64)
        gradients, losses = torch.empty_like(params), []
        with torch_threads(threads):
            for start in range(0, CLIENTS, group):
                rows = slice(start, start + group)
                own = {name: value[rows] for name, value in cohort.buffers.items()}
                given = params[rows].clone(), own, x[rows].clone(), labels[rows]  # as a node has them
                losses.append(self.model.gradient(gradients[rows], *given, squares))
        self.values = [torch.cat(losses), gradients, *cohort.buffers.values()]


@pytest.mark.parametrize("batch", [1, BATCH])
def test_bits_depend_neither_on_the_grouping_nor_on_threads(batch: int) -> None:
    """Products of one sample are rounded by where in memory their matrices begin."""
    torch.manual_seed(0)
    module = convolutional()
    first = Step(module, 1, 1, batch)
    assert first.values[1].abs().max() > 0
    for group, threads in ((CLIENTS, 1), (CLIENTS, 2), (CLIENTS, 4), (2, 3), (1, 4)):
        other = Step(module, group, threads, batch)
        assert isinstance(other.model._runner, OneByOne)
        assert other.model._runner._runs_in_parallel
        assert all(torch.equal(*pair) for pair in zip(first.values, other.values, strict=True))


def test_clients_run_on_several_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two clients wait for each other; on one thread the barrier would time out."""
    meeting, forward = threading.Barrier(2, timeout=20), OneByOne.forward

    def waiting(self: OneByOne, given: Any) -> Any:
        meeting.wait()
        return forward(self, given)

    monkeypatch.setattr(OneByOne, "forward", waiting)
    model = CohortModel(convolutional(), CPU)
    cohort = model.cohort((0, 1), (1, 1))
    with torch_threads(2), torch.no_grad():
        outputs, _ = model.forward(cohort.params, cohort.buffers, normal(2, BATCH, 3, 8, 8, seed=1), training=False)
    assert outputs.shape == (2, BATCH, 10)
    assert not outputs.requires_grad


@pytest.mark.parametrize("module", [convolutional(nn.Dropout(0.5)), Counting(), Noisy(), hooked(), Uncopyable()])
def test_clients_run_one_after_another_where_their_order_matters(module: nn.Module) -> None:
    runner = Step(module, CLIENTS, 2).model._runner
    assert isinstance(runner, OneByOne)
    assert not runner._runs_in_parallel
