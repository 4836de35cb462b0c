"""The sketch Φθ of models, layer by layer, and its adjoint. The definition in torch is here; `cpu` and `gpu` have the
kernels.

All of them give the same bits, except the adjoint on a GPU, whose stages run in another order. Under autograd the
definition runs, which can be differentiated.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate
from math import sqrt
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from pfedlms import rng
from pfedlms.backend import backend_of, is_differentiated, to_device
from pfedlms.checks import Array, Values, as_tensor, check_floats, check_integer, like_input
from pfedlms.models.layout import Layout
from pfedlms.quantise import pack_signs, root_mean_squares
from pfedlms.sketch import cpu
from pfedlms.sketch.hadamard import fwht_, fwht_reference

_EPOCHS = 32  # so many epochs have their constants hashed together

__all__ = ["Sketch", "fwht_", "fwht_reference", "sketch_of_round"]


class Place(NamedTuple):
    """Where one layer lies: its parameters are [begin, end) of a model, padded to `pad`; its part of a sketch is
    [start, stop)."""

    begin: int
    end: int
    pad: int
    start: int
    stop: int

    @property
    def scale(self) -> float:
        """1/√m."""
        return 1 / sqrt(self.stop - self.start)

    @property
    def share(self) -> float:
        """m/N."""
        return (self.stop - self.start) / self.pad


@dataclass(frozen=True)
class Shape:
    """What all epochs' sketches of a layout have in common."""

    dim: int
    places: tuple[Place, ...]

    @cached_property
    def table(self) -> NDArray[np.int64]:
        """The places as `[layers, 5]`, for kernels."""
        return np.array(self.places, dtype=np.int64)

    @cached_property
    def row_table(self) -> NDArray[np.int64]:
        """log2 N, start and stop of every layer: `[3, layers]`."""
        return np.array([(pad.bit_length() - 1, start, stop) for _, _, pad, start, stop in self.places]).T


