"""Plain chains of linear and pointwise layers, for all clients together without `torch.func.vmap`: its overhead is as
long as the arithmetic of a small layer. The operations, and so the bits, are the same."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from pfedlms.backend import run_overlapped, threads
from pfedlms.models.runner import Pass, Runner, hooks_backward, hooks_forward

_POINTWISE = (nn.ReLU, nn.LeakyReLU, nn.ELU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.Softplus, nn.Identity)

_CACHED = 1 << 20  # so many parameters, with their gradients, fit in a CPU's cache


class StackedLinear(torch.autograd.Function):
    """y = x Wᵀ + b for `x: [clients, batch, in]`, `W: [clients, out, in]`, `b: [clients, out]` or None. The gradients
    of W and b are written into `places`, unless that is None."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, *places: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.biased, ctx.places = bias is not None, places
        turned = weight.transpose(1, 2)
        return torch.bmm(x, turned) if bias is None else torch.baddbmm(bias.unsqueeze(1), x, turned)

    @staticmethod
    def backward(ctx: Any, *outputs: Tensor) -> tuple[Tensor | None, ...]:
        # Under autocast the product has another type than the weight.
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
    """`StackedLinear` for `x: [clients, batch, …, in]`."""
    flat = x.reshape(len(x), -1, x.shape[-1])
    out: Tensor = StackedLinear.apply(flat, weight, bias, *places)  # type: ignore[no-untyped-call]
    return out.view(*x.shape[:-1], weight.shape[1])


class Chain(Runner):
    """Runs the layers of a module one after another. It uses only the module's pointwise layers, which have no state,
    so several threads may run one chain."""

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self._layers = [(name, part) for name, part in module.named_modules() if not isinstance(part, nn.Sequential)]
        self._dim = sum(value.numel() for value in module.parameters())
        self._device = device

    @staticmethod
    def supports(module: nn.Module) -> bool:
        """Whether a module is such a chain, all its parameters are trained, and no part is used twice."""
        walks = (module.named_modules, module.named_parameters)
        repeats = any(len(list(walk(remove_duplicate=False))) > len(list(walk())) for walk in walks)
        return (
            not repeats
            and all(map(_is_plain_layer, module.modules()))
            and all(v.requires_grad for v in module.parameters())
        )

    def parts(self, clients: int) -> list[slice]:
        """On a CPU, parts of a few clients whose models fit in the cache; as many parts as keep all threads busy."""
        if self._device.type != "cpu":
            return super().parts(clients)
        busy, most = threads(), max(1, _CACHED // self._dim)
        count = 1 if clients <= most else min(clients, busy * -(-clients // (busy * most)))
        ends = [clients * number // count for number in range(count + 1)]
        return [slice(start, end) for start, end in pairwise(ends)]

    def has_short_operators(self, clients: int) -> bool:
        return clients > 1 or self._dim <= _CACHED

    def forward(self, inputs: Pass) -> tuple[Tensor, Tensor | None]:
        x, features = inputs.x, None
        for name, layer in self._layers:
            if isinstance(layer, nn.Flatten):
                x = x.flatten(2)
            elif isinstance(layer, nn.Linear):
                weight, bias = (f"{name}.{part}" if name else part for part in ("weight", "bias"))
                places, features = (inputs.places.get(weight), inputs.places.get(bias)), x
                x = stacked_linear(x, inputs.params[weight], inputs.params.get(bias), *places)
            else:
                x = layer(x)
        return x, features if inputs.features else None


def _is_plain_layer(part: nn.Module) -> bool:
    """Whether a layer is one that a chain can run: of a known type, and not changed by the user."""
    if hooks_forward(part) or hooks_backward(part) or "forward" in vars(part):
        return False
    flattens = type(part) is nn.Flatten and (part.start_dim, part.end_dim) == (1, -1)
    return flattens or type(part) in (nn.Sequential, nn.Linear, *_POINTWISE)
