"""One simulation in one process or in several, as whole commands in turn.

    python benchmarks/processes.py [--turns N] [--rounds N] [--data-dir FOLDER] [--json FILE]

Every command trains the same run; the metrics must be the same.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from kept import keep

RUN = (
    "run --dataset mnist --model dnn --set model.hidden=512 --clients 40 --method fedavg --rounds {rounds} "
    "--set run.everyone=false --quiet"
)
KINDS = {
    "1 process, 1 thread": ("1", "-m pfedlms"),
    "2 processes, 1 thread each": ("1", "-m torch.distributed.run --nproc-per-node 2 -m pfedlms"),
    "1 process, 2 threads": ("2", "-m pfedlms"),
}
TIMES = {"seconds", "transport"}


def play(kind: str, options: argparse.Namespace) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """One command: what it took, and its metrics without times."""
    threads, start = KINDS[kind]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        command = [sys.executable, *start.split(), *RUN.format(rounds=options.rounds).split(), "--out", str(out)]
        if options.data_dir:
            command += ["--data-dir", options.data_dir]
        before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        load = os.getloadavg()[0]
        subprocess.run(command, check=True, env=os.environ | {"OMP_NUM_THREADS": threads}, stdout=subprocess.DEVNULL)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        summary = json.loads((out / "summary.json").read_text())
    row = {
        "what": kind,
        "seconds": time.perf_counter() - began,
        "training_seconds": summary["seconds"],
        "cpu_seconds": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
        "load": load,
    }
    return row, [{key: value for key, value in line.items() if key not in TIMES} for line in lines]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--data-dir", help="folder of the data sets' files")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    expected = None
    for turn in range(options.turns):
        for kind in KINDS:
            row, metrics = play(kind, options)
            expected = expected or metrics
            if metrics != expected:
                raise SystemExit(f"{kind}: got other metrics than {next(iter(KINDS))}, expected the same")
            rows.append({**row, "turn": turn})
            print(f"{kind:28s} {row['seconds']:6.1f} s, training {row['training_seconds']:6.1f} s", flush=True)
    medians = {}
    for kind in KINDS:
        own = [row for row in rows if row["what"] == kind]
        keys = ("seconds", "training_seconds", "cpu_seconds")
        medians[kind] = {key: round(statistics.median(row[key] for row in own), 3) for key in keys} | {"runs": len(own)}
    if options.json:
        run = RUN.format(rounds=options.rounds)
        commands = {kind: f"OMP_NUM_THREADS={threads} python {start} {run}" for kind, (threads, start) in KINDS.items()}
        keep({"command": commands, "machine": f"{os.cpu_count()} cores", "median": medians, "rows": rows}, options.json)


if __name__ == "__main__":
    main()
