"""The sketch as an operator: its kernels against its definition, and the values that determine it. The paper's
statements about it are in tests/theory."""

from __future__ import annotations

import pytest
import torch

from definitions import dense_model
from factories import RATIO, SEED, SIZES, layout_of, normal, sketch_of
from pfedlms.backend import plain
from pfedlms.engine.graphs import rebuilt
from pfedlms.sketch import sketch_of_round


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("sizes", [SIZES, (1,), (2570, 8193), (70_000, 3, 64)])
@pytest.mark.parametrize("clients", [1, 5])
def test_the_kernels_have_the_bits_of_the_definition(sizes: tuple[int, ...], clients: int, dtype: torch.dtype) -> None:
    sketch = sketch_of(*sizes, ratio=0.1, epoch=1)
    theta, u = normal(clients, sum(sizes), seed=1, dtype=dtype), normal(clients, sketch.size, seed=2, dtype=dtype)
    others = normal(clients, sum(sizes), seed=3, dtype=dtype), normal(clients, sum(sizes), seed=4, dtype=dtype)
    fast = sketch.forward(theta), sketch.adjoint(u), sketch.spread(u), *sketch.split(theta, *others)
    assert {each.dtype for each in fast} == {dtype}
    with plain():
        slow = sketch.forward(theta), sketch.adjoint(u), sketch.spread(u), *sketch.split(theta, *others)
    for one, other in zip(fast, slow, strict=True):
        assert torch.equal(one, other)


def test_split_returns_the_sketch_and_the_residual() -> None:
    """y = Φx and x − (m/N) Φᵀy for x = θ − w + e, by a dense Φ; and D H Sᵀ of signs holds whole numbers."""
    sketch, dense = sketch_of(*SIZES), dense_model(SIZES, RATIO, SEED)
    theta, model, residual = (normal(3, sum(SIZES), seed=seed, dtype=torch.float64) for seed in (1, 2, 3))
    sketched, rest = sketch.split(theta, model, residual)
    x = theta - model + residual
    shares = torch.tensor([8 / 16, 8 / 16, 1 / 1, 4 / 8, 32 / 64, 32 / 64], dtype=torch.float64)
    back = (sketched @ dense) * shares.repeat_interleave(torch.tensor(SIZES))
    torch.testing.assert_close(sketched, x @ dense.T, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(rest, x - back, rtol=1e-12, atol=1e-12)

    signs = torch.where(normal(2, sketch.size, seed=4) >= 0, 1.0, -1.0)
    rows = torch.tensor([8, 8, 1, 4, 32, 32]).repeat_interleave(torch.tensor(SIZES))
    whole = (signs.double() @ dense) * rows.double().sqrt()
    torch.testing.assert_close(whole, whole.round(), rtol=0, atol=1e-9)
    assert torch.equal(sketch.spread(signs).double(), whole.round())


def test_models_need_not_be_contiguous() -> None:
    theta = normal(7, sum(SIZES), seed=1)
    assert torch.equal(sketch_of(*SIZES).forward(theta[::2]), sketch_of(*SIZES).forward(theta)[::2])


def test_the_definition_can_be_differentiated() -> None:
    """The gradient of ⟨u, Φθ⟩ is Φᵀu."""
    sketch, u = sketch_of(*SIZES), normal(2, 85, seed=2, dtype=torch.float64)
    theta = normal(2, sum(SIZES), dtype=torch.float64).requires_grad_()
    with plain():
        (u * sketch.forward(theta)).sum().backward()
    torch.testing.assert_close(theta.grad, u @ dense_model(SIZES, RATIO, SEED), rtol=1e-12, atol=1e-12)


def test_a_sketch_rebuilt_with_other_tensors_is_the_other_sketch() -> None:
    """Cached values of the first sketch are not copied."""
    theta, (first, second) = normal(2, sum(SIZES)), (sketch_of(*SIZES, epoch=epoch) for epoch in (0, 1))
    expected = first.forward(theta), second.forward(theta)
    copy = rebuilt(first, iter([second.keys, second.rows]))
    assert torch.equal(copy.forward(theta), expected[1])
    assert torch.equal(first.forward(theta), expected[0])


def test_a_cached_sketch_belongs_to_its_seed_and_epoch() -> None:
    theta = normal(1, sum(SIZES), dtype=torch.float64)
    for seed, epoch in ((SEED, 0), (SEED + 1, 0), (SEED, 1), (SEED, 0)):
        sketch = sketch_of_round(layout_of(*SIZES), RATIO, seed, epoch, torch.device("cpu"))
        expected = theta @ dense_model(SIZES, RATIO, seed, epoch).T
        torch.testing.assert_close(sketch.forward(theta), expected, rtol=1e-12, atol=1e-12)
