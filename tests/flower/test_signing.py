"""Signed requests: a node does what its server has signed for it, in order, and nothing else."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from fleet import CLIENTS, Fleet, alone, configured, plain, served

from pfedlms.deploy import Coordinator
from pfedlms.deploy.envelope import Code, Envelope, Kind, Why, decode
from pfedlms.deploy.ground import Ground
from pfedlms.deploy.nodes import message_bytes
from pfedlms.flower.signing import (
    SEAL_BYTES,
    Mark,
    Seal,
    SealedNode,
    SealError,
    SigningTransport,
    check_query,
    content_of,
    query,
    seal,
    unseal,
)

KEY, OTHER = Ed25519PrivateKey.generate(), Ed25519PrivateKey.generate()


@dataclass
class Sealed:
    """A fleet whose nodes accept signed requests only; requests that came are kept."""

    fleet: Fleet
    way: Callable[[int, bytes], bytes | None] | None = None

    def send(self, requests: dict[int, bytes], timeout: float) -> dict[int, bytes]:
        replies = {}
        for client, data in requests.items():
            came = data if self.way is None else self.way(client, data)
            if came is not None:
                replies[client] = SealedNode(self.fleet.node(client), KEY.public_key()).handle(came)
        return replies


def signing(fleet: Fleet, way: Callable[[int, bytes], bytes | None] | None = None) -> SigningTransport:
    return SigningTransport(Sealed(fleet, way), KEY, message_bytes(Ground(fleet.config)))


def why(reply: bytes) -> tuple[Why, str]:
    first = decode(reply).records[0]
    assert first.code == Code.REFUSED
    return Why(first.flags), bytes(first.data).decode()


@pytest.mark.parametrize("method", ["pfedlms", "sketchvote", "fedavg"])
@pytest.mark.parametrize("participation", [1.0, 0.5])
def test_a_signed_run_is_the_run_in_one_process(method: str, participation: float, tmp_path: Path) -> None:
    config = configured(method, tmp_path / "run", train={"participation": participation})
    _, metrics = served(config, signing(Fleet(config, tmp_path / "nodes")))  # type: ignore[arg-type]
    assert [plain(each) for each in metrics] == [plain(each) for each in alone(config.with_run(out="")).metrics]
    assert all(each["left_out"] == {} for each in metrics)


@pytest.fixture
def played(tmp_path: Path) -> tuple[Fleet, dict[int, bytes], bytes]:
    """A fleet after three trips, the signed requests of the third, and the reply of client 0 to it."""
    config = configured("pfedlms")
    fleet, last = Fleet(config, tmp_path / "nodes"), dict[int, bytes]()
    coordinator = Coordinator(config, signing(fleet, lambda client, data: last.setdefault(client, data)))
    for _ in range(3):
        last.clear()
        coordinator.step()
    return fleet, last, fleet.node(0).state.reply


def test_the_same_request_again_gets_the_stored_reply(played: tuple[Fleet, dict[int, bytes], bytes]) -> None:
    fleet, last, reply = played
    node = SealedNode(fleet.node(0), KEY.public_key())
    assert node.handle(last[0]) == reply
    # A server that was killed does not know any more what was answered: its seal differs, the request does not.
    about, content = unseal(last[0], KEY.public_key())
    assert node.handle(seal(KEY, replace(about, answered=0, marks=Mark.RESUME), content)) == reply


FORGED = 2**63 - 1


def forged(name: str, last: dict[int, bytes]) -> bytes:
    """What an attacker makes of the signed request to client 0."""
    about, content = unseal(last[0], KEY.public_key())
    asked = decode(content)
    empty = Envelope(Kind.REQUEST, asked.run, 0, asked.round, FORGED, ()).encode()
    flipped = bytearray(last[0])
    flipped[-1] ^= 1
    return {
        "unsigned": content,
        "unsigned, far ahead": empty,
        "own key": seal(OTHER, replace(about, trip=FORGED), empty),
        "old signature, far ahead": last[0][:48] + last[0][48:SEAL_BYTES] + empty,
        "seal of another trip": seal(KEY, replace(about, trip=about.trip + 1), content),
        "to another place": last[1],
        "of another run": seal(KEY, replace(about, run=b"12345678"), replace(asked, run=b"12345678").encode()),
        "changed": bytes(flipped),
        "an older trip": seal(KEY, replace(about, trip=1), replace(asked, trip=1).encode()),
        "another request": seal(KEY, about, replace(asked, records=()).encode()),
        "a query": seal(KEY, replace(about, marks=Mark.QUERY), content),
        "nothing": b"",
    }[name]


@pytest.mark.parametrize(
    ("name", "reason", "said"),
    [
        ("unsigned", Why.BROKEN, "is not signed"),
        ("unsigned, far ahead", Why.BROKEN, "is not signed"),
        ("own key", Why.BROKEN, "signature is not of this node's server"),
        ("old signature, far ahead", Why.BROKEN, "bytes of content"),
        ("seal of another trip", Why.BROKEN, "the seal is not of this envelope"),
        ("to another place", Why.CLIENT, "got a request to 1, expected 0"),
        ("of another run", Why.RUN, "got 3132333435363738"),
        ("changed", Why.BROKEN, "signature is not of this node's server"),
        ("an older trip", Why.STALE, "got trip 1"),
        ("another request", Why.STALE, "got trip 2, expected one after 2"),
        ("a query", Why.BROKEN, "the seal is not of this envelope"),
        ("nothing", Why.BROKEN, "is not signed"),
    ],
)
def test_what_is_not_the_servers_is_refused(
    name: str, reason: Why, said: str, played: tuple[Fleet, dict[int, bytes], bytes]
) -> None:
    """And the next round is not refused: nothing was stored."""
    fleet, last, reply = played
    node = SealedNode(fleet.node(0), KEY.public_key())
    found, text = why(node.handle(forged(name, last)))
    assert (found, said in text) == (reason, True), text
    assert (fleet.node(0).state.trip, node.handle(last[0])) == (2, reply)


def test_no_changed_byte_is_accepted(played: tuple[Fleet, dict[int, bytes], bytes]) -> None:
    fleet, last, reply = played
    node, draw = SealedNode(fleet.node(0), KEY.public_key()), random.Random(1)
    for _ in range(500):
        data = bytearray(last[0])
        for _ in range(draw.randint(1, 3)):
            data[draw.randrange(len(data))] ^= draw.randint(1, 255)
        cut = bytes(data[: draw.choice([len(data), draw.randrange(len(data))])])
        if cut != last[0]:
            why(node.handle(cut))
    assert node.handle(last[0]) == reply


def test_gaps_are_known_to_the_server_or_resumed(played: tuple[Fleet, dict[int, bytes], bytes]) -> None:
    """A node that was not asked for some trips is asked again; one with an older state waits for a signed resume."""
    fleet, last, _ = played
    about, content = unseal(last[0], KEY.public_key())
    ahead = replace(decode(content), trip=9, records=()).encode()

    def handled(**changed: int) -> bytes:
        return SealedNode(fleet.node(0), KEY.public_key()).handle(seal(KEY, replace(about, trip=9, **changed), ahead))

    assert why(handled(answered=8))[0] == Why.ORDER
    assert why(handled(answered=4))[0] == Why.ORDER
    assert decode(handled(answered=3)).records[0].code == Code.ANSWERS_KNOWN  # trips 3 to 8 were not for it
    assert fleet.node(0).state.trip == 9


def test_a_node_that_lost_its_state_comes_back(tmp_path: Path) -> None:
    """It refuses once, by name; the server resumes it, and sends it what it lacks."""
    config = configured("sketchvote", tmp_path / "run", train={"rounds": 6})
    fleet = Fleet(config, tmp_path / "nodes")
    trips: list[bytes] = []

    def way(client: int, data: bytes) -> bytes:
        if client == 0:
            trips.append(data)
            if len(trips) == 4:
                fleet.close(0)
                fleet.folder.joinpath(f"client-0-{decode(content_of(data)).run.hex()}.pt").unlink()
        return data

    with pytest.warns(UserWarning, match="client 0 is left out: refused, order: the server has a reply of this node"):
        _, metrics = served(config, signing(fleet, way))  # type: ignore[arg-type]
    marks = [unseal(each, KEY.public_key())[0].marks for each in trips]
    assert marks == [Mark.RESUME, 0, 0, 0, Mark.RESUME, *marks[5:]]
    assert sum("0" in each["left_out"] for each in metrics) <= 3
    assert metrics[-1]["left_out"] == {}
    assert fleet.node(0).state.answers_known == 6
    models = [fleet.node(client).state.cohort.state["model"] for client in range(CLIENTS)]
    assert all(torch.equal(model, models[0]) for model in models)


def test_a_server_without_signatures_is_named(tmp_path: Path) -> None:
    """And so is a node that does not know them."""
    config = configured("fedavg", clients=2)
    fleet = Fleet(config, tmp_path / "nodes")
    coordinator = Coordinator(config, SigningTransport(fleet, KEY, message_bytes(Ground(config))))
    with (
        pytest.warns(UserWarning, match="does not know signed requests; update pfedlms there and run"),
        pytest.raises(Exception, match="reached no client"),
    ):
        coordinator.step()


def test_queries_are_for_one_node_in_one_run() -> None:
    data = query(KEY, 7, "query.who", 5)
    check_query(data, KEY.public_key(), 7, "query.who", 5)
    check_query(query(OTHER, 7, "query.who", 5), None, 7, "query.who", 5)
    for key, run, kind, node in [
        (OTHER, 7, "query.who", 5), (KEY, 8, "query.who", 5), (KEY, 7, "query.check", 5), (KEY, 7, "query.who", 6),
    ]:  # fmt: skip
        with pytest.raises(SealError):
            check_query(data, key.public_key(), run, kind, node)
    with pytest.raises(SealError, match="is not signed"):
        check_query(b"", KEY.public_key(), 7, "query.who", 5)


def test_the_layout_is_that_of_the_page() -> None:
    """Worked by hand from docs/protocol.md, section 16."""
    data = seal(KEY, Seal(b"runrunru", 3, 2**40, 17, Mark.RESUME), b"envelope")
    assert data[:8] == b"PFLS\x01\x01\x00\x00"
    assert data[8:16] == b"runrunru"
    assert struct.unpack("<IIQQQ", data[16:48]) == (3, 0, 2**40, 17, 8)
    KEY.public_key().verify(data[48:112], b"pfedlms request 1\0" + data[:48] + b"envelope")
    assert data[112:] == b"envelope"
