"""Nodes that are late, gone, broken or hostile: left out and named; the others go on as if they were not there."""

from __future__ import annotations

import struct
import warnings
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fleet import CLIENTS, Fleet, Way, alone, check_states, configured, own_data, plain, served

from pfedlms.deploy.coordinator import persist
from pfedlms.deploy.envelope import (
    Code,
    Envelope,
    Kind,
    Record,
    Why,
    decode,
    reason,
    refusal,
)
from pfedlms.engine import Federation
from pfedlms.errors import QuorumError
from pfedlms.experiment.config import Config
from pfedlms.experiment.loop import Running, execute
from pfedlms.experiment.prepare import prepare
from pfedlms.wire.frames import HEADER_BYTES, SERVER, frame

BAD = 2


class Without:
    """All take part but one client, or in some phases only."""

    count = CLIENTS

    def __init__(self, client: int, phases: range | None = None) -> None:
        self._client, self._phases = client, phases

    def of(self, phase: int) -> tuple[int, ...]:
        away = self._phases is None or phase in self._phases
        return tuple(k for k in range(CLIENTS) if k != self._client or not away)


def alone_without(config: Config, phases: range | None = None) -> tuple[list[dict[str, Any]], Federation]:
    """The run in one process in which that client takes no part."""
    federation = prepare(config)
    federation.participation = Without(BAD, phases)  # type: ignore[assignment]
    running = Running(config, federation)
    execute(running, ())
    return running.metrics, federation


def changed(data: bytes, change: Callable[[Envelope], Envelope]) -> bytes:
    return change(decode(data)).encode()


def with_frame(change: Callable[[bytearray], None], summed: bool = True) -> Callable[[bytes], bytes]:
    """A reply whose message is changed, with a checksum that fits."""

    def of(said: Envelope) -> Envelope:
        records = []
        for each in said.records:
            if each.code == Code.SEND:
                data = bytearray(each.data)
                change(data)
                if summed:
                    data[36:40] = struct.pack("<I", zlib.crc32(bytes(data[:36]) + bytes(data[40:])))
                each = Record(each.code, each.number, each.index, each.flags, bytes(data))
            records.append(each)
        return Envelope(said.kind, said.run, said.client, said.round, said.trip, tuple(records))

    return lambda data: changed(data, of)


def put(at: int, code: str, value: Any) -> Callable[[bytearray], None]:
    return lambda data: struct.pack_into("<" + code, data, at, value)


def rewritten(**values: Any) -> Callable[[bytes], bytes]:
    """A reply of which some is other, with a checksum that fits."""
    return lambda data: changed(data, lambda said: replace(said, **values))


MESSAGES: dict[str, tuple[Callable[[bytes], bytes | None], str]] = {
    "an enormous message": (with_frame(put(20, "Q", 1 << 60)), "OversizedError"),
    "a message of another round": (with_frame(put(8, "I", 77)), "RoundError"),
    "a message of another client": (with_frame(put(12, "I", 0)), "SenderError"),
    "a message of another run": (with_frame(put(28, "Q", 1)), "DigestError"),
    "a weight above what it holds": (with_frame(put(16, "I", (1 << 32) - 1)), "samples: got 4294967295, expected"),
    "NaN": (with_frame(put(-4, "f", float("nan"))), "expected a finite number"),
}
REPLIES: dict[str, tuple[Callable[[bytes], bytes | None], str]] = {
    "nothing": (lambda data: None, "no reply within"),
    "garbage": (lambda data: bytes(range(256)) * 3, "MagicError"),
    "cut": (lambda data: data[:-7], "TruncatedError"),
    "a flipped bit": (lambda data: data[:60] + bytes([data[60] ^ 4]) + data[61:], "ChecksumError"),
    "an enormous envelope": (lambda data: data[:32] + struct.pack("<Q", 1 << 60) + data[40:], "TruncatedError"),
    "too little": (rewritten(records=()), "got something else"),
    "a request": (rewritten(kind=Kind.REQUEST), "got a request"),
    "another run": (rewritten(run=bytes(8)), "DigestError"),
    "for another client": (rewritten(client=0), "SenderError"),
    "an error of the engine": (
        lambda data: refusal(decode(data), Why.FAILED, "the process was killed"),
        "refused, failed: the process was killed",
    ),
}


def attacked(attack: Callable[[bytes], bytes | None], trips: range | None = None) -> Way:
    count: list[int] = []

    def way(client: int, request: bytes, handle: Callable[[bytes], bytes]) -> bytes | None:
        said = handle(request)
        if client != BAD:
            return said
        count.append(client)
        return attack(said) if trips is None or len(count) - 1 in trips else said

    return way


