"""Cells of the field: personalised rivals with newcomers, Shakespeare's speakers, and rivals at equal bytes. Every
method has the settings that were chosen for it with the same effort (effort.py).

    python benchmarks/field.py mnist cifar10        # the bytes of the rows that are called equal
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import regimes  # which makes `papers` known
from papers.pfedlms.experiments import taken
from regimes import Settings

RIVALS = ("local", "fedavg", "fedprox", "scaffold", "ditto", "fedper", "fedrep", "stc", "sketchvote", "sketchmean",
          "pfedlms")  # fmt: skip
SETUPS: dict[str, tuple[str, Settings]] = {
    "10-of-100": ("10-of-100", {"data.clients": 125, "train.participation": 0.1, "data.alpha": 0.5}),
    "20-of-20-a0.5": ("20-of-20", {"data.clients": 25, "data.alpha": 0.5}),
    "20-of-20-a0.1": ("20-of-20", {"data.clients": 25, "data.alpha": 0.1}),
}
"""How rivals' clients are set up: the regime whose trials count, and settings. A fifth of the clients are newcomers, so
that 100 and 20 are left."""
SPEAKERS = ("fedavg", "fedadam", "scaffold", "ditto", "stc", "sketchvote", "sketchmean")
Contests = Sequence[Mapping[str, Any]]
Named = tuple[str, str, Settings]
"""Setup, label and settings of a cell."""


def chosen(contests: Contests, dataset: str, regime: str) -> dict[str, Settings]:
    """What trials gave to methods; CIFAR-100 takes what it has no trials for from CIFAR-10."""
    found: dict[str, Settings] = {}
    for source in ("cifar10", "cifar100") if dataset == "cifar100" else (dataset,):
        own = [each for each in contests if (each["dataset"], each["regime"]) == (source, regime)]
        found |= {each["method"]: dict(each["chosen"]) for each in own}
    return found


def rivals(dataset: str, contests: Contests) -> Iterator[Named]:
    """The methods that papers on personalisation compare with, and ours; as many rounds as a trial has."""
    for setup, (regime, clients) in SETUPS.items():
        best, model = chosen(contests, dataset, regime), {"model.name": "vgg8"} if dataset == "cifar100" else {}
        base = {**clients, **model, "data.newcomers": 0.2, "train.rounds": 100}
        for method in RIVALS:
            if method in best:
                yield setup, method, {**base, **regimes.plain(dataset, regime, method), **best[method]}
        if "fedavg" in best:
            yield setup, "finetune-0", {**base, "method.name": "finetune", "method.steps": 0, **best["fedavg"]}


def speakers(contests: Contests) -> Iterator[Named]:
    """Next characters of Shakespeare's speakers."""
    for regime in ("gru", "transformer"):
        best = chosen(contests, "shakespeare", regime)
        for method in SPEAKERS:
            if method in best:
                shared = regimes.shared("shakespeare", regime)
                yield regime, method, {**shared, **regimes.plain("shakespeare", regime, method), **best[method]}


def budgets(dataset: str, contests: Contests) -> Iterator[Named]:
    """Rivals at equal bytes, all clients in every round. Gains and rates are those of trials at the budget itself, or,
    where there were none, of trials at about 1/240."""
    for share in regimes.SHARES:
        budget = f"1-over-{share}"
        elsewhere, here = chosen(contests, dataset, "20-of-20"), chosen(contests, dataset, budget)
        for method in (*regimes.SIZES, *(("decomfl",) if share == regimes.SHARES[-1] else ())):
            if method not in elsewhere and method not in here:
                continue
            own = {**regimes.at_budget(dataset, method, share), **here.get(method, elsewhere.get(method, {}))}
            if method == "pfedlms" and method not in here:
                own["method.strength"] *= regimes.pull_scale(dataset, budget)
            yield budget, method, {**regimes.shared(dataset, "20-of-20"), "method.name": method, **own}


def main() -> None:
    """Check that what is called equal is: bytes of a client in a round, up and down."""
    for dataset in sys.argv[1:]:
        for share in regimes.SHARES:
            wanted = taken(regimes.on(dataset), "fedavg") / share
            for method in (*regimes.SIZES, "decomfl"):
                own = {key.partition(".")[2]: value for key, value in regimes.at_budget(dataset, method, share).items()}
                size = taken(regimes.on(dataset), method, **own)
                print(f"{dataset:8s} 1/{share:<5d} {method:10s} {size:7d} bytes  {size / wanted - 1:+.2%}  {own}")


if __name__ == "__main__":
    main()
