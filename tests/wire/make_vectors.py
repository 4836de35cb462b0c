"""Make tests/wire/vectors.json, the test vectors of docs/protocol.md, from the package.

    python tests/wire/make_vectors.py            writes the file
    python tests/wire/make_vectors.py --check    says whether the file is what the package gives

Models come from the package's own integer generator, so that nothing here depends on a framework's random numbers.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import struct
import zlib
from collections.abc import Iterable
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pfedlms import errors, rng
from pfedlms.aggregate import Vote, weighted_median
from pfedlms.cohort import Cohort
from pfedlms.engine.exchange import Channel, Ways
from pfedlms.engine.participation import Answers
from pfedlms.engine.terms import agreement
from pfedlms.methods import METHODS, Task
from pfedlms.models.layout import Layer, Layout
from pfedlms.quantise import normal_quantiles, symbols_of, thresholds_of
from pfedlms.sketch.hadamard import fwht_
from pfedlms.wire import Bits, Floats, Mask, MaskedBytes, MaskedRows, Message, Positions, Scalar, Signs, Symbols
from pfedlms.wire.codec import block_shape, pack
from pfedlms.wire.fields import Field
from pfedlms.wire.frames import HEADER_BYTES, SERVER, Intake, frame

FILE = Path(__file__).with_name("vectors.json")
SAMPLES = (5, 17, 12)  # N_k; client 1 and clients 0 + 2 weigh the same, so that votes can tie


def word(value: int) -> str:
    return f"{int(value):016x}"


def bits32(values: Any) -> list[str]:
    return [f"{pattern:08x}" for pattern in np.asarray(values, dtype=np.float32).view(np.uint32).ravel().tolist()]


def bits64(value: float) -> str:
    return struct.pack(">d", value).hex()


def sign_text(values: np.ndarray) -> str:
    return "".join("+" if value > 0 else "-" for value in values)


def floats(count: int, *name: int) -> np.ndarray:
    """Multiples of 2^-24 in [-1/2, 1/2), exact in float32."""
    return ((rng.words(rng.stream(2024, "vectors", *name), count) >> np.uint64(40)) / 2**24 - 0.5).astype(np.float32)


def symbols(count: int, levels: int, *name: int) -> np.ndarray:
    return (rng.words(rng.stream(2024, "vectors", *name), count) % np.uint64(levels)).astype(np.uint8)


# Sections 3 to 6 of the page.


def generator_vectors() -> dict[str, Any]:
    names = [
        (0, "sketch-signs", (0, 0)),
        (0, "sketch-rows", (0, 0)),
        (7, "sketch-signs", (3, 1)),
        (7, "sketch-rows", (3, 1)),
        (2**63 - 1, "sketch-signs", (2**32 - 1, 40)),
        (1, "", ()),
    ]
    keys = [rng.stream(seed, purpose, *counters) for seed, purpose, counters in names]
    constants = rng.row_constants(np.array(keys[1:2], dtype=np.uint64))[:, 0]
    rows = {bits: rng.row_images(np.arange(min(12, 1 << bits)), constants, bits) for bits in (0, 1, 2, 3, 7, 18, 24)}
    return {
        "fnv1a": [{"text": text, "hash": word(rng._fnv1a(text))} for text in ("", "a", "sketch-signs", "sketch-rows")],
        "streams": [
            {"seed": word(seed), "purpose": purpose, "counters": [word(c) for c in counters], "key": word(key)}
            for (seed, purpose, counters), key in zip(names, keys, strict=True)
        ],
        "words": [{"key": word(key), "words": list(map(word, rng.words(key, 5)))} for key in (0, 2**64 - 1, *keys[:2])],
        "signs": [{"key": word(key), "signs": sign_text(rng.signs(key, 70))} for key in (keys[0], keys[2])],
        "rows": [{"key": word(keys[1]), "bits": bits, "rows": each.tolist()} for bits, each in rows.items()],
    }


def sizes() -> list[dict[str, Any]]:
    pairs = [(1, 0.1), (2, 0.1), (18, 0.25), (200_960, 0.1), (2_570, 0.1), (32, 1.0), (33, 0.7), (1_000_003, 1e-9)]
    layers = [(Layer("", 0, size), ratio) for size, ratio in pairs]
    return [
        {"size": layer.size, "ratio": bits64(ratio), "pad": layer.pad, "sketch": layer.sketch(ratio)}
        for layer, ratio in layers
    ]


def allocations() -> list[dict[str, Any]]:
    entries = []
    for allocation in (0.0, 0.5, 0.7, 1.0, 1.3, 3.0):
        for ratio, layers in ((0.1, [200_960, 2_570]), (0.3, [1, 18, 70, 8]), (1.0, [33, 1_000, 5])):
            table = task(layers, 0, np.zeros(0, np.float32)).layout
            kept = list(table.sketch_sizes(ratio, allocation))
            entries.append(
                {"sizes": layers, "ratio": bits64(ratio), "allocation": bits64(allocation), "sketches": kept}
            )
    return entries


def transforms() -> list[dict[str, Any]]:
    entries = []
    for exponent in (0, 1, 3, 7):
        values = floats(1 << exponent, 1, exponent)
        result = fwht_(torch.from_numpy(values.copy())).numpy()
        entries.append({"input": bits32(values), "output": bits32(result)})
    return entries


def threshold_vectors() -> dict[str, Any]:
    pooled = [(0.0, 1.0), (0.1, 0.3), (-1e-3, 7e-5), (5.0, 0.0), (1e-40, 1e-42)]
    thresholds, binned = [], []
    for index, ((mean, deviation), count) in enumerate(zip(pooled, (7, 2, 1, 3, 5), strict=True)):
        mean32, deviation32 = np.float32([mean]), np.float32([deviation])
        tau = thresholds_of(mean32, deviation32, normal_quantiles(count))[0]
        thresholds.append({"mean": bits32(mean32)[0], "deviation": bits32(deviation32)[0], "thresholds": bits32(tau)})
        # Each threshold itself, its two neighbours, and some values around them.
        beside = [np.nextafter(tau, np.float32(side)) for side in (-np.inf, np.inf)]
        values = np.concatenate([tau, *beside, mean32 + 4 * deviation32 * floats(8, 2, index)]).astype(np.float32)
        chosen = symbols_of(torch.from_numpy(values)[None], torch.from_numpy(tau)[None], [len(values)])[0]
        binned.append({"thresholds": bits32(tau), "values": bits32(values), "symbols": chosen.tolist()})
    quantiles = [{"thresholds": t, "quantiles": bits32(normal_quantiles(t))} for t in (1, 2, 3, 7, 15)]
    return {"quantiles": quantiles, "thresholds": thresholds, "symbols": binned}


def votes() -> list[dict[str, Any]]:
    entries = []
    for thresholds, samples in (
        (1, (1, 1)),
        (2, (5, 17, 12)),
        (7, (300, 1, 200, 99)),
        (255, (2**32 - 1, 2**32 - 1, 1)),
    ):
        ballots = [symbols(10, thresholds + 1, 3, thresholds, client) for client in range(len(samples))]
        vote = Vote(10, thresholds)
        for weight, ballot in zip(samples, ballots, strict=True):
            vote.add(ballot, weight)
        entries.append(
            {
                "thresholds": thresholds,
                "samples": list(samples),
                "symbols": [ballot.tolist() for ballot in ballots],
                "consensus": vote.result().tolist(),
            }
        )
    return entries


def medians() -> list[dict[str, Any]]:
    """Halves that are just reached and just not, equal values, zeros of either sign, and nobody."""
    cases = [
        ((1,), (2.5,)),
        ((1, 1), (3.0, 2.0)),
        ((5, 17, 12), (3.0, 2.0, 1.0)),
        ((5, 17, 12), (1.0, 2.0, 1.0)),
        ((5, 18, 12), (1.0, 2.0, 1.0)),
        ((5, 17, 12), (2.0, 0.0, 1.0)),
        ((7, 7, 7, 7), (4.0, 1.0, 3.0, 2.0)),
        ((3, 9, 3), (0.0, -0.0, 1e-45)),
        ((4, 2), (0.0, 0.0)),
        ((2**32 - 1, 2**32 - 1, 1), (1.0, 2.0, 3.0)),
    ]
    return [
        {
            "samples": list(samples),
            "values": bits32(values),
            "median": bits32(weighted_median(samples, np.float32(values)))[0],
        }
        for samples, values in cases
    ]


def packed() -> list[dict[str, Any]]:
    entries = []
    for levels in (2, 3, 4, 5, 7, 8, 10, 16, 100, 128, 255, 256):
        size = block_shape(levels)[0]
        for count in (1, 11) if levels & (levels - 1) == 0 else (1, size, 2 * size + 3):
            chosen = symbols(count, levels, 4, levels, count)
            entries.append({"levels": levels, "symbols": chosen.tolist(), "bytes": pack(chosen, levels).hex()})
        entries.append(
            {
                "levels": levels,
                "symbols": [levels - 1] * 9,
                "bytes": pack(np.full(9, levels - 1, np.uint8), levels).hex(),
            }
        )
    return entries


def payload(values: dict[str, np.ndarray], *parts: Field) -> str:
    return frame(Message(0, parts), values, round=0, sender=0, samples=1, digest=bytes(8))[HEADER_BYTES:].hex()


# b = 0, 2, 0 and 6; all places, a long run of ones, one position of two, and the last of many.
PLACES = ((9, list(range(9))), (20, [1, 2, 19]), (2, [1]), (1000, [0, 63, 64, 129, 500, 501, 502, 503, 504, 999]))


def fields() -> list[dict[str, Any]]:
    mask = np.array([1, 0, 1, 1, 0, 0, 0, 0, 0, 1], dtype=bool)
    rows = floats(20, 5).reshape(10, 2) * mask[:, None]
    chosen, signs = symbols(12, 3, 6), rng.signs(6, 11)
    vector, scalar = floats(3, 7), np.float32([2.5])
    masked = (Mask("mask", 10), MaskedRows("rows", "mask", 10, 2))
    return [
        {
            "field": "symbols",
            "segments": [7, 5],
            "levels": 3,
            "symbols": chosen.tolist(),
            "payload": payload({"x": chosen}, Symbols("x", (7, 5), 3)),
        },
        {
            "field": "signs",
            "signs": sign_text(signs),
            "payload": payload({"x": signs}, Signs("x", 11)),
        },
        {"field": "floats", "values": bits32(vector), "payload": payload({"x": vector}, Floats("x", 3))},
        {"field": "scalar", "values": bits32(scalar), "payload": payload({"x": scalar}, Scalar("x"))},
        {"field": "mask", "mask": mask.astype(int).tolist(), "payload": payload({"x": mask}, Mask("x", 10))},
        {
            "field": "masked rows",
            "mask": mask.astype(int).tolist(),
            "rows": [bits32(row) for row in rows],
            "payload": payload({"mask": mask, "rows": rows}, *masked),
        },
        *(
            {
                "field": "positions",
                "places": places,
                "positions": chosen,
                "payload": payload({"x": np.array(chosen)}, Positions("x", len(chosen), places)),
            }
            for places, chosen in PLACES
        ),
        {
            "field": "bits",
            "signs": sign_text(signs),
            "payload": payload({"x": np.packbits(signs > 0, bitorder="little")}, Bits("x", 11)),
        },
        *(
            {
                "field": "masked bytes",
                "mask": [yes],
                "bytes": (said * yes).tobytes().hex(),
                "payload": payload(
                    {"mask": np.array([bool(yes)]), "x": said}, Mask("mask", 1), MaskedBytes("x", "mask", 4)
                ),
            }
            for yes, said in ((1, np.uint8([0, 1, 128, 255])), (0, np.uint8([9, 9, 9, 9])))
        ),
    ]


# Whole runs.


def task(layers: Iterable[int], seed: int, initial: np.ndarray) -> Task:
    table, offset = [], 0
    for index, size in enumerate(layers):
        table.append(Layer(f"layer{index}", offset, size))
        offset += size
    return Task(
        layout=Layout((), tuple(table)),
        classes=2,
        feature_size=0,
        seed=seed,
        initial=torch.from_numpy(initial),
        clients=len(SAMPLES),
        participants=len(SAMPLES),
        learning_rate=0.1,
        weight_decay=0.0,
    )


def digest_text(method: str, settings: Any, known: Task) -> str:
    """The text of §9, written out by hand here; `digest_vectors` asserts that its hash is the package's digest."""
    lines = {
        "classes": str(known.classes),
        "initial": hashlib.sha256(known.initial.numpy().astype("<f4").tobytes()).hexdigest(),
        "layers": ",".join(f"{layer.offset}:{layer.size}" for layer in known.layout.layers),
        "method": method,
        "protocol": "1",
        "seed": str(known.seed),
    }
    if method == "sketchvote":
        lines["agreement.rows"] = ",".join(map(str, known.layout.sketch_sizes(settings.ratio, settings.allocation)))
    for name, value in asdict(settings).items():
        written = value if isinstance(value, str) else str(int(value))
        lines[f"method.{name}"] = bits64(value) if isinstance(value, float) else written
    return "".join(f"{key}={lines[key]}\n" for key in sorted(lines))


