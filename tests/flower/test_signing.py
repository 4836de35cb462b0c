"""A node executes only requests that its server has signed for it, in order."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from fleet import CLIENTS, Fleet, comparable, make_config, serve_run, simulate

from pfedlms.deploy import Coordinator, Node
from pfedlms.deploy.envelope import Code, Reason, decode
from pfedlms.deploy.nodes import message_bytes
from pfedlms.deploy.run_setup import RunSetup
from pfedlms.flower.signing import (
    SEAL_BYTES,
    Seal,
    SealedNode,
    SealError,
    SealFlag,
    SigningTransport,
    check_query,
    seal,
    sign_query,
    unseal,
)  # fmt: skip

KEY, OTHER = Ed25519PrivateKey.generate(), Ed25519PrivateKey.generate()


def signed_handler(node: Node) -> Callable[[bytes], bytes]:
    """The function with which a node handles signed requests."""
    return SealedNode(node, KEY.public_key()).handle


def signing_transport(fleet: Fleet, note: Callable[[dict[str, Any]], None] = lambda record: None) -> Any:
    return SigningTransport(fleet, KEY, message_bytes(RunSetup(fleet.config)), note)


def refusal_in(reply: bytes) -> tuple[Reason, str]:
    first = decode(reply).records[0]
    assert first.code == Code.REFUSED
    return Reason(first.flags), bytes(first.data).decode()


@pytest.mark.parametrize("method", ["pfedlms", "sketchvote", "fedavg"])
@pytest.mark.parametrize("participation", [1.0, 0.5])
def test_a_signed_run_is_the_run_in_one_process(method: str, participation: float, tmp_path: Path) -> None:
    config = make_config(method, tmp_path / "run", train={"participation": participation})
    _, metrics = serve_run(config, signing_transport(Fleet(config, tmp_path / "nodes", handler=signed_handler)))
    assert [comparable(each) for each in metrics] == [
        comparable(each) for each in simulate(config.with_run(out="")).metrics
    ]
    assert all(each["left_out"] == {} for each in metrics)


AfterThreeTrips = tuple[Fleet, dict[int, bytes], bytes]


@pytest.fixture
def after_three_trips(tmp_path: Path) -> AfterThreeTrips:
    """A fleet after three trips, the signed requests of the third, and the reply of client 0 to it."""
    config = make_config("pfedlms")
    fleet = Fleet(config, tmp_path / "nodes", handler=signed_handler)
    coordinator = Coordinator(config, signing_transport(fleet))
    for _ in range(3):
        coordinator.step()
    return fleet, {client: request for client, (request, _) in fleet.trips[2].items()}, fleet.node(0).state.reply


def test_a_repeated_request_gets_the_stored_reply(after_three_trips: AfterThreeTrips) -> None:
    fleet, last, reply = after_three_trips
    handle = signed_handler(fleet.node(0))
    assert handle(last[0]) == reply
    # A server that was killed has forgotten which trips were answered: its seal differs, the request does not.
    about, content = unseal(last[0], KEY.public_key())
    assert (about.trip, about.answered) == (2, 2)  # trips 0 and 1: a state from before trip 1 is an older copy
    assert handle(seal(KEY, replace(about, answered=0, flags=SealFlag.RESUME), content)) == reply


def test_requests_that_the_server_did_not_sign_are_refused(after_three_trips: AfterThreeTrips) -> None:
    """Requests that an attacker makes from the signed one to client 0; they change no state."""
    fleet, last, reply = after_three_trips
    about, content = unseal(last[0], KEY.public_key())
    signed, handle, other_run, far = decode(content), signed_handler(fleet.node(0)), b"12345678", 2**63 - 1
    ahead = replace(signed, trip=far, records=()).encode()
    other_key, other_seal = "the signature is not of this node's server", "the seal is not of this envelope"
    for request, reason, expected in [
        (content, Reason.BROKEN, "is not signed"),
        (ahead, Reason.BROKEN, "is not signed"),
        (b"", Reason.BROKEN, "is not signed"),
        (last[0][:-1] + bytes([last[0][-1] ^ 1]), Reason.BROKEN, other_key),
        (seal(OTHER, replace(about, trip=far), ahead), Reason.BROKEN, other_key),
        (last[0][:SEAL_BYTES] + ahead, Reason.BROKEN, "bytes of content"),
        (seal(KEY, replace(about, trip=about.trip + 1), content), Reason.BROKEN, other_seal),
        (seal(KEY, replace(about, flags=SealFlag.QUERY), content), Reason.BROKEN, other_seal),
        (last[1], Reason.CLIENT, "got a request to 1, expected 0"),
        (
            seal(KEY, replace(about, run=other_run), replace(signed, run=other_run).encode()),
            Reason.RUN,
            f"got {other_run.hex()}",
        ),
        (seal(KEY, replace(about, trip=1), replace(signed, trip=1).encode()), Reason.STALE, "got trip 1"),
        (seal(KEY, about, replace(signed, records=()).encode()), Reason.STALE, "got trip 2, expected one after 2"),
    ]:
        found, text = refusal_in(handle(request))
        assert (found, expected in text) == (reason, True), text
        assert (fleet.node(0).state.trip, handle(last[0])) == (2, reply)


def test_a_request_with_changed_bytes_is_refused(after_three_trips: AfterThreeTrips) -> None:
    fleet, last, reply = after_three_trips
    handle, draw = signed_handler(fleet.node(0)), random.Random(1)
    for _ in range(500):
        data = bytearray(last[0])
        for _ in range(draw.randint(1, 3)):
            data[draw.randrange(len(data))] ^= draw.randint(1, 255)
        cut = bytes(data[: draw.choice([len(data), draw.randrange(len(data))])])
        if cut != last[0]:
            refusal_in(handle(cut))
    assert handle(last[0]) == reply


def test_a_node_with_an_older_state_waits_for_a_signed_resume(after_three_trips: AfterThreeTrips) -> None:
    """A node without requests in some trips accepts the next one: the seal names the last trip that it answered."""
    fleet, last, _ = after_three_trips
    about, content = unseal(last[0], KEY.public_key())
    ahead = replace(decode(content), trip=9, records=()).encode()

    def reply_to(answered: int) -> bytes:
        return signed_handler(fleet.node(0))(seal(KEY, replace(about, trip=9, answered=answered), ahead))

    assert refusal_in(reply_to(answered=8))[0] == Reason.ORDER
    assert refusal_in(reply_to(answered=4))[0] == Reason.ORDER
    assert decode(reply_to(answered=3)).records[0].code == Code.ANSWERS_KNOWN  # it had no requests in trips 3 to 8
    assert fleet.node(0).state.trip == 9


def test_a_node_that_lost_its_state_is_resumed(tmp_path: Path) -> None:
    """It refuses once; then the server signs a resume and sends it the answers that it does not know."""
    config = make_config("sketchvote", tmp_path / "run", train={"rounds": 6})

    def route(client: int, request: bytes, handle: Callable[[bytes], bytes]) -> bytes:
        if client == 0 and len(fleet.trips) == 3:
            fleet.delete_state(0)
        return handle(request)

    fleet = Fleet(config, tmp_path / "nodes", route, handler=signed_handler)
    with pytest.warns(UserWarning, match="client 0 is left out: refused, order: the server has a reply of this node"):
        _, metrics = serve_run(config, signing_transport(fleet))
    flags = [unseal(trip[0][0], KEY.public_key())[0].flags for trip in fleet.trips]
    assert flags == [SealFlag.RESUME, 0, 0, 0, SealFlag.RESUME, *flags[5:]]
    assert sum("0" in each["left_out"] for each in metrics) <= 3
    assert metrics[-1]["left_out"] == {}
    assert fleet.node(0).state.answers_known == 6
    models = [fleet.node(client).state.cohort.state["model"] for client in range(CLIENTS)]
    assert all(torch.equal(model, models[0]) for model in models)


def test_a_signed_query_is_valid_for_one_node_in_one_run() -> None:
    data = sign_query(KEY, 7, "query.who", 5)
    check_query(data, KEY.public_key(), 7, "query.who", 5)
    check_query(sign_query(OTHER, 7, "query.who", 5), None, 7, "query.who", 5)
    for key, run, kind, node in [
        (OTHER, 7, "query.who", 5), (KEY, 8, "query.who", 5), (KEY, 7, "query.check", 5), (KEY, 7, "query.who", 6),
    ]:  # fmt: skip
        with pytest.raises(SealError):
            check_query(data, key.public_key(), run, kind, node)
    with pytest.raises(SealError, match="is not signed"):
        check_query(b"", KEY.public_key(), 7, "query.who", 5)


def test_the_layout_of_a_seal_is_that_of_the_page() -> None:
    """By hand from docs/protocol.md, section 16."""
    data = seal(KEY, Seal(b"runrunru", 3, 2**40, 17, SealFlag.RESUME), b"envelope")
    assert data[:8] == b"PFLS\x01\x01\x00\x00"
    assert data[8:16] == b"runrunru"
    assert struct.unpack("<IIQQQ", data[16:48]) == (3, 0, 2**40, 17, 8)
    KEY.public_key().verify(data[48:112], b"pfedlms request 1\0" + data[:48] + b"envelope")
    assert data[112:] == b"envelope"
