"""The pieces as a library: docstring examples, arrays and tensors, one vector, autograd, and wrong arguments.

Their results are tested in the tests of their modules.
"""

from __future__ import annotations

import doctest
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.autograd import forward_ad

import pfedlms.aggregate
import pfedlms.models.layout
import pfedlms.pull
import pfedlms.quantise
import pfedlms.sketch
import pfedlms.wire.codec
from definitions import dense_model
from factories import RATIO, SEED, SIZES, layout_of, normal, sketch_of, some_pull
from pfedlms.aggregate import SignVote, Vote, WeightedMean, limit_weights, outliers, pool_statistics, weighted_medians
from pfedlms.models import Layer, Layout, flat_layout
from pfedlms.pull import Pull
from pfedlms.quantise import normal_quantiles, statistics, symbols_of, thresholds_of
from pfedlms.sketch import Sketch

MODULES = {
    pfedlms.aggregate: {"Vote", "WeightedMean", "pool_statistics", "weighted_medians"},
    pfedlms.models.layout: {"Layer", "Layout"},
    pfedlms.pull: {"Pull"},
    pfedlms.quantise: {"symbols_of"},
    pfedlms.sketch: {"Sketch"},
    pfedlms.wire.codec: {"pack"},
}


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_examples_in_docstrings_run(module: ModuleType) -> None:
    found = {test.name.removeprefix(f"{module.__name__}."): test for test in doctest.DocTestFinder().find(module)}
    assert all(found[name].examples for name in MODULES[module]), "every piece has an example"
    assert doctest.testmod(module, verbose=False).failed == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_sketch_returns_the_type_that_it_was_given(dtype: torch.dtype) -> None:
    """The same bits for arrays and tensors, for all clients and for one vector; by hand for one of them."""
    sketch = sketch_of(*SIZES)
    theta, u = normal(3, sketch.dim, dtype=dtype), normal(3, sketch.size, seed=1, dtype=dtype)
    others = normal(3, sketch.dim, seed=2, dtype=dtype), normal(3, sketch.dim, seed=3, dtype=dtype)
    functions: list[tuple[Callable[..., Any], tuple[torch.Tensor, ...]]] = [
        (sketch.forward, (theta,)), (sketch.adjoint, (u,)),
        (lambda *given: sketch.split(*given)[0], (theta, *others)),
        (lambda *given: sketch.split(*given)[1], (theta, *others)),
        (some_pull(3, 0.1, 0.3).pull.gradient, (theta,)),
    ]  # fmt: skip
    for function, given in functions:
        expected = function(*given)
        array, row = function(*(each.numpy() for each in given)), function(*(each[1] for each in given))
        assert isinstance(array, np.ndarray)
        assert array.tobytes() == expected.numpy().tobytes()
        assert torch.equal(row, expected[1])
        alone = function(*(each[1].numpy() for each in given))
        assert (type(alone), alone.shape) == (np.ndarray, expected[1].shape)
        assert alone.tobytes() == expected[1].numpy().tobytes()
    dense = dense_model(SIZES, RATIO, SEED)
    np.testing.assert_allclose(
        sketch.forward(theta[0].numpy()), dense.numpy() @ theta[0].double().numpy(), rtol=1e-4, atol=1e-5
    )


def test_a_sketch_of_one_vector() -> None:
    made = Sketch.of_vector(100, 0.25, seed=3, epoch=2)
    assert torch.equal(made.rows, Sketch(layout_of(100), 0.25, 3, 2).rows)
    assert made.forward(torch.ones(100)).shape == (32,)
    assert Sketch.of_vector(np.int64(100), np.float64(0.25), np.uint64(3)).sizes == (32,)


