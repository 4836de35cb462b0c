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
from second import CLIENTS, PAGE, VECTORS, bits32, f32, f32s, f64, federate, present, recorded_run, run_of
from torch import Tensor

from factories import recorded_messages
from pfedlms import backend
from pfedlms.cohort import Cohort
from pfedlms.engine import Federation
from pfedlms.methods import METHODS
from pfedlms.wire.frames import HEADER_BYTES, SERVER, Intake, frame

UP, DOWN, MODEL = plain.UP, plain.DOWN, plain.MODEL


def kind_of(data: bytes) -> int:
    return data[5]


def round_of(data: bytes) -> int:
    return struct.unpack_from("<I", data, 8)[0]


def told(client: plain.VoteClient, data: bytes) -> None:
    """A client hears whatever a server sends it."""
    if kind_of(data) == MODEL:
        client.hear_model(data, round_of(data) + 1)
    else:
        client.hear(data)


# The page.


@pytest.mark.parametrize(
    ("method", "begin", "end"), [("sketchvote", "11.1", "### 11.2 "), ("sketchmean", "11.2", "## 12.")]
)
def test_the_page_has_the_settings_and_their_defaults(method: str, begin: str, end: str) -> None:
    section = PAGE[PAGE.index(f"### {begin} ") : PAGE.index(end)]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in section.splitlines() if line.startswith("| `")]
    shown = {row[0].strip("`"): (row[1], float(row[3])) for row in rows}
    types = {int: "integer", float: "float64"}
    settings = vars(METHODS[method].Settings())
    own = {name: value for name, value in settings.items() if not name.startswith("server_")}
    assert shown == {name: (types[type(value)], value) for name, value in own.items()}


def test_the_example_of_the_page() -> None:
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


def test_the_constant_of_the_page() -> None:
    assert f"`{struct.pack('>d', math.sqrt(2 / math.pi)).hex()}`" in PAGE


# The second implementation against the vectors.


def test_sizes_with_an_allocation() -> None:
    for entry in VECTORS["allocations"]:
        sizes = plain.allocated_sizes(entry["sizes"], f64(entry["ratio"]), f64(entry["allocation"]))
        assert list(sizes) == entry["sketches"]


def test_weighted_medians() -> None:
    for entry in VECTORS["medians"]:
        assert plain.weighted_median(entry["samples"], f32s(entry["values"])) == f32(entry["median"])


@pytest.mark.parametrize("number", range(len(VECTORS["sketchvote"])))
def test_runs(number: int) -> None:
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
            client.w = f32s(stored.get("w", bits32(client.w)))  # of one that has another
            up.append(client.send(played["round"], f32s(stored["model"])))
            assert up[-1].hex() == stored["frame"]
            assert bits32(client.residual) == stored["residual"]
        answer, model = server.count_votes([stored["id"] for stored in played["clients"]], reversed(up))
        assert answer.hex() == played["reply"]
        sent = {k: server.catch_up(k, clients[k].heard) for k in played["hear"]}
        assert [
            {"id": k, "heard": clients[k].heard, "frames": [data.hex() for data in frames]}
            for k, frames in sent.items()
            if frames
        ] == played["caught_up"]
        for k in played["hear"]:
            for data in (*sent[k], answer):
                told(clients[k], data)
            assert bits32(clients[k].w) == played["w"]
        server.finish(answer, model, played["hear"])
        assert bits32(server.w) == played["w"]
    assert (server.refused, server.astray) == ([], set())


