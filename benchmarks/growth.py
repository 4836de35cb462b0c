"""Seconds per round, memory, disk and checkpoints for more and more clients, all of them or some in a round.

    python benchmarks/growth.py --model dnn --clients 20,200,2000 [--method pfedlms] [--steps 5] [--json out.json]
    python benchmarks/growth.py --clients 1000,10000 --participants 50,100,200 --method fedavg
    python benchmarks/growth.py --clients 100,10000,1000000 --participants 100,1000 --per-client 10 --shape 1,8,8

70,000 random samples are partitioned with α = 10 and at least two samples per client, as for MNIST. With --per-client
every client has so many samples of a shape, in a mapped file. Every size runs in a process of its own; cohorts are
split by the memory at hand, as in a run. With --participants states of absent clients are kept on the host, as they are
where not all fit on the device. `kept` is what the method keeps for clients drawn so far, `saved` what a checkpoint has
of it, `disk` what states of absent clients take in their own file. `host` is the memory of the process without mapped
files, `CPU s` what a round takes of all cores, which other jobs on the machine disturb less. Checkpoints are timed
after the rounds, the second one (`save`) with one round in between; `resume` ends where the next round could be played,
with data and model at hand.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from kept import keep
from numpy.typing import NDArray

from engine import SHAPES, median_seconds
from pfedlms.data import FederatedData, Partitioning, from_pool
from pfedlms.engine import Federation
from pfedlms.experiment.memory import fitting_cohort, kept_bytes
from pfedlms.methods import METHODS
from pfedlms.models import CohortModel, build
from pfedlms.step import optimizer_size
from pfedlms.train_settings import TrainSettings

SAMPLES = 70_000
_CHUNK = 100_000  # samples that are made at a time


def made_samples(folder: Path, samples: int, shape: tuple[int, ...]) -> NDArray[np.float32]:
    """Random samples in a mapped file, which sizes of one call share."""
    path = folder / "x.npy"
    if not path.exists() or len(np.load(path, mmap_mode="r")) < samples:
        x = np.lib.format.open_memmap(path, "w+", np.float32, (samples, *shape))
        draw = np.random.default_rng(0)
        for start in range(0, samples, _CHUNK):
            x[start : start + _CHUNK] = draw.standard_normal((min(_CHUNK, samples - start), *shape), dtype=np.float32)
        x.flush()
    mapped: NDArray[np.float32] = np.load(path, mmap_mode="r")[:samples]
    return mapped


def made_data(options: argparse.Namespace, clients: int, shape: tuple[int, ...]) -> FederatedData:
    if not options.per_client:
        draw = np.random.default_rng(0)
        x = draw.standard_normal((SAMPLES, *shape), dtype=np.float32)
        return from_pool(x, draw.integers(0, 10, SAMPLES), Partitioning(clients, 10.0, 0, min_samples=1))
    samples = clients * options.per_client
    x = made_samples(Path(options.folder), samples, shape)
    return from_pool(x, np.arange(samples) % 10, Partitioning(clients, 1.0, 0, min_samples=2, scheme="iid"))


def private_bytes() -> int:
    """Memory of this process without the pages of files."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("RssAnon:"))


def measure(options: argparse.Namespace, clients: int, participants: int) -> dict[str, float]:
    """One size, in this process."""
    device = torch.device(options.device)
    shape = tuple(map(int, options.shape.split(","))) if options.shape else SHAPES.get(options.model, (3, 32, 32))
    began = time.perf_counter()
    data = made_data(options, clients, shape).to(device)
    partitioned = time.perf_counter() - began
    model = CohortModel(build(options.model, shape, 10, 256, 0), device)
    share = participants / clients if participants else 1.0
    cohort = fitting_cohort(model, data, options.batch, participants or clients)
    train = TrainSettings(local_steps=options.steps, batch_size=options.batch, learning_rate=0.05, participation=share)
    method, home = METHODS[options.method], torch.device("cpu") if participants else None

    def make() -> Federation:
        return Federation(method, method.Settings(), model, data, train, 0, cohort, home=home)

    made = make()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        run = Path(folder)
        made.use_folder(run)
        made.start()
        for _ in range(options.warm_up):
            made.play_round()
        played, spent = made.rounds_played, time.process_time()
        seconds = median_seconds(made.play_round, device, options.rounds)
        spent = (time.process_time() - spent) / (made.rounds_played - played)
        host = private_bytes()
        save(made, run)
        made.play_round()
        saving = save(made, run)
        began = time.perf_counter()
        resumed = make()
        resumed.use_folder(run)
        resumed.load(torch.load(run / "checkpoint.pt", weights_only=True))
        resuming = time.perf_counter() - began
        file = run / "clients.bin"
        disk = os.stat(file).st_blocks * 512 if file.exists() else 0
        checkpoint = (run / "checkpoint.pt").stat().st_size
    present, absent = kept_bytes(made.method, model, optimizer_size(model.layout.dim, train.optimizer, train.momentum))
    drawn = len({k for phase in range(made.rounds_played + 1) for k in made.participation.of(phase)})
    return {
        "clients": clients,
        "participants": made.participation.count,
        "cohort": cohort,
        "drawn": drawn,
        "partition_seconds": partitioned,
        "seconds": seconds,
        "cpu_seconds": spent,
        "device_bytes": torch.cuda.max_memory_allocated() if device.type == "cuda" else 0,
        "host_bytes": host,
        "kept_bytes": made.participation.count * present + (drawn - made.participation.count) * absent,
        "disk_bytes": disk,
        "checkpoint_bytes": checkpoint,
        "save_seconds": saving,
        "resume_seconds": resuming,
    }


