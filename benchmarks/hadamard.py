"""How long the Walsh–Hadamard transform takes, as a ratio to copying the same floats with as many threads.

    python benchmarks/hadamard.py [--threads N] [--repeats N] [--json FILE]

A copy is the lower bound: any transform reads and writes each element at least once. Every size is first
checked bit for bit against `fwht_reference`; then copy, transform and plain torch butterfly take turns, so
that a noisy neighbour disturbs all three, and medians are compared.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numba
import numpy as np
import torch

from pfedlms.sketch.hadamard import compiled, fwht_, fwht_reference

SIZES = ((20, 18), (20, 14), (4, 22))  # (rows, log2 of the row size)
BUDGET_SECONDS = 12.0  # per size, which bounds the turns of the large ones


@compiled(parallel=True)
def copy_rows(target: np.ndarray, source: np.ndarray) -> None:
    """`np.copyto(target, source)` on `[parts, size]`, one task per part."""
    for index in numba.prange(source.shape[0]):
        target[index] = source[index]


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
    copy_rows(sink.numpy(), source.numpy())  # compiles, and touches the pages, before the clock runs
    times: dict[str, list[float]] = {"copy": [], "transform": [], "butterfly": []}
    began = time.perf_counter()
    for turn in range(repeats):
        # Fresh values, or they would overflow after some turns. The copy goes elsewhere and comes between, so
        # that the transform does not find its rows in the cache because they were just written.
        target.copy_(source)
        times["copy"].append(seconds(lambda: copy_rows(sink.numpy(), source.numpy())))
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


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--threads", type=int, default=numba.config.NUMBA_NUM_THREADS, help="for all three")
    parser.add_argument("--repeats", type=int, default=100, help="turns per size, at most")
    parser.add_argument("--json", type=Path, help="also write the results here")
    arguments = parser.parse_args()
    if not 1 <= arguments.threads <= numba.config.NUMBA_NUM_THREADS:
        parser.error(f"--threads is {arguments.threads}; expected 1 to {numba.config.NUMBA_NUM_THREADS}")
    if arguments.repeats < 1:
        parser.error(f"--repeats is {arguments.repeats}; expected at least 1")
    numba.set_num_threads(arguments.threads)
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
        arguments.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