@pytest.mark.parametrize("attack", [*MESSAGES, *REPLIES])
@pytest.mark.parametrize("method", ["fedavg", "sketchvote", "pfedlms"])
def test_a_bad_node_all_along(method: str, attack: str, tmp_path: Path) -> None:
    """What it says is left out of every exchange and every number, and its name is in the metrics."""
    if (method, attack) == ("pfedlms", "NaN"):
        attack = "an enormous message"  # its second message has no numbers
    config = configured(method, tmp_path / "run")
    change, said = (MESSAGES | REPLIES)[attack]
    if (method, attack) == ("sketchvote", "NaN"):
        change = with_frame(put(-5, "f", float("nan")))  # a byte follows its scales
    fleet = Fleet(config, tmp_path / "nodes", attacked(change))
    with pytest.warns(UserWarning, match=f"client {BAD} is left out: "):
        summary, metrics = served(config, fleet)
    # After the last steps nobody is asked for a message, so that one whose messages alone are bad trains in them.
    last = attack in MESSAGES and method != "pfedlms"
    expected, federation = alone_without(config, range(3) if last else None)
    unlike = {"rejected": None, "bytes": None}  # requests to it are sent, and answers count
    assert [{**plain(each), **unlike} for each in metrics] == [{**plain(each), **unlike} for each in expected]
    for each in metrics:
        assert list(each["left_out"]) == [str(BAD)]
        assert said in each["left_out"][str(BAD)]
        assert each["rejected"] > 0
    assert summary["status"] == "finished"
    check_states(fleet, federation, but=BAD)


def test_a_reply_of_before(tmp_path: Path) -> None:
    """Replayed byte by byte: an old reply is refused by its trip, an old request by the node."""
    config = configured("fedavg", tmp_path / "run")
    old: list[bytes] = []

    def replay(data: bytes) -> bytes:
        old.append(data)
        return old[0]

    fleet = Fleet(config, tmp_path / "nodes", attacked(replay))
    with pytest.warns(UserWarning, match="RoundError: reply: got one to round 1, trip 0, expected |OversizedError"):
        _, metrics = served(config, fleet)
    assert [list(each["left_out"]) for each in metrics] == [[str(BAD)]] * 3
    node = fleet.node(0)
    before, (first, last) = node.state, (fleet.trips[0][0][0], fleet.trips[3][0])
    (refused, _) = decode(node.handle(first)).records
    assert refused.code == Code.REFUSED
    assert refused.flags == Why.STALE
    assert reason(refused).startswith("stale: round 1: got trip 0, expected one after 3")
    assert node.handle(last[0]) == last[1]
    assert node.state is before


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("method", ["sketchvote", "stc", "obda"])
def test_a_node_that_was_away_has_the_bits_of_one_that_stayed(method: str, known: bool, tmp_path: Path) -> None:
    """Away for five rounds: it is sent the answers it missed, and is left out of the exchange after them, too; also
    where who carries messages knows that it is away, and refuses in its place."""
    config = configured(method, tmp_path / "run", train={"rounds": 9})

    def way(client: int, request: bytes, handle: Callable[[bytes], bytes]) -> bytes | None:
        if client == BAD and decode(request).trip in range(2, 7):
            return refusal(decode(request), Why.FAILED, "its node is gone") if known else None
        return handle(request)

    fleet = Fleet(config, tmp_path / "nodes", way)
    why = "refused, failed: its node is gone" if known else "no reply within 600 s"
    with pytest.warns(UserWarning, match=f"round 2: client {BAD} is left out: {why}"):
        _, metrics = served(config, fleet)
    models = [fleet.node(client).state.cohort.state["model"] for client in range(CLIENTS)]
    assert all(torch.equal(model, models[0]) for model in models)
    caught = [each["bytes"]["catch_up"] for each in metrics]
    assert caught[0] == 0
    assert caught[-1] > 0
    assert fleet.node(BAD).state.answers_known == 9
    assert [str(BAD) in each["left_out"] for each in metrics] == [1 <= number < 7 for number in range(9)]
    if method != "obda":  # whose messages are asked for one round ahead
        expected, federation = alone_without(config, range(2, 7))
        assert [each["p_acc"] for each in metrics] == [each["p_acc"] for each in expected]
        back = decode(fleet.trips[7][BAD][0]).records
        # Of stc few entries change in five rounds: those are fewer bytes than the answers of rounds 1 to 5.
        ways = {code: [each.number for each in back if each.code == code] for code in (Code.MODEL, Code.ANSWER)}
        few = method == "stc"
        assert ways == {Code.MODEL: [5] * few, Code.ANSWER: [6] if few else [1, 2, 3, 4, 5, 6]}
        check_states(fleet, federation)


