"""Rules for several settings: combinations that are refused, and settings that have no effect."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from pfedlms.data.sources import kind_of
from pfedlms.train_settings import Schedule

if TYPE_CHECKING:
    from pfedlms.experiment.config import Config

_PARTITIONED_BY = {"data.alpha": ("dirichlet", "quantity"), "data.classes_per_client": ("classes",)}
"""Settings that only some partitions use."""
_OF_PATHS = {"label_column": "file", "owner_column": "file", "text_column": "file", "image_size": "folder"}
"""Settings of data sets given by path, and of which kind."""
NOTHING = 0.01
"""Local steps with less than this share of η hardly change a model."""


def contradictions(tables: Mapping[str, Any]) -> list[str]:
    """Combinations of settings that are refused, in tables that have every key."""
    data, train, run = (tables[section] for section in ("data", "train", "run"))
    if not all(isinstance(section, Mapping) for section in (data, train, run)):
        return []
    found = []
    rounds, warmup = train["rounds"], train["warmup"]
    if isinstance(rounds, int) and isinstance(warmup, int) and warmup > max(0, rounds):
        found.append(f"train.warmup: got {warmup} with train.rounds = {rounds}, expected at most as many")
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
    what = "given in Python" if data["dataset"] == "custom" else repr(data["dataset"])
    for key, of in _OF_PATHS.items():
        if data[key] and kind != of:
            found.append(f"data.{key}: got {data[key]!r}, which is for {of}:PATH, but data are {what}; leave it out")
    return found + [
        f"data.{key}: got {data[key]!r}, expected a number per channel, as in 0.49, 0.48, 0.45"
        for key in ("mean", "std")
        if isinstance(data[key], str) and data[key] and constants(data[key]) is None
    ]


def constants(text: str) -> tuple[float, ...] | None:
    """The numbers that `data.mean` or `data.std` has; None where it is no list of numbers."""
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        return None


def warn(texts: Iterable[str]) -> None:
    """Each of them once."""
    for text in dict.fromkeys(texts):
        warnings.warn(text, stacklevel=3)


def without_effect(config: Config) -> Iterator[str]:
    """Settings that the user has given and that have no effect, and a schedule that ends where local steps do nothing;
    one line each."""
    train, given = config.train, config.given
    if "train.momentum" in given and train.optimizer == "adamw":
        yield f"train.momentum: {train.momentum:g} has no effect, adamw has moments of its own; leave it out"
    for key, schedule in (("decay", "step"), ("decay_every", "step"), ("floor", "cosine")):
        if f"train.{key}" in given and train.schedule != schedule:
            yield (
                f"train.{key}: {getattr(train, key):g} has no effect with train.schedule = {train.schedule}; set "
                f"train.schedule = {schedule}"
            )
    if "train.optimizer" in given and train.optimizer == "adamw" and "train.learning_rate" not in given:
        yield f"train.learning_rate: {train.learning_rate:g} is for sgd; adamw wants 0.001 or so, set it"
    if train.schedule != "constant" and given & {
        f"train.{key}" for key in ("schedule", "floor", "decay", "decay_every")
    }:
        shape = Schedule(train.schedule, train.warmup, train.rounds, train.decay, train.decay_every, train.floor)
        ends = shape.factor(train.rounds)
        remedy = "train.floor = 0.1" if train.schedule == "cosine" else "a larger train.decay or train.decay_every"
        if ends < NOTHING:
            yield (
                f"train.schedule: {train.schedule} ends at {ends:.1g} of the learning rate, where the last local steps "
                f"do nothing and clients keep the model they share; set {remedy}"
            )


def without_effect_on(config: Config, scheme: str, text: bool) -> Iterator[str]:
    """Likewise of settings of the partition, where samples are partitioned by `scheme`; and of settings of text, where
    the data are none."""
    for key, schemes in _PARTITIONED_BY.items():
        if key in config.given and scheme not in schemes:
            value = getattr(config.data, key.partition(".")[2])
            how = "as the data say whose each sample is" if scheme == "given" else f"data.partition = {scheme}"
            yield f"{key}: {value:g} has no effect, {how}; it is for {' and '.join(schemes)}"
    for key in () if text else ("tokens", "window", "stride", "min_tokens"):
        if f"data.{key}" in config.given:
            yield f"data.{key}: {getattr(config.data, key)} has no effect, the data are no text; leave it out"
