"""Seconds and CPU seconds of a round with gate, signatures and allow-list, and without them.

    python benchmarks/gate_cost.py --before CHECKOUT [--rounds 8] [--nodes 2] [--json FILE]     # as `make test-deploy`

Two federations on this machine, each with the scripts of its own checkout: this one, and one of before there was a
gate. Both run at the same time, so that whatever else the machine does is in both; round r of one is compared with
round r of the other. CPU seconds are those of all processes of a federation, also of the ones that have ended.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from kept import ROOT, keep

TICKS = os.sysconf("SC_CLK_TCK")
CONFIG = """schema = 1
[data]
clients = {nodes}
[train]
rounds = {rounds}
[method]
name = "fedavg"
[run]
device = "cpu"
threads = 1
cohort_size = 1
timeout = 600.0
out = "{out}"
"""


class Federation:
    """The scripts of a folder that a checkout's `deploy init` wrote, as processes."""

    def __init__(self, checkout: Path, folder: Path, nodes: int, rounds: int) -> None:
        self.folder, self._nodes, self._started = folder, nodes, list[subprocess.Popen[bytes]]()
        beside = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}{os.pathsep}/usr/sbin"
        self._environment = {**os.environ, "PATH": beside, "PYTHONPATH": str(checkout / "src"), "HOST": "127.0.0.1"}
        self._port = _free_ports()
        command = [sys.executable, "-m", "pfedlms", "deploy", "init", str(folder), "--nodes", str(nodes)]
        subprocess.run([*command, "--port", str(self._port)], env=self._environment, check=True, capture_output=True)
        self.out = folder / "run"
        (folder / "app" / "pfedlms.toml").write_text(CONFIG.format(nodes=nodes, rounds=rounds, out=self.out))
        for script in ("certificates.sh", "keys.sh", "approve.sh"):
            self._call(script)

    def open(self) -> None:
        self._start("superlink.sh")
        gate = (self.folder / "gate.sh").exists()
        _until_listening(self._port + gate)
        self._call("register.sh")
        if gate:
            self._start("gate.sh")
            _until_listening(self._port)
        for node in range(self._nodes):
            self._start(f"node-{node}.sh", NODE_PORT=str(_free_ports() - node))

    def run(self) -> None:
        self._start("run.sh")

    def seconds(self) -> list[float]:
        """Of each round that has ended, from its end to that of the round before."""
        file = self.out / "metrics.jsonl"
        lines = file.read_text().splitlines() if file.exists() else []
        ends = [json.loads(line)["seconds"] for line in lines]
        return [after - before for before, after in pairwise(ends)]

    def cpu(self) -> float:
        """Seconds of all that it has started, and of what those have waited for."""
        total = 0
        for pid in self._processes():
            try:
                total += sum(map(int, Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:15]))
            except OSError:
                continue
        return total / TICKS

    def close(self) -> None:
        for pid in self._processes():  # what starts others first
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        for each in self._started:
            each.wait()

    def _processes(self) -> list[int]:
        """All that it has started, and what those have; one that starts others comes before them."""
        found = [each.pid for each in self._started]
        for pid in found:
            for file in Path(f"/proc/{pid}/task").glob("*/children"):
                try:
                    found += map(int, file.read_text().split())
                except OSError:
                    continue
        return found

    def _call(self, script: str) -> None:
        if (self.folder / script).exists():
            subprocess.run([f"./{script}"], cwd=self.folder, env=self._environment, check=True, capture_output=True)

    def _start(self, script: str, **environment: str) -> None:
        own = {**self._environment, **environment}
        with open(self.folder / f"{script}.log", "ab") as log:
            started = subprocess.Popen(
                [f"./{script}"], cwd=self.folder, env=own, stdout=log, stderr=log, start_new_session=True
            )
        self._started.append(started)


def _free_ports() -> int:
    """A port that is free and so is the next one."""
    while True:
        with socket.socket() as one, socket.socket() as two:
            one.bind(("127.0.0.1", 0))
            try:
                two.bind(("127.0.0.1", one.getsockname()[1] + 1))
            except OSError:
                continue
            return int(one.getsockname()[1])


def _until_listening(port: int) -> None:
    end = time.monotonic() + 300
    while True:
        with socket.socket() as tried:
            if tried.connect_ex(("127.0.0.1", port)) == 0:
                return
        if time.monotonic() > end:
            raise TimeoutError(f"port {port}: nobody listens after 300 s")
        time.sleep(0.5)


def measure(before: Path, nodes: int, rounds: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        both = {
            label: Federation(checkout, Path(name) / label, nodes, rounds)
            for label, checkout in (("before", before), ("now", ROOT))
        }
        try:
            for each in both.values():
                each.open()
            for each in both.values():
                each.run()
            cpu: dict[str, list[float]] = {label: [] for label in both}
            end = time.monotonic() + 300 * rounds
            while any(len(each.seconds()) < rounds - 1 for each in both.values()) and time.monotonic() < end:
                time.sleep(0.5)
                for label, each in both.items():
                    if len(each.seconds()) >= len(cpu[label]):  # a round has ended, or the first one
                        cpu[label].append(each.cpu())
            seconds = {label: each.seconds() for label, each in both.items()}
        finally:
            for each in both.values():
                each.close()
    used = {label: [b - a for a, b in pairwise(own)] for label, own in cpu.items()}
    return {"nodes": nodes, "seconds of a round": seconds, "CPU seconds of a round": used, **_ratios(seconds, used)}


def _ratios(seconds: dict[str, list[float]], used: dict[str, list[float]]) -> dict[str, float]:
    pairs = [now / before for before, now in zip(seconds["before"], seconds["now"], strict=False)]
    return {
        "median of the pairs' ratio of seconds": median(pairs),
        "ratio of median seconds": median(seconds["now"]) / median(seconds["before"]),
        "ratio of median CPU seconds": median(used["now"]) / median(used["before"]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    found = measure(chosen.before.resolve(), chosen.nodes, chosen.rounds)
    print(json.dumps(found, indent=1))
    if chosen.json:
        keep(found, chosen.json)


if __name__ == "__main__":
    main()
