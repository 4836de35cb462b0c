"""The contract between methods, engine and wire.

A method is its exchanges, its objective and its settings. A round is the method's exchanges one after another, then E
local steps on its objective, then `after_training`. An exchange is

    client_send → bytes → server_open, server_add…, server_reply → bytes → client_receive

All functions are pure: they take state and return state. Client-side functions work on a cohort (tensors with a leading
`clients` axis); a real device is a cohort of one. The server adds one message after another to a total, so its memory
need not grow with the number of clients; it runs on the host. A method never sees bytes, and does not decide who takes
part: it gets the messages that arrived.

`engine.guard` checks the names, shapes, dtypes and devices of what a method returns.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from pfedlms.aggregate import WeightedMean
from pfedlms.backend import to_device
from pfedlms.cohort import Cohort, Tensors
from pfedlms.models.layout import Layout
from pfedlms.train_settings import Schedule, steps_of
from pfedlms.wire.fields import Field, Message

Total = TypeVar("Total")


@dataclass(frozen=True)
class Task:
    """What clients and server know before the first round."""

    layout: Layout
    classes: int
    """0 if the targets are not classes."""
    feature_size: int
    """Width of the input of the last linear layer."""
    seed: int
    initial: Tensor
    """w⁰, `[dim]`, on the host."""
    clients: int
    participants: int
    """Number of clients that take part in a round."""
    learning_rate: float
    weight_decay: float
    statistics: tuple[tuple[str, int], ...] = ()
    """Running statistics of the model, by name and size; they stay with the clients unless a method shares them."""
    device: torch.device | str = "cpu"
    """Where this process computes. Messages are on the host; a method may keep the server's state on this device."""
    schedule: Schedule = field(default_factory=Schedule)
    optimizer: str = "sgd"
    momentum: float = 0.0
    """Momentum of the local steps. A method that needs plain SGD raises `errors.UsageError` for anything else."""
    local_steps: int = 1
    """E, the local steps of one phase; if clients train for epochs, see `steps_of`."""
    local_epochs: float = 0.0
    batch_size: int = 1

    def steps_of(self, samples: int) -> int:
        """Local steps in a phase of a client that has `samples` training samples."""
        return steps_of(samples, self.batch_size, self.local_steps, self.local_epochs)

    def rate(self, phase: int) -> float:
        """η of the local steps of a phase; phase 0 is the start, phase r + 1 belongs to round r. `learning_rate` is
        the largest."""
        return self.learning_rate * self.schedule.factor(phase)


class ClientWork(Protocol):
    """What clients can compute on their own data; `client_send` and `after_training` receive it."""

    def train(self, cohort: Cohort, objective: Objective, phase: int, steps: int = 0) -> tuple[Cohort, Tensor]:
        """Take E more local steps, or `steps` of them. Returns the trained cohort, and each client's mean task loss,
        `[clients]`, on the host.

        The steps start from `cohort.params` and `cohort.momentum`; `cohort.with_model(params)` gives another model with
        zero momentum. They see the batches of the phase's own local steps, in the same order and with the same learning
        rate. Running statistics of the model continue from `cohort.buffers`.
        """

    def mean_gradient(self, cohort: Cohort, params: Tensor, phase: int) -> Tensor:
        """Gradient of the task loss at `params`, `[clients, dim]` or `[dim]`, averaged over the E batches of the
        phase's local steps: `[clients, dim]`."""

    def losses(self, cohort: Cohort, params: Tensor, phase: int, step: int) -> Tensor:
        """Task loss at `params`, `[clients, dim]` or `[dim]`, on the batch of local step `step` of the phase:
        `[clients]`, on the clients' device, without a graph. The forward pass is that of training; it does not change
        running statistics."""

    def class_features(self, cohort: Cohort) -> tuple[Tensor, Tensor]:
        """The mean feature of every class, `[clients, classes, width]` (zero for a class without samples), and the
        number of its training samples, `[clients, classes]`."""


@dataclass(frozen=True, eq=False)
class PerClient:
    """Marks a tensor of an `Objective` that has one row for each client of the cohort, `[clients, …]`.

    The engine may train only some clients of a cohort at a time, or add copies of the last client. It selects the rows
    of marked tensors accordingly: inside the objective `self.field.value` has one row for each client that is trained.
    """

    value: Tensor


