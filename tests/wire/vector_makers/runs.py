"""Sections 10 and 11 of the page: whole rounds of pfedlms, fedavg and stc."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from pfedlms.cohort import Cohort
from pfedlms.engine.terms import agreement
from pfedlms.methods import METHODS
from pfedlms.wire.frames import SERVER, Intake, frame
from vector_makers.agreements import agreed, task
from vector_makers.notation import SAMPLES, bits32, floats


def run(
    layers: Iterable[int],
    seed: int,
    rounds: Iterable[int],
    zero_last: bool = False,
    huge_last: bool = False,
    **settings: Any,
) -> dict[str, Any]:
    """`zero_last`: the last layer is zero with everyone; `huge_last`: the last parameter is so large with two clients
    that thresholds overflow."""
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
        if huge_last:
            params[1:, -1] = 3e38
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
