"""θ → Φθ and back: the sketch Φ of every layer. This file has its definition in torch; `cpu` and `gpu` have kernels.

All of them give the same bits, except the adjoint on a GPU, whose stages run in another order. Autograd uses the
kernels, too: the gradient of Φ is Φᵀ, and the gradient of Φᵀ is Φ.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate
from math import sqrt
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from pfedlms import rng
from pfedlms.backend import backend_of, to_device
from pfedlms.checks import Array, Values, as_tensor, check_floats, check_integer, like_input
from pfedlms.models.layout import Layout, checked_ratio
from pfedlms.quantise import pack_signs, root_mean_squares
from pfedlms.sketch import cpu
from pfedlms.sketch.hadamard import fwht_, fwht_reference

_EPOCHS = 32  # whose constants are hashed together

__all__ = ["Sketch", "fwht_", "fwht_reference", "sketch_of_round"]


class Place(NamedTuple):
    """Where one layer lies: its parameters begin … end, padded to `pad`, and its part start … stop of a sketch."""

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
    """What the sketches of all epochs have in common."""

    dim: int
    places: tuple[Place, ...]

    @cached_property
    def table(self) -> NDArray[np.int64]:
        """The places as `[layers, 5]`, for kernels."""
        return np.array(self.places, dtype=np.int64)

    @cached_property
    def row_table(self) -> NDArray[np.int64]:
        """log2 N of every layer, and where its part of a sketch starts and stops: `[3, layers]`."""
        return np.array([(pad.bit_length() - 1, start, stop) for _, _, pad, start, stop in self.places]).T


@dataclass(frozen=True, eq=False, init=False, repr=False)
class Sketch:
    """Φ = 1/√m · S H D P for each layer of a layout, applied to many models at once.

    P pads a layer with zeros to N = pad, D flips signs, H is the unnormalised Walsh–Hadamard matrix and S keeps m
    rows. D and S are pure functions of (seed, epoch, layer), see `rng`. So ‖Φ‖ ≤ √(N/m), ΦΦᵀ = (N/m) I for a layer
    without padding, and ⟨Φx, u⟩ = ⟨x, Φᵀu⟩.

    Its fields define it; everything else is computed from them on first use. With `ratio` m = max(1, floor(ratio · N)),
    see `Layout.sketch_sizes` for `allocation`. Each `epoch` has its own Φ. `device` is where the models are.

    All functions take models `[clients, dim]` or one vector `[dim]`, float32 or float64, tensors or arrays, and return
    the same kind. NaN and infinite values give NaN or infinite values.

    >>> sketch = Sketch.of_vector(1000, ratio=0.25, seed=7)
    >>> sketch
    Sketch(1 layer, 1,000 → 256 entries, ratio 0.25, seed 7, epoch 0)
    >>> x = np.sin(np.arange(1000.0))
    >>> y = sketch.forward(x)
    >>> y.shape, sketch.adjoint(y).shape
    ((256,), (1000,))
    >>> bool(np.isclose(y @ y, x @ sketch.adjoint(y)))  # ⟨Φx, Φx⟩ = ⟨x, ΦᵀΦx⟩
    True
    """

    shape: Shape
    keys: Tensor
    """The stream of D of every layer, `[layers]`, bit for bit as int64."""
    rows: Tensor
    """The rows that S keeps of every layer, in the order of a message, `[Σ m]`."""

    def __init__(
        self,
        layout: Layout,
        ratio: float,
        seed: int,
        epoch: int,
        device: torch.device | str | None = None,
        allocation: float = 1.0,
    ) -> None:
        if not isinstance(layout, Layout):
            raise ValueError(
                f"layout: got {type(layout).__name__}, expected a Layout; pass flat_layout(module), or use "
                "Sketch.of_vector(size, …)"
            )
        shape = shape_of(layout, checked_ratio(ratio), allocation)
        seed, epoch = (
            check_integer("seed", seed, 0, rng.LARGEST_SEED),
            check_integer("epoch", epoch, 0, rng.LARGEST_SEED),
        )
        try:
            place = torch.device(device or "cpu")
        except RuntimeError as error:
            raise ValueError(f"device: got {device!r}, expected 'cpu', 'cuda', 'cuda:0', …") from error
        constants = _constants(shape, seed, epoch // _EPOCHS, place)[epoch % _EPOCHS]
        object.__setattr__(self, "shape", shape)
        object.__setattr__(self, "keys", constants[0])
        object.__setattr__(self, "rows", kept_rows(shape, constants[1:]))
        self.__dict__["origin"] = f", ratio {ratio:g}, seed {seed}, epoch {epoch}"

    @classmethod
    def of_vector(
        cls, size: int, ratio: float, seed: int, epoch: int = 0, device: torch.device | str | None = None
    ) -> Sketch:
        """The sketch of vectors of `size` entries, as one layer."""
        return cls(Layout.of_vector(size), ratio, seed, epoch, device)

    def __repr__(self) -> str:
        layers = f"{len(self.shape.places)} layer{'s' * (len(self.shape.places) != 1)}"
        place = "" if self.rows.device.type == "cpu" else f", on {self.rows.device}"
        return f"Sketch({layers}, {self.dim:,} → {self.size:,} entries{self.origin}{place})"

    @cached_property
    def origin(self) -> str:
        """The arguments it was made from, for its repr. It is no field, because to `engine.graphs` sketches of all
        epochs are one computation. A sketch rebuilt there from its fields has no origin."""
        return ""

    @cached_property
    def layers(self) -> Tensor:
        """The layer of every entry of a sketch, `[Σ m]`."""
        return torch.cat([torch.full((size,), index, device=self.rows.device) for index, size in enumerate(self.sizes)])

    @cached_property
    def positions(self) -> Tensor:
        """Which entry of a sketch each row of H gives, −1 where it is not kept: int32, of all padded layers one after
        another."""
        return self.in_place(torch.arange(self.size, dtype=torch.int32, device=self.rows.device))

    def in_place(self, entries: Tensor) -> Tensor:
        """`entries: [Σ m]` where their rows of H are, and −1 where a row is not kept: of all padded layers one after
        another. A recording (`engine.graphs`) may have it inside, so nothing here comes from the host."""
        *begins, end = accumulate((place.pad for place in self.shape.places), initial=0)
        everywhere = entries.new_full((end,), -1)
        rows = [own + begin for own, begin in zip(torch.split(self.rows, list(self.sizes)), begins, strict=True)]
        everywhere[torch.cat(rows)] = entries
        return everywhere

    @cached_property
    def signs(self) -> Tensor:
        """D of all layers, int8 `[dim]`: a quarter of the memory to read in every transform. Kernels on a GPU hash
        theirs where they use them."""
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
        return like_input(params, self._apply("forward", self.check("params", params, self.dim)))

    def adjoint(self, sketched: Values) -> Values:
        """Φᵀu: `[clients, Σ m]` → `[clients, dim]`, or `[Σ m]` → `[dim]`."""
        return like_input(sketched, self._apply("adjoint", self.check("sketched", sketched, self.size)))

    def _apply(self, direction: _Direction, values: Tensor) -> Tensor:
        """Φ or Φᵀ of rows; by a kernel also under autograd, which cannot differentiate kernels itself."""
        if values.requires_grad and torch.is_grad_enabled() and backend_of(values) != "plain":
            differentiable: Tensor = _Differentiable.apply(values, self, direction)  # type: ignore[no-untyped-call]
            return differentiable
        result: Tensor = getattr(_implementation(values), direction)(self, values)
        return result

    def spread(self, sketched: Values) -> Values:
        """D H Sᵀ u = √m Φᵀu: `[clients, Σ m]` → `[clients, dim]`. For signs u it holds integers of at most m ≤ 2^24,
        which no order of summation rounds: the same bits everywhere."""
        given = self.check("sketched", sketched, self.size)
        _refuse_autograd("spread", "sketched", given, "adjoint")
        return like_input(sketched, self._spread(given))

    def _spread(self, sketched: Tensor) -> Tensor:
        result: Tensor = _implementation(sketched).adjoint(self, sketched, scaled=False)
        return result

    def spread_whole(self, sums: NDArray[np.float64]) -> Tensor:
        """`spread` of whole numbers, `[Σ m]` → `[dim]` in float64 on the sketch's device; exact where m max |sums| ≤
        2^53.

        The GPU's transform is in float32, which holds whole numbers up to 2^24: so it takes digits of so few bits that
        no sum of m of them is larger.
        """
        bits, device = 24 - (max(self.sizes) - 1).bit_length(), self.rows.device
        if not _made_by_kernels(self.rows) or bits < 1:
            return self._spread(to_device(torch.from_numpy(sums[None]), device))[0]
        size, sign = np.abs(sums).astype(np.int64), np.sign(sums).astype(np.int64)
        count = max(1, -(-int(size.max()).bit_length() // bits))
        digits = np.stack([sign * ((size >> bits * number) & ((1 << bits) - 1)) for number in range(count)])
        parts = self._spread(to_device(torch.from_numpy(digits.astype(np.float32)), device)).double()
        for number in range(1, count):
            parts[0] += parts[number] * float(1 << bits * number)
        return parts[0]

    def split(self, params: Values, model: Values, residual: Values) -> tuple[Values, Values]:
        """The sketch of x = params − model + residual and the unsent rest: y = Φx, `[clients, Σ m]`, and
        x − (m/N) Φᵀy, `[clients, dim]`. All three arguments are `[clients, dim]`, or vectors.

        Without padding (m/N) Φᵀy is the orthogonal projection of x on the rows kept, so nothing is sent twice.
        """
        named = {"params": params, "model": model, "residual": residual}
        given = [self.check(name, values, self.dim) for name, values in named.items()]
        for (name, values), rows in zip(named.items(), given, strict=True):
            _refuse_autograd("split", name, rows, "forward and adjoint")
            if values.shape != params.shape or rows.dtype != given[0].dtype:
                raise ValueError(
                    f"{name}: got {rows.dtype} of shape {tuple(values.shape)}, expected {given[0].dtype} of shape "
                    f"{tuple(params.shape)} as params; pass {name} of every client, in the same precision"
                )
        sketched, unsent = _implementation(given[0]).split(self, *given)
        return like_input(params, sketched), like_input(params, unsent)

    def signs_and_rms(self, sketched: Tensor) -> tuple[Tensor, Tensor]:
        """The signs of sketches `[clients, Σ m]`, one bit each (`quantise.pack_signs`), and the root mean square of
        each layer (`quantise.root_mean_squares`); on the device of the sketches."""
        given = self.check("sketched", sketched, self.size)
        if backend_of(given) == "gpu":
            from pfedlms.sketch import gpu

            return gpu.signs_and_rms(self, given)
        return pack_signs(given), root_mean_squares(given, self.sizes)

    def step(self, signs: Array, factors: Array) -> Tensor:
        """c (D H Sᵀ v), `[dim]`: v is ±1, packed as in `signs_and_rms`, `signs: [⌈Σ m / 8⌉]`; c is one float32 per
        layer, `factors: [layers]`. Both are on the host.

        Integers times c, and later added to w: two operations that round one after the other, and so the same bits
        everywhere. Where c is zero it is −0, because w − 0 is w, also where w is −0.
        """
        expected = -(-self.size // 8)
        if signs.dtype != np.uint8 or signs.shape != (expected,):
            raise ValueError(
                f"signs: got {signs.dtype} of shape {signs.shape}, expected uint8 of shape ({expected},); they are of "
                "another sketch"
            )
        device = self.rows.device
        if _made_by_kernels(self.rows):
            from pfedlms.sketch import gpu

            return gpu.step(self, to_device(torch.tensor(signs), device), factors.tolist())
        bits = np.unpackbits(signs, count=self.size, bitorder="little")
        votes = torch.from_numpy(bits).to(device).float() * 2 - 1
        each = torch.from_numpy(np.repeat(factors, [place.end - place.begin for place in self.shape.places])).to(device)
        return torch.where(each != 0, self.spread(votes[None])[0] * each, -0.0)

    def _layers(self) -> Iterator[tuple[Place, Tensor, Tensor]]:
        """Every layer's place, signs and rows."""
        for place in self.shape.places:
            yield place, self.signs[place.begin : place.end], self.rows[place.start : place.stop]

    def check(self, name: str, values: Tensor | Array, width: int) -> Tensor:
        """`values` as rows `[clients, width]` on this device; raises ValueError for anything else, because kernels do
        not check bounds."""
        given = check_floats(name, as_tensor(name, values, self.rows.device))
        if given.ndim not in (1, 2) or given.shape[-1] != width:
            raise ValueError(
                f"{name}: got shape {tuple(given.shape)}, expected [clients, {width}] or [{width}]; the sketch is of "
                "another model"
            )
        return given if given.ndim == 2 else given[None]


