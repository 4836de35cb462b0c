"""sketchvote as docs/protocol.md has it: vectors, package and the plain second implementation, bit for bit."""

from __future__ import annotations

import math
import re
import struct
import warnings
from dataclasses import replace
from typing import Any

import make_vectors
import plain_client as plain
import pytest
import torch
from second import (
    CLIENTS,
    PAGE,
    VECTORS,
    Schedule,
    bits32,
    devices,
    f32,
    f32s,
    f64,
    federate,
    last_trained,
    recorded_run,
    run_of,
)
from torch import Tensor

from factories import recorded_messages
from pfedlms import backend
from pfedlms.cohort import Cohort
from pfedlms.engine import Federation
from pfedlms.methods import METHODS
from pfedlms.methods.sketchmean import shares_for
from pfedlms.wire.frames import HEADER_BYTES, SERVER, Intake

UP, DOWN, MODEL = plain.UP, plain.DOWN, plain.MODEL


def kind_of(data: bytes) -> int:
    return data[5]


def round_of(data: bytes) -> int:
    return struct.unpack_from("<I", data, 8)[0]


def deliver(client: plain.VoteClient, data: bytes) -> None:
    """Give a client a frame of the server: an answer or a model."""
    if kind_of(data) == MODEL:
        client.receive_model(data, round_of(data) + 1)
    else:
        client.receive(data)


# The page.


@pytest.mark.parametrize(
    ("method", "begin", "end"), [("sketchvote", "11.1", "### 11.2 "), ("sketchmean", "11.2", "## 12.")]
)
def test_the_page_lists_the_settings_with_their_defaults(method: str, begin: str, end: str) -> None:
    section = PAGE[PAGE.index(f"### {begin} ") : PAGE.index(end)]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in section.splitlines() if line.startswith("| `")]
    shown = {row[0].strip("`"): (row[1], float(row[3])) for row in rows}
    types = {int: "integer", float: "float64"}
    settings = METHODS[method].Settings()
    settings = vars(shares_for(settings, 203_530) if method == "sketchmean" else settings)
    own = {name: value for name, value in settings.items() if not name.startswith("server_")}
    assert shown == {name: (types[type(value)], value) for name, value in own.items()}


def test_the_sizes_in_the_example_of_the_page_are_right() -> None:
    run = plain.VoteRun([(0, 200_960), (200_960, 2_570)], 10, 0, [0.0] * 203_530)
    up, down, (model,) = run.fields(UP), run.fields(DOWN), run.fields(MODEL)
    answer = 40 + sum(field.largest for field in down)
    most = (40 + model.largest) // answer
    numbers = [*run.sizes, sum(run.sizes), up[0].largest, up[0].largest + up[1].largest + up[2].largest]
    numbers += [sum(field.largest for field in up), answer - 40, 40 + model.largest, most, answer]
    (entry,) = [
        entry for entry in VECTORS["allocations"]
        if entry["sizes"] == [200_960, 2_570] and f64(entry["allocation"]) == 0.7
    ]  # fmt: skip
    words = PAGE[PAGE.index("and ratio 0.1: m = ") : PAGE.index("### 11.2 ")]
    found = [int(number.replace(",", "")) for number in re.findall(r"\d[\d,]*\d", words.replace("0.1", ""))]
    assert found == [*numbers, *entry["sketches"]]


def test_the_constant_on_the_page_is_right() -> None:
    assert f"`{struct.pack('>d', math.sqrt(2 / math.pi)).hex()}`" in PAGE


# The second implementation against the vectors.


def test_sketch_sizes_with_an_allocation_match_the_vectors() -> None:
    for entry in VECTORS["allocations"]:
        sizes = plain.allocated_sizes(entry["sizes"], f64(entry["ratio"]), f64(entry["allocation"]))
        assert list(sizes) == entry["sketches"]


def test_weighted_medians_match_the_vectors() -> None:
    for entry in VECTORS["medians"]:
        assert plain.weighted_median(entry["samples"], f32s(entry["values"])) == f32(entry["median"])


