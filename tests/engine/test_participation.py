"""Rounds with only some of the clients: who takes part, who hears what, and how those who were away catch up."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import factories
import plain_loops
from factories import played, same, seeded
from pfedlms import rng
from pfedlms.data import FederatedData
from pfedlms.engine import Federation
from pfedlms.engine.catch_up import Answers
from pfedlms.engine.participation import Participation
from pfedlms.errors import QuorumError
from pfedlms.methods import METHODS
from pfedlms.models import CohortModel
from pfedlms.wire import packed_size
from pfedlms.wire.frames import HEADER_BYTES

CLIENTS, SEED, STEPS, BATCH, RATE, DECAY = 8, 5, 3, 16, 0.1, 1e-3
SHARE = 0.4
TAKING_PART = 3  # max(1, round(0.4 · 8))


@pytest.fixture
def digits() -> FederatedData:
    return factories.digits(CLIENTS)


def network() -> nn.Module:
    return seeded(lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 12), nn.ReLU(), nn.Linear(12, 10)), 1)


def federate(method: str, data: FederatedData, share: float = SHARE, **given: Any) -> Federation:
    train = {"local_steps": STEPS, "batch_size": BATCH, "learning_rate": RATE, "weight_decay": DECAY}
    return factories.federation(method, data, network(), seed=SEED, participation=share, **train, **given)


# --- who takes part


def test_the_draw_by_the_book() -> None:
    """Without replacement, from the stream (seed, "participants", phase): the order that sorts its words."""
    who = Participation(10, 0.3, seed=7)
    for phase in range(5):
        words = rng.words(rng.stream(7, "participants", phase), 10).tolist()
        assert who.of(phase) == tuple(sorted(sorted(range(10), key=lambda k: words[k])[:3]))
    assert len({who.of(phase) for phase in range(20)}) > 10


@pytest.mark.parametrize(
    ("clients", "share", "count"), [(10, 0.3, 3), (10, 1e-9, 1), (1, 0.2, 1), (3, 0.5, 2), (20, 1.0, 20), (7, 0.999, 7)]
)
def test_how_many(clients: int, share: float, count: int) -> None:
    who = Participation(clients, share, seed=0)
    assert who.count == count
    assert len(set(who.of(4))) == count


# --- what travels


@pytest.mark.parametrize("method", [name for name in METHODS if name != "local"])
def test_bytes_are_those_of_the_participants(method: str, digits: FederatedData) -> None:
    part, whole = federate(method, digits), federate(method, digits, 1.0)
    one, all_of_them = part.play_round().traffic, whole.play_round().traffic
    assert all_of_them.up_framing == CLIENTS * HEADER_BYTES * len(part.method.exchanges)
    for name in ("up_framing", "down_framing"):
        assert getattr(one, name) * CLIENTS == getattr(all_of_them, name) * TAKING_PART
    if method not in ("fedproto", "stc"):  # whose messages follow what a client holds, or which entries are largest
        assert one.up_payload * CLIENTS == all_of_them.up_payload * TAKING_PART
        if method not in SPARSE:
            assert one.down_payload * CLIENTS == all_of_them.down_payload * TAKING_PART
    assert all_of_them.catch_up == 0


def test_the_alphabet_of_a_sum_is_that_of_the_participants(digits: FederatedData) -> None:
    federation = federate("zsign", digits, downlink="sum")
    dim = federation.model.layout.dim
    assert federation.play_round().traffic.down_payload == TAKING_PART * (packed_size(dim, TAKING_PART + 1) + 4)


# --- catching up

TRACKED = [
    ("obda", {}),
    ("zsign", {"downlink": "sum"}),
    ("stc", {}),
    ("sketchvote", {"ratio": 1.0}),
    ("sketchmean", {}),
    ("fetchsgd", {}),
    ("sparseloco", {}),
    ("decomfl", {}),
    ("obcsaa", {"downlink": "sum"}),
]
SPARSE = ("stc", "sketchmean", "fetchsgd", "sparseloco")


def models_of(federation: Federation) -> dict[int, Tensor]:
    """w as every client that ever took part knows it."""
    state = federation.state()
    known = dict(zip(state["trained"], state["state"]["model"], strict=True))
    if state["away"]:
        known |= dict(zip(state["away"]["ids"].tolist(), state["away"]["state"]["model"], strict=True))
    return known


class Absent:
    """All take part but one client, for some phases."""

    count = CLIENTS

    def __init__(self, client: int, phases: range) -> None:
        self._client, self._phases = client, phases

    def of(self, phase: int) -> tuple[int, ...]:
        return tuple(k for k in range(CLIENTS) if k != self._client or phase not in self._phases)


@pytest.mark.parametrize(("missed", "cohort_size"), [(3, 0), (10, 3), (40, 0)])
@pytest.mark.parametrize(("method", "settings"), TRACKED[:-1])
def test_a_client_that_was_away_has_the_bits_of_one_that_stayed(
    method: str, settings: dict[str, Any], cohort_size: int, missed: int, digits: FederatedData
) -> None:
    """By the answers it missed, or by the model, whichever is fewer bytes: worked out from the frames' sizes, which are
    the same in every round but for methods that change few entries. (Those take fewer still: test_catch_up.py.)"""
    federation = federate(method, digits, 1.0, cohort_size=cohort_size, **settings)
    federation.participation = Absent(2, range(2, 2 + missed))
    dim = federation.model.layout.dim
    # sketchvote: all 1,024 + 256 rows of two padded layers, and a float each.
    payload = {"obda": packed_size(dim, 2), "zsign": packed_size(dim, CLIENTS + 1) + 4, "sketchvote": 1280 // 8 + 8}
    payload["decomfl"] = 4 * 10  # one update along ten directions
    answer = HEADER_BYTES + payload.get(method, 0)
    model, answers = HEADER_BYTES + 4 * dim, 0
    for round in range(missed + 3):
        report = federation.play_round()
        away = 1 <= round <= missed
        assert (2 in report.participants) == (not away)
        expected = min(answers, model) if round == missed + 1 else 0
        assert report.traffic.catch_up == expected or (method in SPARSE and 0 < report.traffic.catch_up < expected)
        if away:
            sent = report.traffic.down_payload + report.traffic.down_framing
            assert method in SPARSE or sent == answer * len(report.participants)
            answers += sent // len(report.participants)
        known = models_of(federation)
        server = federation.state()["server"]["model"]
        assert all(torch.equal(own, server) for client, own in known.items() if client != 2 or not away)
        assert torch.equal(known[2], server) == (not away)
    by_model = {"obda": missed > 31, "zsign": missed > 7, "sketchvote": missed > 17}
    assert (answers > model) == by_model.get(method, False)  # 1, about 3.2, 0.1 and 1.8 bits against 32


@pytest.mark.parametrize(("method", "settings"), TRACKED)
def test_sampled_clients_track_the_model(method: str, settings: dict[str, Any], digits: FederatedData) -> None:
    federation = federate(method, digits, **settings)
    caught_up = 0
    for _ in range(12):
        report = federation.play_round()
        caught_up += report.traffic.catch_up
        known, server = models_of(federation), federation.state()["server"]["model"]
        for client in report.participants:
            torch.testing.assert_close(known[client], server, rtol=0, atol=0 if method != "obcsaa" else 1e-6)
    assert caught_up > 0


def test_methods_that_need_only_the_current_answer_never_catch_up(digits: FederatedData) -> None:
    for method in set(METHODS) - {name for name, _ in TRACKED}:
        federation = federate(method, digits)
        assert sum(federation.play_round().traffic.catch_up for _ in range(6)) == 0


def test_answers_are_kept_as_long_as_they_are_fewer_bytes_than_the_model() -> None:
    w = torch.zeros(3)
    answers = Answers(w, model_bytes=100)
    for round in range(10):
        answers.add(round, bytes(30), w, w)
    assert sorted(answers.frames) == [7, 8, 9]
    assert answers.missed(7, 10) == {7: bytes(30), 8: bytes(30), 9: bytes(30)}
    assert answers.missed(9, 10) == {9: bytes(30)}
    assert answers.missed(6, 10) is None
    answers.add(10, bytes(200), w, w)
    assert answers.missed(9, 11) is None


# --- losses


@pytest.mark.filterwarnings("ignore:round")
@pytest.mark.parametrize("method", METHODS)
def test_who_loses_the_answer_sits_the_phase_out(method: str, digits: FederatedData) -> None:
    """Client 1 hears nothing in round 2: it keeps what it has, is not measured, and is back after that."""
    if method == "local":
        pytest.skip("hears nothing")
    lost = {"now": False}
    way = lambda data, client: None if lost["now"] and client == 1 else data  # noqa: E731
    federation = played(federate(method, digits, 1.0, answer_link=way), 1)
    before = federation.state()
    lost["now"] = True
    report = federation.play_round()
    lost["now"] = False
    assert report.participants == tuple(k for k in range(CLIENTS) if k != 1)
    assert federation.evaluate().ids == report.participants
    kept = federation.state()["away"]
    assert kept["ids"].tolist() == [1]
    if federation.method.personal:  # its model, or the part of it that the answer does not replace
        parts = kept["state"] or {"params": kept["params"]}
        assert all(torch.equal(own[0], (before["state"] | before)[name][1]) for name, own in parts.items())
    assert report.unheard == len(federation.method.exchanges[:1])
    assert federation.play_round().participants == tuple(range(CLIENTS))


@pytest.mark.parametrize("method", ["local", "fedavg", "pfedlms", "sketchvote"])
def test_losses_both_ways_are_counted_and_repeatable(method: str, digits: FederatedData) -> None:
    runs = []
    for _ in range(2):
        federation = federate(method, digits, 0.8, lost=0.25, quorum=0.1)
        reports = [federation.play_round() for _ in range(8)]
        runs.append([(r.participants, r.loss, r.traffic, r.rejected, r.unheard) for r in reports])
    assert runs[0] == runs[1]
    if method != "local":
        assert sum(run[3] for run in runs[0]) > 0
        assert sum(run[4] for run in runs[0]) > 0
        assert all(len(run[0]) <= 6 for run in runs[0])


@pytest.mark.parametrize(("method", "settings"), TRACKED[:5])
def test_who_has_missed_much_still_catches_up_over_a_link_that_loses(
    method: str, settings: dict[str, Any], digits: FederatedData
) -> None:
    """Three of eight clients a round, a tenth of all that is sent lost. What a client is sent to catch up is lost
    together, so that nobody takes part with a probability below 0.9 · 0.9, however long it was away."""
    federation = federate(method, digits, 0.4, lost=0.1, quorum=0.1, **settings)
    took_part = [len(federation.play_round().participants) for _ in range(50)]
    assert sum(took_part[20:]) > 0.7 * 30 * 3


@pytest.mark.filterwarnings("ignore:round")
@pytest.mark.parametrize("method", ["fedavg", "pfedlms", "obda", "zsign"])
@pytest.mark.parametrize(
    ("way", "message"),
    [
        ({"lost": 1.0}, r"0 of 3 messages were valid, expected at least run\.quorum = 0\.5"),
        ({"answer_link": lambda data, client: None}, "the server's answer reached no client"),
    ],
)
def test_a_link_that_loses_everything_is_a_clear_error(
    method: str, way: dict[str, Any], message: str, digits: FederatedData
) -> None:
    federation = played(federate(method, digits, **way), 0)
    before = federation.state()
    with pytest.raises(QuorumError, match=f"round 1: {message}"):
        federation.play_round()
    assert federation.rounds_played == 0
    assert torch.equal(federation.state()["params"], before["params"])


# --- everyone, and going on


@pytest.mark.parametrize("method", METHODS)
def test_everyone_hears_and_trains_on_copies(method: str, digits: FederatedData) -> None:
    """Nothing changes by it, and what was measured of participants is what `evaluate` says of them."""
    federation = played(federate(method, digits, momentum=0.9), 4)
    before = federation.state()
    everyone, part = federation.everyone(), federation.evaluate()
    assert everyone.ids == tuple(range(CLIENTS))
    for client, correct in zip(part.ids, part.correct, strict=True):
        assert everyone.correct[client] == correct
    assert same(federation.state(), before)
    models = dict(federation.models())
    assert sorted(models) == list(range(CLIENTS))
    for client in range(CLIENTS):
        alone = federation.client_state_dict(client)
        assert all(torch.equal(alone[name], value) for name, value in models[client].items())
        module = network()
        module.load_state_dict(alone)
        held = torch.from_numpy(digits.test[client])
        with torch.no_grad():
            right = int((module(digits.x[held]).argmax(dim=1) == digits.y[held]).sum())
        assert right == everyone.correct[client]


def test_everyone_is_brought_up_some_at_a_time(digits: FederatedData, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies of all clients at once may not fit where their participants do."""
    federation = played(federate("fedavg", digits, cohort_size=2), 2)
    happened: list[str] = []
    brought_up, evaluate = federation._on_copies, federation._worker.evaluate
    monkeypatch.setattr(federation, "_on_copies", lambda *given: happened.append("brought up") or brought_up(*given))
    monkeypatch.setattr(federation._worker, "evaluate", lambda *given: happened.append("evaluated") or evaluate(*given))
    federation.everyone()
    assert happened == 2 * ["evaluated"] + 3 * ["brought up", "evaluated"]  # 3 present, 5 away, two at a time


