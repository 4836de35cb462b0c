"""Nodes that are broken or hostile: left out and named; the others go on as if they were not there."""

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
def test_a_bad_node_all_along(method: str, lie: str, tmp_path: Path) -> None:
    """What it says is left out of every exchange and every number, and its name is in the metrics."""
    if (method, lie) == ("pfedlms", "NaN"):
        lie = "an enormous message"  # its second message has no numbers
    config = make_config(method, tmp_path / "run")
    change, said = (MESSAGES | REPLIES)[lie]
    if (method, lie) == ("sketchvote", "NaN"):
        change = with_frame(-5, "f", float("nan"))  # a byte follows its scales
    fleet = Fleet(config, tmp_path / "nodes", lying_route(change, lambda: fleet))
    with pytest.warns(UserWarning, match=f"client {LIAR} is left out: "):
        summary, metrics = serve_run(config, fleet)
    # After the last steps nobody is asked for a message, so that one whose messages alone are bad trains in them.
    last = lie in MESSAGES and method != "pfedlms"
    expected, federation = simulate_without(config, LIAR, range(3) if last else None)
    unlike = {"rejected": None, "bytes": None}  # requests to it are sent, and answers count
    assert [{**comparable(each), **unlike} for each in metrics] == [{**comparable(each), **unlike} for each in expected]
    for each in metrics:
        assert list(each["left_out"]) == [str(LIAR)]
        assert said in each["left_out"][str(LIAR)]
        assert each["rejected"] > 0
    assert summary["status"] == "finished"
    check_states(fleet, federation, but=LIAR)


def test_a_reply_of_before(tmp_path: Path) -> None:
    """Replayed byte by byte: it is refused by its trip. `test_what_a_node_refuses` has old requests."""
    config = make_config("fedavg", tmp_path / "run")
    old: list[bytes] = []

    def replay(said: Envelope, node: Node) -> bytes:
        old.append(said.encode())
        return old[0]

    fleet = Fleet(config, tmp_path / "nodes", lying_route(replay, lambda: fleet))
    with pytest.warns(UserWarning, match="RoundError: reply: got one to round 1, trip 0, expected |OversizedError"):
        _, metrics = serve_run(config, fleet)
    assert [list(each["left_out"]) for each in metrics] == [[str(LIAR)]] * 3


def test_a_claim_that_changes_between_exchanges_is_refused(tmp_path: Path) -> None:
    """Own data, so that the server does not know N_k: the first claim of a round is what counts in it."""
    data, own, _ = own_data()
    config = make_config("pfedlms", tmp_path / "run", data=data)

    def more(said: Envelope, node: Node) -> bytes:
        second = any(each.code == Code.SEND and each.index == 1 for each in said.records)
        return bytes(with_frame(16, "I", 1_000_000)(said, node)) if second else said.encode()

    fleet = Fleet(config, tmp_path / "nodes", lying_route(more, lambda: fleet), data=own)
    with pytest.warns(UserWarning, match=r"samples: got 1000000, expected \d+, as before"):
        _, metrics = serve_run(config, fleet)
    assert all("samples: got 1000000" in each["left_out"][str(LIAR)] for each in metrics[:1])
    assert str(LIAR) not in metrics[0].get("clients", [LIAR])


def test_a_weight_is_limited_and_named(tmp_path: Path) -> None:
    """All claims of a node with data of its own are a million: it counts as any c with c ≤ f Σ min(N_j, c)."""
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


def test_what_a_node_refuses(tmp_path: Path) -> None:
    """Each a typed refusal in the reply; its state stays as it is."""
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

    def asked(*records: Record, trip: int = 99, client: int = 1, of: bytes = run, kind: Kind = Kind.REQUEST) -> bytes:
        return Envelope(kind, of, client, 9, trip, records).encode()

    train, send = Record(Code.TRAIN, 4), Record(Code.SEND, 3)
    for request, why in [
        (b"", Reason.BROKEN),
        (asked(train)[:-1], Reason.BROKEN),
        (asked(of=bytes(8)), Reason.RUN),
        (asked(client=2), Reason.CLIENT),
        (asked(kind=Kind.REPLY), Reason.BROKEN),
        (asked(train, trip=0), Reason.STALE),
        (asked(train, trip=3), Reason.STALE),
        (asked(Record(Code.TRAIN, 3)), Reason.STALE),
        (asked(train), Reason.ORDER),
        (asked(Record(Code.SEND, 2)), Reason.STALE),
        (asked(Record(Code.SEND, 4)), Reason.ORDER),
        (asked(Record(Code.SEND, 3, index=1)), Reason.BROKEN),
        (asked(send, send), Reason.STALE),
        (asked(Record(Code.ANSWER, 5, data=answer)), Reason.ORDER),
        (asked(Record(Code.ANSWER, 3, data=answer)), Reason.BROKEN),
        (asked(Record(Code.MODEL, 5, data=bytes(forged)[:-4])), Reason.BROKEN),
        (asked(Record(Code.MEASURED)), Reason.BROKEN),
    ]:
        refused, heard = decode(node.handle(request)).records
        assert (refused.code, heard.code, heard.number) == (Code.REFUSED, Code.ANSWERS_KNOWN, 3)
        assert Reason(refused.flags) == why, refusal_text(refused)
        assert node.state is before
    again, said = fleet.trips[3][1]
    assert node.handle(again) == said
    first, _ = fleet.trips[0][1]
    assert refusal_text(decode(node.handle(first)).records[0]).startswith(
        "stale: round 1: got trip 0, expected one after 3"
    )
    assert decode(node.handle(asked(Record(Code.ANSWER, 0, data=answer)))).records == (Record(Code.ANSWERS_KNOWN, 3),)


def test_a_damaged_state_is_named(tmp_path: Path) -> None:
    """One bit of a model, which is a number as good as any."""
    config = make_config("fedavg", tmp_path / "run", train={"rounds": 1})
    fleet = Fleet(config, tmp_path / "nodes")
    serve_run(config, fleet)
    node, model = fleet.node(1), fleet.node(1).state.cohort.params.numpy().tobytes()
    fleet.close(1)
    kept = node.path.read_bytes()
    assert kept.count(model) == 1
    node.path.write_bytes(kept.replace(model, bytes([model[0] ^ 1]) + model[1:]))
    with pytest.raises(RunDirectoryError, match=r"cannot be read \(ValueError: checksum of .*\); delete it"):
        fleet.node(1)


def test_a_state_of_another_version_is_refused(tmp_path: Path) -> None:
    config = make_config("fedavg", tmp_path / "run", train={"rounds": 1})
    fleet = Fleet(config, tmp_path / "nodes")
    serve_run(config, fleet)
    path = fleet.node(1).path
    fleet.close(1)
    torch.save(torch.load(path, weights_only=True) | {"schema": 1}, path)
    with pytest.raises(RunDirectoryError, match=r"schema 1, expected 2: another version of pfedlms .*; delete it"):
        fleet.node(1)
