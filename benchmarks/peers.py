"""FedAvg by this package, by public simulators and by a plain loop: the same work, in turn, on one machine.

    python benchmarks/peers.py --work cnn|dnn pfedlms:2 plain:2 pfl:2 flower:2 fedlab:1 blazefl-threads:2 …
        [--python flower=PYTHON …] [--repeats N] [--device cpu|cuda] [--json FILE]

Each name is followed by how many threads or processes it is given. Every repeat starts each script of `simulators` in a
process of its own, one after another, so that a noisy neighbour disturbs all of them. A simulator may need an
environment of its own: `--python NAME=PYTHON` names its interpreter. All get the same initial weights and the same
batches in the same order; the models after the last round are compared. Nothing is evaluated.

`cnn` is the setting of BlazeFL's README (100 clients, 5 rounds of 5 epochs, batch 50, SGD with 0.1, the small CNN of
PyTorch's tutorial) on random images of CIFAR's shape, with --samples for each client in place of 500. Rounding decides
now and then in its ReLUs and max pooling, so models drift apart; `smooth` has neither and shows that all do the same
work. `dnn` are 100 clients with random images of MNIST's shape, 784-256-10, 20 steps on batches of 64.

A round's seconds are those between the ends of two rounds, so the first, with the start of processes, does not count.
Memory is the highest sum over all processes of a simulator, each with its share of pages used by several (PSS). CPU
seconds are those of the whole command.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import platform
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from kept import keep
from simulators.work import Work, flat

SCRIPTS = Path(__file__).parent / "simulators"
SEED = 0
CIFAR = {"shape": (3, 32, 32), "samples": 100, "epochs": 5, "batch": 50, "rate": 0.1}
WORKS: dict[str, dict[str, Any]] = {
    "cnn": {**CIFAR, "tolerance": 1.0},
    "smooth": {**CIFAR, "tolerance": 1e-3},
    "dnn": {"shape": (1, 28, 28), "samples": 400, "steps": 20, "batch": 64, "rate": 0.05, "tolerance": 1e-2},
}
"""Tolerance: of 99 % of the weights, over the median distance that weights moved."""
SIMULATORS: dict[str, dict[str, Any]] = {
    "pfedlms": {"script": "with_pfedlms.py", "package": "pfedlms"},
    "pfedlms-processes": {"script": "with_pfedlms.py", "package": "pfedlms"},
    "plain": {"script": "plain_loop.py", "package": "torch"},
    "pfl": {"script": "with_pfl.py", "package": "pfl"},
    "flower": {"script": "with_flower.py", "package": "flwr"},
    "fedlab": {"script": "with_fedlab.py", "package": "fedlab"},
    "fedlab-processes": {"script": "with_fedlab_processes.py", "package": "fedlab"},
    "blazefl-threads": {"script": "with_blazefl.py", "package": "blazefl"},
    "blazefl-processes": {"script": "with_blazefl.py", "package": "blazefl", "environment": {"PEER_MODE": "processes"}},
}
QUIET = {"FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "0", "TQDM_DISABLE": "1"}
MARK = "PEERS_BENCHMARK"
BEAT = 0.25  # seconds between two looks at memory


def make_work(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Write samples and the order of training, which is the one this package draws."""
    from pfedlms.data import batch_positions

    work = WORKS[options.work]
    samples, batch, clients = options.samples or work["samples"], work["batch"], options.clients
    steps = work.get("steps") or work["epochs"] * samples // batch
    draw = np.random.default_rng(SEED)
    labels = draw.integers(0, 10, (clients, samples))
    labels[:, 0] = 9  # every class up to the last is known to the data
    np.save(folder / "x.npy", draw.standard_normal((clients, samples, *work["shape"]), dtype=np.float32))
    np.save(folder / "y.npy", labels)
    order = [
        [batch_positions(SEED, client, samples, round * steps, steps, batch) for client in range(clients)]
        for round in range(options.rounds)
    ]
    np.save(folder / "order.npy", np.array(order, dtype=np.int32))
    made = {
        "model": options.work, "clients": clients, "samples": samples, "steps": steps, "batch": batch,
        "rate": work["rate"], "seed": SEED, "rounds": options.rounds,
    }  # fmt: skip
    (folder / "work.json").write_text(json.dumps(made))
    return made


