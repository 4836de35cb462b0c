"""What clients do: they execute the server's orders, and train and measure on their own data.

All of it works on a cohort: the stacked clients of a simulation, or the one client of a node.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from pfedlms import rng
from pfedlms.backend import backend_of, for_each_in_threads, run_overlapped, streams, to_device, to_host, to_host_later
from pfedlms.checks import check_integer
from pfedlms.cohort import Cohort, Tensors
from pfedlms.data.batches import Augmentation, batches
from pfedlms.data.federated import FederatedData
from pfedlms.data.partition import Indices
from pfedlms.engine import guard
from pfedlms.engine.criterion import Criterion, splitter
from pfedlms.engine.graphs import Replayed, TakeSteps
from pfedlms.engine.participation import Participation
from pfedlms.engine.reports import Counts
from pfedlms.engine.terms import Terms
from pfedlms.engine.transport import Code, Record, Split
from pfedlms.errors import DivergedError
from pfedlms.methods.contract import Method, Objective
from pfedlms.models.forward import CohortModel
from pfedlms.step import Rate, adamw_step_, clip_, sgd_step_
from pfedlms.train_settings import TrainSettings
from pfedlms.wire.fields import Message
from pfedlms.wire.frames import SERVER, Intake, Received

WaitForLosses = Callable[[], Tensor]
"""Waits for local steps to end. Returns each client's mean task loss in them, `[clients]`, on the host. It raises
DivergedError if a loss or a model is not finite."""

_BATCH = 256  # samples of a client in a batch of an evaluation
_TOKENS = 4096  # the same for windows of tokens: each token has an output for every entry of the vocabulary
_SMALL_BATCH, _FEW_BATCHES = 1 << 23, 32  # numbers in a batch of all clients, and batches, that take a GPU little time


class Client:
    """The clients' half of a run. All methods are pure functions: they take a cohort and return a new one.

    Args:
        terms: what both ends know.
        work: local steps and measurements on the clients' data.
        data: which client holds which samples.
    """

    def __init__(self, terms: Terms, work: LocalWorker, data: FederatedData) -> None:
        self.method, self.digest, self.catch_up = terms.method, terms.digest, terms.catch_up
        self.work, self._data = work, data

    def message_of(self, order: Record) -> Message:
        """The message that an ANSWER or a MODEL carries."""
        if order.code == Code.MODEL:
            return self.catch_up.message_of(order.data)
        return self.method.exchanges[order.index].down

    def read(self, order: Record) -> Received:
        """Check and decode what an ANSWER or a MODEL carries. Raises the WireError that says what is wrong with it."""
        return Intake(self.message_of(order), self.digest, order.number, (SERVER,)).accept(order.data)

    def receive(self, cohort: Cohort, order: Record, received: Received) -> Cohort:
        """Clients after an ANSWER or a MODEL."""
        if order.code == Code.MODEL:
            return self.catch_up.receive(cohort, self.message_of(order), received)
        values = {name: torch.from_numpy(value) for name, value in received.values.items()}
        return self.method.exchanges[order.index].client_receive(cohort, values, order.number)

    def send(self, cohort: Cohort, order: Record) -> tuple[Cohort, Tensors]:
        """Clients after SEND, and the values of their messages, `[clients, …]`."""
        return self.method.exchanges[order.index].client_send(cohort, order.number, self.work)

    def train(self, cohort: Cohort, phase: int) -> tuple[Cohort, Tensor]:
        """Clients after the local steps of a phase, and the loss of each."""
        trained, wait_for_losses = self.work.local_update(self.method, cohort, phase)
        return trained, wait_for_losses()

    def measure_personal(self, cohort: Cohort) -> dict[Split, Counts]:
        """Measure every client's own model on its test split, and on its validation split if there are any."""
        counts = {Split.TEST: self._measure(cohort, cohort.params, self._data.test)}
        if self._data.validation:
            counts[Split.VALIDATION] = self._measure(cohort, cohort.params, self._data.validation)
        return counts

    def measure_shared(self, cohort: Cohort) -> Counts:
        """Measure the model that all clients share before their local steps on each test split; nothing if there is
        none."""
        shared = self.method.global_model(cohort)
        return {} if shared is None else self._measure(cohort, shared, self._data.test)

    def _measure(self, cohort: Cohort, params: Tensor, split: Sequence[Indices]) -> Counts:
        correct, losses = to_host(*self.work.evaluate(cohort, params, split))
        sizes = [len(split[client]) * self._data.positions for client in cohort.ids]
        return dict(zip(cohort.ids, zip(correct.tolist(), losses.tolist(), sizes, strict=True), strict=True))


