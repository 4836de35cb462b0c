"""Convolution blocks of `vgg8` and `vgg11` on a GPU, 20 clients: forward and backward pass of all blocks, kernel by
kernel, against floors. Gradients are compared with float64 first.

    python benchmarks/convs.py [--only vgg8] [--json out.json]

Kernels are compiled by several processes first, so that the measured process finds them in Triton's cache.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from kept import commit, keep
from torch import Tensor

CLIENTS, BATCH, CHECKED = 20, 64, 7
PROCESSES = 16  # that compile kernels
BANDWIDTH, RATES = 4.8e12, {"float32": 494e12, "bfloat16": 989e12}  # of an H200, by its data sheet; float32: TF32

# inputs, outputs, image, pooled
LAYERS: dict[str, list[tuple[int, int, int, bool]]] = {
    "vgg8": [(3, 16, 32, True), (16, 32, 16, True), (32, 64, 8, True), (64, 128, 4, True), (128, 128, 2, True)],
    "vgg11": [
        (3, 64, 32, True), (64, 128, 16, True), (128, 256, 8, False), (256, 256, 8, True),
        (256, 512, 4, False), (512, 512, 4, True), (512, 512, 2, False), (512, 512, 2, True),
    ],
}  # fmt: skip

# inputs, outputs, image, kernel, stride: convolutions whose kernels are compiled, too, for `steps.py`
RESNET = [
    (3, 16, 32, 3, 1), (16, 16, 32, 3, 1), (16, 32, 32, 3, 2), (16, 32, 32, 1, 2), (32, 32, 16, 3, 1),
    (32, 64, 16, 3, 2), (32, 64, 16, 1, 2), (64, 64, 8, 3, 1),
]  # fmt: skip


class Blocks:
    """Some consecutive blocks of a model: convolution, batch norm, ReLU and pooling each."""

    def __init__(self, layers: list[tuple[int, int, int, bool]], kind: torch.dtype, first: bool) -> None:
        from pfedlms.models import products_gpu

        device = torch.device("cuda")
        torch.manual_seed(0)
        self.kind, self.half, self.first = kind, kind == torch.bfloat16, first
        self.shapes = [products_gpu.shape_of((BATCH, 0, s, s), (CLIENTS, o, i, 3, 3), (1, 1)) for i, o, s, _ in layers]
        self.pools = [layer[3] for layer in layers]
        self.weights = [
            torch.randn(CLIENTS, s.outputs, s.inputs, 3, 3, device=device) * (2 / 9 / s.inputs) ** 0.5
            for s in self.shapes
        ]
        self.gradients = [torch.empty_like(weight) for weight in self.weights]
        self.gammas = [1 + torch.rand(CLIENTS * s.outputs, device=device) for s in self.shapes]
        self.betas = [torch.randn(CLIENTS * s.outputs, device=device) / 2 for s in self.shapes]
        self.places = [[torch.empty(CLIENTS, s.outputs, device=device) for _ in range(2)] for s in self.shapes]
        self.running = [(torch.zeros_like(gamma), torch.ones_like(gamma)) for gamma in self.gammas]
        start = self.shapes[0]
        self.images = torch.randn(start.batch * start.height**2, CLIENTS * start.inputs, device=device).to(kind)
        self.by_channel = self.images.T.contiguous()
        side = layers[-1][2] // (2 if layers[-1][3] else 1)
        self.last = torch.randn(BATCH * side**2, CLIENTS * layers[-1][1], device=device).to(kind)

    def __call__(self) -> None:
        from pfedlms.models import norm_gpu, products_gpu

        x, other, kept = self.images, self.by_channel, []
        for number, shape in enumerate(self.shapes):
            inner = number > 0 or not self.first
            turned, back = products_gpu.turned_weights(self.weights[number], self.kind, not self.half and inner)
            z, means, squares = products_gpu.convolved(x, turned, shape, self.kind, statistics=True)
            assert means is not None
            assert squares is not None
            mean, scale = norm_gpu.finish(means, squares, shape.rows, 128, 1e-5, 0.1, self.running[number])
            kept.append((x, other, turned, back, z, mean, scale))
            norm = self.gammas[number], self.betas[number], shape.size, self.pools[number]
            x, other = norm_gpu.applied(z, mean, scale, *norm, self.kind, True, not self.half)
        slope = self.last
        for number in reversed(range(len(self.shapes))):
            (x, other, turned, back, z, mean, scale), shape = kept[number], self.shapes[number]
            norm = self.gammas[number], self.betas[number], shape.size, self.pools[number]
            dz, dz_other = norm_gpu.back(z, slope, mean, scale, *norm, *self.places[number], not self.half)
            pair = (x, dz) if self.half else (other, dz_other)
            products_gpu.turn_back(products_gpu.weighed(*pair, shape, not self.half), self.gradients[number])
            if number or not self.first:
                weights = turned if self.half else back
                slope, _, _ = products_gpu.convolved(dz, weights, shape.turned(), self.kind, back=self.half)

    def exact(self, kind: torch.dtype = torch.float64) -> list[Tensor]:
        """Gradients of one client's weights, by autograd."""
        weights = [weight[CHECKED].to(kind).requires_grad_() for weight in self.weights]
        x = image_of(self.images, self.shapes[0].height).unflatten(1, (CLIENTS, -1))[:, CHECKED].to(kind)
        for number, weight in enumerate(weights):
            gamma, beta = (each[number].view(CLIENTS, -1)[CHECKED].to(kind) for each in (self.gammas, self.betas))
            x = F.relu(F.batch_norm(F.conv2d(x, weight, padding=1), None, None, gamma, beta, True))
            x = F.max_pool2d(x, 2) if self.pools[number] else x
        slope = image_of(self.last, x.shape[2]).unflatten(1, (CLIENTS, -1))[:, CHECKED].to(kind)
        return list(torch.autograd.grad(x, weights, slope))


