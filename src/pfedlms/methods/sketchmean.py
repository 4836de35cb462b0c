"""sketchmean, a method of this package for clients that take part rarely and keep no residual. Clients vote on random
directions of their updates, and the server answers with the largest entries of the sum that it has not sent yet.

New are the combination and its measurements (docs/results.md). Its parts come from others:

- a server that sums linear sketches of updates, answers with the largest entries and keeps the rest: FetchSGD
  (Rothchild et al., ICML 2020; `fetchsgd` here), with a Count Sketch of floats;
- one bit for each direction of a rotated update: DRIVE (Vargaftik et al., NeurIPS 2021) and EDEN (ICML 2022; `eden`);
- the answer: STC (Sattler et al., IEEE TNNLS 2020; `stc`);
- the server optimiser: Reddi et al., ICLR 2021 (`server_optimizer`).
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from math import pi, sqrt

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pfedlms import rng
from pfedlms.aggregate import SignVote
from pfedlms.backend import to_device, to_host
from pfedlms.cohort import Cohort, Tensors
from pfedlms.methods.contract import ClientWork, Task, go_on_from
from pfedlms.methods.server_optimizer import ServerOptimizer, ServerSettings
from pfedlms.methods.sketched import ALLOCATION, CHECK_EVERY, REFRESH, Sketched, SketchedUpdates
from pfedlms.methods.stc import Ternary
from pfedlms.quantise import pack_signs
from pfedlms.settings import setting
from pfedlms.wire import Bits, Floats, Mask

FAST, SLOW = 0.7, 0.2
"""τ, how fast a scale follows the votes: before and after it first reaches the median."""
SETTLED = 2
LOWEST, HIGHEST = 2.0**-20, 2.0**40
"""Limits of a scale relative to its first value, so that it never becomes 0 or infinite."""
RATIO, ANSWER = 0.1, 0.005
DIRECTIONS, ENTRIES = 1000, 80
"""A small model has at least so many directions up and entries down, unless its settings say otherwise."""
FEWEST = 40
"""With fewer entries in an answer, models learn slowly, or the server collects more than it sends and w falls apart."""


@dataclass(frozen=True)
class SketchMeanSettings(ServerSettings):
    ratio: float = setting(
        0.0,
        f"m / N, bits a client sends for each padded parameter; 0: {RATIO:g}, and for a small model {DIRECTIONS} bits",
        minimum=0,
        maximum=1,
    )
    answer: float = setting(
        0.0,
        "share of the entries of the model that the server's answer has; "
        f"0: {ANSWER:g}, and for a small model {ENTRIES} entries",
        minimum=0,
        maximum=1,
    )
    gain: float = setting(
        3.0,
        "g, the server's step along the mean of the signs; π/2 has the unit slope, 0 never moves w",
        minimum=0,
        server_only=True,
    )
    allocation: float = ALLOCATION()
    refresh: int = REFRESH()
    check_every: int = CHECK_EVERY()


def shares_for(settings: SketchMeanSettings, dim: int) -> SketchMeanSettings:
    """The settings of a model of `dim` entries, with a number for each share that is 0: bits are cheap in small models,
    and the noise of few directions is large."""
    ratio = max(RATIO, min(1.0, DIRECTIONS / dim))
    answer = max(ANSWER, min(1.0, (ENTRIES + 0.5) / dim))  # without the half, rounding may take one entry
    return replace(settings, ratio=settings.ratio or ratio, answer=settings.answer or answer)


@dataclass
class Votes:
    """The server's sums: Σ c_k sign(y_k), Σ c_k of the clients whose scale is above S (`[layers]`), Σ c_k."""

    signs: SignVote
    above: NDArray[np.int64]
    weight: int = 0


