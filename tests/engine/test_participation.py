"""Rounds with some of the clients: the draw, lost answers, absent clients, and the evaluation of all clients."""

from __future__ import annotations

from copy import deepcopy
from functools import partial

import pytest
import torch

import factories
import plain_loops
from factories import digits, digits_module, played, same
from pfedlms import rng
from pfedlms.engine.participation import Participation
from pfedlms.errors import QuorumError
from pfedlms.methods import METHODS
from pfedlms.wire import packed_size
from pfedlms.wire.frames import HEADER_BYTES

CLIENTS = 8
PARTICIPANTS = 3  # max(1, round(0.4 · 8))
federate = partial(factories.federation, data=digits(CLIENTS))
sampled = partial(federate, participation=0.4)


# --- the draw of participants


def test_participants_are_drawn_from_their_stream() -> None:
    """Without replacement, from the stream (seed, "participants", phase): the order that sorts its words."""
    who = Participation(10, 0.3, seed=7)
    for phase in range(5):
        words = rng.words(rng.stream(7, "participants", phase), 10).tolist()
        assert who.of(phase) == tuple(sorted(sorted(range(10), key=lambda k: words[k])[:3]))
    assert len({who.of(phase) for phase in range(20)}) > 10


@pytest.mark.parametrize(("clients", "share", "count"), [(10, 0.3, 3), (10, 1e-9, 1), (3, 0.5, 2), (7, 0.999, 7)])
def test_the_number_of_participants_is_rounded(clients: int, share: float, count: int) -> None:
    who = Participation(clients, share, seed=0)
    assert who.count == count
    assert len(set(who.of(4))) == count


def test_a_sum_of_signs_counts_up_to_the_number_of_participants() -> None:
    federation = sampled("zsign", downlink="sum")
    dim = federation.model.layout.dim
    assert federation.play_round().traffic.down_payload == PARTICIPANTS * (packed_size(dim, PARTICIPANTS + 1) + 4)


# --- lost answers


@pytest.mark.filterwarnings("ignore:round")
@pytest.mark.parametrize("method", [name for name in METHODS if name != "local"])
def test_a_client_that_loses_the_answer_is_absent_from_the_phase(method: str) -> None:
    """Client 1 receives no answer in round 2: it keeps its state, is not evaluated, and takes part in round 3."""
    lost = {"now": False}
    link = lambda data, client: None if lost["now"] and client == 1 else data  # noqa: E731
    federation = played(federate(method, answer_link=link, momentum=0.5), 1)
    before = deepcopy(federation.state())
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
        (back,) = federation._clients.take((1,), ())
        assert not kept["momentum"].numel() or torch.equal(back.momentum[0], before["momentum"][1])
    assert report.unheard == len(federation.method.exchanges[:1])
    assert federation.play_round().participants == tuple(range(CLIENTS))


@pytest.mark.filterwarnings("ignore:round")
@pytest.mark.parametrize("method", ["fedavg", "pfedlms", "obda"])
def test_an_answer_that_reaches_no_client_is_an_error(method: str) -> None:
    federation = played(sampled(method, answer_link=lambda data, client: None), 0)
    before = deepcopy(federation.state())
    with pytest.raises(QuorumError, match="round 1: the server reached no client"):
        federation.play_round()
    assert federation.rounds_played == 0
    assert torch.equal(federation.state()["params"], before["params"])


# --- evaluation of all clients


@pytest.mark.parametrize("method", METHODS)
def test_everyone_is_evaluated_after_the_last_answer_and_local_steps(method: str) -> None:
    """The state of the run does not change, and participants have the result of `evaluate`."""
    federation = played(sampled(method, momentum=0.9), 4)
    before, data = deepcopy(federation.state()), federation.data
    drawn = {client for phase in range(5) for client in federation.participation.of(phase)}
    # Each is present or absent, and clients that were never drawn have no stored state.
    assert sorted([*before["away"]["ids"].tolist(), *before["trained"]]) == sorted(drawn)
    everyone, participants = federation.evaluate_everyone(), federation.evaluate()
    assert everyone.ids == tuple(range(CLIENTS))
    for client, correct in zip(participants.ids, participants.correct, strict=True):
        assert everyone.correct[client] == correct
    assert same(federation.state(), before)
    if federation.method.tracks:  # the server's w, after the last answer and before local steps
        copies = [own for cohort in federation._all_clients(trains=False) for own in cohort.state["model"]]
        assert all(torch.equal(own, before["server"]["model"]) for own in copies)
    models = dict(federation.models())
    assert sorted(models) == list(range(CLIENTS))
    for client in range(CLIENTS):
        alone = federation.client_state_dict(client)
        assert same(alone, models[client])
        module = digits_module()
        module.load_state_dict(alone)
        held = torch.from_numpy(data.test[client])
        with torch.no_grad():
            right = int((module(data.x[held]).argmax(dim=1) == data.y[held]).sum())
        assert right == everyone.correct[client]


def test_absent_clients_are_evaluated_one_cohort_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies of all clients at once may not fit in memory."""
    federation = played(sampled("fedavg", cohort_size=2), 2)
    calls: list[str] = []
    train, evaluate = federation._after_last_phase, federation._worker.evaluate
    monkeypatch.setattr(federation, "_after_last_phase", lambda *given: calls.append("train") or train(*given))
    monkeypatch.setattr(federation._worker, "evaluate", lambda *given: calls.append("evaluate") or evaluate(*given))
    federation.evaluate_everyone()
    assert calls == 2 * ["evaluate"] + 3 * ["train", "evaluate"]  # 3 present, 5 absent, two at a time


def test_absent_clients_of_fedavg_are_evaluated_from_the_last_average() -> None:
    federation = played(plain_loops.federate("fedavg", participation=plain_loops.SHARE), 3)
    absent = next(k for k in range(plain_loops.CLIENTS) if k not in federation.evaluate().ids)
    answer = torch.frombuffer(bytearray(federation.state()["last"][0][HEADER_BYTES:]), dtype=torch.float32)
    expected = plain_loops.Loop(federation.data).steps(answer.double(), absent, 3)
    got = torch.cat([value.reshape(-1) for value in federation.client_state_dict(absent).values()])
    torch.testing.assert_close(got.double(), expected, rtol=0, atol=2e-6)
