"""The server of a run, as pure functions: `outbox(state)` returns requests to clients, `step(state, inbox)` takes their
replies and returns the next state. The server does not know who carries requests, or where clients are.

    start                      train phase 0 (· send exchange 0 of round 0)
    round r, at its begin      (catch up) · send exchange 0; skipped if the trip before has asked for it
    round r, exchange i ≥ 1    apply answer i − 1 · send exchange i
    round r, at its end        (catch up) · apply the last answer · train phase r + 1 (· send 0 of round r + 1)

One trip is one outbox and one inbox. The outbox is a function of the state alone, so a server that was killed asks for
the same things again, byte for byte. A step that raises changes nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from pfedlms.cohort import Tensors
from pfedlms.engine.aggregation import Aggregation
from pfedlms.engine.catch_up import AnswerLog
from pfedlms.engine.reports import Counts, RoundReport, Stopwatch, Traffic, evaluation_of_counts, mean_loss
from pfedlms.engine.terms import Terms
from pfedlms.engine.transport import CatchUpOrders, Code, Event, Flag, Inbox, Record, Request, Split, server_frame
from pfedlms.errors import QuorumError

REMEDY = "lower run.lost or run.quorum (to go on, in the run's config.toml), or let more clients take part"
OUT_OF_SYNC = -1
"""Stands for the number of answers known by a client whose model is not the one they lead to: it needs the model."""
START, BEGIN = -2, -1
"""Stages before the exchanges: no client has trained yet; no message of this round was asked for yet."""
_TENSORS = ("server", "current", "before")
_NOT_IN_CHECKPOINT = ("report", "events")


@dataclass(frozen=True)
class ServerState:
    """All that the server knows between two trips."""

    server: Tensors
    """The method's state before the round that is played now."""
    current: Tensors
    """The method's state after the exchanges of this round so far."""
    before: Tensors
    """The method's state before the round played last."""
    log: AnswerLog
    """What clients that took no part in some rounds may still need."""
    trip: int = 0
    round: int = 0
    """Rounds played."""
    stage: int = START
    """The exchange whose answer goes down next."""
    answers: tuple[bytes, ...] = ()
    """Answers of this round so far."""
    last_answers: tuple[bytes, ...] = ()
    """Answers of the round played last."""
    answers_known: dict[int, int] = field(default_factory=dict)
    """How many answers each client has applied, if the method tracks a model."""
    members: tuple[int, ...] = ()
    """Clients that are in this round so far."""
    participants: tuple[int, ...] = ()
    """Clients that trained last."""
    claims: dict[int, int] = field(default_factory=dict)
    """N_k as clients stated it in this round."""
    out_of_sync: tuple[int, ...] = ()
    """Clients that were found in this round to track another model."""
    measured: dict[Split, Counts] = field(default_factory=dict)
    """What the clients that trained last have measured."""
    traffic: Traffic = field(default_factory=Traffic)
    """Of this round so far, as are `rejected` and `unheard`."""
    rejected: int = 0
    unheard: int = 0
    left_out: dict[int, str] = field(default_factory=dict)
    """Clients that were left out of something since the last evaluation, and why."""
    limited: tuple[int, ...] = ()
    """Clients that weighed less than they claimed since then."""
    carried: tuple[int, int] = (0, 0)
    """Bytes that the transport carried in all trips, to clients and from them."""
    measure: int = 0
    """Flags of the next TRAIN. They and `ask_ahead` are part of the state: a trip that is repeated must not change."""
    ask_ahead: bool = False
    """Whether the trip that ends this round also asks for the first messages of the next one."""
    report: RoundReport | None = None
    """The report of the round that the last step ended; like `events`, not part of a checkpoint."""
    events: tuple[Event, ...] = ()
    """What the last step found out about clients."""

    def checkpoint(self) -> dict[str, Any]:
        """What a checkpoint has."""
        values = {own.name: getattr(self, own.name) for own in fields(self) if own.name not in _NOT_IN_CHECKPOINT}
        for name in _TENSORS:
            values[name] = {key: value.cpu() for key, value in values[name].items()}
        measured = {int(split): counts for split, counts in self.measured.items()}
        return {**values, "log": self.log.state(), "traffic": list(self.traffic.as_tuple()), "measured": measured}