class MeanOfSigns(SketchedUpdates[Votes]):
    """One exchange of round r.

    y_k = Φ^r (θ_k − w)          per layer, m of N rows
    ↑ sign(y_k), rms(y_k) > S    one bit for each direction, one for each layer
    p = Σ c_k sign(y_k) / Σ c_k  c_k = N_k, limited by `train.max_weight`
    z ← z + step(√(2/π) S Φᵀp)   step is the server optimiser, g its step size
    ↓ STC(z), S                  positions, signs and one magnitude of the largest entries of z; S of `next_scales`
    z ← z − STC(z)               the server keeps the unsent rest
    w ← w + STC(z)               server and clients, at the positions sent

    An entry y = 0 votes by a coin of (seed, round, client, layer).
    """

    def __init__(self, task: Task, settings: SketchMeanSettings) -> None:
        super().__init__(task, settings)
        self._seed, sizes = task.seed, self._sketches.sizes
        self._optimizer = ServerOptimizer(settings.gain, settings)
        self._answer = Ternary(task.layout.dim, settings.answer)
        self._start = start_scales(task.learning_rate, sizes)
        up = Bits("signs", sum(sizes)), Mask("above", len(sizes))
        self.declare(up, (*self._answer.fields, Floats("scale", len(sizes), minimum=0)))

    def client_send(self, cohort: Cohort, round: int, work: ClientWork) -> tuple[Cohort, Tensors]:
        sketch = self._sketches.of(round, cohort.params.device)
        sketched = sketch.forward(cohort.params - cohort.state["model"])
        signs, scales = sketch.signs_and_rms(sketched)
        zero = sketched == 0
        if zero.any():
            signs = pack_signs(torch.where(zero, self._coins(zero, round, cohort.ids), sketched))
        above = scales > cohort.state["scale"]
        signs, above, scales, last = to_host(signs, above, scales, cohort.state["checked"])
        after, digests = self.add_digests(cohort, round, last, scales)
        return after, {"signs": signs, "above": above, **digests}

    def _coins(self, zero: Tensor, round: int, clients: tuple[int, ...]) -> Tensor:
        """±1 for the entries that are zero, `[clients, Σ m]`."""
        coins, sizes = torch.ones(zero.shape), list(self._sketches.sizes)
        parts = zip(torch.split(zero, sizes, dim=1), torch.split(coins, sizes, dim=1), strict=True)
        for layer, (zeros, layer_coins) in enumerate(parts):
            for row in zeros.any(dim=1).nonzero().flatten().tolist():
                key = rng.stream(self._seed, "sketchmean-coin", round, clients[row], layer)
                layer_coins[row] = torch.from_numpy(rng.signs(key, sizes[layer]))
        return coins.to(zero.device)

    def server_open(self, server: Tensors, round: int) -> Votes:
        return Votes(SignVote(self._sketches.sizes), np.zeros(len(self._sketches.sizes), dtype=np.int64))

    def server_add(self, total: Votes, ids: list[int], samples: list[int], values: Tensors) -> Votes:
        weights = np.array(samples, dtype=np.int64)
        total.signs.add(values["signs"].numpy(), np.repeat(weights[:, None], len(total.above), axis=1))
        return Votes(total.signs, total.above + weights @ values["above"].numpy(), total.weight + sum(samples))

    def server_reply(self, server: Tensors, total: Votes, round: int) -> tuple[Tensors, Tensors]:
        # If no client held the server's w, nothing is added to z, and scales stay.
        weight = max(1, total.weight)
        lean = (2 * total.above - total.weight) / weight  # b̄
        scale, settled = server["scale"].numpy().astype(np.float64), server["settled"].numpy()
        next_scale, next_settled = next_scales(scale, settled, lean, self._start)
        used_scale = np.where((next_settled == SETTLED) | (lean > 0), scale, 0)
        mean = self._mean_update(total.signs.sums(), used_scale / weight, round, server["model"].device)
        moments, step = self._optimizer.step(server, mean)
        z = (server["unsent"].double() + step).float()
        sent = self._answer.compress_one(z)
        model, unsent = self._answer.add_to(server["model"], sent), self._answer.unsent(z, sent)
        scales = {"scale": torch.from_numpy(next_scale)}
        state = {"model": model, "unsent": unsent, **scales, "settled": torch.from_numpy(next_settled), **moments}
        return state, {**sent, **scales}

    def _mean_update(
        self, sums: NDArray[np.float64], scales: NDArray[np.float64], round: int, device: torch.device
    ) -> Tensor:
        """√(2/π) S Φᵀ p, `[dim]` in float64, from Σ c_k sign(y_k) and S / Σ c_k. D H Sᵀ of the sums are integers, which
        are exact in any order of summation for m Σ c_k ≤ 2^53: so every device gives the same bits."""
        mean = self._sketches.of(round, device).spread_integers(sums)
        layers = torch.split(mean, [layer.size for layer in self._sketches.layout.layers])
        for layer, scale, m in zip(layers, scales.tolist(), self._sketches.sizes, strict=True):
            layer *= sqrt(2 / pi) * scale / sqrt(m)
        return mean

    def client_receive(self, cohort: Cohort, values: Tensors, round: int) -> Cohort:
        sent = {name: to_device(value, cohort.params.device) for name, value in values.items()}
        scale = sent["scale"].expand(len(cohort.ids), -1).contiguous()
        return go_on_from(cohort, self._answer.add_to(cohort.state["model"], sent)).with_state(scale=scale)


