"""A local step of 20 clients by the package's runners, against a plain loop over modules and against floors.

    python benchmarks/steps.py [--models vgg8,vgg11,resnet,gru,transformer] [--device cpu] [--json out.json]

Work of different runners is interleaved, because machines are shared; each ratio is the median over pairs with its
quartiles. Equality is checked first. Floors: bytes (models read and written once, samples read) over the speed of a
copy, and operations over the rate of one large product, both measured. On a GPU each runner's steps are recorded as a
CUDA graph; the plain loop is not, because nobody does that.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from kept import keep
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from engine import copy_speed, matrix_rate
from pfedlms.backend import one_thread_per_operator, torch_threads
from pfedlms.engine.criterion import Criterion
from pfedlms.methods.contract import Objective
from pfedlms.models import CohortModel, build
from pfedlms.models.one_by_one import OneByOne
from pfedlms.models.stacked import Stacked
from pfedlms.step import sgd_step_

TEXT = {"gru", "transformer"}
LENGTH, TOKENS = 80, 80
RATE, DECAY = 0.05, 1e-4
PROFILED = 20  # steps


class Steps:
    """Local steps of all clients, one batch each, by one runner of the package."""

    def __init__(self, options: argparse.Namespace, name: str, runner: str) -> None:
        device = torch.device(options.device)
        self.module, self.x, self.y = made(options, name)
        self.model = CohortModel(self.module, device, half=options.precision == "bf16")
        if runner != "as chosen":
            single, alone = self.model._functional, runner == "one by one"
            self.model._runner = OneByOne(single, device, self.x[0]) if alone else Stacked(single, True)
        ids = tuple(range(options.clients))
        cohort = self.model.cohort(ids, (1,) * len(ids))
        self.params, self.buffers = cohort.params, cohort.buffers
        self.momentum, self.gradient = cohort.momentum, torch.empty_like(cohort.params)
        self.recorded: torch.cuda.CUDAGraph | None = None
        if device.type == "cuda":
            self.losses = self.step()
            torch.cuda.synchronize()
            self.recorded = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.recorded):
                self.step()

    def step(self) -> Tensor:
        loss = lambda *given: Criterion().training_losses(lambda rows: Objective(), *given)  # noqa: E731
        losses = self.model.gradient(self.gradient, self.params, self.buffers, self.x, self.y, loss)
        sgd_step_(self.params, self.gradient, None, self.momentum, RATE, 0.0, DECAY)
        return losses

    def __call__(self) -> None:
        if self.recorded is not None:
            self.recorded.replay()
            return
        with one_thread_per_operator():
            self.losses = self.step()


class PlainLoop:
    """The same as most code does it: one module and one optimiser each, one client after another."""

    def __init__(self, options: argparse.Namespace, name: str) -> None:
        self.x, self.y = made(options, name)[1:]
        self.bf16, self.losses = options.precision == "bf16", torch.zeros(options.clients)
        self.modules = [made(options, name)[0] for _ in range(options.clients)]
        self.optimisers = [torch.optim.SGD(m.parameters(), lr=RATE, weight_decay=DECAY) for m in self.modules]

    def __call__(self) -> None:
        for client, (module, optimiser) in enumerate(zip(self.modules, self.optimisers, strict=True)):
            optimiser.zero_grad()
            with torch.autocast(self.x.device.type, torch.bfloat16, enabled=self.bf16):
                outputs = module(self.x[client])
            loss = F.cross_entropy(outputs.float().flatten(0, -2), self.y[client].flatten())
            loss.backward()
            optimiser.step()
            self.losses[client] = loss.detach()


def made(options: argparse.Namespace, name: str) -> tuple[nn.Module, Tensor, Tensor]:
    """The module, and the samples and labels of all clients."""
    draw, device = torch.Generator().manual_seed(0), torch.device(options.device)
    shape, classes = ((LENGTH,), TOKENS) if name in TEXT else ((3, 32, 32), 100 if name == "vgg11" else 10)
    many = (options.clients, options.batch)
    if name in TEXT:
        x, y = (torch.randint(0, TOKENS, (*many, LENGTH), generator=draw) for _ in range(2))
    else:
        x, y = torch.randn(*many, *shape, generator=draw), torch.randint(0, classes, many, generator=draw)
    return build(name, shape, classes, 256, 0).to(device), x.to(device), y.to(device)


def seconds(work: Callable[[], object], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    began = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began


def floors(options: argparse.Namespace, name: str, copies: float, rates: dict[str, float]) -> dict[str, float]:
    module, x, y = made(options, name)
    with FlopCounterMode(display=False) as counter:
        F.cross_entropy(module(x[0]).flatten(0, -2), y[0].flatten()).backward()
    parameters = sum(value.numel() for value in module.parameters())
    moved = options.clients * (8 * parameters + x[0].nbytes)
    operations = options.clients * counter.get_total_flops()
    kind = "bf16" if options.precision == "bf16" else "float32" if name in TEXT else "tf32"
    return {"bytes": moved / copies, "operations": operations / rates[kind], "parameters": parameters}


def measure(options: argparse.Namespace, name: str, runners: list[str]) -> dict[str, Any]:
    device = torch.device(options.device)
    works: dict[str, Any] = {"plain loop": PlainLoop(options, name)}
    works |= {runner: Steps(options, name, runner) for runner in runners}
    chosen = type(works["as chosen"].model._runner).__name__ if "as chosen" in works else None
    expected, bound = None, 5e-2 if options.precision == "bf16" else 5e-3
    for work in works.values():
        if device.type == "cpu" or isinstance(work, PlainLoop):
            work()
        losses = work.losses.to("cpu", torch.float32)
        expected = losses if expected is None else expected
        torch.testing.assert_close(losses, expected, rtol=bound, atol=bound)
    if options.profile and device.type == "cpu":
        profiles = {runner: operators(works[runner]) for runner in ("plain loop", "as chosen")}
        if options.pairs == 0:
            return {"model": name, "one thread": profiles}
    for work in works.values():
        work()
    times: dict[str, list[float]] = {runner: [] for runner in works}
    for _ in range(options.pairs):
        for runner, work in works.items():
            times[runner].append(seconds(work, device))
    row: dict[str, Any] = {"model": name, "chosen": chosen}
    if options.profile and device.type == "cuda":
        print_kernels(works["as chosen"])
    if options.profile and device.type == "cpu":
        row["one thread"] = profiles
    for runner, own in times.items():
        ratios = [loop / mine for loop, mine in zip(times["plain loop"], own, strict=True)]
        quarters = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
        row[runner] = {
            "ms": statistics.median(own) * 1e3,
            "faster than the loop": [round(each, 3) for each in quarters],
        }
        found = row[runner]["faster than the loop"]
        print(
            f"{name:12s} {runner:12s} {row[runner]['ms']:9.3f} ms   {found[1]:6.2f} ({found[0]} to {found[2]})",
            flush=True,
        )
    return row


def print_kernels(work: Steps) -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        work()
        torch.cuda.synchronize()
    for each in sorted(profile.key_averages(), key=lambda each: -each.device_time_total)[:16]:
        print(f"    {each.device_time_total:9.1f} us {each.count:5d} times  {each.key[:90]}")


def operators(work: PlainLoop | Steps) -> dict[str, Any]:
    """A step on one thread, which is all that a profiler follows: its CPU time, and its operators' own times, in ms.
    Each is the shortest of several steps, because of other jobs."""
    spent, times = [], dict[str, float]()
    with torch_threads(1):
        work()
        for _ in range(PROFILED):
            began = time.process_time()
            work()
            spent.append(time.process_time() - began)
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
                work()
            for each in profile.key_averages():
                own = round(each.self_cpu_time_total / 1e3, 2)
                times[each.key] = min(own, times.get(each.key, own))
    largest = dict(sorted(times.items(), key=lambda each: -each[1])[:12])
    print(f"    one thread {min(spent) * 1e3:.1f} CPU ms: {largest}", flush=True)
    return {"cpu_ms": min(spent) * 1e3, "operators_ms": largest, "sum_of_operators_ms": round(sum(times.values()), 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="vgg8,vgg11,resnet,gru,transformer")
    parser.add_argument("--runners", default="as chosen")
    parser.add_argument("--clients", type=int, default=20)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--pairs", type=int, default=5, help="0: the profile of a CPU alone")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--precision", choices=["default", "bf16"], default="default")
    parser.add_argument("--profile", action="store_true", help="a step's kernels, or its operators on a CPU thread")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    device = torch.device(options.device)
    where = torch.cuda.get_device_name() if device.type == "cuda" else f"{torch.get_num_threads()} CPU threads"
    print(f"{where}, {options.clients} clients, batch {options.batch}, {options.precision} precision")
    copies = copy_speed(device)
    rates = {"float32": matrix_rate(device, False), "tf32": matrix_rate(device, True)}
    if device.type == "cuda":
        rates["bf16"] = matrix_rate(device, True, torch.bfloat16)
    rows = []
    for name in options.models.split(","):
        try:
            row = measure(options, name, options.runners.split(","))
        except Exception as error:  # the others are measured nevertheless
            print(f"FAILED {name}: {type(error).__name__}: {str(error)[:800]}", flush=True)
            continue
        row["floors"] = floors(options, name, copies, rates)
        print(f"{name:12s} floors: {row['floors']}", flush=True)
        rows.append(row)
    if options.json:
        given = {key: value for key, value in vars(options).items() if key != "json"}
        keep({"options": given, "where": where, "rows": rows}, options.json)


if __name__ == "__main__":
    main()
