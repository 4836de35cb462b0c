"""Convolutional layers of many models at once on a GPU, as functions of autograd: a single convolution, and blocks of
convolution, batch norm, ReLU and 2 x 2 max pooling. The kernels are in `products_gpu` and `norm_gpu`.

Inputs and outputs are images `[batch, clients · channels, height, width]`; inside they are matrices with the channels
last.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pfedlms.models import norm_gpu
from pfedlms.models.norm_gpu import groups_fit as groups_fit
from pfedlms.models.pool_cpu import is_2x2_max_pool
from pfedlms.models.products_gpu import (
    ROWS_OF_A_TILE,
    Shape,
    convolved,
    prepared,
    shape_of,
    turn_back,
    turned_weights,
    weighed,
)
from pfedlms.models.runner import hooks_forward

Both = tuple[Tensor, Tensor]
"""A matrix `[rows, channels]` for products, and the same in the layout for gradients of weights: `[channels, rows]` in
float32."""


def _matrix(image: Tensor) -> Tensor:
    return image.permute(0, 2, 3, 1).reshape(-1, image.shape[1]).contiguous()


def _image(matrix: Tensor, batch: int, size: tuple[int, int]) -> Tensor:
    return matrix.view(batch, *size, -1).permute(0, 3, 1, 2)


def _of_input(slope: Both, weights: Both, shape: Shape) -> Tensor:
    half = weights[0].dtype != torch.float32
    out, _, _ = convolved(slope[0], weights[0] if half else weights[1], shape.turned(), weights[0].dtype, back=half)
    return out


def _of_weight(x: Both, slope: Both, shape: Shape, place: Tensor | None) -> Tensor:
    size = shape.clients, shape.outputs, shape.inputs, *shape.kernel
    out = torch.empty(size, device=x[0].device) if place is None else place
    turn_back(weighed(x[1], slope[1], shape, x[0].dtype == torch.float32), out)
    return out


class StackedConvolution(torch.autograd.Function):
    """y[k] = x[k] * weight[k] with zeros around the image: `x: [batch, clients · C, height, width]`, `weight: [clients,
    O, C, height, width]`; the gradient of the weight is written into `place`, if there is one."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, pad: tuple[int, int], stride: int, kind: torch.dtype, place: Tensor | None
    ) -> Tensor:
        ctx.conv, ctx.kind, ctx.place = shape_of(x.shape, weight.shape, pad, stride), kind, place
        full = kind == torch.float32
        given = prepared(_matrix(x), kind, full and ctx.needs_input_grad[1])
        weights = turned_weights(weight, kind, full and ctx.needs_input_grad[0])
        ctx.save_for_backward(*given, *weights)
        out, _, _ = convolved(given[0], weights[0], ctx.conv, kind)
        return _image(out, ctx.conv.batch, ctx.conv.size)

    @staticmethod
    def backward(ctx: Any, *outputs: Tensor) -> tuple[Tensor | None, ...]:
        *given, turned, back = ctx.saved_tensors
        slope = prepared(_matrix(outputs[0]), ctx.kind, ctx.kind == torch.float32)
        of_x = of_weight = None
        if ctx.needs_input_grad[0]:
            image = (ctx.conv.height, ctx.conv.width)
            of_x = _image(_of_input(slope, (turned, back), ctx.conv), ctx.conv.batch, image)
        if ctx.needs_input_grad[1]:
            of_weight = _of_weight((given[0], given[1]), slope, ctx.conv, ctx.place)
        return of_x, of_weight, None, None, None, None


class Block(NamedTuple):
    """Convolution, batch norm and ReLU, with pooling or without."""

    convolution: nn.Conv2d
    norm: nn.BatchNorm2d
    pool: bool


class Tensors(NamedTuple):
    """A block's parameters and running statistics of all clients: `[clients, …]`."""

    weight: Tensor
    gamma: Tensor
    beta: Tensor
    mean: Tensor | None
    var: Tensor | None