def image_of(matrix: Tensor, side: int) -> Tensor:
    return matrix.view(-1, side, side, matrix.shape[1]).permute(0, 3, 1, 2)


def compile_convolution(inputs: int, outputs: int, side: int, kernel: int, stride: int) -> None:
    from pfedlms.models.conv_gpu import StackedConvolution

    x = torch.randn(BATCH, CLIENTS * inputs, side, side, device="cuda", requires_grad=inputs > 3)
    weight = torch.randn(CLIENTS, outputs, inputs, kernel, kernel, device="cuda", requires_grad=True)
    pad = (kernel // 2, kernel // 2)
    StackedConvolution.apply(x, weight, pad, stride, torch.float32, None).sum().backward()
    torch.cuda.synchronize()


def compile_one(job: tuple[str, int, str]) -> str:
    """A single block of a model: all its kernels."""
    model, number, kind = job
    began = time.time()
    try:
        if model == "resnet":
            compile_convolution(*RESNET[number])
            return f"{job} {time.time() - began:.1f} s"
        Blocks(LAYERS[model][number : number + 1], getattr(torch, kind), number == 0)()
        torch.cuda.synchronize()
    except Exception as error:
        return f"FAILED {job}: {type(error).__name__}: {str(error)[:500]}"
    return f"{job} {time.time() - began:.1f} s"


def measure(model: str, name: str) -> list[dict[str, Any]]:
    blocks = Blocks(LAYERS[model], getattr(torch, name), True)
    blocks()
    exact, library = blocks.exact(), blocks.exact(torch.float32)
    errors = []
    for ours, theirs, right in zip(blocks.gradients, library, exact, strict=True):
        both = (ours[CHECKED].double() - right).norm() / right.norm(), (theirs.double() - right).norm() / right.norm()
        errors.append(tuple(round(float(each), 5) for each in both))
    print(f"{model} {name}: errors of the gradients, ours and PyTorch's in TF32: {errors}", flush=True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        blocks()
    times = []
    for _ in range(8):
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        graph.replay()
        ended.record()
        torch.cuda.synchronize()
        times.append(began.elapsed_time(ended))
    operations = sum(6 * CLIENTS * s.rows * s.outputs * s.inputs * 9 for s in blocks.shapes)
    row = {
        "model": model, "kind": name, "part": "all blocks", "ms": round(sorted(times)[4], 4), "errors": errors,
        "floor by operations": round(operations / RATES[name] * 1e3, 4),
    }  # fmt: skip
    print(json.dumps(row), flush=True)
    rows = [row]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        graph.replay()
        torch.cuda.synchronize()
    for event in sorted(profile.events(), key=lambda each: each.time_range.start):
        rows.append({"model": model, "kind": name, "part": event.name[:60], "ms": round(event.device_time / 1e3, 4)})
        print(f"    {event.device_time:8.1f} us  {event.name[:60]}")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    began = time.time()
    chosen = [(model, kind) for model in ("vgg11", "vgg8") for kind in RATES if options.only in f"{model} {kind}"]
    jobs = [(model, number, kind) for model, kind in chosen for number in range(len(LAYERS[model]))]
    jobs += [("resnet", number, "float32") for number in range(len(RESNET)) if not options.only]
    # Forked before CUDA is initialised here, so that nothing is imported twice.
    with multiprocessing.get_context("fork").Pool(PROCESSES) as pool:
        for line in pool.imap_unordered(compile_one, jobs):
            print(line, flush=True)
    print(f"compiled after {time.time() - began:.1f} s", flush=True)
    print(torch.cuda.get_device_name(), torch.__version__, commit())
    rows = [row for model, kind in chosen for row in measure(model, kind)]
    print(f"done after {time.time() - began:.1f} s")
    if options.json:
        keep({"rows": rows}, options.json)


if __name__ == "__main__":
    main()
