"""One round: bytes are counted as they pass, awkward clients take part, what breaks is named."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from torch import nn

from factories import federation, played, seeded
from pfedlms.data import FederatedData, from_pairs
from pfedlms.engine import Federation, RoundReport
from pfedlms.errors import DivergedError
from pfedlms.methods import METHODS
from pfedlms.wire.frames import HEADER_BYTES

FEATURES, CLASSES = 6, 3


def samples(count: int, key: int, classes: int = CLASSES) -> tuple[np.ndarray, np.ndarray]:
    """Points around one corner a class."""
    draw = np.random.default_rng(key)
    labels = np.arange(count) % classes
    return (draw.normal(size=(count, FEATURES)) + 3 * np.eye(CLASSES, FEATURES)[labels]).astype(np.float32), labels


def clients(sizes: tuple[int, ...]) -> FederatedData:
    return from_pairs([(samples(size, key), samples(9, 100 + key)) for key, size in enumerate(sizes)])


def module() -> nn.Module:
    return seeded(lambda: nn.Sequential(nn.Linear(FEATURES, 16), nn.ReLU(), nn.Linear(16, CLASSES)))


def federate(name: str, data: FederatedData, model: nn.Module | None = None, **options: Any) -> Federation:
    chosen = {"local_steps": 2, "batch_size": 8, "weight_decay": 1e-3, **options}
    return federation(name, data, model or module(), **chosen)


def play(federation: Federation, rounds: int) -> RoundReport:
    return played(federation, rounds - 1).play_round()


# Two layers: 6 · 16 + 16 = 112 parameters, padded to 128, m = floor(12.8) = 12; 16 · 3 + 3 = 51, padded to 64, m = 6.
# T = 7 takes 3 bits a symbol: ceil(36 / 8) + ceil(18 / 8) = 5 + 3 bytes; two float32 a layer: 16 bytes.
# FedAvg: 163 float32. OBDA: 163 bits.
BY_HAND = {"pfedlms": (2, 16 + 8, 16 + 8), "fedavg": (1, 652, 652), "obda": (1, 21, 21), "local": (0, 0, 0)}


@pytest.mark.parametrize("cohort_size", [0, 1, 2])
@pytest.mark.parametrize("name", BY_HAND)
def test_bytes_by_hand_down_once_for_each_client(name: str, cohort_size: int) -> None:
    exchanges, up, down = BY_HAND[name]
    traffic = play(federate(name, clients((20, 30, 40)), cohort_size=cohort_size), 1).traffic
    framing = 3 * HEADER_BYTES * exchanges
    assert traffic.as_tuple() == (3 * up, framing, 3 * down, framing, 0)
    assert traffic.total == 3 * (up + down) + 2 * framing


# --- losses ---


def test_the_loss_of_a_round_is_weighted_by_samples() -> None:
    """Steps too small to move a model, and as many as see every sample equally often: the mean over all samples."""
    data, model = clients((8, 32)), module()
    data.x[data.train[1]] *= 5  # so that the two clients' losses differ
    got = play(federate("local", data, model, local_steps=4, batch_size=8, learning_rate=1e-30), 1).loss
    seen = np.concatenate(data.train)
    expected = nn.functional.cross_entropy(model.double()(data.x[seen].double()), data.y[seen]).item()
    assert got == pytest.approx(expected, rel=1e-5)


# --- a loss that is not finite any more ---


@pytest.mark.parametrize("cohort_size", [0, 1, 2])
def test_divergence_names_round_and_client(cohort_size: int) -> None:
    """Client 2 alone sees values of 1e30, so its model overflows at once; the others are fine."""
    pairs = [(samples(20, key), samples(9, 100 + key)) for key in range(4)]
    (x, y), test = pairs[2]
    pairs[2] = ((x * np.float32(1e30), y), test)
    federation = federate("local", from_pairs(pairs), cohort_size=cohort_size)
    with pytest.raises(DivergedError, match=r"before round 1.* client 2 .*train\.learning_rate"):
        federation.start()


# --- awkward clients ---


@pytest.mark.parametrize("name", METHODS)
def test_a_client_with_one_class(name: str) -> None:
    x, y = samples(30, 0)
    single = (x[y == 1], y[y == 1])
    data = from_pairs([(single, single), (samples(30, 1), samples(9, 2)), (samples(30, 3), samples(9, 4))])
    federation = federate(name, data)
    report = play(federation, 3)
    measured = federation.evaluate()
    assert np.isfinite([report.loss, measured.loss]).all()
    assert measured.tested == (10, 9, 9)
    if METHODS[name].personal:
        assert measured.correct[0] == 10  # a personal model has nothing else to learn


@pytest.mark.parametrize("name", METHODS)
def test_a_client_with_fewer_samples_than_a_batch(name: str) -> None:
    """One sample, and three, with batches of eight."""
    federation = federate(name, clients((1, 3, 30)))
    report = play(federation, 3)
    assert np.isfinite([report.loss, federation.evaluate().loss]).all()
    moved = federation.state()["params"] - federation.model.initial
    assert (moved.abs().amax(dim=1) > 0).all()


def test_a_single_client() -> None:
    for name in METHODS:
        federation = federate(name, clients((20,)))
        assert np.isfinite(play(federation, 2).loss)
        assert federation.evaluate().tested == (9,)
