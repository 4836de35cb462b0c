"""sketchmean as docs/protocol.md has it, and catching up in all its forms: package and the plain second implementation,
bit for bit, on a CPU and on a GPU."""

from __future__ import annotations

from typing import Any

import make_vectors
import plain_client as plain
import pytest
from plain_client.sketchmean import CHANGES, DIFFERENCES, MeanClient, MeanServer
from second import (
    CLIENTS,
    VECTORS,
    Schedule,
    bits32,
    devices,
    f32s,
    f64,
    federate,
    last_trained,
    recorded_run,
    run_of,
)

from factories import recorded_messages
from pfedlms.wire.frames import SERVER

ROUNDS = 50
CASES = [
    pytest.param({"ratio": 0.25, "answer": 0.05, "check_every": 4}, id="digests"),
    pytest.param(
        {"ratio": 0.3, "answer": 0.02, "allocation": 0.5, "refresh": 2, "check_every": 0, "gain": 1.0}, id="plain"
    ),
    pytest.param({"ratio": 1.0, "answer": 0.3, "check_every": 1, "gain": 0.7}, id="most"),
]


# Client 2 is absent for two phases and later for twenty, and client 3 takes part once.
ABSENT = {2: (2, 3, *range(7, 27)), 3: {*range(ROUNDS + 1)} - {45}}


@devices
@pytest.mark.parametrize("chosen", CASES)
def test_every_frame_of_fifty_rounds_is_recomputed(chosen: dict[str, Any], device: str) -> None:
    """Votes, answers, S, z, w, and the frames with which absent clients catch up."""
    federation = federate("sketchmean", chosen, Schedule(ABSENT), device)
    federation.start()
    run, samples = run_of(federation), federation.data.samples
    assert run.digest == federation._terms.digest
    server, clients = MeanServer(run), [MeanClient(run, k, samples[k]) for k in range(CLIENTS)]
    kinds: list[int] = []
    for number in range(ROUNDS):
        trained, scales = last_trained(federation), list(server.scales)
        with recorded_messages() as messages:
            report = federation.play_round()
        made = {(sent.message.kind, sent.sender): sent.data for sent in messages}
        up = [clients[k].send(number, own["params"].tolist()) for k, own in trained.items()]
        assert up == [made[plain.UP, k] for k in trained]
        answer = server.reply(trained, reversed(up))
        assert answer == made[plain.DOWN, SERVER]
        assert bits32(server.z) == bits32(federation._state.server["unsent"].tolist())
        sent = {k: server.catch_up(k, clients[k].answers_known, scales) for k in report.participants}
        assert report.traffic.catch_up == sum(len(data) for frames in sent.values() for data in frames)
        for k, frames in sent.items():
            kinds += [data[5] for data in frames[:1]]
            for data in (*frames, answer):
                assert data[5] == plain.DOWN or data == made[data[5], SERVER]
                clients[k].receive(data)
        for k, own in last_trained(federation).items():
            assert bits32(clients[k].w) == bits32(server.w) == bits32(own["model"].tolist())
            assert bits32(clients[k].scales) == bits32(own["scale"].tolist())
    assert (server.refused, server.out_of_sync) == ([], set())
    assert len(kinds) == 3
    assert set(kinds) <= {plain.DOWN, plain.MODEL, CHANGES, DIFFERENCES}


@pytest.mark.parametrize("number", range(len(VECTORS.get("sketchmean", []))))
def test_recorded_runs_are_recomputed(number: int) -> None:
    entry = VECTORS["sketchmean"][number]
    known = entry["agreement"]
    run = recorded_run("sketchmean", known, gain=f64(entry["gain"]))
    assert (run.text(), run.digest.hex()) == (known["text"], known["digest"])
    server = MeanServer(run)
    clients = [MeanClient(run, k, samples) for k, samples in enumerate(make_vectors.SAMPLES)]
    for played in entry["rounds"]:
        up = []
        scales = list(server.scales)
        for stored in played["clients"]:
            client = clients[stored["id"]]
            client.w = f32s(stored.get("w", bits32(client.w)))  # a client that is out of sync has a w of its own
            up.append(client.send(played["round"], f32s(stored["model"])))
            assert up[-1].hex() == stored["frame"]
        answer = server.reply([stored["id"] for stored in played["clients"]], reversed(up))
        assert answer.hex() == played["reply"]
        found = [bits32(each) for each in (server.z, server.w, server.scales)]
        assert found == [played[name] for name in ("z", "w", "scale")]
        server.out_of_sync |= {each["id"] for each in played["caught_up"] if each["heard"] < 0}
        for k in played["hear"]:
            frames = server.catch_up(k, clients[k].answers_known, scales)
            stored_frames = [each["frames"] for each in played["caught_up"] if each["id"] == k]
            assert [[data.hex() for data in frames]] * bool(frames) == stored_frames
            for data in (*frames, answer):
                clients[k].receive(data)
            assert bits32(clients[k].w) == played["w"]
        server.out_of_sync -= set(played["hear"])


def test_the_recorded_runs_contain_every_way_to_catch_up() -> None:
    kinds = {
        bytes.fromhex(each["frames"][0])[5]
        for entry in VECTORS["sketchmean"] for played in entry["rounds"] for each in played["caught_up"]
    }  # fmt: skip
    assert kinds == {plain.DOWN, plain.MODEL, CHANGES, DIFFERENCES}
