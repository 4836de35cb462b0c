"""Bias, variance and slope of the methods' estimates, measured over their random numbers."""

from __future__ import annotations

from math import erf, pi, sqrt

import numpy as np
import pytest
import torch
from plain_client import padded
from torch import Tensor

from factories import SEED, cohort_of, hold, layout_of, normal, sketch_of, task_of
from pfedlms.methods.eden import Codec
from pfedlms.methods.fetchsgd import CountSketch
from pfedlms.methods.obcsaa import decode_mean_of_signs
from pfedlms.methods.zsign import SumOfSigns, ZSignSettings
from pfedlms.sketch import Sketch

# --- sketches of values and of signs ----------------------------------------------------------------------------------


@pytest.mark.parametrize("dim", [64, 50], ids=["whole", "padded"])
def test_a_sketch_of_values_is_unbiased_with_the_variance_of_the_formula(dim: int) -> None:
    """E ΦᵀΦx = x and, without padding, E ‖ΦᵀΦx − x‖² = (N/m − 1) ‖x‖²: over 500 sketches."""
    x, draws = normal(dim, seed=1, dtype=torch.float64), 500
    sketches = (sketch_of(dim, ratio=0.25, epoch=epoch) for epoch in range(draws))
    off = torch.stack([sketch.adjoint(sketch.forward(x)) for sketch in sketches]) - x
    assert (off.mean(dim=0).abs() < 5 * off.std(dim=0) / sqrt(draws)).all()
    if dim == padded(dim):
        variance = off.square().sum(dim=1)
        assert abs(variance.mean() - (4 - 1) * x.square().sum()) < 5 * variance.std() / sqrt(draws)


def test_the_slope_of_signs_is_two_over_pi_of_that_of_values() -> None:
    """⟨√(2/π) rms(y) Φᵀ sign(y), x⟩ against ⟨Φᵀy, x⟩, for y that is nearly normal: so a gain of π/2 is the unit
    slope."""
    x, slopes = normal(4096, seed=1, dtype=torch.float64), []
    for epoch in range(20):
        sketch = sketch_of(4096, ratio=0.25, epoch=epoch)
        y = sketch.forward(x)
        signs = sqrt(2 / pi) * y.square().mean().sqrt() * sketch.adjoint(torch.where(y >= 0, 1.0, -1.0).double())
        slopes.append(float(signs @ x / (sketch.adjoint(y) @ x)))
    assert np.mean(slopes) == pytest.approx(2 / pi, rel=0.01)


def test_a_row_of_a_count_sketch_is_unbiased_with_the_variance_of_its_collisions() -> None:
    """E x̂(i) = x(i), Var x̂(i) = (‖x‖² − x(i)²) / columns (Charikar, Chen, Farach-Colton 2002): over 400 rows."""
    x, rows, columns = normal(200, seed=1), 400, 20
    sketch = CountSketch(200, rows, columns, SEED)
    table = sketch.of(x[None])[0].double()
    cells, signs = sketch._cells_and_signs
    estimates, exact = table[cells] * signs, x.double()
    variance = (exact.square().sum() - exact.square()) / columns
    assert ((estimates.mean(dim=0) - exact).abs() < 5 * (variance / rows).sqrt()).all()
    assert float((estimates.var(dim=0) / variance).mean()) == pytest.approx(1, abs=0.05)


# --- EDEN -------------------------------------------------------------------------------------------------------------


def estimates(x: Tensor, bits: int, rotations: int) -> Tensor:
    """x̂ under that many rotations, float64 `[rotations, dim]`."""
    codec, ids = Codec(len(x), bits, seed=1), tuple(range(rotations))
    return codec.decode(*codec.encode(x.expand(rotations, -1).contiguous(), ids, 0), list(ids), 0).double()


