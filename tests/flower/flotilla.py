"""A server and nodes as processes on this machine, started by the scripts of a folder of `pfedlms deploy init`."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from fleet import comparable, simulate

from pfedlms.deploy import Node
from pfedlms.experiment.config import Config
from pfedlms.experiment.store import RunDirectory
from pfedlms.flower.approval import approve
from pfedlms.flower.approval import run_config as read_run_config
from pfedlms.flower.check import listening_addresses
from pfedlms.flower.config import run_settings
from pfedlms.flower.folder import write_folder

needs_flower = pytest.mark.skipif(find_spec("flwr") is None, reason="Flower is not installed (extra: flower)")
long = pytest.mark.skipif(not os.environ.get("PFEDLMS_TEST_DEPLOY"), reason="takes minutes; make test-deploy")
SMALL = """schema = 1
[data]
clients = {nodes}
[model]
hidden = 12
[train]
rounds = 2
local_steps = 3
batch_size = 16
learning_rate = 0.1
[method]
name = "fedavg"
[run]
seed = 3
device = "cpu"
threads = 1
cohort_size = 1
timeout = 180.0
"""


def free_port() -> int:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return int(bound.getsockname()[1])


def wait_until(fact: Callable[[], object], seconds: float, what: str) -> None:
    """PFEDLMS_TEST_PATIENCE multiplies all limits, for a machine that others use at the same time."""
    end = time.monotonic() + seconds * float(os.environ.get("PFEDLMS_TEST_PATIENCE", 1))
    while not fact():
        assert time.monotonic() < end, f"{what}: not within {seconds:g} s"
        time.sleep(0.2)


class Flotilla:
    """One deployment folder. Its processes are found by FLWR_HOME, which they inherit, and ended by their ids."""

    def __init__(self, folder: Path, nodes: int) -> None:
        self.folder, self.nodes, self.port, self.link_port = folder, nodes, free_port(), free_port()
        write_folder(folder, nodes, "fedavg", port=self.port, link_port=self.link_port)
        self.app = folder / "app"
        (self.app / "pfedlms.toml").write_text(SMALL.format(nodes=nodes))
        self.home = str(folder.resolve() / "flwr")
        beside = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        self.environment = {**os.environ, "PATH": f"{beside}:/usr/sbin", "FLWR_HOME": self.home}
        self.started: dict[str, subprocess.Popen[bytes]] = {}
        self.call("./certificates.sh")
        self.call("./keys.sh")
        (folder / "approved.jsonl").touch()

    def call(self, *command: str) -> str:
        done = subprocess.run(
            command, cwd=self.folder, env=self.environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            timeout=300,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout
        return done.stdout

    def start(self, name: str, *command: str, **environment: str) -> None:
        """Start a process in the background; its output goes to a file of its name."""
        with open(self.folder / f"{name}.log", "ab") as log:
            self.started[name] = subprocess.Popen(
                command, cwd=self.folder, env={**self.environment, **environment}, stdout=log, stderr=log,
                stdin=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip

    def log_text(self, name: str) -> str:
        file = self.folder / f"{name}.log"
        return file.read_text(errors="replace") if file.exists() else ""

    def open(self, nodes: int = 0) -> Flotilla:
        """Start the server and its gate, with the keys of all nodes, and the first nodes."""
        self.server()
        self.call("./register.sh")
        self.start("gate", "./gate.sh")
        wait_until(lambda: listening_addresses(self.port), 60, "the gate listens")
        for number in range(nodes):
            self.node(number)
        return self

    def server(self) -> None:
        self.start("superlink", "./superlink.sh")
        wait_until(lambda: listening_addresses(self.link_port), 120, "the server listens")

    def approve(self, *settings: str) -> None:
        """Approve a run on all nodes."""
        approve(self.folder, read_run_config([part for each in settings for part in ("--run-config", each)]))

    def node(self, number: int, *options: str, **environment: str) -> None:
        # Each has its own port; the script adds the node's number to the given one.
        port = str(free_port() - number)
        self.start(f"node-{number}", f"./node-{number}.sh", *options, NODE_PORT=port, **environment)

    def run(self, *settings: str, name: str = "run", simulated: int = 0) -> None:
        if not simulated:
            self.approve(*settings)
        command = ["./run.sh", *(["simulation"] if simulated else [])]
        command += [part for each in settings for part in ("--run-config", each)]
        if simulated:
            command += ["--federation-config", f"num-supernodes={simulated} client-resources-num-cpus=1"]
        ports = ("FLWR_LOCAL_SUPERLINK_HTTP_API_PORT", "FLWR_LOCAL_CONTROL_API_PORT")
        own = {port: str(free_port()) for port in ports}
        self.start(name, *command, RAY_USAGE_STATS_ENABLED="0", **(own if simulated else {}))

    def wait_for_end(self, name: str = "run", seconds: float = 400) -> str:
        wait_until(lambda: self.started[name].poll() is not None, seconds, name)
        return self.log_text(name)

    def kill(self, name: str) -> None:
        """Send SIGKILL to a process and all its children."""
        process = self.started.pop(name)
        for pid in [process.pid, *children(process.pid)]:  # nginx would start another worker
            kill(pid)
        process.wait()

    def end(self, name: str, seconds: float = 60) -> None:
        """Send SIGTERM to a process and all its children, and wait for their end."""
        process = self.started.pop(name)
        everything = [process.pid, *children(process.pid)]
        for pid in everything:
            try:
                os.kill(pid, signal.SIGTERM)
            except ProcessLookupError:
                continue
        process.wait(seconds)
        wait_until(lambda: not any(map(alive, everything)), seconds, f"the end of {name}")

    def __enter__(self) -> Flotilla:
        return self

    def __exit__(self, *_: object) -> None:
        for _ in range(5):
            for pid in sorted(processes_of(self.home)):  # parents first
                kill(pid)
        for process in self.started.values():
            for pid in [process.pid, *children(process.pid)]:  # nginx hides its environment
                kill(pid)
            process.wait()
        assert not processes_of(self.home)

    def config(self, **chosen: object) -> Config:
        return run_settings(self.app / "pfedlms.toml", chosen)[0]


class Memory:
    """MiB of the server's processes inside `with`: the first value and the largest."""

    MARKS: ClassVar = {"gate": "nginx", "superlink": "flower.superlink", "server": "flwr-serverapp"}

    def __init__(self, flotilla: Flotilla) -> None:
        self._flotilla, self._ended = flotilla, threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self.seen: dict[str, list[float]] = {}

    def __enter__(self) -> Memory:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        gate = self._flotilla.started["gate"].pid  # nginx hides its environment
        while not self._ended.wait(0.5):
            for pid in [gate, *children(gate), *processes_of(self._flotilla.home)]:
                try:
                    line = Path(f"/proc/{pid}/cmdline").read_bytes().decode()
                    size = int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE") / 2**20
                except OSError:
                    continue
                for kind in [kind for kind, mark in self.MARKS.items() if mark in line]:
                    first, most = self.seen.get(kind, [size, size])
                    self.seen[kind] = [first, max(size, most)]


