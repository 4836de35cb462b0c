"""What can be set: one dataclass a section, every key documented where it is defined, and whose each key is."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import Field, dataclass, fields
from typing import Any

from pfedlms.data.sources import DATASETS
from pfedlms.methods import METHODS
from pfedlms.models.zoo import MODELS
from pfedlms.settings import setting

CUSTOM = "custom"
"""Stands in a config for data or a model that was given in Python."""


@dataclass(frozen=True)
class DataSection:
    """Who holds what."""

    dataset: str = setting("digits", "data set by name", choices=lambda: [*DATASETS, CUSTOM])
    dir: str = setting("", "folder with the data set's files")
    alpha: float = setting(0.5, "α of the Dirichlet partition; small: each client holds few classes", above=0)
    clients: int = setting(20, "K, number of clients", minimum=1, maximum=(1 << 32) - 2)
    min_samples: int = setting(10, "smallest number of samples (train and test) a client may get", minimum=1)


@dataclass(frozen=True)
class ModelSection:
    """What every client trains."""

    name: str = setting("dnn", "model by name", choices=lambda: [*MODELS, CUSTOM])
    hidden: int = setting(256, "width of dnn's hidden layer", minimum=1)


@dataclass(frozen=True)
class TrainSection:
    """How clients train, the same for every method."""

    rounds: int = setting(200, "R, communication rounds", minimum=1)
    participation: float = setting(
        1.0,
        "share of the clients that take part in a phase; max(1, round(share · K)) of them are drawn",
        above=0,
        maximum=1,
    )
    local_steps: int = setting(20, "E, SGD steps a client takes in a round", minimum=1)
    batch_size: int = setting(64, "samples of one step", minimum=1)
    learning_rate: float = setting(0.1, "η", above=0)
    momentum: float = setting(0.0, "momentum of the local steps; 0: none", minimum=0, maximum=1)
    weight_decay: float = setting(1e-4, "μ, for every method", minimum=0)
    augment: str = setting(
        "none",
        "how training images are changed at random: moved by up to 4 pixels, mirrored, or both",
        choices=lambda: ["none", "crop", "flip", "crop+flip"],
    )


@dataclass(frozen=True)
class RunSection:
    """How the run is executed and what is kept."""

    seed: int = setting(
        0,
        "names every random stream: partition, initial weights, batches, sketches",
        minimum=0,
        maximum=(1 << 63) - 1,
    )
    device: str = setting("auto", "auto takes a GPU where there is one", choices=lambda: ["auto", "cpu", "cuda"])
    threads: int = setting(0, "CPU threads; 0: as they are set, which is all unless changed", minimum=0, maximum=1024)
    out: str = setting("", "run directory; empty: a fresh one under runs/")
    evaluate_every: int = setting(1, "rounds between evaluations (the last round is always evaluated)", minimum=1)
    checkpoint_every: int = setting(10, "rounds between checkpoints (the last round always has one)", minimum=1)
    quorum: float = setting(
        0.5, "share of an exchange's messages that must be valid for the round to go on", minimum=0, maximum=1
    )
    lost: float = setting(
        0.0,
        "share of messages lost on the way, in each direction; for studies of unreliable links",
        minimum=0,
        maximum=1,
    )
    fast: bool = setting(
        False,
        "on a GPU: compile the model (instead of the stacked layers); other rounding, not reproducible to the bit; "
        "worth a try where it has layers without a rule of their own",
    )
    cohort_size: int = setting(0, "clients stacked together; 0: as many as fit in memory; 1: one by one", minimum=0)
    reference: bool = setting(
        False, "everything as it is defined, in plain PyTorch, one client after another: for checking; slow"
    )


SECTIONS: dict[str, type[Any]] = {
    "data": DataSection,
    "model": ModelSection,
    "train": TrainSection,
    "run": RunSection,
}


def owners(methods: Iterable[Any]) -> list[tuple[str, str, type[Any]]]:
    """Whose keys are whose, where `methods` are in question: section, method (or "all" of them) and the dataclass that
    declares the keys. A method that does not exist has none; the check of a configuration reports it."""
    return [
        *((section, "all", cls) for section, cls in SECTIONS.items()),
        *(("method", name, METHODS[name].Settings) for name in methods if name in list(METHODS)),
    ]


def keys(methods: Iterable[Any]) -> dict[tuple[str, str], Field[Any]]:
    """Every key by section and name; one that several methods have is the first's."""
    known: dict[tuple[str, str], Field[Any]] = {}
    for section, _, cls in owners(methods):
        for each in fields(cls):
            known.setdefault((section, each.name), each)
    return known


def of_method(name: str, methods: Iterable[Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Of the values of a section [method], those of one of `methods`: without what only others know, but with what
    nobody knows, so that the check reports it."""
    others = keys(methods).keys() - keys([name]).keys()
    return {key: value for key, value in values.items() if ("method", key) not in others}
