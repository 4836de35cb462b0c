"""What can be set: one dataclass a section, every key documented where it is defined, and whose each key is."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
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


class Keys:
    """Whose a key is, where `methods` are in question: each section has its own keys, and [method] those of every
    method among them. A method that does not exist has none; the check of a configuration reports it."""

    def __init__(self, methods: Iterable[Any]) -> None:
        self.owners: list[tuple[str, str, type[Any]]] = [
            *((section, "all", cls) for section, cls in SECTIONS.items()),
            *(("method", name, METHODS[name].Settings) for name in methods if name in list(METHODS)),
        ]
        """Section, method (or "all" of them) and the dataclass that declares the keys."""

    def owner(self, section: str, key: str) -> type[Any] | None:
        """The dataclass that declares `section.key`, the first of them; None if nobody does."""
        return next((cls for place, _, cls in self.owners if place == section and key in _declared(cls)), None)

    def sections(self) -> dict[str, str]:
        """The section of every key that can be given without naming it."""
        return {key: section for section, _, cls in self.owners for key in _declared(cls) if key != "name"}

    def of_method(self, name: str, values: Mapping[str, Any]) -> dict[str, Any]:
        """Of the values of a section [method], those of one method: without what only others know, but with what
        nobody knows, so that the check reports it."""
        own = Keys([name])
        return {
            key: value for key, value in values.items() if own.owner("method", key) or not self.owner("method", key)
        }


def _declared(cls: type[Any]) -> list[str]:
    return [each.name for each in fields(cls)]