def agreed(method: str, settings: Any, known: Task) -> dict[str, Any]:
    text = digest_text(method, settings, known)
    digest = agreement(METHODS[method](known, settings))
    assert digest == hashlib.sha256(text.encode()).digest()[:8], text
    return {
        "method": method,
        "classes": known.classes,
        "seed": word(known.seed),
        "layers": [[layer.offset, layer.size] for layer in known.layout.layers],
        "initial": bits32(known.initial.numpy()),
        "settings": {k: bits64(v) if isinstance(v, float) else v for k, v in asdict(settings).items()},
        "text": text,
        "sha256": hashlib.sha256(text.encode()).hexdigest(),
        "digest": digest.hex(),
    }


def run(
    layers: Iterable[int], seed: int, rounds: Iterable[int], zero_last: bool = False, **settings: Any
) -> dict[str, Any]:
    method = METHODS["pfedlms"]
    sizes = list(layers)
    chosen = method.Settings(**settings)
    known = task(sizes, seed, floats(sum(sizes), 8, seed))
    digest = agreement(method(known, chosen))
    played = []
    for number in rounds:
        params = np.stack([floats(sum(sizes), 9, seed, number, client) for client in range(len(SAMPLES))])
        if zero_last:
            params[:, -sizes[-1] :] = 0
        played.append(play(method(known, chosen), digest, number, params))
    return {"agreement": agreed("pfedlms", chosen, known), "rounds": played}


