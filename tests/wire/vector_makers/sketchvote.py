"""Sections 11.1 and 11.2 of the page: whole runs of sketchvote and sketchmean."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch

from pfedlms.cohort import Cohort
from pfedlms.engine.catch_up import CatchUp
from pfedlms.engine.client import Client
from pfedlms.engine.simulate import InProcess, Links, run_exchange
from pfedlms.engine.terms import method_digest
from pfedlms.engine.transport import CatchUpOrders, Code, Record, Request
from pfedlms.methods import METHODS, Task
from vector_makers.agreements import agreed, task
from vector_makers.notation import SAMPLES, bits32, bits64, floats


def sketchmean(*about: Any, gain: float, **more: Any) -> dict[str, Any]:
    """As `sketchvote`, with the gain, which is not agreed on."""
    made = sketchvote(*about, name="sketchmean", gain=gain, **more)
    return {"gain": bits64(gain), **{key: value for key, value in made.items() if key != "factors"}}


def sketchvote(
    layers: list[int], seed: int, phases: list[set[int]], silent: dict[int, dict[int, int]], name: str = "sketchvote",
    lost: dict[int, int] | None = None, even: dict[int, dict[int, int]] | None = None,
    drifted: dict[int, int] | None = None, **settings: Any,
) -> dict[str, Any]:  # fmt: skip
    """A run in which the clients of `phases[r]` train before round r, and those of the next hear its answer.

    `silent[r]` says which clients have learnt nothing by round r in which layer: x is zero there; `even[r]`, which have
    learnt one number for two entries there, so that half of y is zero. `lost[r]` is a client that is known to have
    another model before the answer of round r, `drifted[r]` one that trains from another w: its digest says so.
    """
    method = METHODS[name]
    chosen = method.Settings(**settings)
    initial = floats(sum(layers), 12, seed)
    initial[1::2] = initial[18] = -0.0
    known = task(layers, seed, initial)
    playing = method(known, chosen)
    digest, server = method_digest(playing), playing.server_start()
    by = CatchUp(playing, digest)
    answers = by.new_log()
    clients, heard = [starting(playing, k) for k in range(len(SAMPLES))], [0] * len(SAMPLES)
    played = []
    for number, (senders, coming) in enumerate(pairwise(phases)):
        ups: dict[int, bytes] = {}
        downs: dict[int, list[bytes]] = {}
        links = Links(lambda data, k, to=ups: to.update({k: data}) or data, lambda data, k, to=downs: keep(to, k, data))
        transport = InProcess(Client(playing, digest, by, None, None), None, links)
        astray = (drifted or {}).get(number)
        if astray is not None:
            clients[astray] = clients[astray].with_state(model=clients[astray].state["model"] + 0.25)
        for k in senders:
            parts = silent.get(number, {}), (even or {}).get(number, {})
            clients[k] = replace(clients[k], params=learnt(clients[k], known, seed, number, *parts))
        told = [{"id": k, "samples": SAMPLES[k], "model": bits32(clients[k].params)} for k in sorted(senders)]
        told = [{**own, "w": bits32(clients[astray].state["model"])} if own["id"] == astray else own for own in told]
        sending = [clients[k] for k in sorted(senders)]
        after, moved, answer, inbox = run_exchange(transport, Record(Code.SEND, number), sending, server)
        for entry, cohort in zip(told, after, strict=True):
            clients[entry["id"]] = cohort
            entry["frame"] = ups[entry["id"]].hex()
            if "residual" in cohort.state:
                entry["residual"] = bits32(cohort.state["residual"])
        caught_up = []
        for k in sorted(coming):
            heard[k] = -1 if (lost or {}).get(number) == k else heard[k]
            request = Request((k,), (answer,))
            if heard[k] < number or k == astray:
                orders = by.orders(-1 if k == astray else heard[k], number, answers, server)
                request = replace(request, catch_up=(CatchUpOrders((k,), orders),))
            back = transport.catch_up(request, [clients[k]], inbox)
            if k in downs:
                caught_up.append({"id": k, "heard": heard[k], "frames": [data.hex() for data in downs.pop(k)]})
            (clients[k],) = transport.answer(request, answer, back, inbox)
            heard[k] = number + 1
            assert torch.equal(clients[k].state["model"][0].view(torch.int32), moved["model"].view(torch.int32))
        before, server = server, moved
        answers.add(number, answer.data, before["model"], server["model"])
        played.append(
            {
                "round": number,
                "clients": told,
                "reply": answer.data.hex(),
                "caught_up": caught_up,
                "hear": sorted(coming),
                "w": bits32(server["model"]),
                **{key: bits32(server[own]) for key, own in (("scale", "scale"), ("z", "unsent")) if own in server},
            }
        )
    factors = [bits64(factor) for factor in playing.exchanges[0]._factors.tolist()] if name == "sketchvote" else []
    return {"agreement": agreed(name, chosen, known), "factors": factors, "rounds": played}


def starting(method: Any, client: int) -> Cohort:
    start = method.task.initial[None].clone()
    return method.client_start(Cohort((client,), (SAMPLES[client],), start, torch.zeros(1, 0), {}))


def keep(to: dict[int, list[bytes]], client: int, data: bytes) -> bytes:
    to.setdefault(client, []).append(data)
    return data


def learnt(
    cohort: Cohort, known: Task, seed: int, number: int, silent: dict[int, int], even: dict[int, int]
) -> torch.Tensor:
    """θ: w and some steps; where nothing is to be said, such that θ − w + e is zero."""
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
