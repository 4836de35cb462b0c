"""Sections 10 and 11 of the page: whole rounds of pfedlms, fedavg and stc."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import torch

from pfedlms.cohort import Cohort, Tensors
from pfedlms.engine.terms import method_digest
from pfedlms.methods import METHODS, Exchange
from pfedlms.wire.frames import SERVER, Intake, frame
from vector_makers.agreements import agreed, task
from vector_makers.notation import SAMPLES, bits32, floats

IDS = tuple(range(len(SAMPLES)))


class Held(NamedTuple):
    """One exchange of all clients, through frames."""

    cohort: Cohort
    server: Tensors
    sent: dict[str, np.ndarray]
    frames: list[bytes]
    reply: dict[str, np.ndarray]
    answer: bytes


def cohort_of(params: np.ndarray) -> Cohort:
    return Cohort(IDS, SAMPLES, torch.from_numpy(params), torch.zeros(len(IDS), 0), {})


def hold(exchange: Exchange[Any], cohort: Cohort, server: Tensors, number: int, digest: bytes) -> Held:
    header = {"round": number, "digest": digest}
    cohort, values = exchange.client_send(cohort, number, None)  # type: ignore[arg-type]
    sent = {name: value.numpy() for name, value in values.items()}
    frames, intake, total = [], Intake(exchange.up, digest, number, IDS), exchange.server_open(server, number)
    for k in IDS:
        own = {name: value[k] for name, value in sent.items()}
        frames.append(frame(exchange.up, own, sender=k, samples=SAMPLES[k], **header))
        received = intake.accept(frames[-1])
        arrived = {name: torch.from_numpy(value)[None] for name, value in received.values.items()}
        total = exchange.server_add(total, [k], [received.samples], arrived)
    server, values = exchange.server_reply(server, total, number)
    reply = {name: value.numpy() for name, value in values.items()}
    answer = frame(exchange.down, reply, sender=SERVER, samples=0, **header)
    back = Intake(exchange.down, digest, number, (SERVER,)).accept(answer).values
    cohort = exchange.client_receive(cohort, {n: torch.from_numpy(v) for n, v in back.items()}, number)
    return Held(cohort, server, sent, frames, reply, answer)


def run(
    layers: Iterable[int], seed: int, rounds: Iterable[int], zero_last: bool = False, huge_last: bool = False,
    **settings: Any,
) -> dict[str, Any]:  # fmt: skip
    """`zero_last`: the last layer of all clients is zero. `huge_last`: the last parameter of two clients is so large
    that thresholds overflow."""
    method, sizes = METHODS["pfedlms"], list(layers)
    chosen = method.Settings(**settings)
    known = task(sizes, seed, floats(sum(sizes), 8, seed))
    played = []
    for number in rounds:
        params = np.stack([floats(sum(sizes), 9, seed, number, client) for client in IDS])
        if zero_last:
            params[:, -sizes[-1] :] = 0
        if huge_last:
            params[1:, -1] = 3e38
        played.append(play(method(known, chosen), number, params))
    return {"agreement": agreed("pfedlms", chosen, known), "rounds": played}


def play(method: Any, number: int, params: np.ndarray) -> dict[str, Any]:
    first = hold(method.exchanges[0], cohort_of(params), {}, number, method_digest(method))
    second = hold(method.exchanges[1], first.cohort, {}, number, method_digest(method))
    known = {name: value.numpy() for name, value in {**second.cohort.scratch, **second.cohort.heard}.items()}
    clients = [
        {
            "id": k,
            "samples": SAMPLES[k],
            "model": bits32(params[k]),
            "sketch": bits32(known["sketched"][k]),
            "mean": bits32(first.sent["mean"][k]),
            "variance": bits32(first.sent["variance"][k]),
            "symbols": second.sent["symbols"][k].tolist(),
            "frame_a": first.frames[k].hex(),
            "frame_b": second.frames[k].hex(),
        }
        for k in IDS
    ]
    return {
        "round": number,
        "clients": clients,
        "thresholds": [bits32(row) for row in known["thresholds"]],
        "consensus": known["consensus"].tolist(),
        "reply_a": first.answer.hex(),
        "reply_b": second.answer.hex(),
    }


def clients_of(params: np.ndarray, held: Held, **more: Any) -> list[dict[str, Any]]:
    """`more`: tensors of which every client has a row."""
    return [
        {
            "id": k,
            "samples": SAMPLES[k],
            "model": bits32(params[k]),
            "frame": held.frames[k].hex(),
            **{name: bits32(value[k].numpy()) for name, value in more.items()},
        }
        for k in IDS
    ]


def fedavg() -> dict[str, Any]:
    method, known = METHODS["fedavg"], task([4, 3], 11, floats(7, 10))
    made = method(known, method.Settings())
    models = np.stack([floats(7, 11, client) for client in IDS])
    held = hold(made.exchanges[0], cohort_of(models), {}, 4, method_digest(made))
    return {
        "agreement": agreed("fedavg", method.Settings(), known),
        "round": 4,
        "clients": clients_of(models, held),
        "average": bits32(held.reply["model"]),
        "reply": held.answer.hex(),
    }


def stc() -> dict[str, Any]:
    """Six rounds. Clients begin each with models of the vectors' own; residuals of clients and server stay."""
    method = METHODS["stc"]
    settings = method.Settings(sparsity=0.1, sparsity_down=0.2)
    known = task([23, 17], 13, floats(40, 12))
    made = method(known, settings)
    cohort, server = (
        made.client_start(cohort_of(known.initial.expand(len(IDS), -1).numpy().copy())),
        made.server_start(),
    )
    played = []
    for number in range(6):
        # The second client's update is one number everywhere, so that all magnitudes tie.
        params = np.stack([floats(40, 13, number, client) for client in IDS])
        params[1] = cohort.state["model"][1].numpy() + np.float32(0.25)
        held = hold(made.exchanges[0], cohort.with_model(torch.from_numpy(params)), server, number, method_digest(made))
        cohort, server = held.cohort, held.server
        played.append(
            {
                "round": number,
                "clients": clients_of(params, held, residual=cohort.state["residual"]),
                "reply": held.answer.hex(),
                "residual": bits32(server["residual"].numpy()),
                "model": bits32(cohort.state["model"][0].numpy()),
            }
        )
    return {"agreement": agreed("stc", settings, known), "rounds": played}
