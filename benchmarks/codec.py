"""Time `pfedlms.wire.codec` against a copy of the same symbols, and its bits against log2(levels).

    python benchmarks/codec.py [--count 16000000] [--repeats 15] [--clock wall] [--json FILE]

Every row first asserts that the symbols come back. Then pack, unpack and copy take turns, and the medians are
compared. The codec runs in one thread; on a busy machine `--clock cpu` leaves out what other processes took.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from kept import keep

from pfedlms.wire.codec import block_shape, pack, packed_size, unpack

GOALS = {8: 8.0, 3: 20.0}  # times a copy, at most
CLOCKS = {"wall": time.perf_counter, "cpu": time.thread_time}


def medians(tasks: dict[str, Callable[[], object]], repeats: int, clock: Callable[[], float]) -> dict[str, float]:
    """Median seconds of each task, the tasks taking turns so that a slow moment hits all of them."""
    seconds: dict[str, list[float]] = {name: [] for name in tasks}
    for _ in range(repeats):
        for name, task in tasks.items():
            start = clock()
            task()
            seconds[name].append(clock() - start)
    return {name: statistics.median(values) for name, values in seconds.items()}


def measure(levels: int, count: int, repeats: int, clock: Callable[[], float]) -> dict[str, float]:
    symbols = np.random.default_rng(levels).integers(0, levels, count, dtype=np.uint8)
    data = pack(symbols, levels)
    assert len(data) == packed_size(count, levels)
    assert np.array_equal(unpack(data, count, levels), symbols)
    took = medians(
        {
            "copy": symbols.copy,
            "pack": lambda: pack(symbols, levels),
            "unpack": lambda: unpack(data, count, levels),
        },
        repeats,
        clock,
    )
    size, width = block_shape(levels)
    bits = 8 * len(data) / count
    return {
        "levels": levels,
        "block_symbols": size,
        "block_bits": width,
        "bits_per_symbol": bits,
        "log2_levels": math.log2(levels),
        "excess_percent": 100 * (bits / math.log2(levels) - 1),
        "copy_ms": 1e3 * took["copy"],
        "pack_ms": 1e3 * took["pack"],
        "unpack_ms": 1e3 * took["unpack"],
        "pack_ratio": took["pack"] / took["copy"],
        "unpack_ratio": took["unpack"] / took["copy"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--levels", type=int, nargs="+", default=[8, 3, 2, 16, 10])
    parser.add_argument("--count", type=int, default=16_000_000, help="symbols")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--clock", choices=sorted(CLOCKS), default="wall")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the numbers here")
    args = parser.parse_args()

    print(f"{args.count:,} symbols, one thread, {args.clock} clock, median of {args.repeats}\n")
    print("levels   block    bits/symbol    log2   excess    copy    pack  unpack   pack/copy unpack/copy  goal")
    rows = []
    for levels in args.levels:
        row = measure(levels, args.count, args.repeats, CLOCKS[args.clock])
        rows.append(row)
        goal = f"{GOALS[levels]:4.0f}x" if levels in GOALS else ""
        print(
            f"{levels:6d}  {row['block_symbols']:2d} → {row['block_bits']:2d}"
            f"  {row['bits_per_symbol']:13.4f} {row['log2_levels']:7.4f} {row['excess_percent']:6.3f} %"
            f"  {row['copy_ms']:6.2f}  {row['pack_ms']:6.2f}  {row['unpack_ms']:6.2f} ms"
            f"  {row['pack_ratio']:6.1f}x  {row['unpack_ratio']:8.1f}x  {goal:>5s}".rstrip()
        )
    if args.json:
        settings = {"count": args.count, "repeats": args.repeats, "clock": args.clock}
        keep({**settings, "rows": rows}, args.json)


if __name__ == "__main__":
    main()
