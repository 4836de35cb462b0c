"""AdamW, schedules, clipping and a loss of one's own: stacked as one by one, and as a plain PyTorch loop."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import factories
from factories import Post, seeded, tensors
from pfedlms.data import FederatedData
from pfedlms.engine.criterion import Criterion
from pfedlms.methods import METHODS
from pfedlms.step.own import over_clients

CLIENTS, SEED, ROUNDS, STEPS, RATE = 6, 3, 4, 3, 0.01
federate = partial(factories.federation, seed=SEED, local_steps=STEPS, learning_rate=RATE, weight_decay=1e-2)


def dnn() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 24), nn.ReLU(), nn.Linear(24, 10))


def convolutional() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 8)), nn.Conv2d(1, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(),
        nn.Linear(6 * 64, 10),
    )  # fmt: skip


def images(data: FederatedData) -> FederatedData:
    return replace(data, x=data.x.reshape(len(data.x), 8, 8))


def focal(outputs: Tensor, labels: Tensor) -> Tensor:
    """(1 − p)² times the cross-entropy."""
    logs = torch.log_softmax(outputs, dim=-1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    return -((1 - logs.exp()) ** 2) * logs


def branching(outputs: Tensor, labels: Tensor) -> Tensor:
    """Which vmap cannot take."""
    return focal(outputs, labels) if outputs.sum() > 0 else 0.5 * focal(outputs, labels)


def criterion(function: Callable[[Tensor, Tensor], Tensor], stacks: bool) -> Criterion:
    made = over_clients("loss", function, torch.zeros(5, 10), torch.zeros(5, dtype=torch.int64))
    assert made.stacks is stacks
    return Criterion(made)


WAYS: dict[str, dict[str, Any]] = {
    "adamw": {"optimizer": "adamw"},
    "cosine": {"schedule": "cosine", "rounds": ROUNDS, "warmup": 1, "momentum": 0.5},
    "step": {"schedule": "step", "decay": 0.5, "decay_every": 2},
    "clip": {"clip": 0.3, "momentum": 0.5},
    "loss": {"criterion": (focal, True)},
    "loss that cannot be stacked": {"criterion": (branching, False)},
    "all": {"optimizer": "adamw", "schedule": "cosine", "rounds": ROUNDS, "clip": 0.3, "criterion": (focal, True)},
}


def played(name: str, data: FederatedData, module: nn.Module, **options: Any) -> tuple[list[Any], dict[str, Tensor]]:
    post = Post()
    if "criterion" in options:
        options["criterion"] = criterion(*options["criterion"])
    federation = federate(name, data, module, link=post, **options)
    federation.start()
    seen: list[Any] = [post.frames]
    for _ in range(ROUNDS):
        report, measured = federation.play_round(evaluate_global=True), federation.evaluate()
        seen += [report.loss, report.global_evaluation, measured]
    return seen, tensors(federation.state())


EVERY_WAY = [(name, way) for name in ("fedavg", "pfedlms", "sketchvote") for way in WAYS]
EVERY_METHOD = [(name, "clip" if name == "scaffold" else "all") for name in METHODS]  # scaffold refuses AdamW


@pytest.mark.parametrize(("name", "way"), sorted({*EVERY_WAY, *EVERY_METHOD}))
def test_engines_agree(name: str, way: str) -> None:
    """To the bit, what is sent and what AdamW keeps included; with some of the clients in a round, which then have
    taken different numbers of steps."""
    data, module = factories.digits(CLIENTS, SEED), seeded(dnn)
    options = {**WAYS[way], "participation": 0.7}
    reference = played(name, data, module, cohort_size=1, **options)
    for cohort_size in (0, 3):
        seen, state = played(name, data, module, cohort_size=cohort_size, **options)
        assert seen == reference[0]
        assert all(torch.equal(value, reference[1][path]) for path, value in state.items())
    plain, _ = played(name, data, module, cohort_size=0, participation=0.7)
    assert plain != reference[0]  # the setting does something


@pytest.mark.parametrize("way", ["adamw", "all"])
def test_engines_agree_on_convolutions(way: str) -> None:
    """Where clients are spread over threads and one of them is not."""
    data, module = images(factories.digits(CLIENTS, SEED)), seeded(convolutional)
    reference = played("fedavg", data, module, cohort_size=1, **WAYS[way])
    seen, state = played("fedavg", data, module, cohort_size=0, **WAYS[way])
    assert seen == reference[0]
    assert all(torch.equal(value, reference[1][path]) for path, value in state.items())


def test_adamw_starts_anew_where_momentum_does() -> None:
    """A personal method keeps what AdamW has; where all go on from a new model, its steps are counted from zero."""
    data = factories.digits(CLIENTS, SEED)
    for name, steps in (("local", STEPS * (ROUNDS + 1)), ("fedavg", STEPS), ("sketchvote", STEPS)):
        _, state = played(name, data, seeded(dnn), optimizer="adamw")
        assert state["/momentum"].shape[1] == 2 * state["/params"].shape[1] + 1
        assert (state["/momentum"][:, -1] == steps).all()


def test_zsigns_gamma_is_the_rate_of_the_steps_it_is_about() -> None:
    """One client and no noise: w moves by step · γ along the signs, γ being the learning rate of the phase before."""
    data, gammas = factories.digits(1, SEED), [RATE, RATE, RATE / 2, RATE / 2]
    federation = federate(
        "zsign", data, seeded(dnn), schedule="step", decay=0.5, decay_every=2, sigma=0.0, step=2.0, downlink="sum"
    )
    federation.start()
    for gamma in gammas:
        before = federation.state()["server"]["model"]
        federation.play_round()
        moved = (federation.state()["server"]["model"] - before).abs()
        torch.testing.assert_close(moved, torch.full_like(moved, 2 * gamma), rtol=0, atol=1e-6)


def test_pfedlms_warns_of_its_pull_with_sgd_alone() -> None:
    data = factories.digits(CLIENTS, SEED)
    with pytest.warns(UserWarning, match=r"method\.strength: 2 η λ / ratio"):
        federate("pfedlms", data, seeded(dnn), learning_rate=1.0, schedule="cosine", rounds=9)
    federate("pfedlms", data, seeded(dnn), learning_rate=1.0, optimizer="adamw")  # warnings are errors
