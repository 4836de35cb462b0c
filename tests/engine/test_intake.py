"""A federation over a link that loses, damages, repeats and replays messages."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import plain_client as plain
import pytest
import second
import torch

from factories import Frames, same, sealed
from pfedlms.engine import Federation, RoundReport
from pfedlms.engine import simulate as engine_simulate
from pfedlms.errors import QuorumError
from pfedlms.wire.frames import SERVER

CLIENTS = 4
Link = Callable[[bytes, int], bytes | None]


def federation(link: Link = engine_simulate.perfect_link, **options: Any) -> Federation:
    """pFedLMS with three levels, so that symbols can be out of range."""
    return second.federate("pfedlms", {"thresholds": 2, "ratio": 0.4}, link=link, **options)


def played(link: Link, rounds: int = 1, **options: Any) -> tuple[Federation, list[RoundReport]]:
    run = federation(link, **options)
    return run, [run.play_round() for _ in range(rounds)]


def check_replies(frames: Frames, round: int, statistics_of: tuple[int, ...], votes_of: tuple[int, ...]) -> None:
    """The answers of exchanges A and B are those of the second implementation to the frames of these clients."""
    server = plain.Server(second.run_of(federation()), range(CLIENTS), round)
    assert frames[1, round, SERVER] == server.pool_statistics([frames[0, round, k] for k in statistics_of])
    assert frames[3, round, SERVER] == server.count_votes([frames[2, round, k] for k in votes_of])
    assert not server.refused


# --- one invalid message ----------------------------------------------------------------------------------------------

DAMAGE: dict[str, tuple[str, Callable[[bytes], bytes | None]]] = {
    "lost": ("WireError: nothing arrived", lambda data: None),
    "empty": ("TruncatedError", lambda data: b""),
    "cut": ("TruncatedError", lambda data: data[:-1]),
    "longer": ("OversizedError", lambda data: data + b"\0"),
    "flipped": ("ChecksumError", lambda data: data[:-1] + bytes([data[-1] ^ 1])),
    "noise": ("MagicError", lambda data: bytes(len(data))),
    "another version": ("VersionError", lambda data: sealed(data[:4] + b"\2" + data[5:])),
    "another digest": ("DigestError", lambda data: sealed(data[:28] + bytes(8) + data[36:])),
    "another kind": ("KindError", lambda data: sealed(data[:5] + b"\7" + data[6:])),
    "another round": ("RoundError", lambda data: sealed(data[:8] + b"\7" + data[9:])),
    "an unknown sender": ("SenderError", lambda data: sealed(data[:12] + b"\7" + data[13:])),
    "no samples": ("DecodeError", lambda data: sealed(data[:16] + bytes(4) + data[20:])),
    # NaN in exchange A, symbols of a block out of range in exchange B.
    "contents": ("DecodeError", lambda data: sealed(data[:40] + b"\xff" * (len(data) - 40))),
}


@pytest.mark.parametrize("cohort_size", [0, 1])
@pytest.mark.parametrize("kind", [0, 2])
@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_message_is_left_out(frames: Frames, name: str, kind: int, cohort_size: int) -> None:
    error, damage = DAMAGE[name]
    link = lambda data, sender: damage(data) if (data[5], sender) == (kind, 2) else data  # noqa: E731
    with pytest.warns(UserWarning, match=f"round 1: client 2 is left out of this exchange: {error}") as caught:
        run, (report,) = played(link, cohort_size=cohort_size)
    assert report.rejected == 1 == len(caught)
    rest = (0, 1, 3)
    check_replies(frames, 0, rest if kind == 0 else (0, 1, 2, 3), rest if kind == 2 else (0, 1, 2, 3))
    # Messages count as sent also if they are lost, and all clients train.
    assert report.traffic.up_framing == report.traffic.down_framing == 2 * 40 * CLIENTS
    assert report.traffic.up_payload == report.traffic.down_payload
    assert run.rounds_played == 1
    assert torch.isfinite(run.state()["params"]).all()


# --- duplicates: the link delivers one frame for each one sent, so a duplicate replaces another frame -----------------


@pytest.mark.parametrize("cohort_size", [0, 1])
def test_a_duplicate_counts_once(frames: Frames, cohort_size: int) -> None:
    """The message of client 0 arrives a second time in place of that of client 1."""
    before: dict[int, bytes] = {}

    def link(data: bytes, sender: int) -> bytes:
        if sender == 1:
            return before[0]
        before[sender] = data
        return data

    with pytest.warns(UserWarning, match="client 1 is left out of this exchange: SenderError: .* second message of 0"):
        _, (report,) = played(link, cohort_size=cohort_size)
    assert report.rejected == 2
    check_replies(frames, 0, (0, 2, 3), (0, 2, 3))


# --- quorum -----------------------------------------------------------------------------------------------------------


def lose(count: int, kind: int) -> Link:
    return lambda data, sender: None if data[5] == kind and sender < count else data


@pytest.mark.parametrize("kind", [0, 2])
@pytest.mark.parametrize(
    ("quorum", "lost", "counts"),
    [
        (None, 2, True),  # the default: half of them
        (None, 3, False),
        (0.75, 1, True),
        (0.76, 1, False),
        (0.0, 3, True),
        (0.0, 4, False),  # at least one message is needed
    ],
)
@pytest.mark.filterwarnings("ignore:round 1. client . is left out")
def test_a_round_counts_only_with_a_quorum(quorum: float | None, lost: int, counts: bool, kind: int) -> None:
    options = {} if quorum is None else {"quorum": quorum}
    if counts:
        _, (report,) = played(lose(lost, kind), **options)
        assert report.rejected == lost
    else:
        share = 0.5 if quorum is None else quorum
        expected = rf"round 1: {CLIENTS - lost} of 4 messages were valid, expected at least run.quorum = {share:g}"
        with pytest.raises(QuorumError, match=expected):
            played(lose(lost, kind), **options)


@pytest.mark.parametrize("kind", [0, 2])
@pytest.mark.filterwarnings("ignore:round 2. client . is left out")
def test_a_round_below_quorum_changes_nothing_and_can_be_played_again(kind: int) -> None:
    broken = [True]
    lost = lose(3, kind)
    run = federation(lambda data, sender: lost(data, sender) if broken[0] and data[8] == 1 else data)
    run.play_round()
    before = deepcopy(run.state())
    with pytest.raises(QuorumError):
        run.play_round()
    assert same(run.state(), before)
    assert run.rounds_played == 1

    broken[0] = False
    report = run.play_round()
    undisturbed, reports = played(engine_simulate.perfect_link, rounds=2)
    assert same(run.state(), undisturbed.state())
    assert (report.loss, report.rejected) == (reports[1].loss, 0)


# --- messages that are encoded together -------------------------------------------------------------------------------


@pytest.mark.parametrize("broken", [float("nan"), float("inf"), -1.0])
def test_one_invalid_value_leaves_out_its_client_only(frames: Frames, broken: float) -> None:
    run = federation()
    exchange, _ = run.method.exchanges
    send = exchange.client_send

    def client_send(*given: Any) -> Any:
        after, values = send(*given)
        values["variance"][1, 0] = broken
        return after, values

    exchange.client_send = client_send
    message = "round 1: client 1 is left out of this exchange: DecodeError: field 'variance'"
    with pytest.warns(UserWarning, match=message) as caught:
        report = run.play_round()
    assert report.rejected == 1 == len(caught)
    assert report.traffic.up_framing == 2 * 40 * CLIENTS
    check_replies(frames, 0, (0, 2, 3), (0, 1, 2, 3))
