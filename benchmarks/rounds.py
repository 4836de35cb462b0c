"""A round of several methods against each other, measured in turn in one process, and where each one's time goes.

    python benchmarks/rounds.py [--methods pfedlms,sketchvote,fedavg,local] [--model dnn] [--data-dir DIR] [--json FILE]

Printed are medians with their ratio to the first method, paired measurement by measurement. With `--data-dir` also
whole runs on MNIST, 200 rounds with an evaluation every 10, four times each in turn; the first of each warms up.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from kept import keep

import pfedlms
from engine import federation


def synchronise(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def rounds(options: argparse.Namespace) -> dict[str, Any]:
    made = {name: federation(options, name, 0, watch=False) for name in options.methods}
    for each in made.values():
        each.start()
        for _ in range(5):
            each.play_round()
    measured: dict[str, list[float]] = {name: [] for name in made}
    for _ in range(options.repeats):
        for name, each in made.items():
            synchronise(options.device)
            began = time.perf_counter()
            for _ in range(options.rounds):
                each.play_round()
            synchronise(options.device)
            measured[name].append((time.perf_counter() - began) / options.rounds)
    first, rows = measured[options.methods[0]], {}
    print(f"{options.model} on {options.device}, {options.clients} clients, {options.steps} steps a round")
    for name, own in measured.items():
        low, ratio, high = statistics.quantiles([a / b for a, b in zip(own, first, strict=True)], n=4)
        rows[name] = {"seconds": statistics.median(own), "ratio": ratio, "low": low, "high": high}
        print(f"{name:12s} {rows[name]['seconds'] * 1e3:9.3f} ms   {ratio:.3f} ({low:.3f} to {high:.3f})")
    for name in options.methods:
        # With a watch every stage waits for the device, so the stages of a round take longer than the round.
        watched = federation(options, name, 0, watch=True)
        watched.start()
        for _ in range(3):
            watched.play_round()
        watched.watch.seconds.clear()
        for _ in range(options.rounds):
            watched.play_round()
        stages = {stage: seconds / options.rounds for stage, seconds in watched.watch.seconds.items()}
        rows[name]["stages"] = stages
        print(f"{name:12s} " + ", ".join(f"{stage} {seconds * 1e3:.2f}" for stage, seconds in stages.items()))
    return rows


def whole_runs(options: argparse.Namespace) -> dict[str, list[float]]:
    measured: dict[str, list[float]] = {name: [] for name in options.methods}
    data = pfedlms.load_dataset("mnist", options.data_dir)
    chosen = {"rounds": 200, "evaluate_every": 10, "device": options.device, "local_steps": 20, "batch_size": 64}
    for _ in range(4):
        for name in options.methods:
            measured[name].append(pfedlms.run(data, "dnn", method=name, **chosen).summary["seconds"])
    for name, own in measured.items():
        print(f"{name:12s} 200 rounds: " + ", ".join(f"{seconds:.2f} s" for seconds in own))
    return measured


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", default="pfedlms,sketchvote,fedavg,local")
    parser.add_argument("--model", default="dnn")
    parser.add_argument("--classes", type=int, default=10)
    parser.add_argument("--clients", type=int, default=20)
    parser.add_argument("--samples", type=int, default=400)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=10, help="rounds of one measurement")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--data-dir")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    options.methods, options.fast = options.methods.split(","), False
    warnings.simplefilter("ignore")
    torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic = False, True
    told = {name: str(value) for name, value in vars(options).items() if name not in ("json", "data_dir")}
    result: dict[str, Any] = {"options": told, "rounds": rounds(options)}
    if options.data_dir:
        result["mnist, 200 rounds, seconds"] = whole_runs(options)
    if options.json:
        keep(result, options.json)


if __name__ == "__main__":
    main()
