"""The layer table by hand for every kind of module, and the parameter counts of the models."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from pfedlms.errors import UsageError
from pfedlms.models import MODELS, build, flat_layout
from pfedlms.models.layout import Layer, Layout
from pfedlms.models.zoo import seeded


@pytest.mark.parametrize(
    ("size", "pad", "ratio", "m"),
    [
        (1, 1, 0.1, 1), (2, 2, 0.5, 1), (3, 4, 0.5, 2), (4, 4, 1.0, 4), (5, 8, 1.0, 8), (5, 8, 0.5, 4), (8, 8, 0.1, 1),
        (16, 16, 0.1, 1), (32, 32, 0.1, 3), (1024, 1024, 0.1, 102), (1025, 2048, 0.1, 204), (2570, 4096, 0.1, 409),
        (200_960, 262_144, 0.1, 26_214),
    ],
)  # fmt: skip
def test_padded_size_and_sketch_size_of_a_layer(size: int, pad: int, ratio: float, m: int) -> None:
    """The next power of two; m = max(1, floor(ratio · pad))."""
    layer = Layer("any", 0, size)
    assert (layer.pad, layer.sketch(ratio)) == (pad, m)


# --- tables by hand ---------------------------------------------------------------------------------------------------


def tied() -> nn.Module:
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4, bias=False))
    module[1].weight = module[0].weight
    module[2].weight = module[0].weight
    return module


def used_twice() -> nn.Module:
    shared = nn.Linear(3, 3)
    return nn.Sequential(shared, nn.ReLU(), shared)


def frozen() -> nn.Module:
    module = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 4))
    module[0].requires_grad_(False)
    module[1].bias.requires_grad_(False)
    return module


class Scaled(nn.Module):
    """Its own parameter comes first: it is the first module that owns parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(2, 3), nn.Sequential(nn.Linear(3, 1, bias=False)))
        self.scale = nn.Parameter(torch.ones(()))


# A module, its layers (name, offset, size) and its parameters.
TABLES: dict[str, tuple[Callable[[], nn.Module], list[tuple[str, int, int]], dict[str, tuple[int, ...]]]] = {
    "dnn": (
        lambda: build("dnn", (1, 28, 28), 10, 256, key=1),
        [("1", 0, 200_960), ("3", 200_960, 2570)],
        {"1.weight": (256, 784), "1.bias": (256,), "3.weight": (10, 256), "3.bias": (10,)},
    ),
    "batch norm is a layer of its own, its statistics are none": (
        lambda: nn.Sequential(nn.Conv2d(2, 3, 3, bias=False), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(12, 5)),
        [("0", 0, 54), ("1", 54, 6), ("3", 60, 65)],
        {"0.weight": (3, 2, 3, 3), "1.weight": (3,), "1.bias": (3,), "3.weight": (5, 12), "3.bias": (5,)},
    ),
    "batch norm without parameters is no layer": (
        lambda: nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3, affine=False)),
        [("0", 0, 9)],
        {"0.weight": (3, 2), "0.bias": (3,)},
    ),
    "nested, with a parameter of the root": (
        Scaled,
        [("Scaled", 0, 1), ("body.0", 1, 9), ("body.1.0", 10, 3)],
        {"scale": (), "body.0.weight": (3, 2), "body.0.bias": (3,), "body.1.0.weight": (1, 3)},
    ),
    "a tied parameter counts once, where it is first registered": (  # layer 2 has nothing of its own left
        tied,
        [("0", 0, 20), ("1", 20, 4)],
        {"0.weight": (4, 4), "0.bias": (4,), "1.bias": (4,)},
    ),
    "a module used twice counts once": (used_twice, [("0", 0, 12)], {"0.weight": (3, 3), "0.bias": (3,)}),
    "frozen parameters have no place": (frozen, [("1", 0, 12)], {"1.weight": (4, 3)}),
}


@pytest.mark.parametrize("case", TABLES)
def test_layers_and_parameters_by_hand(case: str) -> None:
    factory, layers, parameters = TABLES[case]
    layout = flat_layout(factory())
    assert [(layer.name, layer.offset, layer.size) for layer in layout.layers] == layers
    assert layout.parameters == tuple(parameters.items())
    assert layout.dim == sum(size for *_, size in layers)


