"""Half an hour over Flower in which nodes leave, are killed and come back: is memory flat, is anything lost?

    python benchmarks/soak.py [--minutes 30] [--folder DIR] [--json FILE]     # in the environment of `make test-deploy`

A SuperLink and SuperNodes as processes on this machine, with TLS and node keys; sketchvote, whose nodes must catch up,
on digits with six places:

    0, 1, 2     stay
    3           is ended (SIGTERM) and started again two rounds later, every eight rounds
    4           is killed (SIGKILL, with all it has started) at work and started again, every eight rounds
    5           joins after a fifth of the time and leaves for good after three fifths

Every second: resident memory and open files of all processes, sizes of what is kept, the state of every node and of the
server. When the time is over the run is stopped, and goes on for a few rounds from its checkpoint. Then it is checked
that every round was counted once, that nodes stand where they took part last, that models tracked after as many answers
were the same bits on all nodes and on the server at any time, and that the same trips, with the same replies lost, give
the same metrics, bytes and states in one process, bit for bit.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import pickle
import platform
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "flower"))
from flotilla import Flotilla, belonging, children, until

from pfedlms.deploy import Node, serve
from pfedlms.deploy.envelope import Why, decode, refusal
from pfedlms.experiment.store import RunDirectory

PLACES, ENDED, KILLED, GUEST = 6, 3, 4, 5
CYCLE, KILL_AT, END_AT, BACK_AT = 8, 2, 4, 6
MORE_ROUNDS = 3
CONFIG = f"""schema = 1
[data]
clients = {PLACES}
[train]
rounds = 100000
max_weight = 0.4
[method]
name = "sketchvote"
[run]
seed = 1
device = "cpu"
threads = 1
cohort_size = 1
quorum = 0.3
timeout = 90.0
"""
WORK = "flwr-clientapp"
ROLES = {
    "flower-superlink": "superlink",
    "flwr-serverapp": "server app",
    "flower-supernode": "",
    "flower-superexec": "executor",
    WORK: "client app",
    "flwr": "flwr run",
}
"""What Flower's commands are called here; a SuperNode is called by its place."""
MIB = 2**20


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

    began: float = field(default_factory=time.monotonic)
    memory: dict[str, list[tuple[float, int, int]]] = field(default_factory=lambda: defaultdict(list))
    """Seconds, resident bytes and open files, by name."""
    sizes: dict[str, list[tuple[float, int]]] = field(default_factory=lambda: defaultdict(list))
    """Seconds and bytes on disk."""
    work: dict[int, Process] = field(default_factory=dict)
    """Client apps by process id: one a message."""
    tracked: dict[int, dict[int, bytes]] = field(default_factory=lambda: defaultdict(dict))
    """By number of answers heard and by client (−1: the server), digests of the model."""
    carried_out: dict[int, set[int]] = field(default_factory=lambda: defaultdict(set))
    """Who has done what a trip asked for, by trip."""
    replied: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """Whose replies the server took, by trip."""
    phases: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    """Of the last local steps, by client, as they followed each other."""
    round: int = 0
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
    look_at_states(fleet, seen)


def look_at(name: str, pid: int, now: float, seen: Seen) -> None:
    folder = Path(f"/proc/{pid}")
    command = Path((folder / "cmdline").read_bytes().split(b"\0")[1].decode()).name
    if command not in ROLES:
        return
    pages = int((folder / "statm").read_text().split()[1])
    numbers = (folder / "stat").read_text().rpartition(")")[2].split()
    ticks = os.sysconf("SC_CLK_TCK")
    if command == WORK:
        one = seen.work.setdefault(pid, Process(int(numbers[19]) / ticks))
        one.seen = float(Path("/proc/uptime").read_text().split()[0])
        one.cpu, one.peak = (
            (int(numbers[11]) + int(numbers[12])) / ticks,
            max(one.peak, pages * os.sysconf("SC_PAGESIZE")),
        )
        return
    role = ROLES[command]
    told = role if role in ("superlink", "server app", "flwr run") else f"{name} {role}".strip()
    seen.memory[told].append((now, pages * os.sysconf("SC_PAGESIZE"), len(os.listdir(folder / "fd"))))


