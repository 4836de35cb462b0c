"""Requests find their nodes, whatever those do; the message service and the clock are fake."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import pytest

from pfedlms.deploy.envelope import Code, Envelope, Kind, Reason, decode
from pfedlms.flower.carrier import CHECK, REQUEST, WHO, Carrier, Failure


def request(client: int) -> bytes:
    return Envelope(Kind.REQUEST, b"12345678", client, 4, 9, ()).encode()


def refused(reply: bytes) -> str:
    said = decode(reply)
    assert (said.round, said.trip) == (4, 9)
    assert (said.records[0].code, said.records[0].flags) == (Code.REFUSED, Reason.FAILED)
    return bytes(said.records[0].data).decode()


Behaviour = Callable[[str, bytes, float], "bytes | Failure | None"]
"""What a node says to a message of some kind at some time; None: nothing, and it is never asked for that one again."""


@dataclass
class FakeService:
    """Nodes by id, each from and until some second. Time passes by sleeping."""

    now: float = 0.0
    online: dict[int, tuple[float, float, Behaviour]] = field(default_factory=dict)
    sent: list[tuple[str, int, float, float]] = field(default_factory=list)
    """Kind, node, when, and how long it is worth something."""
    waiting: dict[str, tuple[int, bytes | Failure | None]] = field(default_factory=dict)

    def nodes(self) -> set[int]:
        return {node for node, (since, end, _) in self.online.items() if since <= self.now < end}

    def push(self, kind: str, messages: Mapping[int, bytes], ttl: float) -> dict[str, int]:
        sent = {}
        for node, data in messages.items():
            self.sent.append((kind, node, self.now, ttl))
            name = f"message {len(self.sent)}"
            sent[name] = node
            said = self.online[node][2](kind, data, self.now) if node in self.nodes() else None
            self.waiting[name] = node, said
        return sent

    def pull(self, message_ids: Iterable[str]) -> dict[str, bytes | Failure]:
        asked = [name for name in message_ids if name in self.waiting]
        return {name: said for name in asked if (said := self.waiting[name][1]) is not None and self.waiting.pop(name)}

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def requests(self) -> list[int]:
        return [node for kind, node, *_ in self.sent if kind == REQUEST]


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
    said: list[str] = []
    carrier = Carrier(service, clients, pinned, said.append, lambda: service.now, service.sleep)
    return carrier, said


def carrier_with_nodes(service: FakeService, clients: int) -> tuple[Carrier, list[str]]:
    """Once it knows who is there."""
    carrier, said = make_carrier(service, clients)
    carrier.wait_for_nodes(5, 100)
    return carrier, said


class Slow(FakeService):
    """Nothing that was sent is answered before the 40th second."""

    def pull(self, message_ids: Iterable[str]) -> dict[str, bytes | Failure]:
        return super().pull(message_ids) if self.now >= 40 else {}


def test_a_node_has_time_to_say_which_place_it_has() -> None:
    """However short the wait for newcomers is; but not forever."""
    service = Slow(online={70: (*FOREVER, node_of(0))})
    carrier, _ = make_carrier(service, 2)
    assert carrier.wait_for_nodes(5, 60) == {0}
    assert 40 <= service.now < 50
    assert [(kind, worth) for kind, _, _, worth in service.sent] == [(WHO, 60.0)]
    silent = FakeService(online={70: (*FOREVER, lambda kind, data, now: None)})
    assert make_carrier(silent, 2)[0].wait_for_nodes(5, 60) == set()
    assert 60 <= silent.now < 70


def test_who_claims_the_place_of_an_absent_owner_has_none() -> None:
    service = FakeService(online={71: (*FOREVER, node_of(1)), 99: (*FOREVER, node_of(0))})
    carrier, _ = make_carrier(service, 2, {0: 70, 1: 71})
    carrier.survey(5, 100)
    assert (carrier.nodes_without_place, carrier.contested_places, carrier.places[0]) == ({99}, {}, 70)


def test_a_node_that_comes_back_may_have_another_place() -> None:
    """Its id is that of its key; what it says then counts."""
    service = FakeService(online={70: (*FOREVER, node_of(0)), 71: (0.0, 20.0, node_of(1))})
    carrier, said = make_carrier(service, 3)
    assert carrier.wait_for_nodes(5, 100) == {0, 1}
    service.now = 30.0
    assert carrier.wait_for_nodes(5, 100) == {0}
    service.online[71] = (*FOREVER, node_of(2))
    assert carrier.wait_for_nodes(5, 100) == {0, 2}
    assert carrier.send({k: request(k) for k in (0, 2)}, 60) == {k: request(k) + b"!" for k in (0, 2)}
    assert said[-1] == "client 2 is node 71"
    assert [node for kind, node, *_ in service.sent if kind == WHO] == [70, 71, 71]


def test_places_are_told_by_nodes_once() -> None:
    service = FakeService(online={70: (*FOREVER, node_of(1)), 71: (*FOREVER, node_of(0))})
    carrier, said = make_carrier(service, 2)
    assert carrier.wait_for_nodes(60, 100) == {0, 1}
    assert service.now < 2
    assert carrier.places == {0: 71, 1: 70}
    assert sorted(said) == ["client 0 is node 71", "client 1 is node 70"]
    for _ in range(2):
        assert carrier.send({k: request(k) for k in (0, 1)}, 100) == {k: request(k) + b"!" for k in (0, 1)}
    assert [kind for kind, *_ in service.sent].count(WHO) == 2
    assert all(ttl <= 100 for kind, _, _, ttl in service.sent if kind == REQUEST)


def test_a_start_waits_for_nodes_but_not_forever() -> None:
    service = FakeService(online={70: (20, 1e9, node_of(0)), 71: (45, 1e9, node_of(1))})
    carrier, _ = make_carrier(service, 3)
    assert carrier.wait_for_nodes(30, 100) == {0, 1}
    assert 75 <= service.now < 82  # 30 s after the last one came


def test_who_is_late_is_not_in_it_and_who_is_not_there_refuses() -> None:
    service = FakeService(online={70: (*FOREVER, node_of(0)), 71: (*FOREVER, node_of(1, silent_until=1e9))})
    carrier, _ = carrier_with_nodes(service, 3)
    replies = carrier.send({k: request(k) for k in range(3)}, 90)
    assert replies.keys() == {0, 2}
    assert refused(replies[2]) == "no node has taken this place"
    assert service.requests().count(71) == 3  # at the start and after each third
    assert service.requests().count(70) == 1


def test_nobody_there_takes_no_time() -> None:
    service = FakeService()
    carrier, _ = make_carrier(service, 2)
    assert refused(carrier.send({1: request(1)}, 600)[1]) == "no node has taken this place"
    assert service.now < 5


def test_a_node_that_comes_back_under_another_id_is_asked_again() -> None:
    """The first one is killed with the request; for 40 s the engine believes it to be online: it keeps its place."""
    service = FakeService(online={70: (0, 50, node_of(0, silent_until=1e9)), 71: (12, 1e9, node_of(0))})
    carrier, said = carrier_with_nodes(service, 1)
    assert carrier.send({0: request(0)}, 600) == {0: request(0) + b"!"}
    assert service.requests() == [70, 71]
    assert 50 <= service.now < 55
    assert said[-1] == "node 71: says it is client 0, whose place node 70 has and keeps while online"
    assert carrier.places == {0: 71}


def test_what_nobody_waits_for_any_more_is_taken_from_the_engine() -> None:
    """Which keeps a message until the reply to it was taken. Who is silent is asked again, and replies twice."""
    service = FakeService(
        online={70: (*FOREVER, node_of(0, silent_until=30)), 71: (0, 4, lambda kind, data, now: None)}
    )
    carrier, _ = carrier_with_nodes(service, 2)
    assert carrier.send({0: request(0)}, 120) == {0: request(0) + b"!"}
    assert service.requests() == [70, 70]
    asked, first = service.waiting
    service.waiting = {asked: (71, Failure("gone", gone=True)), first: (70, b"late")}
    service.now += 10
    assert carrier.send({0: request(0)}, 120) == {0: request(0) + b"!"}
    assert not service.waiting


def test_a_place_stays_with_its_owner_while_that_is_online() -> None:
    """Whoever else claims it, before or after; it does not go back to who had it before, either."""
    service = FakeService(online={70: (0, 20, node_of(0)), 71: (3, 60, node_of(0)), 72: (45, 1e9, node_of(0))})
    carrier, _ = carrier_with_nodes(service, 1)
    for now, owner, rivals in ((10, 70, {0: [70, 71]}), (30, 71, {}), (50, 71, {0: [71, 72]}), (70, 72, {})):
        service.now = now
        carrier.send({0: request(0)}, 60)
        carrier.send({0: request(0)}, 60)
        assert (carrier.places, carrier.contested_places) == ({0: owner}, rivals)
    assert service.requests() == [70, 70, 71, 71, 71, 71, 72, 72]
    assert [kind for kind, *_ in service.sent].count(WHO) == 3  # two that claim one place do not take turns


def test_a_survey_waits_for_all_and_names_rivals_of_pinned_places() -> None:
    """Also of places that are taken, and by nodes that answer late."""
    late: Behaviour = lambda kind, data, now: b"0"  # noqa: E731
    service = Slow(online={70: (*FOREVER, node_of(0)), 71: (*FOREVER, node_of(1)), 72: (*FOREVER, late)})
    carrier, said = make_carrier(service, 2, {0: 70, 1: 71})
    assert carrier.survey(5, 60) == {0, 1}
    assert carrier.contested_places == {0: [70, 72]}
    assert carrier.places == {0: 70, 1: 71}
    assert said == ["node 72: says it is client 0, whose place belongs to node 70"]


def test_all_are_asked_each_with_a_query_of_its_own() -> None:
    service = FakeService(online={70: (*FOREVER, node_of(0)), 71: (*FOREVER, node_of(1, silent_until=1e9))})
    asked = list[tuple[str, int]]()

    def query(kind: str, node: int) -> bytes:
        asked.append((kind, node))
        return f"{kind} {node}".encode()

    carrier = Carrier(service, 2, None, lambda text: None, lambda: service.now, service.sleep, query)
    carrier.wait_for_nodes(5, 100)
    assert carrier.ask_all(CHECK, 10) == {0: f"{CHECK} 70!".encode(), 1: Failure("no reply within 10 s")}
    assert asked == [(WHO, 70), (WHO, 71), (CHECK, 70), (CHECK, 71)]


def test_failures_are_refusals_in_words() -> None:
    """Which neither move a cursor nor begin a line."""
    gone, failed = Failure("gone", gone=True), Failure("MemoryError: \x1b[2J\nround 9/9: P-acc 100 %")
    nowhere = (*FOREVER, lambda *_: failed)
    service = FakeService(online={70: (*FOREVER, failing(0, failed)), 71: (0, 4, failing(1, gone)), 72: nowhere})
    carrier, said = carrier_with_nodes(service, 2)
    replies = carrier.send({k: request(k) for k in (0, 1)}, 60)
    assert refused(replies[0]) == r"MemoryError: \x1b[2J\nround 9/9: P-acc 100 %"
    assert said[-1].startswith("node 72: got 'MemoryError: ")
    assert not [line for line in said if "\x1b" in line or "\n" in line]
    assert refused(replies[1]) == "its node is gone"
    assert 30 < service.now < 40  # it might have come back
    assert refused(carrier.send({1: request(1)}, 60)[1]) == "its node is gone"
    assert service.now < 40


@pytest.mark.parametrize(("nodes", "fewest", "most"), [(2, 80, 130), (100, 60, 90)])
def test_looks_for_replies_are_few(nodes: int, fewest: int, most: int) -> None:
    """In 300 s without a reply. A look costs one request per node: for 100 nodes there is one every 2 s at first."""
    service = FakeService(online={70 + k: (*FOREVER, node_of(k, silent_until=1e9)) for k in range(nodes)})
    carrier, _ = carrier_with_nodes(service, nodes)
    looks, pull = list[float](), service.pull
    service.pull = lambda names: looks.append(service.now) or pull(names)  # type: ignore[func-returns-value, method-assign]
    carrier.send({k: request(k) for k in range(nodes)}, 300)
    assert fewest < len(set(looks)) < most


def test_a_node_that_was_away_is_asked_again_at_once() -> None:
    """Its id is its key's. The engine's word that it was gone comes late."""
    service = FakeService(online={70: (0, 10, node_of(0, silent_until=1e9))})
    carrier, _ = carrier_with_nodes(service, 1)
    slept = service.sleep

    def sleep(seconds: float) -> None:
        slept(seconds)
        if service.now >= 25:
            service.online[70] = (25, 1e9, node_of(0, silent_until=40))
            for name, (node, said) in list(service.waiting.items()):
                if said is None and name == "message 2":
                    service.waiting[name] = node, Failure("gone", gone=True)

    carrier._sleep = sleep
    assert carrier.send({0: request(0)}, 90) == {0: request(0) + b"!"}  # who stays there, every 30 s
    times = [now for kind, _, now, _ in service.sent if kind == REQUEST]
    assert [now > 25 for now in times] == [False, True, True]
    assert times[1] < 29
    assert 55 <= service.now < 65


def test_what_a_node_left_behind_is_not_the_next_ones_fault() -> None:
    service = FakeService(
        online={70: (0, 15, node_of(0, silent_until=1e9)), 71: (10, 1e9, node_of(0, silent_until=1e9))}
    )
    carrier, _ = carrier_with_nodes(service, 1)
    pull = service.pull

    def failing(names: Iterable[str]) -> dict[str, bytes | Failure]:
        late = {
            name: Failure("expired") for name in names if service.now > 20 and service.waiting.get(name, (0,))[0] == 70
        }
        return pull(names) | late

    service.pull = failing  # type: ignore[method-assign]
    assert carrier.send({0: request(0)}, 40) == {}


@pytest.mark.parametrize("claim", [b"2", b"-1", b"one", b"\xff" * 1000, b""])
def test_a_node_without_a_place_is_named_and_left_alone(claim: bytes) -> None:
    own, wrong, gone = (*FOREVER, node_of(0)), (*FOREVER, lambda kind, data, now: claim), (0.0, 50.0, node_of(8))
    service = FakeService(online={70: own, 71: wrong, 72: gone})
    carrier, said = make_carrier(service, 2)
    assert carrier.wait_for_nodes(5, 100) == {0}
    assert carrier.nodes_without_place == {71, 72}
    assert any(line.startswith("node 71: got ") and "below 2" in line and len(line) < 150 for line in said)
    service.now = 51.0
    carrier.send({0: request(0)}, 60)
    assert service.requests() == [70]
    assert carrier.nodes_without_place == {71}


def test_pinned_places_are_not_given_away() -> None:
    service = FakeService(online={70: (*FOREVER, node_of(0)), 71: (*FOREVER, node_of(0)), 72: (*FOREVER, node_of(1))})
    carrier, said = make_carrier(service, 2, {0: 70})
    assert carrier.wait_for_nodes(20, 100) == {0, 1}
    assert carrier.places == {0: 70, 1: 72}
    assert "node 71: says it is client 0, whose place belongs to node 70" in said
    carrier.send({k: request(k) for k in (0, 1)}, 60)
    assert service.requests() == [70, 72]
