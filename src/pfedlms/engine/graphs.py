"""Local steps recorded once as a CUDA graph and replayed every round: no Python and no launch gaps inside a round.

A recording is one computation on its own tensors. Before a replay the new values are copied into them: the cohort, the
plan, a learning rate that changes, and every tensor of the objective, found by visiting all its attributes. If anything
else differs (a number, a type, a shape, a function), it is another computation with its own recording.
"""

from __future__ import annotations

import gc
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pfedlms.backend import streams
from pfedlms.cohort import Cohort, joined
from pfedlms.engine.criterion import attributes, changed, filled_up
from pfedlms.methods.contract import Objective, PerClient
from pfedlms.step import Rate

TakeSteps = Callable[[Cohort, Tensor, Objective, Rate], tuple[Cohort, Tensor]]
"""E local steps: a cohort, a plan `[steps, parts, clients, batch]`, an objective and a learning rate give the trained
cohort and its losses."""

_MOST_RECORDINGS = 16  # of one size of cohorts: beyond, objectives differ every time and recording them is no use


def flat(value: Any, tensors: list[Tensor]) -> object:
    """A key of `value` without the entries of its tensors, which are appended to `tensors`. Keys are equal if the same
    recording fits. An object's key has its attributes; an object without readable ones equals only itself."""
    if isinstance(value, Tensor):
        tensors.append(value)
        return (Tensor, value.shape, value.dtype, value.device)
    if isinstance(value, np.ndarray):  # its entries are part of the computation
        return (np.ndarray, value.dtype.str, value.shape, value.tobytes())
    if isinstance(value, list | tuple):
        return (type(value), *(flat(entry, tensors) for entry in value))
    if isinstance(value, dict):
        return (dict, *((key, flat(entry, tensors)) for key, entry in value.items()))
    if value is None or isinstance(value, bool | int | float | str | bytes | torch.dtype | torch.device):
        return (type(value), value)
    if (own := attributes(value)) is not None:
        return (type(value), *((name, flat(entry, tensors)) for name, entry in own.items()))
    return ("only", id(value))  # the recording holds the object, so no other can get this number


def rebuilt(value: Any, tensors: Iterator[Tensor]) -> Any:
    """A copy of `value` with its tensors taken from `tensors` in the order of `flat`, and without cached values of
    objects."""

    def taken(leaf: Tensor | PerClient, path: str) -> Tensor | PerClient:
        return PerClient(next(tensors)) if isinstance(leaf, PerClient) else next(tensors)

    return changed(value, taken, fresh=True)


@dataclass
class _Recording:
    graph: torch.cuda.CUDAGraph
    cohort: Cohort
    plan: Tensor
    tensors: list[Tensor]
    """Of the objective and the learning rate, in the order of `flat`."""
    trained: Cohort
    losses: Tensor
    holds: tuple[Objective, Rate]
    """The objective and rate it was recorded with, kept alive because the key refers to them."""


class Replayed:
    """Takes steps; each computation is recorded on first use and replayed after that.

    Inputs are copied into the recording's tensors and results out of them, so callers see ordinary values. A smaller
    cohort (because answers were lost) is padded with copies of its last client to the nearest of largest, largest / 2,
    largest / 4, …, so that few sizes are recorded; the objective's `PerClient` tensors are padded, too.
    """

    def __init__(self, largest: int) -> None:
        self._largest = largest
        self._recordings: dict[object, _Recording] = {}
        self._count: Counter[tuple[str, int]] = Counter()

    def __call__(
        self, steps: TakeSteps, cohort: Cohort, plan: Tensor, objective: Objective, rate: Rate
    ) -> tuple[Cohort, Tensor]:
        clients, size = len(cohort.ids), self._size(len(cohort.ids))
        objective_in = filled_up(objective, size) if size > clients else objective
        tensors: list[Tensor] = []
        kind = steps.__name__, size
        key = (kind, len(plan), plan.shape[3], flat((objective_in, rate), tensors))
        recording = self._recordings.get(key)
        if recording is None and self._count[kind] >= _MOST_RECORDINGS:
            warnings.warn(
                f"local steps: {type(objective).__name__} is another computation in every round (fields that are no "
                "tensors differ), so its steps are not recorded and take longer; keep what changes in tensors",
                stacklevel=2,
            )
            return steps(cohort, plan, objective, rate)
        given = replace(cohort, state={}, scratch={}, heard={})  # steps know nothing of the method's state
        if size > clients:
            last = given.rows(slice(clients - 1, clients))
            given = joined([given, *[last] * (size - clients)])
            plan = torch.cat([plan, plan[:, :, -1:].expand(-1, -1, size - clients, -1)], dim=2)
        if recording is None:
            self._count[kind] += 1
            recording = self._recordings[key] = _record(steps, given, plan, (objective_in, rate), tensors)
        else:
            recording.cohort.each(Tensor.copy_, given)
            recording.plan.copy_(plan)
            for own, value in zip(recording.tensors, tensors, strict=True):
                own.copy_(value)
        recording.graph.replay()
        trained = recording.trained.each(lambda value: value[:clients].clone())
        after = replace(cohort, params=trained.params, momentum=trained.momentum, buffers=trained.buffers)
        return after, recording.losses[:clients].clone()

    def _size(self, clients: int) -> int:
        """The size at which `clients` are recorded."""
        size = max(self._largest, clients)
        while size // 2 >= clients:
            size //= 2
        return size


def _record(
    steps: TakeSteps, cohort: Cohort, plan: Tensor, given: tuple[Objective, Rate], tensors: list[Tensor]
) -> _Recording:
    still = cohort.each(torch.clone)
    plan, own = plan.clone(), [value.clone() for value in tensors]
    # Libraries choose algorithms and allocate workspaces on first use, which may not happen while recording. The
    # recording gets an objective without what this one may have computed and kept: it must be computed inside.
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        steps(still, plan[:2], *rebuilt(given, iter(own)))
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    # An older recording that is collected while this one is made would end both.
    gc.disable()
    try:
        with _capture(graph, plan.device):
            trained, losses = steps(still, plan, *rebuilt(given, iter(own)))
    finally:
        gc.enable()
    return _Recording(graph, still, plan, own, trained, losses, given)


@contextmanager
def _capture(graph: torch.cuda.CUDAGraph, device: torch.device) -> Iterator[None]:
    """`torch.cuda.graph`, which first frees all cached memory of GPU and host, so that it must be allocated again. That
    is left out while most of the GPU's memory is free."""
    free, total = torch.cuda.mem_get_info(device)
    if 2 * free < total:
        with torch.cuda.graph(graph):
            yield
        return
    (stream,) = streams(device, "record", 1)
    torch.cuda.synchronize(device)
    with torch.cuda.stream(stream):
        graph.capture_begin()
        try:
            yield
        finally:
            graph.capture_end()
