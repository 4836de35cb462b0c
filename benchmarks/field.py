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
SHARES = (100, 250, 1000)
"""Budgets: one over so much of FedAvg's bytes."""
ANSWERS = {100: 0.03, 250: 0.012, 1000: 0.003}
"""`answer` of sketchmean and fetchsgd at each budget."""
SIZES = {"stc": "sparsity", "sparseloco": "density", "sketchvote": "ratio", "sketchmean": "ratio",
         "fetchsgd": "columns", "pfedlms": "ratio"}  # fmt: skip
"""The setting that decides how large messages are."""
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


def at_budget(dataset: str, method: str, share: int) -> Settings:
    """A method with messages of 1/share of FedAvg's bytes, up and down together."""
    wanted = taken(regimes.on(dataset), "fedavg") // share
    if method == "decomfl":
        return {"method.perturbations": regimes.directions(regimes.on(dataset), share)}
    fixed: dict[str, float] = {}
    if method in ("sketchmean", "fetchsgd"):
        fixed["answer"] = ANSWERS[share] / (4 if method == "fetchsgd" else 1)
    if method == "fetchsgd":
        fixed["rows"] = 3
    if method in ("sketchmean", "sketchvote") and regimes.on(dataset) == "cifar10":
        fixed["allocation"] = 0.7
    key = SIZES[method]
    own = {**fixed, key: regimes.equal(regimes.on(dataset), method, key, wanted, **fixed)}
    return {f"method.{name}": value for name, value in own.items()}


def budgets(dataset: str, contests: Contests) -> Iterator[Named]:
    """Rivals at equal bytes, everybody in every round; gains and rates are those chosen at about 1/240."""
    best = chosen(contests, dataset, "20-of-20")
    for share in SHARES:
        for method in (*SIZES, *(("decomfl",) if share == SHARES[-1] else ())):
            if method in best:
                own = {"method.name": method, **best[method], **at_budget(dataset, method, share)}
                if method == "pfedlms":  # a pull is as strong as N / m, see papers.pfedlms.experiments.at_the_bytes_of
                    own["method.strength"] *= min(1.0, own["method.ratio"] / 0.1)
                yield f"1-over-{share}", method, {**regimes.shared(dataset, "20-of-20"), **own}


def main() -> None:
    """Check that what is called equal is: bytes of a client in a round, up and down."""
    for dataset in sys.argv[1:]:
        for share in SHARES:
            wanted = taken(regimes.on(dataset), "fedavg") / share
            for method in (*SIZES, "decomfl"):
                own = {key.partition(".")[2]: value for key, value in at_budget(dataset, method, share).items()}
                size = taken(regimes.on(dataset), method, **own)
                print(f"{dataset:8s} 1/{share:<5d} {method:10s} {size:7d} bytes  {size / wanted - 1:+.2%}  {own}")


if __name__ == "__main__":
    main()
