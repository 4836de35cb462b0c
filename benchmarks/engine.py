"""Time of a local step and of a round: stacked engine, reference engine, and a plain loop of `nn.Module`s, in one run;
every stage of a round; and how far a step is from what the machine could do.

    python benchmarks/engine.py --model dnn|vgg8|vgg11 [--device auto] [--precision bf16] [--json out.json]

Data are random: nothing here depends on what is learnt. Times are medians; the last column is the ratio to the
stacked engine. Floors: the bytes a step must move at least (every model read and written once, every sample read)
over the measured speed of a copy, and its multiplications and additions over the measured rate of a matrix product.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from collections.abc import Callable
from itertools import count
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from kept import keep
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from pfedlms.backend import plain
from pfedlms.data import batch_positions, from_pairs
from pfedlms.engine import Federation
from pfedlms.engine.reports import Stopwatch
from pfedlms.engine.simulate import run_exchange
from pfedlms.engine.transport import Code, Record
from pfedlms.methods import METHODS
from pfedlms.methods.contract import Objective
from pfedlms.models import CohortModel, build
from pfedlms.train_settings import TrainSettings

SHAPES = {"dnn": (1, 28, 28)}


def federation(options: argparse.Namespace, method: str, cohort_size: int, watch: bool = False) -> Federation:
    shape = SHAPES.get(options.model, (3, 32, 32))
    draw = np.random.default_rng(0)
    pairs = []
    for _ in range(options.clients):
        sets = [
            (draw.standard_normal((n, *shape), dtype=np.float32), draw.integers(0, options.classes, n))
            for n in (options.samples, 64)
        ]
        sets[0][1][0] = options.classes - 1  # every class number up to the last is known to the data
        pairs.append((sets[0], sets[1]))
    device = torch.device(options.device)
    module = build(options.model, shape, options.classes, 256, 0)
    half = getattr(options, "precision", "default") == "bf16"
    model = CohortModel(module, device, half=half)
    train = TrainSettings(local_steps=options.steps, batch_size=options.batch, learning_rate=0.05)
    settings = METHODS[method].Settings()
    stopwatch = Stopwatch(device) if watch else None
    return Federation(
        METHODS[method], settings, model, from_pairs(pairs).to(device), train, 0, cohort_size, watch=stopwatch
    )


def copy_speed(device: torch.device) -> float:
    """Bytes moved a second (read and written) by copying an array that no cache holds."""
    source = torch.ones(1 << (28 if device.type == "cuda" else 25), device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / median_seconds(lambda: target.copy_(source), device, 7)


def matrix_rate(device: torch.device, tf32: bool, kind: torch.dtype = torch.float32) -> float:
    """Multiplications and additions a second of one large product."""
    size = 8192 if device.type == "cuda" else 2048
    a, b = (torch.ones(size, size, device=device, dtype=kind) for _ in range(2))
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = tf32
    try:
        return 2 * size**3 / median_seconds(lambda: a @ b, device, 5)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def floors(options: argparse.Namespace, made: Federation) -> dict[str, float]:
    """Least time of a step of all clients, by what must be moved and by what must be computed."""
    device, shape = torch.device(options.device), made.data.shape
    module = build(options.model, shape, options.classes, 256, 0).to(device)
    x = torch.zeros(options.batch, *shape, device=device)
    with FlopCounterMode(display=False) as counter:
        module(x).sum().backward()
    operations = options.clients * counter.get_total_flops()
    moved = options.clients * (8 * made.model.layout.dim + x.nbytes)
    convolutions = any(isinstance(part, nn.Conv2d) for part in module.modules())
    kind = torch.bfloat16 if options.precision == "bf16" else torch.float32
    rate = matrix_rate(device, convolutions and options.precision == "default", kind)
    return {"bytes": moved / copy_speed(device), "operations": operations / rate}


def median_seconds(work: Callable[[], object], device: torch.device, repeats: int) -> float:
    times = []
    for turn in range(repeats + 2):
        if device.type == "cuda":
            torch.cuda.synchronize()
        began = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize()
        if turn >= 2:
            times.append(time.perf_counter() - began)
    return statistics.median(times)


def plain_loop(options: argparse.Namespace) -> Callable[[], None]:
    """E steps of every client as most code does it: one module and one optimiser each, one client after another."""
    made = federation(options, "local", 0)
    shape, data = SHAPES.get(options.model, (3, 32, 32)), made.data
    device = torch.device(options.device)
    modules = [build(options.model, shape, options.classes, 256, 0).to(device) for _ in range(options.clients)]
    optimisers = [torch.optim.SGD(module.parameters(), lr=0.05, weight_decay=1e-4) for module in modules]
    batches = [
        torch.from_numpy(data.train[k][batch_positions(0, k, len(data.train[k]), 0, options.steps, options.batch)])
        for k in range(options.clients)
    ]

    def steps() -> None:
        for client, (module, optimiser) in enumerate(zip(modules, optimisers, strict=True)):
            for index in batches[client].to(device):
                optimiser.zero_grad()
                F.cross_entropy(module(data.x[index]), data.y[index]).backward()
                optimiser.step()

    return steps


def pulled_step(made: Federation, device: torch.device, options: argparse.Namespace) -> float:
    """A local step with the regulariser: one round's exchanges are held once, then only local steps are repeated."""
    cohorts, server, transport = made._clients.present, made.method.server_start(), made._transport
    for index in range(len(made.method.exchanges)):
        send = Record(Code.SEND, 0, index)
        cohorts, server, answer, inbox = run_exchange(transport, send, cohorts, server)
        cohorts = transport.answer(inbox.requests[0], answer, cohorts, inbox)
    objective, phases = made.method.objective(cohorts[0], 0), count(1)
    repeat = lambda: made._worker.train(cohorts[0], objective, next(phases))  # noqa: E731 - used once
    return median_seconds(repeat, device, options.repeats) / options.steps