def test_the_runs_hold_what_they_should() -> None:
    """Ties, layers without a say, digests in some rounds, both ways to catch up, an allocation, zeros of either
    sign."""
    first, second, _ = VECTORS["sketchvote"]
    run, ties, checks = recorded_run("sketchvote", first["agreement"]), 0, []
    for played in first["rounds"]:
        receiver = run.receiver(UP, played["round"], [0, 1, 2])
        heard = [receiver.accept(bytes.fromhex(stored["frame"])) for stored in played["clients"]]
        if played["round"] == 0:
            assert [scales[1] > 0 for _, _, (_, scales, _, _) in heard] == [True, True, False]
        for i in range(run.sizes[0]):  # of layer 0, where all have a vote
            ties += sum(n if said[i] > 0 else -n for _, n, (said, *_) in heard) == 0
        checks += [(played["round"], sender) for sender, _, (_, _, checked, _) in heard if checked[0]]
    assert ties > 3
    assert checks == [(3, 0), (3, 1), (4, 2), (6, 0), (6, 1), (8, 2)]
    ways = [[kind_of(bytes.fromhex(data)) for data in each["frames"]]
            for played in first["rounds"] for each in played["caught_up"]]  # fmt: skip
    assert ways == [[DOWN, DOWN], [MODEL]]
    run = recorded_run("sketchvote", second["agreement"])
    assert run.sizes != plain.allocated_sizes([size for _, size in run.layers], run.ratio, 1.0)
    _, _, (votes, scales) = run.receiver(DOWN, 0, [SERVER]).accept(bytes.fromhex(second["rounds"][0]["reply"]))
    assert (run.by_layer(votes)[1], scales[1]) == ([1.0], 0.0)
    assert second["agreement"]["initial"][18] == second["rounds"][0]["w"][18] == "80000000"  # left as it is
    w = first["rounds"][0]["w"]
    zeros = [w[i] for i, bits in enumerate(first["agreement"]["initial"]) if bits == "80000000"]
    assert {"00000000", "80000000"} < set(zeros)


# Live: a real federation.


CASES = [
    pytest.param({"ratio": 0.25, "check_every": 4}, id="digests"),
    pytest.param({"ratio": 0.3, "allocation": 0.5, "refresh": 2, "check_every": 0}, id="allocation"),
    pytest.param({"ratio": 0.5, "gain": 0.7, "check_every": 1}, id="gain"),
]


class Schedule:
    """All take part but client 2, which is away for three phases and then for nine."""

    count = CLIENTS

    def of(self, phase: int) -> tuple[int, ...]:
        away = 2 <= phase < 5 or 7 <= phase < 16
        return tuple(k for k in range(CLIENTS) if k != 2 or not away)


ROUNDS = 18


def same_bits(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.cpu().view(torch.int32), other.cpu().view(torch.int32))


def in_step(federation: Federation) -> bool:
    server = federation.state()["server"]["model"]
    return all(same_bits(client["model"], server) for client in present(federation).values())


@pytest.mark.parametrize("cohort_size", [0, 1])
@pytest.mark.parametrize("chosen", CASES)
def test_every_frame_of_a_federation_is_recomputed(chosen: dict[str, Any], cohort_size: int) -> None:
    """Also w, the residuals, and what is sent to a client that was away."""
    federation = federate("sketchvote", chosen, Schedule(), cohort_size=cohort_size)
    federation.start()
    run, samples = run_of(federation), federation.data.samples
    server, clients = plain.VoteServer(run), [plain.VoteClient(run, k, samples[k]) for k in range(CLIENTS)]
    ways, checked, with_digest = [], 0, HEADER_BYTES + (sum(run.sizes) + 7) // 8 + 4 * len(run.layers) + 1 + 8
    for number in range(ROUNDS):
        trained = present(federation)
        with recorded_messages() as messages:
            report = federation.play_round()
        made = {(sent.message.kind, sent.sender): sent.data for sent in messages}
        up = [clients[k].send(number, own["params"].tolist()) for k, own in trained.items()]
        assert up == [made[UP, k] for k in trained]
        checked += sum(len(data) == with_digest for data in up)
        answer, model = server.count_votes(trained, reversed(up))  # arrival order does not matter
        assert answer == made[DOWN, SERVER]
        sent = {k: server.catch_up(k, clients[k].heard) for k in report.participants}
        assert report.traffic.catch_up == sum(len(data) for frames in sent.values() for data in frames)
        for k, frames in sent.items():
            for data in (*frames, answer):
                assert kind_of(data) == DOWN or data == made[MODEL, SERVER]
                told(clients[k], data)
        ways += [[kind_of(data) for data in frames] for frames in sent.values() if frames]
        server.finish(answer, model, report.participants)
        for k, own in present(federation).items():
            assert bits32(clients[k].w) == bits32(server.w) == bits32(own["model"].tolist())
            assert bits32(clients[k].residual) == bits32(own["residual"].tolist())
    assert ways == [[DOWN] * 3, [MODEL]]
    assert server.astray == set()
    assert checked == {4: 4 * 3 + 2, 0: 0, 1: 17 * 3 + 5}[chosen["check_every"]]


