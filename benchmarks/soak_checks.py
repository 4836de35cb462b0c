"""Was anything lost in a soak, and what did it take: checks and figures of what was sampled."""

from __future__ import annotations

import os
import platform
import re
import shutil
import statistics
import time
import warnings
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from soak_samples import Seen

from pfedlms.deploy import Node, serve
from pfedlms.deploy.envelope import Kind, decode
from pfedlms.experiment.store import RunDirectory
from pfedlms.flower.config import run_settings

MIB = 2**20


class Again:
    """The same trips to nodes in this process: who had carried a request out does, whose reply came replies."""

    def __init__(self, config: Any, folder: Path, seen: Seen, metrics: list[dict[str, Any]]) -> None:
        self.nodes = {client: Node(config, client, folder) for client in range(config.data.clients)}
        self._seen, self._metrics = seen, metrics
        self.trips = 0

    def send(self, requests: dict[int, bytes], timeout: float) -> dict[int, bytes]:
        replies = {}
        for client, request in requests.items():
            asked = decode(request)
            if asked.kind == Kind.LOOK:  # after the end, at models of absent clients; it changes nothing
                continue
            trip, self.trips = asked.trip, asked.trip + 1
            reply = self.nodes[client].handle(request) if client in self._seen.carried_out[trip] else b""
            if client in self._seen.replied[trip]:
                replies[client] = reply
            elif gone := re.fullmatch("no reply: (.*)", self._why(trip, client)):
                replies[client] = gone[1]
        return replies

    def _why(self, trip: int, client: int) -> str:
        """Why a client was left out: the line of a round has the reports of the trip that ended it, or earlier ones."""
        return str(self._metrics[max(0, trip - 1)]["left_out"].get(str(client), ""))


def check(folder: Path, seen: Seen, metrics: list[dict[str, Any]]) -> dict[str, Any]:
    """What was found, by name; and the seconds that the same trips take in one process."""
    wrong: list[str] = []
    rounds = len(metrics)
    if [each["round"] for each in metrics] != list(range(1, rounds + 1)):
        wrong.append("rounds: not every one is in the metrics once")
    config, _ = run_settings(
        folder / "app" / "pfedlms.toml", {"train.rounds": rounds, "run.out": str(folder / "again")}
    )
    everyone = tuple(range(config.data.clients))
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
    for left in (folder / "again", folder / "again-state"):
        shutil.rmtree(left, ignore_errors=True)
    again = Again(config, folder / "again-state", seen, metrics)
    began = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        serve(config, again)
    seconds = time.perf_counter() - began
    for here, there in zip(RunDirectory(folder / "again").read_metrics(), metrics, strict=True):
        unlike = [key for key in here if key != "seconds" and here[key] != there[key]]
        if unlike:
            wrong.append(f"round {here['round']}: in one process other {', '.join(unlike)}")
    for client, node in again.nodes.items():
        node.close()
        with Node(config, client, folder / "state") as other:
            mine, its = node.state, other.state
        names = ("phase", "sent", "answers_known", "trip", "request", "reply")
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


def figures(folder: Path, seen: Seen, more: int) -> dict[str, Any]:
    """Of the run in a folder, whose last rounds are those after what was measured."""
    metrics = RunDirectory(folder / "run").read_metrics()
    return {
        "commit": seen.commit,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "minutes": seen.minutes,
        "rounds": len(metrics),
        "trips": len(metrics) + 1,
        "done": dict(seen.done),
        "processes_left_by_ended_nodes": seen.left,
        **costs(metrics[:-more]),
        **growth(seen),
        "checks": check(folder, seen, metrics),
    }


def costs(measured: list[dict[str, Any]]) -> dict[str, Any]:
    """A round is a trip. Bytes and seconds in metrics are sums since the start; the first trip is left out."""
    seconds = np.diff([each["seconds"] for each in measured])
    reasons: dict[str, Counter[str]] = defaultdict(Counter)
    for each in measured:
        for client, why in each["left_out"].items():
            reasons[client][why] += 1
    last = measured[-1]
    return {
        "rounds_measured": len(measured),
        "seconds_per_trip": {
            "mean": float(seconds.mean()),
            "median": float(np.median(seconds)),
            "shortest": float(seconds.min()),
            "longest": float(seconds.max()),
        },
        "bytes_per_round": {name: total / len(measured) for name, total in last["bytes"].items()},
        "envelope_bytes_per_round": {way: total / len(measured) for way, total in last["transport"].items()},
        "left_out_rounds": {client: dict(found) for client, found in sorted(reasons.items())},
    }


