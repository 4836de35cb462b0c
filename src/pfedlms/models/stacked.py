"""Layers of many models at once, where `torch.func.vmap` alone would go a roundabout way.

    linear        one batched product; the gradient of the weight in the weight's own layout, where it pays straight
                  into the flat gradient
    convolution   on [batch, clients · channels, height, width]: one kernel for all clients (`triton_conv`), or
                  PyTorch's grouped convolution
    batch norm    one call over clients · channels; vmap would scale and shift in passes of their own
    max pooling   on clients · channels as well; vmap would turn the tensor round first

Convolution, norm and pooling are for GPUs: on a CPU clients run them one by one (see `cohort`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from pfedlms.backend import backend_of
from pfedlms.models.streams import beside

# cuDNN takes grouped convolutions of [batch, channels, height, width] up to thirty times longer than those with the
# channels last where a client's weights are this many or images this small (H200, docs/performance.md).
_WIDE_WEIGHTS = 1 << 20
_SMALL_IMAGE = 4


class _StackedLinear(torch.autograd.Function):
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

        of_bias, (of_x, of_weight) = beside(sums, products, x.device, "sums")
        return of_x, of_weight, of_bias, None, None


class _Folded(torch.autograd.Function):
    """`operation(x, *rest)` of one model; under `torch.func.vmap` over models the same once for all: on `x: [batch,
    clients · channels, …]` and on `rest` with clients · channels in the first axis. Only used inside vmap."""

    generate_vmap_rule = False

    @staticmethod
    def forward(operation: Callable[..., Tensor], x: Tensor, *rest: Tensor | None) -> Tensor:
        return operation(x, *rest)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Nothing to save: under vmap the rule below runs instead, and autograd sees the functions it calls."""

    @staticmethod
    def vmap(
        info: Any, dims: tuple[int | None, ...], operation: Callable[..., Tensor], x: Tensor, *rest: Tensor | None
    ) -> tuple[Tensor, int]:
        clients = info.batch_size
        wide = _moved(clients, x, dims[1], 1).flatten(1, 2)
        others = [
            None if value is None else _moved(clients, value, dim, 0).flatten(0, 1)
            for value, dim in zip(rest, dims[2:], strict=True)
        ]
        out = operation(wide, *others)
        return out.view(len(out), clients, -1, *out.shape[2:]), 1


class _Linear(torch.autograd.Function):
    """`F.linear` with a rule for `torch.func.vmap` over models; only used inside vmap."""

    generate_vmap_rule = False

    @staticmethod
    def forward(places: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x, weight, bias)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """As in `_Folded`."""

    @staticmethod
    def vmap(
        info: Any, dims: tuple[int | None, ...], places: Any, x: Tensor, weight: Tensor, bias: Tensor | None
    ) -> tuple[Tensor, int]:
        clients = info.batch_size
        x, weight = _moved(clients, x, dims[1], 0), _moved(clients, weight, dims[2], 0)
        bias = None if bias is None else _moved(clients, bias, dims[3], 0)
        flat = x.reshape(clients, -1, x.shape[-1])
        out: Tensor = _StackedLinear.apply(flat, weight, bias, *places)  # type: ignore[no-untyped-call]
        return out.view(*x.shape[:-1], weight.shape[1]), 0


