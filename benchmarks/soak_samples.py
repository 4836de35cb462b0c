"""What is seen of a run over Flower while it goes on: memory, open files, sizes on disk, states of nodes and server."""

from __future__ import annotations

import hashlib
import os
import sqlite3
import sys
import time
from collections import Counter, defaultdict
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "deploy"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "flower"))
from flotilla import Flotilla, children, processes_of, wait_until

__all__ = ["PLACES", "WORK", "Flotilla", "Seen", "children", "look_at_states", "processes_of", "sample", "wait_until"]

PLACES = 6
WORK = "flwr-clientapp"
ROLES = {
    "pfedlms.flower.superlink": "superlink",
    "flwr-serverapp": "server app",
    "pfedlms.flower.supernode": "",
    "pfedlms.flower.launcher": "launcher",
    WORK: "client app",
    "flwr": "flwr run",
}
"""What Flower's commands are called here; a SuperNode is called by its place."""
PAGE, TICKS = os.sysconf("SC_PAGESIZE"), os.sysconf("SC_CLK_TCK")


@dataclass
class Process:
    """One that started, did its work and ended."""

    began: float
    seen: float = 0.0
    cpu: float = 0.0
    peak: int = 0


@dataclass
class Seen:
    """All that was sampled."""

    minutes: float
    commit: str
    began: float = field(default_factory=time.monotonic)
    memory: dict[str, list[tuple[float, int, int]]] = field(default_factory=lambda: defaultdict(list))
    """Seconds, resident bytes and open files, by name."""
    sizes: dict[str, list[tuple[float, int]]] = field(default_factory=lambda: defaultdict(list))
    """Seconds and bytes on disk."""
    messages: list[tuple[float, int]] = field(default_factory=list)
    """Seconds, and how many messages to nodes the SuperLink keeps."""
    work: dict[tuple[int, float], Process] = field(default_factory=dict)
    """Client apps, one a message, by process id and when they began."""
    tracked: dict[int, dict[int, bytes]] = field(default_factory=lambda: defaultdict(dict))
    """By number of answers received and by client (−1: the server), digests of the model."""
    carried_out: dict[int, set[int]] = field(default_factory=lambda: defaultdict(set))
    """Who has done what a trip asked for, by trip."""
    replied: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """Whose replies the server took, by trip."""
    phases: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    """Of the last local steps, by client, as they followed each other."""
    round: int = 0
    done: Counter[str] = field(default_factory=Counter)
    """To nodes."""
    left: int = 0
    """Processes of nodes that were ended, but did not."""
    states: dict[Path, tuple[int, ...]] = field(default_factory=dict)
    """Which version of a file was read last."""


def sample(fleet: Flotilla, seen: Seen) -> None:
    now = time.monotonic() - seen.began
    for name, process in fleet.started.items():
        for pid in [process.pid, *children(process.pid)]:
            try:
                look_at(name, pid, now, seen)
            except (OSError, IndexError):  # it has just ended
                continue
    for name, size in {
        "superlink.db": sum(size_of(each) for each in fleet.folder.glob("superlink.db*")),
        "run directory": folder_size(fleet.folder / "run"),
        **{f"state of node {k}": sum(map(size_of, state_files(fleet, k))) for k in range(PLACES)},
    }.items():
        seen.sizes[name].append((now, size))
    with closing(sqlite3.connect(f"file:{fleet.folder / 'superlink.db'}?mode=ro", uri=True)) as database:
        seen.messages.append((now, int(database.execute("SELECT count(*) FROM message_ins").fetchone()[0])))
    look_at_states(fleet, seen)


def look_at(name: str, pid: int, now: float, seen: Seen) -> None:
    folder = Path(f"/proc/{pid}")
    words = {Path(each).name for each in (folder / "cmdline").read_bytes().decode().split("\0")}
    command = next((each for each in (WORK, "flwr-serverapp", *ROLES) if each in words), "")
    if not command:
        return
    pages = int((folder / "statm").read_text().split()[1])
    numbers = (folder / "stat").read_text().rpartition(")")[2].split()
    if command == WORK:
        began = int(numbers[19]) / TICKS
        one = seen.work.setdefault((pid, began), Process(began))
        one.seen = float(Path("/proc/uptime").read_text().split()[0])
        one.cpu = (int(numbers[11]) + int(numbers[12])) / TICKS
        one.peak = max(one.peak, pages * PAGE)
        return
    role = ROLES[command]
    label = role if role in ("superlink", "server app", "flwr run") else f"{name} {role}".strip()
    seen.memory[label].append((now, pages * PAGE, len(os.listdir(folder / "fd"))))


def look_at_states(fleet: Flotilla, seen: Seen) -> None:
    """Files of states are replaced at once, so that what is there is whole; each version is read once."""
    for client in range(PLACES):
        for file in (each for each in state_files(fleet, client) if each.suffix == ".pt"):
            if (kept := changed(file, seen)) is not None:
                seen.tracked[kept["answers_known"]][client] = digest(kept["cohort"]["state"]["model"][0])
                seen.carried_out[kept["trip"]].add(client)
                if seen.phases[client][-1:] != [kept["phase"]]:
                    seen.phases[client].append(kept["phase"])
    if (kept := changed(fleet.folder / "run" / "checkpoint.pt", seen)) is not None:
        standing = kept["federation"]["standing"]
        seen.round = standing["round"]
        seen.tracked[standing["round"]][-1] = digest(standing["server"]["model"])
        if standing["members"]:
            seen.replied[standing["trip"] - 1] = tuple(standing["members"])


def changed(file: Path, seen: Seen) -> dict[str, Any] | None:
    """What is in a file, if it is another than before."""
    try:
        with open(file, "rb") as opened:
            version = os.fstat(opened.fileno())
            stamp = (version.st_ino, version.st_mtime_ns, version.st_size)
            if seen.states.get(file) == stamp:
                return None
            seen.states[file] = stamp
            kept: dict[str, Any] = torch.load(opened, weights_only=True)
            return kept
    except FileNotFoundError:
        return None


def digest(model: torch.Tensor) -> bytes:
    return hashlib.sha256(model.numpy().tobytes()).digest()


def state_files(fleet: Flotilla, client: int) -> list[Path]:
    return list((fleet.folder / "state").glob(f"client-{client}-*"))


def size_of(file: Path) -> int:
    try:
        return file.stat().st_size
    except FileNotFoundError:
        return 0


def folder_size(folder: Path) -> int:
    return sum(size_of(file) for file in folder.rglob("*"))