@pytest.mark.parametrize("chosen", CASES)
def test_plain_clients_take_part_in_a_federation(chosen: dict[str, Any]) -> None:
    """Clients 1 and 2 speak and hear through the second implementation; all is as in a run without it."""
    alone = federate("sketchvote", chosen, Schedule())
    alone.start()
    speaking: dict[int, plain.VoteClient] = {}
    models: dict[int, dict[str, Tensor]] = {}

    def up(data: bytes, client: int) -> bytes:
        if client not in speaking:
            return data
        return speaking[client].send(mixed.rounds_played, models[client]["params"].tolist())

    def down(data: bytes, client: int) -> bytes:
        if client in speaking:
            told(speaking[client], data)
        return data

    mixed = federate("sketchvote", chosen, Schedule(), link=up, answer_link=down)
    speaking |= {k: plain.VoteClient(run_of(mixed), k, mixed.data.samples[k]) for k in (1, 2)}
    mixed.start()
    for _ in range(ROUNDS):
        models = present(mixed)
        alone.play_round()
        assert mixed.play_round().rejected == 0
    assert same_bits(mixed.state()["params"], alone.state()["params"])
    for k, client in speaking.items():
        assert client.heard == ROUNDS
        assert bits32(client.w) == bits32(present(alone)[k]["model"].tolist())


@pytest.mark.parametrize("chosen", CASES)
def test_package_clients_with_a_plain_server(chosen: dict[str, Any]) -> None:
    federation = federate("sketchvote", chosen)
    run, method, samples = run_of(federation), federation.method, federation.data.samples
    (exchange,), server = method.exchanges, plain.VoteServer(run)
    start = federation.model.initial.expand(CLIENTS, -1).clone()
    cohort = method.client_start(Cohort(tuple(range(CLIENTS)), samples, start, torch.zeros(CLIENTS, 0), {}))
    draw = torch.Generator().manual_seed(8)
    for number in range(6):
        learnt = cohort.state["model"] + 0.1 * torch.randn(start.shape, generator=draw)
        cohort, values = exchange.client_send(cohort.with_model(learnt), number, None)
        up = [
            frame(exchange.up, {name: value[k].numpy() for name, value in values.items()},
                  round=number, sender=k, samples=samples[k], digest=run.digest)
            for k in range(CLIENTS)
        ]  # fmt: skip
        answer, model = server.count_votes(range(CLIENTS), up)
        server.finish(answer, model, range(CLIENTS))
        received = Intake(exchange.down, run.digest, number, (SERVER,)).accept(answer).values
        cohort = exchange.client_receive(cohort, {n: torch.from_numpy(v) for n, v in received.items()}, number)
        assert all(bits32(own) == bits32(server.w) for own in cohort.state["model"].tolist())
    assert (server.refused, server.astray) == ([], set())


# The same bits everywhere.


@pytest.fixture(scope="module")
def fifty() -> tuple[Federation, list[bytes], list[Tensor]]:
    """A federation after 50 rounds: its answers, and the server's w after each."""
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


def assert_all_alike(found: list[Tensor], expected: list[Tensor]) -> None:
    assert len(found) == len(expected) == 50
    for own, model in zip(found, expected, strict=True):
        assert all(same_bits(row, model) for row in own)


def test_w_has_the_same_bits_on_a_cpu_in_the_definition_and_in_plain_python(fifty: Any) -> None:
    federation, answers, expected = fifty
    assert len({tuple(model.tolist()) for model in expected}) == 50
    assert_all_alike(package_models(federation, answers, "cpu"), expected)
    with backend.plain():
        assert_all_alike(package_models(federation, answers, "cpu"), expected)
    client = plain.VoteClient(run_of(federation), 0, 1)
    for answer, model in zip(answers, expected, strict=True):
        client.hear(answer)
        assert bits32(client.w) == bits32(model.tolist())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_w_has_the_same_bits_on_a_gpu(fifty: Any) -> None:
    federation, answers, expected = fifty
    assert_all_alike(package_models(federation, answers, "cuda"), expected)
    with backend.plain():
        assert_all_alike(package_models(federation, answers, "cuda"), expected)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_clients_on_a_gpu_stay_in_step_with_a_server_on_the_host() -> None:
    federation = federate("sketchvote", {"ratio": 0.3, "check_every": 1}, device="cuda")
    host = {"model": federation._state.server["model"].cpu()}
    federation._state = replace(federation._state, server=host, current=host)
    federation.start()
    for _ in range(50):
        assert federation.play_round().rejected == 0
        assert in_step(federation)


