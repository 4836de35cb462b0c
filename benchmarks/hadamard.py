"""How long the Walsh–Hadamard transform takes, as a ratio to copying the same floats with as many threads.

    python benchmarks/hadamard.py [--device cpu|cuda] [--threads N] [--repeats N] [--json FILE]

A copy is the lower bound: any transform reads and writes each element at least once. Every size is first
checked bit for bit against `fwht_reference`; then copy, transform and plain torch butterfly take turns, so
that a noisy neighbour disturbs all three, and medians are compared. On a GPU a transform takes one to three passes
over memory; each is compared with a copy.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numba
import numpy as np
import torch
from kept import keep

from pfedlms.backend import compiled, run_kernel
from pfedlms.sketch import fwht_, fwht_reference

SIZES = ((20, 18), (20, 14), (4, 22))  # (rows, log2 of the row size)
GPU_SIZES = ((20, 12), (20, 18), (20, 22))
PART = 1 << 14  # floats of a task of the copy; no row is shorter
BUDGET_SECONDS = 12.0  # per size, which bounds the turns of the large ones


@compiled()
def copy_parts(first: int, last: int, target: np.ndarray, source: np.ndarray) -> None:
    """The parts `first` to `last` − 1 of `[parts, size]`."""
    for index in range(first, last):
        target[index] = source[index]


def copy_all(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copied by as many threads as the transform has, in parts of the same size."""
    parts, size = source.numel() // PART, PART
    run_kernel(copy_parts, parts, size, target.view(parts, size).numpy(), source.view(parts, size).numpy())


def seconds(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def measure(rows: int, exponent: int, repeats: int) -> dict[str, float]:
    """Check one size, then time it: medians in milliseconds and their ratios to the copy."""
    source = torch.randn(rows, 2**exponent, generator=torch.Generator().manual_seed(exponent))
    target = source.clone()
    if not torch.equal(fwht_(target), fwht_reference(source)):
        raise SystemExit(f"{rows} x 2^{exponent}: fwht_ and fwht_reference differ")

    sink = torch.empty_like(source)
    copy_all(sink, source)  # compiles, and touches the pages, before the clock runs
    times: dict[str, list[float]] = {"copy": [], "transform": [], "butterfly": []}
    began = time.perf_counter()
    for turn in range(repeats):
        # Fresh values, or they would overflow after some turns. The copy goes elsewhere and comes between, so
        # that the transform does not find its rows in the cache because they were just written.
        target.copy_(source)
        times["copy"].append(seconds(lambda: copy_all(sink, source)))
        times["transform"].append(seconds(lambda: fwht_(target)))
        if turn % 4 == 0:  # dozens of times slower than the others, so it takes fewer turns
            times["butterfly"].append(seconds(lambda: fwht_reference(source)))
        if turn >= 8 and time.perf_counter() - began > BUDGET_SECONDS:
            break

    copy, transform, butterfly = (statistics.median(series) for series in times.values())
    return {
        "rows": rows,
        "exponent": exponent,
        "turns": len(times["copy"]),
        "copy_ms": copy * 1e3,
        "transform_ms": transform * 1e3,
        "butterfly_ms": butterfly * 1e3,
        "transform_ratio": transform / copy,
        "butterfly_ratio": butterfly / copy,
    }


def measure_gpu(rows: int, exponent: int, repeats: int) -> dict[str, float]:
    """Check one size against the definition, then time replays of a recorded transform and of a recorded copy."""
    from pfedlms.sketch import gpu

    source = torch.randn(rows, 2**exponent, device="cuda")
    if not torch.equal(gpu.fwht(source), fwht_reference(source)):
        raise SystemExit(f"{rows} x 2^{exponent}: fwht and fwht_reference differ")
    sink = torch.empty_like(source)
    copy = replay_seconds(lambda: sink.copy_(source), repeats)
    transform = replay_seconds(lambda: gpu.fwht(source), repeats)
    passes = 1 + len(gpu.column_passes(2**exponent))
    return {
        "rows": rows,
        "exponent": exponent,
        "passes": passes,
        "copy_ms": copy * 1e3,
        "transform_ms": transform * 1e3,
        "copy_gb_s": 2 * source.nbytes / copy / 1e9,
        "copy_share": passes * copy / transform,
    }


def replay_seconds(work: Callable[[], object], repeats: int) -> float:
    """Median time of `work` on the GPU, without the time the host takes to launch it."""
    for _ in range(3):
        work()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    times = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(times)


def main_gpu(arguments: argparse.Namespace) -> None:
    print(f"float32, {torch.cuda.get_device_name()}, medians")
    print(f"{'size':>10}  {'passes':>6}  {'copy ms':>9}  {'GB/s':>6}  {'transform ms':>12}  {'of copy, a pass':>15}")
    results = [measure_gpu(rows, exponent, arguments.repeats) for rows, exponent in GPU_SIZES]
    for result in results:
        print(
            f"{result['rows']:>4} x 2^{result['exponent']}  {result['passes']:6.0f}  {result['copy_ms']:9.4f}"
            f"  {result['copy_gb_s']:6.0f}  {result['transform_ms']:12.4f}  {result['copy_share']:15.0%}"
        )
    if arguments.json:
        report = {"machine": torch.cuda.get_device_name(), "torch": torch.__version__, "results": results}
        keep(report, arguments.json)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="for all three")
    parser.add_argument("--repeats", type=int, default=100, help="turns per size, at most")
    parser.add_argument("--json", type=Path, help="also write the results here")
    arguments = parser.parse_args()
    if arguments.threads < 1:
        parser.error(f"--threads is {arguments.threads}; expected at least 1")
    if arguments.repeats < 1:
        parser.error(f"--repeats is {arguments.repeats}; expected at least 1")
    if arguments.device == "cuda":
        main_gpu(arguments)
        return
    torch.set_num_threads(arguments.threads)

    results = []
    print(f"float32, {arguments.threads} threads, medians; ratio = time / time of a copy")
    print(f"{'size':>10}  {'copy ms':>9}  {'fwht_ ms':>9}  {'ratio':>6}  {'torch butterfly ratio':>21}")
    for rows, exponent in SIZES:
        result = measure(rows, exponent, arguments.repeats)
        results.append(result)
        print(
            f"{f'{rows} x 2^{exponent}':>10}  {result['copy_ms']:9.3f}  {result['transform_ms']:9.3f}"
            f"  {result['transform_ratio']:6.2f}  {result['butterfly_ratio']:21.1f}"
        )
    if arguments.json:
        machine = {
            "processor": platform.processor() or platform.machine(),
            "python": platform.python_version(),
        }
        machine |= {"numba": numba.__version__, "torch": torch.__version__}
        report = {"machine": machine, "threads": arguments.threads, "results": results}
        keep(report, arguments.json)


if __name__ == "__main__":
    main()
