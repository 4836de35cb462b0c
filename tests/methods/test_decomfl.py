"""DeComFL against a plain loop in float64."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

import factories
from pfedlms import rng
from plain_loops import CLIENTS, SEED, SHARE, Loop, federate

UPDATES, DIRECTIONS, SMOOTHING, STEP, ROUNDS = 2, 3, 1e-2, 1e-3, 3


def direction(round: int, update: int, each: int, dim: int) -> Tensor:
    return torch.from_numpy(rng.signs(rng.stream(SEED, "decomfl", round, update, each), dim)).double()


def loss(loop: Loop, model: Tensor, samples: Tensor) -> float:
    nn.utils.vector_to_parameters(model.clone(), loop.module.parameters())
    with torch.no_grad():
        outputs = loop.module(loop.data.x[samples].double())
        return nn.functional.cross_entropy(outputs, loop.data.y[samples]).item()


def slopes(loop: Loop, w: Tensor, client: int, round: int) -> list[list[float]]:
    """What a client sends: K updates of P slopes each, along its own path from w."""
    x, found = w.clone(), []
    for update in range(UPDATES):
        samples, own = loop.batches(client, round + 1)[update], []
        directions = [direction(round, update, each, len(w)) for each in range(DIRECTIONS)]
        for z in directions:
            difference = loss(loop, x + SMOOTHING * z, samples) - loss(loop, x - SMOOTHING * z, samples)
            own.append(difference / (2 * SMOOTHING))
        x = x - STEP / DIRECTIONS * sum(g * z for g, z in zip(own, directions, strict=True))
        found.append(own)
    return found


def test_three_rounds_are_a_plain_loop() -> None:
    """Losses of float32 are off by 1e-7, so slopes by 1e-5."""
    loop = Loop(factories.digits(CLIENTS))
    w = loop.initial
    run = federate(
        "decomfl", participation=SHARE, updates=UPDATES, perturbations=DIRECTIONS, smoothing=SMOOTHING, step=STEP
    )
    run.start()
    for round in range(ROUNDS):
        own = {k: torch.tensor(slopes(loop, w, k, round)).double() for k in loop.participants.of(round + 1)}
        mean = loop.mean({k: each.flatten() for k, each in own.items()}).view(UPDATES, DIRECTIONS)
        for update in range(UPDATES):
            for each in range(DIRECTIONS):
                w = w - STEP / DIRECTIONS * mean[update, each] * direction(round, update, each, len(w))
        run.play_round()
        moved = (run.state()["server"]["model"].double() - loop.initial).abs().max()
        assert moved > 1e-4
        np.testing.assert_allclose(run.state()["server"]["model"], w, rtol=0, atol=1e-6)


def test_running_statistics_do_not_change() -> None:
    """Clients compute slopes in training mode, which must not change their buffers."""
    module = factories.seeded(lambda: nn.Sequential(nn.Flatten(), nn.BatchNorm1d(64), nn.Linear(64, 10)))
    run = federate("decomfl", module)
    run.start()
    cohort = run._clients.present[0]
    kept = {name: value.clone() for name, value in cohort.buffers.items()}
    run.method.exchanges[0].client_send(cohort, 0, run._worker)
    assert all(torch.equal(value, cohort.buffers[name]) for name, value in kept.items())