@pytest.mark.parametrize("number", range(len(VECTORS["sketchvote"])))
def test_recorded_runs_are_recomputed(number: int) -> None:
    entry = VECTORS["sketchvote"][number]
    known = entry["agreement"]
    run = recorded_run("sketchvote", known)
    assert (run.text(), run.digest.hex()) == (known["text"], known["digest"])
    assert run.factors == list(map(f64, entry["factors"]))
    server = plain.VoteServer(run)
    clients = [plain.VoteClient(run, k, samples) for k, samples in enumerate(make_vectors.SAMPLES)]
    for played in entry["rounds"]:
        up = []
        for stored in played["clients"]:
            client = clients[stored["id"]]
            client.w = f32s(stored.get("w", bits32(client.w)))  # a client that is out of sync has a w of its own
            up.append(client.send(played["round"], f32s(stored["model"])))
            assert up[-1].hex() == stored["frame"]
            assert bits32(client.residual) == stored["residual"]
        answer, model = server.count_votes([stored["id"] for stored in played["clients"]], reversed(up))
        assert answer.hex() == played["reply"]
        sent = {k: server.catch_up(k, clients[k].answers_known) for k in played["hear"]}
        assert [
            {"id": k, "heard": clients[k].answers_known, "frames": [data.hex() for data in frames]}
            for k, frames in sent.items()
            if frames
        ] == played["caught_up"]
        for k in played["hear"]:
            for data in (*sent[k], answer):
                deliver(clients[k], data)
            assert bits32(clients[k].w) == played["w"]
        server.finish(answer, model, played["hear"])
        assert bits32(server.w) == played["w"]
    assert (server.refused, server.out_of_sync) == ([], set())


def test_the_recorded_runs_contain_the_edge_cases() -> None:
    """Ties, layers without votes, digests in some rounds, both ways to catch up, an allocation, zeros of both signs."""
    first, second, _ = VECTORS["sketchvote"]
    run, ties, checks = recorded_run("sketchvote", first["agreement"]), 0, []
    for played in first["rounds"]:
        receiver = run.receiver(UP, played["round"], [0, 1, 2])
        messages = [receiver.accept(bytes.fromhex(stored["frame"])) for stored in played["clients"]]
        if played["round"] == 0:
            assert [scales[1] > 0 for _, _, (_, scales, _, _) in messages] == [True, True, False]
        for i in range(run.sizes[0]):  # layer 0, in which all clients vote
            ties += sum(n if signs[i] > 0 else -n for _, n, (signs, *_) in messages) == 0
        checks += [(played["round"], sender) for sender, _, (_, _, checked, _) in messages if checked[0]]
    assert ties > 3
    assert checks == [(3, 0), (3, 1), (4, 2), (6, 0), (6, 1), (8, 2)]
    ways = [[kind_of(bytes.fromhex(data)) for data in each["frames"]]
            for played in first["rounds"] for each in played["caught_up"]]  # fmt: skip
    assert ways == [[DOWN, DOWN], [MODEL]]
    run = recorded_run("sketchvote", second["agreement"])
    assert run.sizes != plain.allocated_sizes([size for _, size in run.layers], run.ratio, 1.0)
    _, _, (votes, scales) = run.receiver(DOWN, 0, [SERVER]).accept(bytes.fromhex(second["rounds"][0]["reply"]))
    assert (run.by_layer(votes)[1], scales[1]) == ([1.0], 0.0)
    assert second["agreement"]["initial"][18] == second["rounds"][0]["w"][18] == "80000000"  # unchanged
    w = first["rounds"][0]["w"]
    zeros = [w[i] for i, bits in enumerate(first["agreement"]["initial"]) if bits == "80000000"]
    assert {"00000000", "80000000"} < set(zeros)


# Against a real federation.


CASES = [
    pytest.param({"ratio": 0.25, "check_every": 4}, id="digests"),
    pytest.param({"ratio": 0.3, "allocation": 0.5, "refresh": 2, "check_every": 0}, id="allocation"),
    pytest.param({"ratio": 0.5, "gain": 0.7, "check_every": 1}, id="gain"),
]


ROUNDS = 18
ABSENT = {2: (*range(2, 5), *range(7, 16))}  # for three phases, and later for nine


def same_bits(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.cpu().view(torch.int32), other.cpu().view(torch.int32))


def all_in_sync(federation: Federation) -> bool:
    server = federation.state()["server"]["model"]
    return all(same_bits(client["model"], server) for client in last_trained(federation).values())


