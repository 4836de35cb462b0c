"""Recurrent layers of many models at once: all clients take each step in time together.

One batched product multiplies the inputs of all times, and another gives the gradients of the weights. A step in time
has one product with the states, and the arithmetic of its cell.

    GRU    r, z = σ(x + h)     n = tanh(xₙ + r hₙ)     h' = n + z (h − n)
    LSTM   i, f, o = σ(x + h)  g = tanh(x + h)         c' = f c + i g        h' = o tanh(c')

where x and h stand for the parts of W x + b and U h + d that belong to a gate.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from pfedlms.models.chain import stacked_linear

PARTS = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")  # of each layer, as the modules name them


def _gru(inner: Tensor, outer: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """h' and what the backward pass needs, from gates `[clients, batch, 3 · hidden]`."""
    if inner.is_cuda:
        new, for_backward = torch.ops.aten._thnn_fused_gru_cell(
            inner.flatten(0, 1), outer.flatten(0, 1), state.flatten(0, 1)
        )
        return new.view_as(state), for_backward
    size = state.shape[-1]
    both = torch.sigmoid(inner[..., : 2 * size] + outer[..., : 2 * size])
    r, z, last = both[..., :size], both[..., size:], outer[..., 2 * size :]
    n = torch.tanh(torch.addcmul(inner[..., 2 * size :], r, last))
    apart = state - n
    return torch.addcmul(n, z, apart), torch.cat([both, n, last, apart], dim=-1)


