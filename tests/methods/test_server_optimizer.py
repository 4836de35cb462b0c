"""The server's optimiser: three rounds of each kind in NumPy, a run of half the clients as a plain loop, where it is
the mean itself, and every method that has it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from factories import digits, federation
from plain_loops import CLIENTS, ROUNDS, SHARE, Loop, played


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
