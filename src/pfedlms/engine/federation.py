"""A whole federation in one process: all participants in one cohort (stacked), or one cohort each (the reference)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from pfedlms.backend import own_threads, to_host
from pfedlms.cohort import Cohort, joined
from pfedlms.data.federated import FederatedData
from pfedlms.data.partition import Indices
from pfedlms.engine.criterion import Criterion
from pfedlms.engine.exchange import REMEDY, Channel, Link, Ways, perfect_link
from pfedlms.engine.participation import Clients
from pfedlms.engine.reports import Evaluation, RoundReport, mean_loss, summed
from pfedlms.engine.stopwatch import Stopwatch
from pfedlms.engine.terms import Terms
from pfedlms.engine.training import LocalWorker, TrainSettings
from pfedlms.errors import QuorumError
from pfedlms.methods.contract import Method
from pfedlms.models.forward import CohortModel

ASTRAY = -1  # answers heard by a client whose model is not what they lead to; there are none to catch up by


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
        quorum: share of those who were to send whose messages must be valid.
        link: the way of messages to the server.
        answer_link: the way of answers to a client.
        lost: share of messages that is lost besides, in each direction.
        home: where the state of clients that are away is kept; the model's device if there is room for all.
        watch: told how long each stage takes.
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
        terms = Terms(method, settings, model, data.clients, data.classes, train, seed)
        self._terms, self.participation, self.method = terms, terms.participation, terms.method
        self.model, self.data, self._samples = model, data, data.samples
        self.criterion = criterion or Criterion()
        self.rounds_played = 0
        self.watch = watch or Stopwatch()
        self._ways = Ways(link, answer_link, lost, quorum, seed, train.max_weight)
        self._digest = terms.digest
        self._server = self.method.server_start()
        # Clients that are stacked together at most.
        self.largest_cohort = min(cohort_size or self.participation.count, self.participation.count)
        self._worker = LocalWorker(model, data, train, seed, self.participation, self.largest_cohort, self.criterion)
        self._clients = Clients(self.method, self._fresh, model.device, home or model.device, self.largest_cohort)
        # What a client that was away has missed: how many answers each has heard, and the answers themselves. Those of
        # the round played last, and the server before them, are kept for clients that took no part in it.
        self._heard: dict[int, int] = {}
        self._answers = terms.catch_up.answers()
        self._last: list[bytes] = []
        self._before = self._server

    def _fresh(self, ids: tuple[int, ...]) -> Cohort:
        return self._terms.fresh(ids, tuple(self._samples[k] for k in ids))

    @own_threads()
    def start(self) -> None:
        """Phase 0: E local steps from w⁰ without any consensus, the same for every method."""
        self._train(self._clients.take(self.participation.of(0), ()), phase=0)

    @own_threads()
    def play_round(self, evaluate_global: bool = False) -> RoundReport:
        """The method's exchanges, then E local steps of those who take part and heard the answers."""
        round, phase = self.rounds_played, self.rounds_played + 1
        channel = Channel(self._digest, round, self._ways, self.watch)
        server, answers = self._server, []
        senders = self._clients.present
        cohorts = senders if self.method.about_last_steps else self._coming(channel, senders)
        for exchange in self.method.exchanges:
            cohorts, server, answer = channel.ask(exchange, cohorts, server, self._worker)
            if self.method.about_last_steps:
                senders = cohorts
                cohorts = self._coming(channel, senders)
            cohorts = channel.tell(exchange, answer, cohorts)
            answers.append(answer)
        # From here on nothing can fail any more but the local steps.
        self._clients.put(senders)
        self._before, self._server, self._last = self._server, server, answers
        shared = self._evaluate_global(cohorts) if evaluate_global else None
        with self.watch.stage("local steps"):
            loss = self._train(cohorts, phase)
        if self.method.tracks:
            self._answers.add(round, answers[0], self._before["model"], server["model"])
            self._heard.update(dict.fromkeys(channel.astray, ASTRAY))
            self._heard.update(dict.fromkeys(self._clients.present_ids, round + 1))
        self.rounds_played += 1
        failures = channel.rejected, len(channel.astray), channel.unheard
        return RoundReport(self._clients.present_ids, loss, channel.traffic, *failures, shared)

    def evaluate(self) -> Evaluation:
        """The models of those who trained last, each on its own test split, and on what it has set aside."""
        with self.watch.stage("evaluation"):
            return self._evaluate_personal(self._clients.present)

    def everyone(self) -> Evaluation:
        """All clients' models: of who took no part in the last phase a copy that hears its answer and takes its steps.
        No state changes and nothing is counted, so the run can go on as if nobody had looked."""
        return self._evaluate_personal(self._all())

    @property
    def present_ids(self) -> tuple[int, ...]:
        """Who took part in the last phase."""
        return self._clients.present_ids

    def models(self, trains: bool = True) -> Iterator[tuple[int, dict[str, torch.Tensor]]]:
        """Every client's id and model, as its module's `load_state_dict` takes it: those that `everyone` evaluates; or,
        where there are no data to train on, what those who took no part in the last phase have heard in it."""
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
        channel = Channel(self._digest, self.rounds_played - 1, Ways())
        cohorts = self._clients.present
        if not self.method.tracks:
            for exchange, answer in zip(self.method.exchanges, self._last, strict=False):
                cohorts = channel.tell(exchange, answer, cohorts)
        together = joined(cohorts)
        model = self.method.global_model(together)
        if model is None:
            return None
        means = {
            name: value.double().mean(dim=0).to(value.dtype) if value.is_floating_point() else value[0]
            for name, value in together.buffers.items()
        }
        return self.model.state_dict(model.expand_as(together.params)[0], means)

    def _state_dict(self, cohort: Cohort, row: int) -> dict[str, torch.Tensor]:
        return self.model.state_dict(cohort.params[row], {name: value[row] for name, value in cohort.buffers.items()})

    def state(self) -> dict[str, Any]:
        """Everything a later process needs to go on."""
        return {
            "rounds_played": self.rounds_played,
            "digest": self._digest,
            "server": {name: value.cpu() for name, value in self._server.items()},
            "before": {name: value.cpu() for name, value in self._before.items()},
            "last": self._last,
            "answers": self._answers.state(),
            "heard": self._heard,
            **self._clients.state(),
        }

    def load(self, state: dict[str, Any]) -> None:
        """Go on from `state()`."""
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
        self.rounds_played, self._last, self._heard = state["rounds_played"], state["last"], state["heard"]
        places = {name: value.device for name, value in self.method.server_start().items()}
        self._server, self._before = (
            {name: value.to(places[name]) for name, value in state[which].items()} for which in ("server", "before")
        )
        self._answers.load(state["answers"])
        self._clients.load(state, self._samples)

    def _coming(self, channel: Channel, present: Sequence[Cohort]) -> list[Cohort]:
        """Who takes part in the phase after the round now played, having caught up with what they missed."""
        cohorts = self._clients.take(self.participation.of(channel.round + 1), present)
        if not self.method.tracks:
            return cohorts
        with self.watch.stage("catching up"):
            caught_up = [self._caught_up(cohort, channel) for cohort in cohorts]
        if not any(caught_up):
            raise QuorumError(f"round {channel.round + 1}: what clients had missed reached none of them; {REMEDY}")
        return [cohort for cohort in caught_up if cohort is not None]

    def _caught_up(self, cohort: Cohort, channel: Channel) -> Cohort | None:
        heard = [ASTRAY if client in channel.astray else self._heard.get(client, 0) for client in cohort.ids]
        if min(heard) == channel.round:
            return cohort
        (exchange,) = self.method.exchanges
        return channel.catch_up(exchange, cohort, heard, self._answers, self._terms.catch_up, self._server)

    def _all(self, client: int | None = None, trains: bool = True) -> Iterator[Cohort]:
        """All clients after the last phase, some at a time; with `client`, only those stacked with it."""
        yield from self._clients.present
        here = set(self._clients.present_ids)
        for group in self._clients.groups([k for k in range(self.data.clients) if k not in here]):
            if client is None or client in group:
                yield self._as_if_here(group) if trains else self._as_if_told(group)

    @own_threads()
    def _as_if_here(self, ids: tuple[int, ...]) -> Cohort:
        """Copies of clients that took no part in the last phase, after what they would have heard and done in it."""
        cohort = self._as_if_told(ids)
        if not self._clients.present:
            return cohort
        return self._worker.local_update(self.method, cohort, self.rounds_played)[0]

    def _as_if_told(self, ids: tuple[int, ...]) -> Cohort:
        """Copies of clients that took no part in the last phase, after what they would have heard in it."""
        (cohort,) = self._clients.take(ids, self._clients.present)
        if not self._clients.present:
            return cohort  # nobody has trained yet
        round = self.rounds_played - 1
        channel = Channel(self._digest, round, Ways())
        if self.method.tracks:
            cohort = self._terms.catch_up.adopted(cohort, self._before)  # what any message would lead to
        for exchange, answer in zip(self.method.exchanges, self._last, strict=False):
            (cohort,) = channel.tell(exchange, answer, [cohort])
        return cohort

    def _train(self, cohorts: Sequence[Cohort], phase: int) -> float:
        """Local steps of these cohorts, who are present after that; the mean of their losses, weighted by samples."""
        found: list[tuple[int, float]] = []
        after = []
        for cohort in cohorts:
            trained, losses = self._worker.local_update(self.method, cohort, phase)
            found += zip(trained.samples, losses.tolist(), strict=True)
            after.append(trained)
        self._clients.put(after)
        return mean_loss(found)

    def _evaluate_global(self, cohorts: Sequence[Cohort]) -> Evaluation | None:
        models = [(cohort, self.method.global_model(cohort)) for cohort in cohorts]
        shared = [(cohort, model) for cohort, model in models if model is not None]
        with self.watch.stage("evaluation"):
            return self._evaluate(shared, self.data.test)[0]

    def _evaluate_personal(self, cohorts: Iterable[Cohort]) -> Evaluation:
        splits = [held for held in (self.data.test, self.data.validation) if held]
        tested, *validated = self._evaluate(((cohort, cohort.params) for cohort in cohorts), *splits)
        assert tested is not None  # every client has test samples
        return replace(tested, validation=validated[0]) if validated else tested

    @own_threads()
    def _evaluate(
        self, models: Iterable[tuple[Cohort, torch.Tensor]], *splits: tuple[Indices, ...]
    ) -> list[Evaluation | None]:
        """The models on each of the splits, one cohort after another; None where nobody has any samples."""
        found: list[dict[int, tuple[float, float]]] = [{} for _ in splits]
        for cohort, params in models:
            for held, own in zip(splits, found, strict=True):
                right, losses = to_host(*self._worker.evaluate(cohort, params, held))
                own |= dict(zip(cohort.ids, zip(right.tolist(), losses.tolist(), strict=True), strict=True))
        percent = self.criterion.score is None
        return [
            summed({client: (*counts, len(held[client])) for client, counts in own.items()}, percent)
            for held, own in zip(splits, found, strict=True)
        ]
