"""K models of one architecture as one flat tensor `[clients, dim]`."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd

from pfedlms.backend import threads, torch_threads
from pfedlms.cohort import Cohort
from pfedlms.errors import UsageError
from pfedlms.models.layout import flat_layout
from pfedlms.models.stacked import Chain, StackedLayers
from pfedlms.models.streams import each

# Stacked, these sum in another order than for one client alone (grouped convolutions, normalisation folded into
# channels) and are no faster on a CPU; there a cohort runs them one client after another, so that results do not
# depend on how clients are grouped.
_LOOP_ON_CPU = (_ConvNd, _NormBase, nn.GroupNorm, nn.LayerNorm, nn.RNNBase, nn.MultiheadAttention)

_CACHED = 1 << 20  # parameters, with their gradients, that a CPU's cache holds

Ends = Callable[[slice, Tensor, Tensor | None], tuple[Tensor, list[Tensor], list[Tensor]]]
"""What a training step minimises: for some rows of clients, their outputs `[clients, batch, classes]` and features it
gives each client's loss, the tensors gradients flow back from, and the gradients there."""


def _must_run_alone(part: nn.Module, device: torch.device) -> bool:
    """What vmap would pass over in silence (hooks of the backward pass, a padding row that is not trained), and what is
    no faster stacked."""
    passed_over = part._backward_hooks or part._backward_pre_hooks or getattr(part, "padding_idx", None) is not None
    return bool(passed_over) or (device.type == "cpu" and isinstance(part, _LOOP_ON_CPU))


