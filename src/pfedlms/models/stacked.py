"""Runs all clients together by `torch.func.vmap`, with own rules for layers that vmap runs slowly or not at all.

    linear        one batched product; on a GPU the gradient of the weight is written into the flat gradient
    embedding     rows of all tables at once; on a GPU the gradient is a product, which has a fixed order of sums
    layer norm    scaled and shifted in one pass
    recurrent     GRU and LSTM: all clients take each step in time together (`recurrent`)
    attention     one `F.scaled_dot_product_attention` over clients · batch, wherever it is called
    convolution   on [batch, clients · channels, height, width]: one kernel for all clients (`conv_gpu`), or
                  PyTorch's grouped convolution
    blocks        of convolution, batch norm, ReLU and 2 x 2 max pooling in a Sequential: norm, ReLU and pooling are one
                  pass (`conv_gpu`)
    batch norm    one call over clients · channels; vmap would scale and shift in separate passes
    group norm    one call over clients · groups, in the layout of the convolutions above
    max pooling   one call over clients · channels; vmap would copy the tensor into another layout first

The rules from convolution on are for GPUs: on a CPU clients run these layers one by one (see `forward.choose`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode

from pfedlms import rng
from pfedlms.backend import backend_of, has_triton
from pfedlms.errors import reason
from pfedlms.models import recurrent
from pfedlms.models.chain import stacked_linear
from pfedlms.models.runner import FunctionalModule, Pass, Runner, Values

# If a client has at least so many weights, or images are at most so small, cuDNN takes up to thirty times longer for a
# grouped convolution of [batch, channels, height, width] than with the channels last (H200, docs/performance.md).
_MANY_WEIGHTS = 1 << 20
_SMALL_IMAGE = 4
_FEW_ROWS = 1024  # the gradient of a smaller embedding on a GPU is a product with a matrix of zeros and ones


class Stacked(Runner):
    """Runs `torch.func.vmap` over models; with `gpu_rules` also with the rules of convolutions, batch and group norms
    and max poolings."""

    def __init__(self, functional: FunctionalModule, gpu_rules: bool) -> None:
        self._functional = functional
        self._places: Values = {}
        self._names = {layer: name for name, layer in functional.module.named_modules()}
        self._rules = list(self._find_rules(gpu_rules))

    def _find_rules(self, gpu_rules: bool) -> Iterator[tuple[nn.Module, Callable[..., Any]]]:
        """Layers and their rules; a layer whose `forward` the user has replaced has no rule."""
        for name, layer in self._functional.module.named_modules():
            if "forward" in vars(layer):
                continue
            if gpu_rules and type(layer) is nn.Sequential and has_triton():
                from pfedlms.models.conv_gpu import blocks_in, norms_with_relu

                layers = list(layer)
                blocks, pairs = blocks_in(layers), norms_with_relu(layers)
                if blocks or pairs:
                    yield layer, partial(self._sequence, layers, blocks, pairs)
            elif type(layer) is nn.Linear:
                yield layer, partial(self._linear, name, layer)
            elif type(layer) is nn.Embedding and _is_plain_table(layer):
                yield layer, partial(_embedding, layer)
            elif type(layer) is nn.LayerNorm and layer.elementwise_affine:
                yield layer, partial(_layer_norm, layer)
            elif recurrent.is_stackable(layer):
                yield layer, partial(_recurrent, layer)
            elif gpu_rules and type(layer) is nn.Conv2d and layer.padding_mode == "zeros":
                yield layer, partial(self._convolution, name, layer)
            elif gpu_rules and type(layer) in (nn.BatchNorm1d, nn.BatchNorm2d) and layer.affine:
                # A momentum of None means an average over all batches so far, whose weight is a value on the device.
                if layer.momentum is not None:
                    yield layer, partial(_batch_norm, layer)
            elif gpu_rules and type(layer) is nn.GroupNorm:
                yield layer, partial(_group_norm, layer)
            elif gpu_rules and type(layer) is nn.MaxPool2d and not layer.return_indices:
                yield layer, partial(_max_pool, layer)

    def forward(self, inputs: Pass) -> tuple[Tensor, Tensor | None]:
        self._functional.module.train(inputs.training)
        call = vmap(partial(self._functional.call, inputs.features), randomness="different")
        # Layers have the rules and the places of gradients only during this call: a module that is copied or saved must
        # not contain them.
        self._places = dict(inputs.places)
        for layer, rule in self._rules:
            layer.forward = rule
        try:
            with _Attention():
                assigned, outputs, *seen = call(inputs.params, inputs.buffers, inputs.x)
        finally:
            self._places = {}
            for layer, _ in self._rules:
                del layer.forward
        inputs.buffers.update(assigned)
        return outputs, seen[0] if inputs.features else None

    def _take_places(self, name: str, *own: str) -> tuple[Tensor | None, ...]:
        """The tensors into which a layer may write the gradients of its parameters `own`. Only the first use of a
        parameter gets one; if there are others, autograd adds them up, and the sum is copied there."""
        prefix = f"{name}." if name else ""
        return tuple(self._places.pop(prefix + parameter, None) for parameter in own)

    def _linear(self, name: str, layer: nn.Linear, x: Tensor) -> Tensor:
        places = self._take_places(name, "weight", "bias")
        return _apply_rule(F.linear, lambda *tensors: stacked_linear(*tensors, *places), 0, x, layer.weight, layer.bias)

    def _sequence(self, layers: list[Any], blocks: dict[int, list[Any]], pairs: set[int], x: Tensor) -> Tensor:
        """Apply the layers one after another; `blocks` (by the number of their first layer) and `pairs` of group norm
        and ReLU are one function each."""
        at = 0
        while at < len(layers):
            out = self._run_blocks(blocks[at], x) if at in blocks else None
            if out is not None:
                at, x = at + sum(3 + block.pool for block in blocks[at]), out
            elif at in pairs:
                at, x = at + 2, _group_norm(layers[at], x, relu=True)
            else:
                at, x = at + 1, layers[at](x)
        return x

    def _run_blocks(self, blocks: list[Any], x: Tensor) -> Tensor | None:
        """The output of the blocks, or None if there are no kernels for them."""
        from pfedlms.models import conv_gpu

        kind = conv_gpu.precision(x) if x.ndim == 4 else None
        with_gradient_in_evaluation = not blocks[0].norm.training and torch.is_grad_enabled()
        if kind is None or with_gradient_in_evaluation or not conv_gpu.images_fit(blocks, *x.shape[2:]):
            return None
        places: list[Tensor | None] = []
        tensors: list[Tensor | None] = []
        for block in blocks:
            norm = block.norm
            if norm.training and norm.num_batches_tracked is not None:
                norm.num_batches_tracked.add_(1)
            tensors += [block.convolution.weight, norm.weight, norm.bias, norm.running_mean, norm.running_var]
            places += self._take_places(self._names[block.convolution], "weight")
            places += self._take_places(self._names[norm], "weight", "bias")

        def stacked(x: Tensor, *tensors: Tensor) -> Tensor:
            out: Tensor = conv_gpu.StackedBlocks.apply(_merge_channels(x), blocks, kind, places, *tensors)  # type: ignore[no-untyped-call]
            return _split_channels(out, x)

        return _apply_rule(_only_under_vmap, stacked, 1, x, *tensors)

    def _convolution(self, name: str, layer: nn.Conv2d, x: Tensor) -> Tensor:
        if x.ndim != 4:
            return nn.Conv2d.forward(layer, x)
        (place,) = self._take_places(name, "weight")
        rule = partial(_stacked_convolution, layer, place)
        return _apply_rule(layer._conv_forward, rule, 1, x, layer.weight, layer.bias)


def _is_plain_table(layer: nn.Embedding) -> bool:
    return layer.padding_idx is None and layer.max_norm is None and not (layer.scale_grad_by_freq or layer.sparse)


class _StackedEmbedding(torch.autograd.Function):
    """Rows `[clients, …, width]` of the tables `[clients, rows, width]`, by `ids: [clients, …]`."""

    @staticmethod
    def forward(ctx: Any, ids: Tensor, table: Tensor) -> Tensor:
        flat = ids.flatten(1)
        ctx.save_for_backward(flat)
        ctx.shape = table.shape
        out = table[torch.arange(len(table), device=ids.device).unsqueeze(1), flat]
        return out.view(*ids.shape, table.shape[2])

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor | None, ...]:
        (ids,), (clients, rows, width) = ctx.saved_tensors, ctx.shape
        slope = slopes[0].reshape(clients, -1, width)
        if slope.is_cuda and rows <= _FEW_ROWS:
            chosen = ids.unsqueeze(1) == torch.arange(rows, device=ids.device).view(1, -1, 1)
            return None, torch.bmm(chosen.to(slope.dtype), slope)
        out = slope.new_zeros(clients * rows, width)
        places = (ids + rows * torch.arange(clients, device=ids.device).unsqueeze(1)).flatten()
        if slope.is_cuda:
            out.index_put_((places,), slope.flatten(0, 1), accumulate=True)  # sorts: a fixed order of sums
        else:
            out.index_add_(0, places, slope.flatten(0, 1))
        return None, out.view(clients, rows, width)


def _embedding(layer: nn.Embedding, x: Tensor) -> Tensor:
    return _apply_rule(F.embedding, _StackedEmbedding.apply, 0, x, layer.weight)


def _layer_norm(layer: nn.LayerNorm, x: Tensor) -> Tensor:
    shape, eps = layer.normalized_shape, layer.eps

    def norm(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        return F.layer_norm(x, shape, weight, bias, eps)

    def stacked(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        between = [1] * (x.ndim - weight.ndim)
        out, weight = norm(x), weight.view(len(weight), *between, *shape)
        return out * weight if bias is None else torch.addcmul(bias.view_as(weight), out, weight)

    return _apply_rule(norm, stacked, 0, x, layer.weight, layer.bias)


def _recurrent(layer: nn.GRU | nn.LSTM, x: Tensor, hx: Any = None) -> tuple[Tensor, Any]:
    if not isinstance(x, Tensor) or x.ndim != 3:
        return type(layer).forward(layer, x, hx)  # type: ignore[arg-type]
    first, cell = hx if isinstance(hx, tuple) else (hx, None)
    names = [f"{part}_l{number}" for number in range(layer.num_layers) for part in recurrent.PARTS]
    weights = [getattr(layer, name, None) for name in names]
    by_batch = x if layer.batch_first else x.transpose(0, 1)
    out, states, cells = _WithVmapRule.apply(  # type: ignore[no-untyped-call]
        _only_under_vmap, partial(recurrent.stacked_recurrent, layer), 0, by_batch, first, cell, *weights
    )
    out = out if layer.batch_first else out.transpose(0, 1)
    return out, (states, cells) if isinstance(layer, nn.LSTM) else states


class _Attention(TorchFunctionMode):
    """A context in which the attention of all clients is one call."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return _attention(*args, **kwargs)
        if func is F.multi_head_attention_forward and not kwargs.get("need_weights", True):
            # With weights it consists of products, which vmap knows; without, of an attention that is hidden from here.
            return func(*args, **kwargs | {"need_weights": True})[0], None
        return func(*args, **kwargs)


