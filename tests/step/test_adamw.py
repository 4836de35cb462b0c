"""AdamW and clipping for many models are torch's own on each."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
from torch import Tensor

from pfedlms import backend
from pfedlms.backend import plain, torch_threads
from pfedlms.step import adamw_step_, clip_

CLIENTS, DIM, RATE = 3, 1001, 0.01
Runner = Callable[[], AbstractContextManager[None]]


def normal(seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(CLIENTS, DIM, generator=torch.Generator().manual_seed(seed), dtype=dtype)


@pytest.mark.parametrize("way", [nullcontext, plain])
@pytest.mark.parametrize("rate", [RATE, torch.tensor(RATE, dtype=torch.float64)], ids=["number", "tensor"])
@pytest.mark.parametrize("extra", [True, False])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_steps_are_those_of_torchs_optimiser(decay: float, extra: bool, rate: float | Tensor, way: Runner) -> None:
    params = normal(0)
    kept = params.new_zeros(CLIENTS, 2 * DIM + 1)
    theirs = params.clone().requires_grad_()
    optimiser = torch.optim.AdamW([theirs], lr=RATE, weight_decay=decay)
    for step in range(1, 30):
        gradient, pull = normal(step), 0.5 * normal(100 + step) if extra else None
        theirs.grad = gradient.clone() if pull is None else gradient + pull
        optimiser.step()
        with way():
            adamw_step_(params, gradient, pull, kept, rate, decay)
        torch.testing.assert_close(params, theirs.detach(), rtol=0, atol=1e-12)
    state = optimiser.state[theirs]
    torch.testing.assert_close(kept[:, :DIM], state["exp_avg"], rtol=0, atol=1e-12)
    torch.testing.assert_close(kept[:, DIM:-1], state["exp_avg_sq"], rtol=0, atol=1e-12)
    assert (kept[:, -1] == 29).all()


@pytest.mark.parametrize("way", [nullcontext, plain])
def test_clients_may_have_taken_different_numbers_of_steps(way: Runner) -> None:
    """One that has taken 40 and one that takes its first, in float32: each as it would alone."""
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


@pytest.mark.parametrize("way", [nullcontext, plain])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("extra", [True, False])
def test_clipping_is_torchs_for_each_client(extra: bool, dtype: torch.dtype, way: Runner) -> None:
    """Clients whose norms are far below, just above and far above the limit."""
    gradient, pull = normal(1, dtype), normal(2, dtype) if extra else None
    whole = gradient if pull is None else gradient + pull
    scale = torch.tensor([[0.5], [1.01], [70.0]], dtype=dtype) / whole.norm(dim=1, keepdim=True)
    gradient, pull = gradient * scale, None if pull is None else pull * scale
    expected = []
    for row in range(CLIENTS):
        leaf = torch.zeros(DIM, dtype=dtype, requires_grad=True)
        leaf.grad = gradient[row].clone() if pull is None else gradient[row] + pull[row]
        torch.nn.utils.clip_grad_norm_([leaf], 1.0)
        expected.append(leaf.grad)
    with way():
        clip_(gradient, pull, 1.0)
    torch.testing.assert_close(gradient, torch.stack(expected))
    torch.testing.assert_close(gradient.norm(dim=1), torch.tensor([0.5, 1.0, 1.0], dtype=dtype), rtol=2e-6, atol=0)


@pytest.mark.parametrize("count", [1, 15, 16, 17, 5000])
def test_a_norm_is_of_all_entries(count: int) -> None:
    """Whole numbers, so that the sum is exact: all of them 3, the limit 1."""
    gradient = torch.full((1, count), 3.0, dtype=torch.float64)
    clip_(gradient, None, 1.0)
    norm = 3 * count**0.5
    torch.testing.assert_close(gradient, torch.full_like(gradient, 3 / (norm + 1e-6)), rtol=1e-14, atol=0)


def test_results_do_not_depend_on_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "_WORTH_WAKING", 1)
    results = []
    for threads in (1, 2, 5):
        params, gradient = normal(1, torch.float32), normal(3, torch.float32)
        kept = torch.zeros(CLIENTS, 2 * DIM + 1)
        with torch_threads(threads):
            clip_(gradient, normal(4, torch.float32), 1.0)
            adamw_step_(params, gradient, None, kept, RATE, 0.1)
        results.append(torch.cat([params, kept], dim=1))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])
