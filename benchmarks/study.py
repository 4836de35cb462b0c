"""Run the cells of the studies in docs/results.md and keep one row of JSON for each.

    python benchmarks/study.py GROUP… --data-dir DIR --out DIR [--workers 4] [--seconds 500] [--device cuda]
    python benchmarks/study.py GROUP… --out DIR --collect          # rows → benchmarks/results/GROUP.json
    python benchmarks/study.py GROUP… --list

Groups (cells.py): tables-DATASET, plain-DATASET, paper-DATASET, effects-DATASET, budget-DATASET, longer-DATASET,
once-DATASET, sampled-DATASET, rates-DATASET, sweep-DATASET, gains-DATASET, own-DATASET, equal-DATASET, options-
DATASET, limits, limits-cifar10, regime-limits, variants, and regimes-DATASET with the --choices of effort.py. Cells
that have a row with the same settings in --out or --done already are skipped, so a study can be spread over several
calls (--done benchmarks/results skips what was collected); no new cell is begun after --seconds. Workers share the
device, and each keeps the data it has loaded. `tables-DATASET` has FedAvg with the server step that `sweep-DATASET`
chose: from --server-step, else from the rows of the sweep (in --out, --done or benchmarks/results).
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import queue
import re
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import cells
import torch
import variants
from cells import Cell
from kept import commit
from papers.pfedlms.runs import config_of

from pfedlms import Callback, Config, Problem, load_dataset, same_run
from pfedlms.data import FederatedData
from pfedlms.errors import DivergedError, PfedlmsError, RunError
from pfedlms.experiment import prepare as preparation
from pfedlms.experiment.runs import begin

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
MIB = 1 << 20
Row = dict[str, Any]


class Curve(Callback):
    """What is measured, evaluation by evaluation, also of a run that does not end well."""

    def __init__(self) -> None:
        self.columns: dict[str, list[float]] = {}

    def on_evaluation(self, run: Any, record: Mapping[str, Any]) -> None:
        measured = {name: record[name] for name in ("round", "p_acc", "g_acc", "v_acc") if name in record}
        for name, value in {**measured, "bytes": sum(record["bytes"].values())}.items():
            self.columns.setdefault(name, []).append(value)


def keep_data() -> None:
    """From now on this process reads a data set once, keeps it on the device, and draws every partition once.

    By its name in the configuration, so that everything else is as in any run.
    """
    draw = preparation.federated

    @cache
    def pool(dataset: str, directory: str) -> tuple[Any, Any]:
        return load_dataset(dataset, directory or None)

    @cache
    def on_device(dataset: str, directory: str, device: str) -> tuple[torch.Tensor, torch.Tensor]:
        x, y = (torch.from_numpy(each).to(device) for each in pool(dataset, directory))
        return x, y

    drawn: dict[Any, FederatedData] = {}

    def federated(config: Config, problem: Problem) -> FederatedData:
        chosen, device = config.data, preparation._device(config.run.device)
        key = chosen, config.run.seed, device
        if key not in drawn:
            held = draw(config, Problem(pool(chosen.dataset, chosen.dir)))
            x, y = on_device(chosen.dataset, chosen.dir, device.type)
            drawn[key] = replace(held, x=x, y=y)
        return drawn[key]

    preparation.federated = federated


def device_name(name: str) -> str:
    found = preparation._device(name)
    return torch.cuda.get_device_name() if found.type == "cuda" else f"CPU, {platform.machine()}"


def run_cell(cell: Cell, config: Config, commit: str) -> tuple[Row, bool]:
    """The row of a cell, and whether this process can go on after it."""
    curve, message, sound = Curve(), "", True
    try:
        result = begin(config, Problem(model=variants.MODELS.get(cell.model)), [curve])
        summary, status = result.summary, result.summary["status"]
    except RunError as error:
        summary, message = error.summary, str(error)
        status = "diverged" if isinstance(error, DivergedError) else "failed"
    except PfedlmsError as error:
        summary, status, message = None, "failed", str(error)
    except Exception as error:  # whatever it is, the other cells are worth having
        traceback.print_exc()
        summary, status, message = None, "failed", f"{type(error).__name__}: {error}"
        sound = False
    tables = config.tables()
    tables["data"]["dir"] = ""
    row: Row = {"cell": cell.name, "group": cell.group, "setup": cell.setup, "label": cell.label, "status": status}
    row |= {"message": message, "commit": commit, "device": device_name(config.run.device), "model": cell.model}
    return {**row, "config": tables, "summary": summary, "curve": curve.columns}, sound


def line(row: Row, left: int) -> str:
    """What is said of a cell that is done."""
    if row["status"] != "finished":
        return f"{row['cell']:52s} {row['status']}: {row['message']}   ({left} left)"
    summary = row["summary"]
    shared = f"{summary['global_accuracy']['last10']:6.2f}" if "global_accuracy" in summary else "     –"
    sent = sum(summary["bytes_per_round"].values()) / MIB
    accuracy = f"P {summary['accuracy']['last10']:6.2f}  G {shared}"
    return f"{row['cell']:52s} {accuracy}  {sent:9.4f} MiB/round  {summary['seconds']:6.1f} s   ({left} left)"


def write(row: Row, folder: Path) -> None:
    """All of it or nothing."""
    file = folder / row["group"] / f"{row['cell']}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_suffix(f".{os.getpid()}.part")
    partial.write_text(json.dumps(row, allow_nan=False))
    partial.replace(file)


def work(todo: Any, done: Any, folder: Path, commit: str, deadline: float) -> None:
    """Cells of the queue, one after another, until it is empty, the time is up, or nobody waits for them any more."""
    keep_data()
    parent = multiprocessing.parent_process()
    while time.time() < deadline and (parent is None or parent.is_alive()):
        try:
            cell, config = todo.get(timeout=1)
        except queue.Empty:
            return
        row, sound = run_cell(cell, config, commit)
        if row["status"] == "interrupted":
            return
        write(row, folder)
        done.put(row)
        if not sound:  # a device whose memory was written over answers nothing any more
            done.close()
            done.join_thread()
            os._exit(1)


def run_all(todo: Sequence[tuple[Cell, Config]], options: argparse.Namespace, commit: str) -> None:
    """Share the cells out to workers, and say what comes back."""
    began, context = time.time(), multiprocessing.get_context("spawn")
    waiting, done = context.Queue(), context.Queue()
    for pair in todo:
        waiting.put(pair)
    deadline = began + options.seconds
    arguments = (waiting, done, options.out, commit, deadline)
    start = lambda: context.Process(target=work, args=arguments, daemon=True)  # noqa: E731 - used twice
    workers = [start() for _ in range(min(options.workers, len(todo)))]
    for worker in workers:
        worker.start()
    left, spare = len(todo), 2 * len(workers)
    while left and (any(worker.is_alive() for worker in workers) or not done.empty()):
        try:
            row = done.get(timeout=0.5)
        except queue.Empty:
            for index, worker in enumerate(workers):
                if not worker.is_alive() and worker.exitcode and spare and time.time() < deadline:
                    print(f"a worker ended with {worker.exitcode}; another takes its place", flush=True)
                    workers[index], spare = start(), spare - 1
                    workers[index].start()
            continue
        left -= 1
        print(line(row, left), flush=True)
    waiting.cancel_join_thread()
    print(f"{len(todo) - left} of {len(todo)} cells done in {time.time() - began:.0f} s")


def rows_in(folder: Path, group: str) -> list[Row]:
    """The rows of a group: files of a folder of this script's, or those that were collected."""
    if folder.resolve() == RESULTS.resolve():
        file = folder / f"{group}.json"
        return json.loads(file.read_text()) if file.is_file() else []
    return [json.loads(file.read_text()) for file in sorted((folder / group).glob("*.json"))]


