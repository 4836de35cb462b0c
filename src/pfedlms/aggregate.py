"""How a server aggregates its clients' messages: sums, votes and pooled statistics.

Each is a fold over the clients in the order of their ids, so the result does not depend on how they were grouped. All
take arrays of NumPy and tensors of torch. Votes and medians return arrays, `WeightedMean` a tensor, and
`pool_statistics` the kind that it was given.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pfedlms.backend import compiled, row_memory, run_kernel, to_host
from pfedlms.checks import (
    Array,
    Values,
    Weights,
    as_array,
    as_tensor,
    check_floats,
    check_integer,
    check_number,
    check_weights,
)

_PART = 2048  # coordinates whose counters stay in the cache while clients are added to them
_SUM_PART = 4096  # entries of a sum that stay in the cache while clients are added to them
_EXACT_WEIGHT = 1 << 29  # below it, its product with a float32 is a float64
_FEW_ENTRIES = 256  # of a field with one number per layer or so


class WeightedMean:
    """Σ N_k x_k / Σ N_k for vectors of `size` entries, in float64, one client after another. A NaN that is added stays.

    >>> WeightedMean(2).add([1, 3], np.float32([[0, 1], [4, 1]])).result()
    tensor([3., 1.], dtype=torch.float64)
    """

    def __init__(self, size: int) -> None:
        self._sum = torch.zeros(check_integer("size", size, 0), dtype=torch.float64)
        self._weight = self.clients = 0

    def add(self, samples: Weights, values: Tensor | Array) -> WeightedMean:
        """Add some clients' vectors `[clients, size]`, float32 or float64, with their numbers of samples N_k."""
        given = check_floats("values", as_tensor("values", values))
        if given.ndim != 2 or given.shape[1] != len(self._sum):
            raise ValueError(
                f"values: got shape {tuple(given.shape)}, expected [clients, {len(self._sum)}]; pass one client's "
                "vector as values[None]"
            )
        own = check_weights(samples, len(given))
        if given.is_cuda and given.dtype == torch.float32 and max(own) < _EXACT_WEIGHT:
            self._sum = self._sum.to(given.device)
            for weight, row in zip(own, given.detach(), strict=True):
                self._sum.add_(row, alpha=weight)  # a product is exact, so it does not matter whether it is fused
        else:
            self._sum = self._sum.cpu()
            (added, stride), weights = row_memory(given.detach().cpu().numpy()), np.array(own, dtype=np.float64)
            tasks, cost = -(-len(self._sum) // _SUM_PART), len(own) * _SUM_PART
            run_kernel(_add_weighted, tasks, cost, self._sum.numpy(), added, stride, weights)
        self._weight += sum(own)
        self.clients += len(own)
        return self

    def result(self) -> Tensor:
        """`[size]`, in float64, on the host."""
        if not self._weight:
            raise ValueError("mean: got no client's values, expected at least one; call add first")
        # By a tensor: a GPU multiplies by the reciprocal of a number, which is not the same.
        return to_host(self._sum / self._sum.new_full((), float(self._weight)))[0]


@compiled()
def _add_weighted(
    first: int, last: int, total: NDArray[Any], values: NDArray[Any], stride: int, weights: NDArray[Any]
) -> None:
    for start in range(first * _SUM_PART, min(last * _SUM_PART, len(total)), _SUM_PART):
        for client in range(len(weights)):
            sums = total[start : start + _SUM_PART]
            own = values[client * stride + start : client * stride + start + len(sums)]
            for i in range(len(own)):
                sums[i] += np.float64(own[i]) * weights[client]


def limit_weights(samples: Sequence[int] | Array | Tensor, share: float) -> list[int]:
    """Weights of clients when no client may have more than `share` of the total: min(N_k, c), where c is the largest
    whole number with c ≤ share · Σ min(N_j, c).

    A share is the decimal number as written: 0.3 is three tenths. With too few clients (share · clients < 1) all have
    the same weight.

    >>> limit_weights([10, 10, 80], 0.4)  # 13 ≤ 0.4 · 33
    [10, 10, 13]
    >>> limit_weights([10, 80], 0.4)
    [10, 10]
    """
    weights = check_weights(samples, len(samples))
    exact = Fraction(repr(check_number("share", share, 0, 1, "it is the largest part of the total that one may have")))
    if not weights or exact == 1:
        return weights
    low, high = min(weights), max(weights)
    # The right side is concave in c and 0 at 0: it is at least the left side up to some c, and smaller after that. With
    # share · clients < 1 it is always smaller, and c stays the smallest weight.
    while low < high:
        middle = (low + high + 1) // 2
        if middle <= exact * sum(min(own, middle) for own in weights):
            low = middle
        else:
            high = middle - 1
    return [min(own, low) for own in weights]


def pool_statistics(samples: Weights, means: Values, variances: Values, pooling: str = "mean") -> tuple[Values, Values]:
    """Mean and standard deviation of all clients' sketches together: `[clients, layers]` → two `[layers]`.

        mean      μ̄ = (Σ N_k m_k) / N          σ̄² = (Σ N_k (s_k + (m_k − μ̄)²)) / N
        median    μ̄ = median of m_k            σ̄² = median of s_k + (m_k − μ̄)²        weighted by N_k

    Sums run over the clients in the order given (ascending ids), one after another, in float64; results are rounded to
    float32. A client with less than half of the weight can move a median only between the others' values, but a mean
    without limit.

    >>> mean, deviation = pool_statistics([1, 3], np.float32([[0], [4]]), np.float32([[1], [0]]))
    >>> mean.item(), round(deviation.item() ** 2, 5)  # (1 (1 + 9) + 3 (0 + 1)) / 4
    (3.0, 3.25)
    >>> mean, deviation = pool_statistics([1, 3], np.float32([[3e38], [4]]), np.float32([[1], [9]]), "median")
    >>> mean.item(), deviation.item()
    (4.0, 3.0)
    """
    averages = {"mean": _means, "median": _medians}
    if pooling not in averages:
        raise ValueError(f"pooling: got {pooling!r}, expected one of {', '.join(averages)}")
    m, s = as_array("means", means), as_array("variances", variances)
    if m.ndim != 2 or m.shape != s.shape or not m.size:
        raise ValueError(
            f"means, variances: got shapes {m.shape} and {s.shape}, expected [clients, layers] of both, none of them "
            "empty; quantise.statistics gives both"
        )
    weights = check_weights(samples, len(m))
    _check_finite("means", m)
    _check_finite("variances", s, minimum=0)
    average, m, s = averages[pooling], m.astype(np.float64), s.astype(np.float64)
    mean = average(weights, m)
    pooled = mean.astype(np.float32), np.sqrt(average(weights, s + (m - mean) ** 2)).astype(np.float32)
    if isinstance(means, Tensor):
        return torch.from_numpy(pooled[0]).to(means.device), torch.from_numpy(pooled[1]).to(means.device)
    return pooled


def _means(weights: Sequence[int], values: NDArray[np.float64]) -> NDArray[np.float64]:
    return WeightedMean(values.shape[1]).add(weights, values).result().numpy()


def _medians(weights: Sequence[int], values: NDArray[Any]) -> NDArray[Any]:
    column = np.array(weights, dtype=np.uint64)[:, None]
    return _column_medians(np.broadcast_to(column, values.shape), values)


def _column_medians(weights: NDArray[np.uint64], values: NDArray[Any]) -> NDArray[Any]:
    """Of every column the smallest x_j with 2 Σ_{x_k ≤ x_j} N_k ≥ Σ N_k; weights `[clients, columns]`, one above zero
    in each column."""
    order = np.argsort(values, axis=0, kind="stable")
    below = np.cumsum(np.take_along_axis(weights, order, axis=0), axis=0)
    # Compared without doubling, so that nothing overflows.
    first = np.argmax(below >= below[-1] - below, axis=0)
    medians: NDArray[Any] = np.take_along_axis(values, order, axis=0)[first, np.arange(len(first))]
    return medians


def weighted_medians(samples: Weights, values: Array | Tensor) -> NDArray[np.float32]:
    """Of every column of `values: [clients, columns]`, none below zero, the smallest x_j > 0 with 2 Σ_{0 < x_k ≤ x_j}
    N_k ≥ Σ_{0 < x_k} N_k; 0 where all are zero.

    >>> weighted_medians([1, 1, 5], np.float32([[0.5], [2], [0]])).tolist()
    [0.5]
    """
    given = _as_rows(values)
    weights = check_weights(samples, len(given))
    _check_finite("values", given, minimum=0)
    if not len(given):
        return np.zeros(given.shape[1], dtype=np.float32)
    counted = np.where(given > 0, np.array(weights, dtype=np.uint64)[:, None], np.uint64(0))
    return np.where(counted.any(axis=0), _column_medians(counted, given), 0).astype(np.float32)


def _as_rows(values: Array | Tensor) -> Array:
    given = as_array("values", values)
    if given.ndim != 2:
        raise ValueError(
            f"values: got shape {given.shape}, expected [clients, entries]; pass one number each as values[:, None]"
        )
    return given


def outliers(values: Array | Tensor, times: float) -> list[int]:
    """Rows of `values: [clients, entries]` with a number more than `times` as large as the median of all rows, or with
    NaN.

    Few entries (one per layer) are compared each with the same entry of the others, many entries by the largest of a
    row. Zeros do not enter a median; where fewer than three rows have anything else, the median is over all entries.

    >>> outliers(np.float32([[1, 2], [1, 3], [2, 2], [1, 3e38]]), 100)
    [3]
    """
    sizes = np.abs(_as_rows(values).astype(np.float64))
    if sizes.shape[1] > _FEW_ENTRIES:
        sizes = sizes.max(axis=1, keepdims=True)
    known = np.where(sizes > 0, sizes, np.nan)
    counted = (sizes > 0).sum(axis=0)
    overall = np.nanmedian(known) if counted.any() else 0.0
    medians = [np.nanmedian(own) if count >= 3 else overall for own, count in zip(known.T, counted, strict=True)]
    return np.flatnonzero(~(sizes <= times * np.array(medians)).all(axis=1)).tolist()


def _check_finite(name: str, values: Array, minimum: float = -np.inf) -> None:
    """Refuse NaN and infinite values: their medians and sums would look like results."""
    fine = np.isfinite(values) & (values >= minimum)
    if not fine.all():
        place = tuple(np.argwhere(~fine)[0].tolist())
        limit = f" of at least {minimum:g}" if minimum > -np.inf else ""
        raise ValueError(
            f"{name}{list(place)}: got {values[place]}, expected a finite number{limit}; leave that client out"
        )


class _Counters:
    """The weight that chose each of the symbols 1 to T, of every entry; a client has a weight in each layer.

    The T sums of a vote are suffix sums of the counters. Memory is T counters per entry, in the narrowest integers that
    hold the total weight, and does not depend on the number of clients.
    """

    def __init__(self, thresholds: int, sizes: Sequence[int]) -> None:
        self.ends, self.totals = np.cumsum(sizes, dtype=np.int64), [0] * len(sizes)
        self.counts: NDArray[np.unsignedinteger] = np.zeros((thresholds, sum(sizes)), dtype=np.uint8)

    def _add(self, symbols: NDArray[np.uint8], weights: list[list[int]]) -> None:
        """`[clients, size]` and `[clients, layers]`."""
        totals = [total + sum(own[layer] for own in weights) for layer, total in enumerate(self.totals)]
        needed, size = np.min_scalar_type(max(totals, default=0)), self.counts.shape[1]
        if needed.itemsize > self.counts.dtype.itemsize:
            self.counts = self.counts.astype(needed)
        own = np.array(weights, dtype=self.counts.dtype).reshape(len(symbols), len(totals))
        self.totals = totals
        run_kernel(_count, -(-size // _PART), len(symbols) * _PART, self.counts, symbols, own, self.ends)

    def result(self) -> NDArray[np.uint8]:
        """How many thresholds the weighted majority reaches, `[size]`; a tie reaches one, and so does no vote."""
        thresholds, size = self.counts.shape
        result, totals = np.zeros(size, dtype=np.uint8), np.array(self.totals, dtype=np.uint64)
        run_kernel(_majority, -(-size // _PART), thresholds * _PART, self.counts, totals, self.ends, result)
        return result


@compiled()
def _count(
    first: int, last: int, counts: NDArray[Any], symbols: NDArray[Any], weights: NDArray[Any], ends: NDArray[Any]
) -> None:
    """Tasks are `_PART` entries, whichever layers these lie in. One threshold after another: to look at all of them
    takes less time than to jump to the one that counts."""
    begin = 0
    for layer in range(len(ends)):
        end = min(ends[layer], last * _PART)
        for start in range(max(begin, first * _PART), end, _PART):
            stop = min(start + _PART, end)
            for client in range(len(symbols)):
                chosen, weight = symbols[client, start:stop], weights[client, layer]
                for threshold in range(len(counts)):
                    own, symbol = counts[threshold, start:stop], np.uint8(threshold + 1)
                    for i in range(len(chosen)):
                        own[i] += weight * own.dtype.type(chosen[i] == symbol)
        begin = ends[layer]


@compiled()
def _majority(
    first: int, last: int, counts: NDArray[Any], totals: NDArray[Any], ends: NDArray[Any], result: NDArray[Any]
) -> None:
    above = np.empty(_PART, np.uint64)
    begin = 0
    for layer in range(len(ends)):
        end, total = min(ends[layer], last * _PART), totals[layer]
        for start in range(max(begin, first * _PART), end, _PART):
            chosen = result[start : min(start + _PART, end)]
            above[:] = 0
            for threshold in range(len(counts) - 1, -1, -1):
                own = counts[threshold, start : start + len(chosen)]
                for i in range(len(chosen)):
                    above[i] += np.uint64(own[i])
                    # Σ N_k b_t ≥ 0 means that those at or above the threshold weigh at least as much as those below; no
                    # doubling, so no overflow.
                    chosen[i] += np.uint8(above[i] >= total - above[i])
        begin = ends[layer]


class Vote(_Counters):
    """A weighted majority vote at every threshold, one client at a time.

        v_t(i) = sign(Σ_k N_k b_t^k(i)),   sign(0) = +1;     q̃(i) = #{t : v_t(i) = +1}

    which is the bin of the upper weighted median of the clients' values.

    >>> vote = Vote(size=3, thresholds=7)
    >>> vote.add(np.uint8([0, 3, 7]), 20)
    >>> vote.add(np.uint8([[1, 2, 7], [1, 5, 0]]), [15, 10])
    >>> vote
    Vote(size 3, thresholds 7, 3 clients of weight 45)
    >>> vote.result()
    array([1, 3, 7], dtype=uint8)
    """

    def __init__(self, size: int, thresholds: int) -> None:
        size = check_integer("size", size, 0, remedy="it is the number of symbols per client")
        thresholds = check_integer("thresholds", thresholds, 1, 255, "symbols are 0 to thresholds, one byte each")
        super().__init__(thresholds, [size])
        self.clients = 0

    @property
    def total(self) -> int:
        """Σ N_k."""
        return self.totals[0]

    def __repr__(self) -> str:
        thresholds, size = self.counts.shape
        return f"Vote(size {size:,}, thresholds {thresholds}, {self.clients} clients of weight {self.total:,})"

    def add(self, symbols: Array | Tensor, weights: Weights) -> None:
        """Count one client's symbols, uint8 `[size]`, with weight N_k, or several clients' `[clients, size]` with
        theirs."""
        given = as_array("symbols", symbols)
        rows, (thresholds, size) = np.ascontiguousarray(np.atleast_2d(given)), self.counts.shape
        largest = int(rows.max()) if rows.size else 0
        if rows.dtype != np.uint8 or rows.shape[1:] != (size,) or largest > thresholds:
            raise ValueError(
                f"vote: got symbols up to {largest} of {given.dtype} {given.shape}, expected 0 to {thresholds} "
                f"of uint8 and shape ({size},) per client; the symbols are of another sketch, or the vote has other "
                "thresholds"
            )
        own = check_weights(weights, len(rows))
        self._add(rows, [[weight] for weight in own])
        self.clients += len(own)


class SignVote(_Counters):
    """A weighted majority vote on signs that stay packed: v(i) = sign(Σ_k N_k b^k(i)), sign(0) = +1, as `Vote` with one
    threshold has it. Entries lie in layers of `sizes`, and a client has a weight in each of them, which may be 0.

    Bit i is bit i % 8 of byte i // 8, 1 for +1; layers follow one another without gaps.

    >>> vote = SignVote([3, 2])
    >>> vote.add(np.uint8([[0b01_100], [0b10_001]]), np.array([[2, 1], [1, 0]]))
    >>> print(*(f"{byte:05b}" for byte in vote.result()))
    01100
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        super().__init__(1, [check_integer("sizes", size, 0) for size in sizes])

    def add(self, packed: Array | Tensor, weights: Sequence[Sequence[int]] | Array | Tensor) -> None:
        """Count some clients' signs, uint8 `[clients, ⌈size / 8⌉]`, with their weights, whole numbers `[clients,
        layers]` of at least 0."""
        rows = np.ascontiguousarray(as_array("packed", packed))
        own = as_array("weights", weights) if isinstance(weights, Tensor) else np.asarray(weights)
        size = self.counts.shape[1]
        if rows.dtype != np.uint8 or rows.shape[1:] != (-(-size // 8),):
            raise ValueError(
                f"vote: got {rows.dtype} of shape {list(rows.shape)}, expected uint8 of shape [clients, "
                f"{-(-size // 8)}]; the signs are of another sketch"
            )
        if own.shape != (len(rows), len(self.ends)) or own.dtype.kind not in "iu" or own.min(initial=0) < 0:
            raise ValueError(f"weights: got {own.tolist()}, expected whole numbers of at least 0, [clients, layers]")
        self._add(np.unpackbits(rows, axis=1, count=size, bitorder="little"), own.tolist())

    def sums(self) -> NDArray[np.float64]:
        """Σ_k N_k b^k(i) of every entry, b = ±1, `[size]`; exact up to 2^53."""
        totals = np.repeat(np.array(self.totals, dtype=np.float64), np.diff(self.ends, prepend=0))
        return np.asarray(2 * self.counts[0].astype(np.float64) - totals)

    def result(self) -> NDArray[np.uint8]:
        """The signs of the weighted majority, packed as those that were added; +1 where no client has a weight."""
        return np.packbits(super().result(), bitorder="little")
