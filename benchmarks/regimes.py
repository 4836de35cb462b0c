"""Cells of the regimes: everybody in every round, a tenth of the clients, a hundredth; every method with the settings
that were chosen for it with the same effort (effort.py).

    python benchmarks/regimes.py mnist cifar10        # the bytes of the rows that are called equal
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))

from papers.pfedlms.experiments import taken

REGIMES: dict[str, dict[str, Any]] = {
    "10-of-100": {"data.clients": 100, "train.participation": 0.1},
    "10-of-1000": {"data.clients": 1000, "train.participation": 0.01},
    "20-of-20": {"data.clients": 20, "train.participation": 1.0},
    "1-over-1000": {"data.clients": 20, "train.participation": 1.0},
    "gru": {"model.name": "gru", "data.newcomers": 0.2, "train.participation": 0.0373, "run.everyone": False},
    "transformer": {
        "model.name": "transformer", "data.newcomers": 0.2, "train.participation": 0.0373, "run.everyone": False
    },
}  # fmt: skip
"""`1-over-1000` is `20-of-20` with messages of 1/1,000 of FedAvg's bytes. The last two: 20 of the 537 of Shakespeare's
speakers who are not held out, with one model or the other."""
SPARSE = ("10-of-100", "10-of-1000")
BUDGETS = {
    "mnist": ((0.1, 0.005), (0.1, 0.002), (0.2, 0.015)),
    "fmnist": ((0.1, 0.005), (0.1, 0.002), (0.2, 0.015)),
    "cifar10": ((0.3, 0.015), (0.3, 0.005), (0.5, 0.015)),
    "cifar100": ((0.3, 0.015), (0.3, 0.005), (0.5, 0.015)),
    "digits": ((0.1, 0.005), (0.1, 0.002), (0.2, 0.015)),
    "shakespeare": ((0.1, 0.005),),
}
"""ratio and answer of sketchmean where clients are sampled; the first is what others are compared with at its bytes,
and what trials have."""
SELDOM = (0.1, 0.0005)
"""ratio and answer of one more sketchmean where a hundredth of the clients takes part: most bytes are catching up."""
FULL = {"mnist": (0.1, 0.015), "fmnist": (0.1, 0.015), "cifar10": (0.1, 0.01), "cifar100": (0.1, 0.01),
        "digits": (0.1, 0.015)}  # fmt: skip
"""ratio and answer of sketchmean with everybody."""
SHARES = (100, 250, 1000)
"""Budgets: one over so much of FedAvg's bytes."""
ANSWERS = {100: 0.03, 250: 0.012, 1000: 0.003}
"""`answer` of sketchmean and fetchsgd at each budget."""
SIZES = {"stc": "sparsity", "sparseloco": "density", "sketchvote": "ratio", "sketchmean": "ratio",
         "fetchsgd": "columns", "pfedlms": "ratio"}  # fmt: skip
"""The setting that decides how large messages are."""
OWN: dict[str, tuple[str, tuple[float, float, float]]] = {
    "fedavg": ("method.server_step", (1.0, 1.5, 2.25)),
    "fedadam": ("method.server_step", (0.003, 0.01, 0.03)),
    "fedprox": ("method.strength", (0.01, 0.1, 1.0)),
    "scaffold": ("method.server_step", (0.7, 1.0, 1.4)),
    "ditto": ("method.strength", (0.03, 0.1, 0.3)),
    "fedper": ("train.learning_rate", (0.5, 1.0, 2.0)),
    "fedrep": ("method.body_steps", (10, 20, 40)),
    "pfedlms": ("method.strength", (0.02, 0.05, 0.125)),
    "sparseloco": ("method.gain", (1.0, 1.5, 2.25)),
    "decomfl": ("method.step", (3e-4, 1e-3, 3e-3)),
    "stc": ("method.gain", (1.5, 2.25, 3.4)),
    "sketchvote": ("method.gain", (1.0, 1.7, 3.0)),
    "sketchmean": ("method.gain", (2.0, 3.0, 4.5)),
    "fetchsgd": ("method.gain", (0.1, 0.3, 1.0)),
    "local": ("train.learning_rate", (0.5, 1.0, 2.0)),
}
"""The setting that is chosen for each method besides its learning rate, and the three values tried first; for `local`
and `fedper` the learning rate alone, in units of what is shipped."""
WHOLE = ("method.body_steps",)
"""Settings that are whole numbers."""
UNTRIED: dict[str, dict[str, float]] = {
    "fedavg": {"method.server_step": 2.0}, "stc": {"method.gain": 3.0}, "sketchvote": {},
    "sketchmean": {"method.gain": 3.0}, "fetchsgd": {"method.gain": 0.3}, "local": {},
}  # fmt: skip
"""What a chosen row has where there were no trials."""
Settings = dict[str, Any]


