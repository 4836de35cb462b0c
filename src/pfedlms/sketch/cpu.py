"""CPU kernels of the sketch: a layer of one client goes through all steps while it is in the cache.

Each loop goes over one contiguous array, because LLVM vectorises such loops, but not loops over rows of matrices.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from pfedlms.backend import compiled, run_kernel
from pfedlms.checks import Array
from pfedlms.sketch.hadamard import fwht_row

if TYPE_CHECKING:
    from pfedlms.sketch import Sketch


def forward(sketch: Sketch, params: Tensor) -> Tensor:
    return _apply(_forward, sketch, params, sketch.size, scales(sketch, params))


def adjoint(sketch: Sketch, sketched: Tensor, scaled: bool = True) -> Tensor:
    factors = scales(sketch, sketched)
    return _apply(_adjoint, sketch, sketched, sketch.dim, factors if scaled else np.ones_like(factors))


def _apply(kernel: Any, sketch: Sketch, values: Tensor, width: int, factors: Array) -> Tensor:
    values, out = values.detach().contiguous(), values.new_empty(len(values), width)
    share_layers(
        kernel, sketch, len(values), values.numpy(), sketch.signs.numpy(), sketch.rows.numpy(), sketch.shape.table,
        factors, out.numpy(),
    )  # fmt: skip
    return out


def split(sketch: Sketch, params: Tensor, model: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
    vectors = [value.detach().contiguous() for value in (params, model, residual)]
    sketched, unsent = params.new_empty(len(params), sketch.size), torch.empty_like(vectors[0])
    shares = np.array([place.share for place in sketch.shape.places], dtype=unsent.numpy().dtype)
    share_layers(
        _split, sketch, len(params), *(value.numpy() for value in vectors), sketch.signs.numpy(), sketch.rows.numpy(),
        sketch.shape.table, scales(sketch, params), shares, sketched.numpy(), unsent.numpy(),
    )  # fmt: skip
    return sketched, unsent


def scales(sketch: Sketch, like: Tensor) -> Array:
    """1/√m of every layer."""
    return np.array([place.scale for place in sketch.shape.places], dtype=like.numpy().dtype)


def share_layers(kernel: Any, sketch: Sketch, clients: int, *arguments: Any) -> None:
    """Run `kernel` for all layers of all clients: task = client · layers + layer."""
    pads = [place.pad for place in sketch.shape.places]
    run_kernel(kernel, clients * len(pads), sum(pads) // len(pads), *arguments)


@compiled()
def _forward(
    first: int, last: int, theta: Array, signs: Array, rows: Array, table: Array, scales: Array, out: Array
) -> None:
    work = np.empty(table[:, 2].max(), theta.dtype)
    for task in range(first, last):
        client, layer = task // len(table), task % len(table)
        begin, end, pad, start, stop = table[layer]
        enter(theta[client][begin:end], signs[begin:end], work[:pad])
        fwht_row(work[:pad])
        gather(work, rows[start:stop], scales[layer], out[client][start:stop])


@compiled()
def _adjoint(
    first: int, last: int, u: Array, signs: Array, rows: Array, table: Array, scales: Array, out: Array
) -> None:
    work = np.empty(table[:, 2].max(), u.dtype)
    for task in range(first, last):
        client, layer = task // len(table), task % len(table)
        begin, end, pad, start, stop = table[layer]
        scatter(u[client][start:stop], rows[start:stop], u.dtype.type(1), work[:pad])
        fwht_row(work[:pad])
        leave(work, signs[begin:end], scales[layer], out[client][begin:end])


@compiled()
def _split(
    first: int, last: int, theta: Array, model: Array, residual: Array, signs: Array, rows: Array, table: Array,
    scales: Array, shares: Array, sketched: Array, unsent: Array,
) -> None:  # fmt: skip
    work = np.empty(table[:, 2].max(), theta.dtype)
    for task in range(first, last):
        client, layer = task // len(table), task % len(table)
        begin, end, pad, start, stop = table[layer]
        x, y = unsent[client][begin:end], sketched[client][start:stop]
        _add_residual(theta[client][begin:end], model[client][begin:end], residual[client][begin:end], x)
        enter(x, signs[begin:end], work[:pad])
        fwht_row(work[:pad])
        gather(work, rows[start:stop], scales[layer], y)
        scatter(y, rows[start:stop], theta.dtype.type(1), work[:pad])
        fwht_row(work[:pad])
        _subtract(work, signs[begin:end], scales[layer], shares[layer], x)


@compiled()
def _add_residual(theta: Array, model: Array, residual: Array, x: Array) -> None:
    """x ← θ − w + e of one layer."""
    for i in range(len(x)):
        x[i] = theta[i] - model[i] + residual[i]


@compiled()
def _subtract(work: Array, signs: Array, scale: Any, share: Any, x: Array) -> None:
    """x ← x − share · scale · Pᵀ D work of one layer."""
    for i in range(len(x)):
        x[i] -= work[i] * x.dtype.type(signs[i]) * scale * share


@compiled()
def enter(theta: Array, signs: Array, work: Array) -> None:
    """work ← D P θ of one layer."""
    for i in range(len(theta)):
        work[i] = theta[i] * theta.dtype.type(signs[i])
    work[len(theta) :] = 0


@compiled()
def leave(work: Array, signs: Array, scale: Any, out: Array) -> None:
    """out ← scale · Pᵀ D work of one layer."""
    for i in range(len(out)):
        out[i] = work[i] * out.dtype.type(signs[i]) * scale


@compiled()
def gather(work: Array, rows: Array, scale: Any, out: Array) -> None:
    """out ← scale · S work."""
    for j in range(len(rows)):
        out[j] = work[rows[j]] * scale


@compiled()
def scatter(values: Array, rows: Array, scale: Any, work: Array) -> None:
    """work ← scale · Sᵀ values."""
    work[:] = 0
    for j in range(len(rows)):
        work[rows[j]] = values[j] * scale
