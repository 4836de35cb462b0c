"""The layer table: where each layer of a model lies in its flat parameter vector, and how large its sketch is."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, groupby
from math import floor

from torch import nn

from pfedlms.checks import check_integer, check_number


@dataclass(frozen=True)
class Layer:
    """One layer: a module's own trainable parameters, flattened together in registration order.

    >>> Layer("weights", offset=0, size=1000).pad
    1024
    """

    name: str
    offset: int
    size: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "offset", check_integer(f"layer {self.name!r}: offset", self.offset, 0))
        object.__setattr__(self, "size", check_integer(f"layer {self.name!r}: size", self.size, 1))

    @property
    def pad(self) -> int:
        """Size rounded up to a power of two: the length of the Hadamard transform."""
        return 1 << (self.size - 1).bit_length()

    def sketch(self, ratio: float) -> int:
        """m = max(1, floor(ratio · pad)), the sketch size of this layer."""
        return max(1, floor(ratio * self.pad))


@dataclass(frozen=True, repr=False)
class Layout:
    """How a module's trainable parameters lie in a flat vector of length `dim`; layers follow one another without gaps.

    >>> Layout((), (Layer("weights", 0, 1000), Layer("biases", 1000, 10)))
    Layout(2 layers, 1,010 parameters)
    >>> Layout((), (Layer("weights", 0, 1000), Layer("biases", 990, 10)))
    Traceback (most recent call last):
    ValueError: layers: 'biases' begins at 990, expected 1000, where the one before it ends; correct its offset
    """

    parameters: tuple[tuple[str, tuple[int, ...]], ...]
    """Names and shapes, in the order of the vector."""
    layers: tuple[Layer, ...]

    def __post_init__(self) -> None:
        end = 0
        for layer in self.layers:
            if layer.offset != end:
                raise ValueError(
                    f"layers: {layer.name!r} begins at {layer.offset}, expected {end}, where the one before it ends; "
                    "correct its offset"
                )
            end += layer.size

    def __repr__(self) -> str:
        return f"Layout({len(self.layers)} layers, {self.dim:,} parameters)"

    @classmethod
    def of_vector(cls, size: int) -> Layout:
        """A layout of one layer, a vector of `size` entries."""
        return cls((), (Layer("vector", 0, check_integer("size", size, 1)),))

    @property
    def dim(self) -> int:
        return sum(layer.size for layer in self.layers)

    def as_one_layer(self) -> Layout:
        """The same vector as one layer, for sketches that are not layer by layer."""
        return Layout(self.parameters, (Layer("model", 0, self.dim),))

    def sketch_sizes(self, ratio: float, allocation: float = 1.0) -> tuple[int, ...]:
        """m of every layer, in proportion to its padded size to the power of `allocation`; the total is about the same
        for every allocation."""
        ratio = check_number("ratio", ratio, 0, 1, "it is the share of a layer's padded size that is kept")
        if allocation == 1:
            return tuple(layer.sketch(ratio) for layer in self.layers)
        if not 0 <= allocation <= 8:
            raise ValueError(f"allocation: got {allocation!r}, expected 0 to 8; 1 is the same ratio for every layer")
        total, powers = sum(layer.pad for layer in self.layers), [layer.pad**allocation for layer in self.layers]
        *_, sum_of_powers = accumulate(powers)  # not `sum`, which rounds floats in another way from Python 3.12 on
        share = [ratio * total * power / sum_of_powers for power in powers]
        return tuple(min(layer.pad, max(1, floor(m))) for layer, m in zip(self.layers, share, strict=True))


def flat_layout(module: nn.Module) -> Layout:
    """The layer table of a module.

    A layer is a module that owns trainable parameters. A tied parameter counts once, where it is first registered.
    Frozen parameters and buffers are not in the table, so they are never sent.
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