def look_at_states(fleet: Flotilla, seen: Seen) -> None:
    """Files of states are replaced at once, so that what is there is whole; each version is read once."""
    for client in range(PLACES):
        for file in (each for each in state_files(fleet, client) if each.suffix == ".pt"):
            if (kept := changed(file, seen)) is not None:
                seen.tracked[kept["heard"]][client] = digest(kept["cohort"]["state"]["model"][0])
                seen.carried_out[kept["trip"]].add(client)
                if seen.phases[client][-1:] != [kept["phase"]]:
                    seen.phases[client].append(kept["phase"])
    if (kept := changed(fleet.folder / "run" / "checkpoint.pt", seen)) is not None:
        standing = kept["federation"]["standing"]
        seen.round = standing["round"]
        seen.tracked[standing["round"]][-1] = digest(standing["server"]["model"])
        if standing["inbox"]:
            seen.replied[standing["trip"] - 1] = tuple(sorted(standing["inbox"]))


def changed(file: Path, seen: Seen) -> dict[str, Any] | None:
    """What is in a file, if it is another than before."""
    try:
        with open(file, "rb") as opened:
            version = os.fstat(opened.fileno())
            told = (version.st_ino, version.st_mtime_ns, version.st_size)
            if seen.states.get(file) == told:
                return None
            seen.states[file] = told
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


# --- who comes and goes


@dataclass
class Play:
    """What is done to nodes, by the round and the time."""

    fleet: Flotilla
    seconds: float
    done: dict[str, int] = field(default_factory=Counter)
    upto: dict[str, int] = field(default_factory=dict)
    left: list[int] = field(default_factory=list)
    """Processes of nodes that were ended: they should end, too."""

    def act(self, seen: Seen) -> None:
        passed = time.monotonic() - seen.began
        if self._due("killed", KILL_AT, seen) and self._at_work(KILLED):
            self.fleet.kill(f"node-{KILLED}")
            self.fleet.node(KILLED)
            self._note("killed", seen)
        if self._due("ended", END_AT, seen):
            self._end(ENDED)
            self._note("ended", seen)
        if self._due("back", BACK_AT, seen) and f"node-{ENDED}" not in self.fleet.started:
            self.fleet.node(ENDED)
            self._note("back", seen)
        if not self.done["joined"] and passed > self.seconds / 5:
            self.fleet.node(GUEST)
            self._note("joined", seen)
        if not self.done["left for good"] and passed > self.seconds * 3 / 5:
            self._end(GUEST)
            self._note("left for good", seen)

    def _due(self, what: str, at: int, seen: Seen) -> bool:
        """In each cycle of rounds once, from that round on, and before the next cycle begins."""
        return seen.round % CYCLE >= at and self.upto.get(what, -1) < seen.round // CYCLE

    def _note(self, what: str, seen: Seen) -> None:
        self.done[what] += 1
        self.upto[what] = seen.round // CYCLE
        print(f"{time.monotonic() - seen.began:7.0f} s  round {seen.round + 1:4d}  {what}", flush=True)

    def _at_work(self, number: int) -> bool:
        for pid in children(self.fleet.started[f"node-{number}"].pid):
            try:
                if WORK.encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
                    return True
            except OSError:
                continue
        return False

    def _end(self, number: int) -> None:
        process = self.fleet.started.pop(f"node-{number}")
        self.left += children(process.pid)
        os.kill(process.pid, signal.SIGTERM)
        process.wait(60)

    def all_back(self, seen: Seen) -> None:
        if f"node-{ENDED}" not in self.fleet.started:
            self.fleet.node(ENDED)
            self._note("back", seen)


