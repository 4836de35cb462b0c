"""The layer table: where each layer of a model lies in its flat parameter vector, and how large its sketch is."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, groupby
from math import floor

from torch import nn


@dataclass(frozen=True)
class Layer:
    """One layer: a module's own trainable parameters, flattened together in registration order."""

    name: str
    offset: int
    size: int

    @property
    def pad(self) -> int:
        """Size rounded up to a power of two: the length the Hadamard transform works on."""
        return 1 << (self.size - 1).bit_length()

    def sketch(self, ratio: float) -> int:
        """m = max(1, floor(ratio · pad)) rows are kept."""
        return max(1, floor(ratio * self.pad))


@dataclass(frozen=True)
class Layout:
    """How a module's trainable parameters lie in a flat vector of length `dim`."""

    parameters: tuple[tuple[str, tuple[int, ...]], ...]
    """Names and shapes, in the order of the vector."""
    layers: tuple[Layer, ...]

    @property
    def dim(self) -> int:
        return sum(layer.size for layer in self.layers)

    def whole(self) -> Layout:
        """The same vector seen as one layer (sketching without `layerwise`)."""
        return Layout(self.parameters, (Layer("model", 0, self.dim),))

    def sketch_sizes(self, ratio: float, allocation: float = 1.0) -> tuple[int, ...]:
        """m of every layer: in proportion to its padded size, or to that to the power of `allocation`, at about the
        same total."""
        if allocation == 1:
            return tuple(layer.sketch(ratio) for layer in self.layers)
        total, powers = sum(layer.pad for layer in self.layers), [layer.pad**allocation for layer in self.layers]
        *_, whole = accumulate(powers)  # not `sum`, which rounds floats in another way from Python 3.12 on
        share = [ratio * total * power / whole for power in powers]
        return tuple(min(layer.pad, max(1, floor(m))) for layer, m in zip(self.layers, share, strict=True))


def flat_layout(module: nn.Module) -> Layout:
    """Layer table of a module.

    A layer is a module that owns trainable parameters. A tied parameter counts once, where it is first registered;
    frozen parameters and buffers have no place in the table, so they are never sent.
    """
    parameters, layers, offset = [], [], 0
    trained = ((name, value) for name, value in module.named_parameters() if value.requires_grad)
    for owner, own in groupby(trained, key=lambda named: named[0].rpartition(".")[0]):
        start = offset
        for name, value in own:
            parameters.append((name, tuple(value.shape)))
            offset += value.numel()
        if offset > start:
            layers.append(Layer(owner or type(module).__name__, start, offset - start))
    if not layers:
        raise ValueError(f"model: {type(module).__name__} has no trainable parameters, expected at least one to train")
    return Layout(tuple(parameters), tuple(layers))