def to_arrays(values: Tensors) -> dict[str, Any]:
    """Tensors as NumPy arrays, on the host."""
    return {name: value.numpy() for name, value in zip(values, to_host(*values.values()), strict=True)}


class LocalWorker:
    """Trains and evaluates cohorts of up to `largest` clients on their own data. If `largest` is above 1, a GPU replays
    local steps as a CUDA graph."""

    def __init__(
        self, model: CohortModel, data: FederatedData, train: TrainSettings, seed: int, participation: Participation,
        largest: int, criterion: Criterion,
    ) -> None:  # fmt: skip
        self._model, self._data, self._train, self._seed, self._participation = model, data, train, seed, participation
        self._criterion = criterion
        self._score_dtype = torch.int64 if criterion.score is None else torch.float64
        self._batches = batches(seed, data)
        crop, flip = (part in train.augment for part in ("crop", "flip"))
        self._augmentation = Augmentation(seed, crop, flip) if crop or flip else None
        # Cohorts of one client are the reference, which runs without recordings.
        recorded = (largest > 1 or data.clients == 1) and backend_of(model.initial) == "gpu" and criterion.stacks
        self._replayed = Replayed(largest) if recorded else None
        self._schedule = train.rates
        self._plans: dict[tuple[tuple[int, ...], int], Tensor] = {}
        self._split_indices: dict[int, tuple[Any, tuple[int, ...], Tensor]] = {}
        self._evaluation_batch = _BATCH if data.positions == 1 else max(1, _TOKENS // data.positions)

    def _run(
        self, steps: TakeSteps, cohort: Cohort, plan: Tensor, objective: Objective, rate: Rate
    ) -> tuple[Cohort, Tensor]:
        """Call `steps`; on a GPU it is recorded and replayed."""
        if self._replayed is None:
            return steps(cohort, plan, objective, rate)
        return self._replayed(steps, cohort, plan, objective, rate)

    def local_update(self, method: Method, cohort: Cohort, phase: int) -> tuple[Cohort, WaitForLosses]:
        """The clients' work between two exchanges: E local steps on the method's objective, then its `after_training`.
        The losses are those of the E steps. Phase 0 is the start, phase r + 1 belongs to round r. On a GPU the steps
        may still run when this returns."""
        with guard.name_method_in_errors(method):
            objective = method.objective(cohort, phase - 1) if phase else Objective()
            trained, wait_for_losses = self._launch(cohort, objective, phase)
            if type(method).after_training is not Method.after_training:
                wait_for_losses()  # raises if a model is not finite, before the method's own code gets it
            return method.after_training(trained, phase, self), wait_for_losses

    def train(self, cohort: Cohort, objective: Objective, phase: int, steps: int = 0) -> tuple[Cohort, Tensor]:
        """See `ClientWork`."""
        guard.check_objective(objective, cohort)
        check_integer("phase", phase, 0)
        check_integer("steps", steps, 0)
        trained, wait_for_losses = self._launch(cohort, objective, phase, steps)
        return trained, wait_for_losses()

    def _launch(self, cohort: Cohort, objective: Objective, phase: int, steps: int = 0) -> tuple[Cohort, WaitForLosses]:
        """Launch the E local steps of one cohort, or `steps` of them."""
        plan = self._draw_plan(cohort.ids, phase, steps) if steps else self.plan(cohort, phase)
        with self._seeded(cohort, "module", phase), guard.leaves_unchanged(objective):
            trained, losses = self._train_in_parts(cohort, plan, objective, self._rate(phase))
        losses_and_sums = to_host_later(losses, trained.params.sum(dim=1))
        if cohort.params.is_cuda and len(cohort.ids) == self._participation.count:
            # While the GPU is still busy with these steps. The plan of this phase is kept for a second training.
            following = self._participation.of(phase + 1), phase + 1
            if following not in self._plans:
                self._plans[following] = self._draw_plan_on_side_stream(*following)

        def wait_for_losses() -> Tensor:
            losses, sums = losses_and_sums()
            check_finite(trained, losses, sums, phase)
            return losses

        return trained, wait_for_losses

    def _rate(self, phase: int) -> Rate:
        """η of a phase; on a GPU as a tensor if it changes, because recorded steps read it there."""
        rate = self._train.learning_rate * self._schedule.factor(phase)
        on_device = self._schedule.changes and self._model.device.type == "cuda"
        return torch.tensor(rate, dtype=torch.float32, device=self._model.device) if on_device else rate

    def plan(self, cohort: Cohort, phase: int) -> Tensor:
        """Every client's samples in the steps of a phase: `[steps, parts, clients, batch]`. The first part has indices.
        With augmentation three more parts say how samples are changed. With epochs a last part is 0 in the steps that a
        client does not take."""
        key = cohort.ids, phase
        plan = self._plans.get(key)
        if plan is None:
            plan = self._draw_plan(*key)
        self._plans = {other: later for other, later in self._plans.items() if other[1] > phase} | {key: plan}
        return plan

    def _draw_plan_on_side_stream(self, ids: tuple[int, ...], phase: int) -> Tensor:
        """Draw a plan on a stream of its own while the GPU is busy with other work."""
        device = self._model.device
        current, (side,) = torch.cuda.current_stream(device), streams(device, "plan", 1)
        with torch.cuda.stream(side):
            plan = self._draw_plan(ids, phase)
        current.wait_stream(side)
        plan.record_stream(current)
        return plan

    def _draw_plan(self, ids: tuple[int, ...], phase: int, steps: int = 0) -> Tensor:
        """The plan of E steps, or of `steps` that begin with the same samples."""
        size, epochs = self._train.batch_size, self._train.local_epochs > 0
        counts = self._steps_of(ids) if epochs else np.array(self._train.local_steps)
        length = steps or self._plan_length(int(counts.max()))
        parts = [self._batches.indices(ids, phase * counts, length, size).unsqueeze(1)]
        if self._augmentation is not None:
            parts.append(self._augmentation.draws(ids, phase * counts, length, size, parts[0]))
        if epochs:
            takes = torch.arange(length).unsqueeze(1) < torch.from_numpy(np.maximum(counts, steps))
            parts.append(takes.long().to(parts[0].device)[:, None, :, None].expand_as(parts[0]))
        return torch.cat(parts, dim=1) if len(parts) > 1 else parts[0]

    def _steps_of(self, ids: tuple[int, ...]) -> NDArray[np.int64]:
        """The number of local steps of every client, if they train for epochs."""
        samples = self._data.samples
        return np.array([self._train.steps_of(samples[client]) for client in ids])

    def _plan_length(self, needed: int) -> int:
        """Steps of a plan in which the client with most samples takes `needed`. Plans of recorded steps have few
        lengths: the steps of the client with most samples of all, half of them, a quarter, …"""
        if not self._train.local_epochs or self._replayed is None:
            return needed
        length = self._train.steps_of(max(self._data.samples))
        while length // 2 >= needed:
            length //= 2
        return length

    def _train_in_parts(self, cohort: Cohort, plan: Tensor, objective: Objective, rate: Rate) -> tuple[Cohort, Tensor]:
        """Take all steps of some clients, then of the next ones, in groups of the size that suits the model."""
        parts = self._model.parts(len(cohort.ids))
        if len(parts) == 1:
            return self._run(self._steps, cohort, plan, objective, rate)
        # Steps change these tensors; the method's own state stays as it is.
        trained = replace(cohort, state={}, scratch={}).each(torch.empty_like)
        losses, objective_of = torch.empty(len(cohort.ids)), splitter(objective)

        def train(rows: slice) -> None:
            part, losses[rows] = self._run(self._steps, cohort.rows(rows), plan[:, :, rows], objective_of(rows), rate)
            trained.rows(rows).each(Tensor.copy_, part)

        for_each_in_threads(train, parts)
        return replace(trained, state=cohort.state, scratch=cohort.scratch), losses

    def _steps(self, cohort: Cohort, plan: Tensor, objective: Objective, rate: Rate) -> tuple[Cohort, Tensor]:
        """Take steps on the samples of a plan: a pure function of its arguments, so that it can be replayed."""
        settings = self._train
        # Steps write into these copies and into one buffer of gradients, because new memory in every step would cost
        # more time than the arithmetic.
        params, momentum = cohort.params.clone(), cohort.momentum.clone()
        buffers = _copy(cohort.buffers)
        losses, gradients = torch.zeros(len(params), device=params.device), torch.empty_like(params)
        targets = self._data.y[plan[:, 0]]
        loss_of = partial(self._criterion.training_losses, guard.objective_feature_loss(objective))
        uneven = settings.local_epochs > 0  # clients may take different numbers of steps
        for step, (chosen, y) in enumerate(zip(plan, targets, strict=True)):
            pull, x = partial(guard.objective_gradient, objective, params), self._training_samples(chosen)
            task = partial(self._model.gradient, gradients, params, buffers, x, y, loss_of, objective.needs_features)
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
            params = guard.objective_after_step(objective, params, step)
            if uneven:  # clients that have taken all their steps stay as they were
                after = (params, momentum, *buffers.values())
                params, momentum, *rest = _select_clients(chosen[-1, :, 0] > 0, after, before)
                buffers = dict(zip(buffers, rest, strict=True))
        steps_taken = plan[:, -1, :, 0].sum(dim=0) if uneven else len(plan)
        return replace(cohort, params=params, momentum=momentum, buffers=buffers), losses / steps_taken

    def mean_gradient(self, cohort: Cohort, params: Tensor, phase: int) -> Tensor:
        """See `ClientWork`. Running statistics do not change."""
        check_integer("phase", phase, 0)
        start, plan = cohort.with_model(params), self.plan(cohort, phase)
        with self._seeded(cohort, "module", phase):
            summed, _ = self._run(self._gradients, start, plan, Objective(), 0.0)
        if not self._train.local_epochs:
            return summed.params / self._train.local_steps
        return summed.params / torch.from_numpy(self._steps_of(cohort.ids)).to(params).unsqueeze(1)

    def _gradients(self, cohort: Cohort, plan: Tensor, objective: Objective, rate: Rate) -> tuple[Cohort, Tensor]:
        """Sums of gradients at one model, in `params` of the cohort returned, and the losses. The signature is that of
        `_steps`, so that `Replayed` can record it, too."""
        buffers = _copy(cohort.buffers)
        total, gradients = torch.zeros_like(cohort.params), torch.empty_like(cohort.params)
        losses = torch.zeros(len(total), device=total.device)
        loss_of = partial(self._criterion.training_losses, guard.objective_feature_loss(objective))
        for chosen in plan:
            x, y = self._training_samples(chosen), self._data.y[chosen[0]]
            losses += self._model.gradient(gradients, cohort.params, buffers, x, y, loss_of)
            total += gradients * (chosen[-1, :, :1] > 0) if self._train.local_epochs else gradients
        return replace(cohort, params=total), losses / len(plan)

    def losses(self, cohort: Cohort, params: Tensor, phase: int, step: int) -> Tensor:
        """See `ClientWork`."""
        check_integer("phase", phase, 0)
        params, plan = params.expand_as(cohort.params), self.plan(cohort, phase)
        check_integer("step", step, 0, len(plan) - 1)
        losses = torch.empty(len(params), device=params.device)
        x, y = self._training_samples(plan[step]), self._data.y[plan[step, 0]]
        buffers = _copy(cohort.buffers)

        def measure(rows: slice) -> None:
            part = {name: value[rows] for name, value in buffers.items()}
            with torch.no_grad():
                outputs, _ = self._model.forward(params[rows], part, x[rows], training=True)
                losses[rows] = (
                    self._criterion.losses(outputs, y[rows]).mean(dim=1) / self._data.positions
                )  # a mean over tokens, as in local steps

        with self._seeded(cohort, "module", phase):
            for_each_in_threads(measure, self._model.parts(len(params)))
        return losses

    def class_features(self, cohort: Cohort) -> tuple[Tensor, Tensor]:
        """See `ClientWork`."""
        clients, classes = len(cohort.ids), self._data.classes
        if clients > 1 and self._mixes_samples:
            alone = [self.class_features(cohort.rows(slice(row, row + 1))) for row in range(clients)]
            means, sizes = zip(*alone, strict=True)
            return torch.cat(means), torch.cat(sizes)
        device = cohort.params.device
        sums = torch.zeros(clients, classes, self._model.feature_size, device=device)
        counts = torch.zeros(clients, classes, device=device)
        buffers = _copy(cohort.buffers)
        with self._seeded(cohort, "features"):
            for x, y, mask in self._batches_at(self._indices_of(cohort.ids, self._data.train)):
                with torch.no_grad():
                    _, features = self._model.forward(cohort.params, buffers, x, training=False, features=True)
                assert features is not None  # asked for above
                # Tokens of a window are samples of their own.
                features, y = features.flatten(1, -2), y.flatten(1)
                mask = mask.repeat_interleave(self._data.positions, 1)
                member = F.one_hot(y, classes).to(features.dtype) * mask.unsqueeze(-1)
                # A client at a time and without the padding, so that the order of the sum does not depend on the
                # grouping.
                for row, count in enumerate(mask.sum(dim=1).tolist()):
                    sums[row] += member[row, :count].T @ features[row, :count]
                counts += member.sum(dim=1)
        return sums / counts.clamp(min=1).unsqueeze(-1), counts

    def evaluate(self, cohort: Cohort, params: Tensor, split: Sequence[Indices]) -> tuple[Tensor, Tensor]:
        """Correct predictions (or summed scores) and summed loss of each client's `params` on its own samples of
        `split`, with its own running statistics."""
        self._data.prefetch(cohort.ids)
        if len(cohort.ids) > 1 and self._mixes_samples:
            rows = [slice(row, row + 1) for row in range(len(cohort.ids))]
            every = params.expand_as(cohort.params)
            scores, losses = zip(*(self.evaluate(cohort.rows(row), every[row], split) for row in rows), strict=True)
            return torch.cat(scores), torch.cat(losses)
        indices = self._indices_of(cohort.ids, split)
        stripped = replace(cohort.without_round_values(), state={}, params=params.expand_as(cohort.params))
        results = torch.empty(len(cohort.ids), 2, dtype=torch.float64, device=cohort.params.device)
        # Other clients would have other indices in every evaluation, and a custom metric may read values.
        repeats = len(cohort.ids) == self._data.clients and self._criterion.score is None
        # The host takes longer to launch an evaluation of small models than a GPU to compute it.
        numbers = len(cohort.ids) * self._evaluation_batch * self._data.x[0].numel()
        short = numbers <= _SMALL_BATCH and indices.shape[3] <= _FEW_BATCHES * self._evaluation_batch
        run = partial(self._run, self._scores) if repeats and short else self._scores

        def measure(rows: slice) -> None:
            results[rows] = run(stripped.rows(rows), indices[:, :, rows], Objective(), 0.0)[1]

        with self._seeded(cohort, "evaluation"):
            for_each_in_threads(measure, self._model.parts(len(cohort.ids)))
        return results[:, 0].to(self._score_dtype), results[:, 1]

    @cached_property
    def _mixes_samples(self) -> bool:
        """Whether an output depends on the other samples of its batch in evaluation, too, by more than rounding, as
        with batch norm without running statistics. Then clients are evaluated one by one: padding would change them."""
        cohort, outputs = self._model.cohort((0,), (1,)), []
        x = self._samples_at(torch.arange(8, device=self._data.x.device).unsqueeze(0) % len(self._data.x))
        for others in (x[:, 4:], x[:, :4]):
            batch, buffers = torch.cat([x[:, :4], others], dim=1), _copy(cohort.buffers)
            with torch.no_grad(), self._seeded(cohort, "evaluation"):
                outputs.append(self._model.forward(cohort.params, buffers, batch, training=False)[0][:, :4])
        one, other = outputs
        return not bool((one - other).abs().max() <= 1e-3 * one.abs().max())

    def _scores(self, cohort: Cohort, indices: Tensor, objective: Objective, rate: Rate) -> tuple[Cohort, Tensor]:
        """Summed scores and losses on the samples at `indices`, `[clients, 2]`. The signature is that of `_steps`, so
        that `Replayed` can record it, too."""
        sums = torch.zeros(len(cohort.ids), 2, dtype=torch.float64, device=cohort.params.device)
        buffers = _copy(cohort.buffers)
        for x, y, mask in self._batches_at(indices):
            with torch.no_grad():
                outputs, _ = self._model.forward(cohort.params, buffers, x, training=False)
                score, loss = self._criterion.scores_and_losses(outputs, y)
            sums[:, 0] += score.masked_fill(~mask, 0).to(self._score_dtype).sum(dim=1)
            sums[:, 1] += loss.masked_fill(~mask, 0).double().sum(dim=1)
        return cohort, sums

    def _indices_of(self, ids: tuple[int, ...], split: Sequence[Indices]) -> Tensor:
        """Every client's samples of `split` and, in a second part, 1 where there is one: `[1, 2, clients, most]`. On a
        GPU the last ones are cached, because collecting them takes longer than using them."""
        cached = self._split_indices.get(id(split))
        if cached is None or cached[0] is not split or cached[1] != ids:
            lengths = np.array([len(split[client]) for client in ids])
            indices = np.zeros((1, 2, len(ids), int(lengths.max())), dtype=np.int64)
            for row, client in enumerate(ids):
                indices[0, 0, row, : lengths[row]] = split[client]
                indices[0, 1, row, : lengths[row]] = 1
            cached = split, ids, to_device(torch.from_numpy(indices), self._data.x.device)
            if self._data.x.is_cuda:
                self._split_indices = {**dict(list(self._split_indices.items())[-3:]), id(split): cached}
        return cached[2]

    def _batches_at(self, indices: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Samples and targets `[clients, batch, …]`, and a mask: False where a client has no more samples."""
        for batch in torch.split(indices[0], self._evaluation_batch, dim=2):
            yield self._samples_at(batch[0]), self._data.y[batch[0]], batch[1] > 0

    def _training_samples(self, chosen: Tensor) -> Tensor:
        """The samples of one step of a plan."""
        x = self._samples_at(chosen[0])
        return x if self._augmentation is None else self._augmentation.apply(x, chosen[1:4])

    def _samples_at(self, index: Tensor) -> Tensor:
        """Samples `[clients, batch, …]` by `index: [clients, batch]`; whole rows are copied faster than entries."""
        return self._data.x.index_select(0, index.flatten()).view(*index.shape, *self._data.shape)

    @contextmanager
    def _seeded(self, cohort: Cohort, purpose: str, *counters: int) -> Iterator[None]:
        """Within it the generators that Dropout and the user's modules draw from are seeded; after it they are as
        before."""
        key = rng.stream(self._seed, purpose, *counters, cohort.ids[0])
        with rng.forked_generators(self._model.device, key):
            yield


def _select_clients(takes: Tensor, after: Iterable[Tensor], before: Iterable[Tensor]) -> list[Tensor]:
    """Each tensor as after a step for clients that take it, `takes: [clients]`, and as before it for the others."""
    pairs = zip(after, before, strict=True)
    return [torch.where(takes.view(-1, *[1] * (new.ndim - 1)), new, old) for new, old in pairs]


def check_finite(cohort: Cohort, losses: Tensor, sums: Tensor, phase: int) -> None:
    """Raise DivergedError if a client's loss or model is not finite, and name the client. `sums` are those of the
    clients' parameters."""
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


def _copy(buffers: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copies of clients' buffers: what a module does to them does not reach the clients."""
    return {name: value.clone() for name, value in buffers.items()}