def test_aggregates_accept_arrays_and_tensors() -> None:
    symbols, weights = np.array([[0, 3], [2, 1], [2, 0]], dtype=np.uint8), np.array([5, 1, 3])
    votes = [Vote(2, 3) for _ in range(3)]
    votes[0].add(symbols, weights)
    votes[1].add(torch.from_numpy(symbols), torch.from_numpy(weights))
    for own, weight in zip(symbols, weights, strict=True):
        votes[2].add(own, weight)
    assert [vote.result().tolist() for vote in votes] == [[0, 3]] * 3
    assert {(vote.clients, vote.total) for vote in votes} == {(3, 9)}

    assert WeightedMean(1).add(np.int32(7), np.ones((1, 1))).result().tolist() == [1]
    values = np.float32([[1, 2], [3, 4]])
    for given in (values, torch.from_numpy(values)):
        assert WeightedMean(2).add(np.array([1, 3]), given).result().tolist() == [2.5, 3.5]
        assert weighted_medians(torch.tensor([1, 3]), given).tolist() == [3, 4]
    for samples in (np.array([10, 10, 80]), torch.tensor([10, 10, 80])):
        assert limit_weights(samples, 0.4) == [10, 10, 13]
    arrays = pool_statistics([1, 3], values, values)
    tensors = pool_statistics([1, 3], torch.from_numpy(values), torch.from_numpy(values))
    assert all(isinstance(each, np.ndarray) for each in arrays)
    assert [each.tolist() for each in tensors] == [each.tolist() for each in arrays]
    assert {each.dtype for each in tensors} == {torch.float32}


@pytest.mark.parametrize("of", [torch.Tensor.clone, torch.Tensor.numpy], ids=["tensors", "arrays"])
def test_all_steps_from_sketch_to_pull_keep_the_type(of: Any) -> None:
    """Statistics, thresholds, symbols, vote and pull one after another; symbols by counting."""
    sketch, theta, samples = sketch_of(16, 5), normal(3, 21), [3, 1, 2]
    sketched = sketch.forward(of(theta))
    mean, deviation = pool_statistics(samples, *statistics(sketched, sketch.sizes))
    tau = thresholds_of(mean, deviation, normal_quantiles(3))
    symbols = symbols_of(sketched, tau, sketch.sizes)
    assert {type(each) for each in (sketched, mean, deviation, tau, symbols)} == {type(of(theta))}
    y, limits = np.asarray(sketched), np.asarray(tau).repeat(sketch.sizes, axis=0)
    assert np.asarray(symbols).tolist() == (y[:, :, None] >= limits[None]).sum(axis=2).tolist()
    alone = symbols_of(sketched[1], tau, sketch.sizes)
    assert alone.tolist() == symbols[1].tolist()
    assert [each.tolist() for each in statistics(sketched[1], sketch.sizes)] == [
        each[1].tolist() for each in statistics(sketched, sketch.sizes)
    ]
    vote = Vote(sketch.size, 3)
    vote.add(symbols, samples)
    assert Pull(sketch, tau, deviation, vote.result(), 0.1, 0.1).gradient(of(theta)).shape == (3, 21)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")  # of torch itself
def test_forward_and_adjoint_are_gradients_of_each_other() -> None:
    """Against a dense Φ, through functions that are not linear, to the second order, of rows and of a vector. Other
    functions can be differentiated, too: that of the pull is piecewise linear."""
    sketch, dense = sketch_of(*SIZES), dense_model(SIZES, RATIO, SEED)
    theta = normal(2, sketch.dim, dtype=torch.float64).requires_grad_()
    u = normal(2, sketch.size, seed=1, dtype=torch.float64).requires_grad_()
    for function, values, matrix in ((sketch.forward, theta, dense.T), (sketch.adjoint, u, dense)):
        for given in (values, values[0]):
            (got,) = torch.autograd.grad(function(given).pow(3).sum(), values, create_graph=True)
            (expected,) = torch.autograd.grad((given @ matrix).pow(3).sum(), values, create_graph=True)
            torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-9)
            (got,) = torch.autograd.grad(got.pow(2).sum(), values)
            (expected,) = torch.autograd.grad(expected.pow(2).sum(), values)
            torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-9)
    given = [normal(1, sketch.dim, seed=seed, dtype=torch.float64).requires_grad_() for seed in range(3)]
    assert torch.autograd.gradcheck(lambda *own: sketch.split(*own)[1], given)
    assert torch.autograd.gradcheck(some_pull(3, 0.1, 0.3).pull.gradient, given[0])
    with forward_ad.dual_level():  # forward derivatives, which kernels would lose
        along = forward_ad.unpack_dual(sketch.forward(forward_ad.make_dual(theta.detach(), theta.detach()))).tangent
    torch.testing.assert_close(along, (theta @ dense.T).detach())