def test_everyone_of_fedavg_starts_from_the_last_average() -> None:
    federation = played(plain_loops.federate("fedavg", participation=SHARE), 3)
    away = next(k for k in range(plain_loops.CLIENTS) if k not in federation.evaluate().ids)
    answer = torch.frombuffer(bytearray(federation.state()["last"][0][HEADER_BYTES:]), dtype=torch.float32)
    expected = plain_loops.Loop(federation.data).steps(answer.double(), away, 3)
    got = torch.cat([value.reshape(-1) for value in federation.client_state_dict(away).values()])
    torch.testing.assert_close(got.double(), expected, rtol=0, atol=2e-6)


def test_with_full_participation_everyone_is_the_last_evaluation(digits: FederatedData) -> None:
    federation = played(federate("pfedlms", digits, 1.0), 2)
    assert federation.everyone() == federation.evaluate()


@pytest.mark.parametrize("method", METHODS)
def test_a_resumed_federation_goes_on_byte_for_byte(method: str, digits: FederatedData) -> None:
    """With absent clients and messages that are lost; with all of them in test_battery.py."""
    settings = {"downlink": "sum"} if method in ("zsign", "obcsaa") else {}
    options = {"lost": 0.15, "quorum": 0.1, "momentum": 0.5, **settings}
    straight = played(federate(method, digits, 0.7, **options), 9)
    first = played(federate(method, digits, 0.7, **options), 5)
    second = federate(method, digits, 0.7, **options)
    second.load(first.state())
    assert second.everyone() == first.everyone()
    assert same(played(second, 4).state(), straight.state())
    assert second.everyone() == straight.everyone()


@pytest.mark.filterwarnings("ignore:sketchvote")
def test_what_is_kept_is_what_the_method_needs(digits: FederatedData) -> None:
    """Personal models, tracked models, residuals; nothing of a model that is replaced, or of clients never drawn."""
    dim = CohortModel(network(), torch.device("cpu")).layout.dim
    for method, settings, floats in [
        ("local", {}, dim), ("pfedlms", {}, dim), ("fedavg", {}, 0), ("eden", {}, 0), ("zsign", {}, 0),
        ("zsign", {"downlink": "sum"}, dim), ("obda", {}, dim), ("stc", {}, 2 * dim),
        ("sketchvote", {}, 2 * dim + 1),
    ]:  # fmt: skip
        federation = played(federate(method, digits, 0.13, **settings), 3)
        drawn = {client for phase in range(4) for client in federation.participation.of(phase)}
        state = federation.state()
        kept = state["away"]
        assert {*kept["ids"].tolist(), *state["trained"]} == drawn
        tensors = [kept["params"], kept["momentum"], *kept["buffers"].values(), *kept["state"].values()]
        assert sum(value[0].numel() for value in tensors) == floats
