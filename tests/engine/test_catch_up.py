"""Catching up: its bytes by brute force, every form bit for bit, and clients that track another model."""

from __future__ import annotations

from typing import Any

import numpy as np
import plain_client as plain
import pytest
import torch

from factories import cohort_of, digits, federation, normal, played, recorded_messages
from pfedlms.engine.catch_up import AnswerLog, CatchUp, _entry_values, fingerprints_of
from pfedlms.engine.federation import Federation
from pfedlms.engine.transport import CatchUpOrders, Code, Inbox, Record, Request, server_frame
from pfedlms.methods import METHODS
from pfedlms.wire.frames import HEADER_BYTES, SERVER, Intake

TRACKED = [
    ("stc", {"sparsity": 0.02}),
    ("stc", {"sparsity": 0.002, "gain": 2.0}),
    ("sketchmean", {"answer": 0.01}),
    ("fetchsgd", {"answer": 0.02}),
    ("fetchsgd", {"answer": 1.0}),
    ("sketchvote", {"ratio": 0.5}),
    ("obda", {}),
    ("zsign", {"downlink": "sum"}),
    ("sparseloco", {"density": 0.02}),
    ("decomfl", {"perturbations": 2, "step": 0.01}),
]
NEARLY_TRACKED = ("obcsaa", {"downlink": "sum"})  # its decoder gives clients the server's w up to the last bits


def partial_bytes(places: np.ndarray, more: int) -> int:
    """Bytes of a frame with some entries of w by the second implementation, plus `more` for other tracked values."""
    fields = plain.Count(), plain.Places(len(places)), plain.MaskedRows(1, len(places), 1)
    return HEADER_BYTES + len(plain.write_payload(fields, [[0], places, np.zeros((len(places), 1))])) + more