def _attention(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, **settings: Any) -> Tensor:
    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        if not q.is_cuda:
            return F.scaled_dot_product_attention(q, k, v, mask, **settings)
        with sdpa_kernel(SDPBackend.MATH):  # the other kernels sum gradients in no fixed order
            return F.scaled_dot_product_attention(q, k, v, mask, **settings)

    def stacked(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        if mask is not None:
            mask = mask.view(len(mask), *[1] * (q.ndim - mask.ndim), *mask.shape[1:])
            mask = mask.expand(-1, q.shape[1], *mask.shape[2:]).flatten(0, 1)
        out = attend(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), mask)
        return out.view(*q.shape[:2], *out.shape[1:])

    if q.ndim < 3 or settings.get("dropout_p"):
        return attend(q, k, v, attn_mask)
    return _apply_rule(attend, stacked, 0, q, k, v, attn_mask)


def _batch_norm(layer: _BatchNorm, x: Tensor) -> Tensor:
    if layer.training and layer.track_running_stats and layer.num_batches_tracked is not None:
        layer.num_batches_tracked.add_(1)
    uses_statistics = not layer.training or layer.track_running_stats
    statistics = (layer.running_mean, layer.running_var) if uses_statistics else (None, None)

    def norm(x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor | None, var: Tensor | None) -> Tensor:
        assert layer.momentum is not None  # see `_find_rules`
        training = layer.training or mean is None
        return F.batch_norm(x, mean, var, weight, bias, training, layer.momentum, layer.eps)

    return _apply_rule(norm, partial(_fold_clients, norm), 1, x, layer.weight, layer.bias, *statistics)


