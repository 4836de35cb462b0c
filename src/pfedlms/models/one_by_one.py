"""Runs the module itself for each client: on a CPU several clients at a time, each on one thread; on a GPU on several
streams, so that small kernels overlap."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable

import torch
from torch import Tensor, nn

from pfedlms import rng
from pfedlms.backend import for_each_in_threads, one_thread_per_operator, streams
from pfedlms.models.pool_cpu import replace_poolings
from pfedlms.models.runner import FunctionalModule, Pass, Result, Runner, hooks_backward, hooks_forward

_STREAMS = 8


class OneByOne(Runner):
    """Takes both passes of one client together, so that its data stay in the cache, or on its stream.

    On a CPU every client uses one thread, because a convolution sums in another order on one thread than on two, and
    results would depend on how clients are grouped. A module serves one thread at a time, so each thread has a copy.
    For modules that draw random numbers, count their calls or have hooks, the order
    of clients matters: they run one client after another, on all threads. A trial on two samples of `sample: [batch,
    …]` finds these modules."""

    def __init__(self, functional: FunctionalModule, device: torch.device, sample: Tensor) -> None:
        self._functional, self._device = functional, device
        self._runs_in_parallel = device.type != "cuda" and not _order_matters(functional.module, sample[[0, -1]])
        self._thread = threading.local()

    def parts(self, clients: int) -> list[slice]:
        """One client each: it takes all its steps before the next one, so its model and samples stay in the cache."""
        if not self._runs_in_parallel:
            return super().parts(clients)
        return [slice(client, client + 1) for client in range(clients)]

    def has_short_operators(self, clients: int) -> bool:
        return self._runs_in_parallel

    def run_all(self, clients: int, work: Callable[[slice], Result]) -> list[Result]:
        rows = [slice(client, client + 1) for client in range(clients)]
        if self._device.type == "cuda" and clients > 1:
            return self._on_streams(rows, work)
        if not self._runs_in_parallel:
            return [work(row) for row in rows]
        results: dict[int, Result] = {}
        with_gradient = torch.is_grad_enabled()  # each thread has this setting of its own

        def run_client(row: slice) -> None:
            with torch.set_grad_enabled(with_gradient):
                results[row.start] = work(row)

        with one_thread_per_operator():
            for_each_in_threads(run_client, rows)
        return [results[row.start] for row in rows]

    def _on_streams(self, rows: list[slice], work: Callable[[slice], Result]) -> list[Result]:
        current = torch.cuda.current_stream(self._device)
        others = streams(self._device, "one by one", min(len(rows), _STREAMS))
        results = []
        for client, row in enumerate(rows):
            stream = others[client % len(others)]
            stream.wait_stream(current)
            with torch.cuda.stream(stream):
                results.append(work(row))
        for stream in others:
            current.wait_stream(stream)
        return results

    def forward(self, inputs: Pass) -> tuple[Tensor, Tensor | None]:
        functional = self._copy_of_this_thread() if self._runs_in_parallel else self._functional
        functional.module.train(inputs.training)
        params, buffers = ({n: v.squeeze(0) for n, v in values.items()} for values in (inputs.params, inputs.buffers))
        assigned, outputs, *seen = functional.call(inputs.features, params, buffers, inputs.x.squeeze(0))
        inputs.buffers.update({name: value.unsqueeze(0) for name, value in assigned.items()})
        return outputs.unsqueeze(0), seen[0].unsqueeze(0) if inputs.features else None

    def _copy_of_this_thread(self) -> FunctionalModule:
        if not hasattr(self._thread, "functional"):
            self._thread.functional = FunctionalModule(replace_poolings(copy.deepcopy(self._functional.module)))
        functional: FunctionalModule = self._thread.functional
        return functional


def _order_matters(module: nn.Module, x: Tensor) -> bool:
    """Whether a module has hooks, draws random numbers or counts its calls, in training or in evaluation."""
    if any(hooks_forward(part) or hooks_backward(part) for part in module.modules()):
        return True
    try:
        tried = copy.deepcopy(module)
        with torch.no_grad(), rng.forked_generators(x.device):
            drawn = rng.generators_state()
            for training in (True, False):
                before = _plain_attributes(tried.train(training))
                tried(x)
                if before != _plain_attributes(tried):
                    return True
            return drawn != rng.generators_state()
    except Exception:  # a module that cannot be copied, or cannot run on two samples, may do any of it
        return True


def _plain_attributes(module: nn.Module) -> list[tuple[str, object]]:
    """The numbers and texts among the attributes of a module's parts."""
    attributes = ((name, value) for part in module.modules() for name, value in vars(part).items())
    return [(name, value) for name, value in attributes if isinstance(value, bool | int | float | str)]
