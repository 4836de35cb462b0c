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
from pfedlms.models.runner import Pass, Result, Runner, Single, Values, hooks_backward
from pfedlms.models.stacked import Compiled, Stacked, refusal

# Stacked, these sum in another order than for one client alone (grouped convolutions, normalisation folded into
# channels) and are no faster on a CPU; there every client runs them alone, so that results do not depend on how clients
# are grouped.
_LOOP_ON_CPU = (_ConvNd, _NormBase, nn.GroupNorm, nn.LayerNorm, nn.RNNBase, nn.MultiheadAttention)

Loss = Callable[[Tensor, Tensor | None, Tensor, slice], tuple[Tensor, list[Tensor], list[Tensor]]]
"""What a training step minimises: outputs `[clients, batch, classes]`, features and labels `[clients, batch]` of some
rows of the cohort, and these rows, give each client's loss, the tensors gradients flow back from, and the gradients
there."""


def choose(single: Single, device: torch.device, fast: bool, params: Values, sample: Tensor | None) -> Runner | None:
    """The runner of a module. All but chains need a trial with one model's `params` on a `sample: [batch, …]`: None for
    these if there is no sample."""
    module, gpu = single.module, device.type == "cuda"
    runner: Runner
    if Chain.supports(module):
        runner = Chain(module, device)
    elif sample is None:
        return None
    elif any(_passed_over(part) or (not gpu and isinstance(part, _LOOP_ON_CPU)) for part in module.modules()):
        return OneByOne(single, device, sample)
    elif reason := refusal(single, params, sample):
        message = f"model: clients are trained one after another, because torch.func cannot stack it ({reason})"
        warnings.warn(message, stacklevel=2)
        return OneByOne(single, device, sample)
    else:
        runner = Stacked(single, folds=gpu)
    return Compiled(single, runner) if fast and gpu else runner


def _passed_over(part: nn.Module) -> bool:
    """vmap ignores hooks of the backward pass, and trains a padding row that must not be trained."""
    return hooks_backward(part) or getattr(part, "padding_idx", None) is not None