@dataclass(frozen=True, eq=False, init=False, repr=False)
class Sketch:
    """Φ = 1/√m · S H D P for each layer of a layout, applied to many models at once.

    P pads a layer with zeros to N = pad, D flips signs, H is the unnormalised Walsh–Hadamard matrix and S keeps m
    rows. D and S are pure functions of (seed, epoch, layer), see `rng`. So ‖Φ‖ ≤ √(N/m), ΦΦᵀ = (N/m) I for a layer
    without padding, and ⟨Φx, u⟩ = ⟨x, Φᵀu⟩.

    m = max(1, floor(ratio · N)); for `allocation` see `Layout.sketch_sizes`. Each `epoch` has its own Φ. `device` is
    where the models are. The fields define a sketch; everything else is computed from them on first use.

    All functions take models `[clients, dim]` or one vector `[dim]`, float32 or float64, tensors or arrays, and return
    the same kind. NaN and infinite values give NaN or infinite values.

    >>> sketch = Sketch.of_vector(1000, ratio=0.25, seed=7)
    >>> sketch
    Sketch(1 layer, 1,000 → 256 entries)
    >>> x = np.sin(np.arange(1000.0))
    >>> y = sketch.forward(x)
    >>> y.shape, sketch.adjoint(y).shape
    ((256,), (1000,))
    >>> bool(np.isclose(y @ y, x @ sketch.adjoint(y)))  # ⟨Φx, Φx⟩ = ⟨x, ΦᵀΦx⟩
    True
    """

    shape: Shape
    keys: Tensor
    """Keys of the random streams of D, one for each layer, `[layers]`; unsigned bits as int64."""
    rows: Tensor
    """The rows that S keeps of all layers, in the order of a message, `[Σ m]`."""

    def __init__(
        self,
        layout: Layout,
        ratio: float,
        seed: int,
        epoch: int,
        device: torch.device | str | None = None,
        allocation: float = 1.0,
    ) -> None:
        shape = shape_of(layout, ratio, allocation)
        seed = check_integer("seed", seed, 0, rng.LARGEST_SEED)
        epoch = check_integer("epoch", epoch, 0, rng.LARGEST_SEED)
        place = torch.device("cpu" if device is None else device)
        constants = _constants(shape, seed, epoch // _EPOCHS, place)[epoch % _EPOCHS]
        object.__setattr__(self, "shape", shape)
        object.__setattr__(self, "keys", constants[0])
        object.__setattr__(self, "rows", kept_rows(shape, constants[1:]))

    @classmethod
    def of_vector(
        cls, size: int, ratio: float, seed: int, epoch: int = 0, device: torch.device | str | None = None
    ) -> Sketch:
        """The sketch of vectors of `size` entries, which are one layer."""
        return cls(Layout.of_vector(size), ratio, seed, epoch, device)

    def __repr__(self) -> str:
        layers = f"{len(self.shape.places)} layer{'s' * (len(self.shape.places) != 1)}"
        place = "" if self.rows.device.type == "cpu" else f", on {self.rows.device}"
        return f"Sketch({layers}, {self.dim:,} → {self.size:,} entries{place})"

    @cached_property
    def layers(self) -> Tensor:
        """The layer of every entry of a sketch, `[Σ m]`."""
        return torch.cat([torch.full((size,), index, device=self.rows.device) for index, size in enumerate(self.sizes)])

    @cached_property
    def positions(self) -> Tensor:
        """The number of the sketch entry that each row of H gives, −1 for rows that are not kept: int32, for all padded
        layers one after another."""
        return self.scatter_to_rows(torch.arange(self.size, dtype=torch.int32, device=self.rows.device))

    def scatter_to_rows(self, entries: Tensor) -> Tensor:
        """`entries: [Σ m]`, each at its row of H, and −1 at rows that are not kept: for all padded layers one after
        another. It may be part of a recording (`engine.graphs`), so it copies nothing from the host."""
        *begins, end = accumulate((place.pad for place in self.shape.places), initial=0)
        scattered = entries.new_full((end,), -1)
        rows = [part + begin for part, begin in zip(torch.split(self.rows, list(self.sizes)), begins, strict=True)]
        scattered[torch.cat(rows)] = entries
        return scattered

    @cached_property
    def signs(self) -> Tensor:
        """D of all layers, int8 `[dim]`: a quarter of the memory of float32. GPU kernels hash their signs instead."""
        return torch.cat(
            [
                rng.device_signs(key, end - begin)
                for key, (begin, end, *_) in zip(self.keys, self.shape.places, strict=True)
            ]
        )

    @property
    def dim(self) -> int:
        """Parameters of a model."""
        return self.shape.dim

    @property
    def sizes(self) -> tuple[int, ...]:
        """m of every layer; a sketch is the concatenation of its layers' sketches."""
        return tuple(place.stop - place.start for place in self.shape.places)

    @property
    def size(self) -> int:
        """Entries of a whole sketch, Σ m."""
        return len(self.rows)

    def forward(self, params: Values) -> Values:
        """Φθ: `[clients, dim]` → `[clients, Σ m]`, or `[dim]` → `[Σ m]`."""
        rows = self.check("params", params, self.dim)
        return like_input(params, _implementation(rows).forward(self, rows))

    def adjoint(self, sketched: Values) -> Values:
        """Φᵀu: `[clients, Σ m]` → `[clients, dim]`, or `[Σ m]` → `[dim]`."""
        rows = self.check("sketched", sketched, self.size)
        return like_input(sketched, _implementation(rows).adjoint(self, rows))

    def spread(self, sketched: Tensor) -> Tensor:
        """D H Sᵀ u = √m Φᵀu: `[clients, Σ m]` → `[clients, dim]`. For signs u the results are integers of at most m ≤
        2^24, which are exact in every order of summation: so all devices give the same bits."""
        rows = self.check("sketched", sketched, self.size)
        result: Tensor = _implementation(rows).adjoint(self, rows, scaled=False)
        return result

    def spread_integers(self, sums: NDArray[np.float64]) -> Tensor:
        """`spread` of integers, `[Σ m]` → `[dim]` in float64 on the sketch's device; exact if m max |sums| ≤ 2^53.

        The GPU's transform is in float32, which is exact for integers up to 2^24. So it transforms digits of so few
        bits that no sum of m of them is larger.
        """
        bits, device = 24 - (max(self.sizes) - 1).bit_length(), self.rows.device
        if not _uses_gpu_kernels(self.rows) or bits < 1:
            return self.spread(to_device(torch.from_numpy(sums[None]), device))[0]
        size, sign = np.abs(sums).astype(np.int64), np.sign(sums).astype(np.int64)
        count = max(1, -(-int(size.max()).bit_length() // bits))
        digits = np.stack([sign * ((size >> bits * number) & ((1 << bits) - 1)) for number in range(count)])
        parts = self.spread(to_device(torch.from_numpy(digits.astype(np.float32)), device)).double()
        for number in range(1, count):
            parts[0] += parts[number] * float(1 << bits * number)
        return parts[0]

    def split(self, params: Values, model: Values, residual: Values) -> tuple[Values, Values]:
        """The sketch of x = params − model + residual, y = Φx `[clients, Σ m]`, and the unsent rest x − (m/N) Φᵀy
        `[clients, dim]`. All three arguments are `[clients, dim]`, or vectors.

        Without padding (m/N) Φᵀy is the orthogonal projection of x on the rows kept, so nothing is sent twice.
        """
        arguments = {"params": params, "model": model, "residual": residual}
        rows = [self.check(name, values, self.dim) for name, values in arguments.items()]
        if len({(each.shape, each.dtype) for each in rows}) > 1:
            got = ", ".join(
                f"{name} {each.dtype} {list(each.shape)}" for name, each in zip(arguments, rows, strict=True)
            )
            raise ValueError(f"split: got {got}, expected the same type and shape of all three")
        differentiated = next(filter(is_differentiated, rows), rows[0])
        sketched, unsent = _implementation(differentiated).split(self, *rows)
        return like_input(params, sketched), like_input(params, unsent)

    def signs_and_rms(self, sketched: Tensor) -> tuple[Tensor, Tensor]:
        """The signs of sketches `[clients, Σ m]`, one bit each (`quantise.pack_signs`), and the root mean square of
        each layer (`quantise.root_mean_squares`); on the device of the sketches."""
        rows = self.check("sketched", sketched, self.size)
        if backend_of(rows) == "gpu":
            from pfedlms.sketch import gpu

            return gpu.signs_and_rms(self, rows)
        return pack_signs(rows), root_mean_squares(rows, self.sizes)

    def step(self, signs: Array, factors: Array) -> Tensor:
        """c (D H Sᵀ v), `[dim]`, from v = ±1, packed as in `signs_and_rms`, `signs: [⌈Σ m / 8⌉]`, and c, one float32
        per layer, `factors: [layers]`. Both are on the host.

        D H Sᵀ v are integers, so only the product with c is rounded, and all devices give the same bits. Where c is
        zero the result is −0, because w + (−0) has the bits of w, even if w is −0.
        """
        device, sizes = self.rows.device, (-(-self.size // 8), len(self.shape.places))
        if signs.dtype != np.uint8 or (signs.size, factors.size) != sizes:
            raise ValueError(
                f"signs, factors: got {signs.dtype} {list(signs.shape)} and {list(factors.shape)}, expected uint8 "
                f"[{sizes[0]}] and [{sizes[1]}] for this sketch"
            )
        if _uses_gpu_kernels(self.rows):
            from pfedlms.sketch import gpu

            return gpu.step(self, to_device(torch.tensor(signs), device), factors.tolist())
        bits = np.unpackbits(signs, count=self.size, bitorder="little")
        votes = torch.from_numpy(bits).to(device).float() * 2 - 1
        c = torch.from_numpy(np.repeat(factors, [place.end - place.begin for place in self.shape.places])).to(device)
        return torch.where(c != 0, self.spread(votes[None])[0] * c, -0.0)

    def _layers(self) -> Iterator[tuple[Place, Tensor, Tensor]]:
        """Every layer's place, signs and rows."""
        for place in self.shape.places:
            yield place, self.signs[place.begin : place.end], self.rows[place.start : place.stop]

    def check(self, name: str, values: Tensor | Array, width: int) -> Tensor:
        """`values` as rows `[clients, width]` on this device; raise ValueError if they are not, because kernels do not
        check bounds."""
        rows = check_floats(name, as_tensor(name, values, self.rows.device))
        if rows.ndim not in (1, 2) or rows.shape[-1] != width:
            raise ValueError(
                f"{name}: got shape {tuple(rows.shape)}, expected [clients, {width}] or [{width}]; the sketch is of "
                "another model"
            )
        return rows if rows.ndim == 2 else rows[None]


class _Definition:
    """The definition in torch, with the same functions as `cpu` and `gpu`."""

    @staticmethod
    def forward(sketch: Sketch, params: Tensor) -> Tensor:
        parts = []
        for place, signs, rows in sketch._layers():
            signed = F.pad(params[:, place.begin : place.end] * signs, (0, place.pad - len(signs)))
            parts.append(fwht_reference(signed)[:, rows] * place.scale)
        return torch.cat(parts, dim=1)

    @staticmethod
    def adjoint(sketch: Sketch, sketched: Tensor, scaled: bool = True) -> Tensor:
        parts = []
        for place, signs, rows in sketch._layers():
            spread = sketched.new_zeros(len(sketched), place.pad)
            spread[:, rows] = sketched[:, place.start : place.stop]
            part = fwht_reference(spread)[:, : len(signs)] * signs
            parts.append(part * place.scale if scaled else part)
        return torch.cat(parts, dim=1)

    @staticmethod
    def split(sketch: Sketch, params: Tensor, model: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        x = params - model + residual
        sketched = _Definition.forward(sketch, x)
        projection = _Definition.adjoint(sketch, sketched)
        for place in sketch.shape.places:
            projection[:, place.begin : place.end] *= place.share
        return sketched, x - projection


def _implementation(values: Tensor) -> Any:
    """The module or class that computes with `values`: the kernels of a device, or the definition."""
    where = "plain" if is_differentiated(values) else backend_of(values)
    if where == "gpu":
        from pfedlms.sketch import gpu

        return gpu
    return cpu if where == "cpu" else _Definition


# Caches the sketch of an epoch for other cohorts and exchanges, on the clients' device and on the server's.
sketch_of_round = lru_cache(maxsize=4)(Sketch)


@lru_cache
def shape_of(layout: Layout, ratio: float, allocation: float = 1.0) -> Shape:
    """Where the layers of a layout lie in models and sketches."""
    places, start = [], 0
    for layer, m in zip(layout.layers, layout.sketch_sizes(ratio, allocation), strict=True):
        places.append(Place(layer.offset, layer.offset + layer.size, layer.pad, start, start + m))
        start += m
    return Shape(layout.dim, tuple(places))


@lru_cache(maxsize=4)
def _constants(shape: Shape, seed: int, block: int, device: torch.device) -> Tensor:
    """The numbers that define the sketches of a block of epochs, `[epochs, 1 + 3 + 12, layers]`. One epoch would take
    as long as all of them. They are hashed here and copied to the device together; the rows are computed there."""
    layers = len(shape.places)
    epoch, layer = (index.flatten() for index in np.indices((_EPOCHS, layers)))
    names = epoch + block * _EPOCHS, layer
    keys = rng.streams(seed, "sketch-signs", *names).view(np.int64)
    rows = rng.row_constants(rng.streams(seed, "sketch-rows", *names))
    hashed = np.concatenate([keys[None], np.tile(shape.row_table, _EPOCHS), rows])
    return to_device(torch.from_numpy(np.ascontiguousarray(hashed.reshape(-1, _EPOCHS, layers).swapaxes(0, 1))), device)


def _uses_gpu_kernels(like: Tensor) -> bool:
    """Whether GPU kernels compute with float32 on the device of `like`."""
    return like.is_cuda and backend_of(like.new_empty(0, dtype=torch.float32)) == "gpu"


def kept_rows(shape: Shape, constants: Tensor) -> Tensor:
    """S of all layers, `[Σ m]`, on the device of `constants: [3 + 12, layers]`, which are `shape.row_table` and below
    it the `rng.row_constants` of every layer."""
    if _uses_gpu_kernels(constants):
        from pfedlms.sketch import gpu

        return gpu.kept_rows(shape, constants)
    parts = []
    for (bits, start, stop), layer in zip(shape.row_table.T.tolist(), constants[3:].unbind(dim=1), strict=True):
        parts.append(rng.row_images(torch.arange(stop - start, device=constants.device), layer, bits))
    return torch.cat(parts)
