"""One round: bytes are counted as they pass, awkward clients take part, what breaks is named."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from pfedlms.data import FederatedData, from_pairs
from pfedlms.engine import Federation, RoundReport
from pfedlms.engine.training import TrainSettings
from pfedlms.errors import DivergedError, QuorumError
from pfedlms.methods import METHODS
from pfedlms.models import CohortModel

HEADER = 40
FEATURES, CLASSES = 6, 3


def samples(count: int, key: int, classes: int = CLASSES) -> tuple[np.ndarray, np.ndarray]:
    """Points around one corner a class."""
    draw = np.random.default_rng(key)
    labels = np.arange(count) % classes
    return (draw.normal(size=(count, FEATURES)) + 3 * np.eye(CLASSES, FEATURES)[labels]).astype(np.float32), labels


def clients(sizes: tuple[int, ...]) -> FederatedData:
    return from_pairs([(samples(size, key), samples(9, 100 + key)) for key, size in enumerate(sizes)])


def module() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(FEATURES, 16), nn.ReLU(), nn.Linear(16, CLASSES))


def federate(
    name: str, data: FederatedData, *, model: nn.Module | None = None, settings: Any = None, cohort_size: int = 0,
    link: Callable[[bytes, int], bytes | None] | None = None, learning_rate: float = 0.1, local_steps: int = 2,
    quorum: float = 0.5, momentum: float = 0.0,
) -> Federation:  # fmt: skip
    train = TrainSettings(local_steps, 8, learning_rate, momentum, 1e-3)
    cohort = CohortModel(module() if model is None else model, torch.device("cpu"))
    chosen = METHODS[name].Settings() if settings is None else settings
    options: dict[str, Any] = {} if link is None else {"link": link}
    return Federation(METHODS[name], chosen, cohort, data, train, 0, cohort_size=cohort_size, quorum=quorum, **options)


def play(federation: Federation, rounds: int) -> RoundReport:
    federation.start()
    for _ in range(rounds - 1):
        federation.play_round()
    return federation.play_round()


class Tap:
    """A link that notes what passes; frames of the clients in `lost` do not arrive."""

    def __init__(self, *lost: int) -> None:
        self.frames: list[tuple[int, bytes]] = []
        self._lost = lost

    def __call__(self, frame: bytes, sender: int) -> bytes | None:
        self.frames.append((sender, frame))
        return None if sender in self._lost else frame


# --- bytes ---


@pytest.mark.parametrize("cohort_size", [0, 1, 2])
@pytest.mark.parametrize("name", METHODS)
def test_bytes_up_are_those_that_passed_the_link(name: str, cohort_size: int) -> None:
    tap = Tap()
    traffic = play(federate(name, clients((20, 30, 40)), link=tap, cohort_size=cohort_size), 1).traffic
    assert traffic.up_payload == sum(len(frame) - HEADER for _, frame in tap.frames)
    assert traffic.up_framing == HEADER * len(tap.frames)
    assert traffic.up_payload + traffic.up_framing == sum(len(frame) for _, frame in tap.frames)
    assert [sender for sender, _ in tap.frames] == [0, 1, 2] * (len(tap.frames) // 3)


# Two layers: 6 · 16 + 16 = 112 parameters, padded to 128, m = floor(12.8) = 12; 16 · 3 + 3 = 51, padded to 64, m = 6.
# T = 7 takes 3 bits a symbol: ceil(36 / 8) + ceil(18 / 8) = 5 + 3 bytes; two float32 a layer: 16 bytes.
# FedAvg: 163 float32. OBDA: 163 bits.
BY_HAND = {"pfedlms": (2, 16 + 8, 16 + 8), "fedavg": (1, 652, 652), "obda": (1, 21, 21), "local": (0, 0, 0)}


@pytest.mark.parametrize("cohort_size", [0, 1, 2])
@pytest.mark.parametrize("name", BY_HAND)
def test_bytes_by_hand_down_once_for_each_client(name: str, cohort_size: int) -> None:
    exchanges, up, down = BY_HAND[name]
    traffic = play(federate(name, clients((20, 30, 40)), cohort_size=cohort_size), 1).traffic
    framing = 3 * HEADER * exchanges
    assert traffic.as_tuple() == (3 * up, framing, 3 * down, framing, 0)
    assert traffic.total == 3 * (up + down) + 2 * framing


def test_traffic_is_of_one_round() -> None:
    federation = federate("fedavg", clients((20, 30)))
    federation.start()
    assert federation.play_round().traffic == federation.play_round().traffic


# --- messages that do not arrive ---


def test_a_lost_client_is_left_out_named_and_counted() -> None:
    """FedAvg of the two others: with a learning rate of nearly zero the round is the exchange alone."""
    data = clients((20, 30, 40))
    federation = federate("fedavg", data, link=Tap(1), learning_rate=1e-30)
    federation.start()
    state = federation.state()
    models = torch.randn(state["params"].shape, generator=torch.Generator().manual_seed(0))
    federation.load({**state, "params": models})
    with pytest.warns(UserWarning, match="round 1: client 1 is left out"):
        report = federation.play_round()
    assert report.rejected == 1
    expected = ((20 * models[0].double() + 40 * models[2].double()) / 60).float()
    for own in federation.state()["params"]:
        torch.testing.assert_close(own, expected, rtol=1e-6, atol=1e-7)


def test_lost_bytes_were_sent_all_the_same() -> None:
    tap = Tap(0)
    federation = federate("fedavg", clients((20, 30)), link=tap)
    federation.start()
    with pytest.warns(UserWarning, match="client 0"):
        traffic = federation.play_round().traffic
    assert traffic.up_payload + traffic.up_framing == sum(len(frame) for _, frame in tap.frames) == 2 * (652 + HEADER)


@pytest.mark.parametrize(("lost", "quorum", "stops"), [((0, 1), 0.5, False), ((0, 1, 2), 0.5, True), ((0,), 1.0, True)])
@pytest.mark.filterwarnings("ignore:round 1")
def test_a_round_needs_its_quorum(lost: tuple[int, ...], quorum: float, stops: bool) -> None:
    federation = federate("pfedlms", clients((20, 30, 40, 50)), link=Tap(*lost), quorum=quorum)
    federation.start()
    if stops:
        with pytest.raises(QuorumError, match=f"round 1: {4 - len(lost)} of 4 messages"):
            federation.play_round()
    else:
        assert federation.play_round().rejected == 2 * len(lost)  # two exchanges


@pytest.mark.filterwarnings("ignore:round 1")
def test_a_round_with_no_message_at_all_stops_even_without_a_quorum() -> None:
    federation = federate("fedavg", clients((20, 30)), link=Tap(0, 1), quorum=0.0)
    federation.start()
    with pytest.raises(QuorumError, match="0 of 2"):
        federation.play_round()


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


def keep_playing(federation: Federation) -> None:
    for _ in range(50):
        federation.play_round()


@pytest.mark.parametrize("name", ["local", "fedavg"])
def test_a_learning_rate_of_a_million_diverges_in_a_round_that_is_named(name: str) -> None:
    federation = federate(name, clients((20, 30, 40)), learning_rate=1e6, local_steps=1)
    federation.start()
    with pytest.raises(DivergedError) as caught:
        keep_playing(federation)
    named = re.match(r"round (\d+): .* client (\d+) ", str(caught.value))
    assert named is not None, str(caught.value)
    assert int(named[1]) == federation.rounds_played + 1
    assert int(named[2]) in range(3)


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.filterwarnings("ignore:method.strength")
def test_twenty_steps_at_a_learning_rate_of_a_million_diverge_with_every_method(name: str) -> None:
    federation = federate(name, clients((20, 30, 40)), learning_rate=1e6, local_steps=20)
    with pytest.raises(DivergedError, match=r"before round 1: .* client 0 "):
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


# --- a layer that is constant ---


class WithDeadLayer(nn.Module):
    """A layer of zeros that the output does not depend on, so it stays zero."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(FEATURES, 8)
        self.dead = nn.Linear(FEATURES, 5)
        self.head = nn.Linear(8, CLASSES)
        nn.init.zeros_(self.dead.weight)
        nn.init.zeros_(self.dead.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.body(x))) + 0.0 * self.dead(x).sum(dim=-1, keepdim=True)


