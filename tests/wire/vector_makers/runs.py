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
from vector_makers.agreements import agreement, task
from vector_makers.notation import SAMPLES, bits32, floats

IDS = tuple(range(len(SAMPLES)))


class ExchangeResult(NamedTuple):
    """One exchange of all clients, through frames."""

    cohort: Cohort
    server: Tensors
    sent: dict[str, np.ndarray]
    frames: list[bytes]
    reply: dict[str, np.ndarray]
    answer: bytes


def cohort_of(params: np.ndarray) -> Cohort:
    return Cohort(IDS, SAMPLES, torch.from_numpy(params), torch.zeros(len(IDS), 0), {})


def play_exchange(
    exchange: Exchange[Any], cohort: Cohort, server: Tensors, number: int, digest: bytes
) -> ExchangeResult:
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
    return ExchangeResult(cohort, server, sent, frames, reply, answer)


def run(
    layers: Iterable[int], seed: int, rounds: Iterable[int], zero_last: bool = False, huge_last: bool = False,
    **settings: Any,
) -> dict[str, Any]:  # fmt: skip
    """`zero_last`: the last layer of all clients is zero. `huge_last`: two clients' last parameter makes the thresholds
    overflow."""
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
    return {"agreement": agreement("pfedlms", chosen, known), "rounds": played}


def play(method: Any, number: int, params: np.ndarray) -> dict[str, Any]:
    first = play_exchange(method.exchanges[0], cohort_of(params), {}, number, method_digest(method))
    second = play_exchange(method.exchanges[1], first.cohort, {}, number, method_digest(method))
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


def clients_of(params: np.ndarray, result: ExchangeResult, **more: Any) -> list[dict[str, Any]]:
    """`more`: tensors of which every client has a row."""
    return [
        {
            "id": k,
            "samples": SAMPLES[k],
            "model": bits32(params[k]),
            "frame": result.frames[k].hex(),
            **{name: bits32(value[k].numpy()) for name, value in more.items()},
        }
        for k in IDS
    ]


def fedavg() -> dict[str, Any]:
    method, known = METHODS["fedavg"], task([4, 3], 11, floats(7, 10))
    prepared = method(known, method.Settings())
    models = np.stack([floats(7, 11, client) for client in IDS])
    result = play_exchange(prepared.exchanges[0], cohort_of(models), {}, 4, method_digest(prepared))
    return {
        "agreement": agreement("fedavg", method.Settings(), known),
        "round": 4,
        "clients": clients_of(models, result),
        "average": bits32(result.reply["model"]),
        "reply": result.answer.hex(),
    }


def stc() -> dict[str, Any]:
    """Six rounds. Clients' models are new in each; residuals of clients and server remain."""
    method = METHODS["stc"]
    settings = method.Settings(sparsity=0.1, sparsity_down=0.2)
    known = task([23, 17], 13, floats(40, 12))
    prepared = method(known, settings)
    cohort, server = (
        prepared.client_start(cohort_of(known.initial.expand(len(IDS), -1).numpy().copy())),
        prepared.server_start(),
    )
    played = []
    for number in range(6):
        # The second client's update is one number everywhere, so that all its magnitudes are equal.
        params = np.stack([floats(40, 13, number, client) for client in IDS])
        params[1] = cohort.state["model"][1].numpy() + np.float32(0.25)
        trained = cohort.with_model(torch.from_numpy(params))
        result = play_exchange(prepared.exchanges[0], trained, server, number, method_digest(prepared))
        cohort, server = result.cohort, result.server
        played.append(
            {
                "round": number,
                "clients": clients_of(params, result, residual=cohort.state["residual"]),
                "reply": result.answer.hex(),
                "residual": bits32(server["residual"].numpy()),
                "model": bits32(cohort.state["model"][0].numpy()),
            }
        )
    return {"agreement": agreement("stc", settings, known), "rounds": played}
