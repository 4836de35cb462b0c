"""GPU kernels against the references, on a GPU or, up to 2^12 (and one column pass), under Triton's interpreter.

`make test-kernels` installs Triton and runs this file with TRITON_INTERPRET=1; elsewhere it is skipped without a GPU.
"""

from __future__ import annotations

import os

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed; make test-kernels installs it")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if not (INTERPRETED or torch.cuda.is_available()):
    pytest.skip("needs a GPU or TRITON_INTERPRET=1", allow_module_level=True)

from pfedlms import rng  # noqa: E402 - after the skip
from pfedlms.models.layout import Layer, Layout  # noqa: E402
from pfedlms.pull import penalty_slope  # noqa: E402
from pfedlms.quantise import normal_quantiles, statistics, symbols_of, thresholds_of  # noqa: E402
from pfedlms.sketch import Sketch, fwht_reference  # noqa: E402
from pfedlms.sketch import gpu as kernels  # noqa: E402

DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
SIZES = [*range(1, 13), 13, 14] if INTERPRETED else list(range(1, 25))


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("bits", SIZES)
def test_transform_has_the_bits_of_the_reference(bits: int) -> None:
    x = draw(2, 1 << bits, seed=bits).to(DEVICE)
    assert torch.equal(kernels.fwht(x), fwht_reference(x))


@pytest.mark.parametrize("bits", [3, 12, 13])
def test_transform_twice_is_n_times_the_identity(bits: int) -> None:
    """H H = N I, on integers, where floats are exact."""
    x = torch.randint(-8, 9, (3, 1 << bits), generator=torch.Generator().manual_seed(1)).float().to(DEVICE)
    assert torch.equal(kernels.fwht(kernels.fwht(x)), x * (1 << bits))


def test_column_passes_cover_all_stages_in_order() -> None:
    for bits in range(13, 25):
        stride = kernels.BLOCK
        for start, radix in kernels._column_passes(1 << bits):
            assert start == stride
            assert 2 <= radix <= kernels.RADIX
            stride *= radix
        assert stride == 1 << bits
    assert len(kernels._column_passes(1 << 18)) == 1
    assert len(kernels._column_passes(1 << 24)) == 2


LAYOUT = Layout((), (Layer("small", 0, 37), Layer("one", 37, 1), Layer("wide", 38, 5000)))


def layer_keys(seed: int, epoch: int) -> list[torch.Tensor]:
    keys = [rng.stream(seed, "sketch-signs", epoch, index) for index in range(len(LAYOUT.layers))]
    return [torch.tensor([key], dtype=torch.uint64).view(torch.int64).to(DEVICE) for key in keys]


def test_sketch_has_the_bits_of_the_cpu() -> None:
    """Signs hashed in the kernel, padding, transform: H D P θ at the rows kept, scaled, equals Sketch.forward on the
    CPU."""
    sketch, params = Sketch(LAYOUT, 0.1, seed=3, epoch=7), draw(3, LAYOUT.dim)
    parts = []
    for layer, key, own in zip(LAYOUT.layers, layer_keys(3, 7), sketch.on_device(DEVICE), strict=True):
        if layer.pad == 1:
            parts.append(params[:, layer.offset : layer.offset + 1] * float(sketch._signs[layer.offset]))
            continue
        whole = kernels.transform(params.to(DEVICE), layer.offset, layer.size, layer.pad, key)
        parts.append((whole[:, own.rows] * own.scale).cpu())
    assert torch.equal(torch.cat(parts, dim=1), sketch.forward(params))


@pytest.mark.parametrize("index", [0, 2])
@pytest.mark.parametrize("thresholds", [1, 7, 255])
def test_pull_of_a_layer_is_the_adjoint_of_the_slope(index: int, thresholds: int) -> None:
    """One fused kernel (a small layer) and block and column passes (a wide one) against sketch, formula and adjoint
    apart."""
    sketch, params = Sketch(LAYOUT, 0.1, seed=5, epoch=0), draw(2, LAYOUT.dim, seed=2)
    sketched = sketch.forward(params)
    mean, variance = statistics(sketched, sketch.sizes)
    deviation = variance[0].sqrt()
    tau = torch.from_numpy(thresholds_of(mean[0].numpy(), deviation.numpy(), normal_quantiles(thresholds)))
    consensus = symbols_of(sketched, tau, sketch.sizes)[1]
    slope = penalty_slope(sketched, tau, 0.1 * deviation, consensus, sketch.layers)
    layer, own = LAYOUT.layers[index], sketch.on_device(DEVICE)[index]
    expected = sketch.adjoint(0.05 * slope)[:, layer.offset : layer.offset + layer.size]

    kept = torch.full((layer.pad,), kernels.NOT_KEPT, dtype=torch.int16, device=DEVICE)
    kept[own.rows] = consensus[own.start : own.start + len(own.rows)].to(torch.int16).to(DEVICE)
    out = torch.zeros(2, LAYOUT.dim, device=DEVICE)
    width = (0.1 * deviation[index : index + 1]).to(DEVICE)
    kernels.pull_layer(
        params.to(DEVICE), out, layer.offset, layer.size, layer.pad, own.key, kept, tau[index].to(DEVICE), width,
        own.scale, 0.05,
    )  # fmt: skip
    got = out.cpu()
    torch.testing.assert_close(got[:, layer.offset : layer.offset + layer.size], expected, rtol=1e-5, atol=1e-6)
    got[:, layer.offset : layer.offset + layer.size] = 0
    assert not got.any(), "a kernel wrote outside of its layer"


def test_a_constant_layer_has_no_pull() -> None:
    layer, own = LAYOUT.layers[0], Sketch(LAYOUT, 0.1, seed=5, epoch=0).on_device(DEVICE)[0]
    kept = torch.full((layer.pad,), 3, dtype=torch.int16, device=DEVICE)
    out = torch.ones(1, LAYOUT.dim, device=DEVICE)
    zero = torch.zeros(1, device=DEVICE)
    kernels.pull_layer(
        draw(1, LAYOUT.dim).to(DEVICE), out, layer.offset, layer.size, layer.pad, own.key, kept,
        torch.zeros(7, device=DEVICE), zero, own.scale, 0.05,
    )  # fmt: skip
    assert not out[:, : layer.size].any()