def growth(seen: Seen) -> dict[str, Any]:
    """From half a minute after the first phase: before, processes import. Of nodes that are started again and again,
    the memory of the one that is there."""
    warm, total = next(at for at, size in seen.sizes["state of node 0"] if size) + 30, 60 * seen.minutes
    memory = {}
    for name, points in seen.memory.items():
        inside = [(at, size / MIB, files) for at, size, files in points if warm <= at <= total]
        quarter = (total - warm) / 4
        early, late = ([each for each in inside if low <= each[0] <= low + quarter] for low in (warm, total - quarter))
        if early and late:
            memory[name] = {
                "first_quarter": statistics.median(size for _, size, _ in early),
                "last_quarter": statistics.median(size for _, size, _ in late),
                "per_hour": slope([each[:2] for each in inside]),
                "per_hour_second_half": slope([each[:2] for each in inside if each[0] >= (warm + total) / 2]),
                "open_files": [int(max(files for *_, files in each)) for each in (early, late)],
                "series": [round(size, 1) for _, size, _ in inside[:: max(1, len(inside) // 30)]],
            }
    sizes = {}
    for name, found in seen.sizes.items():
        inside = [(at, size) for at, size in found if warm <= at <= total]
        sizes[name] = {"first": inside[0][1], "last": inside[-1][1], "per_hour": slope(inside)}
    third = len(seen.messages) // 3
    kept = [statistics.median(count for _, count in each) for each in (seen.messages[:third], seen.messages[-third:])]
    whole = [one for one in seen.work.values() if one.seen - one.began > 2]
    half = len(whole) // 2
    work = {
        "count": len(seen.work),
        "seconds": statistics.median(one.seen - one.began for one in whole),
        "cpu_seconds": statistics.median(one.cpu for one in whole),
        "peak_mib_first_half": statistics.median(one.peak for one in whole[:half]) / MIB,
        "peak_mib_second_half": statistics.median(one.peak for one in whole[half:]) / MIB,
    }
    return {"memory_mib": memory, "disk_bytes": sizes, "messages_kept_thirds": kept, "client_apps": work}


def slope(points: list[tuple[float, float]]) -> float:
    """An hour, by least squares."""
    at, values = zip(*points, strict=True)
    return float(3600 * np.polyfit(at, values, 1)[0])


def show(results: dict[str, Any]) -> None:
    print(f"\n{results['rounds']} rounds, {results['trips']} trips; while measured {results['rounds_measured']} rounds")
    print("seconds a trip   ", {name: value and round(value, 1) for name, value in results["seconds_per_trip"].items()})
    print("payload a round  ", {name: round(value, 1) for name, value in results["bytes_per_round"].items()})
    print("envelopes a round", {name: round(value, 1) for name, value in results["envelope_bytes_per_round"].items()})
    print("done to nodes    ", results["done"])
    for client, reasons in results["left_out_rounds"].items():
        print(f"client {client} left out:", "; ".join(f"{count} × {why}" for why, count in reasons.items()))
    print(f"\n{'MiB':26}{'1st quarter':>12}{'last quarter':>14}{'an hour':>10}{'2nd half':>10}{'open files':>16}")
    for name, each in sorted(results["memory_mib"].items()):
        numbers = [each[key] for key in ("first_quarter", "last_quarter", "per_hour", "per_hour_second_half")]
        files = " → ".join(map(str, each["open_files"]))
        print(f"{name:26}{numbers[0]:12.1f}{numbers[1]:14.1f}{numbers[2]:+10.2f}{numbers[3]:+10.2f}{files:>16}")
    for name, each in results["disk_bytes"].items():
        print(f"{name:26}{each['first']:12,} B{each['last']:14,} B{each['per_hour']:+16,.0f} B an hour")
    print("messages kept by the SuperLink, median of the first third and the last:", results["messages_kept_thirds"])
    print("client apps      ", {name: round(value, 2) for name, value in results["client_apps"].items()})
    print("checks           ", results["checks"])
