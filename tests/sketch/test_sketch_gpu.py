"""GPU kernels against the references, on a GPU or, up to 2^12 (and one column pass), under Triton's interpreter.

`make test-kernels` installs Triton and runs this file with TRITON_INTERPRET=1; elsewhere it is skipped without a GPU.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from definitions import rows_kept
from factories import layout_of, normal
from kernel_device import DEVICE, INTERPRETED
from pfedlms import rng
from pfedlms.sketch import Sketch, fwht_reference, shape_of
from pfedlms.sketch import gpu as kernels

SIZES = [*range(1, 13), 13, 14] if INTERPRETED else list(range(1, 25))


@pytest.mark.parametrize("bits", SIZES)
def test_transform_has_the_bits_of_the_reference(bits: int) -> None:
    x = normal(2, 1 << bits, seed=bits).to(DEVICE)
    assert torch.equal(kernels.fwht(x), fwht_reference(x))


@pytest.mark.parametrize("bits", [3, 12, 13])
def test_transform_twice_is_n_times_the_identity(bits: int) -> None:
    """H H = N I, on integers, where floats are exact."""
    x = torch.randint(-8, 9, (3, 1 << bits), generator=torch.Generator().manual_seed(1)).float().to(DEVICE)
    assert torch.equal(kernels.fwht(kernels.fwht(x)), x * (1 << bits))


def test_column_passes_cover_all_stages_in_order() -> None:
    for bits in range(13, 25):
        stride = kernels.BLOCK
        for start, radix in kernels.column_passes(1 << bits):
            assert start == stride
            assert 2 <= radix <= kernels.RADIX
            stride *= radix
        assert stride == 1 << bits
    assert len(kernels.column_passes(1 << 18)) == 1
    assert len(kernels.column_passes(1 << 24)) == 2


# A layer of one entry, one of one block, one with a column pass; more entries kept than one program makes.
LAYOUT = layout_of(37, 1, 5000)


def sketches(ratio: float) -> tuple[Sketch, Sketch]:
    """The same sketch for the host and for the device."""
    here, there = (Sketch(LAYOUT, ratio, seed=3, epoch=7, device=device) for device in ("cpu", DEVICE))
    return here, there


@pytest.mark.parametrize("ratio", [0.1, 1.0])
def test_kept_rows_are_those_of_the_host(ratio: float) -> None:
    """Hashed on the device from the constants of every layer."""
    shape = shape_of(LAYOUT, ratio)
    streams = [rng.stream(3, "sketch-rows", 7, index) for index in range(3)]
    constants = np.concatenate([shape.row_table, rng.row_constants(np.array(streams, dtype=np.uint64))])
    kept = [rows_kept(layer.size, layer.sketch(ratio), 3, 7, index) for index, layer in enumerate(LAYOUT.layers)]
    got = kernels.kept_rows(shape, torch.from_numpy(constants).to(DEVICE))
    assert got.tolist() == np.concatenate(kept).tolist()
    assert sketches(ratio)[1].rows.tolist() == np.concatenate(kept).tolist()


def test_sketch_has_the_bits_of_the_host() -> None:
    """Signs hashed in the kernel, padding, transform, rows, scale."""
    (here, there), params = sketches(0.1), normal(3, LAYOUT.dim)
    assert torch.equal(kernels.forward(there, params.to(DEVICE)).cpu(), here.forward(params))


def test_adjoint_is_that_of_the_host() -> None:
    """Stages run in another order, so the last bits differ: entries of about 1, sums of 2^13."""
    (here, there), u = sketches(0.1), normal(3, 1 + 6 + 819, seed=2)
    torch.testing.assert_close(
        kernels.adjoint(there, u.to(DEVICE)).cpu().double(), here.adjoint(u.double()), rtol=1e-5, atol=1e-5
    )


def test_split_has_the_bits_of_the_host_in_the_sketch_and_nearly_in_the_residual() -> None:
    (here, there), given = sketches(0.1), [normal(3, LAYOUT.dim, seed=seed) for seed in (1, 2, 3)]
    sketched, rest = kernels.split(there, *(each.to(DEVICE) for each in given))
    expected, left = here.split(*given)
    assert torch.equal(sketched.cpu(), expected)
    torch.testing.assert_close(rest.cpu(), left, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("ratio", [0.1, 1.0])
def test_spread_signs_are_the_same_whole_numbers(ratio: float) -> None:
    (here, there) = sketches(ratio)
    signs = torch.where(normal(2, here.size, seed=5) >= 0, 1.0, -1.0)
    spread = kernels.adjoint(there, signs.to(DEVICE), scaled=False).cpu()
    assert torch.equal(spread, here.spread(signs))
    assert torch.equal(spread, spread.round())


@pytest.mark.parametrize("ratio", [0.1, 0.5, 1.0])
def test_positions_map_every_kept_row_to_its_entry(ratio: float) -> None:
    """The layers are padded to 64, 1 and 8192; all other positions hold −1."""
    sketch = sketches(ratio)[1]
    expected = [-1] * (64 + 1 + 8192)
    begins = {0: 0, 1: 64, 2: 65}
    for entry, (layer, row) in enumerate(zip(sketch.layers.tolist(), sketch.rows.tolist(), strict=True)):
        expected[begins[layer] + row] = entry
    assert sketch.positions.tolist() == expected


@pytest.mark.parametrize("ratio", [0.1, 1.0])
def test_packed_signs_and_root_mean_squares_are_those_of_the_host(ratio: float) -> None:
    """Bit by bit, and in float64: sums of another order round to the same float32 but once in many millions."""
    sketch, y = sketches(ratio)[1], normal(3, sum(sketches(ratio)[0].sizes), seed=4)
    y[0, 0], y[1, 1], y[2, -1] = 0.0, -0.0, 1e25  # whose square is beyond float32
    signs, sizes = (value.cpu() for value in kernels.signs_and_rms(sketch, y.to(DEVICE)))
    assert signs.shape == (3, -(-y.shape[1] // 8))
    for row, own in zip(y.tolist(), signs.tolist(), strict=True):
        assert int.from_bytes(bytes(own), "little") == sum((value >= 0) << place for place, value in enumerate(row))
    parts = np.split(y.numpy().astype(np.float64), np.cumsum(sketch.sizes)[:-1], axis=1)
    roots = np.stack([np.sqrt([np.mean(row**2) for row in part]) for part in parts], axis=1)
    assert sizes.tolist() == roots.astype(np.float32).tolist()


@pytest.mark.parametrize("broken", [float("nan"), float("inf"), -float("inf")])
def test_an_infinite_or_nan_entry_shows_in_the_rms_of_its_layer(broken: float) -> None:
    sketch, y = sketches(0.1)[1], normal(2, 1 + 6 + 819, seed=4)
    y[1, 3] = broken
    assert torch.isfinite(kernels.signs_and_rms(sketch, y.to(DEVICE))[1]).tolist() == [
        [True] * 3,
        [False, True, True],
    ]


@pytest.mark.parametrize("ratio", [0.1, 1.0])
@pytest.mark.parametrize("unmoved", [0, 1, 2])
def test_a_step_has_the_bits_of_the_host(ratio: float, unmoved: int) -> None:
    """Signs taken from bits where they are spread, times a float32 of every layer; −0 where that is zero."""
    (here, there) = sketches(ratio)
    packed = np.random.default_rng(5).integers(0, 256, -(-here.size // 8), dtype=np.uint8)
    packed[-1] &= (1 << (here.size % 8 or 8)) - 1
    factors = np.float32([0.1, 0.7, 1e-3])
    factors[unmoved] = 0
    votes = torch.from_numpy(np.unpackbits(packed, count=here.size, bitorder="little")).float() * 2 - 1
    expected = here.spread(votes[None])[0].numpy() * np.repeat(factors, (37, 1, 5000))
    expected[np.repeat(factors, (37, 1, 5000)) == 0] = -0.0
    got = kernels.step(there, torch.from_numpy(packed).to(DEVICE), factors.tolist()).cpu().numpy()
    assert got.tobytes() == expected.tobytes()
    assert here.step(packed, factors).numpy().tobytes() == expected.tobytes()
