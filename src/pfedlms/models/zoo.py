"""The package's models, by name: those of the paper, a residual network, and two models of text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pfedlms import rng
from pfedlms.errors import UsageError, did_you_mean

_VGG: dict[str, Sequence[int | str]] = {
    "vgg8": (16, "M", 32, "M", 64, "M", 128, "M", 128, "M"),
    "vgg11": (64, "M", 128, "M", 256, 256, "M", 512, 512, "M", 512, 512, "M"),
    "vgg16": (64, 64, "M", 128, 128, "M", 256, 256, 256, "M", 512, 512, 512, "M", 512, 512, 512, "M"),
}

_GROUPS = 8  # groups of channels in group norm
_WORD = 64  # width of an embedded token in `gru`
_WIDTH, _HEADS, _BLOCKS = 128, 4, 2  # in `transformer`


def dnn(shape: tuple[int, ...], classes: int, hidden: int = 256) -> nn.Module:
    """Inputs – hidden – classes with one ReLU; 784-256-10 on MNIST."""
    return nn.Sequential(nn.Flatten(), nn.Linear(prod(shape), hidden), nn.ReLU(), nn.Linear(hidden, classes))


def vgg(name: str, shape: tuple[int, ...], classes: int, hidden: int) -> nn.Module:
    """A VGG of 3x3 convolutions (no bias) + batch norm + ReLU, and a head of three linear layers. Its five poolings
    need 32x32 inputs. `hidden` is not used: the widths are fixed."""
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


class Residual(nn.Module):
    """ReLU(x + two 3x3 convolutions of x, each with group norm); where the width changes the image is halved, and x
    goes through a 1x1 convolution."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        stride = 1 if inputs == outputs else 2
        self.body = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False), nn.GroupNorm(_GROUPS, outputs), nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, padding=1, bias=False), nn.GroupNorm(_GROUPS, outputs),
        )  # fmt: skip
        short = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
        self.short = nn.Sequential(short, nn.GroupNorm(_GROUPS, outputs)) if stride == 2 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.short(x))


class MeanOfImage(nn.Module):
    """The mean of each channel, as `nn.AdaptiveAvgPool2d`, for which vmap has no rule."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean(dim=(2, 3))


def resnet(shape: tuple[int, ...], classes: int, hidden: int) -> nn.Module:
    """ResNet-14 of He et al. (CVPR 2016), section 4.2, with group norm: one convolution, six residual blocks of widths
    16, 32 and 64, the mean over the image, one linear layer; 175,258 parameters for 3 channels and 10 classes. `hidden`
    is not used: the widths are fixed."""
    if len(shape) != 3 or min(shape[1:]) < 4:
        raise UsageError(
            f"model.name: resnet takes images (channels, height, width) of 4 pixels or more each way, got {shape}; use "
            "dnn for this data"
        )
    widths = (16, 16, 16, 32, 32, 64, 64)
    parts = [nn.Conv2d(shape[0], 16, 3, padding=1, bias=False), nn.GroupNorm(_GROUPS, 16), nn.ReLU()]
    parts += [Residual(*pair) for pair in pairwise(widths)]
    return nn.Sequential(*parts, MeanOfImage(), nn.Linear(64, classes))


class Recurrent(nn.Module):
    """Token ids `[batch, length]` → scores of the next token at every position, `[batch, length, tokens]`."""

    def __init__(self, tokens: int, hidden: int) -> None:
        super().__init__()
        self.words = nn.Embedding(tokens, _WORD)
        self.body = nn.GRU(_WORD, hidden, batch_first=True)
        self.head = nn.Linear(hidden, tokens)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.head(self.body(self.words(x))[0])
        return scores


class Attention(nn.Module):
    """Attention with several heads; a position sees itself and the positions before it."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.inner, self.outer = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.inner(x).view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(parts[0], parts[1], parts[2], is_causal=True)
        out: Tensor = self.outer(attended.transpose(1, 2).reshape(batch, length, width))
        return out


class Block(nn.Module):
    """x + attention, then x + two linear layers with GELU, with layer norm before each."""

    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.first, self.attention, self.second = nn.LayerNorm(width), Attention(width, heads), nn.LayerNorm(width)
        self.wide = nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.first(x))
        out: Tensor = x + self.wide(self.second(x))
        return out


class Transformer(nn.Module):
    """Computes what `Recurrent` does, by blocks of attention."""

    def __init__(self, tokens: int, length: int, hidden: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(tokens, _WIDTH), nn.Embedding(length, _WIDTH)
        self.blocks = nn.Sequential(*(Block(_WIDTH, _HEADS, hidden) for _ in range(_BLOCKS)))
        self.norm, self.head = nn.LayerNorm(_WIDTH), nn.Linear(_WIDTH, tokens)

    def forward(self, x: Tensor) -> Tensor:
        embedded = self.words(x) + self.places(torch.arange(x.shape[1], device=x.device))
        scores: Tensor = self.head(self.norm(self.blocks(embedded)))
        return scores


def text(name: str, shape: tuple[int, ...], classes: int, hidden: int) -> nn.Module:
    """A model for windows of tokens: `shape` is (length,), `classes` is the number of tokens."""
    if len(shape) != 1:
        raise UsageError(
            f"model.name: {name} takes windows of tokens, whose shape is (length,), got {shape}; use vgg8, resnet or "
            "dnn for images"
        )
    return Recurrent(classes, hidden) if name == "gru" else Transformer(classes, shape[0], hidden)


@dataclass(frozen=True)
class Entry:
    """A model of the zoo: its description, and a function that builds it from input shape, classes and hidden width."""

    description: str
    build: Callable[[tuple[int, ...], int, int], nn.Module]
    example: tuple[int, ...] = (3, 32, 32)
    """An input shape it takes."""


MODELS: dict[str, Entry] = {
    "dnn": Entry("one hidden layer (model.hidden) with ReLU, any input size", dnn, (1, 28, 28)),
    "vgg8": Entry("5 convolutions 16..128 + batch norm, head 128-128, 32x32 images", partial(vgg, "vgg8")),
    "vgg11": Entry("8 convolutions 64..512 + batch norm, head 512-512, 32x32 images", partial(vgg, "vgg11")),
    "vgg16": Entry("13 convolutions 64..512 + batch norm, head 512-512, 32x32 images", partial(vgg, "vgg16")),
    "resnet": Entry("ResNet-14: 6 residual blocks 16..64 + group norm, images", resnet),
    "gru": Entry("one recurrent layer (model.hidden) on 64-wide embeddings, text", partial(text, "gru"), (80,)),
    "transformer": Entry(
        "2 blocks of attention, width 128, 4 heads, hidden layers of model.hidden, text",
        partial(text, "transformer"),
        (80,),
    ),
}


def build(name: str, shape: tuple[int, ...], classes: int, hidden: int, key: int) -> nn.Module:
    """Build a model by name, with initial weights drawn from the stream `key`."""
    if name not in MODELS:
        raise UsageError(f"model.name: got {name!r}; {did_you_mean(name, MODELS)}")
    return seeded(lambda: MODELS[name].build(shape, classes, hidden), key)


def seeded(factory: Callable[[], nn.Module], key: int) -> nn.Module:
    """Call a model factory with the generators it may draw from seeded by `key`, leaving the caller's as they were."""
    with rng.forked_generators(torch.device("cpu"), key):
        module = factory()
    if not isinstance(module, nn.Module):
        raise UsageError(f"model: the factory returned {type(module).__name__}, expected a torch.nn.Module")
    return module