@pytest.mark.parametrize("cohort_size", [0, 1])
@pytest.mark.parametrize("chosen", CASES)
def test_every_frame_of_a_federation_is_recomputed(chosen: dict[str, Any], cohort_size: int) -> None:
    """Also w, the residuals, and the frames with which an absent client catches up."""
    federation = federate("sketchvote", chosen, Schedule(ABSENT), cohort_size=cohort_size)
    federation.start()
    run, samples = run_of(federation), federation.data.samples
    server, clients = plain.VoteServer(run), [plain.VoteClient(run, k, samples[k]) for k in range(CLIENTS)]
    ways, checked, with_digest = [], 0, HEADER_BYTES + (sum(run.sizes) + 7) // 8 + 4 * len(run.layers) + 1 + 8
    for number in range(ROUNDS):
        trained = last_trained(federation)
        with recorded_messages() as messages:
            report = federation.play_round()
        made = {(sent.message.kind, sent.sender): sent.data for sent in messages}
        up = [clients[k].send(number, own["params"].tolist()) for k, own in trained.items()]
        assert up == [made[UP, k] for k in trained]
        checked += sum(len(data) == with_digest for data in up)
        answer, model = server.count_votes(trained, reversed(up))  # arrival order does not matter
        assert answer == made[DOWN, SERVER]
        sent = {k: server.catch_up(k, clients[k].answers_known) for k in report.participants}
        assert report.traffic.catch_up == sum(len(data) for frames in sent.values() for data in frames)
        for k, frames in sent.items():
            for data in (*frames, answer):
                assert kind_of(data) == DOWN or data == made[MODEL, SERVER]
                deliver(clients[k], data)
        ways += [[kind_of(data) for data in frames] for frames in sent.values() if frames]
        server.finish(answer, model, report.participants)
        for k, own in last_trained(federation).items():
            assert bits32(clients[k].w) == bits32(server.w) == bits32(own["model"].tolist())
            assert bits32(clients[k].residual) == bits32(own["residual"].tolist())
    assert ways == [[DOWN] * 3, [MODEL]]
    assert server.out_of_sync == set()
    assert checked == {4: 4 * 3 + 2, 0: 0, 1: 17 * 3 + 5}[chosen["check_every"]]


# The same bits on every device.


@pytest.fixture(scope="module")
def fifty_rounds() -> tuple[Federation, list[bytes], list[Tensor]]:
    """A federation after 50 rounds: its answers, and the server's w after each of them."""
    federation = federate("sketchvote", {"ratio": 0.25, "gain": 1.3})
    federation.start()
    answers, models = [], []
    for _ in range(50):
        federation.play_round()
        answers += federation.state()["last"]
        models.append(federation.state()["server"]["model"])
    return federation, answers, models


def package_models(federation: Federation, answers: list[bytes], device: str) -> list[Tensor]:
    """w of three clients of the package on a device, after every answer."""
    (exchange,) = federation.method.exchanges
    start = federation.model.initial.to(device).expand(3, -1).clone()
    cohort = federation.method.client_start(Cohort((0, 1, 2), (1, 1, 1), start, start[:, :0], {}))
    models, digest = [], federation.state()["digest"]
    for number, answer in enumerate(answers):
        received = Intake(exchange.down, digest, number, (SERVER,)).accept(answer).values
        values = {name: torch.from_numpy(value) for name, value in received.items()}
        cohort = exchange.client_receive(cohort, values, number)
        models.append(cohort.state["model"])
    return models


def check_models(found: list[Tensor], expected: list[Tensor]) -> None:
    assert len(found) == len(expected) == 50
    for own, model in zip(found, expected, strict=True):
        assert all(same_bits(row, model) for row in own)


@devices
def test_w_has_the_same_bits_on_every_device_with_and_without_kernels(fifty_rounds: Any, device: str) -> None:
    federation, answers, expected = fifty_rounds
    assert len({tuple(model.tolist()) for model in expected}) == 50
    check_models(package_models(federation, answers, device), expected)
    with backend.plain():
        check_models(package_models(federation, answers, device), expected)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_clients_on_a_gpu_stay_in_sync_with_a_server_on_the_host() -> None:
    federation = federate("sketchvote", {"ratio": 0.3, "check_every": 1}, device="cuda")
    host = {"model": federation._state.server["model"].cpu()}
    federation._state = replace(federation._state, server=host, current=host)
    federation.start()
    for _ in range(50):
        assert federation.play_round().rejected == 0
        assert all_in_sync(federation)


# Clients that are out of sync.