def soak(fleet: Flotilla, minutes: float) -> tuple[Seen, Play, float]:
    """The run, sampled; and the seconds that were measured."""
    out = fleet.folder / "run"
    settings = f'run.out="{out}" flower.wait=20'
    fleet.open()
    for number in range(PLACES):
        if number != GUEST:
            fleet.node(number)
    fleet.run(settings)
    seen, play = Seen(), Play(fleet, 60 * minutes)
    while (passed := time.monotonic() - seen.began) < 60 * minutes:
        sample(fleet, seen)
        assert fleet.started["run"].poll() is None, fleet.said("run")[-3000:]
        play.act(seen)
        time.sleep(max(0.0, 1 - (time.monotonic() - seen.began - passed)))
    play.all_back(seen)
    found = re.search(r"started run (\d+)", fleet.said("run"))
    assert found is not None
    fleet.start("stop", "flwr", "stop", found[1], "federation")

    def stopped() -> bool:
        look_at_states(fleet, seen)
        return fleet.started["run"].poll() is not None and not any(
            b"flwr-serverapp" in each for each in commands(fleet)
        )

    until(stopped, 120, "the end of the stopped run and of its server app")
    # Its length is no part of what both ends agree on, so it can be made shorter as well as longer.
    fleet.run(f"{settings} train.rounds={seen.round + MORE_ROUNDS}", name="again")
    while fleet.started["again"].poll() is None:
        look_at_states(fleet, seen)  # memory is that of the server app before
        time.sleep(1)
    until(lambda: (out / "summary.json").exists(), 10, "the summary")
    look_at_states(fleet, seen)
    return seen, play, 60 * minutes


def commands(fleet: Flotilla) -> list[bytes]:
    found = []
    for pid in belonging(fleet.home):
        try:
            found.append(Path(f"/proc/{pid}/cmdline").read_bytes())
        except OSError:
            continue
    return found


# --- was anything lost?


class Again:
    """The same trips to nodes in this process: who had carried a request out does, whose reply came replies."""

    def __init__(self, config: Any, folder: Path, seen: Seen, metrics: list[dict[str, Any]]) -> None:
        self.nodes = {client: Node(config, client, folder) for client in range(PLACES)}
        self._seen, self._metrics = seen, metrics
        self.trips = 0

    def send(self, requests: dict[int, bytes], timeout: float) -> dict[int, bytes]:
        replies = {}
        for client, request in requests.items():
            trip = decode(request).trip
            self.trips = trip + 1
            reply = self.nodes[client].handle(request) if client in self._seen.carried_out[trip] else b""
            if client in self._seen.replied[trip]:
                replies[client] = reply
            elif gone := re.fullmatch(
                "refused, failed: (.*)", self._metrics[max(0, trip - 1)]["left_out"][str(client)]
            ):
                replies[client] = refusal(decode(request), Why.FAILED, gone[1])
        return replies


def check(fleet: Flotilla, seen: Seen, metrics: list[dict[str, Any]]) -> dict[str, Any]:
    """What was found, by name; and the seconds that the same trips take in one process."""
    wrong: list[str] = []
    rounds = len(metrics)
    if [each["round"] for each in metrics] != list(range(1, rounds + 1)):
        wrong.append("rounds: not every one is in the metrics once")
    everyone = tuple(range(PLACES))
    for each in metrics:
        there = tuple(each.get("clients", everyone))
        if seen.replied.setdefault(each["round"], there) != there:
            wrong.append(f"round {each['round']}: counted {there}, but the server took {seen.replied[each['round']]}")
        if not set(there) <= seen.carried_out[each["round"]]:
            wrong.append(f"round {each['round']}: counted {there}, of whom some never trained")
    if sorted(seen.replied) != list(range(rounds + 1)):
        wrong.append("trips: some were not seen")
    for heard, digests in seen.tracked.items():
        if len(set(digests.values())) > 1:
            wrong.append(f"after {heard} answers: different models at {sorted(digests)}")
    for client, phases in seen.phases.items():
        last = max(number for number, carried in seen.carried_out.items() if client in carried)
        if phases != sorted(set(phases)) or phases[-1] != last:
            wrong.append(f"client {client}: trained phases {phases}, its last trip was {last}")
    config = fleet.config(**{"train.rounds": rounds, "run.out": str(fleet.folder / "again")})
    again = Again(config, fleet.folder / "again-state", seen, metrics)
    began = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        serve(config, again)
    seconds = time.perf_counter() - began
    for here, there in zip(RunDirectory(fleet.folder / "again").read_metrics(), metrics, strict=True):
        unlike = [key for key in here if key != "seconds" and here[key] != there[key]]
        if unlike:
            wrong.append(f"round {here['round']}: in one process other {', '.join(unlike)}")
    for client, node in again.nodes.items():
        node.close()
        with Node(config, client, fleet.folder / "state") as other:
            mine, its = node.state, other.state
        names = ("phase", "sent", "heard", "trip", "request", "reply")
        if any(getattr(mine, name) != getattr(its, name) for name in names):
            wrong.append(f"client {client}: in one process it stands elsewhere")
        if not (same(mine.cohort.params, its.cohort.params) and same(mine.cohort.momentum, its.cohort.momentum)):
            wrong.append(f"client {client}: in one process it has another model")
        if not same(mine.cohort.state, its.cohort.state):
            wrong.append(f"client {client}: in one process its method keeps something else")
    late = sum(len(carried - set(seen.replied.get(trip, ()))) for trip, carried in seen.carried_out.items())
    return {
        "wrong": wrong,
        "tracked_models_compared": sum(len(digests) for digests in seen.tracked.values()),
        "answers_heard": max(seen.tracked),
        "carried_out": sum(map(len, seen.carried_out.values())),
        "carried_out_but_not_counted": late,
        "in_one_process_s_per_trip": seconds / again.trips,
    }


