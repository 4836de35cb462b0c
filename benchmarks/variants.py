"""Variants of sketchvote and sketchmean that were tried and are not part of the package, as methods with names of their
own, and a VGG-8 without batch norm."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from pfedlms.aggregate import weighted_medians
from pfedlms.cohort import Cohort, Tensors
from pfedlms.methods import Task, register
from pfedlms.methods.contract import ClientWork
from pfedlms.methods.sketchmean import MeanOfSigns, SketchMean, SketchMeanSettings
from pfedlms.methods.sketchvote import ResidualSignVote, SketchVote, SketchVoteSettings
from pfedlms.models import build
from pfedlms.settings import setting

GROUPS = 8


@dataclass(frozen=True)
class WeightedSettings(SketchVoteSettings):
    cap: float = setting(
        3.0, "most weight of a scale, in medians of all clients' scales; 0: without a limit", minimum=0
    )


@dataclass
class Received:
    """What the server has heard: N_k, signs as 0 and 1 `[Σ m]`, and s_k `[layers]` of every client."""

    samples: list[int]
    signs: list[NDArray[np.uint8]]
    scales: list[NDArray[np.float32]]


class WeightedVote(ResidualSignVote):
    """v = sign(Σ N_k min(s_k, cap · s̄) sign(y_k)): who has learnt more says it louder."""

    def __init__(self, task: Task, settings: WeightedSettings) -> None:
        super().__init__(task, settings)
        self._cap = settings.cap or np.inf

    def server_open(self, server: Tensors, round: int) -> Received:  # type: ignore[override]
        return Received([], [], [])

    def server_add(self, total: Received, ids: list[int], samples: list[int], values: Tensors) -> Received:  # type: ignore[override]
        signs = np.unpackbits(values["signs"].numpy(), axis=1, count=sum(self._sketches.sizes), bitorder="little")
        scales = values["scale"].numpy().copy()
        return Received([*total.samples, *samples], [*total.signs, *signs], [*total.scales, *scales])

    def server_reply(self, server: Tensors, total: Received, round: int) -> tuple[Tensors, Tensors]:  # type: ignore[override]
        ends = np.cumsum(self._sketches.sizes)[:-1]
        scales, layers = np.stack(total.scales), np.split(np.stack(total.signs), ends, axis=1)
        medians = weighted_medians(total.samples, scales)
        votes = []
        for median, own, signs in zip(medians.astype(np.float64), scales.T.astype(np.float64), layers, strict=True):
            weights = np.array(total.samples) * np.minimum(own, self._cap * median if median else 0)
            votes.append(weights @ (2.0 * signs - 1) >= 0)
        packed = np.packbits(np.concatenate(votes), bitorder="little")
        answer = {"signs": torch.from_numpy(packed), "scale": torch.from_numpy(medians)}
        return {"model": self._apply_answer(server["model"], answer, round)}, answer


@register
class WeightedSketchVote(SketchVote):
    """sketchvote whose votes are weighted by N_k min(s_k, cap · s̄) instead of N_k."""

    name = "sketchvote-weighted"
    Settings, exchange = WeightedSettings, WeightedVote


@dataclass(frozen=True)
class ForgetfulSettings(SketchVoteSettings):
    decay: float = setting(
        0.9, "what a residual is multiplied by for every round in which its client is absent", minimum=0, maximum=1
    )
    longest: int = setting(0, "rounds of absence after which a residual is dropped; 0: never", minimum=0)


class ForgetfulVote(ResidualSignVote):
    """e_k ← decay^(rounds of absence) e_k before a client that comes back sends, or 0 if it was absent too long."""

    def __init__(self, task: Task, settings: ForgetfulSettings) -> None:
        super().__init__(task, settings)
        self._decay, self._longest = settings.decay, settings.longest

    def client_send(self, cohort: Cohort, round: int, work: ClientWork) -> tuple[Cohort, Tensors]:
        absence = round - cohort.state["spoke"] - 1
        kept = self._decay ** absence.to(torch.float32)
        if self._longest:
            kept = torch.where(absence > self._longest, 0.0, kept)
        spoke = torch.full_like(cohort.state["spoke"], round)
        return super().client_send(
            cohort.with_state(residual=cohort.state["residual"] * kept, spoke=spoke), round, work
        )


@register
class ForgetfulSketchVote(SketchVote):
    """sketchvote whose clients lose some of their residuals while they are absent."""

    name = "sketchvote-forgetful"
    Settings, exchange = ForgetfulSettings, ForgetfulVote

    def client_start(self, cohort: Cohort) -> Cohort:
        # A client that has never sent has a residual of zero, so it does not matter how long it was absent.
        return (
            super()
            .client_start(cohort)
            .with_state(spoke=torch.zeros(len(cohort.ids), 1, dtype=torch.int64, device=cohort.params.device))
        )


@dataclass(frozen=True)
class LiarsSettings(SketchMeanSettings):
    liars: float = setting(
        0.2, "share of the clients, the first ones, that turn all their votes round", minimum=0, maximum=1
    )


class LiarsVotes(MeanOfSigns):
    """sketchmean with clients that send the opposite of every vote on a direction."""

    def __init__(self, task: Task, settings: LiarsSettings) -> None:
        super().__init__(task, settings)
        self.liars = round(settings.liars * task.clients)

    def client_send(self, cohort: Cohort, round: int, work: ClientWork) -> tuple[Cohort, Tensors]:
        after, values = super().client_send(cohort, round, work)
        signs, count = values["signs"], sum(self._sketches.sizes)
        lying = torch.tensor([client < self.liars for client in cohort.ids])
        bits = np.unpackbits(signs.numpy(), axis=1, count=count, bitorder="little") ^ lying.numpy()[:, None]
        return after, {**values, "signs": torch.from_numpy(np.packbits(bits, axis=1, bitorder="little"))}


@register
class SketchMeanWithLiars(SketchMean):
    """sketchmean some of whose clients lie."""

    name = "sketchmean-liars"
    Settings, exchange = LiarsSettings, LiarsVotes


def vgg8_with_group_norm() -> nn.Module:
    """The zoo's vgg8 for colour images in ten classes with group norm where it has batch norm: no running statistics,
    and nothing that depends on the batch."""
    module = build("vgg8", (3, 32, 32), 10, 0, key=torch.initial_seed())
    parts = [
        nn.GroupNorm(GROUPS, part.num_features) if isinstance(part, nn.BatchNorm2d) else part
        for part in module.children()
    ]
    return nn.Sequential(*parts)


MODELS = {"vgg8-group-norm": vgg8_with_group_norm}