def shared(dataset: str, regime: str) -> Settings:
    """What all methods of a table have."""
    model = {"model.name": "vgg8"} if dataset == "cifar100" else {}
    alpha = {} if dataset == "shakespeare" else {"data.alpha": 0.5}  # its clients are who they are
    return {**alpha, **REGIMES[regime], **model}


def on(dataset: str, regime: str = "") -> str:
    """The data set, with its model where a regime has another than the shipped one, on which bytes are compared."""
    if dataset == "cifar100":
        return "cifar10"  # vgg8, with ten classes: shares hold for a hundred as well
    return f"{dataset}/{REGIMES[regime]['model.name']}" if "model.name" in REGIMES.get(regime, {}) else dataset


def sketchmean(dataset: str, ratio: float, answer: float) -> Settings:
    allocation = {"method.allocation": 0.7} if on(dataset) == "cifar10" else {}
    return {"method.name": "sketchmean", "method.ratio": ratio, "method.answer": answer, **allocation}


def plain(dataset: str, regime: str, method: str) -> Settings:
    """A method as it takes part in a regime, at the bytes of the others that compress; its own setting and learning
    rate as they are shipped."""
    if regime == "1-over-1000":
        return {"method.name": method, **at_budget(dataset, method, 1000)}
    ratio, answer = FULL[dataset] if regime == "20-of-20" else BUDGETS[dataset][0]
    if method == "sketchmean":
        return sketchmean(dataset, ratio, answer)
    if method == "decomfl":
        return {"method.name": method, "method.perturbations": directions(on(dataset, regime), 1000)}
    if method == "fedadam":
        return {"method.name": "fedavg", "method.server_optimizer": "adam", "method.server_momentum": 0.9}
    fixed: dict[str, dict[str, float]] = {
        "stc": {"sparsity_down": answer},
        "fetchsgd": {"rows": 3, "answer": answer / 4},  # 4 bytes for a value, and not one magnitude for all
        "sparseloco": {},
    }
    if method in fixed:
        key, own = {"stc": "sparsity", "fetchsgd": "columns", "sparseloco": "density"}[method], fixed[method]
        here = on(dataset, regime)
        wanted = taken(here, "sketchmean", ratio=ratio, answer=answer)
        own = {**own, key: equal(here, method, key, wanted, **own)}
        return {"method.name": method, **{f"method.{name}": value for name, value in own.items()}}
    return {"method.name": method}


def at_budget(dataset: str, method: str, share: int) -> Settings:
    """A method with messages of 1/share of FedAvg's bytes, up and down together."""
    wanted = taken(on(dataset), "fedavg") // share
    if method == "decomfl":
        return {"method.perturbations": directions(on(dataset), share)}
    fixed: dict[str, float] = {}
    if method in ("sketchmean", "fetchsgd"):
        fixed["answer"] = ANSWERS[share] / (4 if method == "fetchsgd" else 1)
    if method == "fetchsgd":
        fixed["rows"] = 3
    if method in ("sketchmean", "sketchvote") and on(dataset) == "cifar10":
        fixed["allocation"] = 0.7
    key = SIZES[method]
    own = {**fixed, key: equal(on(dataset), method, key, wanted, **fixed)}
    return {f"method.{name}": value for name, value in own.items()}


def pull_scale(dataset: str, regime: str) -> float:
    """What the strength of `pfedlms` is multiplied by where its ratio is below 0.1: a pull is as strong as N / m, see
    papers.pfedlms.experiments.at_the_bytes_of."""
    _, _, share = regime.partition("1-over-")
    return min(1.0, at_budget(dataset, "pfedlms", int(share))["method.ratio"] / 0.1) if share else 1.0