def play(method: Any, digest: bytes, number: int, params: np.ndarray) -> dict[str, Any]:
    """One round's exchanges, as the engine holds them; the vectors are what passed by."""
    ids = tuple(range(len(SAMPLES)))
    cohort = Cohort(ids, SAMPLES, torch.from_numpy(params), torch.zeros(len(ids), 0), {})
    frames, sent, replies = [], [], []
    for exchange in method.exchanges:
        cohort, values = exchange.client_send(cohort, number, None)
        sent.append({name: value.numpy() for name, value in values.items()})
        intake, total = Intake(exchange.up, digest, number, ids), exchange.server_open({}, number)
        frames.append([])
        for k in ids:
            own = {name: value[k] for name, value in sent[-1].items()}
            frames[-1].append(frame(exchange.up, own, round=number, sender=k, samples=SAMPLES[k], digest=digest))
            received = intake.accept(frames[-1][-1])
            arrived = {name: torch.from_numpy(value)[None] for name, value in received.values.items()}
            total = exchange.server_add(total, [k], [received.samples], arrived)
        _, reply = exchange.server_reply({}, total, number)
        arrays = {name: value.numpy() for name, value in reply.items()}
        replies.append(frame(exchange.down, arrays, round=number, sender=SERVER, samples=0, digest=digest))
        back = Intake(exchange.down, digest, number, (SERVER,)).accept(replies[-1]).values
        cohort = exchange.client_receive(cohort, {n: torch.from_numpy(v) for n, v in back.items()}, number)
    scratch = {name: value.numpy() for name, value in {**cohort.scratch, **cohort.heard}.items()}
    clients = [
        {
            "id": k,
            "samples": SAMPLES[k],
            "model": bits32(params[k]),
            "sketch": bits32(scratch["sketched"][k]),
            "mean": bits32(sent[0]["mean"][k]),
            "variance": bits32(sent[0]["variance"][k]),
            "symbols": sent[1]["symbols"][k].tolist(),
            "frame_a": frames[0][k].hex(),
            "frame_b": frames[1][k].hex(),
        }
        for k in ids
    ]
    return {
        "round": number,
        "clients": clients,
        "thresholds": [bits32(row) for row in scratch["thresholds"]],
        "consensus": scratch["consensus"].tolist(),
        "reply_a": replies[0].hex(),
        "reply_b": replies[1].hex(),
    }


