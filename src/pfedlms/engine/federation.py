"""A whole federation in one process: all participants in one cohort (stacked), or one cohort each (the reference)."""

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
from pfedlms.engine.client import Client
from pfedlms.engine.criterion import Criterion
from pfedlms.engine.participation import Clients, Participation
from pfedlms.engine.reports import Counts, Evaluation, RoundReport, Stopwatch, evaluation_of_counts, personal_evaluation
from pfedlms.engine.server import BEGIN, START, Server, ServerState
from pfedlms.engine.simulate import InProcess, Link, Links, perfect_link
from pfedlms.engine.terms import Terms
from pfedlms.engine.training import LocalWorker
from pfedlms.engine.transport import Code, Event, Flag, Inbox, Split
from pfedlms.methods.contract import Method
from pfedlms.models.forward import CohortModel
from pfedlms.train_settings import TrainSettings


class Federation:
    """Clients and server of one run, and the state they are in.

    Args:
        method: class of the method.
        settings: the method's own settings.
        model: architecture and initial weights.
        data: who holds what.
        train: how clients train, and how many of them take part.
        seed: names every random stream of the run.
        cohort_size: clients stacked into one cohort; 0 stacks all participants, 1 is the reference engine.
        quorum: share of the expected messages of an exchange that must be valid.
        link: the way of messages to the server.
        answer_link: the way of answers to a client.
        lost: share of messages that is lost besides, in each direction.
        home: where the state of clients that take no part is kept; the model's device if there is room for all.
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
        self._digest, who = terms.digest, terms.participation
        # Clients that are stacked together at most.
        self.largest_cohort = min(cohort_size or who.count, who.count)
        self._worker = LocalWorker(model, data, train, seed, who, self.largest_cohort, self.criterion)
        self._client = Client(self.method, terms.digest, terms.catch_up, self._worker, data)
        # No method of this object: its memory would only be free when Python next looks for cycles.
        self._fresh: Callable[[tuple[int, ...]], Cohort] = lambda ids: terms.new_cohort(
            ids, tuple(data.samples[k] for k in ids)
        )
        self._clients = Clients(
            self.method, self._fresh, data.clients, model.device, home or model.device, self.largest_cohort
        )
        self._transport = InProcess(self._client, self._clients, Links(link, answer_link, lost, seed), self.watch)
        self._rules = Server(terms, quorum, self.criterion.score is None, self.watch)
        self._server = self._rules.begin()
        self._own = range(data.clients)  # the clients whose states are here
        self.rounds_played = 0

    @property
    def participation(self) -> Participation:
        """Who takes part in which phase."""
        return self._rules.participation

    @participation.setter
    def participation(self, who: Participation) -> None:
        self._rules.participation = who

    @property
    def present_ids(self) -> tuple[int, ...]:
        """Who took part in the last phase."""
        return self._clients.present_ids

    # --- rounds

    @one_thread_per_operator()
    def start(self) -> None:
        """Phase 0: E local steps from w⁰ without any consensus, the same for every method; nothing if it is over."""
        if self._server.stage == START:
            self._server = self._trip(self._server)

    @one_thread_per_operator()
    def play_round(self, evaluate_global: bool = False) -> RoundReport:
        """The method's exchanges, then E local steps of those who take part and got the answers; after the start, if
        that is not over. If it raises, the round can be played again."""
        self.start()
        state = replace(self._server, measure=Flag.SHARED * evaluate_global)
        self._transport.begin_round()
        while state.round == self._server.round:
            state = self._trip(state)
        self._server, self.rounds_played = state, state.round
        assert state.report is not None  # a step that ends a round makes one
        return state.report

    def _trip(self, state: ServerState) -> ServerState:
        inbox = self._rules.inbox(state, self._rules.outbox(state))
        try:
            self._transport.carry(inbox.requests, inbox)
        finally:
            _warn(inbox.events)
        after = self._rules.step(state, inbox)
        _warn(event for event in after.events if event.kind != "weight_limited")
        return after

    @contextmanager
    def lead(self) -> Iterator[Callable[[Any], None]]:
        """While a run is played; see `processes.SharedFederation`. Here no other process waits for its end."""
        yield lambda ending: None

    # --- what is measured

    def evaluate(self) -> Evaluation:
        """The models of those who trained last, each on its own test split, and on what it has set aside."""
        with self.watch.stage("evaluation"):
            return self._evaluation("present")

    def evaluate_everyone(self) -> Evaluation:
        """All clients' models: a client that took no part in the last phase is represented by a copy that gets its
        answers and takes its steps. No state changes and nothing is counted."""
        return self._evaluation("everyone")

    def _evaluation(self, which: str) -> Evaluation:
        found = personal_evaluation(*self._measured(which), self.criterion.score is None)
        assert found is not None  # every client has test samples
        return found

    def _measured(self, which: str) -> tuple[Counts, Counts]:
        return self._counts(self._all() if which == "everyone" else self._clients.present)

    @one_thread_per_operator()
    def _counts(self, cohorts: Iterable[Cohort]) -> tuple[Counts, Counts]:
        """Of the test samples, and of those set aside."""
        tested, validated = Counts(), Counts()
        for cohort in cohorts:
            counts = self._client.measure_personal(cohort)
            tested |= counts[Split.TEST]
            validated |= counts.get(Split.VALIDATION, {})
        return tested, validated

    # --- clients that join after the last round

    def evaluate_newcomers(self) -> tuple[Evaluation, Evaluation]:
        """The clients held out of the run, on their own test splits: with what a new client gets after the last round
        (the shared model; where there is none w⁰), and after its first local steps."""
        started, trained = Counts(), Counts()
        held_out = self.data.held_out()
        client = self._client_of(held_out, self.criterion)
        for joined_up, personal in self._joining(client, held_out):
            started |= client.measure_start(joined_up)
            trained |= client.measure_personal(personal)[Split.TEST]
        before, after = (evaluation_of_counts(counts, self.criterion.score is None) for counts in (started, trained))
        assert before is not None  # every client has test samples
        assert after is not None
        return before, after

    def personalise(
        self, data: FederatedData, criterion: Criterion, local_steps: int | None = None
    ) -> dict[str, torch.Tensor]:
        """The model of the one client of `data`, which joins after the last round and takes its first local steps: E of
        them, or as many as given."""
        ((_, after),) = self._joining(self._client_of(data, criterion, local_steps), data)
        return self._state_dict(after, 0)

    def _client_of(self, data: FederatedData, criterion: Criterion, local_steps: int | None = None) -> Client:
        everybody = Participation(data.clients, 1.0, self._terms.seed)
        train = replace(self.train, local_steps=local_steps or self.train.local_steps)
        group = min(self.largest_cohort, data.clients)
        worker = LocalWorker(self.model, data, train, self._terms.seed, everybody, group, criterion)
        return Client(self.method, self._digest, self._terms.catch_up, worker, data)

    @one_thread_per_operator()
    def _joining(self, client: Client, data: FederatedData) -> Iterator[tuple[Cohort, Cohort]]:
        """The clients of `data`, some at a time, after the last answers and after their first local steps. Running
        statistics begin as those of the exported shared model, where there is one."""
        shared = self._shared()
        for ids in self._clients.groups(range(data.clients)):
            cohort = self._terms.new_cohort(ids, tuple(data.samples[k] for k in ids))
            if shared is not None:
                buffers = {name: value.expand(len(ids), *value.shape).clone() for name, value in shared[1].items()}
                cohort = replace(cohort, buffers=buffers)
            before = self._on_copies(self.method.client_start(cohort), trains=False)
            yield before, client.train(before, self._server.round)[0]

    # --- models

    def models(self, trains: bool = True) -> Iterator[tuple[int, dict[str, torch.Tensor]]]:
        """Every client's id and model, as its module's `load_state_dict` takes it: the models that `evaluate_everyone`
        measures. Where there are no data to train on, the models after the last answers, before local steps."""
        for cohort in self._all(trains=trains):
            yield from ((client, self._state_dict(cohort, row)) for row, client in enumerate(cohort.ids))

    def client_state_dict(self, client: int, trains: bool = True) -> dict[str, torch.Tensor]:
        """The model of one client, as `models` has it."""
        if not 0 <= client < self.data.clients:
            raise IndexError(f"client: got {client}, expected 0 to {self.data.clients - 1}")
        cohort = next(cohort for cohort in self._all(client, trains) if client in cohort.ids)
        return self._state_dict(cohort, cohort.ids.index(client))

    def shared_state_dict(self) -> dict[str, torch.Tensor] | None:
        """The model all clients share, as the last round's answer left it, before local steps; None if the method has
        none. Running statistics stay with the clients unless they are shared: the mean of those who trained last."""
        shared = self._shared()
        return None if shared is None else self.model.state_dict(*shared)

    def _shared(self) -> tuple[torch.Tensor, dict[str, torch.Tensor]] | None:
        """The shared model, `[dim]`, and running statistics."""
        cohorts = self._clients.present
        if not self.method.tracks:
            cohorts = [self._on_copies(cohort, trains=False) for cohort in cohorts]
        together = joined(cohorts)
        model = self.method.global_model(together)
        if model is None:
            return None
        means = {
            name: value.double().mean(dim=0).to(value.dtype) if value.is_floating_point() else value[0]
            for name, value in together.buffers.items()
        }
        return model.expand_as(together.params)[0], means

    def _state_dict(self, cohort: Cohort, row: int) -> dict[str, torch.Tensor]:
        return self.model.state_dict(cohort.params[row], {name: value[row] for name, value in cohort.buffers.items()})

    def _all(self, client: int | None = None, trains: bool = True) -> Iterator[Cohort]:
        """All clients after the last phase, some at a time; with `client`, only those stacked with it."""
        yield from self._clients.present
        here = set(self._clients.present_ids)
        for group in self._clients.groups([k for k in self._own if k not in here]):
            if client is None or client in group:
                (cohort,) = self._clients.take(group, self._clients.present)
                yield cohort if self._server.stage == START else self._on_copies(cohort, trains)

    @one_thread_per_operator()
    def _on_copies(self, cohort: Cohort, trains: bool) -> Cohort:
        """Copies of clients after what the last phase would have been for them."""
        state, transport, inbox = self._server, InProcess(self._client, self._clients), Inbox()
        if self.method.tracks:
            cohort = self._terms.catch_up.adopted(cohort, state.before)  # what any message would lead to
        request = self._rules.request_for_copies(state, (), trains)
        for order in request.orders:
            if order.code == Code.TRAIN:
                return self._client.train(cohort, order.number)[0]
            (cohort,) = transport.answer(request, order, [cohort], inbox)
        return cohort

    # --- checkpoints

    def use_folder(self, folder: Path) -> None:
        """Where the run's checkpoints are: states of absent clients that are too large for memory go there, too."""
        self._clients.absent.folder = folder

    def state(self) -> dict[str, Any]:
        """Everything a later process needs to resume."""
        server = self._server
        return {
            "rounds_played": server.round,
            "digest": self._digest,
            "server": {name: value.cpu() for name, value in server.server.items()},
            "before": {name: value.cpu() for name, value in server.before.items()},
            "last": list(server.last_answers),
            "answers": server.log.state(),
            # Clients and how many answers each knows: a dict of many takes long to read.
            "heard": torch.tensor(list(server.answers_known.items()), dtype=torch.int64).reshape(-1, 2),
            **self._clients_state(),
        }

    def _clients_state(self) -> dict[str, Any]:
        return self._clients.state()

    def load(self, state: dict[str, Any]) -> None:
        """Resume from `state()`."""
        if state["digest"] != self._digest:
            raise ValueError(
                "checkpoint: it belongs to another model, method, setting, seed or initial weights than this federation"
            )
        expected = self._fresh(tuple(state["trained"]))
        if state["params"].shape != expected.params.shape or state["momentum"].shape != expected.momentum.shape:
            raise ValueError(
                f"checkpoint: got models of shape {tuple(state['params'].shape)}, expected "
                f"{tuple(expected.params.shape)} with the same optimizer and momentum"
            )
        log, known = state["answers"], state["heard"]
        if "frames" not in log:  # earlier versions kept answers alone: any entry of w may have changed last
            changed = torch.full_like(self._server.log.changed, state["rounds_played"])
            log = {"frames": log, "changed": changed, "fingerprints": {}}
        self._server = self._rules.restore(
            {
                "server": state["server"], "current": state["server"], "before": state["before"], "log": log,
                "round": state["rounds_played"], "stage": BEGIN, "last_answers": tuple(state["last"]),
                # A dict in earlier versions.
                "answers_known": dict(known.tolist()) if isinstance(known, torch.Tensor) else known,
                "participants": tuple(state["trained"]), "traffic": [], "measured": {},
            }
        )  # fmt: skip
        self.rounds_played = self._server.round
        self._load_clients(state)

    def _load_clients(self, state: dict[str, Any]) -> None:
        self._clients.load(state, self.data.samples)


def _warn(events: Iterable[Event]) -> None:
    for event in events:
        warnings.warn(str(event), stacklevel=4)
