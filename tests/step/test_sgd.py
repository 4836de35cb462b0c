"""One SGD step for many models is torch's own optimiser on each."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
from torch import Tensor

from pfedlms import backend
from pfedlms.backend import plain, torch_threads
from pfedlms.step import sgd_step_

CLIENTS, DIM, RATE = 3, 1001, 0.1


def normal(seed: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(CLIENTS, DIM, generator=torch.Generator().manual_seed(seed), dtype=dtype)


@pytest.mark.parametrize("way", [nullcontext, plain])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("extra", [True, False])
@pytest.mark.parametrize(("momentum", "decay"), [(0.0, 0.0), (0.0, 0.01), (0.9, 0.0), (0.9, 0.01)])
def test_steps_are_those_of_torchs_optimiser_and_in_place(
    momentum: float, decay: float, extra: bool, dtype: torch.dtype, way: Callable[[], AbstractContextManager[None]]
) -> None:
    params = normal(0, dtype)
    theirs = params.clone().requires_grad_()
    optimiser = torch.optim.SGD([theirs], lr=RATE, momentum=momentum, weight_decay=decay)
    buffer = torch.zeros_like(params) if momentum else params.new_zeros(CLIENTS, 0)
    places = params.data_ptr(), buffer.data_ptr()
    for step in range(1, 5):
        gradient, pull = normal(step, dtype), 0.5 * normal(10 + step, dtype) if extra else None
        theirs.grad = gradient.clone() if pull is None else gradient + pull
        optimiser.step()
        with way():
            sgd_step_(params, gradient, pull, buffer, RATE, momentum, decay)
        torch.testing.assert_close(params, theirs.detach())
        if momentum:
            torch.testing.assert_close(buffer, optimiser.state[theirs]["momentum_buffer"])
    assert (params.data_ptr(), buffer.data_ptr()) == places


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_without_momentum_the_buffer_stays(dtype: torch.dtype) -> None:
    buffer = normal(1, dtype)
    before = buffer.clone()
    sgd_step_(normal(2, dtype), normal(3, dtype), normal(4, dtype), buffer, RATE, 0.0, 0.1)
    assert torch.equal(buffer, before)


def test_results_do_not_depend_on_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "_WORTH_WAKING", 1)
    results = []
    for threads in (1, 2, 5):
        params, buffer = normal(1, torch.float32), normal(2, torch.float32)
        with torch_threads(threads):
            sgd_step_(params, normal(3, torch.float32), normal(4, torch.float32), buffer, RATE, 0.9, 0.1)
        results.append(torch.cat([params, buffer]))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])