class StackedBlocks(torch.autograd.Function):
    """Several blocks, with `Tensors` for each. Running statistics are updated in place. Gradients are written into
    `places` (weight, γ and β of each block), unless that is None."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, blocks: Sequence[Block], kind: torch.dtype, places: Sequence[Tensor | None], *flat: Tensor
    ) -> Tensor:
        tensors = [Tensors(*flat[5 * number : 5 * number + 5]) for number in range(len(blocks))]
        full, image, kept, shapes = kind == torch.float32, x.shape, [], []
        given = prepared(_matrix(x), kind, full)
        for number, (block, own) in enumerate(zip(blocks, tensors, strict=True)):
            shape = shape_of(image, own.weight.shape, _pair(block.convolution.padding))
            weights = turned_weights(own.weight, kind, full and (number > 0 or ctx.needs_input_grad[0]))
            z, means, squares = convolved(given[0], weights[0], shape, kind, statistics=block.norm.training)
            gamma, beta = own.gamma.flatten(), own.beta.flatten()
            if means is None or squares is None:
                assert own.mean is not None
                assert own.var is not None
                mean, scale = own.mean.flatten(), torch.rsqrt(own.var.flatten() + block.norm.eps)
            else:
                running = None if own.mean is None or own.var is None else (own.mean, own.var)
                eps, momentum = block.norm.eps, block.norm.momentum or 0.0
                mean, scale = norm_gpu.finish(means, squares, shape.rows, ROWS_OF_A_TILE, eps, momentum, running)
            kept += [*given, *weights, z, mean, scale, gamma, beta]
            shapes.append(shape)
            more = number + 1 < len(blocks)
            given = norm_gpu.applied(z, mean, scale, gamma, beta, shape.size, block.pool, kind, more, more and full)
            size = (shape.size[0] // 2, shape.size[1] // 2) if block.pool else shape.size
            image = torch.Size((shape.batch, len(gamma), *size))
        ctx.save_for_backward(*kept)
        ctx.shapes, ctx.pools, ctx.places, ctx.kind = shapes, [block.pool for block in blocks], places, kind
        return _image(given[0], image[0], (image[2], image[3]))

    @staticmethod
    def backward(ctx: Any, *outputs: Tensor) -> tuple[Tensor | None, ...]:
        slope, full = _matrix(outputs[0]), ctx.kind == torch.float32
        found: list[Tensor | None] = []
        for number in reversed(range(len(ctx.shapes))):
            shape, (to_weight, *to_norm) = ctx.shapes[number], ctx.places[3 * number : 3 * number + 3]
            x, other, turned, back, z, mean, scale, gamma, beta = ctx.saved_tensors[9 * number : 9 * number + 9]
            if None in to_norm:
                to_norm = [torch.empty(shape.clients, shape.outputs, device=z.device) for _ in range(2)]
            both = norm_gpu.back(
                z, slope, mean, scale, gamma, beta, shape.size, ctx.pools[number], to_norm[0], to_norm[1], full
            )
            found = [_of_weight((x, other), both, shape, to_weight), *to_norm, None, None, *found]
            if number or ctx.needs_input_grad[0]:
                slope = _of_input(both, (turned, back), shape)
        first = ctx.shapes[0]
        of_x = _image(slope, first.batch, (first.height, first.width)) if ctx.needs_input_grad[0] else None
        return of_x, None, None, None, *found


class StackedGroupNorm(torch.autograd.Function):
    """Group norm of `x: [batch, clients · C, height, width]` with γ and β `[clients, C]`, and a ReLU after it if
    `relu`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gamma: Tensor, beta: Tensor, groups: int, eps: float, relu: bool) -> Tensor:
        z, weight, shift, size = _matrix(x), gamma.flatten(), beta.flatten(), x.shape[2] * x.shape[3]
        out, mean, scale = norm_gpu.group_norm(z, weight, shift, size, gamma.shape[1], groups, eps, relu)
        ctx.save_for_backward(z, weight, shift, mean, scale)
        ctx.image, ctx.channels, ctx.groups, ctx.relu = x.shape, gamma.shape[1], groups, relu
        return _image(out, x.shape[0], (x.shape[2], x.shape[3]))

    @staticmethod
    def backward(ctx: Any, *outputs: Tensor) -> tuple[Tensor | None, ...]:
        (z, *saved), size = ctx.saved_tensors, ctx.image[2] * ctx.image[3]
        settings = size, ctx.channels, ctx.groups, ctx.relu
        found = norm_gpu.group_norm_back(z, _matrix(outputs[0]), *saved, *settings)  # type: ignore[call-arg]
        of_gamma, of_beta = (each.view(-1, ctx.channels) for each in found[1:])
        return _image(found[0], ctx.image[0], (ctx.image[2], ctx.image[3])), of_gamma, of_beta, None, None, None


