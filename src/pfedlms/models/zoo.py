"""The models of the paper, by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod

import torch
from torch import nn

from pfedlms.errors import UsageError, did_you_mean

_VGG: dict[str, Sequence[int | str]] = {
    "vgg8": (16, "M", 32, "M", 64, "M", 128, "M", 128, "M"),
    "vgg11": (64, "M", 128, "M", 256, 256, "M", 512, 512, "M", 512, 512, "M"),
    "vgg16": (64, 64, "M", 128, 128, "M", 256, 256, 256, "M", 512, 512, 512, "M", 512, 512, 512, "M"),
}


def dnn(shape: tuple[int, ...], classes: int, hidden: int = 256) -> nn.Module:
    """Inputs – hidden – classes with one ReLU; 784-256-10 on MNIST."""
    return nn.Sequential(nn.Flatten(), nn.Linear(prod(shape), hidden), nn.ReLU(), nn.Linear(hidden, classes))


def vgg(name: str, shape: tuple[int, ...], classes: int, hidden: int) -> nn.Module:
    """A VGG of 3x3 convolutions (no bias) + batch norm + ReLU, and a head of three linear layers. Five poolings: 32x32
    inputs. Its widths are fixed: `hidden` has no part in it."""
    if len(shape) != 3 or shape[1:] != (32, 32):
        raise UsageError(
            f"model.name: {name} takes images of shape (channels, 32, 32), got {shape}; use dnn for this data"
        )
    parts: list[nn.Module] = []
    channels = shape[0]
    for width in _VGG[name]:
        if isinstance(width, str):
            parts.append(nn.MaxPool2d(2))
        else:
            parts += [nn.Conv2d(channels, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
            channels = width
    head = [nn.Flatten(), nn.Linear(channels, channels), nn.ReLU(), nn.Linear(channels, channels), nn.ReLU()]
    return nn.Sequential(*parts, *head, nn.Linear(channels, classes))


@dataclass(frozen=True)
class Entry:
    """A model of the zoo: what it is and how it is built from (input shape, classes, hidden width)."""

    description: str
    build: Callable[[tuple[int, ...], int, int], nn.Module]


MODELS: dict[str, Entry] = {
    "dnn": Entry("one hidden layer (model.hidden) with ReLU, any input size", dnn),
    "vgg8": Entry("5 convolutions 16..128 + batch norm, head 128-128, 32x32 images", partial(vgg, "vgg8")),
    "vgg11": Entry("8 convolutions 64..512 + batch norm, head 512-512, 32x32 images", partial(vgg, "vgg11")),
    "vgg16": Entry("13 convolutions 64..512 + batch norm, head 512-512, 32x32 images", partial(vgg, "vgg16")),
}


def build(name: str, shape: tuple[int, ...], classes: int, hidden: int, key: int) -> nn.Module:
    """Build a model of the zoo with initial weights drawn from the stream `key`."""
    if name not in MODELS:
        raise UsageError(f"model.name: got {name!r}; {did_you_mean(name, MODELS)}")
    return seeded(lambda: MODELS[name].build(shape, classes, hidden), key)


def seeded(factory: Callable[[], nn.Module], key: int) -> nn.Module:
    """Call a model factory with PyTorch's generator seeded by `key`, leaving the caller's generator as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(key % (1 << 63))
        module = factory()
    if not isinstance(module, nn.Module):
        raise UsageError(f"model: the factory returned {type(module).__name__}, expected a torch.nn.Module")
    return module
