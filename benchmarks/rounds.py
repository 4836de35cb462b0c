"""Whole runs of several methods, and where their time goes; two versions of the package in turn where both are given.

    python benchmarks/rounds.py [--data-dir DIR] [--against CHECKOUT] [--limit 110] [--profile] [--json FILE]

A run has 200 rounds with an evaluation every 10, on MNIST where `--data-dir` has it, else on random samples of the
same size. Another `--model` than dnn has random samples of CIFAR-10's size. `sketchmean:10/1000` is a run in which 10
of 1,000 clients take part. Seconds are those of `summary.json`, without preparing data. Every version runs in a
process of its own, in which a short run of each cell comes first. Stages are of `--stage-rounds` rounds; each waits
for the device, so together they take longer than a round. With `--profile` the functions of the host with the most
time of their own follow. Nothing begins after `--limit` seconds.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import os
import pstats
import statistics
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

from kept import keep

HERE = Path(__file__).resolve()
CELLS = (
    "local,fedavg,pfedlms,sketchvote,sketchmean,stc,fedavg:10/10,fedavg:10/100,pfedlms:10/10,pfedlms:10/100,"
    "pfedlms:10/1000,sketchmean:10/10,sketchmean:10/100,sketchmean:10/1000"
)


class Watched:
    """A callback that starts the stopwatch of a run."""

    def on_start(self, run: Any) -> None:
        federation = run.federation if hasattr(run, "federation") else run.played  # as versions before called it
        federation.watch.device = federation.model.device


def work(options: argparse.Namespace) -> None:
    """One run for every line on standard input; uses only what both versions have."""
    import numpy as np
    import torch

    import pfedlms

    warnings.simplefilter("ignore")
    draw = np.random.default_rng(0)
    if options.data_dir and options.model == "dnn":
        data = pfedlms.load_dataset("mnist", options.data_dir)
    else:
        shape = (70_000, 1, 28, 28) if options.model == "dnn" else (60_000, 3, 32, 32)
        data = draw.standard_normal(shape, dtype=np.float32), draw.integers(0, 10, shape[0])
    print(torch.cuda.get_device_name() if options.device == "cuda" else f"{torch.get_num_threads()} CPU threads")
    sys.stdout.flush()
    for line in sys.stdin:
        asked = json.loads(line)
        method, _, some = asked["cell"].partition(":")
        taking_part, clients = map(int, (some or "20/20").split("/"))
        chosen = {"clients": clients, "participation": taking_part / clients, "min_samples": 2, "alpha": options.alpha}
        chosen |= {"local_steps": options.steps, "batch_size": options.batch}
        profiler = cProfile.Profile() if asked["profile"] else None
        if profiler is not None:
            profiler.enable()
        summary = pfedlms.run(
            data, options.model, method=method, rounds=asked["rounds"], evaluate_every=10, device=options.device,
            progress=False, callbacks=[Watched()] if asked["stages"] else [], **chosen,
        ).summary  # fmt: skip
        found = {"seconds": summary["seconds"], "stages": summary.get("stages", {}), "functions": {}}
        if profiler is not None:
            profiler.disable()
            found["functions"] = busiest(profiler)
        print(json.dumps(found), flush=True)


def busiest(profiler: cProfile.Profile, most: int = 25) -> dict[str, list[float]]:
    """Seconds of their own and calls of the functions that take longest."""
    rows = pstats.Stats(profiler).stats.items()  # type: ignore[attr-defined]
    order = sorted(rows, key=lambda row: -row[1][2])[:most]
    return {f"{Path(file).name}:{at} {name}": [round(own[2], 4), own[1]] for (file, at, name), own in order}


class Version:
    """One version in a process of its own."""

    def __init__(self, source: Path) -> None:
        environment = {**os.environ, "PYTHONPATH": str(source)}
        command = [sys.executable, str(HERE), "--work", *sys.argv[1:]]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, text=True)
        self.where = self._read().strip()

    def _read(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"a measuring process ended with {self._process.wait()}")
        return line

    def run(self, cell: str, rounds: int, stages: bool = False, profile: bool = False) -> dict[str, Any]:
        assert self._process.stdin is not None
        asked = {"cell": cell, "rounds": rounds, "stages": stages, "profile": profile}
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()
        found: dict[str, Any] = json.loads(self._read())
        return found

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


class Measured:
    """What was measured so far, printed as it comes."""

    def __init__(self, options: argparse.Namespace, versions: dict[str, Version]) -> None:
        self._options, self._versions, self._began = options, versions, time.perf_counter()
        self.rows: dict[str, dict[str, Any]] = {name: {} for name in versions}

    @property
    def in_time(self) -> bool:
        return time.perf_counter() - self._began < self._options.limit

    def seconds(self, cell: str, turn: int) -> None:
        """The versions change places from turn to turn: whichever runs first is slower."""
        for name, version in list(self._versions.items())[:: -1 if turn % 2 else 1]:
            if self.in_time:
                if turn == 0:
                    version.run(cell, 12)
                row = self.rows[name].setdefault(cell, {"seconds": []})
                row["seconds"].append(version.run(cell, self._options.rounds)["seconds"])
                print(f"{cell:20s} {name:8s} {row['seconds'][-1]:8.3f} s", flush=True)

    def stages(self, cell: str) -> None:
        rounds = self._options.stage_rounds
        for name, version in self._versions.items():
            if self.in_time and cell in self.rows[name]:
                spent = {stage: own / rounds for stage, own in version.run(cell, rounds, stages=True)["stages"].items()}
                self.rows[name][cell]["stages"] = spent
                times = ", ".join(f"{stage} {1e3 * own:.2f}" for stage, own in spent.items())
                print(f"{cell:20s} {name:8s} ms a round: {times}", flush=True)

    def functions(self, cell: str) -> None:
        if self.in_time and cell in self.rows["this"]:
            version, rounds = self._versions["this"], self._options.stage_rounds
            self.rows["this"][cell]["functions"] = found = version.run(cell, rounds, profile=True)["functions"]
            print(f"{cell}: own time of functions in {rounds} rounds, ms a round, and calls a round")
            for function, (own, calls) in found.items():
                print(f"    {1e3 * own / rounds:8.3f} {calls / rounds:8.1f}  {function}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", default=CELLS, help="methods, with participants/clients if not 20/20")
    parser.add_argument("--against", type=Path, help="a checkout of another version")
    parser.add_argument("--model", default="dnn", help="a model for images")
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--stage-rounds", type=int, default=30)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=20, help="local steps of a round")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--alpha", type=float, default=0.5)
    parser.add_argument("--limit", type=float, default=110, help="seconds after which nothing more begins")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--data-dir")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.device == "auto":
        import torch

        options.device = "cuda" if torch.cuda.is_available() else "cpu"
    if options.work:
        work(options)
        return
    versions = {"this": Version(HERE.parents[1] / "src")}
    if options.against:
        versions["against"] = Version(options.against / "src")
    print(versions["this"].where)
    measured, cells = Measured(options, versions), options.cells.split(",")
    for turn in range(options.repeats):
        for cell in cells:
            measured.seconds(cell, turn)
            if turn == 0:
                measured.stages(cell)
            if turn == 0 and options.profile:
                measured.functions(cell)
    for version in versions.values():
        version.close()
    for cell, row in measured.rows["this"].items():
        other = measured.rows.get("against", {}).get(cell)
        ratio = f"   {statistics.median(row['seconds']) / statistics.median(other['seconds']):.3f}" if other else ""
        print(f"{cell:20s} {statistics.median(row['seconds']):8.3f} s, median of {len(row['seconds'])}{ratio}")
    if options.json:
        left_out = ("json", "data_dir", "against", "work")
        chosen = {name: str(value) for name, value in vars(options).items() if name not in left_out}
        keep({"options": chosen, "where": versions["this"].where, "rows": measured.rows}, options.json)


if __name__ == "__main__":
    main()
