"""A federation over a link that loses, damages, repeats and replays messages."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import factories
from factories import Frames, listen_to_rows, same, sealed, seeded
from pfedlms.data import from_pairs
from pfedlms.engine import Federation, RoundReport
from pfedlms.engine import simulate as engine_simulate
from pfedlms.engine.aggregation import Aggregation
from pfedlms.engine.transport import Code, Inbox, Record, Request
from pfedlms.errors import QuorumError
from pfedlms.wire import unpack
from pfedlms.wire.frames import SERVER

CLIENTS = 4
THRESHOLDS = 2  # three levels, so that symbols can be out of range
SIZES = (25, 3, 3)  # 0.4 of 64, 8 and 8, to which 8 * 6 + 6, 6 and 3 + 3 parameters are padded

Link = Callable[[bytes, int], bytes | None]


def federation(link: Link = engine_simulate.perfect_link, *, method: str = "pfedlms", **options: Any) -> Federation:
    draw = np.random.default_rng(5)
    pairs = []
    for client in range(CLIENTS):
        count = 7 + 3 * client
        part = (draw.normal(size=(count, 8)).astype(np.float32), draw.integers(0, 3, count))
        pairs.append((part, part))
    module = seeded(lambda: nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 1, bias=False), nn.Linear(1, 3)), 3)
    if method == "pfedlms":
        options |= {"thresholds": THRESHOLDS, "ratio": 0.4}
    return factories.federation(method, from_pairs(pairs), module, link=link, local_steps=2, batch_size=4, **options)


def played(link: Link, rounds: int = 1, **options: Any) -> tuple[Federation, list[RoundReport]]:
    run = federation(link, **options)
    return run, [run.play_round() for _ in range(rounds)]


# What the server must make of the frames of some clients, from the frames alone.


def samples_of(data: bytes) -> int:
    return struct.unpack_from("<I", data, 16)[0]


def symbols_in(data: bytes) -> np.ndarray:
    parts, at = [], 40
    for size in SIZES:
        length = math.ceil(size * math.log2(3) / 8)  # a single block, as all sizes are below 29
        parts.append(unpack(data[at : at + length], size, 3))
        at += length
    assert at == len(data)
    return np.concatenate(parts).astype(np.int64)


def batch_vote(frames: list[bytes]) -> list[int]:
    """v_t(i) = sign(Σ N_k b_t^k(i)), all clients at once."""
    symbols, weights = np.stack([symbols_in(data) for data in frames]), np.array([samples_of(data) for data in frames])
    result = np.zeros(symbols.shape[1], dtype=np.int64)
    for t in range(1, THRESHOLDS + 1):
        result += (weights @ np.where(symbols >= t, 1, -1)) >= 0
    return result.tolist()


def pooled(frames: list[bytes]) -> bytes:
    """The payload of the reply of exchange A."""
    weights, total = [samples_of(data) for data in frames], sum(samples_of(data) for data in frames)
    parts = [struct.unpack(f"<{2 * len(SIZES)}f", data[40:]) for data in frames]
    means, deviations = [], []
    for layer in range(len(SIZES)):
        mean = square = 0.0
        for n, part in zip(weights, parts, strict=True):
            mean += n * part[layer]
        mean /= total
        for n, part in zip(weights, parts, strict=True):
            square += n * (part[len(SIZES) + layer] + (part[layer] - mean) ** 2)
        means.append(mean)
        deviations.append(math.sqrt(square / total))
    return struct.pack(f"<{2 * len(SIZES)}f", *means, *deviations)


def check_replies(frames: Frames, round: int, statistics_of: tuple[int, ...], votes_of: tuple[int, ...]) -> None:
    assert frames[1, round, SERVER][40:] == pooled([frames[0, round, k] for k in statistics_of])
    assert symbols_in(frames[3, round, SERVER]).tolist() == batch_vote([frames[2, round, k] for k in votes_of])


def test_sizes(frames: Frames) -> None:
    """The layout that this file spells out, and a round in which nothing is lost."""
    run, (report,) = played(engine_simulate.perfect_link)
    assert run.model.layout.sketch_sizes(0.4) == SIZES
    assert report.rejected == 0
    check_replies(frames, 0, (0, 1, 2, 3), (0, 1, 2, 3))


# One client's messages do not get through.

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
    "a stranger": ("SenderError", lambda data: sealed(data[:12] + b"\7" + data[13:])),
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
    # What was sent is counted, whether it arrived or not; everybody goes on training.
    assert report.traffic.up_framing == report.traffic.down_framing == 2 * 40 * CLIENTS
    assert report.traffic.up_payload == report.traffic.down_payload
    assert run.rounds_played == 1
    assert torch.isfinite(run.state()["params"]).all()


def test_the_average_is_taken_over_the_rest(frames: Frames) -> None:
    link = lambda data, sender: None if sender == 0 else data  # noqa: E731
    with pytest.warns(UserWarning, match="client 0 is left out"):
        _, (report,) = played(link, method="fedavg")
    assert report.rejected == 1
    sent = [frames[0, 0, k] for k in (1, 2, 3)]
    models = np.stack([np.frombuffer(data[40:], "<f4").astype(np.float64) for data in sent])
    weights = np.array([samples_of(data) for data in sent])
    expected = (weights @ models / weights.sum()).astype(np.float32)
    np.testing.assert_allclose(np.frombuffer(frames[1, 0, SERVER][40:], "<f4"), expected, rtol=1e-6)


# Nothing is voted on twice. The link hands over one thing for each frame sent, so a duplicate takes another's place.


@pytest.mark.parametrize("cohort_size", [0, 1])
def test_a_duplicate_counts_once(frames: Frames, cohort_size: int) -> None:
    """In place of client 1's message arrives client 0's once more."""
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


def test_a_replay_of_the_round_before_is_refused(frames: Frames) -> None:
    def link(data: bytes, sender: int) -> bytes:
        return frames[data[5], 0, sender] if (data[8], sender) == (1, 3) else data

    with pytest.warns(
        UserWarning, match="round 2: client 3 is left out of this exchange: RoundError: .* got 0, expected 1"
    ):
        _, reports = played(link, rounds=2)
    assert [report.rejected for report in reports] == [0, 2]
    check_replies(frames, 1, (0, 1, 2), (0, 1, 2))


# Quorum.


def lose(count: int, kind: int) -> Link:
    return lambda data, sender: None if data[5] == kind and sender < count else data


@pytest.mark.parametrize("kind", [0, 2])
@pytest.mark.parametrize(
    ("quorum", "lost", "goes_on"),
    [
        (None, 2, True),  # the default: half of them
        (None, 3, False),
        (0.75, 1, True),
        (0.75, 2, False),
        (0.76, 1, False),
        (1.0, 0, True),
        (1.0, 1, False),
        (0.0, 3, True),
        (0.0, 4, False),  # nobody is never enough
    ],
)
@pytest.mark.filterwarnings("ignore:round 1. client . is left out")
def test_quorum(quorum: float | None, lost: int, goes_on: bool, kind: int) -> None:
    options = {} if quorum is None else {"quorum": quorum}
    if goes_on:
        _, (report,) = played(lose(lost, kind), **options)
        assert report.rejected == lost
    else:
        share = 0.5 if quorum is None else quorum
        expected = rf"round 1: {CLIENTS - lost} of 4 messages were valid, expected at least run.quorum = {share:g}"
        with pytest.raises(QuorumError, match=expected):
            played(lose(lost, kind), **options)


@pytest.mark.parametrize("kind", [0, 2])
@pytest.mark.filterwarnings("ignore:round 2. client . is left out")
def test_below_quorum_nothing_is_changed_and_the_round_can_be_played_again(kind: int) -> None:
    broken = [True]
    lost = lose(3, kind)
    run = federation(lambda data, sender: lost(data, sender) if broken[0] and data[8] == 1 else data)
    run.play_round()
    before = run.state()
    with pytest.raises(QuorumError):
        run.play_round()
    assert same(run.state(), before)
    assert run.rounds_played == 1

    broken[0] = False
    report = run.play_round()
    undisturbed, reports = played(engine_simulate.perfect_link, rounds=2)
    assert same(run.state(), undisturbed.state())
    assert (report.loss, report.rejected) == (reports[1].loss, 0)


# --- short messages, which are written and read together --------------------------------------------------------------


@pytest.mark.parametrize("broken", [float("nan"), float("inf"), -1.0])
def test_one_value_that_cannot_be_sent_is_refused_and_the_others_arrive(broken: float) -> None:
    """Of three clients' means and variances the second has a variance that no receiver takes."""
    values = {name: np.ones((3, 3), np.float32) for name in ("mean", "variance")}  # of three layers
    values["variance"][1, 0] = broken
    method, digest = federation().method, bytes(8)
    exchange, _ = method.exchanges
    request, aggregation = Request((2, 5, 7), ()), Aggregation(exchange, {}, digest, 4, {2, 5, 7})
    inbox = Inbox((request,), aggregation=aggregation)
    client = SimpleNamespace(digest=digest, method=method, send=lambda cohort, order: (cohort, values))
    values = {name: torch.from_numpy(value) for name, value in values.items()}
    cohort = factories.cohort_of(torch.zeros(3, 4), ids=[2, 5, 7], samples=[3, 4, 5])
    added: list[Any] = []
    aggregation.add_up = lambda: added.extend(aggregation._arrived)  # type: ignore[method-assign]
    engine_simulate.InProcess(client, None).send(request, Record(Code.SEND, 4), [cohort], inbox)  # type: ignore[arg-type]
    assert [(message.sender, message.samples) for message in added] == [(2, 3), (7, 5)]
    assert (inbox.rejected, inbox.traffic.up_payload) == (1, 3 * 24)
    assert [message.values["variance"].tolist() for message in added] == [[1] * 3] * 2
    (event,) = inbox.events
    assert str(event).startswith("round 5: client 5 is left out of this exchange: DecodeError: field 'variance'")


def test_together_and_one_after_another_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a link they go one after another, without it together: the same frames, bytes, losses and models."""
    together: list[bytes] = []
    listen_to_rows(monkeypatch, lambda *_, data, **__: together.append(data))
    post, seen = factories.Post(), []
    for link in (engine_simulate.perfect_link, post):
        chosen = factories.federation("sketchvote", link=link, check_every=2)
        reports = [chosen.play_round() for _ in range(4)]
        state = chosen.state()["server"]["model"].numpy().tobytes()
        seen.append(([(report.loss, report.traffic) for report in reports], state))
    assert seen[0] == seen[1]
    assert together == post.frames
    assert len({len(data) for data in together}) == 2  # with a digest and without