class CohortModel:
    """A module's architecture, applied to many flat parameter vectors at once.

    The module given is never trained; it supplies the computation, the frozen parameters and the initial values. How
    clients are run is chosen once: here, or at the first use if that needs a trial. With `fast`, training on a GPU is
    compiled. With `half`, products and convolutions are taken in bfloat16 (autocast); parameters stay float32.
    """

    def __init__(self, module: nn.Module, device: torch.device, fast: bool = False, half: bool = False) -> None:
        self.module = module.to(device)
        self.device = device
        self.layout = flat_layout(module)
        self._sizes = [prod(shape) for _, shape in self.layout.parameters]
        self._single, self._fast, self._half = Single(module), fast, half
        self.feature_size = 0 if self._single.head is None else self._single.head.in_features
        """Width of the features: what enters the last linear layer; 0 if there is none."""
        trained = [value.detach().flatten() for value in module.parameters() if value.requires_grad]
        self.initial = torch.cat(trained).to(torch.float32)
        self.initial_buffers = {name: value.detach().clone() for name, value in module.named_buffers()}
        if device.type == "cuda":  # autograd's own thread gets a context; without one torch warns of its first product
            one = torch.ones(1, device=device, requires_grad=True)
            torch.autograd.grad(one.exp(), one)
        self._runner = choose(self._single, device, fast, self._named(self.initial), None)

    def parts(self, clients: int) -> list[slice]:
        """Rows of clients that should take their local steps together; see `Runner`."""
        # A runner that needs a trial has one part.
        return [slice(0, clients)] if self._runner is None else self._runner.parts(clients)

    def _run(self, some: Callable[[Runner, slice], Result], params: Tensor, x: Tensor) -> list[Result]:
        """`some` on the rows of all clients, as many at a time as the runner takes."""
        if self._runner is None:
            self._runner = choose(self._single, self.device, self._fast, self._named(params[0]), x[0])
        assert self._runner is not None  # with samples
        runner = self._runner
        # On a CPU, long operators may use all threads; inside the engine others run on one each.
        short = self.device.type != "cpu" or runner.has_short_operators(len(x))
        with nullcontext() if short else all_threads_per_operator():
            return runner.run_all(len(x), partial(some, runner))

    def cohort(self, ids: tuple[int, ...], samples: tuple[int, ...], kept: int = 0) -> Cohort:
        """Clients that all start from the initial weights w⁰, with `kept` numbers each for their optimizer."""
        clients = len(ids)
        params = self.initial.expand(clients, -1).clone()
        momentum = params.new_zeros(clients, kept)
        buffers = {name: value.expand(clients, *value.shape).clone() for name, value in self.initial_buffers.items()}
        return Cohort(ids, samples, params, momentum, buffers)

    def forward(
        self, params: Tensor, buffers: dict[str, Tensor], x: Tensor, *, training: bool, features: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Outputs `[clients, batch, classes]` for `x: [clients, batch, ...]`, and the features `[clients, batch,
        width]` if asked for.

        In training, running statistics in `buffers` are updated in place, as `nn.Module.forward` does.
        """

        def some(runner: Runner, rows: slice) -> tuple[Tensor, Tensor | None]:
            own = {name: value[rows] for name, value in buffers.items()}
            return self._forward_pass(runner, Pass(self._named(params[rows]), {}, own, x[rows], training, features))

        outputs, seen = zip(*self._run(some, params, x), strict=True)
        return _joined(outputs), _joined(seen) if features else None

    def gradient(
        self, out: Tensor, params: Tensor, buffers: dict[str, Tensor], x: Tensor, y: Tensor, loss: Loss,
        features: bool = False,
    ) -> Tensor:  # fmt: skip
        """One training step's forward and backward pass of every client: gradients into `out: [clients, dim]`; returns
        the losses `[clients]`."""

        def some(runner: Runner, rows: slice) -> Tensor:
            leaves = {name: value.detach().requires_grad_() for name, value in self._named(params[rows]).items()}
            own = {name: value[rows] for name, value in buffers.items()}
            places = self._named(out[rows])
            # On a CPU a batched product into a strided place takes one client after another: on one thread a few per
            # cent of a step faster than a product of its own and a copy, on several up to three times slower.
            direct = places if out.is_cuda or runner.has_short_operators(rows.stop - rows.start) else {}
            outputs, seen = self._forward_pass(runner, Pass(leaves, direct, own, x[rows], True, features))
            losses, roots, slopes = loss(outputs, seen, y[rows], rows)
            # Clients share no parameter, so every client's own gradient comes out in its row.
            gradients = torch.autograd.grad(roots, list(leaves.values()), slopes, allow_unused=True)
            for place, gradient in zip(places.values(), gradients, strict=True):
                if gradient is None:
                    place.zero_()
                elif gradient.data_ptr() != place.data_ptr():
                    place.copy_(gradient)
            return losses

        return _joined(self._run(some, params, x))

    def _forward_pass(self, runner: Runner, given: Pass) -> tuple[Tensor, Tensor | None]:
        if not self._half:
            return runner.forward(given)
        with torch.autocast(self.device.type, torch.bfloat16):
            outputs, seen = runner.forward(given)
        return outputs.float(), None if seen is None else seen.float()

    def _named(self, params: Tensor) -> dict[str, Tensor]:
        """Parameters by name, from `[clients, dim]` or `[dim]`: views."""
        pieces = torch.split(params, self._sizes, dim=-1)
        named = zip(self.layout.parameters, pieces, strict=True)
        return {name: piece.view((*params.shape[:-1], *shape)) for (name, shape), piece in named}

    def state_dict(self, params: Tensor, buffers: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """One client's `params: [dim]` and `buffers` as a state dict that `load_state_dict` of the module takes."""
        values = self._named(params)
        values |= {name: buffers[name] for name in self.initial_buffers} | self._single.frozen
        aliases = {id(value): name for name, value in self.module.named_parameters()}
        aliases |= {id(value): name for name, value in self.module.named_buffers()}
        result = {}
        for name, own in self.module.state_dict(keep_vars=True).items():
            result[name] = values[aliases.get(id(own), name)].detach().cpu().clone()
        return result


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))
