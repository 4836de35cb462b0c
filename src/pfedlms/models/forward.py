"""K models of one architecture as one flat tensor `[clients, dim]`."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from math import prod

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd

from pfedlms.backend import all_threads_per_operator
from pfedlms.cohort import Cohort
from pfedlms.models.chain import Chain
from pfedlms.models.layout import flat_layout
from pfedlms.models.one_by_one import OneByOne
from pfedlms.models.runner import FunctionalModule, Pass, Result, Runner, Values, hooks_backward
from pfedlms.models.stacked import Stacked, copied, why_not_stackable

# If clients are stacked, these layers sum in another order than for one client alone (grouped convolutions,
# normalisation over clients · channels), and on a CPU they are no faster. So on a CPU each client runs them alone, and
# results do not depend on how clients are grouped.
_LOOP_ON_CPU = (_ConvNd, _NormBase, nn.GroupNorm, nn.LayerNorm, nn.RNNBase, nn.MultiheadAttention)

_ALIGNMENT = 64  # bytes, of PyTorch's tensors on a CPU

Loss = Callable[[Tensor, Tensor | None, Tensor, slice], tuple[Tensor, list[Tensor], list[Tensor]]]
"""What a training step minimises. Arguments: outputs `[clients, batch, classes]`, features and labels `[clients,
batch]` of some rows of the cohort, and these rows. Results: each client's loss, the tensors from which the backward
pass starts, and the gradients at them."""


def choose(functional: FunctionalModule, device: torch.device, params: Values, sample: Tensor | None) -> Runner | None:
    """The runner of a module. Unless it is a chain, this needs a trial with one model's `params` on a `sample: [batch,
    …]`; without a sample the result is None."""
    module, gpu = functional.module, device.type == "cuda"
    if Chain.supports(module):
        return Chain(module, device)
    if sample is None:
        return None
    if any(_is_wrong_under_vmap(part) or (not gpu and isinstance(part, _LOOP_ON_CPU)) for part in module.modules()):
        return OneByOne(functional, device, sample)
    if reason := why_not_stackable(functional, params, sample):
        message = f"model: clients are trained one after another, because torch.func cannot stack it ({reason})"
        warnings.warn(message, stacklevel=2)
        return OneByOne(functional, device, sample)
    return Stacked(copied(functional), gpu_rules=gpu)


def _is_wrong_under_vmap(part: nn.Module) -> bool:
    """Whether vmap computes a layer wrongly: it ignores hooks of the backward pass, and trains the padding row of an
    embedding."""
    return hooks_backward(part) or getattr(part, "padding_idx", None) is not None


class CohortModel:
    """A module's architecture, applied to many flat parameter vectors at once.

    The module itself is never trained; it supplies the computation, the frozen parameters and the initial values. Its
    runner is chosen once: here, or at the first use if that needs a trial. With `half`, products and
    convolutions are taken in bfloat16 (autocast); parameters stay float32.
    """

    def __init__(self, module: nn.Module, device: torch.device, half: bool = False) -> None:
        self.module = module.to(device)
        self.device = device
        self.layout = flat_layout(module)
        self._sizes = [prod(shape) for _, shape in self.layout.parameters]
        self._functional, self._half = FunctionalModule(module), half
        self.feature_size = 0 if self._functional.head is None else self._functional.head.in_features
        """Width of the features: what enters the last linear layer; 0 if there is none."""
        trained = [value.detach().flatten() for value in module.parameters() if value.requires_grad]
        self.initial = torch.cat(trained).to(torch.float32)
        self.initial_buffers = {name: value.detach().clone() for name, value in module.named_buffers()}
        if device.type == "cuda":  # gives autograd's thread a context; without one torch warns at the first product
            one = torch.ones(1, device=device, requires_grad=True)
            torch.autograd.grad(one.exp(), one)
        self._runner = choose(self._functional, device, self._by_name(self.initial), None)

    def parts(self, clients: int) -> list[slice]:
        """Rows of clients that should take their local steps together; see `Runner`."""
        # A runner that is not chosen yet is no chain, and has one part.
        return [slice(0, clients)] if self._runner is None else self._runner.parts(clients)

    def _run(self, run_rows: Callable[[Runner, slice], Result], params: Tensor, x: Tensor) -> list[Result]:
        """Call `run_rows` for the rows of all clients, as many at a time as the runner takes."""
        if self._runner is None:
            self._runner = choose(self._functional, self.device, self._by_name(params[0]), x[0])
        assert self._runner is not None  # because there are samples
        runner = self._runner
        # On a CPU, long operators may use all threads; inside the engine, short ones run on one thread each.
        short = self.device.type != "cpu" or runner.has_short_operators(len(x))
        with nullcontext() if short else all_threads_per_operator():
            return runner.run_all(len(x), partial(run_rows, runner))

    def cohort(self, ids: tuple[int, ...], samples: tuple[int, ...], optimizer_size: int = 0) -> Cohort:
        """Clients that start from the initial weights w⁰, each with `optimizer_size` zeros as its optimizer state."""
        clients = len(ids)
        params = self.initial.expand(clients, -1).clone()
        momentum = params.new_zeros(clients, optimizer_size)
        buffers = {name: value.expand(clients, *value.shape).clone() for name, value in self.initial_buffers.items()}
        return Cohort(ids, samples, params, momentum, buffers)

    def forward(
        self, params: Tensor, buffers: dict[str, Tensor], x: Tensor, *, training: bool, features: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Outputs `[clients, batch, classes]` for `x: [clients, batch, ...]`, and with `features` the features
        `[clients, batch, width]`.

        In training, running statistics in `buffers` are updated in place, as `nn.Module.forward` does.
        """

        def run_rows(runner: Runner, rows: slice) -> tuple[Tensor, Tensor | None]:
            own_buffers = {name: value[rows] for name, value in buffers.items()}
            own = self._by_name(_rows(params, rows))
            inputs = Pass(own, {}, dict(own_buffers), _rows(x, rows), training, features)
            results = self._forward_pass(runner, inputs)
            _store_assigned(own_buffers, inputs.buffers)
            return results

        outputs, seen = zip(*self._run(run_rows, params, x), strict=True)
        return _concatenate(outputs), _concatenate(seen) if features else None

    def gradient(
        self, out: Tensor, params: Tensor, buffers: dict[str, Tensor], x: Tensor, y: Tensor, loss: Loss,
        features: bool = False,
    ) -> Tensor:  # fmt: skip
        """The forward and backward pass of every client in one training step: writes gradients into `out: [clients,
        dim]` and returns the losses `[clients]`."""

        def run_rows(runner: Runner, rows: slice) -> Tensor:
            own = self._by_name(_rows(params, rows))
            leaves = {name: value.detach().requires_grad_() for name, value in own.items()}
            own_buffers = {name: value[rows] for name, value in buffers.items()}
            places = self._by_name(out[rows])
            # On a CPU a batched product that writes into a strided tensor takes one client after another. Compared to
            # a product and a copy this is slightly faster on one thread, and up to three times slower on several.
            direct = places if out.is_cuda or runner.has_short_operators(rows.stop - rows.start) else {}
            inputs = Pass(leaves, direct, dict(own_buffers), _rows(x, rows), True, features)
            with torch.enable_grad():  # the caller may have switched it off
                outputs, seen = self._forward_pass(runner, inputs)
                losses, roots, slopes = loss(outputs, seen, y[rows], rows)
                # Clients share no parameters, so every row is the gradient of one client's loss.
                gradients = torch.autograd.grad(roots, list(leaves.values()), slopes, allow_unused=True)
            for place, gradient in zip(places.values(), gradients, strict=True):
                if gradient is None:
                    place.zero_()
                elif gradient.is_sparse or gradient.data_ptr() != place.data_ptr():
                    place.copy_(gradient.to_dense())
            _store_assigned(own_buffers, inputs.buffers)
            return losses

        return _concatenate(self._run(run_rows, params, x))

    def _forward_pass(self, runner: Runner, inputs: Pass) -> tuple[Tensor, Tensor | None]:
        if not self._half:
            return runner.forward(inputs)
        with torch.autocast(self.device.type, torch.bfloat16):
            outputs, seen = runner.forward(inputs)
        return outputs.float(), None if seen is None else seen.float()

    def _by_name(self, params: Tensor) -> dict[str, Tensor]:
        """Views of `params`, `[clients, dim]` or `[dim]`, by the names of the parameters."""
        pieces = torch.split(params, self._sizes, dim=-1)
        named = zip(self.layout.parameters, pieces, strict=True)
        return {name: piece.view((*params.shape[:-1], *shape)) for (name, shape), piece in named}

    def state_dict(self, params: Tensor, buffers: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """One client's `params: [dim]` and `buffers` as a state dict for the module's `load_state_dict`."""
        values = self._by_name(params)
        values |= {name: buffers[name] for name in self.initial_buffers} | self._functional.frozen
        aliases = {id(value): name for name, value in self.module.named_parameters()}
        aliases |= {id(value): name for name, value in self.module.named_buffers()}
        result = {}
        for name, value in self.module.state_dict(keep_vars=True).items():
            # A buffer that a call has made is the same for all clients.
            result[name] = values.get(aliases.get(id(value), name), value).detach().cpu().clone()
        return result


def _rows(values: Tensor, rows: slice) -> Tensor:
    """Some clients' rows. One client's row on a CPU begins where a tensor of its own would: how products of small
    matrices are rounded depends on where in memory they begin, and so would results on the clients beside it."""
    own = values[rows]
    return own if len(own) > 1 or own.is_cuda or own.data_ptr() % _ALIGNMENT == 0 else own.clone()


def _store_assigned(buffers: Values, after: Values) -> None:
    """Store the buffers that a module assigned in its forward pass; it has updated all others in place."""
    for name, value in buffers.items():
        if after[name] is not value:
            value.copy_(after[name])


def _concatenate(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))
