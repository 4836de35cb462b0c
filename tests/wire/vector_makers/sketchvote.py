"""Sections 11.1 and 11.2 of the page: whole runs of sketchvote and sketchmean."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import torch

from pfedlms.cohort import Cohort
from pfedlms.engine.catch_up import CatchUp
from pfedlms.engine.client import Client
from pfedlms.engine.simulate import InProcess, Links, run_exchange
from pfedlms.engine.terms import method_digest
from pfedlms.engine.transport import CatchUpOrders, Code, Record, Request
from pfedlms.methods import METHODS, Task
from vector_makers.agreements import agreement, task
from vector_makers.notation import SAMPLES, bits32, bits64, floats


def sketchmean(*about: Any, gain: float, **more: Any) -> dict[str, Any]:
    """As `sketchvote`, with the gain, which is not part of the agreement."""
    made = sketchvote(*about, name="sketchmean", gain=gain, **more)
    return {"gain": bits64(gain), **{key: value for key, value in made.items() if key != "factors"}}


def sketchvote(
    layers: list[int], seed: int, phases: list[set[int]], silent: dict[int, dict[int, int]], name: str = "sketchvote",
    lost: dict[int, int] | None = None, even: dict[int, dict[int, int]] | None = None,
    drifted: dict[int, int] | None = None, **settings: Any,
) -> dict[str, Any]:  # fmt: skip
    """A run in which the clients of `phases[r]` train before round r, and those of the next phase receive its answer.

    `silent[r]` names clients and, for each, the layer without an update by round r: x is zero there. `even[r]`
    names those with the same update in two entries, so that half of y is zero. `lost[r]` is a client known to be out of
    sync before the answer of round r, `drifted[r]` one that trains from another w and sends its digest.
    """
    method = METHODS[name]
    chosen = method.Settings(**settings)
    initial = floats(sum(layers), 12, seed)
    initial[1::2] = initial[18] = -0.0
    known = task(layers, seed, initial)
    playing = method(known, chosen)
    digest, server = method_digest(playing), playing.server_start()
    catch_up = CatchUp(playing, digest)
    answers = catch_up.new_log()
    clients, answers_known = [start_client(playing, k) for k in range(len(SAMPLES))], [0] * len(SAMPLES)
    played = []
    for number, (senders, receivers) in enumerate(pairwise(phases)):
        ups: dict[int, bytes] = {}
        downs: dict[int, list[bytes]] = {}
        links = Links(
            lambda data, k, to=ups: to.update({k: data}) or data,
            lambda data, k, to=downs: to.setdefault(k, []).append(data) or data,
        )
        terms = SimpleNamespace(method=playing, digest=digest, catch_up=catch_up)
        transport = InProcess(Client(terms, None, None), None, links)
        out_of_sync = (drifted or {}).get(number)
        if out_of_sync is not None:
            clients[out_of_sync] = clients[out_of_sync].with_state(model=clients[out_of_sync].state["model"] + 0.25)
        for k in senders:
            parts = silent.get(number, {}), (even or {}).get(number, {})
            clients[k] = replace(clients[k], params=trained_model(clients[k], known, seed, number, *parts))
        sent = [{"id": k, "samples": SAMPLES[k], "model": bits32(clients[k].params)} for k in sorted(senders)]
        for own in sent:
            if own["id"] == out_of_sync:
                own["w"] = bits32(clients[out_of_sync].state["model"])
        sending = [clients[k] for k in sorted(senders)]
        after, moved, answer, inbox = run_exchange(transport, Record(Code.SEND, number), sending, server)
        for entry, cohort in zip(sent, after, strict=True):
            clients[entry["id"]] = cohort
            entry["frame"] = ups[entry["id"]].hex()
            if "residual" in cohort.state:
                entry["residual"] = bits32(cohort.state["residual"])
        caught_up = []
        for k in sorted(receivers):
            answers_known[k] = -1 if (lost or {}).get(number) == k else answers_known[k]
            request = Request((k,), (answer,))
            if answers_known[k] < number or k == out_of_sync:
                orders = catch_up.orders(-1 if k == out_of_sync else answers_known[k], number, answers, server)
                request = replace(request, catch_up=(CatchUpOrders((k,), orders),))
            back = transport.catch_up(request, [clients[k]], inbox)
            if k in downs:
                caught_up.append({"id": k, "heard": answers_known[k], "frames": [data.hex() for data in downs.pop(k)]})
            (clients[k],) = transport.answer(request, answer, back, inbox)
            answers_known[k] = number + 1
            assert torch.equal(clients[k].state["model"][0].view(torch.int32), moved["model"].view(torch.int32))
        before, server = server, moved
        answers = answers.with_answer(number, answer.data, before["model"], server["model"])
        played.append(
            {
                "round": number,
                "clients": sent,
                "reply": answer.data.hex(),
                "caught_up": caught_up,
                "hear": sorted(receivers),
                "w": bits32(server["model"]),
                **{key: bits32(server[own]) for key, own in (("scale", "scale"), ("z", "unsent")) if own in server},
            }
        )
    factors = [bits64(factor) for factor in playing.exchanges[0]._factors.tolist()] if name == "sketchvote" else []
    return {"agreement": agreement(name, chosen, known), "factors": factors, "rounds": played}


def start_client(method: Any, client: int) -> Cohort:
    start = method.task.initial[None].clone()
    return method.client_start(Cohort((client,), (SAMPLES[client],), start, torch.zeros(1, 0), {}))


def trained_model(
    cohort: Cohort, known: Task, seed: int, number: int, silent: dict[int, int], even: dict[int, int]
) -> torch.Tensor:
    """θ: w and an update; in a layer without an update, θ − w + e is zero."""
    (client,), w = cohort.ids, cohort.state["model"]
    model = w + torch.from_numpy(floats(w.shape[1], 13, seed, number, client)) / 8
    if client in silent or client in even:
        layer = known.layout.layers[(silent | even)[client]]
        own = slice(layer.offset, layer.offset + layer.size)
        assert not cohort.state.get("residual", torch.zeros_like(w))[:, own].any()
        model[:, own] = w[:, own]
        if client in even:  # where w is zero, so that both differences are exact
            model[:, own][:, (w[0, own] == 0).nonzero()[:2, 0]] = 0.25
    return model