def is_measured(config: Config, row: Row | None, again: bool) -> bool:
    """Whether a row is of the settings that its cell has now; failed ones do not count `again`."""
    if row is None or (again and row["status"] == "failed"):
        return False
    stored = config_of(row)
    return bool(row["model"]) or (stored is not None and same_run(config, stored))


def server_steps(options: argparse.Namespace) -> dict[str, float]:
    """The server step chosen for every data set whose tables are asked for, as far as it is known."""
    given = dict(text.split("=") for text in options.server_step)
    steps = {dataset: float(value) for dataset, value in given.items()}
    for name in options.groups:
        kind, _, dataset = name.partition("-")
        if kind == "tables" and dataset not in steps:
            folders = (options.out, *options.done, RESULTS)
            chosen = cells.choice([row for folder in folders for row in rows_in(folder, f"sweep-{dataset}")])
            if chosen is None:
                print(f"{name}: no server step was chosen; FedAvg with one is left out (--server-step {dataset}=VALUE)")
            else:
                steps[dataset] = chosen
    return steps


def collect(group: str, folders: Sequence[Path]) -> None:
    """One committed file of all rows of a group, one row a line."""
    rows = {row["cell"]: row for folder in reversed(folders) for row in rows_in(folder, group)}
    lines = [json.dumps({**rounded(rows[name]), "config": rows[name]["config"]}) for name in sorted(rows)]
    file = RESULTS / f"{group}.json"
    file.write_text("[\n" + ",\n".join(lines) + "\n]\n")
    print(f"{file.relative_to(ROOT)}: {len(rows)} rows, {file.stat().st_size // 1024} KiB")


