"""The quantities of the convergence theorem, measured along real rounds of pFedLMS, in float64.

The rounds are the engine's own. A subclass of the method records the models after every local step; it changes nothing
else, unless an absolute ρ is asked for. Losses, gradients and the regulariser are computed again here, on all training
samples of a client and without the engine's kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from math import prod

import torch
from torch import Tensor
from torch.func import functional_call, grad_and_value, vmap
from torch.nn import functional as F

from pfedlms.data import FederatedData
from pfedlms.data.batches import batches
from pfedlms.engine import Federation
from pfedlms.methods import Objective
from pfedlms.methods.pfedlms import PFedLMS, PFedLMSSettings
from pfedlms.models import Cohort, CohortModel
from pfedlms.pull import Pull
from pfedlms.settings import setting
from pfedlms.train_settings import TrainSettings

Trajectory = dict[str, list[float]]
AT_THE_END = ("largest_threshold", "potential", "drift", "largest_drift")
_TOGETHER = 10  # models of a client whose gradients over all samples are computed at once


@dataclass(frozen=True)
class WatchedSettings(PFedLMSSettings):
    absolute: bool = setting(False, "ρ is in units of a sketch's entries, one number for all layers and rounds")


@dataclass(frozen=True)
class Watched(Objective):
    """The pull of pFedLMS; `seen` collects the models θ^{r,0}, …, θ^{r,E}."""

    pull: Pull
    seen: list[Tensor]

    def gradient(self, params: Tensor) -> Tensor | None:
        return self.pull.gradient(params) if self.pull.strength else None

    def after_step(self, params: Tensor, step: int) -> Tensor:
        self.seen.append(params[0].clone())
        return params


class WatchedPFedLMS(PFedLMS):
    """pFedLMS that records its models; for cohorts of one client."""

    Settings = WatchedSettings

    notes: dict[int, Watched]
    """By client, the round played last."""

    def objective(self, cohort: Cohort, round: int) -> Objective:
        if self.settings.absolute:  # a pull's widths are ρ σ̄: with σ̄ = 1 they are ρ itself
            cohort = cohort.with_heard(deviation=torch.ones_like(cohort.heard["deviation"]))
        watched = Watched(self.pull(cohort, round), [cohort.params[0].clone()])
        self.notes = {**getattr(self, "notes", {}), cohort.ids[0]: watched}
        return watched


def penalty(pull: Pull, params: Tensor) -> tuple[Tensor, Tensor]:
    """R̃_ρ and its gradient at float64 `params: [models, dim]`: `[models]` and `[models, dim]`, without λ. A layer with
    ρ_l = 0 has no penalty."""
    layers = pull.sketch.layers
    sketched, rho = pull.sketch.forward(params), pull.widths.double()[layers]
    value, slope = torch.zeros_like(params[:, 0]), torch.zeros_like(sketched)
    levels = pull.thresholds.shape[1]
    for level, tau in enumerate(pull.thresholds.double().unbind(dim=1), start=1):
        z = sketched - tau[layers]
        u = torch.where(rho > 0, z / rho, 0.0).clamp(-1, 1)  # where ⟨u, z⟩ − ρ/2 ‖u‖² is largest
        v = torch.where(pull.consensus >= level, 1.0, -1.0).double() * (rho > 0)
        value += (u * z - rho / 2 * u**2 - v * z).sum(dim=1)
        slope += u - v
    return value / levels, pull.sketch.adjoint(slope / levels)


class ClientTask:
    """f_k of one client: the mean cross-entropy over its training samples in float64, at many models at once."""

    def __init__(self, model: CohortModel, data: FederatedData, client: int) -> None:
        self._module, self._parameters = deepcopy(model.module).double(), model.layout.parameters
        self._data, held = data, torch.from_numpy(data.train[client]).to(data.x.device)
        self._x, self._y = data.x[held].double(), data.y[held]
        self._on_all = vmap(grad_and_value(self._loss), in_dims=(0, None, None), chunk_size=_TOGETHER)
        self._on_each = vmap(grad_and_value(self._loss))

    def full(self, params: Tensor) -> tuple[Tensor, Tensor]:
        """f_k and ∇f_k at `params: [models, dim]`."""
        gradients, values = self._on_all(params, self._x, self._y)
        return values, gradients

    def of_batches(self, params: Tensor, index: Tensor) -> Tensor:
        """ĝ_k at `params: [models, dim]`, each on the samples `index: [models, batch]` of its own."""
        gradients: Tensor = self._on_each(params, self._data.x[index].double(), self._data.y[index])[0]
        return gradients

    def _loss(self, params: Tensor, x: Tensor, y: Tensor) -> Tensor:
        pieces = torch.split(params, [prod(shape) for _, shape in self._parameters])
        named = {name: own.view(shape) for (name, shape), own in zip(self._parameters, pieces, strict=True)}
        return F.cross_entropy(functional_call(self._module, named, (x,)), y)


def _measure(
    task: ClientTask, now: Watched, before: Watched | None, index: Tensor, decay: float, steps: Sequence[int]
) -> dict[str, float]:
    """One client's round, as `follow` reports it, with gradients at `steps`, the first of which is 0; `index:
    [local_steps, batch]` are the samples of its local steps."""
    strength, seen = now.pull.strength, torch.stack(now.seen).double()
    start = seen[:1]
    pulled = strength * float(penalty(now.pull, start)[0])
    found = {
        "start": float(start.norm()),
        "largest_model": float(seen.norm(dim=1).max()),
        "deviation": float(now.pull.sketch.forward(start).std()),
    }
    if before is not None:
        found["drift"] = pulled - strength * float(penalty(before.pull, start)[0])
        found["largest_drift"] = abs(found["drift"])
    if steps:
        models = seen[steps]
        (loss, *_), exact = task.full(models)
        estimate = task.of_batches(models, index[steps])
        whole = exact + strength * penalty(now.pull, models)[1] + decay * models
        squares, noises, batches = torch.stack([whole, estimate - exact, estimate]).square().sum(dim=2)
        found["potential"] = float(loss) + pulled + decay / 2 * float(start.square().sum())
        found |= {"stationarity": float(squares.mean()), "noise": float(noises.mean())}
        found |= {"largest_noise": float(noises.max()), "largest_gradient": float(batches.max())}
    return found


def follow(federation: Federation, train: TrainSettings, seed: int, rounds: int, every: int = 1) -> Trajectory:
    """Play a fresh federation of `WatchedPFedLMS` and measure it, gradients in every `every`-th round. One more round
    is played than measured, because Ψ^R and the last drift need V^R.

    One number per round r = 0, …, R − 1: means over clients weighted by p_k, and largest values over clients and steps.

    stationarity       (1/E) Σ_e Σ_k p_k ‖∇F_k(θ_k^{r,e}; V^r)‖²
    noise              the same mean of ‖ĝ_k − ∇f_k‖²; `largest_noise` its largest value
    largest_gradient   ‖ĝ_k‖²
    largest_model      ‖θ_k^{r,e}‖; `start` before the first step
    largest_threshold  |τ|, over layers and thresholds, also of V^R
    potential          Ψ^r = Σ_k p_k F_k(θ_k^r; V^r), also Ψ^R
    drift              Σ_k p_k [F_k(θ_k^{r+1}; V^{r+1}) − F_k(θ_k^{r+1}; V^r)]; `largest_drift` of any client
    deviation          σ of all sketched entries
    """
    method, data, clients = federation.method, federation.data, range(federation.data.clients)
    assert isinstance(method, WatchedPFedLMS)
    share = [own / sum(data.samples) for own in data.samples]
    tasks = [ClientTask(federation.model, data, client) for client in clients]
    plan, threads = batches(seed, data), torch.get_num_threads()
    found: Trajectory = {}
    federation.start()
    before: dict[int, Watched] = {}
    for round in range(rounds + 1):
        federation.play_round()
        now, first = method.notes, (round + 1) * train.local_steps
        # Of V^R only the potential before the first step is needed.
        steps = range(0 if round % every else train.local_steps if round < rounds else 1)
        index = plan.indices(tuple(clients), first, train.local_steps, train.batch_size)
        each = (tasks, *zip(*((now[k], before.get(k), index[:, k]) for k in clients), strict=True))
        with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            of = list(pool.map(partial(_measure, decay=train.weight_decay, steps=list(steps)), *each))
        numbers = {"largest_threshold": float(now[0].pull.thresholds.abs().max())}
        for name in of[0]:
            values = [own[name] for own in of]
            largest = name.startswith("largest") or name == "start"
            numbers[name] = max(values) if largest else sum(p * own for p, own in zip(share, values, strict=True))
        for name in AT_THE_END if round == rounds else numbers:
            found.setdefault(name, []).extend([numbers[name]] if name in numbers else [])
        before = now
    return found
