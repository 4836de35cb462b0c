"""The stacked engine has the bits of the reference engine with every optimiser, schedule, clipping, epochs and loss;
both agree with a plain PyTorch loop."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import factories
from factories import RecordingLink, seeded, tensors
from pfedlms.data import FederatedData, batch_positions
from pfedlms.data.batches import Augmentation
from pfedlms.engine import Evaluation
from pfedlms.engine.criterion import Criterion
from pfedlms.methods import METHODS
from pfedlms.step.custom import check_function

CLIENTS, SEED, ROUNDS, STEPS, RATE = 6, 3, 3, 3, 0.01
REFERENCE, UNEVEN, STACKED = 1, 3, 0
DIGITS = factories.digits(CLIENTS, SEED)
federate = partial(factories.federation, seed=SEED, local_steps=STEPS, learning_rate=RATE, weight_decay=1e-2)


def dnn() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 24), nn.ReLU(), nn.Linear(24, 10))


def with_batch_norm() -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, 20), nn.BatchNorm1d(20), nn.ReLU(), nn.Linear(20, 12), nn.BatchNorm1d(12),
        nn.ReLU(), nn.Linear(12, 10),
    )  # fmt: skip


def convolutional() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(),
        nn.Linear(6 * 64, 10),
    )  # fmt: skip


def focal(outputs: Tensor, labels: Tensor) -> Tensor:
    """(1 − p)² times the cross-entropy."""
    logs = torch.log_softmax(outputs, dim=-1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    return -((1 - logs.exp()) ** 2) * logs


def branching(outputs: Tensor, labels: Tensor) -> Tensor:
    """A loss that vmap cannot run."""
    return focal(outputs, labels) if outputs.sum() > 0 else 0.5 * focal(outputs, labels)


def criterion(function: Callable[[Tensor, Tensor], Tensor], uses_vmap: bool) -> Criterion:
    made = check_function("loss", function, torch.zeros(5, 10), torch.zeros(5, dtype=torch.int64))
    assert made.uses_vmap is uses_vmap
    return Criterion(made)


OPTIONS: dict[str, dict[str, Any]] = {
    "adamw": {"optimizer": "adamw"},
    "cosine": {"schedule": "cosine", "rounds": ROUNDS, "warmup": 1, "momentum": 0.5},
    "step": {"schedule": "step", "decay": 0.5, "decay_every": 2},
    "clip": {"clip": 0.3, "momentum": 0.5},
    "loss": {"criterion": (focal, True)},
    "loss without vmap": {"criterion": (branching, False)},
    "epochs": {"local_epochs": 1.3, "batch_size": 32, "momentum": 0.5},
    "all": {"optimizer": "adamw", "schedule": "cosine", "rounds": ROUNDS, "clip": 0.3, "criterion": (focal, True)},
}


def played(name: str, data: FederatedData, module: nn.Module, **options: Any) -> tuple[list[Any], dict[str, Tensor]]:
    post = RecordingLink()
    if "criterion" in options:
        options["criterion"] = criterion(*options["criterion"])
    federation = federate(name, data, module, link=post, **options)
    seen: list[Any] = [post.frames]
    for _ in range(ROUNDS):
        report, measured = federation.play_round(evaluate_global=True), federation.evaluate()
        seen += [report.loss, report.traffic, report.global_evaluation, measured]
    return seen, tensors(federation.state())


EVERY_WAY = [(name, way, dnn) for name in ("fedavg", "pfedlms", "sketchvote") for way in OPTIONS]
# scaffold refuses AdamW.
EVERY_METHOD = [(name, "clip" if name == "scaffold" else "all", with_batch_norm) for name in METHODS]
# Clients that have taken all their steps must keep their running statistics.
EPOCHS = [(name, "epochs", with_batch_norm) for name in ("local", "scaffold", "obda", "pfedlms", "finetune")]
CONVOLUTIONS = [("fedavg", "all", convolutional)]


@pytest.mark.parametrize(("name", "way", "factory"), [*EVERY_WAY, *EVERY_METHOD, *EPOCHS, *CONVOLUTIONS])
def test_engines_agree(name: str, way: str, factory: Callable[[], nn.Module]) -> None:
    """Messages, measurements and states are the same to the bit. Only some clients take part in a round, so that they
    have taken different numbers of steps."""
    module, options = seeded(factory), {**OPTIONS[way], "participation": 0.7}
    reference, kept = played(name, DIGITS, module, cohort_size=REFERENCE, **options)
    for cohort_size in (STACKED, UNEVEN):
        seen, state = played(name, DIGITS, module, cohort_size=cohort_size, **options)
        assert seen == reference
        assert all(torch.equal(value, kept[path]) for path, value in state.items())
    plain, _ = played(name, DIGITS, module, cohort_size=STACKED, participation=0.7)
    assert plain != reference  # the setting does something
    moved = kept["/params"] - nn.utils.parameters_to_vector(module.parameters())
    assert (moved.abs().amax(dim=1) > 0.001).all()  # every client has learned something


def test_gamma_of_zsign_is_the_learning_rate_of_the_phase_before() -> None:
    """One client and no noise: w moves by step · γ along the signs."""
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


# --- a plain loop -----------------------------------------------------------------------------------------------------


def plain_loop(module: nn.Module, data: FederatedData, client: int, steps: int, **options: Any) -> nn.Module:
    """One client's training with a module, PyTorch's optimiser and one batch after another; images are augmented by
    random draws of the client, which are taken from `Augmentation` itself."""
    model, own, augments = copy.deepcopy(module).train(), data.train[client], "augment" in options
    optimiser = torch.optim.SGD(
        model.parameters(), 0.1, options.get("momentum", 0), weight_decay=options["weight_decay"]
    )
    draws = (
        Augmentation(SEED, crop=True, flip=True).draws((client,), 0, steps, 16, data.x) if augments else [None] * steps
    )
    for positions, changes in zip(batch_positions(SEED, client, len(own), 0, steps, 16), draws, strict=True):
        chosen = torch.from_numpy(own[positions])
        x = Augmentation.apply(data.x[chosen].unsqueeze(0), changes).squeeze(0) if augments else data.x[chosen]
        optimiser.zero_grad()
        F.cross_entropy(model(x), data.y[chosen]).backward()
        optimiser.step()
    return model.eval()


@pytest.mark.parametrize("cohort_size", [STACKED, REFERENCE])
@pytest.mark.parametrize(
    ("factory", "options"),
    [
        (dnn, {"weight_decay": 0.0}),
        (dnn, {"weight_decay": 1e-2, "momentum": 0.9}),
        (with_batch_norm, {"weight_decay": 1e-2, "momentum": 0.9}),
        (dnn, {"weight_decay": 0.0, "augment": "crop+flip"}),
    ],
)
def test_local_is_a_plain_pytorch_loop(
    factory: Callable[[], nn.Module], options: dict[str, Any], cohort_size: int
) -> None:
    """With (R + 1) E steps: E before the first round, then E in each round."""
    module, steps = seeded(factory), (ROUNDS + 1) * STEPS
    federation = federate("local", DIGITS, module, cohort_size=cohort_size, **{**options, "learning_rate": 0.1})
    measured = factories.played(federation, ROUNDS).evaluate()
    for client in (0, CLIENTS - 1):
        expected, got = plain_loop(module, DIGITS, client, steps, **options), federation.client_state_dict(client)
        assert got.keys() == expected.state_dict().keys()
        for name, value in expected.state_dict().items():
            torch.testing.assert_close(got[name], value, rtol=0, atol=1e-5)
        assert measured.correct[client] == correct_by_hand(expected, DIGITS, client)
    one_more = plain_loop(module, DIGITS, CLIENTS - 1, steps + 1, **options).state_dict()
    assert max(float((value - one_more[name]).abs().max()) for name, value in got.items()) > 1e-4


def correct_by_hand(module: nn.Module, data: FederatedData, client: int) -> int:
    held = torch.from_numpy(data.test[client])
    with torch.no_grad():
        return int((module.eval()(data.x[held]).argmax(dim=1) == data.y[held]).sum())


def test_global_accuracy_is_measured_before_the_local_steps_and_personal_accuracy_after() -> None:
    """The expected average is computed from the frames."""
    module = seeded(dnn)
    post = RecordingLink()
    federation = federate("fedavg", DIGITS, module, link=post, local_steps=8, learning_rate=0.3)
    shared = federation.play_round(evaluate_global=True).global_evaluation
    personal = federation.evaluate()
    models = np.stack([np.frombuffer(sent, dtype="<f4") for sent in post.payloads]).astype(np.float64)
    average = (np.array(DIGITS.samples)[:, None] * models).sum(axis=0) / sum(DIGITS.samples)
    common, own = copy.deepcopy(module), copy.deepcopy(module)
    nn.utils.vector_to_parameters(torch.from_numpy(average.astype(np.float32)), common.parameters())
    assert isinstance(shared, Evaluation)
    assert shared.correct == tuple(correct_by_hand(common, DIGITS, client) for client in range(CLIENTS))
    for client in range(CLIENTS):
        own.load_state_dict(federation.client_state_dict(client))
        assert personal.correct[client] == correct_by_hand(own, DIGITS, client)
    assert personal.accuracy > shared.accuracy + 5  # eight large steps on skewed data