@pytest.mark.parametrize("module", [nn.ReLU(), nn.Sequential(), nn.Linear(2, 2).requires_grad_(False)])
def test_a_module_without_trainable_parameters_is_refused(module: nn.Module) -> None:
    with pytest.raises(ValueError, match=f"{type(module).__name__} has no trainable parameters"):
        flat_layout(module)


# --- the zoo ----------------------------------------------------------------------------------------------------------

RESNET = 432 + 32 + 2 * 4672 + (4608 + 9216 + 512 + 3 * 64) + 18_560 + (18_432 + 36_864 + 2048 + 3 * 128) + 73_984 + 650
GRU = 80 * 64 + 3 * 256 * (64 + 256 + 2) + 257 * 80
BLOCK = 2 * 256 + 129 * 384 + 129 * 128 + 129 * 256 + 257 * 128


@pytest.mark.parametrize(
    ("name", "shape", "classes", "count", "mebibytes"),
    [
        ("dnn", (1, 28, 28), 10, 203_530, 0.38),  # the first three are the paper's
        ("vgg8", (3, 32, 32), 10, 279_706, 0.72),
        ("vgg11", (3, 32, 32), 100, 9_799_844, 25.05),
        ("resnet", (3, 32, 32), 10, RESNET, None),
        ("gru", (80,), 80, GRU, None),
        ("transformer", (40,), 80, (80 + 40) * 128 + 2 * BLOCK + 256 + 129 * 80, None),
    ],
)
def test_parameters_and_cost_of_a_round(
    name: str, shape: tuple[int, ...], classes: int, count: int, mebibytes: float | None
) -> None:
    """20 clients, up and down: 3 bits an entry (T = 7) and two float32 a layer. The paper's table has two decimals."""
    layout = layout_of(name, shape, classes)
    assert layout.dim == count
    bits = sum(3 * m + 64 for m in layout.sketch_sizes(0.1))
    assert mebibytes in (None, round(20 * 2 * bits / 8 / 2**20, 2))


def layout_of(name: str, shape: tuple[int, ...], classes: int) -> Layout:
    with torch.device("meta"):  # shapes only
        return flat_layout(MODELS[name].build(shape, classes, 256))


def test_initial_weights_are_a_function_of_the_key() -> None:
    first, again, other = (build("dnn", (1, 8, 8), 10, 8, key)[1].weight for key in (2**64 - 1, 2**64 - 1, 7))
    assert torch.equal(again, first)
    assert not torch.equal(other, first)


def test_text_models_score_every_token_from_the_tokens_before_it() -> None:
    for name in ("gru", "transformer"):
        module, ids = build(name, (6,), 7, 16, key=1), torch.arange(12).view(2, 6) % 7
        other = ids.clone()
        other[:, 4:] = 0
        first, second = module(ids), module(other)
        assert first.shape == (2, 6, 7)
        torch.testing.assert_close(first[:, :4], second[:, :4])
        assert not torch.allclose(first[:, 4:], second[:, 4:])


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("vgg8", (1, 28, 28), r"vgg8 takes images of shape \(channels, 32, 32\), got \(1, 28, 28\)"),
        ("resnet", (80,), r"resnet takes images \(channels, height, width\) .* got \(80,\); use dnn"),
        ("vgg9", (3, 32, 32), r"'vgg9'; did you mean .*vgg"),
        ("gru", (3, 32, 32), r"gru takes windows of tokens, whose shape is \(length,\), got \(3, 32, 32\)"),
    ],
)
def test_other_inputs_and_names_are_refused(name: str, shape: tuple[int, ...], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        build(name, shape, 10, 256, key=1)


def test_a_factory_must_return_a_module() -> None:
    with pytest.raises(UsageError, match=r"returned int, expected a torch\.nn\.Module"):
        seeded(lambda: 3, key=1)  # type: ignore[arg-type, return-value]