def _pair(size: Any) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else (size[0], size[1])


def precision(x: Tensor) -> torch.dtype | None:
    """The type in which to compute a convolution of `x`: float32, which means TF32, or bfloat16 under autocast; None if
    there are no kernels for it."""
    if not x.is_cuda or torch.cuda.get_device_capability(x.device) < (8, 0):
        return None
    if torch.is_autocast_enabled("cuda"):
        return torch.bfloat16 if torch.get_autocast_dtype("cuda") == torch.bfloat16 else None
    # PyTorch's setting, by its newer name if it has one: such versions refuse a mix of both names.
    setting = getattr(getattr(torch.backends.cudnn, "conv", None), "fp32_precision", "none")
    in_tf32 = torch.backends.cudnn.allow_tf32 if setting == "none" else setting == "tf32"
    return torch.float32 if in_tf32 and x.dtype == torch.float32 else None


def is_supported(layer: nn.Module) -> bool:
    """Whether there are kernels for a convolution: one stride both ways, no dilation, no groups, and less padding than
    the kernel is wide."""
    if type(layer) is not nn.Conv2d or layer.padding_mode != "zeros" or isinstance(layer.padding, str):
        return False
    narrow = all(pad < size for pad, size in zip(layer.padding, layer.kernel_size, strict=True))
    return narrow and layer.stride[0] == layer.stride[1] and layer.dilation == (1, 1) and layer.groups == 1


def convolution(layer: nn.Conv2d, x: Tensor, weight: Tensor, place: Tensor | None) -> Tensor | None:
    """`StackedConvolution` where it computes what PyTorch would and there are kernels for the layer; otherwise None."""
    kind = precision(x) if is_supported(layer) and weight.dtype == torch.float32 else None
    if kind is None:
        return None
    out: Tensor = StackedConvolution.apply(x, weight, _pair(layer.padding), layer.stride[0], kind, place)
    return out


def blocks_in(layers: Sequence[nn.Module]) -> dict[int, list[Block]]:
    """Runs of blocks among the layers of a Sequential, by the number of the first layer. Layers with hooks, or whose
    `forward` the user has replaced, belong to no block."""
    found: dict[int, list[Block]] = {}
    at = 0
    while at < len(layers):
        start = at
        while block := _block_at(layers, at):
            found.setdefault(start, []).append(block)
            at += 3 + block.pool
        at += at == start
    return found


def norms_with_relu(layers: Sequence[nn.Module]) -> set[int]:
    """Numbers of layers that are a group norm with ReLU after it."""
    pairs = enumerate(pairwise(layers))
    wanted = (nn.GroupNorm, nn.ReLU)
    return {at for at, pair in pairs if tuple(map(type, pair)) == wanted and not any(map(_is_changed, pair))}


def _block_at(layers: Sequence[nn.Module], at: int) -> Block | None:
    if len(layers) < at + 3 or any(map(_is_changed, layers[at : at + 4])):
        return None
    conv, norm, relu, *rest = layers[at : at + 4]
    if not is_supported(conv) or type(norm) is not nn.BatchNorm2d or type(relu) is not nn.ReLU:
        return None
    assert isinstance(conv, nn.Conv2d)
    if conv.bias is not None or conv.stride != (1, 1) or not norm.affine or norm.momentum is None:
        return None
    return Block(conv, norm, pool=bool(rest) and is_2x2_max_pool(rest[0]))


def _is_changed(layer: nn.Module) -> bool:
    """Whether the user has replaced a layer's `forward` or registered hooks."""
    return "forward" in vars(layer) or hooks_forward(layer)


def images_fit(blocks: Sequence[Block], height: int, width: int) -> bool:
    """Whether images of this size can be halved where the blocks pool them."""
    for block in blocks:
        convolution = block.convolution
        weight = (1, 1, 1, *convolution.kernel_size)
        height, width = shape_of((1, 1, height, width), weight, _pair(convolution.padding)).size
        if block.pool:
            if height % 2 or width % 2:
                return False
            height, width = height // 2, width // 2
    return min(height, width) > 0
