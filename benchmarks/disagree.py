"""Where a majority vote fails, and what it buys: sketchvote on a problem whose solution is known.

    python benchmarks/disagree.py [--json FILE]

Client k minimises ½‖θ − a_k‖² by E gradient steps, θ_k = a_k + (1 − κ)(w − a_k) with κ = 1 − (1 − η)^E, all with the
same N_k; exchanges are held with real messages. Distances of w are means over the last rounds; *averaged* is that of
the mean of w over these rounds, without what it moves to and fro.

*Disagreement*: a_k = c + a, c + a, c − 4a, so that at c the updates are g, g, −4g: the mean's minimum is c − ⅔a, the
majority's c + a. *One of nine lies*: a_k = c + noise; the liar says the opposite of what it has learnt, with its own
scale, with 100 times that, or with 3e38 (FedAvg: w minus 1 or 100 times its update, or a model of 3e38). *Steps*: as
before, nobody lies; what was not sent of a direction adds up for 1 / ratio rounds on average, so κ / ratio is what κ is
to FedAvg.
"""

from __future__ import annotations

import argparse
import warnings
from dataclasses import replace
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lies
import torch
import variants
from kept import keep
from torch import Tensor

from pfedlms import rng
from pfedlms.cohort import Cohort
from pfedlms.engine.client import Client
from pfedlms.engine.simulate import InProcess, run_exchange
from pfedlms.engine.terms import method_digest
from pfedlms.engine.transport import Code, Record
from pfedlms.errors import RunError
from pfedlms.methods import METHODS, Method, Task
from pfedlms.models import Layer, Layout

DIM, ROUNDS, LAST, SEED = 1024, 800, 400, 0
CLIENTS, NOISE = 9, 0.3
RATIO, STEP = 0.1, 0.05  # m / N and κ
SHOWN: dict[str, tuple[str, dict[str, Any]]] = {
    "fedavg": ("fedavg", {}),
    "sketchvote": ("sketchvote", {"ratio": RATIO}),
    "sketchvote, votes weighted by s, cap 3": (variants.WeightedSketchVote.name, {"ratio": RATIO, "cap": 3.0}),
    "sketchvote, votes weighted by s": (variants.WeightedSketchVote.name, {"ratio": RATIO, "cap": 0.0}),
}


class NoWork:
    """What clients could compute on data; there are none here."""


def made(name: str, settings: dict[str, Any], clients: int) -> Method:
    """A method for a model of one layer that begins at zero."""
    layout = Layout((), (Layer("all", 0, DIM),))
    task = Task(layout, 1, 1, SEED, torch.zeros(DIM), clients, clients, STEP, 0.0)
    return METHODS[name](task, METHODS[name].Settings(**settings))


def solve(method: Method, minima: Tensor, step: float = STEP) -> Tensor | str:
    """w in the last rounds, `[LAST, DIM]`, of clients with these minima and κ = `step`; or how it ended instead."""
    count, seen = len(minima), []
    cohort = method.client_start(
        Cohort(tuple(range(count)), (1,) * count, torch.zeros_like(minima), torch.zeros(count, 0), {})
    )
    terms = SimpleNamespace(method=method, digest=method_digest(method), catch_up=None)
    server, transport = method.server_start(), InProcess(Client(terms, NoWork(), None), None)
    for round in range(ROUNDS):
        trained = replace(cohort, params=minima + (1 - step) * (cohort.params - minima))
        try:
            cohorts, server, answer, inbox = run_exchange(transport, Record(Code.SEND, round), [trained], server)
            (cohort,) = transport.answer(inbox.requests[0], answer, cohorts, inbox)
        except RunError as error:
            return f"round {round + 1}: {type(error).__name__}"
        seen.append(cohort.params[0])
    last = torch.stack(seen[-LAST:])
    return last if bool(torch.isfinite(last).all()) else "not finite"


def distance(found: Tensor | str, target: Tensor, unit: Tensor) -> float | str:
    """How far w is from `target`, in lengths of `unit`; or how it ended."""
    if isinstance(found, str):
        return found
    return float((found.double() - target).norm(dim=1).mean() / unit.norm())