class Server:
    """The rules of a run's server.

    Args:
        terms: what both ends know.
        quorum: share of the expected messages of an exchange that must be valid.
        percent: whether clients measure accuracies, or a score of their own.
    """

    def __init__(
        self, terms: Terms, quorum: float = 0.5, percent: bool = True, watch: Stopwatch | None = None
    ) -> None:  # fmt: skip
        self._terms, self._method = terms, terms.method
        self._quorum, self._percent, self._watch = quorum, percent, watch or Stopwatch()
        self._exchanges = terms.method.exchanges

    def begin(self) -> ServerState:
        """The state before the first trip."""
        start = self._method.server_start()
        return ServerState(start, start, start, self._terms.catch_up.new_log())

    def restore(self, checkpoint: Mapping[str, Any]) -> ServerState:
        """The state that `ServerState.checkpoint()` saved, with tensors on the devices the method uses."""
        start = self.begin()
        tensors = {
            name: {key: value.to(start.server[key].device) for key, value in checkpoint[name].items()}
            for name in _TENSORS
        }
        measured = {Split(split): counts for split, counts in checkpoint["measured"].items()}
        others = {
            "log": self._terms.catch_up.new_log(checkpoint["log"]),
            "traffic": Traffic(*checkpoint["traffic"]),
            "measured": measured,
        }
        return ServerState(**{**checkpoint, **tensors, **others})

    # --- what clients are asked for

    def outbox(self, state: ServerState) -> tuple[Request, ...]:
        """What clients are asked for next."""
        if state.stage == BEGIN and self._exchanges:
            return (self._request_first_messages(state),)
        if BEGIN < state.stage < len(self._exchanges) - 1:
            send = Record(Code.SEND, state.round, state.stage + 1)
            return (Request(state.members, (self._answer(state), send), continues=True),)
        return self._requests_at_end(state)

    def request_for_copies(self, state: ServerState, clients: Sequence[int], train: bool = True) -> Request:
        """What clients that took no part in the last phase would have been asked for in it. Copies of these clients are
        asked for it, to measure or export their models."""
        number = state.round - 1
        orders = [Record(Code.ANSWER, number, i, data=answer) for i, answer in enumerate(state.last_answers)]
        if train:
            orders.append(Record(Code.TRAIN, state.round, flags=Flag.PERSONAL))
        missed = self._catch_up(replace(state, server=state.before), clients, number)
        return Request(tuple(clients), tuple(orders), missed)

    def inbox(self, state: ServerState, requests: tuple[Request, ...]) -> Inbox:
        """An empty inbox for what these requests bring back."""
        inbox = Inbox(requests, state.round, state.trip, state.claims)
        for request in requests:
            order = request.orders[-1]
            if order.code == Code.SEND:
                claims = {} if request.next_round else dict(state.claims)
                inbox.expected = len(request.clients)
                inbox.aggregation = Aggregation(
                    self._exchanges[order.index], state.current, self._terms.digest, order.number, request.clients,
                    self._terms.train.max_weight, claims, self._terms.train.max_scale,
                )  # fmt: skip
        return inbox

    def _answer(self, state: ServerState) -> Record:
        return Record(Code.ANSWER, state.round, state.stage, data=state.answers[-1])

    def _requests_at_end(self, state: ServerState) -> tuple[Request, ...]:
        """The last answer and local steps, and the first messages of the next round if they are asked for ahead."""
        started, about_last = state.stage != START, self._method.about_last_steps
        number = state.round if started else -1
        # If messages are about the last steps, other clients train next than those who sent them.
        drawn = about_last or not self._exchanges or not started
        trainers = self._terms.participation.of(number + 1) if drawn else state.members
        train = Record(Code.TRAIN, number + 1, flags=state.measure)
        orders = (self._answer(state), train) if state.answers else (train,)
        requests = [Request(trainers, orders, continues=not drawn)]
        if about_last and started:
            known = state.answers_known
            if state.out_of_sync:
                known = {**known, **dict.fromkeys(state.out_of_sync, OUT_OF_SYNC)}
            missed = self._catch_up(replace(state, answers_known=known), trainers, number)
            requests = [replace(requests[0], catch_up=missed)]
        if state.ask_ahead and self._exchanges:
            # The state in which clients are once they have carried out the request before.
            next_state = replace(
                state, round=number + 1, server=state.current, participants=trainers,
                log=self._log_with_answer(state),
                answers_known={**state.answers_known, **dict.fromkeys(trainers, number + 1)},
            )  # fmt: skip
            requests.append(replace(self._request_first_messages(next_state), next_round=True))
        return tuple(requests)

    def _request_first_messages(self, state: ServerState) -> Request:
        """Ask for the messages of exchange 0: from the clients that trained last, or from those that train next."""
        send = (Record(Code.SEND, state.round),)
        if self._method.about_last_steps:
            return Request(state.participants, send, continues=True)
        clients = self._terms.participation.of(state.round + 1)
        return Request(clients, send, self._catch_up(state, clients, state.round))

    def _catch_up(self, state: ServerState, clients: Sequence[int], number: int) -> tuple[CatchUpOrders, ...]:
        """What clients that lack answers are sent before round `number`, if the method tracks a model."""
        if not self._method.tracks:
            return ()
        lacking: dict[int, list[int]] = {}
        for client in clients:
            if (since := state.answers_known.get(client, 0)) < number:
                lacking.setdefault(since, []).append(client)
        missed = []
        for since, ids in sorted(lacking.items()):
            orders = self._terms.catch_up.orders(since, number, state.log, state.server)
            missed.append(CatchUpOrders(tuple(ids), orders, state.log.fingerprints.get(since - 1), state.server))
        return tuple(missed)

    def _log_with_answer(self, state: ServerState) -> AnswerLog:
        """The log with the answer of this round."""
        if not (self._method.tracks and state.answers):
            return state.log
        return state.log.with_answer(state.round, state.answers[0], state.server["model"], state.current["model"])

    # --- what came back

    def step(self, state: ServerState, inbox: Inbox) -> ServerState:
        """The state after a trip. Raises QuorumError if too few clients did what they were asked for."""
        after = replace(
            state, trip=state.trip + 1, rejected=state.rejected + inbox.rejected,
            unheard=state.unheard + inbox.unheard, traffic=state.traffic + inbox.traffic,
            carried=(state.carried[0] + inbox.carried[0], state.carried[1] + inbox.carried[1]), report=None, events=(),
        )  # fmt: skip
        if self._method.tracks:
            after = replace(after, answers_known=self._answers_known(state, inbox))
        for request in inbox.requests:
            if any(order.code == Code.TRAIN for order in request.orders):
                after = self._after_training(after, request, inbox)
            else:
                after = self._after_messages(after, request, inbox)
        return after

    def _answers_known(self, state: ServerState, inbox: Inbox) -> dict[int, int]:
        """How many answers clients know, as they report it, if that is possible. A client that is out of sync is
        believed once it has adopted the model."""
        known, out_of_sync = state.answers_known, set(state.out_of_sync)
        doubtful = {client for client in inbox.failed if client in out_of_sync or known.get(client) == OUT_OF_SYNC}
        reported = {
            client: count
            for client, count in inbox.answers_known.items()
            if count <= state.round + 1 and client not in doubtful
        }
        return known | reported if reported else known

    def _after_training(self, state: ServerState, request: Request, inbox: Inbox) -> ServerState:
        """The state after the local steps that end a round, or the start."""
        started, trained = state.stage != START, inbox.trained
        if not trained:
            when = f"round {state.round + 1}" if started else "the start"
            raise _too_few(f"{when}: the server reached no client", inbox)
        participants = tuple(sorted(trained))
        left_out = {**state.left_out, **_select(inbox.failed, request.clients)}
        report = RoundReport(
            participants,
            mean_loss(trained[client] for client in participants),
            state.traffic,
            state.rejected,
            len(state.out_of_sync),
            state.unheard,
            evaluation_of_counts(inbox.measured.get(Split.SHARED, {}), self._percent),
            evaluated=bool(state.measure),
            left_out=left_out,
            limited=state.limited,
        )
        known = state.answers_known
        if self._method.tracks and state.out_of_sync:
            known = known | {client: OUT_OF_SYNC for client in state.out_of_sync if client not in trained}
        return replace(
            state,
            server=state.current,
            before=state.server,
            round=state.round + started,
            stage=BEGIN,
            answers=(),
            last_answers=state.answers,
            log=self._log_with_answer(state),
            answers_known=known,
            members=(),
            participants=participants,
            claims={},
            out_of_sync=(),
            measured=inbox.measured,
            traffic=inbox.next_traffic,
            rejected=0 if started else state.rejected,
            unheard=0,
            left_out={} if report.evaluated else left_out,
            limited=() if report.evaluated else state.limited,
            report=report if started else None,
        )

    def _after_messages(self, state: ServerState, request: Request, inbox: Inbox) -> ServerState:
        """The state after all messages of an exchange have been added up, with its answer."""
        order, aggregation = request.orders[-1], inbox.aggregation
        assert aggregation is not None  # `inbox` opens one for every request that ends with SEND
        number = order.number
        members = tuple(client for client in request.clients if client not in inbox.failed)
        if not members and (request.catch_up or order.index):
            raise _too_few(f"round {number + 1}: the server reached no client", inbox)
        if aggregation.valid < max(1, self._quorum * inbox.expected):
            raise _too_few(
                f"round {number + 1}: {aggregation.valid} of {inbox.expected} messages were valid, expected at least "
                f"run.quorum = {self._quorum:g} of them and never fewer than one",
                inbox,
            )
        with self._watch.stage("server"):
            current, values = aggregation.close()
        with self._watch.stage("messages down"):
            answer = server_frame(aggregation.exchange.down, values, number, self._terms.digest)
        why = "it tracks another model than the server, and is sent that one"
        text = f"is left out of this exchange: {why} before it goes on"
        events = [Event(number, client, "out_of_sync", text) for client in aggregation.out_of_sync]
        for client in aggregation.limited:
            text = f"weighs less than its {aggregation.claims[client]} samples, by train.max_weight"
            events.append(Event(number, client, "weight_limited", text))
        for client, reason in aggregation.too_large.items():
            events.append(Event(number, client, "too_large", f"is left out of this exchange: its {reason}"))
        excluded = {**dict.fromkeys(aggregation.out_of_sync, why), **aggregation.too_large}
        left_out = {**_select(inbox.failed, request.clients), **excluded}
        return replace(
            state,
            stage=order.index,
            current=current,
            answers=(*state.answers, answer),
            members=members,
            claims=aggregation.claims,
            out_of_sync=(*state.out_of_sync, *aggregation.out_of_sync),
            left_out={**state.left_out, **left_out},
            limited=tuple(sorted({*state.limited, *aggregation.limited})),
            events=(*state.events, *events),
        )


def _too_few(what: str, inbox: Inbox) -> QuorumError:
    """The error of a trip, with the reason of the first client that has one: it may be that of all."""
    reason = next((f" (client {client}: {why})" for client, why in sorted(inbox.failed.items())), "")
    return QuorumError(f"{what}{reason}; {REMEDY}")


def _select(reasons: Mapping[int, str], clients: Collection[int]) -> dict[int, str]:
    """The reasons of these clients."""
    chosen = set(clients)
    return {client: why for client, why in reasons.items() if client in chosen}