def fedavg() -> dict[str, Any]:
    method = METHODS["fedavg"]
    known = task([4, 3], 11, floats(7, 10))
    digest = agreement(method(known, method.Settings()))
    (exchange,) = method(known, method.Settings()).exchanges
    models = np.stack([floats(7, 11, client) for client in range(len(SAMPLES))])
    frames = [
        frame(exchange.up, {"model": model}, round=4, sender=k, samples=SAMPLES[k], digest=digest)
        for k, model in enumerate(models)
    ]
    values = {"model": torch.from_numpy(models)}
    total = exchange.server_add(exchange.server_open({}, 4), list(range(len(SAMPLES))), list(SAMPLES), values)
    average = exchange.server_reply({}, total, 4)[1]["model"].numpy()
    return {
        "agreement": agreed("fedavg", method.Settings(), known),
        "round": 4,
        "clients": [
            {"id": k, "samples": SAMPLES[k], "model": bits32(models[k]), "frame": frames[k].hex()}
            for k in range(len(SAMPLES))
        ],
        "average": bits32(average),
        "reply": frame(exchange.down, {"model": average}, round=4, sender=SERVER, samples=0, digest=digest).hex(),
    }


def stc() -> dict[str, Any]:
    """Two rounds; clients begin each with models of the vectors' own, and their residuals and the server's go on."""
    method = METHODS["stc"]
    settings = method.Settings(sparsity=0.1, sparsity_down=0.2)
    known = task([23, 17], 13, floats(40, 12))
    digest, (exchange,) = agreement(method(known, settings)), method(known, settings).exchanges
    server, ids = method(known, settings).server_start(), tuple(range(len(SAMPLES)))
    start = Cohort(ids, SAMPLES, known.initial.expand(len(ids), -1).clone(), torch.zeros(len(ids), 0), {})
    cohort, played = method(known, settings).client_start(start), []
    for number in (0, 1):
        # The second client's update is one number everywhere, so that all magnitudes tie.
        params = np.stack([floats(40, 13, number, client) for client in ids])
        params[1] = cohort.state["model"][1].numpy() + np.float32(0.25)
        cohort = cohort.with_model(torch.from_numpy(params))
        cohort, values = exchange.client_send(cohort, number, None)
        frames, intake, total = [], Intake(exchange.up, digest, number, ids), exchange.server_open(server, number)
        for k in ids:
            own = {name: value[k].numpy() for name, value in values.items()}
            frames.append(frame(exchange.up, own, round=number, sender=k, samples=SAMPLES[k], digest=digest))
            arrived = {name: torch.from_numpy(v)[None] for name, v in intake.accept(frames[-1]).values.items()}
            total = exchange.server_add(total, [k], [SAMPLES[k]], arrived)
        server, reply = exchange.server_reply(server, total, number)
        arrays = {name: value.numpy() for name, value in reply.items()}
        answer = frame(exchange.down, arrays, round=number, sender=SERVER, samples=0, digest=digest)
        cohort = exchange.client_receive(cohort, reply, number)
        clients = [
            {
                "id": k,
                "samples": SAMPLES[k],
                "model": bits32(params[k]),
                "frame": frames[k].hex(),
                "residual": bits32(cohort.state["residual"][k].numpy()),
            }
            for k in ids
        ]
        played.append(
            {
                "round": number,
                "clients": clients,
                "reply": answer.hex(),
                "residual": bits32(server["residual"].numpy()),
                "model": bits32(cohort.state["model"][0].numpy()),
            }
        )
    return {"agreement": agreed("stc", settings, known), "rounds": played}


