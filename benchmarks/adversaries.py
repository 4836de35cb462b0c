"""What the honest clients reach when some of 20 lie (benchmarks/lies.py).

    python benchmarks/adversaries.py --dataset digits [--json FILE]
    python benchmarks/adversaries.py --dataset mnist --data-dir DIR --device cuda --seeds 1

Liars are drawn from a stream of the seed; those of a smaller share are among those of a larger one. Accuracies are of
the honest clients, means of the last 10 evaluations; *clean* is what the same clients reach when nobody lies.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

import lies
from kept import keep_rows

from pfedlms import load_config, rng
from pfedlms.engine.reports import Evaluation
from pfedlms.errors import RunError
from pfedlms.experiment.config import Config
from pfedlms.experiment.prepare import cache_data_sets, execution_settings, prepare
from pfedlms.methods import Method
from pfedlms.report.runs import Spread
from pfedlms.report.tables import Column, Table, accuracy_text

Tell = Callable[[Method, tuple[int, ...]], None]
FIELDS = {
    "sketchvote": ("scale",),
    "pfedlms": ("variance", "mean"),
    "pfedlms:pooling=median": ("variance", "mean"),
    "fedavg": ("model",),
    "stc": ("magnitude",),
    "stc:gain=3": ("magnitude",),
    "sketchmean": (),
}
FLIPPING = (0.1, 0.2, 0.3)


@dataclass
class Measured:
    """Evaluations of a run, P-acc's and G-acc's, and how it ended."""

    personal: list[Evaluation] = field(default_factory=list)
    shared: list[Evaluation] = field(default_factory=list)
    ended: str = ""

    def of(self, ids: set[int], evaluations: list[Evaluation]) -> float | None:
        """Accuracy over some clients, the mean of the last 10 evaluations."""
        if not evaluations or self.ended:
            return None
        return mean(accuracy_of(each, ids) for each in evaluations[-10:])


def accuracy_of(evaluation: Evaluation, ids: set[int]) -> float:
    rows = [row for row, client in enumerate(evaluation.ids) if client in ids]
    return 100 * sum(evaluation.correct[row] for row in rows) / sum(evaluation.tested[row] for row in rows)


def liars_of(seed: int, clients: int, count: int) -> tuple[int, ...]:
    return tuple(sorted(rng.permutation(rng.stream(seed, "liars"), clients)[:count].tolist()))


def play(config: Config, liars: tuple[int, ...], tell: Tell | None) -> Measured:
    """A whole run in which `liars` lie."""
    federation, measured = prepare(config), Measured()
    if tell is not None:
        tell(federation.method, liars)
    try:
        with execution_settings(config):
            federation.start()
            for number in range(1, config.train.rounds + 1):
                due = number % config.run.evaluate_every == 0 or number == config.train.rounds
                report = federation.play_round(evaluate_global=due)
                if due:
                    measured.personal.append(federation.evaluate())
                if report.global_evaluation is not None:
                    measured.shared.append(report.global_evaluation)
    except RunError as error:
        measured.ended = f"{type(error).__name__}: {error}"
    return measured


def scenarios(method: str, clients: int) -> dict[str, tuple[int, Tell]]:
    """How many lie, and how."""
    found: dict[str, tuple[int, Tell]] = {
        f"1 with {field} {lies.ENORMOUS:g}": (1, partial(lies.enormous, field=field)) for field in FIELDS[method]
    }
    return found | {f"{share:.0%} flip": (round(share * clients), lies.flipped) for share in FLIPPING}


def rows_of(options: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    for method in options.methods.split(",") if options.methods else FIELDS:
        for seed in range(options.seeds):
            run: dict[str, Any] = {"seed": seed, "device": options.device}
            train = {"rounds": options.rounds} if options.rounds else {}
            data = {"dataset": options.dataset, "dir": options.data_dir}
            name, _, chosen = method.partition(":")
            key, _, value = chosen.partition("=")
            own = {key: float(value) if value.isdigit() else value} if chosen else {}
            config = load_config(None, {"data": data, "method": {"name": name, **own}, "train": train, "run": run})
            everyone = set(range(config.data.clients))
            clean = play(config, (), None)
            for scenario, (count, tell) in {"nobody lies": (0, None), **scenarios(method, len(everyone))}.items():
                liars = liars_of(seed, len(everyone), count)
                honest = everyone - set(liars)
                measured = play(config, liars, tell) if liars else clean
                row = {"method": method, "scenario": scenario, "seed": seed, "liars": liars, "ended": measured.ended}
                row |= {"p_acc": measured.of(honest, measured.personal), "g_acc": measured.of(honest, measured.shared)}
                row |= {"clean_p_acc": clean.of(honest, clean.personal), "clean_g_acc": clean.of(honest, clean.shared)}
                rows.append(row)
    return rows


def show(rows: list[dict[str, Any]]) -> None:
    heads = {"p_acc": "P-acc", "clean_p_acc": "clean P-acc", "g_acc": "G-acc", "clean_g_acc": "clean G-acc"}
    records = []
    for method, scenario in dict.fromkeys((row["method"], row["scenario"]) for row in rows):
        own = [row for row in rows if (row["method"], row["scenario"]) == (method, scenario)]
        spreads = {key: Spread.of(row[key] for row in own) for key in heads}
        lost = f"{sum(bool(row['ended']) for row in own)} of {len(own)}"
        records.append({"method": f"`{method}`", "liars": scenario, **spreads, "diverged": lost})
    columns = [Column(key, key) for key in ("method", "liars")]
    columns += [Column(key, head, accuracy_text) for key, head in heads.items()]
    print(Table([*columns, Column("diverged", "diverged")], records).markdown())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", default="digits")
    parser.add_argument("--data-dir", default="")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=0, help="0: as shipped")
    parser.add_argument("--methods", default="", help="separated by commas; default: all")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    warnings.simplefilter("ignore")  # refused messages are what this is about
    with cache_data_sets():
        rows = rows_of(options)
    show(rows)
    if options.json:
        keep_rows(rows, options.json)


if __name__ == "__main__":
    main()