def same(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[name], other[name]) for name in one)
    return torch.equal(one, other)


# --- figures


def figures(metrics: list[dict[str, Any]], rounds: int, again: int) -> dict[str, Any]:
    """Of the rounds that were played while memory was measured. Bytes in metrics are sums since the start."""
    measured = metrics[:again]
    seconds = np.diff([0.0, *(each["seconds"] for each in measured)])[1:]
    last = measured[-1]
    reasons: dict[str, Counter[str]] = defaultdict(Counter)
    for each in measured:
        for client, why in each["left_out"].items():
            reasons[client][why] += 1
    whole = [float(each) for each, told in zip(seconds, measured[1:], strict=True) if not told["left_out"]]
    return {
        "rounds": rounds,
        "rounds_measured": again,
        "trips": rounds + 1,
        "seconds_per_trip": {
            "mean": float(seconds.mean()),
            "median": float(np.median(seconds)),
            "longest": float(seconds.max()),
            "median_with_all_there": statistics.median(whole) if whole else None,
        },
        "bytes_per_round": {name: total / len(measured) for name, total in last["bytes"].items()},
        "envelope_bytes_per_round": {way: total / len(measured) for way, total in last["transport"].items()},
        "left_out_rounds": {client: dict(found) for client, found in sorted(reasons.items())},
        "p_acc_last": metrics[-1]["p_acc"],
    }


def fitted(points: list[tuple[float, float]], total: float) -> dict[str, float]:
    """Medians of the first and the last quarter, and slopes by least squares, all and second half; of MiB."""
    at, values = (np.asarray(each, dtype=float) for each in zip(*points, strict=True))

    def slope(inside: np.ndarray) -> float:
        return float(3600 * np.polyfit(at[inside], values[inside], 1)[0]) if inside.sum() > 2 else float("nan")

    begin = at[0]
    quarter = (total - begin) / 4
    first, last = values[at < begin + quarter], values[at >= total - quarter]
    return {
        "first_quarter": float(np.median(first)),
        "last_quarter": float(np.median(last)) if len(last) else float("nan"),
        "per_hour": slope(at >= begin),
        "per_hour_second_half": slope(at >= begin + 2 * quarter),
    }