@pytest.mark.filterwarnings("ignore:round")
def test_where_a_carrier_says_that_a_node_is_gone_nothing_was_sent_and_what_it_has_heard_is_remembered(
    tmp_path: Path,
) -> None:
    config = configured("sketchvote", tmp_path / "run", train={"rounds": 6})

    def way(client: int, request: bytes, handle: Callable[[bytes], bytes]) -> bytes | None:
        gone = client == BAD and 3 <= decode(request).trip < 5
        return refusal(decode(request), Why.FAILED, "its node is gone") if gone else handle(request)

    fleet = Fleet(config, tmp_path / "nodes", way)
    _, metrics = served(config, fleet)
    back = decode(fleet.trips[5][BAD][0]).records
    assert [each.number for each in back if each.code == Code.ANSWER] == [2, 3, 4]  # not 0 and 1 again
    expected, _ = alone_without(config, range(3, 5))
    assert [each["bytes"] for each in metrics] == [each["bytes"] for each in expected]  # nothing goes where nobody is
    sent = [
        pair for trip in fleet.trips for client, pair in trip.items() if client != BAD or trip not in fleet.trips[3:5]
    ]
    assert metrics[-1]["transport"] == {
        "down": sum(len(pair[0]) for pair in sent),
        "up": sum(len(pair[1]) for pair in sent),
    }


@pytest.mark.filterwarnings("ignore:round")
@pytest.mark.parametrize("method", ["sketchvote", "pfedlms", "fedavg"])
def test_a_free_place_is_taken_later(method: str, tmp_path: Path) -> None:
    config = configured(method, tmp_path / "run", train={"rounds": 5})

    def way(client: int, request: bytes, handle: Callable[[bytes], bytes]) -> bytes | None:
        return None if client == BAD and decode(request).round < 2 else handle(request)

    fleet = Fleet(config, tmp_path / "nodes", way)
    _, metrics = served(config, fleet)
    assert [len(each["client_acc"]) for each in metrics][:2] == [3, 3]
    assert len(metrics[-1]["client_acc"]) == CLIENTS
    if method == "sketchvote":
        _, federation = alone_without(config, range(3))
        check_states(fleet, federation)


def test_a_node_that_tracks_another_model_is_left_out_and_sent_this_one(tmp_path: Path) -> None:
    config = configured("sketchvote", tmp_path / "run", train={"rounds": 6}, method={"check_every": 1})

    def way(client: int, request: bytes, handle: Callable[[bytes], bytes]) -> bytes | None:
        if client == BAD and decode(request).trip == 2:
            node = fleet.node(BAD)
            node.state.cohort.state["model"][0, 5] += 1.0
        return handle(request)

    fleet = Fleet(config, tmp_path / "nodes", way)
    with pytest.warns(UserWarning, match="client 2 is left out of this exchange: it tracks another model"):
        _, metrics = served(config, fleet)
    assert metrics[-1]["astray"] == 1
    models = [fleet.node(client).state.cohort.state["model"] for client in range(CLIENTS)]
    assert all(torch.equal(model, models[0]) for model in models)


def test_a_claim_that_changes_between_exchanges_is_refused(tmp_path: Path) -> None:
    """Own data, so that the server does not know N_k: the first claim of a round is what counts in it."""
    data, own, _ = own_data()
    config = configured("pfedlms", tmp_path / "run", data=data)

    def more(data: bytes) -> bytes:
        said = decode(data)
        second = any(each.code == Code.SEND and each.index == 1 for each in said.records)
        return with_frame(put(16, "I", 1_000_000))(data) if second else data

    fleet = Fleet(config, tmp_path / "nodes", attacked(more), data=own)
    with pytest.warns(UserWarning, match=r"samples: got 1000000, expected \d+, as before"):
        _, metrics = served(config, fleet)
    assert all("samples: got 1000000" in each["left_out"][str(BAD)] for each in metrics[:1])
    assert str(BAD) not in metrics[0].get("clients", [BAD])


def test_a_weight_is_limited_and_named(tmp_path: Path) -> None:
    """All claims of a node with data of its own are a million: it counts as any c with c ≤ f Σ min(N_j, c)."""
    data, own, samples = own_data()
    config = configured("fedavg", tmp_path / "run", data=data, train={"max_weight": 0.4})
    fleet = Fleet(config, tmp_path / "nodes", data=own)
    fleet.node(BAD).samples = 1_000_000
    with pytest.warns(UserWarning, match="client 2 weighs less than its 1000000 samples"):
        _, metrics = served(config, fleet)
    assert metrics[0]["weakened"] == [BAD]
    frames = {client: decode(reply).records[-2].data for client, (_, reply) in fleet.trips[0].items() if reply}
    models = {k: torch.frombuffer(bytearray(data[HEADER_BYTES:]), dtype=torch.float32) for k, data in frames.items()}
    honest = [client for client in range(CLIENTS) if client != BAD]
    others = sum(samples[client] for client in honest)
    most = others * 2 // 3  # c ≤ 0.4 (others + c)
    assert max(samples[client] for client in honest) < most
    weights = {client: samples[client] for client in honest} | {BAD: most}
    mean = sum(weight * models[client].double() for client, weight in weights.items()) / sum(weights.values())
    answer = decode(fleet.trips[1][0][0]).records[0]
    assert answer.code == Code.ANSWER
    got = torch.frombuffer(bytearray(answer.data[HEADER_BYTES:]), dtype=torch.float32)
    torch.testing.assert_close(got, mean.float(), rtol=0, atol=1e-7)


