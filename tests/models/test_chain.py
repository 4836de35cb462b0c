"""Chains of linear and pointwise layers have the bits of the same module under vmap; other modules are no chains."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn

from factories import CPU, LABELS, normal, seeded, squares
from pfedlms.models import CohortModel
from pfedlms.models.chain import Chain
from pfedlms.models.stacked import Stacked

CLIENTS, BATCH = 3, 5
Factory = Callable[[], nn.Module]


def hooked(kind: str) -> nn.Module:
    module = nn.Sequential(nn.Linear(6, 4), nn.ReLU())
    getattr(module[1], kind)(lambda *given: None)
    return module


def frozen() -> nn.Module:
    module = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 3))
    module[0].bias.requires_grad_(False)
    return module


def tied() -> nn.Module:
    module = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    module[1].weight = module[0].weight
    return module


POINTWISE: dict[str, Factory] = {
    "in place": partial(nn.ReLU, inplace=True),
    "leaky": partial(nn.LeakyReLU, 0.2),
    "approximate": partial(nn.GELU, approximate="tanh"),
    **{kind.__name__: kind for kind in (nn.ReLU, nn.ELU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.Softplus, nn.Identity)},
}


def with_pointwise(kind: Factory) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), kind(), nn.Flatten(), nn.Linear(15, 4), kind())


CHAINS: dict[str, Factory] = {
    "one layer": lambda: nn.Sequential(nn.Flatten(), nn.Linear(12, 4)),
    "nested": lambda: nn.Sequential(
        nn.Sequential(nn.Linear(4, 5, bias=False), nn.Tanh()),
        nn.Sequential(nn.Flatten(), nn.Sequential(nn.Linear(15, 6)), nn.Sequential()),
        nn.Linear(6, 4),
    ),
    **{name: partial(with_pointwise, kind) for name, kind in POINTWISE.items()},
}


@pytest.mark.parametrize("factory", CHAINS.values(), ids=CHAINS)
def test_a_chain_has_the_bits_of_the_same_module_under_vmap(factory: Factory) -> None:
    """Outputs and features, in training and evaluation; losses and gradients, with and without a loss on features."""
    module = seeded(factory, 1)
    chain, other = CohortModel(module, CPU), CohortModel(copy.deepcopy(module), CPU)
    assert isinstance(chain._runner, Chain)
    other._runner = Stacked(other._functional, gpu_rules=False)
    params, x = chain.initial + normal(CLIENTS, chain.layout.dim, seed=3), normal(CLIENTS, BATCH, 3, 4, seed=4)
    for training in (True, False):
        results = [model.forward(params, {}, x.clone(), training=training, features=True) for model in (chain, other)]
        assert all(torch.equal(*pair) for pair in zip(*results, strict=True))
    for features in (True, False):
        out = torch.full((2, *params.shape), torch.nan)
        losses = [
            model.gradient(own, params, {}, x.clone(), LABELS, squares, features)
            for own, model in zip(out, (chain, other), strict=True)
        ]
        assert torch.equal(losses[0], losses[1])
        assert torch.equal(out[0], out[1])


NO_CHAINS: dict[str, Factory] = {
    "dropout": lambda: nn.Sequential(nn.Linear(6, 4), nn.Dropout(0.5)),
    "flatten from axis 2": lambda: nn.Sequential(nn.Flatten(start_dim=2), nn.Linear(6, 4)),
    "flatten to axis 2": lambda: nn.Sequential(nn.Flatten(1, 2), nn.Linear(6, 4)),
    "batch norm": lambda: nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4)),
    "softmax": lambda: nn.Sequential(nn.Linear(6, 4), nn.Softmax(dim=1)),
    "own linear": lambda: nn.Sequential(type("Own", (nn.Linear,), {})(6, 4)),
    "own sequential": lambda: type("Own", (nn.Sequential,), {})(nn.Linear(6, 4)),
    "weight norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(6, 4)),
    "hook": lambda: hooked("register_forward_hook"),
    "hook before": lambda: hooked("register_forward_pre_hook"),
    "frozen": frozen,
    "tied": tied,
    "repeated": lambda: nn.Sequential(nn.Linear(6, 6), *[nn.ReLU()] * 2),
}


@pytest.mark.parametrize("factory", NO_CHAINS.values(), ids=NO_CHAINS)
def test_other_modules_are_no_chains(factory: Factory) -> None:
    assert not Chain.supports(factory())


@pytest.mark.parametrize(
    ("clients", "threads", "sizes"),
    [
        (5, 2, [5]),  # all fit the cache together
        (6, 1, [3, 3]),
        (20, 2, [5, 5, 5, 5]),
        (20, 3, [3, 3, 4, 3, 3, 4]),
        (7, 16, [1] * 7),
    ],
)
def test_parts_fit_the_cache_and_keep_all_threads_busy(clients: int, threads: int, sizes: list[int]) -> None:
    torch.set_num_threads(threads)
    chain = Chain(nn.Sequential(nn.Flatten(), nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 10)), CPU)
    parts = chain.parts(clients)
    assert [part.stop - part.start for part in parts] == sizes
    assert [row for part in parts for row in range(clients)[part]] == list(range(clients))