class _Definition:
    """The sketch in torch, with the functions that `cpu` and `gpu` have."""

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
            own = fwht_reference(spread)[:, : len(signs)] * signs
            parts.append(own * place.scale if scaled else own)
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
    """Who computes with `values`: the kernels of a device, or the definition."""
    where = backend_of(values)
    if where == "gpu":
        from pfedlms.sketch import gpu

        return gpu
    return cpu if where == "cpu" else _Definition


_Direction = Literal["forward", "adjoint"]


class _Differentiable(torch.autograd.Function):
    """A kernel with its gradient. Φ and Φᵀ are linear, so each is the gradient of the other, to any order."""

    @staticmethod
    def forward(values: Tensor, sketch: Sketch, direction: _Direction) -> Tensor:
        result: Tensor = getattr(_implementation(values), direction)(sketch, values.detach())
        return result

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Sketch, _Direction], output: Tensor) -> None:
        _, ctx.sketch, ctx.direction = inputs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        back: _Direction = "adjoint" if ctx.direction == "forward" else "forward"
        return ctx.sketch._apply(back, gradients[0]), None, None


def _refuse_autograd(what: str, name: str, values: Tensor, instead: str) -> None:
    if values.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            f"{what}: got {name} that requires grad, expected one outside autograd, because {what} has no gradient; "
            f"pass {name}.detach(), or use {instead}"
        )


