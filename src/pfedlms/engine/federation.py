"""A whole federation in one process: all clients in one cohort (stacked), or one cohort each (the reference)."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import torch

from pfedlms.backend import own_threads
from pfedlms.cohort import Cohort
from pfedlms.data.federated import FederatedData
from pfedlms.engine.exchange import Channel, Link, check_finite, perfect_link
from pfedlms.engine.reports import Evaluation, RoundReport
from pfedlms.engine.stopwatch import NoStopwatch, Stopwatch
from pfedlms.engine.training import LocalWorker, TrainSettings
from pfedlms.methods.contract import Method, Objective, Task
from pfedlms.models.forward import CohortModel
from pfedlms.wire.frames import VERSION, agreement_digest


class Federation:
    """Clients and server of one run, and the state they are in.

    Args:
        method: class of the method.
        settings: the method's own settings.
        model: architecture and initial weights.
        data: who holds what.
        train: how clients train.
        seed: names every random stream of the run.
        cohort_size: clients stacked into one cohort; 0 stacks all, 1 is the reference engine.
        quorum: share of the messages of an exchange that must be valid.
        link: the way messages take to the server.
        watch: told how long each stage takes.
    """

    def __init__(
        self,
        method: type[Method],
        settings: Any,
        model: CohortModel,
        data: FederatedData,
        train: TrainSettings,
        seed: int,
        cohort_size: int = 0,
        quorum: float = 0.5,
        link: Link = perfect_link,
        watch: Stopwatch | None = None,
    ) -> None:
        task = task_of(model, data.classes, data.clients, train, seed)
        self.method = method(task, settings)
        self.model, self.data = model, data
        self.rounds_played = 0
        self._quorum, self._link = quorum, link
        self.watch = watch or NoStopwatch()
        self._worker = LocalWorker(model, data, train, seed, recorded=cohort_size != 1 or data.clients == 1)
        self._digest = agreement(self.method)
        self._server = self.method.server_start()
        step = cohort_size or data.clients
        groups = [tuple(range(start, min(start + step, data.clients))) for start in range(0, data.clients, step)]
        self._cohorts = [
            self.method.client_start(
                model.cohort(ids, tuple(data.samples[k] for k in ids), with_momentum=train.momentum > 0)
            )
            for ids in groups
        ]

    @property
    def kept_bytes(self) -> int:
        """Bytes of all that clients keep from round to round."""
        return sum(
            value.numel() * value.element_size()
            for cohort in self._cohorts
            for value in (cohort.params, cohort.momentum, *cohort.buffers.values(), *cohort.state.values())
        )

    @property
    def largest_cohort(self) -> int:
        """Clients that are stacked together at most."""
        return max(len(cohort.ids) for cohort in self._cohorts)

    @own_threads()
    def start(self) -> None:
        """E local steps from w⁰ without any consensus, the same for every method."""
        self._local_steps(lambda cohort: Objective(), phase=0)

    @own_threads()
    def play_round(self, evaluate_global: bool = False) -> RoundReport:
        """The method's exchanges, then E local steps."""
        channel = Channel(self._digest, self.rounds_played, self._link, self._quorum, self.watch)
        for exchange in self.method.exchanges:
            self._cohorts, self._server = channel.hold(exchange, self._cohorts, self._server, self._worker)
        shared = self._evaluate_global() if evaluate_global else None
        with self.watch.stage("local steps"):
            loss = self._local_steps(
                lambda cohort: self.method.objective(cohort, channel.round), phase=self.rounds_played + 1
            )
        self._cohorts = [replace(cohort, scratch={}) for cohort in self._cohorts]
        self.rounds_played += 1
        return RoundReport(loss, channel.traffic, channel.rejected, shared)

    @own_threads()
    def evaluate(self) -> Evaluation:
        """Each client's own model on its own test split."""
        with self.watch.stage("evaluation"):
            return self._evaluate([(cohort, cohort.params) for cohort in self._cohorts])

    def client_state_dict(self, client: int) -> dict[str, torch.Tensor]:
        """The personal model of one client, as its module's `load_state_dict` takes it."""
        for cohort in self._cohorts:
            if client in cohort.ids:
                row = cohort.ids.index(client)
                return self.model.state_dict(
                    cohort.params[row], {name: value[row] for name, value in cohort.buffers.items()}
                )
        raise IndexError(f"client: got {client}, expected 0 to {self.data.clients - 1}")

    def state(self) -> dict[str, Any]:
        """Everything a later process needs to go on; clients in one stack, however they are grouped here."""
        parts = {name: torch.cat([getattr(c, name) for c in self._cohorts]).cpu() for name in ("params", "momentum")}
        dicts = {
            name: {
                key: torch.cat([getattr(c, name)[key] for c in self._cohorts]).cpu()
                for key in getattr(self._cohorts[0], name)
            }
            for name in ("buffers", "state")
        }
        return {
            "rounds_played": self.rounds_played,
            "server": self._server,
            "digest": self._digest,
            **parts,
            **dicts,
        }

    def load(self, state: dict[str, Any]) -> None:
        """Go on from `state()`."""
        if state["digest"] != self._digest:
            raise ValueError(
                "checkpoint: it belongs to another model, method, setting, seed or initial weights than this federation"
            )
        kept = (self.data.clients, self.model.layout.dim)
        if tuple(state["params"].shape) != kept or state["momentum"].shape[1:] != self._cohorts[0].momentum.shape[1:]:
            raise ValueError(
                f"checkpoint: got models of shape {tuple(state['params'].shape)}, expected {kept} with the same "
                "momentum setting"
            )
        self.rounds_played, self._server = state["rounds_played"], state["server"]
        device = self.model.device
        self._cohorts = [self._restored(cohort, state, device) for cohort in self._cohorts]

    def _restored(self, cohort: Cohort, state: dict[str, Any], device: torch.device) -> Cohort:
        rows = list(cohort.ids)
        return replace(
            cohort,
            params=state["params"][rows].to(device),
            momentum=state["momentum"][rows].to(device),
            buffers={name: value[rows].to(device) for name, value in state["buffers"].items()},
            state={name: value[rows].to(device) for name, value in state["state"].items()},
        )

    def _local_steps(self, objective_of: Callable[[Cohort], Objective], phase: int) -> float:
        """Train every cohort; the mean of the clients' losses, weighted by their samples."""
        total = 0.0
        after = []
        for cohort in self._cohorts:
            cohort, losses = self._worker.train(cohort, objective_of(cohort), phase)
            check_finite(cohort, losses, phase)
            # One float after another in the order of clients, so that the sum is the same for every grouping.
            for samples, loss in zip(cohort.samples, losses.tolist(), strict=True):
                total += samples * loss
            after.append(cohort)
        self._cohorts = after
        return total / sum(self.data.samples)

    def _evaluate_global(self) -> Evaluation | None:
        models = [(cohort, self.method.global_model(cohort)) for cohort in self._cohorts]
        shared = [(cohort, model) for cohort, model in models if model is not None]
        with self.watch.stage("evaluation"):
            return self._evaluate(shared) if shared else None

    def _evaluate(self, models: list[tuple[Cohort, torch.Tensor]]) -> Evaluation:
        correct: list[int] = []
        loss = 0.0
        for cohort, params in models:
            right, losses = self._worker.evaluate(cohort, params)
            correct += right.tolist()
            for own in losses.tolist():
                loss += own
        tested = tuple(len(held) for held in self.data.test)
        return Evaluation(tuple(correct), tested, loss / sum(tested))


