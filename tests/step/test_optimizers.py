"""SGD, AdamW and clipping of stacked models give what PyTorch gives for each model."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
from torch import Tensor

import factories
from pfedlms import backend
from pfedlms.backend import plain, torch_threads
from pfedlms.step import adamw_step_, clip_, sgd_step_

CLIENTS, DIM, RATE = 3, 1001, 0.01
with_and_without_kernels = pytest.mark.parametrize("way", [nullcontext, plain])
Way = Callable[[], AbstractContextManager[None]]


def normal(seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return factories.normal(CLIENTS, DIM, seed=seed, dtype=dtype)


def drawn(step: int, extra: bool, dtype: torch.dtype) -> tuple[Tensor, Tensor | None, Tensor]:
    """A gradient, a method's own gradient or None, and their sum."""
    gradient, pull = normal(step, dtype), 0.5 * normal(100 + step, dtype) if extra else None
    return gradient, pull, gradient.clone() if pull is None else gradient + pull


@with_and_without_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("extra", [True, False])
@pytest.mark.parametrize(("momentum", "decay"), [(0.0, 0.0), (0.0, 0.01), (0.9, 0.0), (0.9, 0.01)])
def test_sgd_is_that_of_pytorch(momentum: float, decay: float, extra: bool, dtype: torch.dtype, way: Way) -> None:
    """In place; without momentum the buffer does not change."""
    params, buffer = normal(0, dtype), torch.zeros(CLIENTS, DIM, dtype=dtype)
    leaf = params.clone().requires_grad_()
    optimiser = torch.optim.SGD([leaf], lr=RATE, momentum=momentum, weight_decay=decay)
    places = params.data_ptr(), buffer.data_ptr()
    for step in range(1, 5):
        gradient, pull, leaf.grad = drawn(step, extra, dtype)
        optimiser.step()
        with way():
            sgd_step_(params, gradient, pull, buffer, RATE, momentum, decay)
        torch.testing.assert_close(params, leaf.detach())
    expected = optimiser.state[leaf]["momentum_buffer"] if momentum else torch.zeros_like(buffer)
    torch.testing.assert_close(buffer, expected)
    assert (params.data_ptr(), buffer.data_ptr()) == places


@with_and_without_kernels
@pytest.mark.parametrize("rate", [RATE, torch.tensor(RATE, dtype=torch.float64)], ids=["number", "tensor"])
@pytest.mark.parametrize("extra", [True, False])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_adamw_is_that_of_pytorch(decay: float, extra: bool, rate: float | Tensor, way: Way) -> None:
    params = normal(0)
    kept = params.new_zeros(CLIENTS, 2 * DIM + 1)
    leaf = params.clone().requires_grad_()
    optimiser = torch.optim.AdamW([leaf], lr=RATE, weight_decay=decay)
    for step in range(1, 30):
        gradient, pull, leaf.grad = drawn(step, extra, torch.float64)
        optimiser.step()
        with way():
            adamw_step_(params, gradient, pull, kept, rate, decay)
        torch.testing.assert_close(params, leaf.detach(), rtol=0, atol=1e-12)
    state = optimiser.state[leaf]
    torch.testing.assert_close(kept[:, :DIM], state["exp_avg"], rtol=0, atol=1e-12)
    torch.testing.assert_close(kept[:, DIM:-1], state["exp_avg_sq"], rtol=0, atol=1e-12)
    assert (kept[:, -1] == 29).all()


@with_and_without_kernels
def test_clients_may_have_taken_different_numbers_of_adamw_steps(way: Way) -> None:
    """One client has taken 40 steps and one takes its first: both get the bits that they get alone."""
    params, kept = normal(0, torch.float32)[:2].contiguous(), torch.zeros(2, 2 * DIM + 1)
    with way():
        for step in range(40):
            adamw_step_(params[:1], normal(step, torch.float32)[:1].contiguous(), None, kept[:1], RATE, 0.1)
        alone, own = params.clone(), kept.clone()
        gradient = normal(50, torch.float32)[:2].contiguous()
        for row in (slice(0, 1), slice(1, 2)):
            adamw_step_(alone[row], gradient[row].clone(), None, own[row], RATE, 0.1)
        adamw_step_(params, gradient, None, kept, RATE, 0.1)
    assert torch.equal(params, alone)
    assert torch.equal(kept, own)
    assert kept[:, -1].tolist() == [41, 1]


@with_and_without_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("extra", [True, False])
def test_clipping_is_that_of_pytorch(extra: bool, dtype: torch.dtype, way: Way) -> None:
    """Clients whose norms are far below, just above and far above the limit."""
    gradient, pull, whole = drawn(1, extra, dtype)
    scale = torch.tensor([[0.5], [1.01], [70.0]], dtype=dtype) / whole.norm(dim=1, keepdim=True)
    gradient, pull, whole = gradient * scale, None if pull is None else pull * scale, whole * scale
    expected = []
    for row in whole:
        leaf = torch.zeros(DIM, dtype=dtype, requires_grad=True)
        leaf.grad = row.clone()
        torch.nn.utils.clip_grad_norm_([leaf], 1.0)
        expected.append(leaf.grad)
    with way():
        clip_(gradient, pull, 1.0)
    torch.testing.assert_close(gradient, torch.stack(expected))
    torch.testing.assert_close(gradient.norm(dim=1), torch.tensor([0.5, 1.0, 1.0], dtype=dtype), rtol=2e-6, atol=0)


def test_results_do_not_depend_on_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "_WORTH_WAKING", 1)
    results = []
    for threads in (1, 2, 5):
        params, gradient, buffer = (normal(seed, torch.float32) for seed in (1, 3, 2))
        kept = torch.zeros(CLIENTS, 2 * DIM + 1)
        with torch_threads(threads):
            clip_(gradient, normal(4, torch.float32), 1.0)
            sgd_step_(params, gradient.clone(), normal(5, torch.float32), buffer, RATE, 0.9, 0.1)
            adamw_step_(params, gradient, None, kept, RATE, 0.1)
        results.append(torch.cat([params, buffer, kept], dim=1))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])