# The sketch of one epoch, kept for other cohorts and exchanges, on the clients' device and the server's.
sketch_of_round = lru_cache(maxsize=4)(Sketch)


@lru_cache
def shape_of(layout: Layout, ratio: float, allocation: float = 1.0) -> Shape:
    """The places of a layout's layers in models and sketches."""
    places, start = [], 0
    for layer, m in zip(layout.layers, layout.sketch_sizes(ratio, allocation), strict=True):
        places.append(Place(layer.offset, layer.offset + layer.size, layer.pad, start, start + m))
        start += m
    return Shape(layout.dim, tuple(places))


@lru_cache(maxsize=4)
def _constants(shape: Shape, seed: int, block: int, device: torch.device) -> Tensor:
    """What sketches are made of, for some epochs at once, because one takes as long: a few numbers a layer, hashed here
    and sent together; the rows themselves are made where they are used. `[epochs, 1 + 3 + 12, layers]`."""
    layers = len(shape.places)
    epoch, layer = (each.flatten() for each in np.indices((_EPOCHS, layers)))
    names = epoch + block * _EPOCHS, layer
    keys = rng.streams(seed, "sketch-signs", *names).view(np.int64)
    rows = rng.row_constants(rng.streams(seed, "sketch-rows", *names))
    hashed = np.concatenate([keys[None], np.tile(shape.row_table, _EPOCHS), rows])
    sent = torch.from_numpy(np.ascontiguousarray(hashed.reshape(-1, _EPOCHS, layers).swapaxes(0, 1)))
    if device.type == "cuda":
        sent = sent.pin_memory()  # so that the host does not wait for the copy
    return sent.to(device, non_blocking=True)


def _made_by_kernels(like: Tensor) -> bool:
    return like.is_cuda and backend_of(like.new_empty(0, dtype=torch.float32)) == "gpu"


def kept_rows(shape: Shape, constants: Tensor) -> Tensor:
    """S of all layers, `[Σ m]`, on the device of `constants: [3 + 12, layers]`: `shape.row_table` and below it the
    `rng.row_constants` of every layer."""
    if _made_by_kernels(constants):
        from pfedlms.sketch import gpu

        return gpu.kept_rows(shape, constants)
    parts = []
    for (bits, start, stop), own in zip(shape.row_table.T.tolist(), constants[3:].unbind(dim=1), strict=True):
        parts.append(rng.row_images(torch.arange(stop - start, device=constants.device), own, bits))
    return torch.cat(parts)
