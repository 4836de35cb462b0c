"""Local steps recorded once as a CUDA graph and replayed every round: no Python and no launch gaps inside a round."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pfedlms.cohort import Cohort
from pfedlms.methods.contract import Objective

TakeSteps = Callable[[Cohort, Tensor, Objective], tuple[Cohort, Tensor]]
"""E local steps: a cohort, a plan `[steps, parts, clients, batch]` and an objective give the trained cohort and its
losses."""


@dataclass
class _Recording:
    graph: torch.cuda.CUDAGraph
    cohort: Cohort
    plan: Tensor
    objective: Objective
    trained: Cohort
    losses: Tensor


class Replayed:
    """Wraps `steps` so that each kind of objective is recorded on first use and replayed after that.

    Inputs are copied into the tensors the recording reads, results out of those it writes; so callers see ordinary
    values.
    """

    def __init__(self, steps: TakeSteps) -> None:
        self._steps = steps
        self._recordings: dict[tuple[object, ...], _Recording] = {}

    def __call__(self, cohort: Cohort, plan: Tensor, objective: Objective) -> tuple[Cohort, Tensor]:
        # Recordings read copies of their inputs, so one serves every cohort of the same size.
        key = (len(cohort.ids), objective.kind)
        recording = self._recordings.get(key)
        if recording is None:
            recording = self._recordings[key] = self._record(cohort, plan, objective)
        else:
            _copy(recording.cohort, cohort)
            recording.plan.copy_(plan)
            own = recording.objective.tensors()
            for name, value in objective.tensors().items():
                own[name].copy_(value)
        recording.graph.replay()
        trained = recording.trained
        buffers = {name: value.clone() for name, value in trained.buffers.items()}
        result = replace(cohort, params=trained.params.clone(), momentum=trained.momentum.clone(), buffers=buffers)
        return result, recording.losses.clone()

    def _record(self, cohort: Cohort, plan: Tensor, objective: Objective) -> _Recording:
        still = replace(
            cohort,
            params=cohort.params.clone(),
            momentum=cohort.momentum.clone(),
            buffers={name: value.clone() for name, value in cohort.buffers.items()},
        )
        plan = plan.clone()
        # Libraries choose algorithms and allocate workspaces on first use, which may not happen while recording.
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self._steps(still, plan[:2], objective)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        # An older recording that is collected while this one is made would end both.
        gc.collect()
        gc.disable()
        try:
            with torch.cuda.graph(graph):
                trained, losses = self._steps(still, plan, objective)
        finally:
            gc.enable()
        return _Recording(graph, still, plan, objective, trained, losses)


def _copy(target: Cohort, source: Cohort) -> None:
    target.params.copy_(source.params)
    target.momentum.copy_(source.momentum)
    for name, value in source.buffers.items():
        target.buffers[name].copy_(value)
