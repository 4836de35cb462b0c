"""Equal effort: learning rate and own setting of every method by validation accuracy, six trials each.

    python benchmarks/effort.py DATASET… --regimes 10-of-100 20-of-20 [--methods ditto fedrep] --data-dir DIR \\
        --out DIR [--workers 12] [--seconds 500] [--device cuda]

One seed that is in no table, α = 0.5, a fifth of the training samples set aside, half the rounds. For every method:

1. three values of its own setting (regimes.OWN) at the shipped learning rate;
2. the best of them at half and at twice that rate;
3. one more: where the best value of its own setting lies at an end of those tried the next beyond it, else where the
   best rate does the next beyond that, else the value between the best and the next best.

`local` and `fedper` have no setting of their own that is tried: all of their six trials are rates, found in the same
three steps.

The rule, written down before the trials: **of the trials whose G-acc is at most 3 points below the best G-acc of the
same method, data set and regime, the one with the highest V-acc; both as means of the last 10 evaluations.** So nobody
buys personal accuracy with a shared model that falls apart, whichever method it is. (Of equals the smaller values.)

Rows are kept as study.py's are, in the group effort-DATASET, so that a call can be repeated; the table of trials and
what was chosen is written to OUT/effort.json, which `study.py regimes-DATASET --choices FILE` reads.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import regimes
import study
from cells import SWEEP_SEED, Cell, data_folder

from pfedlms import load_config

MARGIN = 3.0
PERSONAL = ("local", "fedper", "fedrep", "pfedlms")
"""Methods without a shared model, so without G-acc."""


@dataclass(frozen=True)
class Contest:
    """One method that is to be given settings for a data set and a regime."""

    dataset: str
    regime: str
    method: str

    @property
    def shipped_rate(self) -> float:
        return load_config(None, {"data": {"dataset": self.dataset}}).train.learning_rate

    def settings(self, value: float, rate: float) -> dict[str, Any]:
        """What is to be chosen, by section.key: the value of the own setting, and the rate in units of the shipped."""
        key, _ = regimes.OWN[self.method]
        if key == "train.learning_rate":
            return {key: tidy(value * self.shipped_rate)}
        own = round(value) if key in regimes.WHOLE else value
        if self.method == "pfedlms":
            own = tidy(own * regimes.pull_scale(self.dataset, self.regime))
        return {key: own, "train.learning_rate": tidy(rate * self.shipped_rate)}

    def cell(self, value: float, rate: float, rounds: int | None) -> Cell:
        base = load_config(None, {"data": {"dataset": self.dataset}}).train.rounds
        every = max(1, (rounds or base // 2) // 20)
        settings = {
            **regimes.shared(self.dataset, self.regime), **regimes.plain(self.dataset, self.regime, self.method),
            **self.settings(value, rate), "data.validation": 0.2, "train.rounds": rounds or base // 2,
            "run.evaluate_every": every,
        }  # fmt: skip
        label = f"{self.method}-{value:g}-rate{rate:g}"
        return Cell(f"effort-{self.dataset}", self.dataset, self.regime, label, SWEEP_SEED, settings)


Tried = dict[tuple[float, float], tuple[float, float | None]]
"""V-acc and G-acc by value and rate."""


def best(tried: Tried) -> tuple[float, float]:
    """The rule."""
    highest = max((shared for _, shared in tried.values() if shared is not None), default=None)
    sound = [
        pair for pair, (_, shared) in tried.items() if highest is None or (shared or 0.0) >= highest - MARGIN
    ]  # fmt: skip
    return max(sorted(sound), key=lambda pair: tried[pair][0])


def between_or_beyond(values: Sequence[float], top: float, second: float) -> tuple[float, bool]:
    """The next value to try, and whether it lies beyond those tried."""
    ordered = sorted(set(values))  # a value that was tried at several rates counts once
    if top == ordered[0]:
        return tidy(top * top / ordered[1]), True
    if top == ordered[-1]:
        return tidy(top * top / ordered[-2]), True
    return tidy((top * second) ** 0.5), False


def stage(contest: Contest, tried: Tried, number: int) -> Iterator[tuple[float, float]]:
    """The trials of a step: values and rates."""
    if number == 0:
        yield from ((value, 1.0) for value in regimes.OWN[contest.method][1])
        return
    if not tried:
        return
    value, rate = best(tried)
    ranked = sorted(tried, key=lambda pair: -tried[pair][0])
    if regimes.OWN[contest.method][0] == "train.learning_rate":
        others = [own for own, _ in ranked if own != value]
        steps = [between_or_beyond([own for own, _ in tried], value, other) for other in others]
        following, beyond = next(step for step in steps if (step[0], 1.0) not in tried)
        yield following, 1.0
        if number == 1:
            yield (tidy(following * following / value), 1.0) if beyond else (tidy((value * others[1]) ** 0.5), 1.0)
    elif number == 1:
        yield from ((value, 0.5), (value, 2.0))
    else:
        others = [pair for pair in ranked if pair != (value, rate)]
        following, beyond = between_or_beyond([own for own, _ in tried], value, others[0][0])
        rates = [own for _, own in tried]
        if beyond:
            yield following, rate
        elif rate in (min(rates), max(rates)):
            yield value, 2 * rate if rate > 1 else rate / 2
        else:
            second = next((own for own, _ in others if own != value), value)
            yield tidy((value * second) ** 0.5), rate


def tidy(value: float) -> float:
    """Without what products of decimal fractions leave behind."""
    return float(f"{value:.3g}")


def found(contest: Contest, folders: Sequence[Path]) -> Tried:
    """What was measured of the trials so far; a run that diverged has an accuracy of 0."""
    tried: Tried = {}
    for folder in folders:
        for row in study.rows_in(folder, f"effort-{contest.dataset}"):
            method, value, rate = row["label"].rsplit("-", 2)
            if (row["setup"], method) == (contest.regime, contest.method):
                key = float(value), float(rate.removeprefix("rate"))
                if row["status"] == "finished":
                    shared = row["summary"].get("global_accuracy", {}).get("last10")
                    tried[key] = row["summary"]["validation_accuracy"]["last10"], shared
                elif row["status"] == "diverged":
                    tried[key] = 0.0, None if contest.method in PERSONAL else 0.0
    return tried


def main() -> None:
    options = parse()
    began, folders = time.time(), [options.out, *options.done]
    study.decode(options.datasets, options.data_dir)
    contests = [
        Contest(dataset, regime, method)
        for dataset in options.datasets for regime in options.regimes for method in options.methods or methods(regime)
    ]  # fmt: skip
    for number in range(3):
        pairs = []
        for contest in contests:
            tried = found(contest, folders)
            for value, rate in stage(contest, earlier(contest, number, tried), number):
                if (value, rate) not in tried:
                    cell = contest.cell(value, rate, options.rounds)
                    folder = data_folder(options.data_dir, contest.dataset)
                    pairs.append((cell, cell.config(folder, device=options.device, threads=options.threads)))
        if pairs and time.time() < began + options.seconds:
            left = argparse.Namespace(**{**vars(options), "seconds": began + options.seconds - time.time()})
            pairs.sort(key=lambda pair: -study.cells.size(pair[1]))
            study.run_all(pairs, left, study.current_commit(options))
    write(contests, folders, options.out / "effort.json", study.current_commit(options))


def earlier(contest: Contest, number: int, tried: Tried) -> Tried:
    """The trials that steps before `number` made, so that a repeated call takes the same way."""
    known: Tried = {}
    for step in range(number):
        known |= {pair: tried[pair] for pair in stage(contest, dict(known), step) if pair in tried}
    return known


def methods(regime: str) -> tuple[str, ...]:
    """Those of the tables of a regime."""
    everybody = ("fedavg", "stc", "sketchvote", "sketchmean")
    if regime in ("gru", "transformer"):
        return (*everybody, "fedadam", "scaffold", "ditto")
    if regime == "1-over-1000":
        return tuple(regimes.SIZES)
    return everybody if regime == "20-of-20" else (*everybody, "fetchsgd", "local")


def write(contests: Sequence[Contest], folders: Sequence[Path], file: Path, commit: str) -> None:
    """The table of trials, printed, and kept with what was chosen."""
    kept: list[dict[str, Any]] = []
    for contest in contests:
        tried = found(contest, folders)
        if not tried:
            continue
        top = best(tried)
        trials = [
            {"value": value, "rate": rate, "v_acc": v and round(v, 2), "g_acc": g and round(g, 2)}
            for (value, rate), (v, g) in sorted(tried.items())
        ]
        chosen = contest.settings(*top)
        print(f"{contest.dataset} {contest.regime} {contest.method}: {chosen}")
        for each in trials:
            star = "*" if (each["value"], each["rate"]) == top else " "
            print(f"  {star} {each['value']:>7g}  rate x{each['rate']:<5g} V {each['v_acc']}  G {each['g_acc']}")
        named = {"dataset": contest.dataset, "regime": contest.regime, "method": contest.method}
        kept.append({**named, "chosen": chosen, "trials": trials})
    others = json.loads(file.read_text())["contests"] if file.is_file() else []
    key = lambda each: (each["dataset"], each["regime"], each["method"])  # noqa: E731 - used twice
    others = [each for each in others if key(each) not in {key(own) for own in kept}]
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({"commit": commit, "margin": MARGIN, "contests": [*others, *kept]}, indent=1) + "\n")


def parse() -> argparse.Namespace:
    parser = study.parser_of(__doc__, threads=1)
    parser.add_argument("datasets", nargs="+", metavar="DATASET")
    parser.add_argument("--regimes", nargs="+", default=["10-of-100", "20-of-20"], choices=list(regimes.REGIMES))
    methods = list(regimes.OWN)
    parser.add_argument("--methods", nargs="+", choices=methods, help="instead of those of the regime's table")
    return parser.parse_args()


if __name__ == "__main__":
    main()