def directions(dataset: str, share: int) -> int:
    """The directions of decomfl at 1/share of FedAvg's bytes, `dataset` as `on` names it."""
    few, many = (taken(dataset, "decomfl", perturbations=count) for count in (10, 20))
    return int(10 + (taken(dataset, "fedavg") // share - few) / ((many - few) / 10))


@cache
def equal(dataset: str, method: str, key: str, wanted: int, **fixed: float) -> float:
    """The value of a setting at which messages of a round, up and down, take `wanted` bytes, or hardly fewer."""
    low, high = 1e-5, 0.5
    for _ in range(24):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if taken(dataset, method, **{key: middle}, **fixed) <= wanted else (low, middle)
    return float(f"{low:.4g}")


def rows(dataset: str, regime: str, chosen: Mapping[str, Settings]) -> dict[str, Settings]:
    """The rows of a table by label; `chosen` are the settings that trials gave to methods, by section.key."""
    methods = (
        ("local", "fedavg", "stc", "fetchsgd", "sketchvote") if regime in SPARSE else ("fedavg", "stc", "sketchvote")
    )
    own = {method: {**plain(dataset, regime, method), **chosen.get(method, UNTRIED[method])} for method in methods}
    found = {"fedavg": plain(dataset, regime, "fedavg")}
    budgets = BUDGETS[dataset] if regime in SPARSE else (FULL[dataset],)
    if regime == "10-of-1000":
        budgets = (*budgets, SELDOM)
    for ratio, answer in budgets:
        label = f"sketchmean-r{ratio:g}-a{answer:g}"
        found[label] = {**sketchmean(dataset, ratio, answer), **chosen.get("sketchmean", UNTRIED["sketchmean"])}
    found |= {f"{method}-chosen": settings for method, settings in own.items()}
    return found | {"stc": plain(dataset, regime, "stc")}


def servers(dataset: str, chosen: Mapping[str, Settings]) -> dict[str, Settings]:
    """What else a server can do, 10 of 100 clients, beside the settings that trials gave: momentum at the same step in
    the long run, Adam, and for stc other shares of the bytes up and down."""
    found: dict[str, Settings] = {}
    for method, key in (("fedavg", "server_step"), ("stc", "gain"), ("sketchmean", "gain")):
        own = {**plain(dataset, "10-of-100", method), **chosen[method]}
        step = own[f"method.{key}"]
        for momentum in (0.5, 0.9):
            settings = {f"method.{key}": step * (1 - momentum), "method.server_momentum": momentum}
            found[f"{method}-momentum{momentum:g}"] = {**own, **settings}
        for rate in (0.003, 0.01, 0.03):
            settings = {"method.server_optimizer": "adam", "method.server_momentum": 0.9, f"method.{key}": rate}
            found[f"{method}-adam{rate:g}"] = {**own, **settings}
    ratio, answer = BUDGETS[dataset][0]
    wanted = taken(on(dataset), "sketchmean", ratio=ratio, answer=answer)
    for down in (answer / 2, answer * 2):
        up = equal(on(dataset), "stc", "sparsity", wanted, sparsity_down=down)
        settings = {"method.sparsity": up, "method.sparsity_down": down}
        found[f"stc-down{down:g}"] = {**plain(dataset, "10-of-100", "stc"), **chosen["stc"], **settings}
    return found


def limits() -> list[tuple[str, str, str, Settings, str]]:
    """Where sketchmean breaks: data set, setup, label, settings and model of every cell, and FedAvg beside it.
    All are 10 of 100 clients of MNIST unless named."""
    base = shared("mnist", "10-of-100")
    mean, average = {**sketchmean("mnist", *BUDGETS["mnist"][0])}, {"method.name": "fedavg"}
    setups: dict[str, Settings] = {
        "a0.05": {"data.alpha": 0.05, "data.min_samples": 2}, "iid": {"data.alpha": 1e4},
        "E1": {"train.local_steps": 1}, "E5": {"train.local_steps": 5}, "E100": {"train.local_steps": 100},
        "2-of-100": {"train.participation": 0.02},
        "once": {"data.clients": 1000, "train.participation": 0.01, "train.rounds": 50},
        "lost": {"run.lost": 0.3, "run.quorum": 0.2},
        "lost-20-of-100": {"run.lost": 0.3, "run.quorum": 0.1, "train.participation": 0.2},
    }  # fmt: skip
    found = [
        ("mnist", setup, label, {**base, **own, **method}, "")
        for setup, own in setups.items() for label, method in (("sketchmean", mean), ("fedavg", average))
    ]  # fmt: skip
    for key, values in (("ratio", (0.03, 0.01, 0.003, 0.001)), ("answer", (0.001, 3e-4, 1e-4, 3e-5))):
        found += [
            ("mnist", "10-of-100", f"sketchmean-{key}{v:g}", {**base, **mean, f"method.{key}": v}, "") for v in values
        ]
    lying = {**mean, "method.name": "sketchmean-liars"}
    found += [
        ("mnist", "liars", f"sketchmean-{share:g}", {**base, **lying, "method.liars": share}, "")
        for share in (0.1, 0.2, 0.3, 0.4)
    ]  # fmt: skip
    here = shared("cifar10", "10-of-100")
    for label, own in (("sketchmean", sketchmean("cifar10", *BUDGETS["cifar10"][0])), ("fedavg", average)):
        found.append(("cifar10", "group-norm", label, {**here, **own}, "vgg8-group-norm"))
    return found


def main() -> None:
    """Check that what is called equal is: bytes of a client in a round, up and down."""
    for dataset in sys.argv[1:]:
        for regime in ("10-of-100", "20-of-20"):
            for method in ("sketchmean", "stc", "fetchsgd"):
                settings = plain(dataset, regime, method)
                own = {key.partition(".")[2]: value for key, value in settings.items() if key != "method.name"}
                print(f"{dataset:8s} {regime:10s} {method:10s} {taken(on(dataset), method, **own):7d} bytes   {own}")


if __name__ == "__main__":
    main()
