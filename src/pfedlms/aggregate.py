"""What a server makes of its clients' messages: sums, votes and pooled statistics.

Each is a fold over the clients in the order of their ids, so it does not matter how they were grouped.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numba import prange
from numpy.typing import NDArray
from torch import Tensor

from pfedlms.backend import compiled

_PART = 2048  # coordinates whose counters stay in the cache while clients are added to them
_WORTH_SHARING = 1 << 22  # symbols or counters; waking threads costs more than counting fewer
_SUM_PART = 4096  # entries of a sum that stay in the cache while clients are added to them


def weighted_sum(samples: Sequence[int], values: Tensor, start: Tensor) -> Tensor:
    """start + Σ N_k x_k over the leading axis, in float64, one client after another, so that it does not matter how
    clients were grouped."""
    total = start.clone()
    _add_weighted(total.numpy(), values.contiguous().view(len(values), -1).numpy(), np.array(samples, dtype=np.float64))
    return total


@compiled(parallel=True)
def _add_weighted(total: NDArray[Any], values: NDArray[Any], weights: NDArray[Any]) -> None:
    flat, columns = total.reshape(-1), values.shape[1]
    for part in prange((columns + _SUM_PART - 1) // _SUM_PART):
        start, stop = part * _SUM_PART, min((part + 1) * _SUM_PART, columns)
        for client in range(len(values)):
            sums, own = flat[start:stop], values[client, start:stop]
            for i in range(len(own)):
                sums[i] += np.float64(own[i]) * weights[client]


def pool_statistics(
    samples: Sequence[int], means: NDArray[np.float32], variances: NDArray[np.float32]
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Mean and standard deviation of all clients' sketches together: `[clients, layers]` → two `[layers]`.

        μ̄ = (Σ N_k m_k) / N          σ̄² = (Σ N_k (s_k + (m_k − μ̄)²)) / N

    Sums run over the clients in the order given (ascending ids), one after another, in float64; results are rounded to
    float32.
    """
    m, s = means.astype(np.float64), variances.astype(np.float64)
    mean, square = np.zeros(m.shape[1]), np.zeros(m.shape[1])
    for weight, own in zip(samples, m, strict=True):
        mean += weight * own
    mean /= sum(samples)
    for weight, own, variance in zip(samples, m, s, strict=True):
        square += weight * (variance + (own - mean) ** 2)
    return mean.astype(np.float32), np.sqrt(square / sum(samples)).astype(np.float32)


class Vote:
    """A weighted majority vote at every threshold, one client at a time.

        v_t(i) = sign(Σ_k N_k b_t^k(i)),   sign(0) = +1;     q̃(i) = #{t : v_t(i) = +1}

    which is the bin of the upper weighted median of the clients' values. A ballot adds N_k to one counter per
    coordinate (the weight that chose each symbol); the T sums are suffix sums of those. Memory is T counters a
    coordinate, in the narrowest integers that hold N, whatever the number of clients.
    """

    def __init__(self, size: int, thresholds: int) -> None:
        self.total = 0
        self._counts: NDArray[np.unsignedinteger] = np.zeros((size, thresholds), dtype=np.uint8)

    def add(self, symbols: NDArray[np.uint8], weights: int | Sequence[int]) -> None:
        """Count one client's symbols `[size]` with weight N_k, or several clients' `[clients, size]` with theirs."""
        rows = np.ascontiguousarray(np.atleast_2d(symbols))
        own = [weights] if isinstance(weights, int) else weights
        size, thresholds = self._counts.shape
        if rows.shape != (len(own), size) or (rows.size and rows.max() > thresholds):
            raise ValueError(f"vote: got {symbols.shape} symbols, expected ({size},) of 0 to {thresholds} a client")
        self.total += sum(own)
        needed = np.min_scalar_type(self.total)
        if needed.itemsize > self._counts.dtype.itemsize:
            self._counts = self._counts.astype(needed)
        count = _count_shared if rows.size > _WORTH_SHARING else _count
        count(self._counts, rows, np.array(own, dtype=self._counts.dtype))

    def result(self) -> NDArray[np.uint8]:
        """Consensus symbols `[size]`."""
        result = np.zeros(len(self._counts), dtype=np.uint8)
        decide = _majority_shared if self._counts.size > _WORTH_SHARING else _majority
        decide(self._counts, np.uint64(self.total), result)
        return result

    @property
    def nbytes(self) -> int:
        return self._counts.nbytes


@compiled()
def _count_part(counts: NDArray[Any], symbols: NDArray[Any], weights: NDArray[Any], start: int) -> None:
    own = counts[start : start + _PART]
    for client in range(len(symbols)):
        chosen, weight = symbols[client, start : start + _PART], weights[client]
        for i in range(len(chosen)):
            if chosen[i] > 0:
                own[i, chosen[i] - 1] += weight


@compiled()
def _majority_part(counts: NDArray[Any], total: Any, result: NDArray[Any], start: int) -> None:
    for i in range(start, min(start + _PART, len(counts))):
        above, chosen = np.uint64(0), 0
        for t in range(counts.shape[1] - 1, -1, -1):
            above += np.uint64(counts[i, t])
            # Σ N_k b_t ≥ 0 means that those at or above the threshold weigh at least as much as those below; no
            # doubling, so no overflow.
            chosen += above >= total - above
        result[i] = chosen


@compiled()
def _count(counts: NDArray[Any], symbols: NDArray[Any], weights: NDArray[Any]) -> None:
    for start in range(0, len(counts), _PART):
        _count_part(counts, symbols, weights, start)


@compiled(parallel=True)
def _count_shared(counts: NDArray[Any], symbols: NDArray[Any], weights: NDArray[Any]) -> None:
    for part in prange((len(counts) + _PART - 1) // _PART):
        _count_part(counts, symbols, weights, part * _PART)


@compiled()
def _majority(counts: NDArray[Any], total: Any, result: NDArray[Any]) -> None:
    for start in range(0, len(counts), _PART):
        _majority_part(counts, total, result, start)


@compiled(parallel=True)
def _majority_shared(counts: NDArray[Any], total: Any, result: NDArray[Any]) -> None:
    for part in prange((len(counts) + _PART - 1) // _PART):
        _majority_part(counts, total, result, part * _PART)


class WeightedMean:
    """Σ N_k x_k / Σ N_k for vectors of `size` entries, added up as in `weighted_sum`."""

    def __init__(self, size: int) -> None:
        self._sum, self._weight = torch.zeros(size, dtype=torch.float64), 0

    def add(self, samples: Sequence[int], values: Tensor) -> WeightedMean:
        """Add some clients' vectors `[clients, size]`."""
        self._sum = weighted_sum(samples, values, self._sum)
        self._weight += sum(samples)
        return self

    def result(self) -> Tensor:
        """In float64."""
        return self._sum / self._weight