def normal(purpose: str, *shape: int) -> Tensor:
    values = rng.normals(rng.stream(SEED, purpose), prod(shape))
    return torch.from_numpy(values).reshape(shape).float()


def disagreement() -> list[dict[str, Any]]:
    centre, a = normal("centre", DIM), normal("direction", DIM)
    minima = torch.stack([centre + a, centre + a, centre - 4 * a])
    rows = []
    for label, (name, settings) in SHOWN.items():
        found = solve(made(name, settings, 3), minima)
        averaged = found if isinstance(found, str) else found.mean(dim=0, keepdim=True)
        row = {"problem": "g, g, −4g", "method": label, "to_mean": distance(found, minima.mean(dim=0), a)}
        row |= {"averaged": distance(averaged, minima.mean(dim=0), a), "to_majority": distance(found, centre + a, a)}
        rows.append(row)
    return rows


def lie(method: Method, how: str) -> None:
    """The last of the clients lies."""
    (exchange,), liar = method.exchanges, (CLIENTS - 1,)
    if how == "nobody lies":
        return
    if method.name == "fedavg":
        factor = 100 if how == "100 times" else 1
        enormous = how == f"{lies.ENORMOUS:g}"
        lie = lies.constant("model", lies.ENORMOUS) if enormous else lies.turned(exchange, method.task.initial, factor)
        lies.lies_with(exchange, liar, lie)
        return
    lies.flipped(method, liar)
    if how == "100 times":
        lies.lies_with(exchange, liar, lies.times("scale", 100))
    elif how != "opposite":
        lies.lies_with(exchange, liar, lies.constant("scale", lies.ENORMOUS))


def one_of_nine() -> list[dict[str, Any]]:
    centre = normal("centre", DIM)
    minima = centre + NOISE * normal("noise", CLIENTS, DIM)
    rows = []
    for how in ("nobody lies", "opposite", "100 times", f"{lies.ENORMOUS:g}"):
        for label, (name, settings) in SHOWN.items():
            method = made(name, settings, CLIENTS)
            lie(method, how)
            honest = minima[: CLIENTS if how == "nobody lies" else -1].mean(dim=0)
            found = distance(solve(method, minima), honest, honest)
            rows.append({"problem": how, "method": label, "to_mean": found})
    return rows


def steps() -> list[dict[str, Any]]:
    minima = normal("centre", DIM) + NOISE * normal("noise", CLIENTS, DIM)
    rows = []
    for step in (0.025, 0.05, 0.1, 0.15, 0.2, 0.4):
        for label in ("fedavg", "sketchvote"):
            name, settings = SHOWN[label]
            target = minima.mean(dim=0)
            found = distance(solve(made(name, settings, CLIENTS), minima, step), target, target)
            rows.append({"problem": f"{step / RATIO:g}", "method": label, "to_mean": found})
    return rows


def table(rows: list[dict[str, Any]]) -> None:
    problems, methods = (list(dict.fromkeys(row[name] for row in rows)) for name in ("problem", "method"))
    print("| method | " + " | ".join(problems) + " |\n" + "|---" * (1 + len(problems)) + "|")
    for label in methods:
        print("| " + " | ".join([label, *(shown(row["to_mean"]) for row in rows if row["method"] == label)]) + " |")


def shown(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.3f}" if value < 1000 else f"{value:.2g}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    warnings.simplefilter("ignore")  # refused messages are what this is about
    apart, lying, further = disagreement(), one_of_nine(), steps()
    print("Updates g, g, −4g: distance of w to the minimum of the mean and to the majority's, in lengths of a\n")
    print("| method | mean | averaged | majority |\n|---|---|---|---|")
    for row in apart:
        print(f"| {row['method']} | {' | '.join(shown(row[key]) for key in ('to_mean', 'averaged', 'to_majority'))} |")
    print("\nOne of nine lies: distance of w to the honest clients' minimum, over that of w⁰\n")
    table(lying)
    print("\nSteps, κ / ratio: distance of w to the minimum, over that of w⁰\n")
    table(further)
    if options.json:
        keep({"disagreement": apart, "one of nine lies": lying, "steps": further}, options.json)


if __name__ == "__main__":
    main()