def sketchvote(
    layers: list[int], seed: int, phases: list[set[int]], silent: dict[int, dict[int, int]], **settings: Any
) -> dict[str, Any]:
    """A run in which the clients of `phases[r]` train before round r, and those of the next hear its answer.

    `silent[r]` says which clients have learnt nothing by round r in which layer: x is zero there.
    """
    method = METHODS["sketchvote"]
    chosen = method.Settings(**settings)
    initial = floats(sum(layers), 12, seed)
    initial[1::2] = initial[18] = -0.0
    known = task(layers, seed, initial)
    playing = method(known, chosen)
    (exchange,), digest, server = playing.exchanges, agreement(playing), playing.server_start()
    model = Message(3, (Floats("model", len(initial)),))
    answers = Answers(HEADER_BYTES + model.max_bytes)
    clients, heard = [starting(playing, k) for k in range(len(SAMPLES))], [0] * len(SAMPLES)
    played = []
    for number, (senders, coming) in enumerate(pairwise(phases)):
        ups: dict[int, bytes] = {}
        downs: dict[int, list[bytes]] = {}
        ways = Ways(lambda data, k, to=ups: to.update({k: data}) or data, lambda data, k, to=downs: keep(to, k, data))
        channel = Channel(digest, number, ways)
        for k in senders:
            clients[k] = replace(clients[k], params=learnt(clients[k], known, seed, number, silent.get(number, {})))
        told = [{"id": k, "samples": SAMPLES[k], "model": bits32(clients[k].params)} for k in sorted(senders)]
        after, moved, answer = channel.ask(exchange, [clients[k] for k in sorted(senders)], server, None)
        for entry, cohort in zip(told, after, strict=True):
            clients[entry["id"]] = cohort
            entry |= {"frame": ups[entry["id"]].hex(), "residual": bits32(cohort.state["residual"])}
        caught_up = []
        for k in sorted(coming):
            back = channel.catch_up(exchange, clients[k], [heard[k]], answers, model, server["model"])
            if k in downs:
                caught_up.append({"id": k, "heard": heard[k], "frames": [data.hex() for data in downs.pop(k)]})
            (clients[k],) = channel.tell(exchange, answer, [back])
            heard[k] = number + 1
            assert torch.equal(clients[k].state["model"][0].view(torch.int32), moved["model"].view(torch.int32))
        server = moved
        answers.add(number, answer)
        played.append(
            {
                "round": number,
                "clients": told,
                "reply": answer.hex(),
                "caught_up": caught_up,
                "hear": sorted(coming),
                "w": bits32(server["model"]),
            }
        )
    factors = [bits64(factor) for factor in exchange._factors.tolist()]
    return {"agreement": agreed("sketchvote", chosen, known), "factors": factors, "rounds": played}


