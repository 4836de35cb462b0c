"""Dropouts: nodes that are absent, join late, lose their disk or are out of sync, and rounds with too few replies."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from fleet import (
    CLIENTS,
    Fleet,
    Route,
    check_same_run,
    check_states,
    make_config,
    serve_run,
    simulate,
    simulate_without,
)

from pfedlms.deploy.coordinator import serve_with_retries
from pfedlms.deploy.envelope import Code, Kind, decode
from pfedlms.errors import QuorumError
from pfedlms.experiment.runs import load_run
from pfedlms.report.runs import client_accuracies

ABSENT = 2


def unreachable_in(trips: range, known: bool) -> Route:
    """A route on which one client cannot be reached: the transport knows so, or no reply comes."""

    def route(client: int, request: bytes, handle: Callable[[bytes], bytes]) -> bytes | str | None:
        if client == ABSENT and decode(request).trip in trips:
            return "its node is offline" if known else None
        return handle(request)

    return route


def check_same_tracked_model(fleet: Fleet, *names: str) -> None:
    states = [fleet.node(client).state.cohort.state for client in range(CLIENTS)]
    assert all(torch.equal(own[name], states[0][name]) for own in states for name in names)


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("method", ["sketchvote", "stc", "obda"])
def test_a_node_that_missed_answers_catches_up(method: str, known: bool, tmp_path: Path) -> None:
    """After five rounds of absence it is sent the answers it missed, is left out of the next exchange, and has the bits
    of the other nodes; also where the transport knows that it is absent."""
    config = make_config(method, tmp_path / "run", train={"rounds": 9})
    fleet = Fleet(config, tmp_path / "nodes", unreachable_in(range(2, 7), known))
    reason = "no reply: its node is offline" if known else "no reply within 600 s"
    with pytest.warns(UserWarning, match=f"round 2: client {ABSENT} is left out: {reason}"):
        _, metrics = serve_run(config, fleet)
    check_same_tracked_model(fleet, "model")
    catch_up = [each["bytes"]["catch_up"] for each in metrics]
    assert catch_up[0] == 0
    assert catch_up[-1] > 0
    assert fleet.node(ABSENT).state.answers_known == 9
    assert [str(ABSENT) in each["left_out"] for each in metrics] == [1 <= number < 7 for number in range(9)]
    if method != "obda":  # its messages are requested one round ahead
        expected, federation = simulate_without(config, ABSENT, range(2, 7))
        assert [each["p_acc"] for each in metrics] == [each["p_acc"] for each in expected]
        records = decode(fleet.trips[7][ABSENT][0]).records
        # With stc few entries change in five rounds; they have fewer bytes than the answers of rounds 1 to 5.
        ways = {code: [each.number for each in records if each.code == code] for code in (Code.MODEL, Code.ANSWER)}
        few = method == "stc"
        assert ways == {Code.MODEL: [5] * few, Code.ANSWER: [6] if few else [1, 2, 3, 4, 5, 6]}
        check_states(fleet, federation)
        if known:  # nothing was sent to the absent node
            assert [each["bytes"] for each in metrics] == [each["bytes"] for each in expected]
            assert metrics[-1]["transport"] == fleet.transport_bytes(ABSENT, range(2, 7))


@pytest.mark.filterwarnings("ignore:round")
@pytest.mark.parametrize("method", ["sketchvote", "pfedlms", "fedavg"])
def test_a_node_may_join_late(method: str, tmp_path: Path) -> None:
    config = make_config(method, tmp_path / "run", train={"rounds": 5})

    def route(client: int, request: bytes, handle: Callable[[bytes], bytes]) -> bytes | None:
        return None if client == ABSENT and decode(request).round < 2 else handle(request)

    fleet = Fleet(config, tmp_path / "nodes", route)
    _, metrics = serve_run(config, fleet)
    assert [len(each["client_acc"]) for each in metrics][:2] == [3, 3]
    assert len(metrics[-1]["client_acc"]) == CLIENTS
    if method == "sketchvote":
        check_states(fleet, simulate_without(config, ABSENT, range(3))[1])


@pytest.mark.parametrize("method", ["sketchmean", "stc", "sketchvote"])
def test_a_node_that_lost_its_disk_catches_up(method: str, tmp_path: Path) -> None:
    """It refuses the next answer, because it knows no earlier one; then it is sent all answers or what they changed."""
    shares = {"ratio": 0.1, "answer": 0.005} if method == "sketchmean" else {}  # the model is fewer bytes than answers
    config = make_config(method, tmp_path / "run", train={"rounds": 7}, method=shares)

    def route(client: int, request: bytes, handle: Callable[[bytes], bytes]) -> bytes | None:
        if client == ABSENT and decode(request).trip == 4:
            fleet.delete_state(ABSENT)
        return handle(request)

    fleet = Fleet(config, tmp_path / "nodes", route)
    with pytest.warns(UserWarning, match=f"round 4: client {ABSENT} is left out: refused, order"):
        _, metrics = serve_run(config, fleet)
    codes = [each.code for each in decode(fleet.trips[5][ABSENT][0]).records]
    assert codes[:2] == [Code.ANSWER if method == "sketchvote" else Code.MODEL, Code.ANSWER]
    assert [sorted(each["left_out"]) for each in metrics] == [[]] * 3 + [[str(ABSENT)]] * 2 + [[]] * 2
    assert metrics[4]["bytes"]["catch_up"] == metrics[6]["bytes"]["catch_up"] > 0
    check_same_tracked_model(fleet, *(("model", "scale") if method == "sketchmean" else ("model",)))
    assert {fleet.node(client).state.answers_known for client in range(CLIENTS)} == {7}


def test_a_node_out_of_sync_is_left_out_and_sent_the_model(tmp_path: Path) -> None:
    config = make_config("sketchvote", tmp_path / "run", train={"rounds": 6}, method={"check_every": 1})

    def route(client: int, request: bytes, handle: Callable[[bytes], bytes]) -> bytes | None:
        if client == ABSENT and decode(request).trip == 2:
            fleet.node(ABSENT).state.cohort.state["model"][0, 5] += 1.0
        return handle(request)

    fleet = Fleet(config, tmp_path / "nodes", route)
    with pytest.warns(UserWarning, match="client 2 is left out of this exchange: it tracks another model"):
        _, metrics = serve_run(config, fleet)
    assert metrics[-1]["astray"] == 1
    check_same_tracked_model(fleet, "model")


def test_accuracies_at_the_end_are_those_of_clients_that_were_reached(tmp_path: Path) -> None:
    """One client can no longer be reached when all are measured on copies of their state."""
    config = make_config("fedavg", tmp_path / "run", clients=6, train={"participation": 0.5, "rounds": 3})

    def route(client: int, request: bytes, handle: Callable[[bytes], bytes]) -> bytes | None:
        return None if client == ABSENT and decode(request).kind == Kind.LOOK else handle(request)

    with pytest.warns(UserWarning, match=f"round 3: client {ABSENT} is left out: no reply"):
        summary, _ = serve_run(config, Fleet(config, tmp_path / "nodes", route=route))
    reached = [client for client in range(6) if client != ABSENT]
    expected = simulate(config).summary["everyone"]["client_acc"]
    assert summary["everyone"]["clients"] == reached
    assert summary["everyone"]["client_acc"] == [expected[client] for client in reached]
    shown = client_accuracies(load_run(tmp_path / "run"))
    assert {client: shown[client] for client in reached} == {client: expected[client] for client in reached}


@pytest.mark.filterwarnings("ignore:round")
def test_a_run_below_quorum_resumes_when_nodes_are_back(tmp_path: Path) -> None:
    config = make_config("pfedlms", tmp_path / "run")
    absent = [True]

    def route(client: int, request: bytes, handle: Callable[[bytes], bytes]) -> bytes | None:
        reply = handle(request)
        return None if absent[0] and client > 0 and decode(request).trip == 1 else reply

    fleet = Fleet(config, tmp_path / "nodes", route)
    for _ in range(2):
        with pytest.raises(
            QuorumError, match=r"round 1: 1 of 4 messages were valid.* \(client 1: no reply.*\); lower run.lost"
        ):
            serve_run(config, fleet)
    absent[0] = False
    serve_run(config, fleet)
    check_same_run(fleet)


@pytest.mark.parametrize(
    ("rounds", "left"), [([0, 0, 3, 3, 7, 7], [2, 1, 2, 1, 2, 1]), ([2, 5, 5, 5], [2, 2, 1])], ids=["ends", "stuck"]
)
def test_a_round_is_retried_and_a_played_round_resets_the_attempts(rounds: list[int], left: list[int]) -> None:
    """Below quorum after each of `rounds` rounds, then the run ends; one round is not retried forever."""
    lines, played = list[str](), iter(rounds)

    def serve(played: Iterator[int]) -> None:
        if (number := next(played, None)) is not None:
            error = QuorumError("too few")
            error.summary = {"rounds": number}
            raise error

    if len(rounds) == len(left):
        serve_with_retries(lambda: serve(played), 3, lines.append)
    else:
        with pytest.raises(QuorumError, match="too few"):
            serve_with_retries(lambda: serve(played), 3, lines.append)
    assert [line[-15:] for line in lines] == [f"{each} more attempts" for each in left]
    assert next(played, "none left") == "none left"
