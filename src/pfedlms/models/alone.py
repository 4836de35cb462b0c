"""One client after another, each with the module itself; on a GPU on several streams, so that small kernels overlap."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from pfedlms.models.streams import streams
from pfedlms.models.way import Pass, Result, Single, Way

_STREAMS = 8


class Alone(Way):
    """Both passes of one client together: what it needs stays in the cache, or on its stream.

    On a CPU clients are not spread over threads, although that takes 0.6 of the time (`vgg8`, two cores): a convolution
    sums in another order on one thread than on two, so results would depend on how clients are grouped, and dropout
    draws for one client after another.
    """

    def __init__(self, single: Single, device: torch.device) -> None:
        self._single, self._device = single, device

    def over(self, clients: int, work: Callable[[slice], Result]) -> list[Result]:
        rows = [slice(client, client + 1) for client in range(clients)]
        if self._device.type != "cuda" or clients == 1:
            return [work(row) for row in rows]
        here, others = torch.cuda.current_stream(self._device), streams(self._device, "alone", min(clients, _STREAMS))
        results = []
        for client, row in enumerate(rows):
            stream = others[client % len(others)]
            stream.wait_stream(here)
            with torch.cuda.stream(stream):
                results.append(work(row))
        for stream in others:
            here.wait_stream(stream)
        return results

    def forward(self, given: Pass) -> tuple[Tensor, Tensor | None]:
        self._single.module.train(given.training)
        params, buffers = ({n: v.squeeze(0) for n, v in values.items()} for values in (given.params, given.buffers))
        outputs, *seen = self._single.call(given.features, params, buffers, given.x.squeeze(0))
        return outputs.unsqueeze(0), seen[0].unsqueeze(0) if given.features else None