@pytest.mark.parametrize(("bits", "stated", "within"), [(1, pi / 2 - 1, 0.01), (2, 0.1331, 0.004), (3, 0.035, 0.0015)])
@pytest.mark.parametrize("power", [1, 3], ids=["normal", "heavy-tailed"])
def test_the_error_of_an_estimate_is_the_published_one(bits: int, stated: float, within: float, power: int) -> None:
    """E ‖x̂ − x‖² / ‖x‖² for any x: π/2 − 1 at one bit, near 0.035 at three; for large dim it is 1/(1 − D) − 1 with the
    mean squared error D of the quantiser (Max, IRE Trans. Inf. Theory 1960, table 1)."""
    x = normal(1 << 14, seed=2) ** power
    error = float((estimates(x, bits, 10) - x.double()).square().sum(dim=1).mean() / x.double().norm() ** 2)
    assert error == pytest.approx(stated, abs=within)
    assert error == pytest.approx(1 / (1 - {1: 0.3634, 2: 0.1175, 3: 0.03454}[bits]) - 1, rel=0.015)


@pytest.mark.parametrize("bits", [1, 2, 3])
def test_along_the_vector_every_estimate_is_exact(bits: int) -> None:
    """⟨x̂, x⟩ = ‖x‖² for each rotation, in every chunk: all error is across x, and averages out."""
    x = normal(1024 + 300, seed=2) ** 3
    each = estimates(x, bits, 20)
    for part in (slice(0, 1024), slice(1024, None)):
        own = x[part].double()
        np.testing.assert_allclose((each[:, part] @ own).numpy(), float(own @ own), rtol=1e-5)


def test_one_rotation_is_not_unbiased_for_every_vector() -> None:
    """x = (2, 1, 0, …): every entry of HDx/√d is ±(2 ± 1)/√d, with the sign of the first alone, whatever D is. Then
    ⟨q, y⟩ is 2 √d c for a centroid ±c, and x̂ = (5/2, 0, 0, …), always."""
    x, expected = torch.zeros(1024), torch.zeros(1024, dtype=torch.float64)
    x[:2], expected[0] = torch.tensor([2.0, 1.0]), 2.5
    torch.testing.assert_close(estimates(x, 1, 50), expected.expand(50, -1), rtol=1e-5, atol=1e-5)


# --- OBCSAA -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dim", "measured", "kept"), [(4096, 2048, 40), (1000, 900, 20)], ids=["whole", "padded"])
def test_the_decoder_recovers_a_direction_from_signs(dim: int, measured: int, kept: int) -> None:
    """At least forty signs for each entry that is not zero: every direction within 25°, the mean within 18°, nearer
    than Φᵀ sign(Φx), where the iteration begins; and nearer still with a hundred steps."""
    cosines = []
    for seed in range(6):
        sketch, x = Sketch(layout_of(dim), measured / padded(dim), seed, 0), torch.zeros(1, dim)
        x[0, torch.randperm(dim, generator=torch.Generator().manual_seed(seed))[:kept]] = normal(kept, seed=seed + 100)
        signs = torch.where(sketch.forward(x) >= 0, 1.0, -1.0)
        found = [decode_mean_of_signs(sketch, signs, kept, iterations) for iterations in (0, 10, 100)]
        assert (found[1] != 0).sum() <= kept
        cosines.append([float(torch.cosine_similarity(each, x)) for each in found])
    assert min(own[1] for own in cosines) > 0.91
    none, ten, hundred = 1 - np.mean(cosines, axis=0)
    assert ten < 0.045
    assert hundred < 0.85 * ten < 0.85**2 * none


# --- z-SignFedAvg -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("sigma", "bias"), [(0.25, -0.0588), (1.0, -0.0044)])
def test_the_bias_of_gaussian_noise_falls_with_sigma(sigma: float, bias: float) -> None:
    """From x = 0.3 the server estimates √(π/2) σ erf(x / (σ√2)), which tends to x as σ grows."""
    count, rate = 400_000, 0.1
    assert sqrt(pi / 2) * sigma * erf(0.3 / (sigma * sqrt(2))) - 0.3 == pytest.approx(bias, abs=1e-4)
    exchange = SumOfSigns(task_of(count, clients=1, learning_rate=rate), ZSignSettings(noise="gaussian", sigma=sigma))
    clients = cohort_of(torch.full((1, count), -rate * 0.3), model=torch.zeros(count))
    _, server = hold(exchange, clients, {"model": torch.zeros(count)})
    got = float(-server["model"].double().mean() / rate)
    assert got - 0.3 == pytest.approx(bias, abs=1e-4 + 5 * sqrt(pi / 2) * sigma / sqrt(count))
