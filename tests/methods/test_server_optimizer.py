"""The server's optimiser: three rounds of each kind in NumPy, a run of half the clients as a plain loop, where it is
the mean itself, and every method that has it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from factories import digits, federation, normal
from pfedlms.methods.server_optimizer import ServerOptimizer, ServerSettings
from plain_loops import CLIENTS, ROUNDS, SHARE, Loop, played


@pytest.mark.parametrize("kind", ["sgd", "adam", "yogi"])
def test_three_steps_in_numpy(kind: str) -> None:
    """One update grows where the last was small, so that yogi's sign is of both kinds."""
    own = ServerSettings(server_momentum=0.8, server_optimizer=kind, server_decay=0.9, server_epsilon=0.05)
    optimizer = ServerOptimizer(1.5, own)
    server, u, v = optimizer.start(torch.zeros(5)), np.zeros(5), np.full(5, 0.05**2)
    for scale in (0.01, 1.0, 0.1):
        mean = scale * normal(5, seed=3).double().numpy()
        server, step = optimizer.step(server, torch.from_numpy(mean))
        if kind == "sgd":
            u = 0.8 * u + mean
            expected = 1.5 * u
        else:
            u = 0.8 * u + (1 - 0.8) * mean
            v = 0.9 * v + 0.1 * mean**2 if kind == "adam" else v - 0.1 * mean**2 * np.sign(v - mean**2)
            expected = 1.5 * u / (np.sqrt(v) + 0.05)
        np.testing.assert_allclose(step.numpy(), expected, rtol=1e-6)


@pytest.mark.parametrize("kind", ["adam", "yogi"])
def test_a_run_is_a_plain_loop(kind: str) -> None:
    """Algorithm 2 of Reddi et al. with weights N_k: the first update is that of phase 0, from w⁰."""
    loop = Loop(digits(CLIENTS))
    w, u, v = loop.initial, torch.zeros_like(loop.initial), torch.full_like(loop.initial, 0.01**2)
    for phase in range(ROUNDS):
        mean = loop.mean({k: loop.steps(w, k, phase) - w for k in loop.participants.of(phase)})
        u = 0.9 * u + (1 - 0.9) * mean
        v = 0.99 * v + 0.01 * mean**2 if kind == "adam" else v - 0.01 * mean**2 * torch.sign(v - mean**2)
        w = w + 0.1 * u / (v.sqrt() + 0.01)
    chosen = {"server_optimizer": kind, "server_momentum": 0.9, "server_step": 0.1, "server_epsilon": 0.01}
    server = played("fedavg", participation=SHARE, **chosen)["server"]
    for name, expected in (("model", w), ("update", u), ("square", v)):
        np.testing.assert_allclose(server[name], expected, rtol=0, atol=2e-6)
    assert (w - loop.initial).abs().max() > 0.05


def test_the_mean_itself_is_kept_as_it_is() -> None:
    mean = normal(5, seed=1).double()
    assert ServerOptimizer().start(mean) == {}
    assert ServerOptimizer().step({}, mean) == ({}, mean)


@pytest.mark.parametrize("method", ["fedavg", "stc", "sketchmean"])
@pytest.mark.parametrize("chosen", [{"server_optimizer": "adam"}, {"server_momentum": 0.5}])
def test_every_method_with_a_mean_has_it(method: str, chosen: dict[str, float | str]) -> None:
    """It moves w elsewhere than the plain mean does, and its moments are in the checkpoint."""
    plain, other = (federation(method, digits(), **own) for own in ({}, chosen))
    for each in (plain, other):
        each.start()
        for _ in range(3):
            each.play_round()
    kept = set(other.state()["server"]) - set(plain.state()["server"])
    assert kept <= {"model", "update", "square"}
    assert kept or method == "sketchmean"  # whose gain is not 1, so that it keeps them anyway
    shared = [each.shared_state_dict() for each in (plain, other)]
    assert any(not torch.equal(shared[0][name], shared[1][name]) for name in shared[0])