def _gru_back(slope: Tensor, for_backward: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the gates from the inputs, of the gates from the state, and of the state itself."""
    if slope.is_cuda:
        gradients = torch.ops.aten._thnn_fused_gru_cell_backward(slope.flatten(0, 1), for_backward, False)
        of_inner, of_outer, of_state = (gradient.unflatten(0, slope.shape[:2]) for gradient in gradients[:3])
        return of_inner, of_outer, of_state
    r, z, n, last, apart = for_backward.chunk(5, dim=-1)
    of_state = slope * z
    of_n = (slope - of_state) * (1 - n * n)
    of_inner = torch.cat([of_n * last * r * (1 - r), of_state * (1 - z) * apart, of_n], dim=-1)
    of_outer = of_inner.clone()
    of_outer[..., 2 * slope.shape[-1] :] *= r
    return of_inner, of_outer, of_state


def _lstm(inner: Tensor, outer: Tensor, cell: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """h', c' and what the backward pass needs."""
    if inner.is_cuda:
        flat = (each.flatten(0, 1) for each in (inner, outer, cell))
        new, moved, for_backward = torch.ops.aten._thnn_fused_lstm_cell(*flat)
        return new.view_as(cell), moved.view_as(cell), for_backward
    size, both = cell.shape[-1], inner + outer
    first, last = torch.sigmoid(both[..., : 2 * size]), torch.sigmoid(both[..., 3 * size :])
    g = torch.tanh(both[..., 2 * size : 3 * size])
    moved = first[..., size:] * cell + first[..., :size] * g
    return last * torch.tanh(moved), moved, torch.cat([first, g, last], dim=-1)


def _lstm_back(
    slope: Tensor, of_moved: Tensor, cell: Tensor, moved: Tensor, for_backward: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of the gates and of c."""
    if slope.is_cuda:
        flat = (each.flatten(0, 1) for each in (slope, of_moved, cell, moved))
        gates, of_cell, _ = torch.ops.aten._thnn_fused_lstm_cell_backward_impl(*flat, for_backward, False)
        return gates.unflatten(0, slope.shape[:2]), of_cell.view_as(cell)
    i, f, g, o = for_backward.chunk(4, dim=-1)
    bent = torch.tanh(moved)
    of_moved = of_moved + slope * o * (1 - bent * bent)
    parts = [of_moved * g * i * (1 - i), of_moved * cell * f * (1 - f), of_moved * i * (1 - g * g)]
    return torch.cat([*parts, slope * bent * o * (1 - o)], dim=-1), of_moved * f


class StackedRecurrence(torch.autograd.Function):
    """All states `[clients, batch, length, hidden]`, and the last cell of an LSTM or the last state of a GRU.
    Arguments: `inner: [clients, batch, length, gates]`, the first state and cell `[clients, batch, hidden]`, `weight:
    [clients, gates, hidden]`, and `bias: [clients, gates]` or None."""

    @staticmethod
    def forward(
        ctx: Any, inner: Tensor, state: Tensor, cell: Tensor | None, weight: Tensor, bias: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        turned, shift = weight.mT, None if bias is None else bias.unsqueeze(1)
        states, cells, for_backward = [state], [cell], []
        for gates in inner.unbind(2):
            outer = torch.bmm(state, turned) if shift is None else torch.baddbmm(shift, state, turned)
            if cell is None:
                state, saved = _gru(gates, outer, state)
            else:
                state, cell, saved = _lstm(gates, outer, cell)
                cells.append(cell)
            states.append(state)
            for_backward.append(saved)
        ctx.save_for_backward(weight, *states, *for_backward, *(cells if cell is not None else []))
        ctx.length, ctx.biased = len(for_backward), bias is not None
        return torch.stack(states[1:], dim=2), state.clone() if cell is None else cell.clone()

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor | None, ...]:
        (of_states, of_last), (weight, *saved), length = slopes, ctx.saved_tensors, ctx.length
        states, for_backward, cells = saved[: length + 1], saved[length + 1 : 2 * length + 1], saved[2 * length + 1 :]
        of_state, of_cell = torch.zeros_like(states[0]), of_last
        if not cells:
            of_state = of_state + of_last
        of_inner, of_outer = [], []
        for time in reversed(range(length)):
            of_state = of_state + of_states[:, :, time]
            if cells:
                gates, of_cell = _lstm_back(of_state, of_cell, cells[time], cells[time + 1], for_backward[time])
                from_input = gates
                of_state = torch.bmm(gates, weight)
            else:
                from_input, gates, direct = _gru_back(of_state, for_backward[time])
                of_state = torch.baddbmm(direct, gates, weight)
            of_inner.append(from_input)
            of_outer.append(gates)
        every = torch.stack(of_outer[::-1], dim=1).flatten(1, 2)
        of_weight = torch.bmm(every.mT, torch.stack(states[:-1], dim=1).flatten(1, 2))
        of_bias = every.sum(dim=1) if ctx.biased else None
        return torch.stack(of_inner[::-1], dim=2), of_state, of_cell if cells else None, of_weight, of_bias


def is_stackable(layer: nn.Module) -> bool:
    """Whether `stacked_recurrent` can compute a layer."""
    return type(layer) in (nn.GRU, nn.LSTM) and not layer.bidirectional and not layer.proj_size and not layer.dropout


def stacked_recurrent(
    layer: nn.GRU | nn.LSTM, x: Tensor, first: Tensor | None, cell: Tensor | None, *weights: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs of the last layer `[clients, batch, length, hidden]`, and the last states and cells of all layers,
    `[clients, layers, batch, hidden]`. `weights` has four tensors for each layer, in the order of `PARTS`."""
    gated, (clients, batch) = isinstance(layer, nn.LSTM), x.shape[:2]
    size = (clients, layer.num_layers, batch, layer.hidden_size)
    assert weights[0] is not None
    zero = torch.zeros(size, device=x.device, dtype=weights[0].dtype) if first is None else first
    states, cells = [], []
    for number in range(layer.num_layers):
        of_input, of_state, shift, bias = weights[4 * number : 4 * number + 4]
        assert of_input is not None
        inner = stacked_linear(x, of_input, shift, None, None)
        begin = (zero if cell is None else cell)[:, number] if gated else None
        # Under autocast only the products with the inputs are in bfloat16, because a state is the sum of many steps.
        with torch.autocast(x.device.type, enabled=False):
            tensors = inner.to(zero.dtype), zero[:, number], begin, of_state, bias
            x, last = StackedRecurrence.apply(*tensors)  # type: ignore[no-untyped-call]
        states.append(x[:, :, -1])
        cells.append(last)
    return x, torch.stack(states, dim=1), torch.stack(cells, dim=1)
