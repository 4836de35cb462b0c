"""Limits: settings at which a method is another one, never moves w, or loses nothing; more are in test_battery.py and
test_field_methods.py."""

from __future__ import annotations

from itertools import pairwise
from math import pi, sqrt
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from definitions import dense_model
from factories import (
    CLIENTS,
    CPU,
    DIM,
    SEED,
    SIZES,
    cohort_of,
    digits,
    federation,
    hold,
    layout_of,
    normal,
    overheard,
    seeded,
    small_data,
    small_module,
    task_of,
)
from pfedlms.engine import Federation
from pfedlms.methods import Method
from pfedlms.methods.consensus import Sketches
from pfedlms.methods.contract import Tensors
from pfedlms.methods.fedavg import Average
from pfedlms.methods.scaffold import Scaffold
from pfedlms.methods.sketchmean import SETTLED, SketchMean, SketchMeanSettings, Votes
from pfedlms.methods.sketchvote import ResidualSignVote
from pfedlms.methods.sparseloco import Chunks
from pfedlms.methods.stc import STCSettings, TernaryUpdates, dense
from pfedlms.wire.frames import SERVER

SAMPLES = [2, 3, 7]


def played(method: str, rounds: int = 3, **chosen: Any) -> Federation:
    made = federation(method, **chosen)
    made.start()
    for _ in range(rounds):
        made.play_round()
    return made


# --- values instead of signs ------------------------------------------------------------------------------------------


def fedavgs(params: Tensor) -> Tensor:
    """The model that FedAvg makes of three clients."""
    (after,), _ = hold(Average(params.shape[1]), cohort_of(params, samples=SAMPLES))
    return after.params[0]


def test_sketchmean_with_exact_values_all_rows_and_a_float_answer_is_fedavg() -> None:
    """Σ N_k y_k in place of the votes, with the size √(2/π) S = 1 that these have for the signs of y; a gain of 1. What
    is sent and what waits make w' together, on layers with and without padding."""
    model, params = normal(sum(SIZES), seed=1), normal(3, sum(SIZES), seed=2)
    method = SketchMean(task_of(*SIZES, seed=SEED, initial=model), SketchMeanSettings(ratio=1.0, answer=0.1, gain=1.0))
    ((exchange,), layers), server = (method.exchanges, len(SIZES)), method.server_start()
    server |= {
        "scale": torch.full((layers,), sqrt(pi / 2)),
        "settled": torch.full((layers,), SETTLED, dtype=torch.int8),
    }
    y = Sketches(layout_of(*SIZES), 1.0, SEED, refresh=1).of(4, CPU).forward((params - model).double())
    sums = torch.tensor(SAMPLES).double() @ y
    votes = Votes(SimpleNamespace(sums=sums.numpy), np.zeros(layers, np.int64), sum(SAMPLES))  # type: ignore[arg-type]
    after, _ = exchange.server_reply(server, votes, 4)
    torch.testing.assert_close(after["model"] + after["unsent"], fedavgs(params), rtol=1e-5, atol=2e-6)
    assert not torch.equal(after["model"], model)


def test_sketchvote_with_exact_values_and_all_rows_is_fedavg() -> None:
    """The mean of the y_k in place of vote and median, each layer with its own c over √(2/π) s̄; nothing is kept."""
    model, params = normal(sum(SIZES), seed=1), normal(3, sum(SIZES), seed=2)
    sketches = Sketches(layout_of(*SIZES), 1.0, SEED, refresh=1)
    factors = torch.from_numpy(ResidualSignVote(sketches, gain=1.0, check_every=0)._factors) / sqrt(2 / pi)
    before = model.expand(3, -1)
    y, kept = sketches.of(4, CPU).split(params.double(), before.double(), torch.zeros(before.shape).double())
    mean = (torch.tensor(SAMPLES).double() @ y)[None] / sum(SAMPLES)
    step = sketches.of(4, CPU).spread(mean)[0] * factors.repeat_interleave(torch.tensor(SIZES))
    torch.testing.assert_close((model + step).float(), fedavgs(params), rtol=1e-5, atol=2e-6)
    assert kept.abs().max() < 1e-12


