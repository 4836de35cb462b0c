"""Run the cells of the studies in docs/results.md and keep one row of JSON for each.

    python benchmarks/study.py GROUP… --data-dir DIR --out DIR [--workers 4] [--seconds 500] [--device cuda]
    python benchmarks/study.py GROUP… --out DIR --collect          # rows → benchmarks/results/GROUP.json
    python benchmarks/study.py GROUP… --list

Groups (cells.py): tables-DATASET, plain-DATASET, paper-DATASET, effects-DATASET, budget-DATASET, longer-DATASET,
once-DATASET, sampled-DATASET, rates-DATASET, sweep-DATASET, gains-DATASET, own-DATASET, equal-DATASET, options-
DATASET, limits, limits-cifar10, regime-limits, variants; and with the --choices of effort.py regimes-DATASET,
servers-DATASET, rivals-DATASET, bytes-DATASET and speakers. Cells that have a row with the same settings in --out or
--done already are skipped, so a study can be spread over several calls (--done benchmarks/results skips what was
collected); no new cell is begun after --seconds. Workers share the device, and each keeps the data it has loaded.
`tables-DATASET` has FedAvg with the server step that `sweep-DATASET` chose: from --server-step, else from the rows of
the sweep (in --out, --done or benchmarks/results).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import re
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import cells
import variants
from cells import Cell
from kept import commit
from papers.pfedlms.runs import config_of

import pfedlms
from pfedlms import Callback, Config, RunInfo, load_dataset, same_run

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
MIB = 1 << 20
Row = dict[str, Any]


class Rows(Callback):
    """Keeps the row of every cell that ends, and says so; its run folder is not needed any more."""

    def __init__(self, planned: Mapping[str, tuple[Cell, Config]], folder: Path, commit: str) -> None:
        self._planned, self._folder, self._commit, self.left = planned, folder, commit, len(planned)

    def on_end(self, run: RunInfo, summary: Mapping[str, Any]) -> None:
        if summary["status"] == "interrupted" or run.directory is None:
            return
        cell, config = self._planned[run.name.rpartition(" seed ")[0]]
        row = row_of(cell, config, summary, pfedlms.load(run.directory).metrics, self._commit)
        write(row, self._folder)
        self.left -= 1
        print(line(row, self.left), flush=True)


def row_of(cell: Cell, config: Config, summary: Mapping[str, Any], metrics: Sequence[Row], commit: str) -> Row:
    """The row of a cell; `curve` has what was measured, evaluation by evaluation."""
    curve: dict[str, list[float]] = {}
    for record in metrics:
        measured = {name: record[name] for name in ("round", "p_acc", "g_acc", "v_acc") if name in record}
        for name, value in {**measured, "bytes": sum(record["bytes"].values())}.items():
            curve.setdefault(name, []).append(value)
    tables, device = config.tables(), summary["environment"]["device"]
    tables["data"]["dir"] = ""
    status = summary["status"]
    return {
        "cell": cell.name, "group": cell.group, "setup": cell.setup, "label": cell.label, "status": status,
        "message": "" if status == "finished" else f"after round {summary['rounds']}", "commit": commit,
        "device": f"CPU, {platform.machine()}" if device == "cpu" else device, "model": cell.model, "config": tables,
        "summary": summary, "curve": curve,
    }  # fmt: skip


def line(row: Row, left: int) -> str:
    """The line that is printed of a cell that is done."""
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


def run_all(todo: Sequence[tuple[Cell, Config]], options: argparse.Namespace, commit: str) -> None:
    """Play the cells as a study for each model, in their order; its folder lies beside the rows."""
    began, done = time.time(), 0
    for model in dict.fromkeys(cell.model for cell, _ in todo):
        planned = {label(cell, config): (cell, config) for cell, config in todo if cell.model == model}
        rows = Rows(planned, options.out, commit)
        left = began + options.seconds - time.time()
        folder = options.out.with_name(f"{options.out.name}-runs") / (model or "named")
        for each in pfedlms.study(
            pfedlms.Problem(model=variants.MODELS.get(model)),
            cells={name: settings(config) for name, (_, config) in planned.items()},
            out=folder, workers=options.workers, seconds=left, callbacks=[rows], progress=False,
        ).runs:  # fmt: skip
            if not each.interrupted and each.directory is not None:
                shutil.rmtree(each.directory)
        done += len(planned) - rows.left
    print(f"{done} of {len(todo)} cells done in {time.time() - began:.0f} s")


def decode(datasets: Sequence[str], directory: str) -> None:
    """Once, so that no two workers decode the same images."""
    for dataset in datasets:
        if dataset != "shakespeare":
            load_dataset(dataset, cells.data_folder(directory, dataset) or None)


def label(cell: Cell, config: Config) -> str:
    """The name of a cell's run: cells whose settings were changed are other runs."""
    digest = hashlib.sha256(config.to_toml().encode()).hexdigest()
    return f"{cell.group}_{cell.name}_{digest[:8]}"


def settings(config: Config) -> dict[str, Any]:
    """A whole configuration as `pfedlms.study` takes it, with a checkpoint at the end alone."""
    tables = config.tables()
    return {**tables, "run": {**tables["run"], "checkpoint_every": 10**6}}


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
    """One committed file of all rows of a group, one row a line; hundreds of clients' names are left out."""
    rows = {row["cell"]: row for folder in reversed(folders) for row in rows_in(folder, group)}
    for row in rows.values():
        row["summary"].pop("client_names", None)
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


def parser_of(description: str | None, threads: int) -> argparse.ArgumentParser:
    """Options of all that runs cells."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", default="", help="folder of the data, or with a folder for each data set in it")
    parser.add_argument("--out", type=Path, default=Path("runs/study"), help="folder of the rows")
    parser.add_argument("--done", type=Path, action="append", default=[], help="another folder with rows to skip")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument(
        "--threads", type=int, default=threads, help="CPU threads a worker; 0 in study.py: cores over workers"
    )
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no cell after that")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--commit", default="", help="where there is no .git to ask")
    parser.add_argument("--rounds", type=int, help=argparse.SUPPRESS)  # for trials of these scripts
    return parser


def parse() -> argparse.Namespace:
    parser = parser_of(__doc__, threads=0)
    parser.add_argument("groups", nargs="+", metavar="GROUP")
    parser.add_argument("--choices", type=Path, help="effort.json, for groups whose settings it chose")
    parser.add_argument("--server-step", action="append", default=[], metavar="DATASET=VALUE")
    parser.add_argument("--steps", default=",".join(f"{step:g}" for step in cells.STEPS), help="of a sweep")
    parser.add_argument("--only", default="", metavar="REGEX", help="cells whose GROUP/CELL has a match in it")
    parser.add_argument("--again", action="store_true", help="repeat cells that failed")
    parser.add_argument("--collect", action="store_true")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--on", default="mnist", help=argparse.SUPPRESS)  # for trials on a small data set
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
    decode(sorted({own.data.dataset for own in missing.values()}), options.data_dir)
    pairs = sorted(missing.items(), key=lambda pair: (pair[0].priority, -cells.size(pair[1])))
    run_all(pairs, options, current_commit(options))


if __name__ == "__main__":
    main()