SKETCH = sketch_of(16, 5)
X = torch.zeros(2, 21)
TAU, SIGMA, CONSENSUS = torch.tensor([[-1.0, 1.0]] * 2), torch.ones(2), torch.zeros(12, dtype=torch.uint8)
ONE = np.ones((1, 1), np.float32)


def pull(tau: Any = TAU, sigma: Any = SIGMA, consensus: Any = CONSENSUS, strength: Any = 0.1, rho: Any = 0.1) -> Pull:
    return Pull(SKETCH, tau, sigma, consensus, strength, rho)


REFUSED: list[tuple[Callable[[], Any], str]] = [
    (lambda: SKETCH.forward(torch.zeros(2, 5)), r"params: got shape \(2, 5\), expected \[clients, 21\] or \[21\]; "),
    (lambda: SKETCH.forward(X.long()), r"params: got torch.int64, expected torch.float32.*\.float\(\)"),
    (lambda: SKETCH.forward([0.0] * 21), "params: got list, expected an array or a tensor of real numbers"),
    (lambda: SKETCH.forward(X.to("meta")), "params: got a tensor on meta, expected one on cpu, as the sketch"),
    (
        lambda: SKETCH.split(X, X.double(), X),
        r"split: got params torch.float32 \[2, 21\], model torch.float64 .*, expect",
    ),
    (lambda: SKETCH.split(X, X[:1], X), r"split: got .*, model torch.float32 \[1, 21\], .* same type and shape"),
    (lambda: Sketch.of_vector(16, 1.5, 0), "ratio: got 1.5, expected at most 1 and above 0"),
    (lambda: Sketch(layout_of(5), 0.1, 0, 0, None, -1), "allocation: got -1, expected 0 to 8"),
    (lambda: Sketch.of_vector(0, 0.1, 0), "size: got 0, expected a whole number of at least 1"),
    (lambda: Sketch.of_vector(16, 0.1, -1), "seed: got -1, expected a whole number from 0 to"),
    (lambda: pull(tau=TAU[:1]), r"thresholds, .*: got \[1, 2\], .* expected \[2, T\], \[2\] and torch.uint8 \[12\]"),
    (lambda: pull(consensus=CONSENSUS[:5]), r"consensus: got .* torch.uint8 \[5\], expected"),
    (lambda: pull(consensus=CONSENSUS + 3), "consensus: got symbols up to 3, expected 0 to 2"),
    (lambda: pull(tau=TAU.flip(1)), "thresholds, deviations: got NaN, no or falling thresholds, or a negative"),
    (lambda: pull(tau=TAU * torch.nan), "thresholds, deviations: got NaN"),
    (lambda: pull(sigma=-SIGMA), "thresholds, deviations: got .* or a negative deviation"),
    (lambda: SKETCH.spread(torch.ones(1, 3)), r"sketched: got shape \(1, 3\), expected \[clients, 12\]"),
    (lambda: SKETCH.step(np.zeros(1, np.uint8), ONE[0]), r"signs, factors: got uint8 \[1\] and \[1\], expected uint8"),
    (lambda: thresholds_of(ONE[0], -ONE[0], ONE[0]), r"mean, deviation: got .*, expected one of each for every"),
    (lambda: statistics(X, [21, 0]), "sizes: got 0, expected a whole number of at least 1"),
    (lambda: weighted_medians([2**63, 1], np.ones((2, 1))), "weights: got .*; their sum must be a whole number of 64"),
    (lambda: pull(rho=0), "strength, smoothing: got 0.1 and 0, expected finite numbers"),
    (lambda: Vote(3, 0), "thresholds: got 0, expected a whole number from 1 to 255; symbols"),
    (lambda: Vote(3, 1).add(np.zeros(3), 1), r"vote: got symbols up to 0 of float64 \(3,\), expected .* uint8"),
    (lambda: Vote(3, 1).add(np.uint8([0, 2, 0]), 1), r"vote: got symbols up to 2 .*, expected 0 to 1"),
    (lambda: Vote(3, 1).add(np.uint8([0, 1]), 1), r"got symbols up to 1 of uint8 \(2,\), expected .*\(3,\)"),
    (lambda: Vote(1, 1).add(np.uint8([[0], [1]]), [3]), "weights: got 1, expected 2, the number of samples of every"),
    (lambda: Vote(1, 1).add(np.uint8([[0], [1]]), [1, 0.5]), r"weights\[1\]: got 0.5, expected a whole number of at"),
    (lambda: WeightedMean(2).add([1], ONE), r"values: got shape \(1, 1\), expected \[clients, 2\]; pass one client"),
    (lambda: WeightedMean(1).result(), "mean: got no client's values, expected at least one; call"),
    (lambda: weighted_medians([1], -ONE), r"values\[0, 0\]: got -1.0, expected a"),
    (lambda: pool_statistics([1], ONE, ONE[0]), r"means, variances: got shapes \(1, 1\) and \(1,\), expected"),
    (lambda: pool_statistics([1], ONE * np.nan, ONE), r"means\[0, 0\]: got nan, expected a finite numb"),
    (lambda: pool_statistics([1], ONE, ONE, "mode"), "pooling: got 'mode', expected one of mean, median"),
    (lambda: limit_weights([10, 80], float("nan")), "share: got nan, expected at most 1"),
    (lambda: outliers(ONE[0], 10), r"values: got shape \(1,\), expected \[clients, entries\]; pass one number each"),
    (lambda: symbols_of(X, torch.zeros(2, 256), [16, 5]), r"thresholds: got shape \[2, 256\], .* T from 1 to 255"),
    (lambda: symbols_of(X, TAU.flip(1), [16, 5]), "got NaN, or thresholds that fall"),
    (lambda: symbols_of(X, TAU[:, :1] * torch.nan, [16, 5]), "got NaN, or"),
    (lambda: symbols_of(torch.where(torch.arange(21) == 20, torch.nan, X), TAU, [16, 5]), "got NaN, or"),
    (lambda: normal_quantiles(256), "thresholds: got 256, expected a whole number from 1 to 255; a symbol is one byte"),
    (lambda: Layer("a", 0, 0), "layer 'a': size: got 0, expected a whole number of at le"),
    (lambda: Layout((), (Layer("a", 0, 5), Layer("b", 6, 5))), "layers: 'b' begins at 6, expected 5, where"),
]