@dataclass(frozen=True)
class Objective:
    """What the local steps minimise besides the task's own loss; the default adds nothing.

    A step is θ ← θ − η (∇[task's loss + loss] + gradient(θ) + μθ), with momentum if there is any, or AdamW's step on
    these gradients without μθ (`step.adamw_step_`); then comes `after_step`. An objective uses nothing but its fields:
    numbers, tensors on the clients' device, and objects made of these. A tensor with one row for each client is wrapped
    in `PerClient`; all others are the same for all clients.
    """

    needs_features: ClassVar[bool] = False

    def loss(self, features: Tensor, labels: Tensor) -> Tensor:
        """A differentiable term of each client's loss, `[clients]`, from features `[clients, batch, width]`; called
        only if `needs_features`."""
        return features.new_zeros(len(features))

    def gradient(self, params: Tensor) -> Tensor | None:
        """A gradient known in closed form, `[clients, dim]`."""
        return None

    def after_step(self, params: Tensor, step: int) -> Tensor:
        """The models after local step `step` (0..E−1), for instance projected."""
        return params


class Exchange(ABC, Generic[Total]):
    """One message from each client to the server, and one answer to all of them."""

    up: Message
    down: Message
    sketched: tuple[Layout, tuple[int, ...]] | None = None
    """As `Method.sketched`."""

    def __init__(self, *arguments: Any) -> None:
        """`Method.exchange` is called with task and settings; an exchange that a method creates itself may take other
        arguments."""

    @abstractmethod
    def client_send(self, cohort: Cohort, round: int, work: ClientWork) -> tuple[Cohort, Tensors]:
        """The cohort, and the values of the `up` message, each with a leading clients axis."""

    def in_step(self, server: Tensors, values: Tensors) -> list[bool]:
        """For a method that tracks a model: whether each sender holds the server's model, as far as its message shows.
        Called before `server_add`. A sender that does not is left out of the total and is sent the model."""
        return [True] * len(next(iter(values.values())))

    @abstractmethod
    def server_open(self, server: Tensors, round: int) -> Total:
        """A total of no messages."""

    @abstractmethod
    def server_add(self, total: Total, ids: list[int], samples: list[int], values: Tensors) -> Total:
        """The total with some clients' decoded messages (leading axis: senders, ascending ids; N_k in `samples`).
        Called once or more, in the order of ids; how many clients come in one call depends on `run.cohort_size`. For
        the same bits with any grouping, add float64 sums of values times whole numbers, which are exact, or one client
        after another. The engine reuses the tensors afterwards: copy values that must last."""

    @abstractmethod
    def server_reply(self, server: Tensors, total: Total, round: int) -> tuple[Tensors, Tensors]:
        """The server's next state and the values of the `down` message."""

    @abstractmethod
    def client_receive(self, cohort: Cohort, values: Tensors, round: int) -> Cohort:
        """Apply the decoded `down` message, which has no clients axis and is on the host. `Cohort.with_model`,
        `with_heard` and `go_on_from` move it to the clients' device; for all else use `backend.to_device`."""


Means = dict[str, WeightedMean]


class FieldMeans(Exchange[Means]):
    """An exchange whose server computes the weighted mean of every field of the `up` message."""

    def server_open(self, server: Tensors, round: int) -> Means:
        return {field.name: WeightedMean(prod(field.shape)) for field in self.up.fields}

    def server_add(self, total: Means, ids: list[int], samples: list[int], values: Tensors) -> Means:
        return {name: mean.add(samples, values[name]) for name, mean in total.items()}


@dataclass(frozen=True)
class NoSettings:
    """Of a method without settings of its own."""


