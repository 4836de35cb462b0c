"""The carrier delivers requests to nodes that go offline and come back; message service and clock are fake."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import ClassVar

import pytest

from pfedlms.deploy.envelope import Envelope, Kind
from pfedlms.flower import carrier as carrier_module
from pfedlms.flower.carrier import CHECK, REQUEST, WHO, Carrier, Failure


def request(client: int) -> bytes:
    return Envelope(Kind.REQUEST, b"12345678", client, 4, 9, ()).encode()


Behaviour = Callable[[str, bytes, float], "bytes | Failure | None"]
"""(kind of message, its bytes, time) to the reply of a node; None for a message that it never replies to."""


@dataclass
class FakeService:
    """Nodes by id, each online from one second to another. Time passes while the carrier sleeps."""

    now: float = 0.0
    online: dict[int, tuple[float, float, Behaviour]] = field(default_factory=dict)
    sent: list[tuple[str, int, float, float]] = field(default_factory=list)
    """Kind, node, time and time to live of each message."""
    waiting: dict[str, tuple[int, bytes | Failure | None]] = field(default_factory=dict)
    last: ClassVar[FakeService]
    """The service that was made last: its time is that of the carrier."""

    def __post_init__(self) -> None:
        FakeService.last = self

    def nodes(self) -> set[int]:
        return {node for node, (since, end, _) in self.online.items() if since <= self.now < end}

    def push(self, kind: str, messages: Mapping[int, bytes], ttl: float) -> dict[str, int]:
        sent = {}
        for node, data in messages.items():
            self.sent.append((kind, node, self.now, ttl))
            name = f"message {len(self.sent)}"
            sent[name] = node
            reply = self.online[node][2](kind, data, self.now) if node in self.nodes() else None
            self.waiting[name] = node, reply
        return sent

    def pull(self, message_ids: Iterable[str]) -> dict[str, bytes | Failure]:
        names = [name for name in message_ids if name in self.waiting]
        ready = {name: reply for name in names if (reply := self.waiting[name][1]) is not None}
        return {name: reply for name, reply in ready.items() if self.waiting.pop(name)}

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def requests(self) -> list[int]:
        return [node for kind, node, *_ in self.sent if kind == REQUEST]


@pytest.fixture(autouse=True)
def fake_time(monkeypatch: pytest.MonkeyPatch) -> None:
    functions = {"monotonic": lambda: FakeService.last.now, "sleep": lambda seconds: FakeService.last.sleep(seconds)}
    monkeypatch.setattr(carrier_module, "time", SimpleNamespace(**functions))


def node_of(client: int, silent_until: float = 0.0) -> Behaviour:
    def answer(kind: str, data: bytes, now: float) -> bytes | Failure | None:
        if kind == WHO:
            return str(client).encode()
        return data + b"!" if now >= silent_until else None

    return answer


def failing(client: int, failure: Failure) -> Behaviour:
    return lambda kind, data, now: str(client).encode() if kind == WHO else failure


FOREVER = (0.0, 1e9)


def make_carrier(
    service: FakeService, clients: int, pinned: Mapping[int, int] | None = None
) -> tuple[Carrier, list[str]]:
    lines: list[str] = []
    return Carrier(service, clients, dict(pinned or {}), lines.append, lambda kind, node: b""), lines


def carrier_with_nodes(service: FakeService, clients: int) -> tuple[Carrier, list[str]]:
    """A carrier that knows the nodes online."""
    carrier, lines = make_carrier(service, clients)
    carrier.wait_for_nodes(5, 100)
    return carrier, lines


class SlowService(FakeService):
    """No reply arrives before the 40th second."""

    def pull(self, message_ids: Iterable[str]) -> dict[str, bytes | Failure]:
        return super().pull(message_ids) if self.now >= 40 else {}


def test_the_carrier_waits_for_nodes_to_name_their_places() -> None:
    """Longer than for other nodes to come online, but not forever."""
    service = SlowService(online={70: (*FOREVER, node_of(0))})
    carrier, _ = make_carrier(service, 2)
    assert carrier.wait_for_nodes(5, 60) == {0}
    assert 40 <= service.now < 50
    assert [(kind, ttl) for kind, _, _, ttl in service.sent] == [(WHO, 60.0)]
    silent = FakeService(online={70: (*FOREVER, lambda kind, data, now: None)})
    assert make_carrier(silent, 2)[0].wait_for_nodes(5, 60) == set()
    assert 60 <= silent.now < 70


def test_nodes_are_asked_for_their_places_once() -> None:
    service = FakeService(online={70: (*FOREVER, node_of(1)), 71: (*FOREVER, node_of(0))})
    carrier, lines = make_carrier(service, 2)
    assert carrier.wait_for_nodes(60, 100) == {0, 1}
    assert service.now < 2
    assert carrier.places == {0: 71, 1: 70}
    assert sorted(lines) == ["client 0 is node 71", "client 1 is node 70"]
    for _ in range(2):
        assert carrier.send({k: request(k) for k in (0, 1)}, 100) == {k: request(k) + b"!" for k in (0, 1)}
    assert [kind for kind, *_ in service.sent].count(WHO) == 2
    assert all(ttl <= 100 for kind, _, _, ttl in service.sent if kind == REQUEST)


def test_a_start_waits_for_nodes_for_a_limited_time() -> None:
    service = FakeService(online={70: (20, 1e9, node_of(0)), 71: (45, 1e9, node_of(1))})
    carrier, _ = make_carrier(service, 3)
    assert carrier.wait_for_nodes(30, 100) == {0, 1}
    assert 75 <= service.now < 82  # 30 s after the last one came online


def test_a_silent_node_has_no_reply_and_a_free_place_is_named() -> None:
    service = FakeService(online={70: (*FOREVER, node_of(0)), 71: (*FOREVER, node_of(1, silent_until=1e9))})
    carrier, _ = carrier_with_nodes(service, 3)
    replies = carrier.send({k: request(k) for k in range(3)}, 90)
    assert replies.keys() == {0, 2}
    assert replies[2] == "no node has taken this place"
    assert service.requests().count(71) == 3  # at the start and after each third of the timeout
    assert service.requests().count(70) == 1


def test_a_trip_without_nodes_ends_at_once() -> None:
    service = FakeService()
    carrier, _ = make_carrier(service, 2)
    assert carrier.send({1: request(1)}, 600)[1] == "no node has taken this place"
    assert service.now < 5


def test_late_replies_are_removed_from_the_engine() -> None:
    """The engine keeps a message until its reply is pulled. A silent node gets the request again and replies twice."""
    service = FakeService(
        online={70: (*FOREVER, node_of(0, silent_until=30)), 71: (0, 4, lambda kind, data, now: None)}
    )
    carrier, _ = carrier_with_nodes(service, 2)
    assert carrier.send({0: request(0)}, 120) == {0: request(0) + b"!"}
    assert service.requests() == [70, 70]
    query, first = service.waiting
    service.waiting = {query: (71, Failure("gone", gone=True)), first: (70, b"late")}
    service.now += 10
    assert carrier.send({0: request(0)}, 120) == {0: request(0) + b"!"}
    assert not service.waiting


def test_a_pinned_place_is_not_given_away_and_a_survey_asks_its_rivals() -> None:
    """Each node gets its own query. The first that names a free place has it, also while it is offline."""
    rival: Behaviour = lambda kind, data, now: data if kind == CHECK else b"0"  # noqa: E731
    silent = node_of(1, silent_until=1e9)
    service = FakeService(online={70: (*FOREVER, node_of(0)), 71: (*FOREVER, silent), 72: (*FOREVER, rival)})
    lines = list[str]()
    carrier = Carrier(service, 2, {0: 70}, lines.append, lambda kind, node: f"{kind} {node}".encode())
    late = Failure("no reply within 10 s")
    assert carrier.survey(5, 10) == {70: f"{CHECK} 70!".encode(), 71: late, 72: f"{CHECK} 72".encode()}
    assert carrier.places == {0: 70, 1: 71}
    assert "node 72: says it is client 0, which node 70 is" in lines
    carrier.send({k: request(k) for k in (0, 1)}, 20)
    assert set(service.requests()) == {70, 71}
    service.online[70] = (0, 0, node_of(0))
    assert carrier.survey(5, 10).keys() == {71, 72}
    assert carrier.places[0] == 70


def test_failures_have_a_text_and_no_control_characters_in_the_log() -> None:
    offline, failed = Failure("gone", gone=True), Failure("MemoryError: \x1b[2J\nround 9/9: P-acc 100 %")
    without_place = (*FOREVER, lambda *_: failed)
    service = FakeService(
        online={70: (*FOREVER, failing(0, failed)), 71: (0, 4, failing(1, offline)), 72: without_place}
    )
    carrier, lines = carrier_with_nodes(service, 2)
    replies = carrier.send({k: request(k) for k in (0, 1)}, 60)
    assert replies[0] == failed.text
    assert lines[-1].startswith("node 72: got 'MemoryError: ")
    assert not [line for line in lines if "\x1b" in line or "\n" in line]
    assert replies[1] == "its node is offline"
    assert 30 < service.now < 40  # the carrier waits for it to come back
    assert carrier.send({1: request(1)}, 60)[1] == "its node is offline"
    assert service.now < 40


@pytest.mark.parametrize(("nodes", "fewest", "most"), [(2, 80, 130), (100, 60, 90)])
def test_the_carrier_polls_rarely(nodes: int, fewest: int, most: int) -> None:
    """In 300 s without a reply. A poll costs one request per node: for 100 nodes there is one every 2 s at first."""
    service = FakeService(online={70 + k: (*FOREVER, node_of(k, silent_until=1e9)) for k in range(nodes)})
    carrier, _ = carrier_with_nodes(service, nodes)
    polls, pull = list[float](), service.pull
    service.pull = lambda names: polls.append(service.now) or pull(names)  # type: ignore[func-returns-value, method-assign]
    carrier.send({k: request(k) for k in range(nodes)}, 300)
    assert fewest < len(set(polls)) < most


def test_a_node_that_comes_back_is_sent_the_request_at_once() -> None:
    """Under the same id; the engine reports late that it was offline."""
    service = FakeService(online={70: (0, 10, node_of(0, silent_until=1e9))})
    carrier, _ = carrier_with_nodes(service, 1)
    slept = service.sleep

    def sleep(seconds: float) -> None:
        slept(seconds)
        if service.now >= 25:
            service.online[70] = (25, 1e9, node_of(0, silent_until=40))
            for name, (node, reply) in list(service.waiting.items()):
                if reply is None and name == "message 2":
                    service.waiting[name] = node, Failure("gone", gone=True)

    service.sleep = sleep  # type: ignore[method-assign]
    assert carrier.send({0: request(0)}, 90) == {0: request(0) + b"!"}  # then again every 30 s while it is silent
    times = [now for kind, _, now, _ in service.sent if kind == REQUEST]
    assert [now > 25 for now in times] == [False, True, True]
    assert times[1] < 29
    assert 55 <= service.now < 65


@pytest.mark.parametrize("claim", [b"2", b"-1", b"one", b"\xff" * 1000, b""])
def test_a_node_without_a_place_is_named_and_gets_no_requests(claim: bytes) -> None:
    own, wrong, leaving = (*FOREVER, node_of(0)), (*FOREVER, lambda kind, data, now: claim), (0.0, 50.0, node_of(8))
    service = FakeService(online={70: own, 71: wrong, 72: leaving})
    carrier, lines = make_carrier(service, 2)
    assert carrier.wait_for_nodes(5, 100) == {0}
    assert carrier.places == {0: 70}
    assert any(line.startswith("node 71: got ") and "below 2" in line and len(line) < 150 for line in lines)
    service.now = 51.0
    carrier.send({0: request(0)}, 60)
    assert service.requests() == [70]
