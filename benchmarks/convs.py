"""Convolution blocks of `vgg8` and `vgg11` on a GPU, 20 clients: the whole local step, and every part of every layer by
several kernels, against floors. Equality is checked first.

    python benchmarks/convs.py [--seconds 55] [--json out.json]

Kernels are compiled by several processes first, so that the measured process finds them in Triton's cache. Times are
those of CUDA graphs of five calls, the least of three; small inputs stay in the L2 cache between the calls.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from kept import commit
from torch import Tensor

from engine import federation, median_seconds
from pfedlms.methods.contract import Objective
from pfedlms.models import conv_gpu, norm_gpu
from pfedlms.models import products_gpu as products
from pfedlms.models.products_gpu import Shape

CLIENTS, BATCH = 20, 64
DEVICE = torch.device("cuda")
PROCESSES = 16  # that compile kernels
BANDWIDTH, TF32_RATE, BF16_RATE = 4.8e12, 494e12, 989e12  # of an H200, by its data sheet

# inputs, outputs, image, pooled, times in the model
LAYERS: dict[str, list[tuple[int, int, int, bool, int]]] = {
    "vgg8": [
        (3, 16, 32, True, 1), (16, 32, 16, True, 1), (32, 64, 8, True, 1), (64, 128, 4, True, 1),
        (128, 128, 2, True, 1),
    ],
    "vgg11": [
        (3, 64, 32, True, 1), (64, 128, 16, True, 1), (128, 256, 8, False, 1), (256, 256, 8, True, 1),
        (256, 512, 4, False, 1), (512, 512, 4, True, 1), (512, 512, 2, False, 1), (512, 512, 2, True, 1),
    ],
}  # fmt: skip
# Of a layer, tile by tile: what is tried beside the kernels' own choice.
PRODUCT_TILES: dict[str, list[dict[str, int]]] = {
    "float32": [{}, {"BN": 256, "num_warps": 8}, {"BM": 256, "num_warps": 8}, {"num_stages": 4}],
    "bfloat16": [
        {}, {"BN": 128, "num_stages": 4}, {"BM": 256, "BN": 128, "num_warps": 8},
        {"BN": 256, "BK": 32, "num_stages": 4},
    ],
}  # fmt: skip
WEIGHT_TILES: dict[str, list[dict[str, int]]] = {
    "float32": [{}, {"BN": 256, "BR": 128}, {"BM": 64}, {"BR": 64}],
    "bfloat16": [{}, {"BN": 256, "BR": 128}, {"BM": 32, "num_stages": 4}, {"BR": 64, "num_stages": 4}],
}


@triton.jit
def _unfold(
    x, out, rows, SIDE: tl.constexpr, CLIENTS: tl.constexpr, C: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr
):
    """[rows, clients · C] → [clients, rows, C · 9]: weights need no transposing for a product with this."""
    client = tl.program_id(2).to(tl.int64)
    m, k = tl.program_id(0) * BM + tl.arange(0, BM), tl.program_id(1) * BK + tl.arange(0, BK)
    c, tap = k // 9, k % 9
    i, j = ((m // SIDE) % SIDE)[:, None] + (tap // 3 - 1)[None, :], (m % SIDE)[:, None] + (tap % 3 - 1)[None, :]
    known = (m < rows)[:, None] & (k < 9 * C)[None, :]
    inside = known & (i >= 0) & (i < SIDE) & (j >= 0) & (j < SIDE)
    pixel = ((m // (SIDE * SIDE)) * SIDE)[:, None] * SIDE + i * SIDE + j
    value = tl.load(x + pixel.to(tl.int64) * (CLIENTS * C) + client * C + c[None, :], mask=inside, other=0.0)
    tl.store(out + (client * rows + m[:, None]) * (9 * C) + k[None, :], value, mask=known)


@triton.jit
def _fold(
    columns, out, rows, SIDE: tl.constexpr, CLIENTS: tl.constexpr, C: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr
):
    client = tl.program_id(2).to(tl.int64)
    m, c = tl.program_id(0) * BM + tl.arange(0, BM), tl.program_id(1) * BC + tl.arange(0, BC)
    total = tl.zeros((BM, BC), tl.float32)
    for tap in tl.static_range(9):
        i, j = (m // SIDE) % SIDE - (tap // 3 - 1), m % SIDE - (tap % 3 - 1)
        inside = ((m < rows) & (i >= 0) & (i < SIDE) & (j >= 0) & (j < SIDE))[:, None] & (c < C)[None, :]
        row = (m // (SIDE * SIDE)) * SIDE * SIDE + i * SIDE + j
        place = columns + (client * rows + row)[:, None] * (9 * C) + c[None, :] * 9 + tap
        total += tl.load(place, mask=inside, other=0.0).to(tl.float32)
    place = out + m.to(tl.int64)[:, None] * (CLIENTS * C) + client * C + c[None, :]
    tl.store(place, total.to(out.dtype.element_ty), mask=(m < rows)[:, None] & (c < C)[None, :])


class Clock:
    """Times work, or with `warm` only runs it once, so that its kernels are compiled."""

    def __init__(self, warm: bool, ends: float) -> None:
        self.warm, self._ends, self.rows = warm, ends, list[dict[str, Any]]()

    @property
    def late(self) -> bool:
        return time.time() > self._ends

    def __call__(self, work: Callable[[], object], **names: Any) -> float:
        if not self.warm and self.late:
            return float("nan")
        try:
            seconds = self._timed(work)
        except Exception as error:  # a tile that does not fit is a result, too
            torch.cuda.synchronize()
            self._row(names | {"error": f"{type(error).__name__}: {error}".splitlines()[0][:160]})
            return float("nan")
        self._row(names | {"ms": round(seconds * 1e3, 4)})
        return seconds

    def _row(self, row: dict[str, Any]) -> None:
        self.rows.append(row)
        if not self.warm:
            print(json.dumps(row), flush=True)

    def _timed(self, work: Callable[[], object], calls: int = 5) -> float:
        work()
        torch.cuda.synchronize()
        if self.warm:
            return 0.0
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(calls):
                work()
        times = []
        for _ in range(4):
            began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            began.record()
            graph.replay()
            ended.record()
            torch.cuda.synchronize()
            times.append(began.elapsed_time(ended) / 1e3 / calls)
        return min(times[1:])


def matrix_of(image: Tensor) -> Tensor:
    return image.permute(0, 2, 3, 1).reshape(-1, image.shape[1]).contiguous()


def image_of(matrix: Tensor, side: int) -> Tensor:
    return matrix.view(-1, side, side, matrix.shape[1]).permute(0, 3, 1, 2)


def check_equal(layer: tuple[int, int, int, bool, int], kind: torch.dtype) -> None:
    """Three clients in float64 against every new kernel; raises where they differ by more than rounding."""
    inputs, outputs, side, pool, _ = layer
    shape = Shape(3, 8, inputs, outputs, side, side, (3, 3), (1, 1))
    bound = 1e-3 if kind == torch.float32 else 2e-2

    def compare(what: str, got: Tensor, expected: Tensor) -> None:
        error = float((got.double() - expected).norm() / expected.norm())
        if not error < bound:
            raise AssertionError(f"{what} of {layer} in {kind}: relative error {error:.2e}, expected below {bound}")

    x = torch.randn(8, 3 * inputs, side, side, device=DEVICE).to(kind).double().requires_grad_()
    weight = torch.randn(3, outputs, inputs, 3, 3, device=DEVICE)
    wide = weight.to(kind).double().requires_grad_()
    expected = F.conv2d(x, wide.flatten(0, 1), padding=1, groups=3)
    turned, back = products.turned_weights(weight, kind, True)
    z, means, squares = products.convolved(matrix_of(x.detach()).to(kind), turned, shape, kind, statistics=True)
    compare("output", image_of(z, side), expected.detach())
    gamma, beta = torch.rand(3 * outputs, device=DEVICE) + 0.5, torch.randn(3 * outputs, device=DEVICE)
    assert means is not None
    assert squares is not None
    mean, scale = norm_gpu.finish(means, squares, shape.rows, 128, 1e-5, 0.1, None)
    z64 = image_of(z, side).double().requires_grad_()
    normed = F.relu(F.batch_norm(z64, None, None, gamma.double(), beta.double(), True, 0.1, 1e-5))
    pooled = F.max_pool2d(normed, 2) if pool else normed
    p, _ = norm_gpu.applied(z, mean, scale, gamma, beta, (side, side), pool, kind, False, False)
    compare("norm", image_of(p, side // 2 if pool else side), pooled.detach())
    slope = torch.randn_like(p)
    places = [torch.empty(3, outputs, device=DEVICE) for _ in range(2)]
    dz, dz_by_channel = norm_gpu.back(z, slope, mean, scale, gamma, beta, (side, side), pool, *places, True)
    (of_z,) = torch.autograd.grad(pooled, z64, image_of(slope, pooled.shape[2]).double())
    if kind == torch.float32:  # in bfloat16 another of four equal values may be taken
        compare("gradient of the norm", image_of(dz, side), of_z)
    of_x, of_weight = torch.autograd.grad(expected, (x, wide), image_of(dz, side).double())
    for weights, reversed in ((back, False), (turned, True)):
        got, _, _ = products.convolved(dz, weights, shape.turned(), kind, back=reversed)
        compare(f"gradient of the input (as laid: {reversed})", image_of(got, side), of_x)
    xs = matrix_of(x.detach()).to(kind)
    for by_channel, pair in ((False, (xs, dz)), (True, (xs.T.contiguous(), dz_by_channel))):
        out = torch.empty_like(weight)
        products.turn_back(products.weighed(*pair, shape, by_channel), out)
        compare(f"gradient of the weight (by channel: {by_channel})", out, of_weight)


def layer_rows(clock: Clock, model: str, number: int, name: str) -> None:
    """All candidates of one layer in one precision."""
    kind = getattr(torch, name)
    inputs, outputs, side, pool, _ = layer = LAYERS[model][number]
    torch.manual_seed(0)
    check_equal(layer, kind)
    shape = Shape(CLIENTS, BATCH, inputs, outputs, side, side, (3, 3), (1, 1))
    where = {"model": model, "layer": number, "shape": f"{inputs}->{outputs} at {side}", "kind": name}
    half = kind == torch.bfloat16
    x = torch.randn(shape.rows, CLIENTS * inputs, device=DEVICE).to(kind)
    weight = torch.randn(CLIENTS, outputs, inputs, 3, 3, device=DEVICE)
    z = torch.randn(shape.rows, CLIENTS * outputs, device=DEVICE).to(kind)
    turned, back = products.turned_weights(weight, kind, True)
    operations = 2 * CLIENTS * shape.rows * outputs * inputs * 9
    moved = x.nbytes + z.nbytes + turned.nbytes
    floor = {"by bytes": moved / BANDWIDTH, "by operations": operations / (BF16_RATE if half else TF32_RATE)}
    for which, seconds in floor.items():
        clock._row(where | {"part": "floor of a product", "how": which, "ms": round(seconds * 1e3, 4)})

    def product(part: str, *arguments: Any, **more: Any) -> None:
        for tile in PRODUCT_TILES[name]:
            if tile.get("BN", 0) > max(16, int(triton.next_power_of_2(arguments[2].outputs))):
                continue
            work = lambda tile=tile: products.convolved(*arguments, tile=tile, **more)  # noqa: E731
            clock(work, **where, part=part, how="new", tile=tile)

    product("forward", x, turned, shape, kind, statistics=True)
    if number:
        product("gradient of the input", z, back, shape.turned(), kind)
        if half:
            product("gradient of the input, as laid", z, turned, shape.turned(), kind, back=True)
    by_channel = (x.T.contiguous(), z.T.contiguous())
    for tile in WEIGHT_TILES[name]:
        if tile.get("BN", 0) > max(16, int(triton.next_power_of_2(outputs))):
            continue
        ways = [("by channel", by_channel), ("direct", (x, z))]
        for how, pair in ways[:1] if not half and tile else ways:
            work = lambda how=how, pair=pair, tile=tile: products.weighed(*pair, shape, how == "by channel", tile)  # noqa: E731
            clock(work, **where, part="gradient of the weight", how=how, tile=tile)
    clock(lambda: products.turned_weights(weight, kind, not half), **where, part="turn weights", how="new")
    shares, place = products.weighed(x, z, shape, False), torch.empty_like(weight)
    clock(
        lambda: products.turn_back(shares, place), **where, part="turn the gradient back", how=f"{len(shares)} shares"
    )
    norm_rows(clock, where, z, outputs, side, pool, kind)
    other_rows(clock, where, shape, x, z, weight, kind)


def norm_rows(
    clock: Clock, where: dict[str, Any], z: Tensor, outputs: int, side: int, pool: bool, kind: torch.dtype
) -> None:
    wide = CLIENTS * outputs
    gamma, beta = torch.ones(wide, device=DEVICE), torch.zeros(wide, device=DEVICE)
    tiles = triton.cdiv(len(z), 128)
    means, squares = torch.zeros(tiles, wide, device=DEVICE), torch.ones(tiles, wide, device=DEVICE)
    running = (torch.zeros(wide, device=DEVICE), torch.ones(wide, device=DEVICE))
    mean, scale = norm_gpu.finish(means, squares, len(z), 128, 1e-5, 0.1, running)
    turn, image = kind == torch.float32, (side, side)
    clock(
        lambda: norm_gpu.finish(means, squares, len(z), 128, 1e-5, 0.1, running),
        **where,
        part="norm: statistics",
        how="new",
    )
    give = lambda turn: norm_gpu.applied(z, mean, scale, gamma, beta, image, pool, kind, True, turn)  # noqa: E731
    for turning in {False, turn}:
        clock(lambda turning=turning: give(turning), **where, part="norm, ReLU, pool", how="new", both_ways=turning)
    slope = torch.randn_like(give(False)[0])
    places = [torch.empty(CLIENTS, outputs, device=DEVICE) for _ in range(2)]
    for turning in {False, turn}:
        clock(
            lambda turning=turning: norm_gpu.back(z, slope, mean, scale, gamma, beta, image, pool, *places, turning),
            **where, part="norm, ReLU, pool: gradient", how="new", both_ways=turning,
        )  # fmt: skip
    last = image_of(z, side).detach().requires_grad_()
    weights = [gamma.clone().requires_grad_(), beta.clone().requires_grad_()]

    def both() -> Any:
        out = F.relu(F.batch_norm(last, *running, *weights, True, 0.1, 1e-5))
        out = F.max_pool2d(out, 2) if pool else out
        return torch.autograd.grad(out, (last, *weights), image_of(slope, out.shape[2]))

    clock(both, **where, part="norm, ReLU, pool: both", how="PyTorch, channels last")
    unit = z.nbytes / BANDWIDTH
    clock._row(
        where
        | {
            "part": "norm, ReLU, pool: both",
            "how": "floor: z four times, p three times",
            "ms": unit * (4.75 if pool else 7) * 1e3,
        }
    )
    if where["model"] == "vgg11" and where["layer"] == 1:
        compiled = torch.compile(lambda z, *weights: _normed(z, *weights, pool=pool), dynamic=False)

        def by_compiler() -> Any:
            out = compiled(last, *weights)
            return torch.autograd.grad(out, (last, *weights), image_of(slope, out.shape[2]))

        clock(by_compiler, **where, part="norm, ReLU, pool: both", how="torch.compile")


def _normed(z: Tensor, gamma: Tensor, beta: Tensor, pool: bool) -> Tensor:
    out = F.relu(F.batch_norm(z, None, None, gamma, beta, True, 0.1, 1e-5))
    return F.max_pool2d(out, 2) if pool else out


def other_rows(
    clock: Clock, where: dict[str, Any], shape: Shape, x: Tensor, z: Tensor, weight: Tensor, kind: torch.dtype
) -> None:
    """Products of libraries: batched ones on unfolded images, and grouped convolutions."""
    side, inputs, outputs, rows = shape.height, shape.inputs, shape.outputs, shape.rows
    if side <= 8:
        columns = torch.empty(CLIENTS, rows, 9 * inputs, device=DEVICE, dtype=kind)
        grid = (triton.cdiv(rows, 32), triton.cdiv(9 * inputs, 128), CLIENTS)
        clock(
            lambda: _unfold[grid](x, columns, rows, side, CLIENTS, inputs, 32, 128), **where, part="unfold", how="new"
        )
        flat, slope = weight.flatten(2).to(kind), torch.randn(CLIENTS, rows, outputs, device=DEVICE).to(kind)
        clock(lambda: torch.bmm(columns, flat.mT), **where, part="forward", how="bmm on unfolded")
        clock(lambda: torch.bmm(slope.mT, columns), **where, part="gradient of the weight", how="bmm on unfolded")
        clock(lambda: torch.bmm(slope, flat), **where, part="gradient of the input", how="bmm before folding")
        target, folds = torch.empty_like(x), (triton.cdiv(rows, 32), triton.cdiv(inputs, 32), CLIENTS)
        clock(
            lambda: _fold[folds](columns, target, rows, side, CLIENTS, inputs, 32, 32), **where, part="fold", how="new"
        )
        found = image_of(x, side)
        wanted = F.unfold(found[:, :inputs].float(), 3, padding=1).mT.reshape(rows, -1)
        assert torch.equal(columns[0].float(), wanted), "unfold"
    if kind == torch.float32:
        image, slope = image_of(x, side), image_of(z, side)
        clock(
            lambda: conv_gpu.StackedConvolution.apply(image, weight, (1, 1), None), **where, part="forward", how="today"
        )
        turned = conv_gpu._transposed(weight.flatten(3).flatten(1, 2)).unflatten(2, weight.shape[1:3])
        clock(
            lambda: conv_gpu._convolved(image, turned, (3, 3), (1, 1)),
            **where,
            part="forward",
            how="today, product alone",
        )
        clock(
            lambda: conv_gpu._weighed(image, slope, CLIENTS, (3, 3), (1, 1)),
            **where,
            part="gradient of the weight",
            how="today",
        )
    for layout in (torch.channels_last, torch.contiguous_format):
        if layout == torch.contiguous_format and (inputs * outputs >= 1 << 16 or side <= 2):
            continue  # up to thirty times longer
        image = image_of(x, side).contiguous(memory_format=layout)
        flat = weight.flatten(0, 1).to(kind).contiguous(memory_format=layout)
        how = f"cuDNN, grouped, {'channels last' if layout == torch.channels_last else 'channels first'}"
        clock(
            lambda image=image, flat=flat: F.conv2d(image, flat, padding=1, groups=CLIENTS),
            **where,
            part="forward",
            how=how,
        )


def blocks(clock: Clock, model: str, name: str) -> None:
    """Forward and backward pass of all blocks of a model, kernel after kernel, without the head."""
    kind = getattr(torch, name)
    half = kind == torch.bfloat16
    layers = LAYERS[model]
    shapes = [Shape(CLIENTS, BATCH, i, o, s, s, (3, 3), (1, 1)) for i, o, s, _, _ in layers]
    pools = [layer[3] for layer in layers]
    weights = [
        torch.randn(CLIENTS, s.outputs, s.inputs, 3, 3, device=DEVICE) * (2 / 9 / s.inputs) ** 0.5 for s in shapes
    ]
    slopes = [torch.empty_like(weight) for weight in weights]
    gammas = [torch.ones(CLIENTS * s.outputs, device=DEVICE) for s in shapes]
    betas = [torch.zeros(CLIENTS * s.outputs, device=DEVICE) for s in shapes]
    places = [[torch.empty(CLIENTS, s.outputs, device=DEVICE) for _ in range(2)] for s in shapes]
    running = [(torch.zeros_like(gamma), torch.ones_like(gamma)) for gamma in gammas]
    images = torch.randn(shapes[0].rows, CLIENTS * 3, device=DEVICE).to(kind)
    by_channel = images.T.contiguous()
    last = torch.randn(BATCH, CLIENTS * shapes[-1].outputs, device=DEVICE).to(kind)

    def forward() -> list[Any]:
        x, other, kept = images, by_channel, []
        for number, shape in enumerate(shapes):
            turned, back = products.turned_weights(weights[number], kind, not half and number > 0)
            z, means, squares = products.convolved(x, turned, shape, kind, statistics=True)
            mean, scale = norm_gpu.finish(means, squares, shape.rows, 128, 1e-5, 0.1, running[number])
            kept.append((x, other, turned, back, z, mean, scale))
            more = number + 1 < len(shapes)
            norm = gammas[number], betas[number]
            x, other = norm_gpu.applied(z, mean, scale, *norm, shape.size, pools[number], kind, more, more and not half)
        return kept

    def both() -> None:
        kept, slope = forward(), last
        for number in reversed(range(len(shapes))):
            (x, other, turned, back, z, mean, scale), shape = kept[number], shapes[number]
            norm = gammas[number], betas[number], shape.size, pools[number], *places[number]
            dz, dz_other = norm_gpu.back(z, slope, mean, scale, *norm, not half)
            pair = (x, dz) if half else (other, dz_other)
            products.turn_back(products.weighed(*pair, shape, not half), slopes[number])
            if number:
                slope, _, _ = products.convolved(dz, turned if half else back, shape.turned(), kind, back=half)

    where = {"model": model, "kind": name, "how": "new"}
    clock(forward, **where, part="all blocks, forward")
    clock(both, **where, part="all blocks, forward and backward")


def today(clock: Clock, model: str, name: str) -> None:
    """The whole local step of the engine, and the kernels in it."""
    precision, steps = ("bf16" if name == "bfloat16" else "default"), 4
    options = Namespace(
        model=model, classes=100 if model == "vgg11" else 10, clients=CLIENTS, samples=200, steps=steps, batch=BATCH,
        device="cuda", fast=False, precision=precision,
    )  # fmt: skip
    made = federation(options, "local", 0)
    made.start()
    (cohort,) = made._clients.present
    phase = iter(range(1, 1000))
    work = lambda: made._worker.train(cohort, Objective(), next(phase))  # noqa: E731
    if clock.warm:
        work()
        return
    seconds = median_seconds(work, DEVICE, 5) / steps
    clock._row({"model": model, "kind": name, "part": "local step", "how": "engine", "ms": round(seconds * 1e3, 4)})
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        work()
        torch.cuda.synchronize()
    found = sorted(profile.key_averages(), key=lambda each: -each.device_time_total)
    for each in found[:22]:
        spent = f"{each.device_time_total / 1e3 / steps:8.4f} ms a step {each.count / steps:6.1f} times"
        print(f"    {spent}  {each.key[:110]}")


def jobs() -> Iterator[tuple[str, ...]]:
    for model in ("vgg8", "vgg11"):
        for kind in ("float32", "bfloat16"):
            yield "today", model, kind
            yield "blocks", model, kind
    for model in ("vgg11", "vgg8"):
        for number in range(len(LAYERS[model]) - (model == "vgg11")):  # the last two of vgg11 differ in pooling only
            for kind in ("float32", "bfloat16"):
                yield "layer", model, str(number), kind


def run(clock: Clock, job: tuple[str, ...]) -> None:
    what, model, *rest = job
    try:
        if what == "layer":
            layer_rows(clock, model, int(rest[0]), rest[1])
        else:
            {"blocks": blocks, "today": today}[what](clock, model, rest[0])
    except Exception as error:  # one job that fails must not end the others
        print(f"FAILED {job}: {type(error).__name__}: {str(error)[:600]}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=58, help="no work begins after so many")
    parser.add_argument("--only", default="", help="jobs whose names have this in them, such as 'blocks vgg8'")
    parser.add_argument("--warm", default="")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    began = time.time()
    if options.warm:
        clock = Clock(True, began)
        run(clock, tuple(options.warm.split()))
        for row in clock.rows:
            if "error" in row:
                print(row, flush=True)
        return
    chosen = [job for job in jobs() if options.only in " ".join(job)]
    command = [sys.executable, __file__, "--warm"]
    with ThreadPoolExecutor(PROCESSES) as pool:
        # The longest first: those with several layers.
        for job in sorted(chosen, key=len):
            pool.submit(subprocess.run, [*command, " ".join(job)], stdout=subprocess.DEVNULL, check=False)
    print(f"compiled after {time.time() - began:.1f} s", flush=True)
    clock = Clock(False, began + options.seconds)
    print(torch.cuda.get_device_name(), torch.__version__, triton.__version__, commit())
    for job in chosen:
        if not clock.late:
            print(f"# {' '.join(job)} at {time.time() - began:.1f} s", flush=True)
            run(clock, job)
    print(f"done after {time.time() - began:.1f} s")
    if options.json:
        options.json.write_text(json.dumps({"commit": commit(), "rows": clock.rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
