"""Stacked layers give what a loop over copies of the module gives; with places for gradients: test_forward.py."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import factories
from factories import seeded
from pfedlms.models import build
from pfedlms.models.runner import FunctionalModule, Pass
from pfedlms.models.stacked import Stacked

CLIENTS, BATCH = 3, 5
Factory = Callable[[], nn.Module]
normal = partial(factories.normal, dtype=torch.float64)


def made(factory: Factory) -> nn.Module:
    """In float64, so that another order of sums does not show."""
    return seeded(factory, 1).double()


class Pair:
    """The same clients twice: a module each, and one module for all of them with its parameters and buffers stacked."""

    def __init__(self, factory: Factory) -> None:
        self.module = made(factory)
        self.plain = [copy.deepcopy(self.module) for _ in range(CLIENTS)]
        for client, own in enumerate(self.plain):
            for number, parameter in enumerate(own.parameters()):
                parameter.data += 0.3 * normal(*parameter.shape, seed=10 * client + number)
        self.runner = Stacked(FunctionalModule(self.module), gpu_rules=True)
        each = [dict(own.named_parameters()) for own in self.plain]
        self.named = {name: torch.stack([own[name].detach() for own in each]).requires_grad_() for name in each[0]}
        kept = [dict(own.named_buffers()) for own in self.plain]
        self.buffers = {name: torch.stack([own[name] for own in kept]) for name in kept[0]}

    def forward(self, x: Tensor, *, training: bool) -> Tensor:
        outputs, _ = self.runner.forward(Pass(self.named, {}, self.buffers, x, training, False))
        return outputs


class Twice(nn.Module):
    """One linear layer used twice, and its weight once more by another layer."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(6, 6), nn.Linear(6, 6)
        self.other.weight = self.one.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.other(torch.tanh(self.one(torch.tanh(self.one(x)))))


class First(nn.Module):
    def forward(self, both: tuple[Tensor, Tensor]) -> Tensor:
        return both[0]