def save(made: Federation, folder: Path) -> float:
    """Seconds of a checkpoint, until it is on the disk."""
    began = time.perf_counter()
    with open(folder / "checkpoint.pt", "wb") as file:
        torch.save(made.state(), file)
        file.flush()
        os.fsync(file.fileno())
    return time.perf_counter() - began


COLUMNS: dict[str, Any] = {
    "clients": lambda row: f"{row['clients']:,}",
    "taking part": lambda row: f"{row['participants']:,}",
    "s per round": lambda row: f"{row['seconds']:.3f}",
    "CPU s": lambda row: f"{row['cpu_seconds']:.3f}",
    "ms each": lambda row: f"{1e3 * row['seconds'] / row['participants']:.2f}",
    "partition s": lambda row: f"{row['partition_seconds']:.2f}",
    "drawn": lambda row: f"{row['drawn']:,}",
    **{
        f"{name} GiB": lambda row, key=f"{key or name}_bytes": f"{row[key] / 2**30:.3f}"
        for name, key in {"GPU": "device", "host": "", "kept": "", "disk": "", "saved": "checkpoint"}.items()
    },
    "save s": lambda row: f"{row['save_seconds']:.2f}",
    "resume s": lambda row: f"{row['resume_seconds']:.2f}",
}


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
    parser.add_argument("--per-client", type=int, default=0, help="samples of each client; 0: 70,000 altogether")
    parser.add_argument("--shape", default="", help="of a sample, such as 1,8,8; default: the model's own")
    parser.add_argument("--folder", help="where mapped samples and states of clients are; default: a temporary one")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--alone", action="store_true", help="measure the one size here and print JSON")
    options = parser.parse_args()
    if options.device == "auto":
        options.device = "cuda" if torch.cuda.is_available() else "cpu"
    if options.alone:
        warnings.simplefilter("ignore")
        print(json.dumps(measure(options, int(options.clients), int(options.participants))))
        return
    with tempfile.TemporaryDirectory() as folder:
        options.folder = options.folder or folder
        measure_all(options)


def measure_all(options: argparse.Namespace) -> None:
    """Every size in a process of its own; one with fewer clients uses the samples of one before it."""
    print(f"{options.model}, {options.method}, {options.steps} steps per round, {options.device}")
    print(" ".join(f"{name:>11}" for name in COLUMNS))
    names = ("model", "method", "steps", "batch", "rounds", "device", "warm_up", "per_client", "shape", "folder")
    same = [f"--{name.replace('_', '-')}={getattr(options, name)}" for name in names]
    rows = []
    for clients in options.clients.split(","):
        for participants in options.participants.split(","):
            if int(participants) > int(clients):
                continue
            command = [sys.executable, __file__, "--alone", f"--clients={clients}", f"--participants={participants}"]
            row = json.loads(subprocess.run([*command, *same], check=True, stdout=subprocess.PIPE).stdout)
            rows.append(row)
            print(" ".join(f"{show(row):>11}" for show in COLUMNS.values()), flush=True)
            if options.json:
                given = {key: value for key, value in vars(options).items() if key not in ("json", "alone", "folder")}
                keep({"options": given, "rows": rows}, options.json)


if __name__ == "__main__":
    main()