def test_too_few_is_a_clear_error_and_the_run_goes_on_once_they_are_back(tmp_path: Path) -> None:
    config = configured("pfedlms", tmp_path / "run")
    gone = {"now": True}

    def way(client: int, request: bytes, handle: Callable[[bytes], bytes]) -> bytes | None:
        said = handle(request)
        return None if gone["now"] and client > 0 and decode(request).trip == 1 else said

    fleet = Fleet(config, tmp_path / "nodes", way)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(2):
            with pytest.raises(QuorumError, match="round 1: 1 of 4 messages were valid"):
                served(config, fleet)
    gone["now"] = False
    _, metrics = served(config, fleet)
    expected = alone(config)
    assert [plain(each) for each in metrics] == [plain(each) for each in expected.metrics]
    check_states(fleet, expected.federation)


def test_what_a_node_refuses(tmp_path: Path) -> None:
    """Each a typed refusal in the reply; its state stays as it is."""
    config = configured("sketchvote", tmp_path / "run")
    fleet = Fleet(config, tmp_path / "nodes")
    served(config, fleet)
    node = fleet.node(1)
    before, run = node.state, node.run
    answer = next(each.data for each in decode(fleet.trips[1][1][0]).records if each.code == Code.ANSWER)
    forged = frame(
        node._terms.catch_up.model, {"model": node.state.cohort.params[0].numpy()}, round=5, sender=SERVER, samples=0,
        digest=node._terms.digest,
    )  # fmt: skip

    def asked(*records: Record, trip: int = 99, client: int = 1, of: bytes = run, kind: Kind = Kind.REQUEST) -> bytes:
        return Envelope(kind, of, client, 9, trip, records).encode()

    train, send = Record(Code.TRAIN, 4), Record(Code.SEND, 3)
    for request, why in [
        (b"", Why.BROKEN),
        (asked(train)[:-1], Why.BROKEN),
        (asked(of=bytes(8)), Why.RUN),
        (asked(client=2), Why.CLIENT),
        (asked(kind=Kind.REPLY), Why.BROKEN),
        (asked(train, trip=0), Why.STALE),
        (asked(train, trip=3), Why.STALE),
        (asked(Record(Code.TRAIN, 3)), Why.STALE),
        (asked(train), Why.ORDER),
        (asked(Record(Code.SEND, 2)), Why.STALE),
        (asked(Record(Code.SEND, 4)), Why.ORDER),
        (asked(Record(Code.SEND, 3, index=1)), Why.BROKEN),
        (asked(send, send), Why.STALE),
        (asked(Record(Code.ANSWER, 5, data=answer)), Why.ORDER),
        (asked(Record(Code.ANSWER, 3, data=answer)), Why.BROKEN),
        (asked(Record(Code.MODEL, 5, data=bytes(forged)[:-4])), Why.BROKEN),
        (asked(Record(Code.MEASURED)), Why.BROKEN),
    ]:
        refused, heard = decode(node.handle(request)).records
        assert (refused.code, heard.code, heard.number) == (Code.REFUSED, Code.ANSWERS_KNOWN, 3)
        assert Why(refused.flags) == why, reason(refused)
        assert node.state is before
    assert decode(node.handle(asked(Record(Code.ANSWER, 0, data=answer)))).records == (Record(Code.ANSWERS_KNOWN, 3),)


# --- rounds in which too few answer are tried again


def failing(played: Iterator[int]) -> None:
    """One call of `serve`: too few answer after so many rounds, or the run ends."""
    rounds = next(played, None)
    if rounds is not None:
        error = QuorumError("too few")
        error.summary = {"rounds": rounds}
        raise error


def test_a_round_that_was_played_gives_all_attempts_back() -> None:
    said: list[str] = []
    played = iter([0, 0, 3, 3, 7, 7])
    persist(lambda: failing(played), 3, said.append)
    assert [line[-15:] for line in said] == [f"{left} more attempts" for left in (2, 1, 2, 1, 2, 1)]


def test_the_same_round_is_not_tried_forever() -> None:
    said: list[str] = []
    played = iter([2, 5, 5, 5])
    with pytest.raises(QuorumError, match="too few"):
        persist(lambda: failing(played), 3, said.append)
    assert len(said) == 3
    assert next(played, "none left") == "none left"