def start_scales(learning_rate: float, sizes: tuple[int, ...]) -> NDArray[np.float64]:
    """S⁰ = η / √m of every layer, rounded to float32: that of an update of length η, which is one step on a gradient of
    length 1. Most updates are longer."""
    return np.array([learning_rate / sqrt(m) for m in sizes], dtype=np.float32).astype(np.float64)


def next_scales(
    scale: NDArray[np.float64], settled: NDArray[np.int8], lean: NDArray[np.float64], start: NDArray[np.float64]
) -> tuple[NDArray[np.float32], NDArray[np.int8]]:
    """S and `settled` after a round in which b̄ = `lean`, the mean of the clients' bits as ±1: all `[layers]`.

        S ← S (1 + τ b̄), τ = 0.7 until b̄ of the layer is 0 or changes its sign for the first time, then 0.2

    in float64, rounded to float32. `settled` is 0 before the first round, then the first sign of b̄, and 2 once b̄ was
    0 or changed its sign. Until then S may be far from the median: a layer whose S is too large (b̄ < 0) adds nothing
    to z.
    """
    sign = np.sign(lean).astype(np.int8)
    changed = (settled == SETTLED) | (sign == 0) | ((settled != 0) & (sign != settled))
    moved = scale * (1 + np.where(changed, SLOW, FAST) * lean)
    next_settled = np.where(changed, SETTLED, sign).astype(np.int8)
    return np.clip(moved, start * LOWEST, start * HIGHEST).astype(np.float32), next_settled


class SketchMean(Sketched):
    """One model for all, moved by the largest entries of the mean that clients voted for; clients keep the model and S.

    Limits: `gain` 0 never moves w, which is E steps from w⁰ for everyone; with values instead of signs, `ratio` 1 and
    an answer of all entries it is FedAvg (tests/methods/test_sketchmean.py).
    """

    name = "sketchmean"
    Settings, exchange = SketchMeanSettings, MeanOfSigns
    server_zeros = ("unsent",)

    def __init__(self, task: Task, settings: SketchMeanSettings) -> None:
        dim = task.layout.dim
        settings = shares_for(settings, dim)
        super().__init__(task, settings)
        entries = settings.answer * dim
        if settings.answer < 1 and entries < FEWEST:
            warnings.warn(
                f"method.answer: got {settings.answer:g}, about {entries:.0f} of {dim} entries in a round, expected at "
                f"least {FEWEST}: the shared model learns slowly or falls apart; use {min(1.0, FEWEST / dim):.2g} or "
                "more",
                stacklevel=2,
            )
        start = start_scales(task.learning_rate, self.sketch_sizes)
        self.tracked, self._scale = (self.exchanges[0].down.fields[-1],), torch.from_numpy(start).float()

    def agreement(self) -> dict[str, int | float | str]:
        return {**super().agreement(), "learning_rate": self.task.learning_rate}  # from which S⁰ follows

    def server_start(self) -> Tensors:
        start = super().server_start()
        scales = {"scale": self._scale, "settled": torch.zeros(len(self._scale), dtype=torch.int8)}
        return {**start, **scales, **ServerOptimizer(self.settings.gain, self.settings).start(start["model"])}

    def client_start(self, cohort: Cohort) -> Cohort:
        scale = self._scale.to(cohort.params.device).repeat(len(cohort.ids), 1)
        return super().client_start(cohort).with_state(scale=scale)
