"""Nodes that are away, come late, lose their disk or track another model, and rounds in which too few answer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from fleet import CLIENTS, Fleet, Route, check_same_run, check_states, make_config, serve_run, simulate_without

from pfedlms.deploy.coordinator import serve_with_retries
from pfedlms.deploy.envelope import Code, Reason, decode, refusal
from pfedlms.errors import QuorumError

AWAY = 2


def away_in(trips: range, known: bool) -> Route:
    """A way on which one client cannot be reached, which who carries messages may know."""

    def route(client: int, request: bytes, handle: Callable[[bytes], bytes]) -> bytes | None:
        if client == AWAY and decode(request).trip in trips:
            return refusal(decode(request), Reason.FAILED, "its node is gone") if known else None
        return handle(request)

    return route


def check_same_model(fleet: Fleet, *names: str) -> None:
    states = [fleet.node(client).state.cohort.state for client in range(CLIENTS)]
    assert all(torch.equal(own[name], states[0][name]) for own in states for name in names)


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("method", ["sketchvote", "stc", "obda"])
def test_a_node_that_was_away_has_the_bits_of_one_that_stayed(method: str, known: bool, tmp_path: Path) -> None:
    """Away for five rounds: it is sent the answers it missed, and is left out of the exchange after them, too; also
    where who carries messages knows that it is away, and refuses in its place."""
    config = make_config(method, tmp_path / "run", train={"rounds": 9})
    fleet = Fleet(config, tmp_path / "nodes", away_in(range(2, 7), known))
    why = "refused, failed: its node is gone" if known else "no reply within 600 s"
    with pytest.warns(UserWarning, match=f"round 2: client {AWAY} is left out: {why}"):
        _, metrics = serve_run(config, fleet)
    check_same_model(fleet, "model")
    caught = [each["bytes"]["catch_up"] for each in metrics]
    assert caught[0] == 0
    assert caught[-1] > 0
    assert fleet.node(AWAY).state.answers_known == 9
    assert [str(AWAY) in each["left_out"] for each in metrics] == [1 <= number < 7 for number in range(9)]
    if method != "obda":  # whose messages are asked for one round ahead
        expected, federation = simulate_without(config, AWAY, range(2, 7))
        assert [each["p_acc"] for each in metrics] == [each["p_acc"] for each in expected]
        back = decode(fleet.trips[7][AWAY][0]).records
        # Of stc few entries change in five rounds: those are fewer bytes than the answers of rounds 1 to 5.
        ways = {code: [each.number for each in back if each.code == code] for code in (Code.MODEL, Code.ANSWER)}
        few = method == "stc"
        assert ways == {Code.MODEL: [5] * few, Code.ANSWER: [6] if few else [1, 2, 3, 4, 5, 6]}
        check_states(fleet, federation)
        if known:  # nothing goes where nobody is
            assert [each["bytes"] for each in metrics] == [each["bytes"] for each in expected]
            assert metrics[-1]["transport"] == fleet.transport_bytes(AWAY, range(2, 7))


@pytest.mark.filterwarnings("ignore:round")
@pytest.mark.parametrize("method", ["sketchvote", "pfedlms", "fedavg"])
def test_a_free_place_is_taken_later(method: str, tmp_path: Path) -> None:
    config = make_config(method, tmp_path / "run", train={"rounds": 5})

    def route(client: int, request: bytes, handle: Callable[[bytes], bytes]) -> bytes | None:
        return None if client == AWAY and decode(request).round < 2 else handle(request)

    fleet = Fleet(config, tmp_path / "nodes", route)
    _, metrics = serve_run(config, fleet)
    assert [len(each["client_acc"]) for each in metrics][:2] == [3, 3]
    assert len(metrics[-1]["client_acc"]) == CLIENTS
    if method == "sketchvote":
        check_states(fleet, simulate_without(config, AWAY, range(3))[1])


@pytest.mark.parametrize("method", ["sketchmean", "stc", "sketchvote"])
def test_a_node_that_lost_its_disk_is_sent_what_it_lacks_and_goes_on(method: str, tmp_path: Path) -> None:
    """It refuses the next answer, because it knows none. Then it is sent all of them, or what they have changed."""
    config = make_config(method, tmp_path / "run", train={"rounds": 7})

    def route(client: int, request: bytes, handle: Callable[[bytes], bytes]) -> bytes | None:
        if client == AWAY and decode(request).trip == 4:
            fleet.lose(AWAY)
        return handle(request)

    fleet = Fleet(config, tmp_path / "nodes", route)
    with pytest.warns(UserWarning, match=f"round 4: client {AWAY} is left out: refused, order"):
        _, metrics = serve_run(config, fleet)
    back = [each.code for each in decode(fleet.trips[5][AWAY][0]).records]
    assert back[:2] == [Code.ANSWER if method == "sketchvote" else Code.MODEL, Code.ANSWER]
    assert [sorted(each["left_out"]) for each in metrics] == [[]] * 3 + [[str(AWAY)]] * 2 + [[]] * 2
    assert metrics[4]["bytes"]["catch_up"] == metrics[6]["bytes"]["catch_up"] > 0
    check_same_model(fleet, *(("model", "scale") if method == "sketchmean" else ("model",)))
    assert {fleet.node(client).state.answers_known for client in range(CLIENTS)} == {7}


def test_a_node_that_tracks_another_model_is_left_out_and_sent_this_one(tmp_path: Path) -> None:
    config = make_config("sketchvote", tmp_path / "run", train={"rounds": 6}, method={"check_every": 1})

    def route(client: int, request: bytes, handle: Callable[[bytes], bytes]) -> bytes | None:
        if client == AWAY and decode(request).trip == 2:
            fleet.node(AWAY).state.cohort.state["model"][0, 5] += 1.0
        return handle(request)

    fleet = Fleet(config, tmp_path / "nodes", route)
    with pytest.warns(UserWarning, match="client 2 is left out of this exchange: it tracks another model"):
        _, metrics = serve_run(config, fleet)
    assert metrics[-1]["astray"] == 1
    check_same_model(fleet, "model")


@pytest.mark.filterwarnings("ignore:round")
def test_too_few_is_a_clear_error_and_the_run_goes_on_once_they_are_back(tmp_path: Path) -> None:
    config = make_config("pfedlms", tmp_path / "run")
    gone = [True]

    def route(client: int, request: bytes, handle: Callable[[bytes], bytes]) -> bytes | None:
        said = handle(request)
        return None if gone[0] and client > 0 and decode(request).trip == 1 else said

    fleet = Fleet(config, tmp_path / "nodes", route)
    for _ in range(2):
        with pytest.raises(QuorumError, match="round 1: 1 of 4 messages were valid"):
            serve_run(config, fleet)
    gone[0] = False
    serve_run(config, fleet)
    check_same_run(fleet)


@pytest.mark.parametrize(
    ("rounds", "left"), [([0, 0, 3, 3, 7, 7], [2, 1, 2, 1, 2, 1]), ([2, 5, 5, 5], [2, 2, 1])], ids=["ends", "is stuck"]
)
def test_a_round_is_tried_again_and_one_that_was_played_gives_all_attempts_back(
    rounds: list[int], left: list[int]
) -> None:
    """Too few answer after so many rounds, then the run ends; the same round is not tried forever."""
    said, played = list[str](), iter(rounds)

    def serve(played: Iterator[int]) -> None:
        if (number := next(played, None)) is not None:
            error = QuorumError("too few")
            error.summary = {"rounds": number}
            raise error

    if len(rounds) == len(left):
        serve_with_retries(lambda: serve(played), 3, said.append)
    else:
        with pytest.raises(QuorumError, match="too few"):
            serve_with_retries(lambda: serve(played), 3, said.append)
    assert [line[-15:] for line in said] == [f"{each} more attempts" for each in left]
    assert next(played, "none left") == "none left"
