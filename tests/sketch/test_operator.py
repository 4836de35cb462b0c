"""The sketch as an operator: threads, shapes, and what it is a function of. Identities are in tests/test_lemmas.py."""

from __future__ import annotations

import numba
import pytest
import torch

from pfedlms.models.layout import Layer, Layout
from pfedlms.sketch import Sketch

LAYOUT = Layout((), (Layer("a", 0, 300), Layer("b", 300, 1), Layer("c", 301, 5000)))
THREADS = sorted({1, 2, numba.config.NUMBA_NUM_THREADS} & set(range(1, numba.config.NUMBA_NUM_THREADS + 1)))


@pytest.mark.parametrize("clients", [1, 2, 7])
def test_results_do_not_depend_on_threads_or_on_the_other_clients(clients: int) -> None:
    sketch = Sketch(LAYOUT, 0.1, seed=1, epoch=2)
    params = torch.randn(clients, LAYOUT.dim, generator=torch.Generator().manual_seed(clients))
    expected = sketch.forward_reference(params)
    for threads in THREADS:
        numba.set_num_threads(threads)
        assert torch.equal(sketch.forward(params), expected)
        assert torch.equal(sketch.adjoint(expected), sketch.adjoint_reference(expected))
        assert torch.equal(sketch.forward(params[-1:]), expected[-1:])


def test_another_seed_or_epoch_is_another_sketch() -> None:
    params = torch.randn(1, LAYOUT.dim, generator=torch.Generator().manual_seed(0))
    first = Sketch(LAYOUT, 0.1, seed=1, epoch=0).forward(params)
    assert torch.equal(first, Sketch(LAYOUT, 0.1, seed=1, epoch=0).forward(params))
    assert not torch.equal(first, Sketch(LAYOUT, 0.1, seed=2, epoch=0).forward(params))
    assert not torch.equal(first, Sketch(LAYOUT, 0.1, seed=1, epoch=1).forward(params))


def test_a_model_of_another_size_is_refused() -> None:
    """The kernels do not check bounds, so the operator must."""
    sketch = Sketch(LAYOUT, 0.1, seed=1, epoch=0)
    with pytest.raises(ValueError, match=rf"params: got shape \(2, 5\), expected \[clients, {LAYOUT.dim}\]"):
        sketch.forward(torch.ones(2, 5))
    with pytest.raises(ValueError, match="sketched: got shape"):
        sketch.adjoint(torch.ones(2, LAYOUT.dim))