def commands(name: str, parallel: int, python: str, rest: list[str]) -> list[tuple[list[str], dict[str, str]]]:
    """The processes to start, with what their environments have besides."""
    simulator = SIMULATORS[name]
    command = [python, str(SCRIPTS / simulator["script"]), *rest, "--parallel", str(parallel)]
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    environment = QUIET | simulator.get("environment", {})
    if name == "pfl":
        environment |= {"PFL_PYTORCH_DEVICE": rest[rest.index("--device") + 1]}
        ranks = [
            {"PFL_WORKER_RANK": str(rank), "PFL_WORKER_ADDRESSES": ",".join([f"localhost:{port}"] * parallel)}
            for rank in range(parallel if parallel > 1 else 0)
        ]
    elif name == "fedlab-processes":
        ranks = [{"RANK": str(rank), "PORT": str(port)} for rank in range(parallel + 1)]
    else:
        ranks = []
    if name == "pfedlms-processes":
        command[1:1] = ["-m", "torch.distributed.run", "--nproc-per-node", str(parallel), "--master-port", str(port)]
        environment |= {"OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1"}
    elif name == "pfedlms":
        environment |= {"OMP_NUM_THREADS": str(parallel), "NUMBA_NUM_THREADS": str(parallel)}
    return [(command, environment | rank) for rank in ranks or [{}]]


def look(mark: str, cpu: dict[str, float]) -> int:
    """Memory of all processes whose environment has the mark, pages used by several shared out among them. Notes the
    CPU seconds of each so far."""
    total, needle = 0, f"{MARK}={mark}".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if needle in (folder / "environ").read_bytes():
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
                cpu[folder.name] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
                total += 1024 * int((folder / "smaps_rollup").read_text().split("\nPss:")[1].split()[0])
        except (OSError, IndexError):  # ended meanwhile, or a process of the kernel
            continue
    return total