def starting(method: Any, client: int) -> Cohort:
    start = method.task.initial[None].clone()
    return method.client_start(Cohort((client,), (SAMPLES[client],), start, torch.zeros(1, 0), {}))


def keep(to: dict[int, list[bytes]], client: int, data: bytes) -> bytes:
    to.setdefault(client, []).append(data)
    return data


def learnt(cohort: Cohort, known: Task, seed: int, number: int, silent: dict[int, int]) -> torch.Tensor:
    """θ: w and some steps; where nothing is to be said, such that θ − w + e is zero."""
    (client,), w = cohort.ids, cohort.state["model"]
    model = w + torch.from_numpy(floats(w.shape[1], 13, seed, number, client)) / 8
    if client in silent:
        layer = known.layout.layers[silent[client]]
        own = slice(layer.offset, layer.offset + layer.size)
        assert not cohort.state["residual"][:, own].any()
        model[:, own] = w[:, own]
    return model


# Frames that must be refused.


def sealed(data: bytes, at: int | None = None, new: bytes = b"") -> bytes:
    """The frame with `new` written at `at`, and its checksum made good again."""
    if at is not None:
        data = data[:at] + new + data[at + len(new) :]
    return data[:36] + struct.pack("<I", zlib.crc32(data[40:], zlib.crc32(data[:36]))) + data[40:]


