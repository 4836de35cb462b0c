"""CPU kernel of the pull: a layer of one client goes through sketch, slope and adjoint while it is in the cache."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from pfedlms.backend import compiled
from pfedlms.checks import Array
from pfedlms.sketch.cpu import enter, gather, leave, scales, scatter, share_layers
from pfedlms.sketch.hadamard import fwht_row

if TYPE_CHECKING:
    from pfedlms.pull import Pull


def sort_rows(pull: Pull) -> tuple[Array, Array]:
    """The rows kept of each layer in ascending order, which is faster to read, and their consensus. The pull does not
    depend on the order of entries in a message."""
    rows, consensus = pull.sketch.rows.numpy(), pull.consensus.numpy()
    order = np.concatenate([p.start + np.argsort(rows[p.start : p.stop]) for p in pull.sketch.shape.places])
    return rows[order], consensus[order]


def gradient(pull: Pull, params: Tensor) -> Tensor:
    theta, sketch = params.detach().contiguous(), pull.sketch
    out = torch.empty_like(theta)
    tau, widths = (value.to(theta.dtype).numpy() for value in (pull.thresholds, pull.widths))
    share_layers(
        _pull, sketch, len(theta), theta.numpy(), sketch.signs.numpy(), *pull.sorted_rows, sketch.shape.table,
        scales(sketch, theta), tau, widths, theta.numpy().dtype.type(pull.strength), out.numpy(),
    )  # fmt: skip
    return out


@compiled()
def _pull(
    first: int, last: int, theta: Array, signs: Array, rows: Array, consensus: Array, table: Array, scales: Array,
    thresholds: Array, widths: Array, strength: Any, out: Array,
) -> None:  # fmt: skip
    workspace = np.empty(table[:, 2].max(), theta.dtype)
    for task in range(first, last):
        client, layer = task // len(table), task % len(table)
        begin, end, pad, start, stop = table[layer]
        work, y, scale = workspace[:pad], np.empty(stop - start, theta.dtype), scales[layer]
        enter(theta[client][begin:end], signs[begin:end], work)
        fwht_row(work)
        gather(work, rows[start:stop], scale, y)
        slope = _slope(y, consensus[start:stop], thresholds[layer], widths[layer])
        scatter(slope, rows[start:stop], strength, work)
        fwht_row(work)
        leave(work, signs[begin:end], scale, out[client][begin:end])


@compiled()
def _slope(sketched: Array, consensus: Array, thresholds: Array, width: Any) -> Array:
    """`penalty_slope` of one layer of one client; with a loop for each threshold, because LLVM vectorises such
    loops."""
    kind = sketched.dtype.type
    levels, total = kind(len(thresholds)), np.zeros_like(sketched)
    if width > 0:
        for i in range(len(total)):
            total[i] = levels - kind(2) * kind(consensus[i])
        for tau in thresholds:
            for i in range(len(total)):
                step = (sketched[i] - tau) / width
                step = kind(-1) if step < kind(-1) else step  # so that NaN stays NaN
                total[i] += kind(1) if step > kind(1) else step
        for i in range(len(total)):
            total[i] /= levels
    return total
