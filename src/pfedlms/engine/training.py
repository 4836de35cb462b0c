"""What clients do on their own data: local steps, evaluation, gradients and features."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from pfedlms import rng
from pfedlms.backend import backend_of, for_each_in_threads, run_overlapped, streams, to_device, to_host_later
from pfedlms.cohort import Cohort
from pfedlms.data.batches import Augmentation, batches
from pfedlms.data.federated import FederatedData
from pfedlms.data.partition import Indices
from pfedlms.engine.borders import named
from pfedlms.engine.criterion import Criterion, check_objective, checked_gradient, checked_step, splitter
from pfedlms.engine.graphs import Replayed, TakeSteps
from pfedlms.engine.participation import Participation
from pfedlms.errors import DivergedError
from pfedlms.methods.contract import Method, Objective
from pfedlms.models.forward import CohortModel
from pfedlms.step import Rate, adamw_step_, clip_, sgd_step_
from pfedlms.train_settings import TrainSettings

Wait = Callable[[], Tensor]
"""Waits for local steps to end: each client's mean task loss in them, `[clients]`, on the host. It raises DivergedError
where a loss or a model is not finite."""

_BATCH = 256  # samples of a client in a batch of an evaluation
_TOKENS = 4096  # of windows of tokens, each of which has an output per entry of the vocabulary
_SHORT, _FEW = 1 << 23, 32  # numbers of a batch of all clients, and batches, that a GPU is soon through with


class LocalWorker:
    """Trains and evaluates cohorts of up to `largest` clients on their own data; with more than one a GPU replays
    local steps as a CUDA graph."""

    def __init__(
        self, model: CohortModel, data: FederatedData, train: TrainSettings, seed: int, participation: Participation,
        largest: int, criterion: Criterion,
    ) -> None:  # fmt: skip
        self._model, self._data, self._train, self._seed, self._participation = model, data, train, seed, participation
        self._criterion = criterion
        self._batches = batches(seed, data)
        crop, flip = (part in train.augment for part in ("crop", "flip"))
        self._augmentation = Augmentation(seed, crop, flip) if crop or flip else None
        # One client after another is the reference, which runs without recordings.
        recorded = (largest > 1 or data.clients == 1) and backend_of(model.initial) == "gpu" and criterion.stacks
        self._replayed = Replayed(largest) if recorded else None
        self._rates = train.rates
        self._plans: dict[tuple[tuple[int, ...], int], Tensor] = {}
        self._places: dict[int, tuple[Any, tuple[int, ...], Tensor]] = {}
        self._sweep = _BATCH if data.positions == 1 else max(1, _TOKENS // data.positions)

    def _run(
        self, steps: TakeSteps, cohort: Cohort, plan: Tensor, objective: Objective, rate: Rate
    ) -> tuple[Cohort, Tensor]:
        """`steps`, recorded and replayed on a GPU."""
        if self._replayed is None:
            return steps(cohort, plan, objective, rate)
        return self._replayed(steps, cohort, plan, objective, rate)

    def local_update(self, method: Method, cohort: Cohort, phase: int) -> tuple[Cohort, Wait]:
        """The clients' work between two exchanges: E local steps on the method's objective, then its `after_training`.
        The losses are those of the E steps. Phase 0 is the start, phase r + 1 belongs to round r. On a GPU the steps
        may still run."""
        with named(method):
            objective = method.objective(cohort, phase - 1) if phase else Objective()
            trained, losses = self._launch(cohort, objective, phase)
            if type(method).after_training is not Method.after_training:
                losses()  # a method's own code gets models that are finite
            return method.after_training(trained, phase, self), losses

    def train(self, cohort: Cohort, objective: Objective, phase: int, steps: int = 0) -> tuple[Cohort, Tensor]:
        """See `ClientWork`."""
        check_objective(objective, cohort)
        trained, losses = self._launch(cohort, objective, phase, steps)
        return trained, losses()

    def _launch(self, cohort: Cohort, objective: Objective, phase: int, steps: int = 0) -> tuple[Cohort, Wait]:
        """The E local steps of one cohort, or `steps` of them."""
        plan = self._drawn(cohort.ids, phase, steps) if steps else self.plan(cohort, phase)
        with self._seeded(cohort, phase):
            trained, losses = self._in_parts(cohort, plan, objective, self._rate(phase))
        measured = to_host_later(losses, trained.params.sum(dim=1))
        if cohort.params.is_cuda and len(cohort.ids) == self._participation.count:
            # While the GPU is still busy with these steps. The plan of this phase is kept for a second training.
            following = self._participation.of(phase + 1), phase + 1
            if following not in self._plans:
                self._plans[following] = self._drawn_beside(*following)

        def wait() -> Tensor:
            found, sums = measured()
            check_finite(trained, found, sums, phase)
            return found

        return trained, wait

    def _rate(self, phase: int) -> Rate:
        """η of a phase; on a GPU as a tensor if it changes, because recorded steps read it there."""
        rate = self._train.learning_rate * self._rates.factor(phase)
        on_device = self._rates.changes and self._model.device.type == "cuda"
        return torch.tensor(rate, dtype=torch.float32, device=self._model.device) if on_device else rate

    def plan(self, cohort: Cohort, phase: int) -> Tensor:
        """Every client's samples in the steps of a phase: `[steps, parts, clients, batch]`. The parts are indices; with
        augmentation three more, how the samples are changed; with epochs one more, 0 in the steps that a client does
        not take."""
        wanted = cohort.ids, phase
        plan = self._plans.get(wanted)
        if plan is None:
            plan = self._drawn(*wanted)
        self._plans = {key: kept for key, kept in self._plans.items() if key[1] > phase} | {wanted: plan}
        return plan

    def _drawn_beside(self, ids: tuple[int, ...], phase: int) -> Tensor:
        """A plan, drawn on a stream of its own while the GPU is busy with other work."""
        device = self._model.device
        current, (side,) = torch.cuda.current_stream(device), streams(device, "plan", 1)
        with torch.cuda.stream(side):
            plan = self._drawn(ids, phase)
        current.wait_stream(side)
        plan.record_stream(current)
        return plan

    def _drawn(self, ids: tuple[int, ...], phase: int, steps: int = 0) -> Tensor:
        """The plan of E steps, or of `steps` that begin with the same samples."""
        size, epochs = self._train.batch_size, self._train.local_epochs > 0
        own = self._steps_of(ids) if epochs else np.array(self._train.local_steps)
        most = steps or self._most_steps(int(own.max()))
        parts = [self._batches.indices(ids, phase * own, most, size).unsqueeze(1)]
        if self._augmentation is not None:
            parts.append(self._augmentation.draws(ids, phase * own, most, size, parts[0]))
        if epochs:
            takes = torch.arange(most).unsqueeze(1) < torch.from_numpy(np.maximum(own, steps))
            parts.append(takes.long().to(parts[0].device)[:, None, :, None].expand_as(parts[0]))
        return torch.cat(parts, dim=1) if len(parts) > 1 else parts[0]

    def _steps_of(self, ids: tuple[int, ...]) -> NDArray[np.int64]:
        """Local steps of every client, where they train for epochs."""
        samples = self._data.samples
        return np.array([self._train.steps_of(samples[client]) for client in ids])

    def _most_steps(self, needed: int) -> int:
        """Steps of a plan in which the client with most samples takes `needed`. Recorded steps have few lengths: the
        largest of all clients, half of it, a quarter, …"""
        if not self._train.local_epochs or self._replayed is None:
            return needed
        most = self._train.steps_of(max(self._data.samples))
        while most // 2 >= needed:
            most //= 2
        return most

    def _in_parts(self, cohort: Cohort, plan: Tensor, objective: Objective, rate: Rate) -> tuple[Cohort, Tensor]:
        """All steps of some clients, then of the next ones, in the parts that suit the model."""
        parts = self._model.parts(len(cohort.ids))
        if len(parts) == 1:
            return self._run(self._steps, cohort, plan, objective, rate)
        # What steps change; the rest of the state belongs to the method.
        trained = replace(cohort, state={}, scratch={}).each(torch.empty_like)
        losses, objective_of = torch.empty(len(cohort.ids)), splitter(objective)

        def train(rows: slice) -> None:
            part, losses[rows] = self._run(self._steps, cohort.rows(rows), plan[:, :, rows], objective_of(rows), rate)
            trained.rows(rows).each(Tensor.copy_, part)

        for_each_in_threads(train, parts)
        return replace(trained, state=cohort.state, scratch=cohort.scratch), losses

    def _steps(self, cohort: Cohort, plan: Tensor, objective: Objective, rate: Rate) -> tuple[Cohort, Tensor]:
        """Steps on the samples of a plan; a pure function of its arguments, so that it can be replayed."""
        settings = self._train
        # Steps write into these copies and into one buffer of gradients: new memory in every step would cost more time
        # than the arithmetic.
        params, momentum = cohort.params.clone(), cohort.momentum.clone()
        buffers = {name: value.clone() for name, value in cohort.buffers.items()}
        losses, gradients = torch.zeros(len(params), device=params.device), torch.empty_like(params)
        targets, minimised = self._data.y[plan[:, 0]], partial(self._criterion.training_losses, splitter(objective))
        uneven = settings.local_epochs > 0
        for step, (chosen, y) in enumerate(zip(plan, targets, strict=True)):
            pull, x = partial(checked_gradient, objective, params), self._training_samples(chosen)
            task = partial(self._model.gradient, gradients, params, buffers, x, y, minimised, objective.needs_features)
            # The pull depends only on the models, so it is computed in parallel with the gradient of the loss.
            before = [value.clone() for value in (params, momentum, *buffers.values())] if uneven else []
            extra, loss = run_overlapped(pull, task, self._model.device, "pull")
            losses += torch.where(chosen[-1, :, 0] > 0, loss, 0.0) if uneven else loss
            if settings.clip:
                clip_(gradients, extra, settings.clip)
                extra = None
            if settings.optimizer == "adamw":
                adamw_step_(params, gradients, extra, momentum, rate, settings.weight_decay)
            else:
                sgd_step_(params, gradients, extra, momentum, rate, settings.momentum, settings.weight_decay)
            params = checked_step(objective, params, step)
            if uneven:  # clients that have taken all their steps stay as they were
                after = (params, momentum, *buffers.values())
                params, momentum, *rest = _of_takers(chosen[-1, :, 0] > 0, after, before)
                buffers = dict(zip(buffers, rest, strict=True))
        taken = plan[:, -1, :, 0].sum(dim=0) if uneven else len(plan)
        return replace(cohort, params=params, momentum=momentum, buffers=buffers), losses / taken

    def mean_gradient(self, cohort: Cohort, params: Tensor, round: int) -> Tensor:
        """See `ClientWork`; running statistics are left as they are."""
        start, plan = cohort.with_model(params), self.plan(cohort, round + 1)
        with self._seeded(cohort, round + 1):
            summed, _ = self._run(self._gradients, start, plan, Objective(), 0.0)
        if not self._train.local_epochs:
            return summed.params / self._train.local_steps
        return summed.params / torch.from_numpy(self._steps_of(cohort.ids)).to(params).unsqueeze(1)

    def _gradients(self, cohort: Cohort, plan: Tensor, objective: Objective, rate: Rate) -> tuple[Cohort, Tensor]:
        """Sums of gradients at one model, in `params` of the cohort returned, and the losses. It has the signature of
        `_steps`, so that `Replayed` can record it, too."""
        buffers = {name: value.clone() for name, value in cohort.buffers.items()}
        total, gradients = torch.zeros_like(cohort.params), torch.empty_like(cohort.params)
        losses = torch.zeros(len(total), device=total.device)
        minimised = partial(self._criterion.training_losses, splitter(objective))
        for chosen in plan:
            x, y = self._training_samples(chosen), self._data.y[chosen[0]]
            losses += self._model.gradient(gradients, cohort.params, buffers, x, y, minimised)
            total += gradients * (chosen[-1, :, :1] > 0) if self._train.local_epochs else gradients
        return replace(cohort, params=total), losses / len(plan)

    def losses(self, cohort: Cohort, params: Tensor, round: int, step: int) -> Tensor:
        """See `ClientWork`."""
        plan, found = self.plan(cohort, round + 1), torch.empty(len(params), device=params.device)
        x, y = self._training_samples(plan[step]), self._data.y[plan[step, 0]]
        buffers = {name: value.clone() for name, value in cohort.buffers.items()}

        def measure(rows: slice) -> None:
            own = {name: value[rows] for name, value in buffers.items()}
            with torch.no_grad():
                outputs, _ = self._model.forward(params[rows], own, x[rows], training=True)
                found[rows] = (
                    self._criterion.losses(outputs, y[rows]).mean(dim=1) / self._data.positions
                )  # a mean over tokens, as steps have it

        with self._seeded(cohort, round + 1):
            for_each_in_threads(measure, self._model.parts(len(params)))
        return found

    def class_features(self, cohort: Cohort) -> tuple[Tensor, Tensor]:
        """See `ClientWork`."""
        clients, classes = len(cohort.ids), self._data.classes
        device = cohort.params.device
        sums = torch.zeros(clients, classes, self._model.feature_size, device=device)
        counts = torch.zeros(clients, classes, device=device)
        for x, y, mask in self._batches_at(self._all_places(cohort.ids, self._data.train)):
            with torch.no_grad():
                _, features = self._model.forward(cohort.params, cohort.buffers, x, training=False, features=True)
            assert features is not None  # asked for above
            # Tokens of a window are samples of their own.
            features, y, mask = features.flatten(1, -2), y.flatten(1), mask.repeat_interleave(self._data.positions, 1)
            member = F.one_hot(y, classes).to(features.dtype) * mask.unsqueeze(-1)
            # A client at a time and without the padding, so that the order of the sum does not depend on the grouping.
            for row, own in enumerate(mask.sum(dim=1).tolist()):
                sums[row] += member[row, :own].T @ features[row, :own]
            counts += member.sum(dim=1)
        return sums / counts.clamp(min=1).unsqueeze(-1), counts

    def evaluate(self, cohort: Cohort, params: Tensor, held: Sequence[Indices]) -> tuple[Tensor, Tensor]:
        """Correct predictions (or summed scores) and summed loss of each client's `params` on its own samples of
        `held`, with its own running statistics."""
        kind = torch.int64 if self._criterion.score is None else torch.float64
        self._data.find(cohort.ids)
        places = self._all_places(cohort.ids, held)
        own = replace(cohort.without_round_values(), state={}, params=params.expand_as(cohort.params))
        found = torch.empty(len(cohort.ids), 2, dtype=torch.float64, device=cohort.params.device)
        # Other clients would have other places in every evaluation, and a custom metric may look at values.
        known = len(cohort.ids) == self._data.clients and self._criterion.score is None
        # The host takes longer to launch an evaluation of small models than a GPU to compute it.
        numbers = len(cohort.ids) * self._sweep * self._data.x[0].numel()
        short = numbers <= _SHORT and places.shape[3] <= _FEW * self._sweep
        run = partial(self._run, self._scores) if known and short else self._scores

        def test(rows: slice) -> None:
            found[rows] = run(own.rows(rows), places[:, :, rows], Objective(), 0.0)[1]

        for_each_in_threads(test, self._model.parts(len(cohort.ids)))
        return found[:, 0].to(kind), found[:, 1]

    def _scores(self, cohort: Cohort, places: Tensor, objective: Objective, rate: Rate) -> tuple[Cohort, Tensor]:
        """Summed scores and losses at `places`, `[clients, 2]`. It has the signature of `_steps`, so that `Replayed`
        can record it, too."""
        kind = torch.int64 if self._criterion.score is None else torch.float64
        found = torch.zeros(len(cohort.ids), 2, dtype=torch.float64, device=cohort.params.device)
        for x, y, mask in self._batches_at(places):
            with torch.no_grad():
                outputs, _ = self._model.forward(cohort.params, cohort.buffers, x, training=False)
                score, loss = self._criterion.measured(outputs, y)
            found[:, 0] += score.masked_fill(~mask, 0).to(kind).sum(dim=1)
            found[:, 1] += loss.masked_fill(~mask, 0).double().sum(dim=1)
        return cohort, found

    def _all_places(self, ids: tuple[int, ...], held: Sequence[Indices]) -> Tensor:
        """Every client's samples of `held` and, in a second part, 1 where there is one: `[1, 2, clients, most]`. On a
        GPU the last ones are kept: to find them takes longer than to use them."""
        kept = self._places.get(id(held))
        if kept is None or kept[0] is not held or kept[1] != ids:
            lengths = np.array([len(held[client]) for client in ids])
            places = np.zeros((1, 2, len(ids), int(lengths.max())), dtype=np.int64)
            for row, client in enumerate(ids):
                places[0, 0, row, : lengths[row]] = held[client]
                places[0, 1, row, : lengths[row]] = 1
            kept = held, ids, to_device(torch.from_numpy(places), self._data.x.device)
            if self._data.x.is_cuda:
                self._places = {**dict(list(self._places.items())[-3:]), id(held): kept}
        return kept[2]

    def _batches_at(self, places: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Samples and targets `[clients, batch, …]`, and a mask: False where a client has no more samples."""
        for own in torch.split(places[0], self._sweep, dim=2):
            yield self._samples_at(own[0]), self._data.y[own[0]], own[1] > 0

    def _training_samples(self, chosen: Tensor) -> Tensor:
        """One step's samples, from one step of a plan."""
        x = self._samples_at(chosen[0])
        return x if self._augmentation is None else self._augmentation.apply(x, chosen[1:4])

    def _samples_at(self, index: Tensor) -> Tensor:
        """Samples `[clients, batch, …]` by `index: [clients, batch]`; whole rows are copied faster than entries."""
        return self._data.x.index_select(0, index.flatten()).view(*index.shape, *self._data.shape)

    @contextmanager
    def _seeded(self, cohort: Cohort, phase: int) -> Iterator[None]:
        """Within it PyTorch's generators, which Dropout uses, are seeded; after it they are as before."""
        key, device = rng.stream(self._seed, "module", phase, cohort.ids[0]), self._model.device
        devices = [device] if device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices):
            torch.default_generator.manual_seed(key % (1 << 63))
            for each in devices:
                with torch.cuda.device(each):
                    torch.cuda.manual_seed(key % (1 << 63))
            yield


def _of_takers(takes: Tensor, after: Iterable[Tensor], before: Iterable[Tensor]) -> list[Tensor]:
    """Each tensor as it is after a step for clients that take it, `takes: [clients]`, and as before for the others."""
    pairs = zip(after, before, strict=True)
    return [torch.where(takes.view(-1, *[1] * (new.ndim - 1)), new, old) for new, old in pairs]


def check_finite(cohort: Cohort, losses: Tensor, sums: Tensor, phase: int) -> None:
    """Raise if a client's loss or model is no longer finite, and name the client; `sums` are of its parameters."""
    # A sum with NaN or infinity in it is not finite. A sum that only overflows is checked entry by entry.
    if torch.isfinite(losses + sums).all():
        return
    fine = (torch.isfinite(losses) & torch.isfinite(cohort.params).all(dim=1).cpu()).tolist()
    if not all(fine):
        client = cohort.ids[fine.index(False)]
        when = f"round {phase}" if phase else "the local steps before round 1"
        raise DivergedError(
            f"{when}: the loss or the model of client {client} is not finite any more; "
            "lower train.learning_rate or what the method itself moves by (method.strength, method.gain, …)"
        )
