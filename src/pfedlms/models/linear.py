"""Stacked linear layers: the gradient of every weight comes out in the weight's own layout, so that no copy has to
turn it round."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class _Stacked(torch.autograd.Function):
    """y = x Wᵀ + b for `x: [clients, batch, in]`, `W: [clients, out, in]`, `b: [clients, out]` or None."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.biased = bias is not None
        turned = weight.transpose(1, 2)
        return torch.bmm(x, turned) if bias is None else torch.baddbmm(bias.unsqueeze(1), x, turned)

    @staticmethod
    def backward(ctx: Any, *outputs: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        (gradient,) = outputs
        of_x = torch.bmm(gradient, weight) if ctx.needs_input_grad[0] else None
        return of_x, torch.bmm(gradient.transpose(1, 2), x), gradient.sum(dim=1) if ctx.biased else None


class _Linear(torch.autograd.Function):
    """`F.linear` with a rule for `torch.func.vmap` over models; only used inside vmap."""

    generate_vmap_rule = False

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x, weight, bias)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Nothing to save: under vmap the rule below runs instead, and its own function keeps what it needs."""

    @staticmethod
    def vmap(
        info: Any, dims: tuple[int | None, ...], x: Tensor, weight: Tensor, bias: Tensor | None
    ) -> tuple[Tensor, int]:
        x, weight = _clients_first(info, x, dims[0]), _clients_first(info, weight, dims[1])
        bias = None if bias is None else _clients_first(info, bias, dims[2])
        flat = x.reshape(len(x), -1, x.shape[-1])
        out: Tensor = _Stacked.apply(flat, weight, bias)  # type: ignore[no-untyped-call]
        return out.view(*x.shape[:-1], weight.shape[1]), 0


def _clients_first(info: Any, value: Tensor, dim: int | None) -> Tensor:
    return value.expand(info.batch_size, *value.shape) if dim is None else value.movedim(dim, 0)


class StackedLinear:
    """Makes every plain `nn.Linear` of a module use the stacked rule within `with`, which must surround a vmap over
    models."""

    def __init__(self, module: nn.Module) -> None:
        self._on = False
        for layer in module.modules():
            if type(layer) is nn.Linear:
                layer.forward = partial(self._forward_of, layer)  # type: ignore[method-assign]

    def _forward_of(self, layer: nn.Linear, x: Tensor) -> Tensor:
        if self._on:
            out: Tensor = _Linear.apply(x, layer.weight, layer.bias)  # type: ignore[no-untyped-call]
            return out
        return F.linear(x, layer.weight, layer.bias)

    def __enter__(self) -> None:
        self._on = True

    def __exit__(self, *exc: object) -> None:
        self._on = False