def rounded(value: Any) -> Any:
    """With four decimals, which is more than a run of another seed would repeat."""
    if isinstance(value, float):
        return round(value, 4)
    if isinstance(value, dict):
        return {key: rounded(own) for key, own in value.items()}
    return [rounded(own) for own in value] if isinstance(value, list) else value


def current_commit(options: argparse.Namespace) -> str:
    known = str(options.commit) or commit()
    if not known:
        raise SystemExit("commit: there is no .git here; give --commit")
    return known


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("groups", nargs="+", metavar="GROUP")
    parser.add_argument("--data-dir", default="", help="folder of the data, or with a folder for each data set in it")
    parser.add_argument("--out", type=Path, default=Path("runs/study"), help="folder of the rows")
    parser.add_argument("--choices", type=Path, help="effort.json, for the groups regimes-DATASET")
    parser.add_argument("--done", type=Path, action="append", default=[], help="another folder with rows to skip")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--threads", type=int, default=0, help="CPU threads a worker; 0: cores over workers")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no cell after that")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--commit", default="", help="where there is no .git to ask")
    parser.add_argument("--server-step", action="append", default=[], metavar="DATASET=VALUE")
    parser.add_argument("--steps", default=",".join(f"{step:g}" for step in cells.STEPS), help="of a sweep")
    parser.add_argument("--only", default="", metavar="REGEX", help="cells whose GROUP/CELL has a match in it")
    parser.add_argument("--again", action="store_true", help="repeat cells that failed")
    parser.add_argument("--collect", action="store_true")
    parser.add_argument("--list", action="store_true")
    # For trials of this script: a few rounds, on a small data set.
    parser.add_argument("--rounds", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--on", default="mnist", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    options = parse()
    folders = (options.out, *options.done)
    if options.collect:
        for name in options.groups:
            collect(name, folders)
        return
    steps, swept = server_steps(options), [float(step) for step in options.steps.split(",")]
    contests = json.loads(options.choices.read_text())["contests"] if options.choices else ()
    wanted = [cell for name in options.groups for cell in cells.group(name, steps, swept, options.on, contests)]
    threads = options.threads or max(1, (os.cpu_count() or 1) // options.workers)
    configs = {
        cell: cell.config(cells.data_folder(options.data_dir, cell.dataset), device=options.device, threads=threads)
        for cell in wanted
        if re.search(options.only, f"{cell.group}/{cell.name}")
    }
    rows = [row for folder in folders for name in options.groups for row in rows_in(folder, name)]
    there = {(row["group"], row["cell"]): row for row in reversed(rows)}  # the first folder's counts
    missing = {
        cell: config
        for cell, config in configs.items()
        if not is_measured(config, there.get((cell.group, cell.name)), options.again)
    }
    if options.list:
        for cell in missing:
            print(f"{cell.group:16s} {cell.name}")
    print(f"{len(wanted)} cells, {len(missing)} of them to be run", flush=True)
    if options.list or not missing:
        return
    if options.rounds:
        missing = {cell: replace(own, train=replace(own.train, rounds=options.rounds)) for cell, own in missing.items()}
    for dataset in {own.data.dataset for own in missing.values()}:
        # Once, so that no two workers decode the same images.
        load_dataset(dataset, cells.data_folder(options.data_dir, dataset) or None)
    pairs = sorted(missing.items(), key=lambda pair: (pair[0].priority, -cells.size(pair[1])))
    run_all(pairs, options, current_commit(options))


if __name__ == "__main__":
    main()
