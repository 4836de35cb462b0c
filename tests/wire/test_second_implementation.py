"""docs/protocol.md, its vectors, the package and the plain second implementation say the same, bit for bit."""

from __future__ import annotations

import ast
import math
import random
import re
import sys
from collections import Counter
from dataclasses import replace
from typing import Any

import make_vectors
import numpy as np
import plain_client as plain
import pytest
import torch
from second import CLIENTS, HERE, PAGE, VECTORS, bits32, f32, f32s, f64, federate, recorded_run, run_of, signs

from factories import Frames
from pfedlms.errors import WireError
from pfedlms.methods import METHODS
from pfedlms.quantise import normal_quantiles
from pfedlms.wire import Message, Positions
from pfedlms.wire.frames import SERVER

STANDARD = {"hashlib", "math", "struct", "zlib", "statistics", "collections", "dataclasses", "__future__"}
STANDARD |= {"decimal", "functools", "itertools", "typing"}


# The file and the page.


def test_the_package_reproduces_the_committed_file() -> None:
    assert make_vectors.text() == make_vectors.FILE.read_text(encoding="ascii")


def test_the_second_implementation_imports_the_standard_library_only() -> None:
    assert set(sys.stdlib_module_names) >= STANDARD
    files = sorted((HERE / "plain_client").glob("*.py"))
    assert len(files) > 5
    for file in files:
        tree = ast.parse(file.read_text(encoding="utf-8"))
        names = [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
        names += [str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
        assert {name.partition(".")[0] for name in names} <= STANDARD | {"plain_client"}, file.name


def test_the_examples_on_the_page_are_in_the_vectors() -> None:
    for line in VECTORS["digests"][0]["text"].splitlines():
        shown = line[: len("initial=") + 8] + "…" if line.startswith("initial=") else line
        assert f"\n    {shown}\n" in PAGE
    rows = [[cell.strip() for cell in line.split("|")[2:-1]] for line in PAGE.splitlines() if line.startswith("|")]
    labels = [line.split("|")[1].strip() for line in PAGE.splitlines() if line.startswith("|")]
    shown = [rows[labels.index(label)] for label in ("levels", "symbols in a block", "bits of a block")]
    for entry in zip(*shown, strict=True):
        assert [int(x) for x in entry] in VECTORS["blocks"]
    described = {name for row in rows for name in re.findall(r"`(\w+)`", " ".join(row))}
    described |= {name for label in labels for name in re.findall(r"`(\w+)`", label)}
    assert set(VECTORS) - {"protocol"} <= described


def test_the_page_lists_the_messages_of_every_method() -> None:
    """A new method or a renamed field must be added to the page."""
    task = replace(make_vectors.task([30, 12], 1, np.zeros(42, np.float32)), feature_size=3)
    choices = [(name, {}) for name in METHODS] + [("zsign", {"downlink": "sum"}), ("obcsaa", {"downlink": "sum"})]
    of_pfedlms = PAGE[PAGE.index("## 10.") : PAGE.index("## 11.")]
    of_others = PAGE[PAGE.index("## 11.") : PAGE.index("## 12.")]
    for name, chosen in choices:
        title = f"`{name}`, `downlink` = `{chosen['downlink']}`" if chosen else f"`{name}`"
        section = of_pfedlms
        if name != "pfedlms":
            (section,) = [line for line in of_others.splitlines() if line.startswith(f"| {title} |")]
        method = METHODS[name](task, METHODS[name].Settings(**chosen))
        for exchange in method.exchanges:
            for field in (*exchange.up.fields, *exchange.down.fields):
                assert f"`{field.name}`" in section, (name, field.name)
        assert [exchange.up.kind for exchange in method.exchanges] == list(range(0, 2 * len(method.exchanges), 2))
        assert [exchange.down.kind for exchange in method.exchanges] == list(range(1, 2 * len(method.exchanges), 2))


# The second implementation against the vectors.


def test_random_numbers_match_the_vectors() -> None:
    for entry in VECTORS["fnv1a"]:
        assert f"{plain.fnv1a(entry['text']):016x}" == entry["hash"]
    for entry in VECTORS["streams"]:
        counters = [int(c, 16) for c in entry["counters"]]
        assert f"{plain.stream(int(entry['seed'], 16), entry['purpose'], *counters):016x}" == entry["key"]
    for entry in VECTORS["words"]:
        assert [f"{plain.word(int(entry['key'], 16), i):016x}" for i in range(len(entry["words"]))] == entry["words"]
    for entry in VECTORS["signs"]:
        assert plain.signs(int(entry["key"], 16), len(entry["signs"])) == signs(entry["signs"])
    for entry in VECTORS["rows"]:
        count = len(entry["rows"])
        assert [plain.row(int(entry["key"], 16), entry["bits"], i) for i in range(count)] == entry["rows"]


def test_layer_sizes_match_the_vectors() -> None:
    for entry in VECTORS["sizes"]:
        assert plain.padded(entry["size"]) == entry["pad"]
        assert plain.sketch_size(entry["size"], f64(entry["ratio"])) == entry["sketch"]


def test_transforms_match_the_vectors() -> None:
    for entry in VECTORS["transforms"]:
        assert bits32(plain.transform(f32s(entry["input"]))) == entry["output"]


def test_thresholds_symbols_and_votes_match_the_vectors() -> None:
    for entry in VECTORS["quantiles"]:
        assert bits32(plain.quantiles(entry["thresholds"])) == entry["quantiles"]
    for entry in VECTORS["thresholds"]:
        taus = plain.thresholds_of(f32(entry["mean"]), f32(entry["deviation"]), len(entry["thresholds"]))
        assert bits32(taus) == entry["thresholds"]
    for entry in VECTORS["symbols"]:
        assert plain.symbols_of(f32s(entry["values"]), f32s(entry["thresholds"])) == entry["symbols"]
    for entry in VECTORS["votes"]:
        assert plain.vote(entry["samples"], entry["symbols"], entry["thresholds"]) == entry["consensus"]


def test_packed_symbols_match_the_vectors() -> None:
    assert [[levels, s := plain.block_size(levels), plain.width(s, levels)] for levels in range(2, 257)] == VECTORS[
        "blocks"
    ]
    for entry in VECTORS["packed"]:
        assert plain.pack(entry["symbols"], entry["levels"]).hex() == entry["bytes"]
        assert plain.unpack(bytes.fromhex(entry["bytes"]), len(entry["symbols"]), entry["levels"]) == entry["symbols"]


def test_fields_match_the_vectors() -> None:
    for entry in VECTORS["fields"]:
        match entry["field"]:
            case "symbols":
                fields, values = [plain.Symbols(tuple(entry["segments"]), entry["levels"])], [entry["symbols"]]
            case "signs" | "bits":
                fields, values = [plain.Signs(len(entry["signs"]))], [signs(entry["signs"])]
            case "floats" | "scalar":
                fields, values = [plain.Floats(len(entry["values"]))], [f32s(entry["values"])]
            case "mask":
                fields, values = [plain.Mask(len(entry["mask"]))], [entry["mask"]]
            case "masked rows":
                count, width = len(entry["rows"]), len(entry["rows"][0])
                fields = [plain.Mask(count), plain.MaskedRows(0, count, width)]
                values = [entry["mask"], [f32s(row) for row in entry["rows"]]]
            case "positions":
                fields, values = [plain.Positions(len(entry["positions"]), entry["places"])], [entry["positions"]]
            case "places":
                chosen = [int(place in entry["positions"]) for place in range(entry["places"])]
                fields, values = [plain.Places(entry["places"])], [chosen]
            case "count":
                fields, values = [plain.Count()], [[entry["count"]]]
            case "masked bytes":
                content = bytes.fromhex(entry["bytes"])
                fields, values = [plain.Mask(1), plain.MaskedBytes(0, len(content))], [entry["mask"], content]
        assert plain.write_payload(fields, values).hex() == entry["payload"]
        assert plain.read_payload(fields, bytes.fromhex(entry["payload"])) == values


def test_wrong_fields_are_refused_as_in_the_vectors() -> None:
    field_types = {"signs": plain.Signs, "places": plain.Places, "positions": lambda own: plain.Positions(*own)}
    for entry in VECTORS["refused_fields"]:
        with pytest.raises(plain.Refused) as refused:
            plain.read_payload([field_types[entry["field"]](entry["of"])], bytes.fromhex(entry["payload"]))
        assert refused.value.error == entry["error"], entry["what"]


@pytest.mark.parametrize("number", range(len(VECTORS["runs"])))
def test_recorded_runs_are_recomputed(number: int) -> None:
    entry = VECTORS["runs"][number]
    known = entry["agreement"]
    run = recorded_run("pfedlms", known)
    assert (run.text(), run.digest.hex()) == (known["text"], known["digest"])
    for played in entry["rounds"]:
        stored = played["clients"]
        clients = [plain.Client(run, c["id"], c["samples"], played["round"], f32s(c["model"])) for c in stored]
        server = plain.Server(run, [c["id"] for c in stored], played["round"])
        for client, expected in zip(clients, stored, strict=True):
            assert bits32(y for layer in client.sketch for y in layer) == expected["sketch"]
            means, variances = zip(*map(plain.statistics, client.sketch), strict=True)
            assert (bits32(means), bits32(variances)) == (expected["mean"], expected["variance"])
        up = [client.send_statistics() for client in clients]
        assert [data.hex() for data in up] == [c["frame_a"] for c in stored]
        down = server.pool_statistics(up)
        assert down.hex() == played["reply_a"]
        for client in clients:
            client.receive_thresholds(down)
            assert [bits32(layer) for layer in client.thresholds] == played["thresholds"]
        up = [client.send_symbols() for client in clients]
        assert [client.symbols for client in clients] == [c["symbols"] for c in stored]
        assert [data.hex() for data in up] == [c["frame_b"] for c in stored]
        down = server.count_votes(up)
        assert down.hex() == played["reply_b"]
        for client in clients:
            client.receive_consensus(down)
            assert client.consensus == played["consensus"]
        assert server.refused == []


def test_the_recorded_round_of_fedavg_is_recomputed() -> None:
    entry = VECTORS["fedavg"]
    known, models = entry["agreement"], [f32s(client["model"]) for client in entry["clients"]]
    common = plain.common_lines(
        "fedavg", known["layers"], known["classes"], int(known["seed"], 16), f32s(known["initial"])
    ) | {"method.share_statistics": False, "method.server_step": 1.0, "method.server_momentum": 0.0}
    assert plain.digest_text(common) == known["text"]
    digest = plain.digest_of(known["text"])
    fields = [plain.Floats(len(models[0]))]
    receiver = plain.Receiver(0, fields, entry["round"], digest, [0, 1, 2])
    for client, model in zip(entry["clients"], models, strict=True):
        data = plain.write_frame(
            0, entry["round"], client["id"], client["samples"], digest, plain.write_payload(fields, [model])
        )
        assert data.hex() == client["frame"]
        assert receiver.accept(data) == (client["id"], client["samples"], [model])
    average = plain.average([client["samples"] for client in entry["clients"]], models)
    assert bits32(average) == entry["average"]
    reply = plain.write_frame(1, entry["round"], plain.SERVER, 0, digest, plain.write_payload(fields, [average]))
    assert reply.hex() == entry["reply"]


def test_the_recorded_rounds_of_stc_are_recomputed() -> None:
    """Clients and server by the second implementation, with residuals and w, over six rounds."""
    entry = VECTORS["stc"]
    known, w = entry["agreement"], f32s(entry["agreement"]["initial"])
    shares = {name: f64(value) for name, value in known["settings"].items()}
    common = plain.common_lines("stc", known["layers"], known["classes"], int(known["seed"], 16), w)
    assert plain.digest_text(common | {f"method.{name}": value for name, value in shares.items()}) == known["text"]
    digest, dim = plain.digest_of(known["text"]), len(w)
    counts = [math.floor(shares[name] * dim) for name in ("sparsity", "sparsity_down")]
    assert counts == [4, 8]
    fields = [plain.stc_fields(count, dim) for count in counts]
    own, residual = [[0.0] * dim for _ in range(3)], [0.0] * dim
    for played in entry["rounds"]:
        receiver, messages = plain.Receiver(0, fields[0], played["round"], digest, [0, 1, 2]), []
        for k, client in enumerate(played["clients"]):
            step = [plain.f32(theta - at) for theta, at in zip(f32s(client["model"]), w, strict=True)]
            x = [plain.f32(moved + left) for moved, left in zip(step, own[k], strict=True)]
            sent = plain.ternary(x, counts[0])
            own[k] = plain.add_sparse(x, -1.0, sent)
            assert bits32(own[k]) == client["residual"]
            payload = plain.write_payload(fields[0], sent)
            assert payload == bytes.fromhex(client["frame"])[40:]
            data = plain.write_frame(0, played["round"], client["id"], client["samples"], digest, payload)
            assert data.hex() == client["frame"]
            assert receiver.accept(data) == (client["id"], client["samples"], sent)
            messages.append(sent)
        x = plain.server_input([client["samples"] for client in played["clients"]], messages, residual)
        sent = plain.ternary(x, counts[1])
        residual, w = plain.add_sparse(x, -1.0, sent), plain.add_sparse(w, 1.0, sent)
        assert (bits32(residual), bits32(w)) == (played["residual"], played["model"])
        payload = plain.write_payload(fields[1], sent)
        assert plain.write_frame(1, played["round"], plain.SERVER, 0, digest, payload).hex() == played["reply"]


def test_both_read_and_refuse_the_same_streams_of_positions() -> None:
    """Streams with changed bits, cut short or extended: the same positions, or the same error."""
    draw, seen = random.Random(4), Counter()
    for _ in range(4000):
        places = draw.choice((1, 5, 40, 300))
        count = draw.randint(1, min(places, 12))
        field = plain.Positions(count, places)
        data = bytearray(field.write(sorted(draw.sample(range(places), count)), []))
        for _ in range(draw.randint(0, 2)):
            data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        longer = draw.choice((-1, 0, 0, 1))
        data = data + b"\0" if longer > 0 else data[: len(data) + longer]
        outcomes = []
        try:
            outcomes.append(plain.read_payload([field], bytes(data))[0])
        except plain.Refused as refused:
            outcomes.append(refused.error)
        try:
            read = Message(0, (Positions("x", count, places),)).read(memoryview(data).toreadonly())
            outcomes.append(read["x"].tolist())
        except WireError as error:
            outcomes.append(type(error).__name__.removesuffix("Error").lower())
        assert outcomes[0] == outcomes[1], (count, places, data.hex())
        seen[outcomes[0] if isinstance(outcomes[0], str) else "read"] += 1
    assert min(seen[name] for name in ("read", "truncated", "decode", "oversized")) > 100, seen


@pytest.mark.parametrize("entry", VECTORS["refused"], ids=lambda entry: entry["what"].replace(" ", "-"))
def test_both_refuse_for_the_same_reason(entry: dict[str, Any]) -> None:
    make_vectors.checked(entry, VECTORS["runs"])  # the package
    run = recorded_run("pfedlms", VECTORS["runs"][entry["run"]]["agreement"])
    receiver = run.receiver(entry["kind"], entry["round"], entry["senders"])
    for data in entry["before"]:
        receiver.accept(bytes.fromhex(data))
    with pytest.raises(plain.Refused) as caught:
        receiver.accept(bytes.fromhex(entry["frame"]))
    assert caught.value.error == entry["error"]


# Against a real federation.


CASES = [
    pytest.param({}, id="7-thresholds"),
    pytest.param({"thresholds": 2, "ratio": 0.3}, id="3-levels"),
    pytest.param({"thresholds": 1, "ratio": 0.5}, id="one-threshold"),
    pytest.param({"layerwise": False}, id="not-layerwise"),
    pytest.param({"spacing": "lloyd-max", "thresholds": 3}, id="lloyd-max"),
    pytest.param({"pooling": "median"}, id="median-pooling"),
    pytest.param({"refresh": 2, "thresholds": 15, "smoothing": 0.05}, id="refresh-2"),
]


@pytest.mark.parametrize("cohort_size", [0, 1])
@pytest.mark.parametrize("chosen", CASES)
def test_every_frame_of_a_federation_is_recomputed(frames: Frames, chosen: dict[str, Any], cohort_size: int) -> None:
    federation = federate("pfedlms", chosen, cohort_size=cohort_size)
    federation.start()
    run, samples = run_of(federation), federation.data.samples
    for number in range(3):
        models = federation.state()["params"].tolist()
        federation.play_round()
        clients = [plain.Client(run, k, samples[k], number, models[k]) for k in range(CLIENTS)]
        server = plain.Server(run, range(CLIENTS), number)
        up = [client.send_statistics() for client in clients]
        assert up == [frames[0, number, k] for k in range(CLIENTS)]
        down = server.pool_statistics(up)
        assert down == frames[1, number, SERVER]
        for client in clients:
            client.receive_thresholds(down)
        up = [client.send_symbols() for client in clients]
        assert up == [frames[2, number, k] for k in range(CLIENTS)]
        assert server.count_votes(reversed(up)) == frames[3, number, SERVER]  # arrival order does not matter
    assert len(frames) == 3 * 2 * (CLIENTS + 1)
    assert any(set(client.symbols) != {client.symbols[0]} for client in clients)


@pytest.mark.parametrize("chosen", CASES)
def test_plain_clients_take_part_in_a_federation(frames: Frames, chosen: dict[str, Any]) -> None:
    """The second implementation sends for clients 1 and 3; the models are those of a run without it."""
    expected_run = federate("pfedlms", chosen)
    expected_run.start()
    for _ in range(3):
        expected_run.play_round()

    plain_clients: dict[tuple[int, int], plain.Client] = {}

    def link(data: bytes, sender: int) -> bytes | None:
        if sender % 2 == 0:
            return data
        number = mixed.rounds_played
        if data[5] == 0:
            client = plain.Client(run, sender, mixed.data.samples[sender], number, models[sender])
            plain_clients[number, sender] = client
            return client.send_statistics()
        plain_clients[number, sender].receive_thresholds(frames[1, number, SERVER])
        return plain_clients[number, sender].send_symbols()

    mixed = federate("pfedlms", chosen, link=link)
    run = run_of(mixed)
    mixed.start()
    for number in range(3):
        models = mixed.state()["params"].tolist()
        assert mixed.play_round().rejected == 0
        for sender in (1, 3):
            plain_clients[number, sender].receive_consensus(frames[3, number, SERVER])
    assert torch.equal(mixed.state()["params"], expected_run.state()["params"])
    assert len(plain_clients) == 6


def test_both_compute_the_same_quantiles_for_every_number_of_thresholds() -> None:
    for count in range(1, 256):
        assert plain.quantiles(count) == normal_quantiles(count).tolist()
