"""GPU kernels against the references, on a GPU or, up to 2^12 (and one column pass), under Triton's interpreter.

`make test-kernels` installs Triton and runs this file with TRITON_INTERPRET=1; elsewhere it is skipped without a GPU.
"""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed; make test-kernels installs it")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if not (INTERPRETED or torch.cuda.is_available()):
    pytest.skip("needs a GPU or TRITON_INTERPRET=1", allow_module_level=True)

from definitions import rows_kept  # noqa: E402 - after the skip
from factories import layout_of, normal  # noqa: E402
from pfedlms import rng  # noqa: E402
from pfedlms.sketch import Sketch, fwht_reference, shape_of  # noqa: E402
from pfedlms.sketch import gpu as kernels  # noqa: E402

DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
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
def test_rows_are_those_of_the_host(ratio: float) -> None:
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


def test_what_is_said_has_the_bits_of_the_host_and_what_is_not_nearly() -> None:
    (here, there), given = sketches(0.1), [normal(3, LAYOUT.dim, seed=seed) for seed in (1, 2, 3)]
    said, unsaid = kernels.split(there, *(each.to(DEVICE) for each in given))
    expected, left = here.split(*given)
    assert torch.equal(said.cpu(), expected)
    torch.testing.assert_close(unsaid.cpu(), left, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("ratio", [0.1, 1.0])
def test_signs_spread_to_the_same_whole_numbers(ratio: float) -> None:
    (here, there) = sketches(ratio)
    signs = torch.where(normal(2, here.size, seed=5) >= 0, 1.0, -1.0)
    spread = kernels.adjoint(there, signs.to(DEVICE), scaled=False).cpu()
    assert torch.equal(spread, here.spread(signs))
    assert torch.equal(spread, spread.round())