def flip_last_bit(federation: Federation, client: int) -> None:
    """Flip the last bit of one number of the w that a client tracks."""
    state = federation.state()
    model = state["state"]["model"].clone()
    own = model[state["trained"].index(client)]
    own[own.abs().argmax()].view(torch.int32).bitwise_xor_(1)  # the largest one, which no step rounds off
    federation.load({**state, "state": {**state["state"], "model": model}})


def play_round_with_warnings(federation: Federation) -> Any:
    """Play a round; its report and the texts of its warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        report = federation.play_round()
    return report, [str(warning.message) for warning in caught]


@pytest.mark.parametrize("lost", [None, MODEL, DOWN], ids=["nothing-lost", "model-lost", "answer-lost"])
def test_a_client_whose_last_bit_differs_is_detected_and_synchronised(lost: int | None) -> None:
    lost_kinds: list[int] = []

    def down(data: bytes, client: int) -> bytes | None:
        return None if client == 2 and kind_of(data) in lost_kinds else data

    federation = federate("sketchvote", {"ratio": 0.25, "check_every": 4}, answer_link=down)
    model_bytes = HEADER_BYTES + 4 * federation.model.layout.dim
    server, all_clients = plain.VoteServer(run_of(federation)), (0, 1, 2, 3)
    federation.start()
    with recorded_messages() as messages:
        for _ in range(2):
            federation.play_round()
        flip_last_bit(federation, 2)
        for _ in range(2):  # no digest is due yet
            assert not all_in_sync(federation)
            report = federation.play_round()
            assert (report.rejected, report.traffic.catch_up) == (0, 0)
        lost_kinds += [] if lost is None else [lost]
        out_of_sync = last_trained(federation)[2]["model"]
        report, texts = play_round_with_warnings(federation)
        lost_kinds.clear()
    assert (report.rejected, report.astray, report.traffic.catch_up) == (0, 1, model_bytes)
    assert texts[0].startswith(
        "round 5: client 2 is left out of this exchange: it tracks another model than the server"
    )
    assert sum("client 2" in text for text in texts) == len(texts) == (1 if lost is None else 2)

    # The plain server detects it, too; its answer is the one without that message, and it sends the model.
    by_round = {(sent.message.kind, sent.round, sent.sender): sent.data for sent in messages}
    for number in range(5):
        up = [by_round[UP, number, k] for k in all_clients]
        answer, model = server.count_votes(all_clients, up)
        assert server.out_of_sync == ({2} if number == 4 else set())
        assert answer == by_round[DOWN, number, SERVER]
        if number == 4:
            assert server.count_votes((0, 1, 3), [up[k] for k in (0, 1, 3)]) == (answer, model)
            assert server.catch_up(2, 4) == [by_round[MODEL, 3, SERVER]]
        server.finish(answer, model, report.participants if number == 4 else all_clients)

    if lost is not None:
        assert (report.participants, report.unheard) == ((0, 1, 3), 1)
        assert same_bits(federation.state()["away"]["state"]["model"][0], out_of_sync)
        with recorded_messages() as messages:
            report = federation.play_round()
        # It has not trained, so it sends nothing; it gets the model before the answer of this round.
        assert [sent.sender for sent in messages if sent.message.kind == UP] == [0, 1, 3]
        assert server.catch_up(2, 4) == [sent.data for sent in messages if sent.message.kind == MODEL]
        assert (report.rejected, report.traffic.catch_up) == (0, model_bytes)
    assert report.participants == all_clients
    assert all_in_sync(federation)
    for _ in range(6):  # digests are due again
        report = federation.play_round()
        assert (report.rejected, report.traffic.catch_up) == (0, 0)
        assert all_in_sync(federation)


def test_a_digest_in_round_0_is_ignored() -> None:
    """No digest is due then: w⁰ is part of the digest in the header, and there is no earlier model to send."""

    def up(data: bytes, client: int) -> bytes:
        if client or round_of(data):
            return data
        payload = data[HEADER_BYTES:-1] + b"\1" + b"no match"
        return plain.write_frame(UP, 0, client, federation.data.samples[client], data[28:36], payload)

    federation = federate("sketchvote", {"ratio": 0.25}, link=up)
    federation.start()
    for _ in range(2):
        report = federation.play_round()
        assert (report.rejected, report.traffic.catch_up) == (0, 0)
    assert all_in_sync(federation)