class Method(ABC):
    """A federated method: exchanges, objective, settings."""

    name: ClassVar[str]
    paper: ClassVar[str]
    """Where it was published, in one line."""
    personal: ClassVar[bool]
    """Whether every client keeps its own model from round to round."""
    about_last_steps: ClassVar[bool] = False
    """What messages describe. False: the model before training; the participants of a round send, receive the answer
    and train. True: the last local steps; the participants of the last phase send, and those of the next phase start
    from the answer (one exchange at most)."""
    tracks: bool = False
    """Whether a client that was absent must receive all missed answers in order, or the resulting model; see
    `Tracked`."""
    Settings: ClassVar[type[Any]] = NoSettings
    """Frozen dataclass of the method's own keys of the section [method]."""
    exchange: ClassVar[type[Exchange[Any]] | None] = None
    """Class of the only exchange, called with task and settings. A method with several sets `exchanges` itself."""
    exchanges: tuple[Exchange[Any], ...] = ()
    """The exchanges of a round, in order; empty for a method that does not communicate."""
    sketched: tuple[Layout, tuple[int, ...]] | None = None
    """The layers that the method sketches, and the sketch size of each; None if it does not sketch."""

    def __init__(self, task: Task, settings: Any) -> None:
        self.task, self.settings = task, settings
        if self.exchange is not None:
            only = self.exchange(task, settings)
            self.exchanges, self.sketched = (only,), only.sketched

    @staticmethod
    def head_layers(settings: Any) -> int:
        """How many of the last layers the method treats as the model's head; 0: it knows no head. A model that calls
        another layer after them is warned of."""
        return 0

    def agreement(self) -> dict[str, int | float | str]:
        """What clients and server must agree on besides layer table, settings, seed and w⁰. It enters the digest of
        every message."""
        return {}

    def client_start(self, cohort: Cohort) -> Cohort:
        """Add the method's state of every client; called once per client, before it first takes part. Later no entry of
        `state` is added or dropped, and none changes its shape or dtype."""
        return cohort

    def client_rest(self, cohort: Cohort) -> Cohort:
        """What clients keep while they do not take part; the next answer must replace everything else."""
        return cohort if self.personal else cohort.without_model()

    def server_start(self) -> Tensors:
        """The server's first state."""
        return {}

    def objective(self, cohort: Cohort, round: int) -> Objective:
        """What this round's local steps minimise, after all exchanges."""
        return Objective()

    def after_training(self, cohort: Cohort, phase: int, work: ClientWork) -> Cohort:
        """The clients after the local steps of a phase (0 is the start, r + 1 belongs to round r), for instance with a
        second model trained by `work.train`. Then `cohort.params` are evaluated."""
        return cohort

    def global_model(self, cohort: Cohort) -> Tensor | None:
        """The model that all clients share after the exchanges and before the local steps, `[dim]` or `[clients, dim]`;
        None if there is none."""
        return None


class Tracked(Method):
    """A method with one model w, which every client and the server hold as `state["model"]`.

    All of them apply the same answers, so all have the same bits. Before a client that was absent sends or trains
    again, the server sends it the missed answers in order, or w if that takes fewer bytes. Set `tracks = False` only if
    every answer is w itself: then absent clients keep no w and receive only the next answer.
    """

    tracks = True
    tracked: tuple[Field, ...] = ()
    """Fields that clients need besides w. Their names are keys of the server's state and of the clients' state (there
    with a clients axis). Answers contain these fields, and the server sends them with w to clients that were absent."""
    client_zeros: ClassVar[tuple[str, ...]] = ()
    """State of a client that has the shape of w and starts with zeros, for instance a residual."""
    server_zeros: ClassVar[tuple[str, ...]] = ()
    """State of the server that has the shape of w and starts with zeros."""
    server_on_device: ClassVar[bool] = False
    """Whether the server keeps its state on `task.device`, not on the host."""

    def client_start(self, cohort: Cohort) -> Cohort:
        zeros = {name: torch.zeros_like(cohort.params) for name in self.client_zeros}
        return cohort.with_state(model=cohort.params, **zeros)

    def client_rest(self, cohort: Cohort) -> Cohort:
        resting = super().client_rest(cohort)
        if self.tracks:
            return resting
        return replace(resting, state={name: value for name, value in resting.state.items() if name != "model"})

    def server_start(self) -> Tensors:
        model = self.task.initial.to(self.task.device) if self.server_on_device else self.task.initial
        return {"model": model, **{name: torch.zeros_like(model) for name in self.server_zeros}}

    def global_model(self, cohort: Cohort) -> Tensor | None:
        return cohort.state["model"]


def go_on_from(cohort: Cohort, model: Tensor) -> Cohort:
    """All clients of a tracked method take `model` (`[dim]` or `[clients, dim]`) as w and train from it."""
    adopted = to_device(model, cohort.params.device).expand_as(cohort.params).contiguous()
    return replace(cohort, params=adopted, momentum=torch.zeros_like(cohort.momentum)).with_state(model=adopted)