def test_what_a_client_of_sketchvote_has_learnt_is_sent_or_kept_and_no_part_of_it_twice() -> None:
    """x = (m/N) Φᵀy + e, and without padding Φe = 0."""
    x, sketches = normal(3, 64, seed=2), Sketches(layout_of(64), 0.25, SEED, refresh=1)
    exchange = ResidualSignVote(sketches, gain=1.0, check_every=0)
    cohort = cohort_of(x, model=torch.zeros(64), residual=torch.zeros(64), checked=torch.zeros(1, dtype=torch.int64))
    after, _ = exchange.client_send(cohort, 0, None)  # type: ignore[arg-type]
    phi, kept = dense_model((64,), 0.25, SEED), after.state["residual"].double()
    torch.testing.assert_close(x.double(), 0.25 * (x.double() @ phi.T) @ phi + kept, rtol=0, atol=1e-6)
    torch.testing.assert_close(kept @ phi.T, torch.zeros(3, 16, dtype=torch.float64), rtol=0, atol=1e-5)


def test_scales_of_sketchmean_that_start_a_thousand_times_off_find_their_way() -> None:
    """After 30 rounds every S is within a factor of two of what it is otherwise, and w some rounds behind."""
    reached = []
    for start in (1.0, 1e-3, 1e3):
        chosen = federation("sketchmean", ratio=0.5, answer=0.1)
        chosen.method._scale = chosen.method._scale * start  # type: ignore[attr-defined]
        chosen._server = chosen._rules.begin()
        chosen.start()
        for _ in range(29):
            chosen.play_round()
        measured = chosen.play_round(evaluate_global=True).global_evaluation
        assert measured is not None
        reached.append((measured.accuracy, chosen._server.server["scale"]))
    for accuracy, scale in reached:
        assert ((scale / reached[0][1]).log2().abs() < 1).all()
        assert accuracy > reached[0][0] - 6


@pytest.mark.parametrize("method", ["stc", "fetchsgd"])
def test_without_gain_w_never_moves(method: str) -> None:
    chosen = played(method, gain=0.0)
    assert torch.equal(chosen.state()["server"]["model"], chosen.method.task.initial)
    assert not torch.equal(chosen.state()["params"][0], chosen.method.task.initial)


# --- what waits -------------------------------------------------------------------------------------------------------


def test_messages_of_stc_add_up_to_what_clients_did() -> None:
    """Over six rounds: what a client sent and still holds are its steps; what the server sent and still holds are the
    weighted means of what it was sent; w has moved by what it sent."""
    with overheard() as messages:
        chosen = federation("stc", sparsity=0.02)
        chosen.start()
        steps = np.zeros((CLIENTS, DIM))
        for _ in range(6):
            state = chosen.state()
            steps += (state["params"] - state["state"]["model"]).double().numpy()
            chosen.play_round()
    told = {sender: np.zeros(DIM) for sender in (*range(CLIENTS), SERVER)}
    for sent in messages:
        told[sent.sender][sent.values["positions"]] += sent.values["magnitude"] * sent.values["signs"].astype(float)
    state = chosen.state()
    clients = np.stack([told[client] for client in range(CLIENTS)])
    held, waits = (state[end]["residual"].double().numpy() for end in ("state", "server"))
    assert min(np.abs(held).max(), np.abs(waits).max()) > 0.01
    np.testing.assert_allclose(clients + held, steps, atol=1e-6)
    np.testing.assert_allclose(told[SERVER] + waits, np.average(clients, axis=0, weights=digits().samples), atol=1e-6)
    moved = (state["server"]["model"] - chosen.model.initial).double().numpy()
    np.testing.assert_allclose(moved, told[SERVER], atol=1e-6)


def of_stc(update: Tensor, sparsity: float) -> tuple[Tensors, Tensors, Tensors]:
    """What a client sends, and server and client afterwards, from w = 0 and without residuals."""
    exchange, nothing = TernaryUpdates(task_of(len(update)), STCSettings(sparsity)), torch.zeros(len(update))
    clients = cohort_of(update[None], model=nothing, residual=nothing)
    (after,), server = hold(exchange, clients, {"model": nothing, "residual": nothing})
    return exchange.client_send(clients, 0, None)[1], server, {"params": after.params, **after.state}  # type: ignore[arg-type]


def test_stc_of_all_entries_sends_signs_with_their_mean_magnitude() -> None:
    x = normal(64, seed=7)
    sent, _, _ = of_stc(x, 1.0)
    torch.testing.assert_close(dense(sent, 64)[0], x.sign() * x.abs().mean(), rtol=1e-6, atol=0)


def test_a_sparse_update_of_one_magnitude_arrives_as_it_is() -> None:
    """As FedAvg's would, with no residual at either end."""
    update = torch.zeros(100)
    update[[3, 50, 51, 99]] = torch.tensor([0.25, -0.25, -0.25, 0.25])
    _, server, client = of_stc(update, 0.04)
    assert torch.equal(server["model"], update)
    assert torch.equal(client["params"][0], update)
    assert not torch.cat([server["residual"], client["residual"][0]]).any()


