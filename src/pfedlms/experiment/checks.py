"""What settings mean together: combinations that cannot be, and settings that have no effect beside others."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pfedlms.data.sources import kind_of

if TYPE_CHECKING:
    from pfedlms.experiment.config import Config

_DEALT_BY = {"data.alpha": ("dirichlet", "quantity"), "data.classes_per_client": ("classes",)}
"""Settings that only some ways to deal samples out look at."""
_OF_PATHS = {"label_column": "file", "owner_column": "file", "image_size": "folder"}
"""Settings of data sets given by path, and of which kind."""


def contradictions(tables: Mapping[str, Any]) -> list[str]:
    """What is wrong with settings beside each other, in tables that have every key; what is wrong with one alone is
    reported elsewhere."""
    data, train, run = (tables[section] for section in ("data", "train", "run"))
    if not all(isinstance(section, Mapping) for section in (data, train, run)):
        return []
    found = []
    rounds, warmup = train["rounds"], train["warmup"]
    if isinstance(rounds, int) and isinstance(warmup, int) and warmup > max(0, rounds):
        found.append(f"train.warmup: got {warmup} with train.rounds = {rounds}, expected at most as many")
    if run["reference"] is True and run["fast"] is True:
        found.append("run.reference: got true with run.fast = true; the reference compiles nothing, leave one out")
    if run["reference"] is True and run["cohort_size"] not in (0, 1):
        found.append(
            f"run.cohort_size: got {run['cohort_size']!r} with run.reference = true; the reference takes one "
            "client after another, leave it out"
        )
    if train["patience"] and not data["validation"]:
        found.append(
            f"train.patience: got {train['patience']!r} with data.validation = 0; it follows V-acc, which needs "
            "samples set aside: set data.validation, for example to 0.1"
        )
    kind = kind_of(data["dataset"]) if isinstance(data["dataset"], str) else None
    for key, of in _OF_PATHS.items():
        if data[key] and kind != of:
            what = "given in Python" if data["dataset"] == "custom" else repr(data["dataset"])
            found.append(f"data.{key}: got {data[key]!r}, which is for {of}:PATH, but data are {what}; leave it out")
    return found


def warn(texts: Iterable[str]) -> None:
    """Each of them once."""
    for text in dict.fromkeys(texts):
        warnings.warn(text, stacklevel=3)


def silenced(config: Config) -> Config:
    """As if nobody had given any setting: what there was to say of them is said."""
    return replace(config, given=frozenset())


def without_effect(config: Config) -> Iterable[str]:
    """Settings that somebody has given and that nothing looks at, or that were made for another choice than the one
    given; a line each."""
    train, given = config.train, config.given
    if "train.momentum" in given and train.optimizer == "adamw":
        yield f"train.momentum: {train.momentum:g} has no effect, adamw has moments of its own; leave it out"
    for key in ("decay", "decay_every"):
        if f"train.{key}" in given and train.schedule != "step":
            yield (
                f"train.{key}: {getattr(train, key):g} has no effect with train.schedule = {train.schedule}; set "
                "train.schedule = step"
            )
    if "train.optimizer" in given and train.optimizer == "adamw" and "train.learning_rate" not in given:
        yield f"train.learning_rate: {train.learning_rate:g} is for sgd; adamw wants 0.001 or so, set it"


def without_effect_on(config: Config, scheme: str) -> Iterable[str]:
    """Likewise of settings of the partition, where samples are dealt out by `scheme`."""
    for key, schemes in _DEALT_BY.items():
        if key in config.given and scheme not in schemes:
            value = getattr(config.data, key.partition(".")[2])
            how = "as the data say whose each sample is" if scheme == "given" else f"data.partition = {scheme}"
            yield f"{key}: {value:g} has no effect, {how}; it is for {' and '.join(schemes)}"