def play(name: str, parallel: int, python: str, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Run one simulator once."""
    for old in ("stamps.json", "model.npy"):
        (folder / old).unlink(missing_ok=True)
    shutil.rmtree(folder / "run", ignore_errors=True)
    mark, peak, cpu, processes = uuid.uuid4().hex, 0, dict[str, float](), []
    began, log = time.time(), folder / "log.txt"
    with log.open("wb") as out:
        for command, more in commands(name, parallel, python, [str(folder), "--device", options.device]):
            environment = os.environ | more | {MARK: mark}
            processes.append(subprocess.Popen(command, env=environment, stdout=out, stderr=out))
        while any(process.poll() is None for process in processes):
            time.sleep(BEAT)
            peak = max(peak, look(mark, cpu))
    seconds = time.time() - began
    if any(process.returncode for process in processes) or not (folder / "stamps.json").exists():
        codes = [process.returncode for process in processes]
        raise RuntimeError(f"exit codes {codes}\n{log.read_text()[-3000:]}")
    result = json.loads((folder / "stamps.json").read_text())
    stamps = result["stamps"]
    rounds = [after - before for before, after in pairwise(stamps)]
    return {
        "name": name, "parallel": parallel, "round_seconds": rounds, "command_seconds": seconds,
        "cpu_seconds": sum(cpu.values()), "before_first_round_ended": stamps[0] - began, "peak_bytes": peak,
        "gpu_bytes": result["gpu_bytes"],
    }  # fmt: skip


def lines_of(script: Path) -> int:
    """Lines with code: no blanks, comments and docstrings."""
    text = script.read_text()
    documented: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            documented |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    lines = enumerate(map(str.strip, text.splitlines()), 1)
    return sum(1 for number, line in lines if line and not line.startswith("#") and number not in documented)


@cache
def version_of(python: str, package: str) -> str:
    code = f"import importlib.metadata as m, platform; print(m.version({package!r}), platform.python_version())"
    asked = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False)
    return asked.stdout.strip() or "unknown"


def apart(model: np.ndarray, reference: np.ndarray) -> dict[str, float]:
    difference = np.abs(model - reference)
    return {"99 %": float(np.quantile(difference, 0.99)), "largest": float(difference.max())}


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("simulators", nargs="+", help=f"NAME:PARALLEL, of {', '.join(SIMULATORS)}")
    parser.add_argument("--work", choices=list(WORKS), default="cnn")
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--samples", type=int, default=0, help="of each client")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--python", action="append", default=[], metavar="NAME=PYTHON")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no other simulator after that")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    for each in options.simulators:
        if each.split(":")[0] not in SIMULATORS or not each.partition(":")[2].isdigit():
            parser.error(f"{each}: expected NAME:PARALLEL with a name of {', '.join(SIMULATORS)}")
    return options


def main() -> None:
    options = parsed()
    pythons = dict(each.split("=", 1) for each in options.python)
    chosen = [(name, int(parallel)) for name, _, parallel in (each.partition(":") for each in options.simulators)]
    folder = Path(tempfile.mkdtemp(prefix="peers-"))
    rows: list[dict[str, Any]] = []
    began, failed = time.time(), False
    try:
        work = make_work(folder, options)
        start = flat(Work(folder).module()).numpy()
        reference: np.ndarray | None = None
        for repeat in range(options.repeats):
            for name, parallel in chosen:
                if time.time() - began > options.seconds:
                    print(f"{name}:{parallel} left out: {options.seconds} seconds have passed")
                    continue
                try:
                    row = play(name, parallel, pythons.get(name.split("-")[0], sys.executable), folder, options)
                except RuntimeError as error:  # the others are measured nevertheless
                    print(f"FAILED {name}:{parallel}: {error}", flush=True)
                    failed = True
                    continue
                model = np.load(folder / "model.npy")
                if reference is None:
                    reference, work["moved"] = model, float(np.median(np.abs(model - start)))
                row |= {"repeat": repeat, "apart_from_first": apart(model, reference)}
                rows.append(row)
                print(
                    f"{name:18s} {parallel}  {statistics.median(row['round_seconds']):8.3f} s a round  "
                    f"{row['command_seconds']:7.1f} s in all  {row['cpu_seconds']:6.1f} CPU s  "
                    f"{row['peak_bytes'] / 2**20:7.0f} MiB  "
                    f"99 % of weights within {row['apart_from_first']['99 %']:.1e}",
                    flush=True,
                )
                if row["apart_from_first"]["99 %"] > WORKS[options.work]["tolerance"] * work["moved"]:
                    print(f"FAILED {name}:{parallel}: another model than {chosen[0][0]}'s: {row['apart_from_first']}")
                    failed = True
                if options.json:
                    keep(report(options, work, rows, pythons), options.json)
    finally:
        shutil.rmtree(folder)
    sys.exit(failed)


def report(
    options: argparse.Namespace,
    work: dict[str, Any],
    rows: list[dict[str, Any]],
    pythons: dict[str, str],
) -> dict[str, Any]:
    table = {}
    for name, parallel in dict.fromkeys((row["name"], row["parallel"]) for row in rows):
        own = [row for row in rows if (row["name"], row["parallel"]) == (name, parallel)]
        seconds = [second for row in own for second in row["round_seconds"]]
        simulator = SIMULATORS[name]
        table[f"{name}:{parallel}"] = {
            "version, python": version_of(pythons.get(name.split("-")[0], sys.executable), simulator["package"]),
            "median_round_seconds": statistics.median(seconds),
            "quartiles": statistics.quantiles(seconds, n=4) if len(seconds) > 1 else seconds,
            "rounds_per_second": 1 / statistics.median(seconds),
            "median_cpu_seconds": statistics.median(row["cpu_seconds"] for row in own),
            "median_command_seconds": statistics.median(row["command_seconds"] for row in own),
            "peak_mib": round(max(row["peak_bytes"] for row in own) / 2**20),
            "gpu_mib": round(max(row["gpu_bytes"] for row in own) / 2**20),
            "lines_of_code": lines_of(SCRIPTS / simulator["script"]),
        }
    return {
        "work": work,
        "device": options.device,
        "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores",
        "repeats": options.repeats,
        "table": table,
        "rows": rows,
    }


if __name__ == "__main__":
    main()
