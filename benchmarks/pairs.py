"""Two versions of the package against each other: steps and rounds of both, interleaved in one run.

    python benchmarks/pairs.py --old DIR --model dnn|vgg8 [--device auto] [--pairs 9] [--json out.json]

DIR is the source folder of the other version (its `src`, for instance of `git worktree add DIR COMMIT`). Each version
runs in a process of its own that stays warm; they measure in turn, so what the machine does besides meets both alike.
Printed is the median over pairs of new / old with its quartiles.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

from kept import keep

HERE = Path(__file__).resolve()
SHAPES = {"dnn": (1, 28, 28)}


def federations(options: argparse.Namespace) -> dict[str, Any]:
    """One federation a method; uses only what both versions have."""
    import numpy as np
    import torch

    from pfedlms.data import from_pairs
    from pfedlms.engine import Federation
    from pfedlms.engine.training import TrainSettings
    from pfedlms.methods import METHODS
    from pfedlms.models import CohortModel, build

    try:
        from pfedlms.engine.reports import Stopwatch
    except ImportError:
        from pfedlms.engine.stopwatch import Stopwatch  # type: ignore[import-not-found,no-redef]

    device, shape = torch.device(options.device), SHAPES.get(options.model, (3, 32, 32))
    draw = np.random.default_rng(0)
    pairs = [
        tuple(
            (draw.standard_normal((n, *shape), dtype=np.float32), np.arange(n) % options.classes)
            for n in (options.samples, 64)
        )
        for _ in range(options.clients)
    ]
    data = from_pairs(pairs).to(device)
    train = TrainSettings(options.steps, options.batch, 0.05, 0.0, 1e-4)
    made = {}
    for method in ("local", "fedavg", "pfedlms"):
        model = CohortModel(build(options.model, shape, options.classes, 256, 0), device)
        watch = Stopwatch(device) if method == "pfedlms" else None
        made[method] = Federation(METHODS[method], METHODS[method].Settings(), model, data, train, 0, watch=watch)
        made[method].start()
        for _ in range(3):
            made[method].play_round()
    return made


def work(options: argparse.Namespace) -> None:
    """Measure once for every line on standard input."""
    import torch

    warnings.simplefilter("ignore")
    torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic = False, True
    made, device = federations(options), torch.device(options.device)

    def seconds(method: str) -> float:
        if device.type == "cuda":
            torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(options.rounds):
            made[method].play_round()
        if device.type == "cuda":
            torch.cuda.synchronize()
        return (time.perf_counter() - began) / options.rounds

    print("ready", flush=True)
    for _ in sys.stdin:
        measured = {f"round, {method}": seconds(method) for method in ("fedavg", "pfedlms")}
        measured["step"] = seconds("local") / options.steps
        watch = made["pfedlms"].watch
        watch.seconds.clear()
        made["pfedlms"].play_round()
        measured["step with the pull"] = watch.seconds["local steps"] / options.steps
        print(json.dumps(measured), flush=True)


class Version:
    """One version in a process of its own."""

    def __init__(self, source: Path) -> None:
        environment = {**os.environ, "PYTHONPATH": f"{source}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
        command = [sys.executable, str(HERE), "--work", *sys.argv[1:]]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, text=True)
        self._read()

    def _read(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"a measuring process ended with {self._process.wait()}")
        return line

    def measure(self) -> dict[str, float]:
        assert self._process.stdin is not None
        self._process.stdin.write("go\n")
        self._process.stdin.flush()
        measured: dict[str, float] = json.loads(self._read())
        return measured

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--old", type=Path, required=True, help="source folder of the other version")
    parser.add_argument("--new", type=Path, default=HERE.parents[1] / "src", help="source folder (default: this one's)")
    parser.add_argument("--model", default="dnn")
    parser.add_argument("--classes", type=int, default=10)
    parser.add_argument("--clients", type=int, default=20)
    parser.add_argument("--samples", type=int, default=400)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3, help="rounds of one measurement")
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.device == "auto":
        import torch

        options.device = "cuda" if torch.cuda.is_available() else "cpu"
    if options.work:
        work(options)
        return
    old, new = Version(options.old), Version(options.new)
    pairs: list[tuple[dict[str, float], dict[str, float]]] = []
    for number in range(options.pairs):
        # Who goes first changes, so that neither always follows the other.
        first, second = (old, new) if number % 2 == 0 else (new, old)
        one, other = first.measure(), second.measure()
        pairs.append((one, other) if first is old else (other, one))
    for version in (old, new):
        version.close()
    rows: dict[str, dict[str, float]] = {}
    print(f"{options.model} on {options.device}, {options.clients} clients, {len(pairs)} pairs")
    for name in pairs[0][0]:
        ratios = [after[name] / before[name] for before, after in pairs]
        low, middle, high = statistics.quantiles(ratios, n=4)
        before, after = (statistics.median(pair[side][name] for pair in pairs) for side in (0, 1))
        rows[name] = {"old": before, "new": after, "ratio": middle, "low": low, "high": high}
        print(f"{name:20s} {before * 1e3:9.3f} -> {after * 1e3:9.3f} ms   {middle:.3f} ({low:.3f} to {high:.3f})")
    if options.json:
        told = {name: str(value) for name, value in vars(options).items() if name not in ("json", "work", "old", "new")}
        keep({"options": told, "seconds": rows}, options.json)


if __name__ == "__main__":
    main()