class Rows(nn.Module):
    """An embedding of inputs, and one of the same positions for all clients."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(7, 6), nn.Embedding(4, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.words((x.abs() * 3).long().clamp(max=6)) * self.places(torch.arange(4)) * x.unsqueeze(-1)


class Steps(nn.Module):
    """A recurrent layer whose states and cells are outputs and inputs, too."""

    def __init__(self, kind: type[nn.RNNBase], **settings: Any) -> None:
        super().__init__()
        self.layer = kind(6, 5, **settings)

    def forward(self, x: Tensor) -> Tensor:
        out, first = self.layer(x)
        again, last = self.layer(x.flip(1), first)
        ends = last if isinstance(last, tuple) else (last,)
        return torch.cat([out.flatten(), again.flatten(), *(end.flatten() for end in ends)])


class Attending(nn.Module):
    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self.inner, self._settings = nn.Linear(6, 18), settings

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.inner(x).unflatten(-1, (3, 2, 3)).movedim(-3, 0).transpose(-2, -3)
        return F.scaled_dot_product_attention(q, k, v, **self._settings)


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(4, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 8, 3, padding=1),
        nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 9, 5), nn.BatchNorm1d(5), nn.Linear(5, 3),
    )  # fmt: skip


LAYERS: dict[str, tuple[Factory, tuple[int, ...]]] = {
    "convolution": (partial(nn.Conv2d, 4, 6, 3, stride=2, padding=1), (BATCH, 4, 7, 6)),
    "convolution in groups": (partial(nn.Conv2d, 4, 6, 2, groups=2, dilation=2, bias=False), (BATCH, 4, 7, 6)),
    "convolution of the same size": (partial(nn.Conv2d, 4, 6, (3, 5), padding="same"), (BATCH, 4, 4, 5)),
    "convolution of small images": (partial(nn.Conv2d, 4, 6, 3, padding=1, groups=2), (BATCH, 4, 2, 2)),
    "convolution of one image": (partial(nn.Conv2d, 4, 6, 3), (4, 7, 6)),
    "circular convolution": (partial(nn.Conv2d, 4, 6, 3, padding=1, padding_mode="circular"), (BATCH, 4, 5, 4)),
    "norm": (partial(nn.BatchNorm1d, 6, momentum=0.3, eps=0.1), (BATCH, 6)),
    "norm of sequences": (partial(nn.BatchNorm1d, 6), (BATCH, 6, 4)),
    "norm of images": (partial(nn.BatchNorm2d, 6), (BATCH, 6, 3, 2)),
    "norm without statistics": (partial(nn.BatchNorm2d, 6, track_running_stats=False), (BATCH, 6, 3, 2)),
    "norm without weights": (partial(nn.BatchNorm2d, 6, affine=False), (BATCH, 6, 3, 2)),
    "norm of groups": (partial(nn.GroupNorm, 3, 6, eps=0.1), (BATCH, 6, 3, 2)),
    "norm of groups of vectors": (partial(nn.GroupNorm, 2, 6), (BATCH, 6)),
    "norm of groups without weights": (partial(nn.GroupNorm, 3, 6, affine=False), (BATCH, 6, 3, 2)),
    "pooling": (partial(nn.MaxPool2d, 3, stride=2, padding=1, ceil_mode=True), (BATCH, 4, 6, 7)),
    "dilated pooling": (partial(nn.MaxPool2d, (2, 3), dilation=2), (BATCH, 4, 6, 7)),
    "pooling of one image": (partial(nn.MaxPool2d, 2), (4, 6, 7)),
    "pooling with indices": (lambda: nn.Sequential(nn.MaxPool2d(2, return_indices=True), First()), (BATCH, 4, 6, 6)),
    "linear": (partial(nn.Linear, 6, 4), (BATCH, 6)),
    "linear on sequences": (partial(nn.Linear, 6, 4, bias=False), (BATCH, 7, 6)),
    "linear on one vector": (partial(nn.Linear, 6, 4), (6,)),
    "linear used twice": (Twice, (BATCH, 6)),
    "embedding": (Rows, (BATCH, 4)),
    "layer norm": (partial(nn.LayerNorm, (4, 6), eps=0.1), (BATCH, 3, 4, 6)),
    "layer norm without bias": (partial(nn.LayerNorm, 6, bias=False), (BATCH, 6)),
    "layer norm without weights": (partial(nn.LayerNorm, 6, elementwise_affine=False), (BATCH, 6)),
    "GRU": (partial(Steps, nn.GRU, batch_first=True), (BATCH, 4, 6)),
    "GRU of two layers without bias": (partial(Steps, nn.GRU, num_layers=2, bias=False), (BATCH, 4, 6)),
    "LSTM": (partial(Steps, nn.LSTM), (BATCH, 4, 6)),
    "LSTM of two layers": (partial(Steps, nn.LSTM, num_layers=2, batch_first=True), (BATCH, 4, 6)),
    "attention": (partial(Attending, is_causal=True), (BATCH, 4, 6)),
    "attention of one sequence": (partial(Attending, scale=0.3), (4, 6)),
    "attention with a mask": (partial(Attending, attn_mask=torch.eye(4, dtype=torch.bool)), (BATCH, 4, 6)),
    "layer of a transformer": (partial(nn.TransformerEncoderLayer, 6, 2, 8, 0.0, batch_first=True), (BATCH, 4, 6)),
    "resnet": (partial(build, "resnet", (3, 8, 8), 4, 0, key=1), (BATCH, 3, 8, 8)),
    "network": (network, (BATCH, 4, 6, 6)),
}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(("factory", "shape"), LAYERS.values(), ids=LAYERS)
def test_stacked_layers_are_a_loop_over_modules(factory: Factory, shape: tuple[int, ...], training: bool) -> None:
    """Outputs, gradients of parameters and of inputs, and all buffers after two steps."""
    pair = Pair(factory)
    for step in range(2):
        x = normal(CLIENTS, *shape, seed=100 + step).requires_grad_()
        outputs = pair.forward(x, training=training)
        weights = normal(*outputs.shape, seed=200)
        got = torch.autograd.grad((outputs * weights).sum(), [*pair.named.values(), x])
        for client, module in enumerate(pair.plain):
            own = x[client].detach().requires_grad_()
            expected = module.train(training)(own)
            torch.testing.assert_close(outputs[client], expected)
            slopes = torch.autograd.grad((expected * weights[client]).sum(), [*module.parameters(), own])
            for gradient, slope in zip(got, slopes, strict=True):
                torch.testing.assert_close(gradient[client], slope)
            for name, value in module.named_buffers():
                torch.testing.assert_close(pair.buffers[name][client], value)


@pytest.mark.parametrize(
    ("name", "operation", "clients"),
    [
        ("convolution", "conv2d", CLIENTS),
        ("convolution of small images", "conv2d", CLIENTS),
        ("circular convolution", "conv2d", 1),
        ("norm", "batch_norm", CLIENTS),
        ("norm of images", "batch_norm", CLIENTS),
        ("norm without weights", "batch_norm", 1),
        ("norm of groups", "group_norm", CLIENTS),
        ("pooling", "max_pool2d", CLIENTS),
        ("pooling with indices", "max_pool2d", 1),
    ],
)
def test_one_call_is_for_all_clients(name: str, operation: str, clients: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Channels of all clients side by side, last in memory for small images; vmap runs other layers."""
    factory, shape = LAYERS[name]
    seen = []
    usual = getattr(F, operation)
    monkeypatch.setattr(F, operation, lambda x, *rest, **named: seen.append(x) or usual(x, *rest, **named))
    Pair(factory).forward(normal(CLIENTS, *shape), training=True)
    assert {x.shape[1] for x in seen} == {clients * shape[1]}
    assert clients == 1 or len(seen) == 1
    if operation == "conv2d" and clients > 1:
        assert seen[0].is_contiguous(memory_format=torch.channels_last) == (name == "convolution of small images")


def test_the_module_itself_does_not_change() -> None:
    pair, untouched = Pair(network), made(network)
    x = normal(CLIENTS, BATCH, 4, 6, 6)
    pair.forward(x, training=False)
    for module in (pair.module, untouched):
        module.eval()(x[0]).square().sum().backward()
    for ours, theirs in zip(pair.module.parameters(), untouched.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)