# Drift.


def drifted(federation: Federation, client: int) -> None:
    """The last bit of one number of the w that a client tracks, flipped."""
    state = federation.state()
    model = state["state"]["model"].clone()
    own = model[state["trained"].index(client)]
    own[own.abs().argmax()].view(torch.int32).bitwise_xor_(1)  # the largest, which no step rounds away
    federation.load({**state, "state": {**state["state"], "model": model}})


def quietly(federation: Federation) -> Any:
    """A round with its warnings: the report and their texts."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        report = federation.play_round()
    return report, [str(warning.message) for warning in caught]


@pytest.mark.parametrize("lost", [None, MODEL, DOWN], ids=["nothing-lost", "model-lost", "answer-lost"])
def test_a_client_whose_last_bit_differs_is_found_and_brought_back(lost: int | None) -> None:
    losing: list[int] = []

    def down(data: bytes, client: int) -> bytes | None:
        return None if client == 2 and kind_of(data) in losing else data

    federation = federate("sketchvote", {"ratio": 0.25, "check_every": 4}, answer_link=down)
    model_bytes = HEADER_BYTES + 4 * federation.model.layout.dim
    server, everybody = plain.VoteServer(run_of(federation)), (0, 1, 2, 3)
    federation.start()
    with recorded_messages() as messages:
        for _ in range(2):
            federation.play_round()
        drifted(federation, 2)
        for _ in range(2):  # nobody notices before a digest is due
            assert not in_step(federation)
            report = federation.play_round()
            assert (report.rejected, report.traffic.catch_up) == (0, 0)
        losing += [] if lost is None else [lost]
        astray = present(federation)[2]["model"]
        report, said = quietly(federation)
        losing.clear()
    assert (report.rejected, report.astray, report.traffic.catch_up) == (0, 1, model_bytes)
    assert said[0].startswith("round 5: client 2 is left out of this exchange: it tracks another model than the server")
    assert sum("client 2" in text for text in said) == len(said) == (1 if lost is None else 2)

    # The plain server finds it, too; what it answers is what it would have without the message, and it sends the model.
    by_round = {(sent.message.kind, sent.round, sent.sender): sent.data for sent in messages}
    for number in range(5):
        up = [by_round[UP, number, k] for k in everybody]
        answer, model = server.count_votes(everybody, up)
        assert server.astray == ({2} if number == 4 else set())
        assert answer == by_round[DOWN, number, SERVER]
        if number == 4:
            assert server.count_votes((0, 1, 3), [up[k] for k in (0, 1, 3)]) == (answer, model)
            assert server.catch_up(2, 4) == [by_round[MODEL, 3, SERVER]]
        server.finish(answer, model, report.participants if number == 4 else everybody)

    if lost is not None:
        assert (report.participants, report.unheard) == ((0, 1, 3), 1)
        assert same_bits(federation.state()["away"]["state"]["model"][0], astray)
        with recorded_messages() as messages:
            report = federation.play_round()
        # It has not trained, so it does not send, and is brought back before the answer of this round.
        assert [sent.sender for sent in messages if sent.message.kind == UP] == [0, 1, 3]
        assert server.catch_up(2, 4) == [sent.data for sent in messages if sent.message.kind == MODEL]
        assert (report.rejected, report.traffic.catch_up) == (0, model_bytes)
    assert report.participants == everybody
    assert in_step(federation)
    for _ in range(6):  # with digests that are due again
        report = federation.play_round()
        assert (report.rejected, report.traffic.catch_up) == (0, 0)
        assert in_step(federation)


def test_a_digest_in_round_0_is_not_looked_at() -> None:
    """Nobody's is due then; w⁰ is in the digest of the header, and no round is before it to send a model of."""

    def up(data: bytes, client: int) -> bytes:
        if client or round_of(data):
            return data
        payload = data[HEADER_BYTES:-1] + b"\1" + b"not it!!"
        return plain.write_frame(UP, 0, client, federation.data.samples[client], data[28:36], payload)

    federation = federate("sketchvote", {"ratio": 0.25}, link=up)
    federation.start()
    for _ in range(2):
        report = federation.play_round()
        assert (report.rejected, report.traffic.catch_up) == (0, 0)
    assert in_step(federation)