@pytest.mark.parametrize("cohort_size", [0, 1])
@pytest.mark.parametrize(("method", "settings"), [*TRACKED, NEARLY_TRACKED])
@pytest.mark.filterwarnings("ignore:sketchvote")
def test_an_absent_client_catches_up_in_the_fewest_bytes(
    method: str, settings: dict[str, Any], cohort_size: int
) -> None:
    """Two of 8 clients take part in a round. The expected bytes follow from every w and every answer of the run."""
    run = federation(method, digits(8), participation=0.25, cohort_size=cohort_size, **settings)
    run.start()
    bits = lambda: run.state()["server"]["model"].numpy().view(np.int32).copy()  # noqa: E731 - used twice
    history, answers, answers_known = [bits()], [], dict.fromkeys(range(8), 0)
    dim, more, used = len(history[0]), 8 if method == "sketchmean" else 0, set()
    for round in range(30):
        report = run.play_round()
        expected = 0
        for client in report.participants:
            since = answers_known[client]
            if since < round:
                changed = np.any([history[r] != history[r + 1] for r in range(since, round)], axis=0)
                forms = {
                    "answers": sum(answers[since:round]),
                    "changes": partial_bytes(changed, more),
                    "differences": partial_bytes(history[0] != history[round], more),
                    "model": HEADER_BYTES + 4 * dim + more,
                }
                expected += min(forms.values())
                used.add(min(forms, key=lambda name: forms[name]))
            answers_known[client] = round + 1
        assert report.traffic.catch_up == expected
        sent = report.traffic.down_payload + report.traffic.down_framing
        answers.append(sent // len(report.participants))
        history.append(bits())
        state, off = run.state(), 1e-6 if method == "obcsaa" else 0
        for own in state["state"]["model"]:
            torch.testing.assert_close(own, state["server"]["model"], rtol=0, atol=off)
    sparse = method in ("sketchmean", "fetchsgd", "sparseloco", "obcsaa") or settings.get("gain") == 2.0
    dense = settings.get("answer") == 1.0
    assert used == ({"model"} if dense else {"answers", "changes"} if sparse else {"answers"})


@pytest.mark.parametrize(("method", "settings"), TRACKED)
@pytest.mark.filterwarnings("ignore:sketchvote")
def test_every_form_of_catching_up_gives_the_bits_of_the_server(method: str, settings: dict[str, Any]) -> None:
    """From w⁰, from frames that are decoded again: answers, changes, differences and the model."""
    with recorded_messages() as messages:
        run = played(federation(method, digits(8), **settings), 5)
    by, server = run._terms.catch_up, run._state.server
    answers = [sent for sent in messages if sent.sender == SERVER]
    start = run._clients.start((3,))
    replayed = start
    for sent in answers:
        order = Record(Code.ANSWER, sent.round, data=sent.data)
        replayed = run._client.receive(replayed, order, run._client.read(order))
    for message in by.messages.values():
        made = one_form(by, run, message)
        received = Intake(message, run._terms.digest, 4, (SERVER,)).accept(made)
        # Differences from w⁰ and the model also serve a client with any other model.
        before = start if message is by.changes else start.with_state(model=normal(1, start.params.shape[1], seed=7))
        after = by.receive(before, message, received)
        for name in ("model", *by._tracked):
            assert after.state[name].numpy().tobytes() == server[name].cpu().numpy().tobytes()
            assert replayed.state[name].numpy().tobytes() == server[name].cpu().numpy().tobytes()


def one_form(by: CatchUp, run: Federation, message: Any) -> bytes:
    """The frame of one form, also if another has fewer bytes."""
    server = {name: value.cpu().numpy() for name, value in run._state.server.items()}
    w, tracked = server["model"], {name: server[name] for name in by._tracked}
    if message is by.model:
        return server_frame(message, {"model": w, **tracked}, 4, run._terms.digest)
    places = w.view(np.int32) != run.method.task.initial.numpy().view(np.int32)
    return server_frame(message, {**_entry_values(w, places, 0), **tracked}, 4, run._terms.digest)


@pytest.mark.parametrize("method", ["stc", "sketchmean"])
def test_answers_do_not_correct_a_client_with_another_model(method: str) -> None:
    """A simulation copies the server's w if the client's own was right; otherwise it computes the client's result."""
    run = played(federation(method, digits(5)), 4)
    state = run._state
    off = run._clients.start((0, 1))
    wrong = off.state["model"].clone()
    wrong[1, 0] += 1.0
    answers = tuple(Record(Code.ANSWER, number, data=data) for number, data in state.log.frames.items())
    first = fingerprints_of(run.method.task.initial[None])[0]
    request = Request((0, 1), (Record(Code.SEND, 4),), catch_up=(CatchUpOrders((0, 1), answers, first, state.server),))
    for models in (off.state["model"], wrong):
        (after,) = run._transport.catch_up(request, [off.with_state(model=models)], Inbox())
        assert torch.equal(after.state["model"][0], state.server["model"])
        same = torch.equal(after.state["model"][1], state.server["model"])
        assert same == (models is not wrong)


def test_different_models_have_different_fingerprints() -> None:
    """Also if they differ in the sign of a zero, or in the order of two entries."""
    model = normal(1, 50, seed=1)
    swapped, negative, zero = model.clone(), model.clone(), model.clone()
    swapped[0, [3, 4]], negative[0, 7], zero[0, 7] = model[0, [4, 3]], -0.0, 0.0
    found = fingerprints_of(torch.cat([model, swapped, negative, zero]))
    assert len(set(found)) == 4
    assert found[0] == fingerprints_of(cohort_of(model).params)[0]


def test_answers_are_kept_while_they_have_fewer_bytes_than_the_model() -> None:
    w = torch.zeros(3)
    answers = AnswerLog(100, {}, torch.zeros(3, dtype=torch.int32), {})
    for round in range(10):
        answers = answers.with_answer(round, bytes(30), w, w)
    assert sorted(answers.frames) == [7, 8, 9]
    assert answers.missed(7, 10) == {7: bytes(30), 8: bytes(30), 9: bytes(30)}
    assert answers.missed(9, 10) == {9: bytes(30)}
    assert answers.missed(6, 10) is None
    answers = answers.with_answer(10, bytes(200), w, w)
    assert answers.missed(9, 11) is None


def test_methods_that_need_only_the_current_answer_never_catch_up() -> None:
    for method in set(METHODS) - {name for name, _ in (*TRACKED, NEARLY_TRACKED)}:
        run = federation(method, digits(8), participation=0.4)
        assert sum(run.play_round().traffic.catch_up for _ in range(6)) == 0


@pytest.mark.parametrize("method", ["obda", "stc", "sketchvote", "sketchmean"])
def test_clients_catch_up_over_a_lossy_link(method: str) -> None:
    """Three of eight clients in a round; a tenth of all messages is lost. All frames for catching up are lost together,
    so that a client takes part with a probability of at least 0.9 · 0.9, however long it was absent."""
    run, reports = federation(method, digits(8), participation=0.4, lost=0.1, quorum=0.1), []
    for _ in range(50):
        reports.append(run.play_round())
        state = run.state()
        assert (state["state"]["model"] == state["server"]["model"]).all()
    assert sum(len(report.participants) for report in reports[20:]) > 0.7 * 30 * 3
    assert sum(report.rejected for report in reports) > 0
    assert sum(report.unheard for report in reports) > 0