@pytest.mark.parametrize("cohort_size", [0, 1])
@pytest.mark.parametrize("name", ["pfedlms", "local", "fedavg", "fedproto"])
def test_a_constant_layer_stays_what_it_is_and_harms_nothing(name: str, cohort_size: int) -> None:
    torch.manual_seed(0)
    federation = federate(name, clients((20, 30, 40)), model=WithDeadLayer(), cohort_size=cohort_size, momentum=0.9)
    report = play(federation, 5)
    measured = federation.evaluate()
    assert np.isfinite([report.loss, measured.loss]).all()
    assert measured.accuracy > 60  # three corners are easy to tell apart
    for client in range(3):
        own = federation.client_state_dict(client)
        assert all(torch.isfinite(value).all() for value in own.values())
        assert not own["dead.weight"].any()
        assert not own["dead.bias"].any()


def test_a_constant_layer_that_is_not_zero() -> None:
    """All entries equal and no gradient: its sketch has a spread, so it is pulled, but nothing becomes NaN."""
    torch.manual_seed(0)
    model = WithDeadLayer()
    nn.init.constant_(model.dead.weight, 0.5)
    nn.init.constant_(model.dead.bias, 0.5)
    federation = federate("pfedlms", clients((20, 30, 40)), model=model)
    assert np.isfinite(play(federation, 5).loss)
    assert torch.isfinite(federation.state()["params"]).all()