def task_of(model: CohortModel, classes: int, clients: int, train: TrainSettings, seed: int) -> Task:
    """What both ends know before the first round."""
    return Task(
        layout=model.layout,
        classes=classes,
        feature_size=model.feature_size,
        seed=seed,
        initial=model.initial.cpu(),
        clients=clients,
        learning_rate=train.learning_rate,
        weight_decay=train.weight_decay,
        statistics=tuple(
            (name, value.numel()) for name, value in model.initial_buffers.items() if value.is_floating_point()
        ),
    )


def agreement(method: Method) -> bytes:
    """Digest of what both ends must agree on: protocol, method and its settings, layer table, seed and w⁰."""
    task = method.task
    return agreement_digest(
        {
            "protocol": VERSION,
            "method": method.name,
            "layers": ",".join(f"{layer.offset}:{layer.size}" for layer in task.layout.layers),
            "classes": task.classes,
            "seed": task.seed,
            "initial": _sha256(task.initial),
            **{f"method.{key}": value for key, value in asdict(method.settings).items()},
            **{f"agreement.{key}": value for key, value in method.agreement().items()},
        }
    )


def _sha256(values: torch.Tensor) -> bytes:
    return hashlib.sha256(values.contiguous().numpy().astype("<f4").tobytes()).digest()
