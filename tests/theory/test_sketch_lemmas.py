"""The paper's statements about Φ."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from math import sqrt

import numpy as np
import pytest
import torch
from plain_client import padded, sketch_size

from definitions import dense_model, layer_of_entry
from factories import RATIO, SEED, SIZES, normal, sketch_of
from pfedlms.backend import plain


@pytest.mark.parametrize("way", [nullcontext, plain])
@pytest.mark.parametrize("epoch", [0, 3])
def test_the_sketch_equals_the_dense_matrix(epoch: int, way: Callable[[], AbstractContextManager[None]]) -> None:
    """Φ = 1/√m S H D P and its transpose, several layers, against explicit matrices."""
    sketch, phi = sketch_of(*SIZES, epoch=epoch), dense_model(SIZES, RATIO, SEED, epoch)
    assert sketch.sizes == (8, 8, 1, 4, 32, 32)
    assert sketch.size == 85
    assert torch.equal(sketch.layers, layer_of_entry(SIZES, RATIO))
    theta, u = normal(3, sum(SIZES), seed=1, dtype=torch.float64), normal(3, 85, seed=2, dtype=torch.float64)
    with way():
        torch.testing.assert_close(sketch.forward(theta), theta @ phi.T, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(sketch.adjoint(u), u @ phi, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.float64, 1e-12)])
def test_lemma_adjoint_identity_for_every_layer(dtype: torch.dtype, tolerance: float) -> None:
    """⟨Φ_l x, u⟩ = ⟨x, Φ_lᵀ u⟩ for every layer, padded or not, and no layer reaches into another."""
    sketch = sketch_of(*SIZES)
    ends, stops = np.cumsum(SIZES), np.cumsum(sketch.sizes)
    for index, (n, m) in enumerate(zip(SIZES, sketch.sizes, strict=True)):
        x, u = torch.zeros(1, sum(SIZES), dtype=dtype), torch.zeros(1, sketch.size, dtype=dtype)
        entries, own = slice(ends[index] - n, ends[index]), slice(stops[index] - m, stops[index])
        x[0, entries], u[0, own] = normal(n, seed=index, dtype=dtype), normal(m, seed=50 + index, dtype=dtype)
        y, back = sketch.forward(x), sketch.adjoint(u)
        assert float((y * u).sum()) == pytest.approx(float((x * back).sum()), rel=tolerance, abs=tolerance)
        assert y[0, own].abs().sum() > 0
        y[0, own], back[0, entries] = 0, 0
        assert not y.any()
        assert not back.any()


@pytest.mark.parametrize("size", [1, 2, 16, 64, 4096])
def test_lemma_rows_are_orthogonal_without_padding(size: int) -> None:
    """Φ Φᵀ = (N/m) I for a layer without padding."""
    sketch = sketch_of(size, ratio=1 / 64 if size > 64 else RATIO, epoch=2)
    identity = torch.eye(sketch.size, dtype=torch.float64)
    product = sketch.forward(sketch.adjoint(identity))
    torch.testing.assert_close(product, identity * size / sketch.size, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("size", [11, 33, 5])
def test_lemma_rows_are_not_orthogonal_with_padding(size: int) -> None:
    """With padding the diagonal of ΦΦᵀ is n/m < N/m and other entries are not zero."""
    sketch = sketch_of(size)
    product = sketch.forward(sketch.adjoint(torch.eye(sketch.size, dtype=torch.float64)))
    torch.testing.assert_close(product.diagonal(), torch.full((sketch.size,), size / sketch.size, dtype=torch.float64))
    assert (product - torch.diag(product.diagonal())).abs().max() > 0.1


@pytest.mark.parametrize("size", [1, 5, 11, 16, 33, 64, 100])
@pytest.mark.parametrize("ratio", [0.1, 0.5, 1.0])
def test_lemma_norm_of_the_sketch(size: int, ratio: float) -> None:
    """‖Φ‖₂ ≤ √(N/m), with equality without padding (largest singular value of the matrix of `forward`)."""
    sketch, m = sketch_of(size, ratio=ratio, epoch=1), sketch_size(size, ratio)
    matrix = sketch.forward(torch.eye(size, dtype=torch.float64)).T.numpy()
    largest, bound = np.linalg.svd(matrix, compute_uv=False)[0], sqrt(padded(size) / m)
    assert largest <= bound * (1 + 1e-12)
    assert np.allclose(np.abs(matrix), 1 / sqrt(m))
    if size == padded(size):
        assert largest == pytest.approx(bound, rel=1e-12)
