"""AdamW, schedules, clipping and a loss of one's own: stacked as one by one, and as a plain PyTorch loop."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import factories
from factories import Post, seeded
from pfedlms.data import FederatedData, batch_positions
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


def tensors(value: Any, path: str = "") -> dict[str, Tensor]:
    if isinstance(value, Tensor):
        return {path: value}
    if isinstance(value, dict):
        return {name: found for key, part in value.items() for name, found in tensors(part, f"{path}/{key}").items()}
    return {}


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


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("way", WAYS)
def test_engines_agree(way: str, name: str) -> None:
    """To the bit, what is sent and what AdamW keeps included; with some of the clients in a round, which then have
    taken different numbers of steps."""
    data, module = factories.digits(CLIENTS, SEED), seeded(dnn)
    options = {**WAYS[way], "participation": 0.7}
    if name == "scaffold" and "optimizer" in options:
        pytest.skip("refuses adamw")
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


def rates(way: str) -> list[float]:
    """By hand, of the five phases."""
    half = 0.5**0.5
    return {
        "cosine": [0.5 * RATE, RATE, RATE * (1 + half) / 2, RATE / 2, RATE * (1 - half) / 2],
        "step": [RATE, RATE, RATE / 2, RATE / 2, RATE / 4],
    }.get(way, [RATE] * 5)


@pytest.mark.parametrize("way", ["adamw", "cosine", "step", "clip", "loss"])
def test_local_is_a_plain_pytorch_loop(way: str) -> None:
    data, module, chosen = factories.digits(CLIENTS, SEED), seeded(dnn), dict(WAYS[way])
    if "criterion" in chosen:
        chosen["criterion"] = criterion(*chosen["criterion"])
    federation = federate("local", data, module, **chosen)
    federation.start()
    for _ in range(ROUNDS):
        federation.play_round()
    for client, (_, got) in enumerate(sorted(federation.models(), key=lambda pair: pair[0])):
        model, own = copy.deepcopy(module).double(), data.train[client]
        momentum = {} if way == "adamw" else {"momentum": chosen.get("momentum", 0.0)}
        kind = torch.optim.AdamW if way == "adamw" else torch.optim.SGD
        optimiser = kind(model.parameters(), lr=RATE, weight_decay=1e-2, **momentum)
        for step, positions in enumerate(batch_positions(SEED, client, len(own), 0, STEPS * (ROUNDS + 1), 16)):
            optimiser.param_groups[0]["lr"] = rates(way)[step // STEPS]
            chosen_samples = torch.from_numpy(own[positions])
            x, y = data.x[chosen_samples].double(), data.y[chosen_samples]
            optimiser.zero_grad()
            loss = focal(model(x), y).mean() if way == "loss" else nn.functional.cross_entropy(model(x), y)
            loss.backward()
            if way == "clip":
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3)
            optimiser.step()
        for name, value in model.state_dict().items():
            torch.testing.assert_close(got[name].double(), value, rtol=1e-3, atol=1e-5)


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