def refused(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    statistics = bytes.fromhex(runs[0]["rounds"][0]["clients"][1]["frame_a"])
    ternary = bytes.fromhex(runs[1]["rounds"][0]["clients"][1]["frame_b"])
    one = struct.Struct("<f").pack
    cases: list[tuple[str, str, int, int, bytes]] = [
        ("header cut short", "truncated", 0, 0, statistics[:39]),
        ("payload cut short", "truncated", 0, 0, statistics[:-1]),
        ("one byte too many", "oversized", 0, 0, statistics + b"\0"),
        ("length of 2^60", "oversized", 0, 0, sealed(statistics, 20, struct.pack("<Q", 1 << 60))),
        ("another magic", "magic", 0, 0, sealed(statistics, 0, b"PFLN")),
        ("version 2", "version", 0, 0, sealed(statistics, 4, b"\2")),
        ("a flipped bit in the payload", "checksum", 0, 0, statistics[:-1] + bytes([statistics[-1] ^ 1])),
        ("reserved bytes in use", "decode", 0, 0, sealed(statistics, 6, b"\0\1")),
        ("digest of another run", "digest", 0, 0, sealed(statistics, 28, ternary[28:36])),
        ("the other exchange", "kind", 0, 0, sealed(statistics, 5, b"\2")),
        ("a kind that does not exist", "kind", 0, 0, sealed(statistics, 5, b"\xff")),
        ("the round after", "round", 0, 0, sealed(statistics, 8, b"\1\0\0\0")),
        ("an unknown client", "sender", 0, 0, sealed(statistics, 12, b"\3\0\0\0")),
        ("the server's id", "sender", 0, 0, sealed(statistics, 12, b"\xff\xff\xff\xff")),
        ("no samples", "decode", 0, 0, sealed(statistics, 16, b"\0\0\0\0")),
        ("a mean that is NaN", "decode", 0, 0, sealed(statistics, 40, one(float("nan")))),
        ("a mean that is infinite", "decode", 0, 0, sealed(statistics, 40, one(float("-inf")))),
        ("a negative variance", "decode", 0, 0, sealed(statistics, 48, one(-1e-30))),
        ("a block value out of range", "decode", 1, 2, sealed(ternary, 40, b"\xff" * (len(ternary) - 40))),
        ("a bit after the last symbol", "decode", 1, 2, sealed(ternary, len(ternary) - 1, bytes([ternary[-1] | 128]))),
        (
            "payload and length one byte short",
            "truncated",
            1,
            2,
            sealed(ternary[:-1], 20, struct.pack("<Q", len(ternary) - 41)),
        ),
    ]
    entries = [
        {
            "what": what,
            "error": error,
            "run": index,
            "kind": kind,
            "round": runs[index]["rounds"][0]["round"],
            "senders": [0, 1, 2],
            "before": [],
            "frame": data.hex(),
        }
        for what, error, index, kind, data in cases
    ]
    again = {**entries[0], "what": "a second message of one sender", "error": "sender"}
    entries.append({**again, "before": [statistics.hex()], "frame": statistics.hex()})
    return [checked(entry, runs) for entry in entries]


def checked(entry: dict[str, Any], runs: list[dict[str, Any]]) -> dict[str, Any]:
    """The entry, once the package refuses it for the reason given."""
    intake = package_intake(entry, runs)
    for data in entry["before"]:
        intake.accept(bytes.fromhex(data))
    try:
        intake.accept(bytes.fromhex(entry["frame"]))
    except errors.WireError as error:
        reason = type(error).__name__.lower()
    else:
        reason = "accepted"
    assert reason == f"{entry['error']}error", f"{entry['what']}: {reason}"
    return entry


def package_intake(entry: dict[str, Any], runs: list[dict[str, Any]]) -> Intake:
    """The receiver that a `refused` entry describes."""
    known = runs[entry["run"]]["agreement"]
    settings = METHODS["pfedlms"].Settings(**as_settings(known["settings"]))
    initial = np.array([int(x, 16) for x in known["initial"]], dtype=np.uint32).view(np.float32)
    method = METHODS["pfedlms"](task([size for _, size in known["layers"]], int(known["seed"], 16), initial), settings)
    exchange = method.exchanges[entry["kind"] // 2]
    message = exchange.down if entry["kind"] % 2 else exchange.up
    return Intake(message, bytes.fromhex(known["digest"]), entry["round"], entry["senders"])


def as_settings(stored: dict[str, Any]) -> dict[str, Any]:
    texts = {name for name, field in METHODS["pfedlms"].Settings.__dataclass_fields__.items() if field.type == "str"}
    return {
        name: struct.unpack(">d", bytes.fromhex(value))[0] if isinstance(value, str) and name not in texts else value
        for name, value in stored.items()
    }


def vectors() -> dict[str, Any]:
    runs = [
        run([18, 8], seed=7, rounds=[0], ratio=0.25),
        run([18, 1, 70, 8], seed=2**63 - 1, rounds=[1, 2], zero_last=True, thresholds=2, ratio=0.5, refresh=2),
        run([18, 8], seed=0, rounds=[5], thresholds=1, ratio=0.5, layerwise=False, strength=0.01, smoothing=0.2),
    ]
    averaged, sparse = fedavg(), stc()
    everyone = {0, 1, 2}
    voted = [
        # Client 2 misses two answers and then three, which are more bytes than the model.
        sketchvote(
            [18, 8],
            seed=7,
            phases=[everyone, everyone, {0, 1}, {0, 1}, everyone, {0, 1}, {0, 1}, {0, 1}, everyone, everyone],
            silent={0: {2: 1}},
            ratio=0.25,
            check_every=3,
        ),
        # Nobody has anything to say of layer 1 in round 0.
        sketchvote(
            [18, 1, 70, 8],
            seed=2**63 - 1,
            phases=[everyone, {0, 2}, everyone, everyone],
            silent={0: {0: 1, 1: 1, 2: 1}},
            ratio=0.3,
            allocation=0.5,
            gain=0.7,
            refresh=2,
            check_every=0,
        ),
    ]
    digests = [entry["agreement"] for entry in (*runs, averaged, sparse)]
    return {
        "protocol": 1,
        **generator_vectors(),
        "sizes": sizes(),
        "transforms": transforms(),
        **threshold_vectors(),
        "votes": votes(),
        "blocks": [[levels, *block_shape(levels)] for levels in range(2, 257)],
        "packed": packed(),
        "fields": fields(),
        "digests": [{key: entry[key] for key in ("text", "sha256", "digest")} for entry in digests],
        "runs": runs,
        "fedavg": averaged,
        "stc": sparse,
        "refused": refused(runs),
        "allocations": allocations(),
        "medians": medians(),
        "sketchvote": voted,
    }


def render(value: Any, indent: str = "") -> str:
    """JSON with one line for each thing that holds no objects, so that a change shows as a few changed lines."""
    deeper = indent + " "
    if isinstance(value, dict) and (len(json.dumps(value)) > 110 or not indent):
        lines = [f"{deeper}{json.dumps(key)}: {render(item, deeper)}" for key, item in value.items()]
        return "{\n" + ",\n".join(lines) + f"\n{indent}}}"
    if isinstance(value, list) and any(isinstance(item, dict) for item in value):
        return "[\n" + ",\n".join(deeper + render(item, deeper) for item in value) + f"\n{indent}]"
    return json.dumps(value)


def text() -> str:
    return render(vectors()) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="compare with the file instead of writing it")
    arguments = parser.parse_args()
    if not arguments.check:
        FILE.write_text(text(), encoding="ascii")
    elif FILE.read_text(encoding="ascii") != text():
        raise SystemExit(
            f"{FILE.name}: not what the package gives; see docs/protocol.md, section 13, before making it again"
        )


if __name__ == "__main__":
    main()
