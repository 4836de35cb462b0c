"""Seconds a round and peak memory for more and more clients.

    python benchmarks/growth.py --model dnn --clients 20,200,2000 [--method pfedlms] [--steps 5] [--json out.json]

70,000 random samples are dealt out with α = 10 and at least one sample a client, as for MNIST. Every size runs in a
process of its own, so that its peak memory is its own; cohorts are split by the memory at hand, as in a run.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import warnings

import numpy as np
import torch

from engine import SHAPES, median_seconds
from pfedlms.data import from_pool
from pfedlms.engine import Federation
from pfedlms.engine.training import TrainSettings
from pfedlms.experiment.memory import fitting_cohort
from pfedlms.methods import METHODS
from pfedlms.models import CohortModel, build

SAMPLES = 70_000


def measure(options: argparse.Namespace, clients: int) -> dict[str, float]:
    """One size, in this process."""
    device, shape = torch.device(options.device), SHAPES.get(options.model, (3, 32, 32))
    draw = np.random.default_rng(0)
    x = draw.standard_normal((SAMPLES, *shape), dtype=np.float32)
    data = from_pool(x, draw.integers(0, 10, SAMPLES), clients, 10.0, 0, min_samples=1)
    model = CohortModel(build(options.model, shape, 10, 256, 0), device)
    cohort = fitting_cohort(model, data, options.batch)
    train = TrainSettings(options.steps, options.batch, 0.05, 0.0, 1e-4)
    method = METHODS[options.method]
    made = Federation(method, method.Settings(), model, data.to(device), train, 0, cohort)
    made.start()
    seconds = median_seconds(made.play_round, device, options.rounds)
    host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else host
    return {"clients": clients, "cohort": cohort, "seconds": seconds, "peak_bytes": peak}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="dnn")
    parser.add_argument("--method", default="pfedlms", choices=list(METHODS))
    parser.add_argument("--clients", default="20,200,2000", help="numbers, separated by commas")
    parser.add_argument("--steps", type=int, default=5, help="local steps a round")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3, help="timed rounds, after two")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--json")
    parser.add_argument("--alone", action="store_true", help="measure the one size here and print JSON")
    options = parser.parse_args()
    if options.device == "auto":
        options.device = "cuda" if torch.cuda.is_available() else "cpu"
    if options.alone:
        warnings.simplefilter("ignore")
        print(json.dumps(measure(options, int(options.clients))))
        return
    print(f"{options.model}, {options.method}, {options.steps} steps a round, {options.device}")
    print(f"{'clients':>8} {'cohort':>8} {'s a round':>10} {'ms a client':>12} {'peak GiB':>9}")
    rows = []
    for clients in options.clients.split(","):
        same = [
            f"--{name}={getattr(options, name)}" for name in ("model", "method", "steps", "batch", "rounds", "device")
        ]
        command = [sys.executable, __file__, "--alone", f"--clients={clients}", *same]
        row = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
        rows.append(row)
        print(
            f"{row['clients']:8d} {row['cohort']:8d} {row['seconds']:10.3f} "
            f"{1e3 * row['seconds'] / row['clients']:12.2f} {row['peak_bytes'] / 2**30:9.2f}",
            flush=True,
        )
    if options.json:
        with open(options.json, "w") as file:
            told = {name: value for name, value in vars(options).items() if name != "json"}
            json.dump({"options": told, "rows": rows}, file, indent=2)


if __name__ == "__main__":
    main()
