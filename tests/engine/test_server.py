"""The server alone: its requests depend only on its state."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import factories
from factories import CLIENTS, federation
from pfedlms.engine import Federation
from pfedlms.engine.server import OUT_OF_SYNC, ServerState
from pfedlms.engine.terms import method_digest
from pfedlms.engine.transport import Code, Flag, Request
from pfedlms.methods import METHODS
from pfedlms.settings import shared_settings

EVERYONE = tuple(range(CLIENTS))


def played(method: str, rounds: int = 2, **options: Any) -> Federation:
    return factories.played(federation(method, **options), rounds)


def orders_of(request: Request) -> list[tuple[Code, int, int]]:
    return [(order.code, order.number, order.index) for order in request.orders]


def states_of_a_round(run: Federation) -> list[ServerState]:
    """The server's states before each trip of a round."""
    found, state = [], run._state
    while state.round == run.rounds_played:
        found.append(state)
        state = run._make_trip(state)
    return found


BY_HAND = {
    "local": [[(Code.TRAIN, 3, 0)]],
    "fedavg": [[(Code.SEND, 2, 0)], [(Code.ANSWER, 2, 0), (Code.TRAIN, 3, 0)]],
    "pfedlms": [
        [(Code.SEND, 2, 0)],
        [(Code.ANSWER, 2, 0), (Code.SEND, 2, 1)],
        [(Code.ANSWER, 2, 1), (Code.TRAIN, 3, 0)],
    ],
}


@pytest.mark.parametrize("method", BY_HAND)
def test_the_orders_of_round_three_by_hand(method: str) -> None:
    run = played(method)
    outboxes = [run._server.outbox(state) for state in states_of_a_round(run)]
    assert [list(map(orders_of, outbox)) for outbox in outboxes] == [[orders] for orders in BY_HAND[method]]
    assert all(request.clients == EVERYONE for outbox in outboxes for request in outbox)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("participation", [1.0, 0.5])
def test_the_outbox_is_a_function_of_the_state_and_survives_a_checkpoint(method: str, participation: float) -> None:
    """For all trips of a round: computed twice, and from a state that was saved and loaded."""
    run = played(method, 3, participation=participation)
    for state in states_of_a_round(run):
        outbox = run._server.outbox(state)
        assert run._server.outbox(state) == outbox
        assert run._server.outbox(run._server.restore(state.checkpoint())) == outbox


@pytest.mark.parametrize(("known", "by_model"), [(0, False), (OUT_OF_SYNC, True)])
def test_a_client_that_missed_answers_is_sent_them_or_the_model(known: int, by_model: bool) -> None:
    """sketchvote after two rounds: one client has received no answer, or is out of sync."""
    run = played("sketchvote")
    _, end = states_of_a_round(run)
    behind = replace(end, answers_known={**end.answers_known, 3: known})
    (request,) = run._server.outbox(behind)
    (missed,) = request.catch_up
    orders = missed.orders
    assert missed.clients == (3,)
    assert [(order.code, order.number) for order in orders] == (
        [(Code.MODEL, 1)] if by_model else [(Code.ANSWER, 0), (Code.ANSWER, 1)]
    )
    if by_model:
        model = torch.frombuffer(bytearray(orders[0].data[40:]), dtype=torch.float32)
        assert torch.equal(model, end.server["model"])
        assert orders[0].flags == Flag.FORCED


def test_impossible_reports_of_known_answers_are_ignored() -> None:
    run = played("sketchvote")
    state = replace(run._state, answers_known={0: 2, 1: OUT_OF_SYNC, 2: OUT_OF_SYNC, 3: 2})
    inbox = run._server.inbox(state, ())
    inbox.answers_known = {0: 4, 1: 2, 2: 2, 3: 0}  # impossible; failed; received the model; lost its state
    inbox.failed = {1: "no reply"}
    assert run._server.step(state, inbox).answers_known == {0: 2, 1: OUT_OF_SYNC, 2: 2, 3: 0}


@pytest.mark.parametrize(("method", "key", "value"), [("pfedlms", "absolute", True), ("obcsaa", "decoder", "biht")])
def test_optional_settings_are_in_the_digest_only_if_they_are_used(method: str, key: str, value: Any) -> None:
    """Without them the digest is that of the stored vectors, which are older."""
    plain, own = (federation(method, **settings).method for settings in ({}, {key: value}))
    assert key not in shared_settings(plain.settings)
    assert shared_settings(own.settings)[key] == value
    assert method_digest(plain) != method_digest(own)
