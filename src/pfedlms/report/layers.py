"""Layers of models whose clients vote on intervals: the distributions of weights and sketches, the thresholds, and the
symbols that are sent."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from pfedlms.cohort import Cohort
from pfedlms.methods.consensus import AgreeOnThresholds
from pfedlms.methods.contract import ClientWork

BINS = 48
_REACH = 4.0  # histograms go from μ − 4 σ to μ + 4 σ
_AT_ONCE = 8  # clients; a large model is not held twice for all of them
_NO_WORK = cast(ClientWork, None)  # these exchanges compute nothing on a client's data


@dataclass(frozen=True)
class Histogram:
    """Shares of values `[BINS]` between `edges: [BINS + 1]`; what lies beyond is in the outermost."""

    edges: NDArray[np.float64]
    shares: NDArray[np.float64]


@dataclass(frozen=True)
class LayerView:
    """One layer of all clients that trained last, as they would send it in the next round."""

    name: str
    size: int
    sketched: int
    """m, entries of its sketch."""
    weights: Histogram
    sketch: Histogram
    thresholds: list[float]
    symbols: list[float]
    """The share of each, 0 to T."""


def views(method: Any, cohort: Cohort, round: int) -> list[LayerView]:
    """The layers of a cohort whose `method` votes on intervals, as it would send them in that round."""
    agree, vote = method.exchanges
    assert isinstance(agree, AgreeOnThresholds)
    layout, sizes = method.sketched
    spans = [slice(layer.offset, layer.offset + layer.size) for layer in layout.layers]
    ends = np.cumsum((0, *sizes))
    parts = [slice(start, stop) for start, stop in pairwise(ends.tolist())]

    total = agree.server_open({}, round)
    for some in _some(cohort):
        _, sent = agree.client_send(some, round, _NO_WORK)
        total = agree.server_add(total, list(some.ids), list(some.samples), sent)
    answer = agree.server_reply({}, total, round)[1]

    weights = [_Counts(*_moments(cohort.params[:, span].numpy())) for span in spans]
    sketches = [_Counts(*map(float, pair)) for pair in zip(answer["mean"], answer["deviation"], strict=True)]
    thresholds = agree.client_receive(cohort, answer, round).heard["thresholds"].numpy()
    symbols = np.zeros((len(sizes), thresholds.shape[1] + 1), dtype=np.int64)
    for some in _some(cohort):
        own, _ = agree.client_send(some, round, _NO_WORK)
        own = agree.client_receive(own, answer, round)
        chosen = vote.client_send(own, round, _NO_WORK)[1]["symbols"].numpy()
        sketched = own.scratch["sketched"].numpy()
        for layer, (span, part) in enumerate(zip(spans, parts, strict=True)):
            weights[layer].add(some.params[:, span].numpy())
            sketches[layer].add(sketched[:, part])
            symbols[layer] += np.bincount(chosen[:, part].ravel(), minlength=symbols.shape[1])
    return [
        LayerView(
            layer.name,
            layer.size,
            size,
            weights[at].histogram,
            sketches[at].histogram,
            thresholds[at].tolist(),
            (symbols[at] / symbols[at].sum()).tolist(),
        )
        for at, (layer, size) in enumerate(zip(layout.layers, sizes, strict=True))
    ]


def _some(cohort: Cohort) -> Iterator[Cohort]:
    for start in range(0, len(cohort.ids), _AT_ONCE):
        yield cohort.rows(slice(start, start + _AT_ONCE))


def _moments(values: NDArray[np.float32]) -> tuple[float, float]:
    return float(values.mean(dtype=np.float64)), float(values.std(dtype=np.float64))


class _Counts:
    """A histogram around a mean, filled some values at a time."""

    def __init__(self, mean: float, deviation: float) -> None:
        reach = _REACH * deviation or 1.0  # a layer of equal values has a place, too
        self._edges = np.linspace(mean - reach, mean + reach, BINS + 1)
        self._counts = np.zeros(BINS, dtype=np.int64)

    def add(self, values: NDArray[np.float32]) -> None:
        within = np.clip(values.astype(np.float64), self._edges[0], self._edges[-1])
        self._counts += np.histogram(within, self._edges)[0]

    @property
    def histogram(self) -> Histogram:
        return Histogram(self._edges, self._counts / self._counts.sum())
