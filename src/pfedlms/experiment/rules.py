"""Rules about several settings: combinations that are refused, and settings that have no effect."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from pfedlms.data.sources import DATASETS, path_kind
from pfedlms.settings import CUSTOM

if TYPE_CHECKING:
    from pfedlms.experiment.config import Config

_USED_WITH: dict[str, dict[str, tuple[str, ...]]] = {
    "train.optimizer": {"train.momentum": ("sgd",)},
    "train.schedule": {"train.decay": ("step",), "train.decay_every": ("step",), "train.floor": ("cosine",)},
    "data.partition": {"data.alpha": ("dirichlet", "quantity"), "data.classes_per_client": ("classes",)},
    "data.dataset": {
        "data.image_size": ("folder",),
        **dict.fromkeys(("data.label_column", "data.owner_column", "data.text_column"), ("file",)),
        **dict.fromkeys(
            ("data.mean", "data.std"), ("folder", "file", *(name for name in DATASETS if DATASETS[name].mean))
        ),
    },
}
"""Settings by another one that decides whether they have an effect, and its values with which they have."""
WIDTH_IS_FIXED = (CUSTOM, "resnet", "vgg8", "vgg11", "vgg16")
"""Models that do not read `model.hidden`; those of installed packages may."""
NEGLIGIBLE_STEP = 0.01
"""Local steps with a smaller share of η than this hardly change a model."""


def contradictions(tables: Mapping[str, Any]) -> list[str]:
    """Errors for combinations of settings that are refused; `tables` have every key."""
    data, train = tables["data"], tables["train"]
    errors = []
    if train["patience"] and not data["validation"]:
        errors.append(
            f"train.patience: got {train['patience']!r} with data.validation = 0; it follows V-acc, which needs "
            "samples set aside: set data.validation, for example to 0.1"
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


def _unused(config: Config, setting: str, value: str) -> Iterator[str]:
    """Warnings about settings that the user has given and that have no effect with this value of another one."""
    for key, values in _USED_WITH[setting].items():
        if key in config.given and value not in values:
            given = f"{key}: {config.flat()[key]} has no effect with {setting} = {value}"
            yield f"{given}; it is for {' and '.join(values)}"


def ineffective_settings(config: Config) -> Iterator[str]:
    """Warnings about settings that the user has given and that have no effect, and about a schedule at whose end local
    steps do nothing."""
    train, given = config.train, config.given
    yield from _unused(config, "train.optimizer", train.optimizer)
    yield from _unused(config, "train.schedule", train.schedule)
    if "model.hidden" in given and config.model.name in WIDTH_IS_FIXED:
        yield f"model.hidden: {config.model.hidden} has no effect with model.name = {config.model.name}; leave it out"
    yield from _unused(config, "data.dataset", path_kind(config.data.dataset) or config.data.dataset)
    if "train.optimizer" in given and train.optimizer == "adamw" and "train.learning_rate" not in given:
        yield f"train.learning_rate: {train.learning_rate:g} is what sgd takes; adamw wants 0.001 or so"
    if train.warmup > train.rounds > 0:
        yield f"train.warmup: {train.warmup} of {train.rounds} rounds, so η stays below train.learning_rate"
    if given & {f"train.{key}" for key in ("schedule", "floor", "decay", "decay_every")}:
        last = train.rates.factor(train.rounds)
        if last < NEGLIGIBLE_STEP:
            yield (
                f"train.schedule: {train.schedule} ends at {last:.1g} of the learning rate, where the last local "
                "steps do nothing and clients keep the model they share; set train.floor = 0.1, or a larger train.decay"
            )


def ineffective_data_settings(config: Config, scheme: str, text: bool, by_client: bool = False) -> Iterator[str]:
    """Warnings about settings of the partition that `scheme` does not use, or data given `by_client`, and of text for
    other data."""
    yield from _unused(config, "data.partition", scheme)
    unused = {"min_samples": "data given client by client"} if by_client else {}
    unused |= {} if text else dict.fromkeys(("tokens", "window", "stride", "min_tokens"), "data that are no text")
    for key, data in unused.items():
        if f"data.{key}" in config.given:
            yield f"data.{key}: {getattr(config.data, key)} has no effect with {data}; leave it out"
