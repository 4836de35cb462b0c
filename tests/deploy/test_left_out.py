"""Broken or hostile nodes are left out and named; the run continues as if they were absent."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from false_replies import LIAR, MESSAGES, REPLIES, lying_route, with_frame
from fleet import CLIENTS, Fleet, check_states, comparable, make_config, own_data, serve_run, simulate_without

from pfedlms.deploy import Node
from pfedlms.deploy.envelope import Code, Envelope, Kind, Reason, Record, decode, refusal_text
from pfedlms.errors import RunDirectoryError
from pfedlms.wire.frames import HEADER_BYTES, SERVER, frame


@pytest.mark.parametrize("lie", [*MESSAGES, *REPLIES])
@pytest.mark.parametrize("method", ["fedavg", "sketchvote", "pfedlms"])
def test_a_node_with_false_replies_is_left_out_of_the_whole_run(method: str, lie: str, tmp_path: Path) -> None:
    """Its replies change no exchange and no number, and the metrics name it."""
    if (method, lie) == ("pfedlms", "NaN"):
        lie = "an enormous message"  # its second message has no numbers
    config = make_config(method, tmp_path / "run")
    change, reason = (MESSAGES | REPLIES)[lie]
    if (method, lie) == ("sketchvote", "NaN"):
        change = with_frame(-5, "f", float("nan"))  # a byte follows its scales
    fleet = Fleet(config, tmp_path / "nodes", lying_route(change, lambda: fleet))
    with pytest.warns(UserWarning, match=f"client {LIAR} is left out: "):
        summary, metrics = serve_run(config, fleet)
    # After the last steps the server asks for no message, so a node whose messages alone are false takes part in them.
    last = lie in MESSAGES and method != "pfedlms"
    expected, federation = simulate_without(config, LIAR, range(3) if last else None)
    unlike = {"rejected": None, "bytes": None}  # requests to the liar are sent, and its answers are counted
    assert [{**comparable(each), **unlike} for each in metrics] == [{**comparable(each), **unlike} for each in expected]
    for each in metrics:
        assert list(each["left_out"]) == [str(LIAR)]
        assert reason in each["left_out"][str(LIAR)]
        assert each["rejected"] > 0
    assert summary["status"] == "finished"
    check_states(fleet, federation, skip=LIAR)


def test_a_number_of_samples_that_changes_between_exchanges_is_refused(tmp_path: Path) -> None:
    """Nodes have their own data, so the server does not know N_k and uses the first number reported in a round."""
    data, own, _ = own_data()
    config = make_config("pfedlms", tmp_path / "run", data=data)

    def more(reply: Envelope, node: Node) -> bytes:
        second = any(each.code == Code.SEND and each.index == 1 for each in reply.records)
        return bytes(with_frame(16, "I", 1_000_000)(reply, node)) if second else reply.encode()

    fleet = Fleet(config, tmp_path / "nodes", lying_route(more, lambda: fleet), data=own)
    with pytest.warns(UserWarning, match=r"samples: got 1000000, expected \d+, as before"):
        _, metrics = serve_run(config, fleet)
    assert all("samples: got 1000000" in each["left_out"][str(LIAR)] for each in metrics[:1])
    assert str(LIAR) not in metrics[0].get("clients", [LIAR])


def test_a_too_large_weight_is_limited_and_named(tmp_path: Path) -> None:
    """A node with data of its own reports a million samples: it gets the largest weight c with c ≤ f Σ min(N_j, c)."""
    data, own, samples = own_data()
    config = make_config("fedavg", tmp_path / "run", data=data, train={"max_weight": 0.4})
    fleet = Fleet(config, tmp_path / "nodes", data=own)
    fleet.node(LIAR).samples = 1_000_000
    with pytest.warns(UserWarning, match="client 2 weighs less than its 1000000 samples"):
        _, metrics = serve_run(config, fleet)
    assert metrics[0]["weakened"] == [LIAR]
    frames = {client: decode(reply).records[-2].data for client, (_, reply) in fleet.trips[0].items() if reply}
    models = {k: torch.frombuffer(bytearray(data[HEADER_BYTES:]), dtype=torch.float32) for k, data in frames.items()}
    weights = {client: samples[client] for client in range(CLIENTS) if client != LIAR}
    most = sum(weights.values()) * 2 // 3  # c ≤ 0.4 (others + c)
    assert max(weights.values()) < most
    weights[LIAR] = most
    mean = sum(weight * models[client].double() for client, weight in weights.items()) / sum(weights.values())
    answer = decode(fleet.trips[1][0][0]).records[0]
    assert answer.code == Code.ANSWER
    got = torch.frombuffer(bytearray(answer.data[HEADER_BYTES:]), dtype=torch.float32)
    torch.testing.assert_close(got, mean.float(), rtol=0, atol=1e-7)


def test_a_node_refuses_wrong_requests(tmp_path: Path) -> None:
    """With a typed refusal; its state does not change."""
    config = make_config("sketchvote", tmp_path / "run")
    fleet = Fleet(config, tmp_path / "nodes")
    serve_run(config, fleet)
    node = fleet.node(1)
    before, run = node.state, node.run
    answer = next(each.data for each in decode(fleet.trips[1][1][0]).records if each.code == Code.ANSWER)
    forged = frame(
        node._terms.catch_up.model, {"model": node.state.cohort.params[0].numpy()}, round=5, sender=SERVER, samples=0,
        digest=node._terms.digest,
    )  # fmt: skip

    def request_of(
        *records: Record, trip: int = 99, client: int = 1, of: bytes = run, kind: Kind = Kind.REQUEST
    ) -> bytes:
        return Envelope(kind, of, client, 9, trip, records).encode()

    train, send = Record(Code.TRAIN, 4), Record(Code.SEND, 3)
    for request, reason in [
        (b"", Reason.BROKEN),
        (request_of(train)[:-1], Reason.BROKEN),
        (request_of(of=bytes(8)), Reason.RUN),
        (request_of(client=2), Reason.CLIENT),
        (request_of(kind=Kind.REPLY), Reason.BROKEN),
        (request_of(train, trip=0), Reason.STALE),
        (request_of(train, trip=3), Reason.STALE),
        (request_of(Record(Code.TRAIN, 3)), Reason.STALE),
        (request_of(train), Reason.ORDER),
        (request_of(Record(Code.SEND, 2)), Reason.STALE),
        (request_of(Record(Code.SEND, 4)), Reason.ORDER),
        (request_of(Record(Code.SEND, 3, index=1)), Reason.BROKEN),
        (request_of(send, send), Reason.STALE),
        (request_of(Record(Code.ANSWER, 5, data=answer)), Reason.ORDER),
        (request_of(Record(Code.ANSWER, 3, data=answer)), Reason.BROKEN),
        (request_of(Record(Code.MODEL, 5, data=bytes(forged)[:-4])), Reason.BROKEN),
        (request_of(Record(Code.MEASURED)), Reason.BROKEN),
    ]:
        refused, known = decode(node.handle(request)).records
        assert (refused.code, known.code, known.number) == (Code.REFUSED, Code.ANSWERS_KNOWN, 3)
        assert Reason(refused.flags) == reason, refusal_text(refused)
        assert node.state is before
    last, reply = fleet.trips[3][1]
    assert node.handle(last) == reply
    first, _ = fleet.trips[0][1]
    assert refusal_text(decode(node.handle(first)).records[0]).startswith(
        "stale: round 1: got trip 0, expected one after 3"
    )
    assert decode(node.handle(request_of(Record(Code.ANSWER, 0, data=answer)))).records == (
        Record(Code.ANSWERS_KNOWN, 3),
    )


def test_a_node_does_not_start_from_a_wrong_state(tmp_path: Path) -> None:
    """One bit of the model is changed, so that it stays a valid number; then the state is of another version."""
    config = make_config("fedavg", tmp_path / "run", train={"rounds": 1})
    fleet = Fleet(config, tmp_path / "nodes")
    serve_run(config, fleet)
    path, model = fleet.node(1).path, fleet.node(1).state.cohort.params.numpy().tobytes()
    fleet.close(1)
    state = path.read_bytes()
    assert state.count(model) == 1
    path.write_bytes(state.replace(model, bytes([model[0] ^ 1]) + model[1:]))
    with pytest.raises(RunDirectoryError, match=r"cannot be read \(ValueError: checksum of .*\); delete it"):
        fleet.node(1)
    path.write_bytes(state)
    torch.save(torch.load(path, weights_only=True) | {"schema": 1}, path)
    with pytest.raises(RunDirectoryError, match=r"schema 1, expected 2: another version of pfedlms .*; delete it"):
        fleet.node(1)
