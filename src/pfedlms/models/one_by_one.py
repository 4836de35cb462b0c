"""Each client runs the module itself: on a CPU several clients at a time, one thread per client; on a GPU on several
streams, so that small kernels overlap."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable

import torch
from torch import Tensor, nn

from pfedlms.backend import for_each_in_threads, one_thread_per_operator, streams
from pfedlms.models.pool_cpu import with_own_pooling
from pfedlms.models.runner import Pass, Result, Runner, Single, hooks_backward, hooks_forward

_STREAMS = 8


class OneByOne(Runner):
    """Both passes of one client together: its data stay in the cache, or on its stream.

    On a CPU every client always uses one thread: a convolution sums in another order on one thread than on two, so that
    results would depend on how clients are grouped. A module serves one thread at a time, so each has a copy. Modules
    that draw random numbers, count their calls, or have hooks run one client after another, on all threads: their order
    matters. A trial on two samples of `sample: [batch, …]` shows which these are.
    """

    def __init__(self, single: Single, device: torch.device, sample: Tensor) -> None:
        self._single, self._device = single, device
        self._spreads = device.type != "cuda" and not _order_matters(single.module, sample[[0, -1]])
        self._thread = threading.local()

    def parts(self, clients: int) -> list[slice]:
        """A client takes all its steps, then the next one: its model and its samples stay in the cache."""
        if not self._spreads:
            return super().parts(clients)
        return [slice(client, client + 1) for client in range(clients)]

    def has_short_operators(self, clients: int) -> bool:
        return self._spreads

    def run_all(self, clients: int, work: Callable[[slice], Result]) -> list[Result]:
        rows = [slice(client, client + 1) for client in range(clients)]
        if self._device.type == "cuda" and clients > 1:
            return self._on_streams(rows, work)
        if not self._spreads:
            return [work(row) for row in rows]
        results: dict[int, Result] = {}
        differentiates = torch.is_grad_enabled()  # a setting of each thread

        def one(row: slice) -> None:
            with torch.set_grad_enabled(differentiates):
                results[row.start] = work(row)

        with one_thread_per_operator():
            for_each_in_threads(one, rows)
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

    def forward(self, given: Pass) -> tuple[Tensor, Tensor | None]:
        single = self._of_thread() if self._spreads else self._single
        single.module.train(given.training)
        params, buffers = ({n: v.squeeze(0) for n, v in values.items()} for values in (given.params, given.buffers))
        outputs, *seen = single.call(given.features, params, buffers, given.x.squeeze(0))
        return outputs.unsqueeze(0), seen[0].unsqueeze(0) if given.features else None

    def _of_thread(self) -> Single:
        if not hasattr(self._thread, "single"):
            self._thread.single = Single(with_own_pooling(copy.deepcopy(self._single.module)))
        own: Single = self._thread.single
        return own


def _order_matters(module: nn.Module, x: Tensor) -> bool:
    if any(hooks_forward(part) or hooks_backward(part) for part in module.modules()):
        return True
    try:
        tried = copy.deepcopy(module).train()
        before = _counts(tried)
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            drawn = torch.random.get_rng_state()
            tried(x)
            return not torch.equal(drawn, torch.random.get_rng_state()) or before != _counts(tried)
    except Exception:  # a module that cannot be copied, or not be run on two samples, is left as it is
        return True


def _counts(module: nn.Module) -> list[tuple[str, object]]:
    """Numbers and texts that parts of a module keep."""
    kept = ((name, value) for part in module.modules() for name, value in vars(part).items())
    return [(name, value) for name, value in kept if isinstance(value, bool | int | float | str)]