def run_config(chosen: dict[str, Any]) -> str:
    return " ".join(f'{key}="{value}"' if isinstance(value, str) else f"{key}={value}" for key, value in chosen.items())


def check(flotilla: Flotilla, chosen: dict[str, Any], state: str = "state") -> list[dict[str, Any]]:
    """Metrics, summary and every node's model equal those of the run in one process."""
    config = flotilla.config(**chosen)
    directory = RunDirectory(Path(config.run.out))
    metrics, expected = directory.read_metrics(), simulate(config.with_run(out=""))
    assert [comparable(each) for each in metrics] == [comparable(each) for each in expected.metrics]
    summary = directory.read_summary()
    assert summary is not None
    assert comparable(summary) == comparable(expected.summary)
    assert all(each["left_out"] == {} for each in metrics)
    for client, model in enumerate(expected.models):
        with Node(config, client, flotilla.folder / state.format(client)) as node:
            own = node.model()
        assert own.keys() == model.keys()
        assert all(torch.equal(own[name], model[name]) for name in own)
    return metrics


def kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    wait_until(lambda: not alive(pid), 10, f"the end of {pid}")


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def children(pid: int) -> list[int]:
    """All descendants of a process, the youngest first."""
    try:
        own = [int(each) for file in Path(f"/proc/{pid}/task").glob("*/children") for each in file.read_text().split()]
    except OSError:
        return []
    return [each for child in own for each in [*children(child), child]]


def processes_of(home: str) -> list[int]:
    """Processes whose FLWR_HOME this is."""
    mark, found = f"FLWR_HOME={home}".encode(), []
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal() and int(folder.name) != os.getpid():
            try:
                environment = (folder / "environ").read_bytes().split(b"\0")
            except OSError:
                continue
            if mark in environment and alive(int(folder.name)):
                found.append(int(folder.name))
    return found
