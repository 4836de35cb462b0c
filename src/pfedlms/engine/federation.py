"""A simulated federation in one process: all participants stacked in one cohort, or one cohort each (the reference)."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from pfedlms.backend import one_thread_per_operator
from pfedlms.cohort import Cohort, joined
from pfedlms.data.federated import FederatedData
from pfedlms.engine.client import Client, LocalWorker
from pfedlms.engine.criterion import Criterion
from pfedlms.engine.participation import Participation
from pfedlms.engine.reports import Counts, Evaluation, RoundReport, Stopwatch, evaluation_of_counts, personal_evaluation
from pfedlms.engine.server import BEGIN, START, Server, ServerState
from pfedlms.engine.simulate import Clients, InProcess, Link, Links, perfect_link
from pfedlms.engine.terms import Terms
from pfedlms.engine.transport import Code, Event, Flag, Split
from pfedlms.errors import RunDirectoryError
from pfedlms.methods.contract import Method
from pfedlms.models.forward import CohortModel
from pfedlms.train_settings import TrainSettings


class Federation:
    """The clients and the server of one run, and their state.

    Args:
        method: class of the method.
        settings: the method's own settings.
        model: architecture and initial weights.
        data: which client holds which samples.
        train: how clients train, and how many of them take part.
        seed: names every random stream of the run.
        cohort_size: clients stacked into one cohort; 0 stacks all participants, 1 is the reference engine.
        quorum: share of the expected messages of an exchange that must be valid.
        link: carries messages to the server.
        answer_link: carries answers to a client.
        lost: share of messages that is lost in addition, in each direction.
        home: the device of absent clients' state; by default the model's device.
        watch: measures how long each stage takes.
        criterion: what local steps minimise and what is measured.
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
        answer_link: Link = perfect_link,
        lost: float = 0.0,
        home: torch.device | None = None,
        watch: Stopwatch | None = None,
        criterion: Criterion | None = None,
    ) -> None:
        self._terms = terms = Terms(method, settings, model, data.clients, data.classes, train, seed)
        self.method, self.model, self.data, self.train = terms.method, model, data, train
        self.criterion, self.watch = criterion or Criterion(), watch or Stopwatch()
        participation = terms.participation
        self.largest_cohort = min(cohort_size or participation.count, participation.count)
        """The largest number of clients that are stacked together."""
        self._worker = LocalWorker(model, data, train, seed, participation, self.largest_cohort, self.criterion)
        self._client = Client(terms, self._worker, data)
        self._clients = Clients(terms, data.samples, home or model.device, self.largest_cohort)
        self._transport = InProcess(self._client, self._clients, Links(link, answer_link, lost, seed), self.watch)
        self._server = Server(terms, quorum, self.criterion.score is None, self.watch)
        self._state = self._server.begin()
        self._own_ids = range(data.clients)  # the clients whose state is in this process

    @property
    def participation(self) -> Participation:
        """Who takes part in which phase."""
        return self._terms.participation

    @property
    def rounds_played(self) -> int:
        return self._state.round

    @property
    def present_ids(self) -> tuple[int, ...]:
        """The clients that took part in the last phase."""
        return self._clients.present_ids

    # --- rounds

    @one_thread_per_operator()
    def start(self) -> None:
        """Play phase 0, unless it is over: E local steps from w⁰ without any consensus, the same for every method."""
        if self._state.stage == START:
            self._state = self._make_trip(self._state)

    @one_thread_per_operator()
    def play_round(self, evaluate_global: bool = False) -> RoundReport:
        """Play one round: the method's exchanges, then E local steps of the participants that received the answers. It
        plays the start first, if that is not over. If it raises, the round can be played again."""
        self.start()
        state = replace(self._state, measure=Flag.SHARED * evaluate_global)
        while state.round == self._state.round:
            state = self._make_trip(state)
        self._state = state
        assert state.report is not None  # a step that ends a round makes a report
        return state.report

    def _make_trip(self, state: ServerState) -> ServerState:
        inbox = self._server.inbox(state, self._server.outbox(state))
        try:
            self._transport.carry(inbox.requests, inbox)
        finally:
            self._warn(inbox.events)
        after = self._server.step(state, inbox)
        self._warn(event for event in after.events if event.kind != "weight_limited")
        return after

    def _warn(self, events: Iterable[Event]) -> None:
        for event in events:
            warnings.warn(str(event), stacklevel=4)

    @contextmanager
    def lead(self) -> Iterator[Callable[[Any], None]]:
        """Entered while a run is played; see `processes.SharedFederation`. Here no other process waits for its end."""
        yield lambda ending: None

    # --- what is measured

    def evaluate(self) -> Evaluation:
        """Measure the models of the clients that trained last, each on its own test split and its validation split."""
        with self.watch.stage("evaluation"):
            return self._evaluation("present")

    def evaluate_everyone(self) -> Evaluation:
        """Measure the models of all clients. A client that took no part in the last phase is represented by a copy that
        receives its answers and takes its steps. No state changes and nothing is counted."""
        return self._evaluation("everyone")

    def _evaluation(self, which: str) -> Evaluation:
        evaluation = personal_evaluation(*self._measure(which), self.criterion.score is None)
        assert evaluation is not None  # every client has test samples
        return evaluation

    def _measure(self, which: str) -> tuple[Counts, Counts]:
        return self._counts(self._all_clients() if which == "everyone" else self._clients.present)

    @one_thread_per_operator()
    def _counts(self, cohorts: Iterable[Cohort]) -> tuple[Counts, Counts]:
        """Counts of the test samples and of the validation samples."""
        tested, validated = Counts(), Counts()
        for cohort in cohorts:
            counts = self._client.measure_personal(cohort)
            tested |= counts[Split.TEST]
            validated |= counts.get(Split.VALIDATION, {})
        return tested, validated

    # --- clients that join after the last round

    @one_thread_per_operator()
    def evaluate_newcomers(self) -> tuple[Evaluation, Evaluation]:
        """Measure the clients held out of the run on their own test splits: with what a new client gets after the last
        round (the shared model, or w⁰ if there is none), and after its first local steps."""
        started, trained = Counts(), Counts()
        held_out = self.data.newcomer_data()
        client = self._client_for(held_out, self.criterion)
        for before_steps, after_steps in self._join(client, held_out):
            started |= client.measure_shared(before_steps) or client.measure_personal(before_steps)[Split.TEST]
            trained |= client.measure_personal(after_steps)[Split.TEST]
        before, after = (evaluation_of_counts(counts, self.criterion.score is None) for counts in (started, trained))
        assert before is not None  # every client has test samples
        assert after is not None
        return before, after

    @one_thread_per_operator()
    def personalise(
        self, data: FederatedData, criterion: Criterion, local_steps: int | None = None
    ) -> dict[str, torch.Tensor]:
        """The model of the one client of `data`, which joins after the last round and takes its first local steps: E,
        or `local_steps`."""
        ((_, after),) = self._join(self._client_for(data, criterion, local_steps), data)
        return self._state_dict(after, 0)

    def _client_for(self, data: FederatedData, criterion: Criterion, local_steps: int | None = None) -> Client:
        everybody = Participation(data.clients, 1.0, self._terms.seed)
        train = replace(self.train, local_steps=local_steps, local_epochs=0.0) if local_steps else self.train
        group = min(self.largest_cohort, data.clients)
        worker = LocalWorker(self.model, data, train, self._terms.seed, everybody, group, criterion)
        return Client(self._terms, worker, data)

    def _join(self, client: Client, data: FederatedData) -> Iterator[tuple[Cohort, Cohort]]:
        """The clients of `data`, some at a time, after the last answers and after their first local steps. They begin
        with the running statistics of the exported shared model, if there is one."""
        shared = self._shared()
        for ids in self._clients.groups(range(data.clients)):
            cohort = self._terms.new_cohort(ids, tuple(data.samples[k] for k in ids))
            if shared is not None:
                buffers = {name: value.expand(len(ids), *value.shape).clone() for name, value in shared[1].items()}
                cohort = replace(cohort, buffers=buffers)
            before = self._after_last_phase(self.method.client_start(cohort), trains=False)
            yield before, client.train(before, self._state.round)[0]

    # --- models

    def models(self, trains: bool = True) -> Iterator[tuple[int, dict[str, torch.Tensor]]]:
        """Every client's id and model, as its module's `load_state_dict` takes it: the models that `evaluate_everyone`
        measures. Without `trains`, for want of data, the models after the last answers, before local steps."""
        for cohort in self._all_clients(trains=trains):
            yield from ((client, self._state_dict(cohort, row)) for row, client in enumerate(cohort.ids))

    def client_state_dict(self, client: int, trains: bool = True) -> dict[str, torch.Tensor]:
        """The model of one client, as `models` has it."""
        if not 0 <= client < self.data.clients:
            raise IndexError(f"client: got {client}, expected 0 to {self.data.clients - 1}")
        cohort = next(cohort for cohort in self._all_clients(client, trains) if client in cohort.ids)
        return self._state_dict(cohort, cohort.ids.index(client))

    def shared_state_dict(self) -> dict[str, torch.Tensor] | None:
        """The model all clients share after the last round's answer, before local steps; None if the method has none.
        Running statistics are the means over the clients that trained last."""
        shared = self._shared()
        return None if shared is None else self.model.state_dict(*shared)

    def _shared(self) -> tuple[torch.Tensor, dict[str, torch.Tensor]] | None:
        """The shared model, `[dim]`, and running statistics."""
        cohorts = self._clients.present
        if not self.method.tracks:
            cohorts = [self._after_last_phase(cohort, trains=False) for cohort in cohorts]
        stack = joined(cohorts)
        model = self.method.global_model(stack)
        if model is None:
            return None
        means = {
            name: value.double().mean(dim=0).to(value.dtype) if value.is_floating_point() else value[0]
            for name, value in stack.buffers.items()
        }
        return model.expand_as(stack.params)[0], means

    def _state_dict(self, cohort: Cohort, row: int) -> dict[str, torch.Tensor]:
        return self.model.state_dict(cohort.params[row], {name: value[row] for name, value in cohort.buffers.items()})

    def _all_clients(self, client: int | None = None, trains: bool = True) -> Iterator[Cohort]:
        """All clients after the last phase, some at a time; with `client`, only those stacked with it."""
        yield from self._clients.present
        present = set(self._clients.present_ids)
        for group in self._clients.groups([k for k in self._own_ids if k not in present]):
            if client is None or client in group:
                (cohort,) = self._clients.take(group, self._clients.present)
                yield cohort if self._state.stage == START else self._after_last_phase(cohort, trains)

    @one_thread_per_operator()
    def _after_last_phase(self, cohort: Cohort, trains: bool) -> Cohort:
        """Copies of clients that took no part in the last phase, as they would be after it."""
        if self.method.tracks:
            cohort = self._terms.catch_up.adopt(cohort, self._state.before)  # as after any way to catch up
        for order in self._server.request_for_copies(self._state, (), trains).orders:
            if order.code == Code.TRAIN:
                return self._client.train(cohort, order.number)[0]
            cohort = self._client.receive(cohort, order, self._client.read(order))
        return cohort

    # --- checkpoints

    def use_folder(self, folder: Path) -> None:
        """Put the state of absent clients into the folder of the run's checkpoints, if it is too large for memory."""
        self._clients.absent.folder = folder

    def state(self) -> dict[str, Any]:
        """What a checkpoint has: everything that a later process needs to resume."""
        server = self._state
        return {
            "rounds_played": server.round,
            "digest": self._terms.digest,
            "server": {name: value.cpu() for name, value in server.server.items()},
            "before": {name: value.cpu() for name, value in server.before.items()},
            "last": list(server.last_answers),
            "answers": server.log.state(),
            # Clients and how many answers each knows; as a tensor, because a large dict takes long to read.
            "heard": torch.tensor(list(server.answers_known.items()), dtype=torch.int64).reshape(-1, 2),
            **self._clients_state(),
        }

    def _clients_state(self) -> dict[str, Any]:
        return self._clients.state()

    def load(self, state: dict[str, Any]) -> None:
        """Resume from `state()`."""
        if state["digest"] != self._terms.digest:
            raise ValueError(
                "checkpoint: it belongs to another model, method, setting, seed or initial weights than this federation"
            )
        if "frames" not in state["answers"] or not isinstance(state["heard"], torch.Tensor):
            raise RunDirectoryError(
                "checkpoint: it was written by an earlier version of pfedlms, which this version does not read; resume "
                "with that version, or delete checkpoint.pt to start the run over"
            )
        self._state = self._server.restore(
            {
                "server": state["server"], "current": state["server"], "before": state["before"],
                "log": state["answers"], "round": state["rounds_played"], "stage": BEGIN,
                "last_answers": tuple(state["last"]), "answers_known": dict(state["heard"].tolist()),
                "participants": tuple(state["trained"]), "traffic": [], "measured": {},
            }
        )  # fmt: skip
        self._load_clients(state)

    def _load_clients(self, state: dict[str, Any]) -> None:
        self._clients.load(state)
