"""Rules about several settings: combinations that are refused, and settings that have no effect."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from pfedlms.data.sources import path_kind
from pfedlms.train_settings import Schedule

if TYPE_CHECKING:
    from pfedlms.experiment.config import Config

_KEYS_OF_PARTITIONS = {"data.alpha": ("dirichlet", "quantity"), "data.classes_per_client": ("classes",)}
"""Settings that only these partitions use."""
_KEYS_OF_PATHS = {"label_column": "file", "owner_column": "file", "text_column": "file", "image_size": "folder"}
"""Settings of data sets given by path, and the kind of path they are for."""
NEGLIGIBLE_STEP = 0.01
"""Local steps with a smaller share of η than this hardly change a model."""


def contradictions(tables: Mapping[str, Any]) -> list[str]:
    """Errors for combinations of settings that are refused; `tables` have every key."""
    data, train, run = (tables[section] for section in ("data", "train", "run"))
    if not all(isinstance(section, Mapping) for section in (data, train, run)):
        return []
    errors = []
    rounds, warmup = train["rounds"], train["warmup"]
    if isinstance(rounds, int) and isinstance(warmup, int) and warmup > max(0, rounds):
        errors.append(f"train.warmup: got {warmup} with train.rounds = {rounds}, expected at most as many")
    if run["reference"] is True and run["cohort_size"] not in (0, 1):
        errors.append(
            f"run.cohort_size: got {run['cohort_size']!r} with run.reference = true; the reference takes one "
            "client after another, leave it out"
        )
    if train["patience"] and not data["validation"]:
        errors.append(
            f"train.patience: got {train['patience']!r} with data.validation = 0; it follows V-acc, which needs "
            "samples set aside: set data.validation, for example to 0.1"
        )
    kind = path_kind(data["dataset"]) if isinstance(data["dataset"], str) else None
    what = "given in Python" if data["dataset"] == "custom" else repr(data["dataset"])
    for key, needed in _KEYS_OF_PATHS.items():
        if data[key] and kind != needed:
            errors.append(
                f"data.{key}: got {data[key]!r}, which is for {needed}:PATH, but data are {what}; leave it out"
            )
    return errors + [
        f"data.{key}: got {data[key]!r}, expected a number per channel, as in 0.49, 0.48, 0.45"
        for key in ("mean", "std")
        if isinstance(data[key], str) and data[key] and parse_constants(data[key]) is None
    ]


def parse_constants(text: str) -> tuple[float, ...] | None:
    """The numbers of `data.mean` or `data.std`; None if the text is no list of numbers."""
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        return None


def warn_once(texts: Iterable[str]) -> None:
    """Give each warning once."""
    for text in dict.fromkeys(texts):
        warnings.warn(text, stacklevel=3)


def ineffective_settings(config: Config) -> Iterator[str]:
    """Warnings about settings that the user has given and that have no effect, and about a schedule at whose end local
    steps do nothing."""
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
        yield f"train.learning_rate: {train.learning_rate:g} is what sgd takes; adamw wants 0.001 or so"
    if train.schedule != "constant" and given & {
        f"train.{key}" for key in ("schedule", "floor", "decay", "decay_every")
    }:
        shape = Schedule(train.schedule, train.warmup, train.rounds, train.decay, train.decay_every, train.floor)
        last_factor = shape.factor(train.rounds)
        remedy = "train.floor = 0.1" if train.schedule == "cosine" else "a larger train.decay or train.decay_every"
        if last_factor < NEGLIGIBLE_STEP:
            yield (
                f"train.schedule: {train.schedule} ends at {last_factor:.1g} of the learning rate, where the last "
                f"local steps do nothing and clients keep the model they share; set {remedy}"
            )


def ineffective_data_settings(config: Config, scheme: str, text: bool, by_client: bool = False) -> Iterator[str]:
    """Warnings about settings of the partition that `scheme` does not use, or data given `by_client`, and of text for
    other data."""
    if by_client and "data.min_samples" in config.given:
        least = config.data.min_samples
        yield f"data.min_samples: {least} has no effect, as data are given client by client; leave small clients out"
    for key, schemes in _KEYS_OF_PARTITIONS.items():
        if key in config.given and scheme not in schemes:
            value = getattr(config.data, key.partition(".")[2])
            how = "as the data say whose each sample is" if scheme == "given" else f"data.partition = {scheme}"
            yield f"{key}: {value:g} has no effect, {how}; it is for {' and '.join(schemes)}"
    for key in () if text else ("tokens", "window", "stride", "min_tokens"):
        if f"data.{key}" in config.given:
            yield f"data.{key}: {getattr(config.data, key)} has no effect, the data are no text; leave it out"
