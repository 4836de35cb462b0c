"""Training compiled by `torch.compile` instead of run by the rules of `stacked`: on a GPU, with other rounding."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap

from pfedlms.models.runner import Pass, Runner, Single


class Compiled(Runner):
    """The vmapped call, compiled for training steps; `fallback` runs evaluations and features."""

    def __init__(self, single: Single, fallback: Runner) -> None:
        self._module, self._fallback = single.module, fallback
        self._call: Any = torch.compile(vmap(partial(single.call, False), randomness="different"), dynamic=False)

    def forward(self, given: Pass) -> tuple[Tensor, Tensor | None]:
        if not given.training or given.features:
            return self._fallback.forward(given)
        self._module.train()
        (outputs,) = self._call(given.params, given.buffers, given.x)
        return outputs, None