def test_an_update_of_two_magnitudes_of_each_sign_arrives_as_it_is_by_sparseloco() -> None:
    """One below and one above the mean of each sign and layer; where two are above it, their own mean arrives."""
    x, chunks = torch.zeros(1, 17), Chunks(task_of(11, 6), 4, 0.5)
    x[0, [1, 2, 4, 7, 9, 12, 13]] = torch.tensor([1.0, -3.0, 3.0, -1.0, 2.5, -2.0, 2.0])
    arrived = chunks.moved(torch.zeros_like(x), chunks.compressed(x))
    expected = x.clone()
    expected[0, [4, 9]] = 2.75
    assert torch.equal(arrived, expected)


# --- FedAvg -----------------------------------------------------------------------------------------------------------


def test_fedavg_of_one_step_on_all_samples_is_distributed_gradient_descent() -> None:
    """E = 1, full batches and clients of 6, 4 and 12 samples: models sent down are those of gradient descent on all
    samples together, in float64."""
    data, rate = small_data(6, 4, 12), 0.3
    with overheard() as messages:
        played(
            "fedavg", 4, data=data, module=small_module(), local_steps=1, batch_size=12, learning_rate=rate,
            weight_decay=0.0,
        )  # fmt: skip
    module, everything = small_module().double(), torch.tensor([index for held in data.train for index in held])
    descent = torch.optim.SGD(module.parameters(), lr=rate)
    sent_down = [sent.values["model"] for sent in messages if sent.sender == SERVER]
    assert len(sent_down) == 4
    for sent in sent_down:
        descent.zero_grad()
        nn.functional.cross_entropy(module(data.x[everything].double()), data.y[everything]).backward()
        descent.step()
        expected = nn.utils.parameters_to_vector(module.parameters()).detach()
        torch.testing.assert_close(torch.from_numpy(sent).double(), expected, rtol=1e-5, atol=1e-6)


def test_momentum_begins_with_nothing_where_fedavg_replaces_the_model() -> None:
    """So with E = 1 it makes no difference, to the bit; it does where models are personal."""
    with_it, without = (
        {name: played(name, local_steps=1, momentum=each).state()["params"] for name in ("fedavg", "local")}
        for each in (0.9, 0.0)
    )
    assert torch.equal(with_it["fedavg"], without["fedavg"])
    assert not torch.equal(with_it["local"], without["local"])


def test_many_bits_of_eden_are_fedavg() -> None:
    """After three rounds w is FedAvg's but for a small part of the way, which each bit makes at least twice smaller."""
    exact = played("fedavg")
    way = (exact.state()["params"] - exact.model.initial).norm()
    off = [
        float((played("eden", bits=bits).state()["params"] - exact.state()["params"]).norm() / way)
        for bits in (1, 2, 4, 6)
    ]
    assert off[0] > 0.1
    assert all(after < before / 2 for before, after in pairwise(off))
    assert off[-1] < 0.03


@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_scaffold_without_control_variates_is_fedavg_to_the_bit(
    momentum: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Scaffold, "after_training", Method.after_training)
    ours, fedavg = (played(name, momentum=momentum).state()["params"] for name in ("scaffold", "fedavg"))
    assert torch.equal(ours, fedavg)


def test_scaffold_of_one_client_is_fedavg_to_the_bit() -> None:
    """Its c_k is c."""
    ours, fedavg = (played(name, data=digits(1)).state() for name in ("scaffold", "fedavg"))
    assert torch.equal(ours["params"], fedavg["params"])
    assert ours["server"]["control"].any()


# --- no strength ------------------------------------------------------------------------------------------------------


def with_statistics() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 10))


@pytest.mark.parametrize("method", ["pfedlms", "pfed1bs", "fedproto"])
def test_no_strength_is_local_exactly_with_running_statistics(method: str) -> None:
    """Models, momentum and statistics, bit for bit; the battery has a model without these."""
    alone, without = (
        played(name, module=seeded(with_statistics), momentum=0.5, **own).state()
        for name, own in (("local", {}), (method, {"strength": 0.0}))
    )
    assert all(torch.equal(without[name], alone[name]) for name in ("params", "momentum"))
    assert alone["buffers"]
    assert all(torch.equal(without["buffers"][name], value) for name, value in alone["buffers"].items())
