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
from pfedlms.models.intake import outputs_of
from pfedlms.models.pool_cpu import replace_poolings
from pfedlms.models.runner import FunctionalModule, Pass, Result, Runner, hooks_backward, hooks_forward

_STREAMS = 8


class OneByOne(Runner):
    """Takes both passes of one client together, so that its data stay in the cache, or on its stream.

    On a CPU every client uses one thread, because a convolution sums in another order on one thread than on two, and
    results would depend on how clients are grouped. A module serves one thread at a time, so each thread has a copy.
    For modules that draw random numbers, count their calls, leave a tensor to their next call or have hooks, the order
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
    """Whether a module has hooks, draws random numbers, counts its calls or leaves a tensor to its next call."""
    if any(hooks_forward(part) or hooks_backward(part) for part in module.modules()) or tensor_left(module, x):
        return True
    try:
        tried = copy.deepcopy(module).train()
        before = _plain_attributes(tried)
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            drawn = torch.random.get_rng_state()
            tried(x)
            return not torch.equal(drawn, torch.random.get_rng_state()) or before != _plain_attributes(tried)
    except Exception:  # a module that cannot be copied, or cannot run on two samples, may do any of it
        return True


def tensor_left(module: nn.Module, x: Tensor) -> str | None:
    """The attribute in which a call leaves a tensor that the next call reads; None if there is none. A trial of copies
    on `x: [batch, …]` shows this: the next call gives something else if the tensor is spoilt."""
    try:
        tried = copy.deepcopy(module).train()
        before = {name: (value, value._version) for name, value in _tensor_attributes(tried).items()}
        _outputs(tried, x)
        after = _tensor_attributes(tried)
        expected = _outputs(copy.deepcopy(tried), x)
    except Exception:  # a module that cannot be copied, or cannot run on two samples, shows nothing
        return None
    left = [n for n, v in after.items() if n not in before or before[n][0] is not v or before[n][1] != v._version]
    return next((name for name in left if not _gives(expected, copy.deepcopy(tried), name, x)), None)


def _gives(expected: Tensor, module: nn.Module, spoilt: str, x: Tensor) -> bool:
    """Whether a module still gives what is expected if its attribute `spoilt` is changed."""
    owner, _, name = spoilt.rpartition(".")
    part = module.get_submodule(owner)
    value = getattr(part, name)
    setattr(part, name, value + (torch.nan if value.is_floating_point() else 77))
    try:
        return torch.equal(_outputs(module, x), expected)
    except Exception:  # it may refuse such a value
        return False


def _outputs(module: nn.Module, x: Tensor) -> Tensor:
    """The outputs for `x` without a gradient; every call draws the same random numbers."""
    with torch.no_grad(), rng.forked_generators(x.device):
        return outputs_of(module(x.clone()))


def _tensor_attributes(module: nn.Module) -> dict[str, Tensor]:
    """The tensors among the attributes of a module's parts that are neither parameters nor buffers."""
    attributes = (
        (f"{owner}.{name}".lstrip("."), v) for owner, part in module.named_modules() for name, v in vars(part).items()
    )
    return {name: value for name, value in attributes if isinstance(value, Tensor)}


def _plain_attributes(module: nn.Module) -> list[tuple[str, object]]:
    """The numbers and texts among the attributes of a module's parts."""
    attributes = ((name, value) for part in module.modules() for name, value in vars(part).items())
    return [(name, value) for name, value in attributes if isinstance(value, bool | int | float | str)]
