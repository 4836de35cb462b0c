"""sketchmean as docs/protocol.md has it, and catching up in all its forms: package and the plain second implementation,
bit for bit, on a CPU and on a GPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import make_vectors
import plain_client as plain
import pytest
import torch
from bit_patterns import bits32, f32s, f64
from plain_client.sketchmean import CHANGES, DIFFERENCES, MeanClient, MeanRun, MeanServer
from torch import nn

from factories import overheard, small_data
from pfedlms.engine import Federation
from pfedlms.engine.training import TrainSettings
from pfedlms.methods import METHODS
from pfedlms.models import CohortModel
from pfedlms.wire.frames import SERVER

VECTORS = json.loads((Path(__file__).parent / "vectors.json").read_text(encoding="ascii"))
CLIENTS, ROUNDS = 4, 50
devices = pytest.mark.parametrize(
    "device",
    ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))],
)
CASES = [
    pytest.param({"ratio": 0.25, "answer": 0.05, "check_every": 4}, {}, id="digests"),
    pytest.param(
        {"ratio": 0.3, "answer": 0.02, "allocation": 0.5, "refresh": 2, "check_every": 0}, {"gain": 1.0}, id="plain"
    ),
    pytest.param({"ratio": 1.0, "answer": 0.3, "check_every": 1}, {"gain": 0.7}, id="most"),
]


class Schedule:
    """All take part but client 2, which is away for two phases and then for twenty, and client 3, which comes once."""

    count = CLIENTS

    def of(self, phase: int) -> tuple[int, ...]:
        away = {2} if 2 <= phase < 4 or 7 <= phase < 27 else set()
        return tuple(k for k in range(CLIENTS) if k not in away and (k != 3 or phase == 45))


def federate(chosen: dict[str, Any], device: str) -> Federation:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        module = nn.Sequential(nn.Linear(4, 12), nn.Linear(12, 1, bias=False), nn.Linear(1, 4))
    module[0].weight.data[:6] = -0.0
    method, model = METHODS["sketchmean"], CohortModel(module, torch.device(device))
    train = TrainSettings(local_steps=3, batch_size=4, learning_rate=0.1, momentum=0.5, weight_decay=1e-4)
    data = small_data(7, 10, 13, 16).to(model.device)
    federation = Federation(method, method.Settings(**chosen), model, data, train, seed=99)
    federation.participation = Schedule()
    return federation


def present(federation: Federation) -> dict[int, dict[str, torch.Tensor]]:
    found = {}
    for cohort in federation._clients.present:
        for row, client in enumerate(cohort.ids):
            own = {"params": cohort.params, **cohort.state}
            found[client] = {name: value[row].cpu() for name, value in own.items()}
    return found


@devices
@pytest.mark.parametrize(("chosen", "alone"), CASES)
def test_every_frame_of_fifty_rounds_is_recomputed(chosen: dict[str, Any], alone: dict[str, Any], device: str) -> None:
    """Votes, answers, S, z, what clients that come back are sent, and w."""
    federation = federate({**chosen, **alone}, device)
    federation.start()
    layers = [(layer.offset, layer.size) for layer in federation.model.layout.layers]
    task, samples = federation.method.task, federation.data.samples
    run = MeanRun(layers, task.classes, task.seed, task.initial.tolist(), **chosen, **alone)
    assert run.digest == federation._digest
    server, clients = MeanServer(run), [MeanClient(run, k, samples[k]) for k in range(CLIENTS)]
    kinds: list[int] = []
    for number in range(ROUNDS):
        trained, scales = present(federation), list(server.scales)
        with overheard() as messages:
            report = federation.play_round()
        made = {(sent.message.kind, sent.sender): sent.data for sent in messages}
        up = [clients[k].send(number, own["params"].tolist()) for k, own in trained.items()]
        assert up == [made[plain.UP, k] for k in trained]
        answer = server.reply(trained, reversed(up))
        assert answer == made[plain.DOWN, SERVER]
        assert bits32(server.z) == bits32(federation._server.server["unsent"].tolist())
        sent = {k: server.catch_up(k, clients[k].heard, scales) for k in report.participants}
        assert report.traffic.catch_up == sum(len(data) for frames in sent.values() for data in frames)
        for k, frames in sent.items():
            kinds += [data[5] for data in frames[:1]]
            for data in (*frames, answer):
                assert data[5] == plain.DOWN or data == made[data[5], SERVER]
                clients[k].hear(data)
        for k, own in present(federation).items():
            assert bits32(clients[k].w) == bits32(server.w) == bits32(own["model"].tolist())
            assert bits32(clients[k].scales) == bits32(own["scale"].tolist())
    assert (server.refused, server.astray) == ([], set())
    assert len(kinds) == 3
    assert set(kinds) <= {plain.DOWN, plain.MODEL, CHANGES, DIFFERENCES}


@pytest.mark.parametrize("number", range(len(VECTORS.get("sketchmean", []))))
def test_runs(number: int) -> None:
    entry = VECTORS["sketchmean"][number]
    known = entry["agreement"]
    settings = make_vectors.as_settings(known["settings"])
    layers = [tuple(pair) for pair in known["layers"]]
    settings["gain"] = f64(entry["gain"])
    run = MeanRun(layers, known["classes"], int(known["seed"], 16), f32s(known["initial"]), **settings)
    assert (run.text(), run.digest.hex()) == (known["text"], known["digest"])
    server = MeanServer(run)
    clients = [MeanClient(run, k, samples) for k, samples in enumerate(make_vectors.SAMPLES)]
    for played in entry["rounds"]:
        up = []
        scales = list(server.scales)
        for stored in played["clients"]:
            up.append(clients[stored["id"]].send(played["round"], f32s(stored["model"])))
            assert up[-1].hex() == stored["frame"]
        answer = server.reply([stored["id"] for stored in played["clients"]], reversed(up))
        assert answer.hex() == played["reply"]
        found = [bits32(each) for each in (server.z, server.w, server.scales)]
        assert found == [played[name] for name in ("z", "w", "scale")]
        lost = {each["id"] for each in played["caught_up"] if each["heard"] < 0}
        server.astray |= lost
        for k in played["hear"]:
            frames = server.catch_up(k, clients[k].heard, scales)
            stored_frames = [each["frames"] for each in played["caught_up"] if each["id"] == k]
            assert [[data.hex() for data in frames]] * bool(frames) == stored_frames
            for data in (*frames, answer):
                clients[k].hear(data)
            assert bits32(clients[k].w) == played["w"]
        server.astray -= lost


def test_the_runs_have_every_way_to_catch_up() -> None:
    kinds = {
        bytes.fromhex(each["frames"][0])[5]
        for entry in VECTORS["sketchmean"] for played in entry["rounds"] for each in played["caught_up"]
    }  # fmt: skip
    assert kinds == {plain.DOWN, plain.MODEL, CHANGES, DIFFERENCES}