@pytest.mark.parametrize(("use", "message"), REFUSED, ids=[message.partition(",")[0] for _, message in REFUSED])
def test_wrong_arguments_are_refused_with_a_message_of_one_line(use: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        use()
    assert "\n" not in str(caught.value)


def test_a_split_is_differentiated_by_each_of_its_arguments() -> None:
    sketch = Sketch.of_vector(8, 0.5, seed=1)
    rows = [torch.arange(8.0).reshape(1, 8) + shift for shift in range(3)]
    for place, sign in enumerate((1.0, -1.0, 1.0)):  # params − model + residual
        given = [row.clone().requires_grad_(number == place) for number, row in enumerate(rows)]
        sketched, _ = sketch.split(*given)
        (gradient,) = torch.autograd.grad(sketched.sum(), given[place])
        torch.testing.assert_close(gradient, sign * sketch.adjoint(torch.ones_like(sketched)))


def test_weights_of_packed_signs_are_whole_numbers_per_client_and_layer() -> None:
    for weights in ([[1, 2, 3], [4, 5, 6]], [[1.5, 1], [1, 1], [1, 1]], [[-1, 1], [1, 1], [1, 1]]):
        with pytest.raises(
            ValueError, match=r"weights: got .*, expected whole numbers of at least 0, \[clients, layers"
        ):
            SignVote([3, 2]).add(np.uint8([[1], [2], [3]]), weights)


def test_refused_values_are_not_counted() -> None:
    vote, mean = Vote(2, 1), WeightedMean(1)
    for weights in ([1], [1, -1]):
        with pytest.raises(ValueError):
            vote.add(np.zeros((2, 2), np.uint8), weights)
        with pytest.raises(ValueError):
            mean.add(weights, np.ones((2, 1)))
    assert (vote.clients, vote.total, vote.counts.sum()) == (0, 0, 0)


def test_arrays_of_any_strides_are_accepted_and_a_number_is_no_vector() -> None:
    """One row in reverse order is contiguous for NumPy, and has a negative stride."""
    theta = normal(1, 21).numpy()
    assert np.array_equal(SKETCH.forward(theta[::-1]), SKETCH.forward(theta))
    assert np.array_equal(SKETCH.forward(theta[:, ::-1]), SKETCH.forward(theta[:, ::-1].copy()))
    assert Sketch.of_vector(1, 1.0, 0).forward(np.ones(1)[::-1]).shape == (1,)
    with pytest.raises(ValueError, match=r"params: got shape \(\), expected \[clients, 1\] or \[1\]"):
        Sketch.of_vector(1, 1.0, 0).forward(np.array(1.0))


def test_a_pull_takes_what_thresholds_of_gives() -> None:
    """Also thresholds beyond the range of float32; and numbers in half precision, or that require grad."""
    tau = thresholds_of(np.float32([3e38, 0]), np.float32([3e38, 1]), normal_quantiles(3))
    assert np.isinf(tau).any()
    assert np.isfinite(pull(tau=tau).gradient(X.numpy())).all()
    for dtype in (torch.float16, torch.bfloat16):
        half = pull(tau=TAU.to(dtype).requires_grad_(), sigma=SIGMA.to(dtype))
        assert torch.allclose(half.gradient(X), pull().gradient(X))


def test_bfloat16_is_taken_where_other_numbers_are_rounded() -> None:
    values = torch.tensor([[1.5], [2.5]])
    half = values.bfloat16()
    assert torch.equal(thresholds_of(half[0], half[1], np.float32([1])), torch.tensor([[4.0]]))
    assert weighted_medians([1, 3], half).tolist() == [2.5]
    for got, expected in zip(pool_statistics([1, 3], half, half), pool_statistics([1, 3], values, values), strict=True):
        assert torch.equal(got, expected)


def test_reprs_describe_the_objects() -> None:
    layout = flat_layout(nn.Sequential(nn.Linear(30, 40), nn.Linear(40, 2)))
    assert repr(layout) == "Layout(2 layers, 1,322 parameters)"
    assert repr(Sketch(layout, 0.5, 3, 9)) == "Sketch(2 layers, 1,322 → 1,088 entries)"
    assert repr(some_pull(7, 0.05, 0.1).pull) == "Pull(130 → 85 entries, thresholds 7, strength 0.05, smoothing 0.1)"
    assert repr(Vote(1000, 7)) == "Vote(size 1,000, thresholds 7, 0 clients of weight 0)"


def test_layers_accept_numbers_of_numpy() -> None:
    layout = Layout((("a", (3,)),), (Layer("a", np.int64(0), np.int64(3)),))
    assert layout == Layout((("a", (3,)),), (Layer("a", 0, 3),))
    assert layout.layers[0].pad == 4
