"""sketchvote, a method of this package: FedAvg whose clients send one sign bit for each of a random 10 % of directions
of their unsent update.

New are the combination and its measurements (docs/results.md). Its parts come from others:

- the message, signs of a Hadamard sketch under a weighted majority: pFed1BS (Cheng et al., "Personalized Federated
  Learning with Bidirectional Communication Compression via One-Bit Random Sketching", AAAI 2026), which sketches the
  weights, with one sketch for the whole run;
- a residual from which the sent part is removed, local steps from a model that all ends move alike, and moves by signs:
  DeMo (Peng, Quesnelle, Kingma, "Decoupled Momentum Optimization", 2024) and SparseLoCo (Sarfi et al., "Communication
  Efficient LLM Pre-training with SparseLoCo", 2025);
- a residual that loses all that was sent, not only what arrived: the error reset of CSER (Xie, Zheng, Koyejo, Gupta,
  Li, Lin, "CSER: Communication-efficient SGD with Error Reset", NeurIPS 2020);
- the vote: signSGD with majority vote (Bernstein, Zhao, Azizzadenesheli, Anandkumar, ICLR 2019);
- residuals, and answers as small as messages, in federated rounds: STC (Sattler et al., IEEE TNNLS 2020; `stc` here).
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from functools import lru_cache
from math import pi, sqrt

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pfedlms.aggregate import SignVote, weighted_medians
from pfedlms.backend import to_host
from pfedlms.cohort import Cohort, Tensors
from pfedlms.errors import UsageError
from pfedlms.methods.contract import ClientWork, Task, go_on_from
from pfedlms.methods.sketched import ALLOCATION, CHECK_EVERY, REFRESH, Sketched, SketchedUpdates
from pfedlms.settings import setting
from pfedlms.wire import Bits, Floats

MOST_ROWS = 1 << 24
FEWEST = 0.2
"""With a smaller share of participants other methods are better (docs/results.md)."""


@dataclass(frozen=True)
class SketchVoteSettings:
    ratio: float = setting(
        0.1, "m / N, bits a client sends per padded parameter; use more if clients take part rarely", above=0, maximum=1
    )
    gain: float = setting(1.0, "g, how far w moves along the vote; 0 never moves it", minimum=0)
    allocation: float = ALLOCATION()
    refresh: int = REFRESH()
    check_every: int = CHECK_EVERY()


@dataclass
class CountedVotes:
    """The server's total: the vote, and every client's N_k and s_k, `[layers]`."""

    vote: SignVote
    samples: list[int] = field(default_factory=list)
    scales: list[NDArray[np.float32]] = field(default_factory=list)


class ResidualSignVote(SketchedUpdates[CountedVotes]):
    """x_k = θ_k − w + e_k      the client's unsent update
    y_k = Φ^r x_k            per layer, m of N rows
    ↑ sign(y_k), s_k         one bit each, sign(0) = +1; the root mean square of y_k, one float32 per layer
    ↓ v, s̄                   v = sign(Σ N_k sign(y_k)); the weighted median of the s_k; over those with s_k > 0
    w ← w + c (D H Sᵀ v)     server and clients, c_l = g √(2/π) s̄ √m / N; a layer with c_l = 0 is left alone
    e_k ← x_k − (m/N) Φᵀ y_k the sent part is removed, whatever the vote was, and also if the message was lost

    For a normal y_k, E|y| = √(2/π) s: so c (D H Sᵀ v) is g (m/N) Φᵀ of v, scaled to the mean magnitude of y.
    """

    def __init__(self, task: Task, settings: SketchVoteSettings) -> None:
        super().__init__(task, settings)
        layers, sizes = task.layout.layers, self._sketches.sizes
        # c_l over s̄, in float64 from left to right.
        factors = [settings.gain * sqrt(2 / pi) * sqrt(m) / layer.pad for layer, m in zip(layers, sizes, strict=True)]
        self._factors = np.array(factors, dtype=np.float64)
        # In a simulation the server and all clients have the same answer, so its step is computed once.
        self._step = lru_cache(maxsize=1)(self._step_of)
        fields = Bits("signs", sum(sizes)), Floats("scale", len(layers), minimum=0)
        self.declare(fields, fields)

    def client_send(self, cohort: Cohort, round: int, work: ClientWork) -> tuple[Cohort, Tensors]:
        sketch = self._sketches.of(round, cohort.params.device)
        sketched, unsent = sketch.split(cohort.params, cohort.state["model"], cohort.state["residual"])
        signs, scales, last = to_host(*sketch.signs_and_rms(sketched), cohort.state["checked"])
        after, digests = self.add_digests(cohort.with_state(residual=unsent), round, last, scales)
        return after, {"signs": signs, "scale": scales, **digests}

    def server_open(self, server: Tensors, round: int) -> CountedVotes:
        return CountedVotes(SignVote(self._sketches.sizes))

    def server_add(self, total: CountedVotes, ids: list[int], samples: list[int], values: Tensors) -> CountedVotes:
        scales = values["scale"].numpy().copy()
        # A client whose update is zero in a layer has no vote there.
        total.vote.add(values["signs"].numpy(), np.where(scales > 0, np.array(samples)[:, None], 0))
        return CountedVotes(total.vote, [*total.samples, *samples], [*total.scales, *scales])

    def server_reply(self, server: Tensors, total: CountedVotes, round: int) -> tuple[Tensors, Tensors]:
        # If no client held the server's w, every median is 0, and w stays.
        scales = np.array(total.scales, dtype=np.float32).reshape(-1, len(self._factors))
        medians = weighted_medians(total.samples, scales)
        answer = {"signs": torch.from_numpy(total.vote.result()), "scale": torch.from_numpy(medians)}
        return {"model": self._apply_answer(server["model"], answer, round)}, answer

    def client_receive(self, cohort: Cohort, values: Tensors, round: int) -> Cohort:
        return go_on_from(cohort, self._apply_answer(cohort.state["model"], values, round))

    def _apply_answer(self, model: Tensor, answer: Tensors, round: int) -> Tensor:
        """w after an answer, `[dim]` or `[clients, dim]` as `model` is."""
        return model + self._step(round, model.device, *(answer[name].numpy().tobytes() for name in ("signs", "scale")))

    def _step_of(self, round: int, device: torch.device, signs: bytes, scales: bytes) -> Tensor:
        """c (D H Sᵀ v) of an answer, `[dim]`."""
        factors = (np.frombuffer(scales, np.float32).astype(np.float64) * self._factors).astype(np.float32)
        return self._sketches.of(round, device).step(np.frombuffer(signs, np.uint8), factors)


class SketchVote(Sketched):
    """One model for all, moved by votes on fresh random directions. Every client trains from it and keeps what it has
    not sent of its updates as a residual.

    Running statistics of batch norm stay with the clients, as in FedAvg unless it shares them; group norm has none.

    Limits: `gain` 0 never moves w, which is E steps from w⁰ for everyone; with the values of y_k instead of their signs
    and `ratio` 1 it is FedAvg (tests/methods/test_sketchvote.py). With one client it is signSGD on random
    directions.
    """

    name = "sketchvote"
    Settings, exchange = SketchVoteSettings, ResidualSignVote
    client_zeros = ("residual",)

    def __init__(self, task: Task, settings: SketchVoteSettings) -> None:
        super().__init__(task, settings)
        most = max(self.sketch_sizes)
        if most > MOST_ROWS:
            raise UsageError(
                f"method.ratio: got {settings.ratio:g}, which keeps {most} rows of a layer, expected at "
                f"most {MOST_ROWS}: sums of more signs are not exact in float32; use a smaller one"
            )
        if task.participants < round(FEWEST * task.clients):  # as a share of that size would give
            warnings.warn(
                f"sketchvote: {task.participants} of {task.clients} clients take part in a round, expected at least "
                f"{FEWEST:.0%} of them: residuals of clients that take part seldom are stale; use sketchmean",
                stacklevel=2,
            )