def _group_norm(layer: nn.GroupNorm, x: Tensor, relu: bool = False) -> Tensor:
    """Group norm, with a ReLU after it if `relu`."""

    def norm(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        models = x.shape[1] // layer.num_channels
        out = F.group_norm(x, models * layer.num_groups, weight, bias, layer.eps)
        return F.relu(out) if relu else out

    def stacked(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        if backend_of(x) == "gpu" and x.ndim == 5 and weight is not None and bias is not None:
            from pfedlms.models import conv_gpu

            if conv_gpu.groups_fit(x.shape[2], x.shape[3] * x.shape[4]):
                out = conv_gpu.StackedGroupNorm.apply(  # type: ignore[no-untyped-call]
                    _merge_channels(x), weight, bias, layer.num_groups, layer.eps, relu
                )
                return _split_channels(out, x)
        return _fold_clients(norm, x, weight, bias)

    return _apply_rule(norm, stacked, 1, x, layer.weight, layer.bias)


def _max_pool(layer: nn.MaxPool2d, x: Tensor) -> Tensor:
    pool = partial(nn.MaxPool2d.forward, layer)
    return _apply_rule(pool, partial(_fold_clients, pool), 1, x) if x.ndim == 4 else pool(x)


def _only_under_vmap(*tensors: Tensor | None) -> Tensor:
    """In place of `plain`, for layers with parameters of each client: under vmap they always take the rule."""
    raise NotImplementedError


class _WithVmapRule(torch.autograd.Function):
    """`plain(x, *rest)` for one model; under vmap over models `rule(x, *rest)` for all of them at once. Clients are in
    axis `axis` of `x` and of the outputs, and in the first axis of `rest`. Only used inside vmap."""

    @staticmethod
    def forward(plain: Callable[..., Tensor], rule: Any, axis: int, *tensors: Tensor | None) -> Tensor:
        return plain(*tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Save nothing: under vmap the rule runs, and autograd records the functions that it calls."""

    @staticmethod
    def vmap(info: Any, dims: Any, plain: Any, rule: Any, axis: int, *tensors: Tensor | None) -> tuple[Tensor, int]:
        axes = (axis, *[0] * (len(tensors) - 1))
        return rule(*map(partial(_move_clients, info.batch_size), tensors, dims[3:], axes)), axis


def _apply_rule(
    plain: Callable[..., Tensor], rule: Callable[..., Tensor], axis: int, *tensors: Tensor | None
) -> Tensor:
    out: Tensor = _WithVmapRule.apply(plain, rule, axis, *tensors)  # type: ignore[no-untyped-call]
    return out


def _move_clients(clients: int, value: Tensor | None, dim: int | None, to: int) -> Tensor | None:
    """`value` with its clients in axis `to` instead of `dim`; with `dim` None all clients share it, and it is repeated
    for each."""
    if value is None:
        return None
    if dim is not None:
        return value.movedim(dim, to)
    return value.unsqueeze(to).expand(*value.shape[:to], clients, *value.shape[to:])


def _fold_clients(operation: Callable[..., Tensor], x: Tensor, *rest: Tensor | None) -> Tensor:
    """Apply `operation` once, to `x` as `[batch, clients · channels, …]` and to `rest` as `[clients · channels, …]`."""
    flat = [None if value is None else value.flatten(0, 1) for value in rest]
    return _split_channels(operation(x.flatten(1, 2), *flat), x)


def _merge_channels(x: Tensor) -> Tensor:
    """`[batch, clients, channels, height, width]` → `[batch, clients · channels, height, width]`, channels last in
    memory."""
    return x.permute(0, 3, 4, 1, 2).flatten(3).permute(0, 3, 1, 2)


def _split_channels(out: Tensor, x: Tensor) -> Tensor:
    """`[batch, clients · channels, …]` → `[batch, clients, channels, …]`, with as many clients as `x` has."""
    return out.view(len(out), x.shape[1], -1, *out.shape[2:])


def _stacked_convolution(
    layer: nn.Conv2d, place: Tensor | None, x: Tensor, weight: Tensor, bias: Tensor | None
) -> Tensor:
    clients, merged, out = len(weight), _merge_channels(x) if x.is_cuda else x.flatten(1, 2), None
    if backend_of(x) == "gpu":
        from pfedlms.models.conv_gpu import convolution

        out = convolution(layer, merged, weight, place)
    if out is None:
        flat = weight.flatten(0, 1)
        if flat.numel() >= clients * _MANY_WEIGHTS or merged.shape[2] * merged.shape[3] <= _SMALL_IMAGE:
            merged, flat = (value.contiguous(memory_format=torch.channels_last) for value in (merged, flat))
        out = F.conv2d(merged, flat, None, layer.stride, layer.padding, layer.dilation, clients * layer.groups)
    if bias is not None:
        out = out + bias.flatten().view(1, -1, 1, 1)
    return _split_channels(out, x)


def copied(functional: FunctionalModule) -> FunctionalModule:
    """The same with a copy of the module, because what it stores in attributes under vmap can be neither copied nor
    saved. If the module cannot be copied, itself."""
    try:
        return FunctionalModule(copy.deepcopy(functional.module))
    except Exception:  # whatever parts of it may raise
        return functional


def why_not_stackable(functional: FunctionalModule, params: Values, sample: Tensor) -> str | None:
    """Why torch.func cannot vectorise a module, or None. Only a trial shows this: both passes of two steps of a copy,
    with one model's parameters, on two samples of `sample: [batch, …]`, and without `gpu_rules`, whose kernels would be
    compiled only for the trial."""
    x, values = sample[[0, -1]], (params.items(), functional.module.named_buffers())
    params, buffers = ({name: torch.stack([value.detach()] * 2) for name, value in items} for items in values)
    leaves = [value.requires_grad_() for value in params.values()]
    tried = Stacked(copied(functional), gpu_rules=False)
    try:
        with torch.enable_grad(), rng.forked_generators(x.device):
            for _ in range(2):
                # In training mode, because some operations that vmap refuses are used only there.
                inputs = Pass(params, {}, buffers, torch.stack([x, x]), training=True, features=False)
                outputs, _ = tried.forward(inputs)
                torch.autograd.grad(outputs, leaves, torch.ones_like(outputs), allow_unused=True)
    except RuntimeError as error:
        return reason(error)
    return None
