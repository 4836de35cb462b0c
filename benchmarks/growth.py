"""Seconds a round and memory for more and more clients, all of them or some in a round.

    python benchmarks/growth.py --model dnn --clients 20,200,2000 [--method pfedlms] [--steps 5] [--json out.json]
    python benchmarks/growth.py --clients 1000,10000 --participants 50,100,200 --method fedavg

70,000 random samples are dealt out with α = 10 and at least two samples a client, as for MNIST. Every size runs in a
process of its own, so that its peak memory is its own; cohorts are split by the memory at hand, as in a run. With
--participants the state of clients that are away is kept on the host, as it is where not all fit on the device; `kept`
is what the method keeps for clients drawn so far, `checkpoint` what is written of it.
"""

from __future__ import annotations

import argparse
import io
import json
import resource
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import torch
from kept import keep

from engine import SHAPES, median_seconds
from pfedlms.data import Partitioning, from_pool
from pfedlms.engine import Federation
from pfedlms.engine.training import TrainSettings
from pfedlms.experiment.memory import fitting_cohort
from pfedlms.methods import METHODS
from pfedlms.models import CohortModel, build

SAMPLES = 70_000


def measure(options: argparse.Namespace, clients: int, participants: int) -> dict[str, float]:
    """One size, in this process."""
    device, shape = torch.device(options.device), SHAPES.get(options.model, (3, 32, 32))
    draw = np.random.default_rng(0)
    x = draw.standard_normal((SAMPLES, *shape), dtype=np.float32)
    data = from_pool(x, draw.integers(0, 10, SAMPLES), Partitioning(clients, 10.0, 0, min_samples=1))
    model = CohortModel(build(options.model, shape, 10, 256, 0), device)
    share = participants / clients if participants else 1.0
    cohort = fitting_cohort(model, data, options.batch, participants or clients)
    train = TrainSettings(options.steps, options.batch, 0.05, 0.0, 1e-4, participation=share)
    method, home = METHODS[options.method], torch.device("cpu") if participants else None
    made = Federation(method, method.Settings(), model, data.to(device), train, 0, cohort, home=home)
    made.start()
    for _ in range(options.warm_up):
        made.play_round()
    seconds = median_seconds(made.play_round, device, options.rounds)
    host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    file, clients_kept = io.BytesIO(), [*made._clients.present, *made._clients._absent.values()]
    torch.save(made.state(), file)
    return {
        "clients": clients,
        "participants": made.participation.count,
        "cohort": cohort,
        "drawn": len({k for phase in range(made.rounds_played + 1) for k in made.participation.of(phase)}),
        "seconds": seconds,
        "device_bytes": torch.cuda.max_memory_allocated() if device.type == "cuda" else 0,
        "host_bytes": host,
        "kept_bytes": sum(cohort.nbytes for cohort in clients_kept),
        "checkpoint_bytes": file.getbuffer().nbytes,
    }


COLUMNS = ("clients", "taking part", "cohort", "s a round", "ms each", "GPU GiB", "host GiB", "drawn", "kept", "saved")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="dnn")
    parser.add_argument("--method", default="pfedlms", choices=list(METHODS))
    parser.add_argument("--clients", default="20,200,2000", help="numbers, separated by commas")
    parser.add_argument("--participants", default="0", help="how many take part, separated by commas; 0: all")
    parser.add_argument("--steps", type=int, default=5, help="local steps a round")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3, help="timed rounds, after two")
    parser.add_argument("--warm-up", type=int, default=0, help="rounds before that")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--alone", action="store_true", help="measure the one size here and print JSON")
    options = parser.parse_args()
    if options.device == "auto":
        options.device = "cuda" if torch.cuda.is_available() else "cpu"
    if options.alone:
        warnings.simplefilter("ignore")
        print(json.dumps(measure(options, int(options.clients), int(options.participants))))
        return
    print(f"{options.model}, {options.method}, {options.steps} steps a round, {options.device}")
    print(" ".join(f"{name:>11}" for name in COLUMNS))
    rows = []
    for clients in options.clients.split(","):
        for participants in options.participants.split(","):
            names = ("model", "method", "steps", "batch", "rounds", "device")
            same = [f"--{name}={getattr(options, name)}" for name in names] + [f"--warm-up={options.warm_up}"]
            command = [sys.executable, __file__, "--alone", f"--clients={clients}", f"--participants={participants}"]
            row = json.loads(subprocess.run([*command, *same], check=True, stdout=subprocess.PIPE).stdout)
            rows.append(row)
            gib = [row[f"{name}_bytes"] / 2**30 for name in ("device", "host", "kept", "checkpoint")]
            print(
                f"{row['clients']:11d} {row['participants']:11d} {row['cohort']:11d} {row['seconds']:11.3f} "
                f"{1e3 * row['seconds'] / row['participants']:11.2f} {gib[0]:11.2f} {gib[1]:11.2f} {row['drawn']:11d} "
                f"{gib[2]:11.3f} {gib[3]:11.3f}",
                flush=True,
            )
    if options.json:
        told = {name: value for name, value in vars(options).items() if name not in ("json", "alone")}
        keep({"options": told, "rows": rows}, options.json)


if __name__ == "__main__":
    main()