def growth(seen: Seen, total: float, warm: float) -> dict[str, Any]:
    """From the first round on: before it, processes import."""
    memory = {}
    for name, points in seen.memory.items():
        found = [(at, size / MIB) for at, size, _ in points if warm <= at <= total]
        if len(found) > 10:
            files = [count for at, _, count in points if warm <= at <= total]
            tail = len(files) // 4 or 1
            memory[name] = fitted(found, total) | {
                "open_files": [statistics.median(files[:tail]), statistics.median(files[-tail:])],
                "series": [round(size, 1) for _, size in found[:: max(1, len(found) // 30)]],
            }
    sizes = {
        name: {"first": points[0][1], "last": points[-1][1], "per_hour": fitted(points, points[-1][0])["per_hour"]}
        for name, found in seen.sizes.items()
        if len(points := [(at, size) for at, size in found if warm <= at <= total]) > 10
    }
    whole = [one for one in seen.work.values() if one.seen - one.began > 2]
    half = len(whole) // 2
    work = {
        "count": len(seen.work),
        "seconds": statistics.median(one.seen - one.began for one in whole),
        "cpu_seconds": statistics.median(one.cpu for one in whole),
        "peak_mib_first_half": statistics.median(one.peak for one in whole[:half]) / MIB,
        "peak_mib_second_half": statistics.median(one.peak for one in whole[half:]) / MIB,
    }
    return {"memory_mib": memory, "disk_bytes": sizes, "client_apps": work}


def show(told: dict[str, Any]) -> None:
    print(f"\n{told['rounds']} rounds, {told['trips']} trips; while measured {told['rounds_measured']} rounds")
    print("seconds a trip   ", {name: value and round(value, 1) for name, value in told["seconds_per_trip"].items()})
    print("payload a round  ", {name: round(value, 1) for name, value in told["bytes_per_round"].items()})
    print("envelopes a round", {name: round(value, 1) for name, value in told["envelope_bytes_per_round"].items()})
    print("done to nodes    ", told["done"])
    for client, reasons in told["left_out_rounds"].items():
        print(f"client {client} left out:", "; ".join(f"{count} × {why}" for why, count in reasons.items()))
    print(f"\n{'MiB':26}{'1st quarter':>12}{'last quarter':>14}{'an hour':>10}{'2nd half':>10}{'open files':>16}")
    for name, each in sorted(told["memory_mib"].items()):
        numbers = [each[key] for key in ("first_quarter", "last_quarter", "per_hour", "per_hour_second_half")]
        print(
            f"{name:26}{numbers[0]:12.1f}{numbers[1]:14.1f}{numbers[2]:+10.2f}{numbers[3]:+10.2f}{each['open_files']!s:>16}"
        )
    for name, each in told["disk_bytes"].items():
        print(f"{name:26}{each['first']:12,} B{each['last']:14,} B{each['per_hour']:+16,.0f} B an hour")
    print("client apps      ", {name: round(value, 2) for name, value in told["client_apps"].items()})
    print("checks           ", told["checks"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--folder", type=Path, help="keep what the run leaves, and all samples; must not be there yet")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the numbers here")
    options = parser.parse_args()
    scratch = Path(tempfile.mkdtemp())
    fleet = Flotilla(options.folder or scratch / "fed", PLACES)
    (fleet.app / "pfedlms.toml").write_text(CONFIG)
    fleet.environment |= {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}
    try:
        seen, play, total = soak(fleet, options.minutes)
        leftover = len(set(play.left) & set(belonging(fleet.home)))
    finally:
        fleet.close()
    (fleet.folder / "samples.pickle").write_bytes(pickle.dumps(seen))
    metrics = RunDirectory(fleet.folder / "run").read_metrics()
    rounds = len(metrics)
    warm = next(at for at, size in seen.sizes["run directory"] if size) + 30
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=Path(__file__).parent, text=True, stdout=-1)
    told = {
        "commit": commit.stdout.strip(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "minutes": options.minutes,
        **figures(metrics, rounds, rounds - MORE_ROUNDS),
        "done": dict(play.done),
        "processes_left_by_ended_nodes": leftover,
        **growth(seen, total, warm),
        "checks": check(fleet, seen, metrics),
    }
    show(told)
    if options.json:
        options.json.write_text(json.dumps(told, indent=1) + "\n")
    shutil.rmtree(scratch)
    if told["checks"]["wrong"]:
        raise SystemExit("something was lost: see wrong above")


if __name__ == "__main__":
    main()