def butterfly_round(options: argparse.Namespace) -> float:
    """A pFedLMS round as it is defined: transforms are plain torch butterflies."""
    with plain():
        made = federation(options, "pfedlms", 0)
        made.start()
        return median_seconds(made.play_round, torch.device("cpu"), 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="dnn")
    parser.add_argument("--classes", type=int, default=10)
    parser.add_argument("--clients", type=int, default=20)
    parser.add_argument("--samples", type=int, default=400, help="training samples a client")
    parser.add_argument("--steps", type=int, default=20, help="local steps a round")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--methods", default="fedavg,pfedlms")
    parser.add_argument("--skip-reference", action="store_true")
    parser.add_argument(
        "--precision",
        choices=["default", "float32", "bf16"],
        default="default",
        help="default: convolutions in TF32, products in float32; float32: all of it; bf16: autocast",
    )
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.device == "auto":
        options.device = "cuda" if torch.cuda.is_available() else "cpu"
    warnings.simplefilter("ignore")
    device = torch.device(options.device)
    torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic = False, True
    torch.backends.cudnn.allow_tf32 = options.precision != "float32"
    where = torch.cuda.get_device_name() if device.type == "cuda" else f"{torch.get_num_threads()} CPU threads"
    print(f"{options.model}, {options.precision} precision, {where}")
    print(f"{options.clients} clients, batch {options.batch}, {options.steps} steps a round")

    rows: dict[str, float] = {}
    stacked = federation(options, "local", 0)
    stacked.start()
    (cohort,) = stacked._clients.present
    phases = count(1)
    step = (
        median_seconds(lambda: stacked._worker.train(cohort, Objective(), next(phases)), device, options.repeats)
        / options.steps
    )
    rows["step, stacked"] = step
    if not options.skip_reference:
        rows["step, plain loop"] = median_seconds(plain_loop(options), device, 3) / options.steps
        alone = federation(options, "local", 1)
        alone.start()
        loop = lambda: [alone._worker.train(c, Objective(), 1) for c in alone._clients.present]  # noqa: E731 - used once
        rows["step, reference engine"] = median_seconds(loop, device, 3) / options.steps
    for method in options.methods.split(","):
        made = federation(options, method, 0)
        made.start()
        rows[f"round, {method}"] = median_seconds(made.play_round, device, options.repeats)
    if device.type == "cpu":
        rows["round, pfedlms, torch butterfly"] = butterfly_round(options)
    pulled = federation(options, "pfedlms", 0)
    pulled.start()
    rows["step, stacked, with the pull"] = pulled_step(pulled, device, options)
    watched = federation(options, "pfedlms", 0, watch=True)
    watched.start()
    for _ in range(2):
        watched.play_round()
    watched.watch.seconds.clear()
    for _ in range(options.repeats):
        watched.play_round()
        watched.evaluate()
    for name, seconds in watched.watch.seconds.items():
        rows[f"  pfedlms: {name}"] = seconds / options.repeats

    least = floors(options, stacked)
    for name, seconds in least.items():
        rows[f"step, floor by {name}"] = seconds
    for name, seconds in rows.items():
        against = f"{seconds / step:8.2f}x" if name.startswith("step") else ""
        print(f"{name:36s} {seconds * 1e3:10.3f} ms {against}")
    if "round, fedavg" in rows and "round, pfedlms" in rows:
        print(f"round, pfedlms / fedavg: {rows['round, pfedlms'] / rows['round, fedavg']:.2f}")
    if device.type == "cuda":
        print(f"peak GPU memory {torch.cuda.max_memory_allocated() / 2**30:.2f} GiB")
    if options.json:
        chosen = {name: value for name, value in vars(options).items() if name != "json"}
        keep({"options": chosen, "where": where, "seconds": rows}, options.json)


if __name__ == "__main__":
    main()