class CohortModel:
    """A module's architecture, applied to many flat parameter vectors at once.

    The module given is never trained; it supplies the computation, the frozen parameters and the initial values. With
    `fast`, training on a GPU is compiled instead of run by the rules of `stacked`, with other rounding.
    """

    def __init__(self, module: nn.Module, device: torch.device, fast: bool = False) -> None:
        self.module = module.to(device)
        self._stacked_layers = StackedLayers(module, folds=device.type == "cuda" and not fast)
        self.device = device
        self.layout = flat_layout(module)
        named = dict(module.named_parameters())
        trained = {parameter.name for parameter in self.layout.parameters}
        self._frozen = {name: value.detach() for name, value in named.items() if name not in trained}
        self._sizes = [parameter.size for parameter in self.layout.parameters]
        self.initial = torch.cat([named[p.name].detach().reshape(-1) for p in self.layout.parameters]).to(torch.float32)
        self.initial_buffers = {name: value.detach().clone() for name, value in module.named_buffers()}
        linear = [m for m in module.modules() if isinstance(m, nn.Linear)]
        self._head = linear[-1] if linear else None
        self._chain = Chain.of(module, trained)
        self._stacks: bool | None = True if self._chain else None
        if any(_must_run_alone(part, device) for part in module.modules()):
            self._stacks = False
        self._compiled: Any = None
        if fast and device.type == "cuda":
            self._compiled = torch.compile(vmap(self._call, randomness="different"), dynamic=False)

    def parts(self, clients: int) -> list[slice]:
        """Rows of clients that should take their local steps together. On a CPU a few whose models stay in the cache,
        where calling a layer costs little: as many parts as keep all threads busy."""
        if self._chain is None or self.device.type != "cpu":
            return [slice(0, clients)]
        spread_over, most = threads(), max(1, _CACHED // self.layout.dim)
        count = 1 if clients <= most else min(clients, spread_over * -(-clients // (spread_over * most)))
        ends = [clients * (number + 1) // count for number in range(count)]
        return [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]

    def _threads(self, clients: int) -> AbstractContextManager[None]:
        """The operators of a chain are short, and its clients are spread over threads; others may use all of them."""
        spread_out = self._chain is not None and (clients > 1 or self.layout.dim <= _CACHED)
        return nullcontext() if spread_out or self.device.type != "cpu" else torch_threads(threads())

    @property
    def feature_size(self) -> int:
        """Width of the features: what enters the last linear layer; 0 if there is none."""
        return self._head.in_features if self._head is not None else 0

    def cohort(self, ids: tuple[int, ...], samples: tuple[int, ...], with_momentum: bool) -> Cohort:
        """Clients that all start from the initial weights w⁰."""
        clients = len(ids)
        params = self.initial.expand(clients, -1).clone()
        momentum = torch.zeros_like(params) if with_momentum else params.new_zeros(clients, 0)
        buffers = {name: value.expand(clients, *value.shape).clone() for name, value in self.initial_buffers.items()}
        return Cohort(ids, samples, params, momentum, buffers)

    def forward(
        self, params: Tensor, buffers: dict[str, Tensor], x: Tensor, *, training: bool, features: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Outputs `[clients, batch, classes]` for `x: [clients, batch, ...]`, and the features `[clients, batch,
        width]` if asked for.

        In training, running statistics in `buffers` are updated in place, as `nn.Module.forward` does.
        """
        with self._threads(len(params)):
            return self._forward(self._named(params), {}, buffers, x, training, features)

    def gradient(
        self, out: Tensor, params: Tensor, buffers: dict[str, Tensor], x: Tensor, ends: Ends, features: bool = False
    ) -> Tensor:
        """One training step's forward and backward pass of every client: gradients into `out: [clients, dim]`; returns
        the losses `[clients]`."""
        if len(params) == 1 or self.stacks(params, buffers, x):
            return self._gradient(out, slice(0, len(params)), params, buffers, x, ends, features)

        def alone(client: int) -> Tensor:
            # Both passes of one client together: what it needs stays in the cache, or on its stream.
            row = slice(client, client + 1)
            own = {name: value[row] for name, value in buffers.items()}
            return self._gradient(out[row], row, params[row], own, x[row], ends, features)

        return torch.cat(each(len(params), alone, self.device))

    def _gradient(
        self,
        out: Tensor,
        rows: slice,
        params: Tensor,
        buffers: dict[str, Tensor],
        x: Tensor,
        ends: Ends,
        features: bool,
    ) -> Tensor:
        """Losses of the clients in `rows`, whose gradients are written to `out`."""
        leaves = {name: value.detach().requires_grad_() for name, value in self._named(params).items()}
        places = self._named(out)
        # With several CPU threads a batched product into a strided place takes another, slower way.
        suits = out.is_cuda or self._chain is not None
        direct = places if suits and self._compiled is None else {}
        with self._threads(len(params)):
            outputs, seen = self._forward(leaves, direct, buffers, x, True, features)
            losses, roots, slopes = ends(rows, outputs, seen)
            # Clients share no parameter, so every client's own gradient comes out in its row.
            gradients = torch.autograd.grad(roots, list(leaves.values()), slopes, allow_unused=True)
        for place, gradient in zip(places.values(), gradients, strict=True):
            if gradient is None:
                place.zero_()
            elif gradient.data_ptr() != place.data_ptr():
                place.copy_(gradient)
        return losses

    def _forward(
        self,
        named: dict[str, Tensor],
        places: dict[str, Tensor],
        buffers: dict[str, Tensor],
        x: Tensor,
        training: bool,
        features: bool,
    ) -> tuple[Tensor, Tensor | None]:
        if self._chain is not None and not (training and self._compiled):
            self.module.train(training)
            outputs, seen = self._chain(named, places, x)
            return outputs, seen if features else None
        call = self._call_with_features if features else self._call
        together = self._stacks_named(named, buffers, x)
        self.module.train(training)  # after the trial, which tries training
        if together:
            stacked = (
                self._compiled if training and not features and self._compiled else vmap(call, randomness="different")
            )
            with self._stacked_layers.on(places):
                out = stacked(named, buffers, x)
        else:

            def alone(k: int) -> Any:
                return call({n: v[k] for n, v in named.items()}, {n: v[k] for n, v in buffers.items()}, x[k])

            one_by_one = each(len(x), alone, self.device)
            out = tuple(map(torch.stack, zip(*one_by_one, strict=True))) if features else torch.stack(one_by_one)
        return out if features else (out, None)

    def stacks(self, params: Tensor, buffers: dict[str, Tensor], x: Tensor) -> bool:
        """Whether clients run as one stacked computation; otherwise one by one."""
        return self._stacks_named(self._named(params), buffers, x)

    def _stacks_named(self, named: dict[str, Tensor], buffers: dict[str, Tensor], x: Tensor) -> bool:
        if self._stacks is None:
            self._stacks = self._can_stack(named, buffers, x)
        return self._stacks

    def _named(self, params: Tensor) -> dict[str, Tensor]:
        """Parameters by name, from `[clients, dim]` or `[dim]`: views."""
        pieces = torch.split(params, self._sizes, dim=-1)
        shapes = [(*params.shape[:-1], *p.shape) for p in self.layout.parameters]
        return {p.name: piece.view(s) for p, piece, s in zip(self.layout.parameters, pieces, shapes, strict=True)}

    def _can_stack(self, named: dict[str, Tensor], buffers: dict[str, Tensor], x: Tensor) -> bool:
        """Whether `torch.func` can vectorise the module: tried once, on copies, because nothing else tells."""
        copies = {name: value.detach().clone() for name, value in buffers.items()}
        self.module.train()  # what cannot be stacked may lie on the way that only training takes
        try:
            devices = [self.device] if self.device.type == "cuda" else []
            with torch.no_grad(), self._stacked_layers.on({}), torch.random.fork_rng(devices=devices):
                vmap(self._call, randomness="different")({n: v.detach() for n, v in named.items()}, copies, x)
        except RuntimeError as error:
            reason = str(error).strip().splitlines()[0]
            warnings.warn(
                f"model: clients are trained one after another, because torch.func cannot stack it ({reason})",
                stacklevel=4,
            )
            return False
        return True

    def _call(self, named: dict[str, Tensor], buffers: dict[str, Tensor], x: Tensor) -> Any:
        return functional_call(self.module, (named, buffers, self._frozen), (x,))

    def _call_with_features(self, named: dict[str, Tensor], buffers: dict[str, Tensor], x: Tensor) -> Any:
        if self._head is None:
            raise ValueError(f"model: {type(self.module).__name__} has no linear layer, so it has no features to send")
        caught: list[Tensor] = []
        handle = self._head.register_forward_pre_hook(lambda module, inputs: caught.append(inputs[0]))
        try:
            outputs = self._call(named, buffers, x)
        finally:
            handle.remove()
        if not caught:
            raise UsageError("model: its last linear layer takes no part in the outputs, so it has no features to send")
        return outputs, caught[0]

    def state_dict(self, params: Tensor, buffers: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """One client's `params: [dim]` and `buffers` as a state dict that `load_state_dict` of the module takes."""
        values = self._named(params)
        values |= {name: buffers[name] for name in self.initial_buffers} | self._frozen
        aliases = {id(value): name for name, value in self.module.named_parameters()}
        aliases |= {id(value): name for name, value in self.module.named_buffers()}
        result = {}
        for name, own in self.module.state_dict(keep_vars=True).items():
            result[name] = values[aliases.get(id(own), name)].detach().cpu().clone()
        return result
