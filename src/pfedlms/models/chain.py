"""Plain chains of linear and pointwise layers, all clients together without `torch.func.vmap`, whose overhead is as
long as a small layer's arithmetic; the operations, and so the bits, are the same."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from pfedlms.backend import run_overlapped, threads
from pfedlms.models.runner import Pass, Runner, hooks_backward, hooks_forward

_POINTWISE = (nn.ReLU, nn.LeakyReLU, nn.ELU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.Softplus, nn.Identity)

_CACHED = 1 << 20  # parameters, with their gradients, that a CPU's cache holds


class StackedLinear(torch.autograd.Function):
    """y = x Wᵀ + b for `x: [clients, batch, in]`, `W: [clients, out, in]`, `b: [clients, out]` or None; gradients of W
    and b go into `places` where it has one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, *places: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.biased, ctx.places = bias is not None, places
        turned = weight.transpose(1, 2)
        return torch.bmm(x, turned) if bias is None else torch.baddbmm(bias.unsqueeze(1), x, turned)

    @staticmethod
    def backward(ctx: Any, *outputs: Tensor) -> tuple[Tensor | None, ...]:
        # Under autocast the product was taken in another type than the weight's.
        (of_y,), (x, weight) = outputs, (value.to(outputs[0].dtype) for value in ctx.saved_tensors)
        to_weight, to_bias = (p if p is not None and p.dtype == of_y.dtype else None for p in ctx.places)

        def sums() -> Tensor | None:
            return torch.sum(of_y, dim=1, out=to_bias) if ctx.biased else None

        def products() -> tuple[Tensor | None, Tensor]:
            of_x = torch.bmm(of_y, weight) if ctx.needs_input_grad[0] else None
            return of_x, torch.bmm(of_y.transpose(1, 2), x, out=to_weight)

        of_bias, (of_x, of_weight) = run_overlapped(sums, products, x.device, "sums")
        return of_x, of_weight, of_bias, None, None


def stacked_linear(x: Tensor, weight: Tensor, bias: Tensor | None, *places: Tensor | None) -> Tensor:
    """The same for `x: [clients, batch, …, in]`."""
    flat = x.reshape(len(x), -1, x.shape[-1])
    out: Tensor = StackedLinear.apply(flat, weight, bias, *places)  # type: ignore[no-untyped-call]
    return out.view(*x.shape[:-1], weight.shape[1])


class Chain(Runner):
    """The layers of a module in a row. Nothing of the module is changed or read but its pointwise layers, which have no
    state, so several threads may run one chain."""

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self._layers = [(name, part) for name, part in module.named_modules() if not isinstance(part, nn.Sequential)]
        self._dim = sum(value.numel() for value in module.parameters())
        self._device = device

    @staticmethod
    def supports(module: nn.Module) -> bool:
        """Whether a module is such a chain; all its parameters must be trained, and no part may be there twice."""
        walks = (module.named_modules, module.named_parameters)
        twice = any(len(list(walk(remove_duplicate=False))) > len(list(walk())) for walk in walks)
        return not twice and all(map(_plain, module.modules())) and all(v.requires_grad for v in module.parameters())

    def parts(self, clients: int) -> list[slice]:
        """On a CPU a few clients whose models stay in the cache, where calling a layer costs little: as many parts as
        keep all threads busy."""
        if self._device.type != "cpu":
            return super().parts(clients)
        busy, most = threads(), max(1, _CACHED // self._dim)
        count = 1 if clients <= most else min(clients, busy * -(-clients // (busy * most)))
        ends = [clients * number // count for number in range(count + 1)]
        return [slice(start, end) for start, end in pairwise(ends)]

    def has_short_operators(self, clients: int) -> bool:
        return clients > 1 or self._dim <= _CACHED

    def forward(self, given: Pass) -> tuple[Tensor, Tensor | None]:
        x, seen = given.x, None
        for name, layer in self._layers:
            if isinstance(layer, nn.Flatten):
                x = x.flatten(2)
            elif isinstance(layer, nn.Linear):
                own = [f"{name}.{part}" if name else part for part in ("weight", "bias")]
                seen = x
                x = stacked_linear(x, given.params[own[0]], given.params.get(own[1]), *map(given.places.get, own))
            else:
                x = layer(x)
        return x, seen if given.features else None


def _plain(part: nn.Module) -> bool:
    """Whether a part of a module does in a chain what it does alone."""
    if hooks_forward(part) or hooks_backward(part) or "forward" in vars(part):
        return False
    flattens = type(part) is nn.Flatten and (part.start_dim, part.end_dim) == (1, -1)
    return flattens or type(part) in (nn.Sequential, nn.Linear, *_POINTWISE)