class _Convolution(torch.autograd.Function):
    """`F.conv2d` of a layer, likewise."""

    generate_vmap_rule = False

    @staticmethod
    def forward(layer: nn.Conv2d, place: Tensor | None, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.conv2d(x, weight, bias, layer.stride, layer.padding, layer.dilation, layer.groups)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """As in `_Folded`."""

    @staticmethod
    def vmap(
        info: Any, dims: tuple[int | None, ...], layer: nn.Conv2d, place: Tensor | None,
        x: Tensor, weight: Tensor, bias: Tensor | None,
    ) -> tuple[Tensor, int]:  # fmt: skip
        clients = info.batch_size
        wide, weight = _moved(clients, x, dims[2], 1).flatten(1, 2), _moved(clients, weight, dims[3], 0)
        out, pad = None, _padding_around(layer)
        if pad is not None and backend_of(wide) == "gpu":
            from pfedlms.models import conv_gpu

            if conv_gpu.takes(wide, weight):
                out = conv_gpu.StackedConvolution.apply(wide, weight, pad, place)  # type: ignore[no-untyped-call]
        if out is None:
            flat = weight.flatten(0, 1)
            if flat.numel() >= clients * _WIDE_WEIGHTS or wide.shape[2] * wide.shape[3] <= _SMALL_IMAGE:
                wide, flat = (value.contiguous(memory_format=torch.channels_last) for value in (wide, flat))
            out = F.conv2d(wide, flat, None, layer.stride, layer.padding, layer.dilation, clients * layer.groups)
        if bias is not None:
            out = out + _moved(clients, bias, dims[4], 0).flatten().view(1, -1, 1, 1)
        return out.view(len(out), clients, -1, *out.shape[2:]), 1


def _padding_around(layer: nn.Conv2d) -> tuple[int, int] | None:
    """Rows and columns of zeros at each side, if the layer is one that the Triton kernels know."""
    plain = layer.stride == layer.dilation == (1, 1) and layer.groups == 1 and not isinstance(layer.padding, str)
    if not plain:
        return None
    around = (int(layer.padding[0]), int(layer.padding[1]))
    return around if all(a < k for a, k in zip(around, layer.kernel_size, strict=True)) else None


def _moved(clients: int, value: Tensor, dim: int | None, to: int) -> Tensor:
    """`value` with its clients in axis `to`; one that all clients share is repeated for each."""
    return (
        value.unsqueeze(to).expand(*value.shape[:to], clients, *value.shape[to:])
        if dim is None
        else value.movedim(dim, to)
    )


class StackedLayers:
    """Makes plain linear layers (on a GPU also convolutions, batch norms and max poolings) of a module use the rules
    above within `on(…)`, which must surround a vmap over models."""

    def __init__(self, module: nn.Module, folds: bool) -> None:
        self._places: dict[str, Tensor] = {}
        self._rules: list[tuple[nn.Module, Callable[..., Tensor]]] = []
        for name, layer in module.named_modules():
            if "forward" in vars(layer):  # somebody's own
                continue
            if type(layer) is nn.Linear:
                self._rules.append((layer, partial(self._linear, name, layer)))
            elif folds and type(layer) is nn.Conv2d and layer.padding_mode == "zeros":
                self._rules.append((layer, partial(self._convolution, name, layer)))
            elif folds and type(layer) in (nn.BatchNorm1d, nn.BatchNorm2d) and _plain_norm(layer):
                self._rules.append((layer, partial(self._batch_norm, layer)))
            elif folds and type(layer) is nn.MaxPool2d and not layer.return_indices:
                self._rules.append((layer, partial(self._max_pool, layer)))

    @contextmanager
    def on(self, places: Mapping[str, Tensor]) -> Iterator[None]:
        """Within it layers use the rules; `places` are where gradients of parameters may be written, by name."""
        self._places = dict(places)
        # Only for as long as it takes: a module that is copied or saved must have none of this in it.
        for layer, rule in self._rules:
            layer.forward = rule
        try:
            yield
        finally:
            self._places = {}
            for layer, _ in self._rules:
                del layer.forward

    def _taken(self, name: str, *own: str) -> tuple[Tensor | None, ...]:
        """Places for a layer's gradients. The first use of a parameter takes its place; autograd adds up the others and
        the sum is copied there."""
        prefix = f"{name}." if name else ""
        return tuple(self._places.pop(prefix + each, None) for each in own)

    def _linear(self, name: str, layer: nn.Linear, x: Tensor) -> Tensor:
        places = self._taken(name, "weight", "bias")
        out: Tensor = _Linear.apply(places, x, layer.weight, layer.bias)  # type: ignore[no-untyped-call]
        return out

    def _convolution(self, name: str, layer: nn.Conv2d, x: Tensor) -> Tensor:
        if x.ndim != 4:
            return nn.Conv2d.forward(layer, x)
        (place,) = self._taken(name, "weight")
        out: Tensor = _Convolution.apply(layer, place, x, layer.weight, layer.bias)  # type: ignore[no-untyped-call]
        return out

    def _batch_norm(self, layer: _BatchNorm, x: Tensor) -> Tensor:
        if layer.training and layer.track_running_stats and layer.num_batches_tracked is not None:
            layer.num_batches_tracked.add_(1)
        kept = not layer.training or layer.track_running_stats
        statistics = (layer.running_mean, layer.running_var) if kept else (None, None)
        return _fold(partial(_norm, layer), x, layer.weight, layer.bias, *statistics)

    def _max_pool(self, layer: nn.MaxPool2d, x: Tensor) -> Tensor:
        pool = partial(nn.MaxPool2d.forward, layer)
        return _fold(pool, x) if x.ndim == 4 else pool(x)


def _fold(operation: Callable[..., Tensor], x: Tensor, *rest: Tensor | None) -> Tensor:
    out: Tensor = _Folded.apply(operation, x, *rest)  # type: ignore[no-untyped-call]
    return out


def _plain_norm(layer: _BatchNorm) -> bool:
    """A momentum of None means an average over all batches so far, whose weight is a value on the device."""
    return layer.affine and layer.momentum is not None


def _norm(
    layer: _BatchNorm, x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor | None, var: Tensor | None
) -> Tensor:
    training = layer.training or mean is None
    assert layer.momentum is not None  # see `_plain_norm`
    return F.batch_norm(x, mean, var, weight, bias, training, layer.momentum, layer.eps)


_POINTWISE = (nn.ReLU, nn.LeakyReLU, nn.ELU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.Softplus, nn.Identity)


class Chain:
    """A plain chain of linear and pointwise layers, run on all clients without `torch.func.vmap`, whose overhead is as
    long as a small layer's arithmetic; the operations, and so the bits, are the same."""

    def __init__(self, layers: list[tuple[str, nn.Module]]) -> None:
        self._layers = layers

    @staticmethod
    def of(module: nn.Module, trained: set[str]) -> Chain | None:
        """The chain a module is, or None; all its parameters must be trained, and none twice."""
        layers = [(name, layer) for name, layer in module.named_modules() if type(layer) is not nn.Sequential]
        names = [f"{name}.{own}" if name else own for name, layer in layers for own, _ in layer.named_parameters()]
        plain = all(
            type(layer) in (nn.Linear, *_POINTWISE)
            or (type(layer) is nn.Flatten and (layer.start_dim, layer.end_dim) == (1, -1))
            for _, layer in layers
        )
        hooked = any(
            part._forward_hooks or part._forward_pre_hooks or part._backward_hooks or part._backward_pre_hooks
            or "forward" in vars(part)
            for part in module.modules()
        )  # fmt: skip
        repeated = len(list(module.named_modules(remove_duplicate=False))) > len(list(module.modules()))
        return Chain(layers) if plain and not hooked and not repeated and trained == set(names) else None

    def __call__(
        self, named: Mapping[str, Tensor], places: Mapping[str, Tensor], x: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Outputs, and the features: what enters the last linear layer."""
        features = None
        for name, layer in self._layers:
            if isinstance(layer, nn.Flatten):
                x = x.flatten(2)
            elif isinstance(layer, nn.Linear):
                own = [f"{name}.{part}" if name else part for part in ("weight", "bias")]
                features, shape = x, x.shape
                flat = x.reshape(len(x), -1, shape[-1])
                x = _StackedLinear.apply(  # type: ignore[no-untyped-call]
                    flat, named[own[0]], named.get(own[1]), *map(places.get, own)
                ).view(*shape[:-1], layer.out_features)
            else:
                x = layer(x)
        return x, features
