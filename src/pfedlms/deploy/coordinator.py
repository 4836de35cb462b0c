"""The server of a run whose clients are nodes: what a `Federation` does in one process, trip by trip.

A trip is one request to each of some nodes and what they reply. It carries as much as it can: what a node has missed,
the answer it waits for, and what it is to do next, so that a round takes as many trips as its method has exchanges.

    start                      train phase 0 · send exchange 0 of round 0
    round r, exchange i        hear answer i − 1 · send exchange i                                            i ≥ 1
    round r, at its end        (hear what was missed) · hear the last answer · train phase r + 1, measure ·
                               send exchange 0 of round r + 1

Who takes part in the next phase but not in this one is asked for exchange 0 in the same trip. A node that does not
answer in time, refuses, or answers with anything that is not what it was asked for is left out until it is asked again,
which is at the end of each round in which it is drawn. Its reply is taken whole or not at all.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from pfedlms.backend import own_threads
from pfedlms.data import FederatedData
from pfedlms.deploy.envelope import Code, Envelope, Flag, Kind, Record, Split
from pfedlms.deploy.ground import Ground
from pfedlms.deploy.replies import Reader, Reply, answers_heard, checked, is_carriers
from pfedlms.deploy.standing import TO_GATHER, TO_START, Standing
from pfedlms.engine.catch_up import Answers, catching_up, from_server
from pfedlms.engine.exchange import REMEDY, check_quorum
from pfedlms.engine.federation import ASTRAY
from pfedlms.engine.reports import Evaluation, RoundReport, Traffic, mean_loss, summed
from pfedlms.engine.stopwatch import Stopwatch
from pfedlms.engine.tally import Tally
from pfedlms.errors import QuorumError, WireError
from pfedlms.experiment.config import Config
from pfedlms.experiment.prepare import NAMED, as_configured
from pfedlms.experiment.problem import Problem
from pfedlms.models import CohortModel
from pfedlms.wire.frames import HEADER_BYTES


class Transport(Protocol):
    """Whoever carries messages."""

    def send(self, requests: dict[int, bytes], timeout: float) -> Mapping[int, bytes]:
        """Requests by client; replies by client, of those who answered within so many seconds. Who is missing is late,
        gone, or has not come yet."""
        ...


class Coordinator:
    """The server's end of a run. `step` makes one trip; `state` is what a checkpoint after it keeps.

    Args:
        config: as `Ground` takes it.
        transport: the way to nodes.
        problem: what the configuration says is given in Python.
    """

    largest_cohort = 1

    def __init__(
        self, config: Config, transport: Transport, problem: Problem = NAMED
    ) -> None:  # fmt: skip
        self.config, self._transport = config, transport
        self._ground = Ground(config, problem=problem)
        self._terms = self._ground.terms
        start = self._terms.method.server_start()
        self._method, self.participation = self._terms.method, self._terms.participation
        self.criterion = self._ground.parts.criterion
        self.watch = Stopwatch()
        self.run = self._ground.run
        """Digest that envelopes carry."""
        self.rounds_played = 0
        self._exchanges = self._method.exchanges
        self.standing = replace(Standing(server=start, current=start, before=start), **self._length)
        self._reader = Reader(self._ground)
        self._told: dict[int, str] = {}
        self._weakened: set[int] = set()

    @property
    def data(self) -> FederatedData:
        return self._ground.parts.data

    @property
    def model(self) -> CohortModel:
        return self._ground.parts.model

    def told(self) -> None:
        """Who was left out was named, and is forgotten."""
        self.standing = replace(self.standing, left_out={}, weakened=())

    def state(self) -> dict[str, Any]:
        """Everything a later process needs to go on."""
        return {"run": self.run, "standing": self.standing.state()}

    def load(self, state: dict[str, Any]) -> None:
        """Go on from `state()`."""
        if state["run"] != self.run:
            raise ValueError("checkpoint: it belongs to another model, method, setting, seed or initial weights")
        self.standing = Standing.of(state["standing"], self._method.server_start())
        self.rounds_played = self.standing.round

    # --- what was measured

    def evaluate(self) -> Evaluation:
        """The models of those who trained last, as they measured them."""
        return self._evaluation(self.standing.tested, self.standing.validated)

    def everyone(self) -> Evaluation:
        """All clients' models that can be reached: who took no part in the last phase hears its answer and takes its
        steps on a copy."""
        standing = self.standing
        tested, validated = dict(standing.tested), dict(standing.validated)
        absent = [client for client in range(self.data.clients) if client not in standing.losses]
        number, asked = standing.round - 1, dict[int, list[Record]]()
        for client in absent:
            work = self._missed(client, number, standing.before, Answers(self._model_bytes, standing.answers))
            work += [Record(Code.HEAR, number, i, data=answer) for i, answer in enumerate(standing.last)]
            asked[client] = [*work, Record(Code.TRAIN, number + 1, flags=Flag.PERSONAL)]
        replies, *_ = self._trip(standing, asked, Kind.LOOK)
        for client, reply in replies.items():
            for split, into in ((Split.TEST, tested), (Split.VALIDATION, validated)):
                if split in reply.counts:
                    into[client] = reply.counts[split]
        return self._evaluation(tested, validated)

    def _evaluation(self, tested: Any, validated: Any) -> Evaluation:
        percent = self.criterion.score is None
        found = summed(tested, percent)
        if found is None:
            raise QuorumError("evaluation: got no measurement of any node, expected one of every node that trained")
        return replace(found, validation=summed(validated, percent)) if validated else found

    # --- trips

    def step(self) -> RoundReport | None:
        """One trip; at the end of a round, its report. Where too few answer, QuorumError, and nothing has changed: the
        next call, or that of a later process, sends the same requests again, and who has answered them answers the
        same."""
        standing = self.standing
        if standing.stage == TO_START:
            self.standing = self._end(standing, self.participation.of(0), None, 0)
            return None
        if standing.stage == TO_GATHER and self._exchanges:
            self.standing = self._gather(standing)
            return None
        answer = None
        if self._exchanges:
            with as_configured(self.config), own_threads():
                standing, answer = self._answered(standing)
            if standing.stage + 1 < len(self._exchanges):
                self.standing = self._ask(standing, answer)
                return None
        return self._end_of_round(standing, answer)

    @property
    def _length(self) -> dict[str, Any]:
        return {"rounds": self.config.train.rounds, "evaluate_every": self.config.run.evaluate_every}

    def _answered(self, standing: Standing) -> tuple[Standing, bytes]:
        """All messages of an exchange added up, and its answer."""
        exchange, number = self._exchanges[standing.stage], standing.round
        claims = dict(standing.claims)
        limit = self._terms.train.max_weight
        tally = Tally(exchange, standing.current, self._terms.digest, number, standing.asked, limit, claims)
        traffic = standing.traffic
        for _, data in sorted(standing.inbox.items()):
            tally.take(data)
            traffic += Traffic(up_payload=len(data) - HEADER_BYTES, up_framing=HEADER_BYTES)
        check_quorum(tally.valid, len(standing.asked), self.config.run.quorum, number)
        server, values = tally.close()
        answer = from_server(exchange.down, values, number, self._terms.digest)
        for client in tally.weakened:
            if client not in self._weakened:
                self._weakened.add(client)
                self._warn(number, client, f"weighs less than its {claims[client]} samples, by train.max_weight")
        out = dict.fromkeys(tally.astray, "it tracks another model than the server, and is sent that one")
        for client, why in out.items():
            self._warn(number, client, f"is left out of this exchange: {why}")
        weakened = tuple(sorted({*standing.weakened, *tally.weakened}))
        after = replace(
            standing, current=server, said=(*standing.said, answer), traffic=traffic, weakened=weakened,
            astray=tuple(tally.astray), left_out={**standing.left_out, **standing.left_out_next, **out},
            left_out_next={},
        )  # fmt: skip
        return after, answer

    def _gather(self, standing: Standing) -> Standing:
        """Messages of a round that nobody was asked for at the end of the one before, because it was the last."""
        number = standing.round
        if self._method.about_last_steps:
            asked = {client: [Record(Code.SEND, number)] for client in sorted(standing.losses)}
            costs = dict[int, Traffic]()
        else:
            asked, costs = self._first(standing, number, self.participation.of(number + 1), standing.server)
        replies, failed, reached, after = self._trip(standing, asked)
        traffic = after.traffic + _spent(costs, reached)
        came = self._received(asked, replies, number)
        return replace(after, stage=0, traffic=traffic, left_out_next=failed, **came)

    def _ask(self, standing: Standing, answer: bytes) -> Standing:
        """The answer of an exchange down, the messages of the next one up."""
        stage, number, members = standing.stage, standing.round, sorted(standing.inbox)
        asked = {
            client: [Record(Code.HEAR, number, stage, data=answer), Record(Code.SEND, number, stage + 1)]
            for client in members
        }
        replies, failed, reached, after = self._trip(standing, asked)
        traffic, left_out = after.traffic + self._down(answer, len(reached)), {**after.left_out, **failed}
        came = self._received(asked, replies, number)
        return replace(after, stage=stage + 1, traffic=traffic, left_out=left_out, **came)

    def _end_of_round(self, standing: Standing, answer: bytes | None) -> RoundReport:
        number = standing.round
        evaluate = (number + 1) % standing.evaluate_every == 0 or number + 1 == standing.rounds
        # Messages about the last steps are of others than those who train next.
        free = self._method.about_last_steps or not self._exchanges
        trainers = self.participation.of(number + 1) if free else tuple(sorted(standing.inbox))
        after = self._end(standing, trainers, answer, (Flag.PERSONAL | Flag.SHARED) * evaluate)
        report = RoundReport(
            tuple(sorted(after.losses)),
            mean_loss(own for _, own in sorted(after.losses.items())),
            after.traffic,
            after.rejected,
            len(after.astray),
            unheard=0,
            global_evaluation=summed(after.shared, self.criterion.score is None),
        )
        self.standing = replace(
            after, round=number + 1, traffic=after.ahead, ahead=Traffic(), rejected=0, astray=(), said=()
        )
        self.rounds_played = number + 1
        return report

    def _end(self, standing: Standing, trainers: Sequence[int], answer: bytes | None, flags: int) -> Standing:
        """The trip that ends a round, or the start: the last answer, local steps, and the first messages of the next
        round."""
        started = standing.stage != TO_START
        number = standing.round if started else -1
        log = Answers(self._model_bytes, standing.answers)
        asked, costs = dict[int, list[Record]](), dict[int, Traffic]()
        for client in trainers:
            work: list[Record] = []
            if self._method.about_last_steps and started:
                work = self._missed(client, number, standing.server, log, standing.astray)
            costs[client] = Traffic(catch_up=sum(len(each.data) for each in work))
            if answer is not None:
                work.append(Record(Code.HEAR, number, len(self._exchanges) - 1, data=answer))
                costs[client] += self._down(answer, 1)
            asked[client] = [*work, Record(Code.TRAIN, number + 1, flags=flags)]
        if self._method.tracks and answer is not None:
            log.add(number, answer)
        coming, ahead = dict[int, list[Record]](), dict[int, Traffic]()
        if self._exchanges and number + 1 < standing.rounds:
            if self._method.about_last_steps:
                coming = {client: [Record(Code.SEND, number + 1)] for client in trainers}
            else:
                # As clients know them once they have done what the same request asks for first.
                heard = {**standing.heard, **dict.fromkeys(trainers, number + 1)}
                then = replace(standing, answers=log.frames, heard=heard)
                coming, ahead = self._first(then, number + 1, self.participation.of(number + 2), standing.current)
        everybody = sorted({*asked, *coming})
        requests = {client: [*asked.get(client, []), *coming.get(client, [])] for client in everybody}
        replies, failed, reached, after = self._trip(standing, requests)
        there = {client: replies[client] for client in trainers if client in replies}
        if not there:
            what = f"round {number + 1}: the server's answer" if started else "the start: the first request"
            raise QuorumError(f"{what} reached no client; {REMEDY}")
        heard = dict(after.heard)
        if self._method.tracks:
            heard |= {client: ASTRAY for client in after.astray if client not in there}
        counts = {split: {k: one.counts[split] for k, one in there.items() if split in one.counts} for split in Split}
        return replace(
            after,
            stage=0 if coming else TO_GATHER,
            server=standing.current,
            before=standing.server,
            last=standing.said,
            answers=log.frames,
            heard=heard,
            losses={k: (one.samples, one.loss) for k, one in there.items()},
            tested=counts[Split.TEST],
            validated=counts[Split.VALIDATION],
            shared=counts[Split.SHARED],
            traffic=after.traffic + _spent(costs, reached),
            ahead=_spent(ahead, reached),
            left_out={**after.left_out, **{k: why for k, why in failed.items() if k in asked}},
            left_out_next={k: why for k, why in failed.items() if k in coming},
            **self._received(coming, replies, number + 1),
        )

    def _first(
        self, standing: Standing, number: int, clients: Sequence[int], server: Any
    ) -> tuple[dict[int, list[Record]], dict[int, Traffic]]:
        """Who is about to train is asked for the first message of a round, having caught up; and what that takes."""
        asked, costs = {}, {}
        log = Answers(self._model_bytes, standing.answers)
        for client in clients:
            work = self._missed(client, number, server, log, heard=standing.heard)
            costs[client] = Traffic(catch_up=sum(len(each.data) for each in work))
            asked[client] = [*work, Record(Code.SEND, number)]
        return asked, costs

    def _missed(
        self, client: int, number: int, server: Any, log: Answers, astray: Sequence[int] = (),
        heard: Mapping[int, int] | None = None,
    ) -> list[Record]:  # fmt: skip
        """What a client is sent before round `number`, if its method tracks a model and it lacks some of it."""
        if not self._method.tracks:
            return []
        known = self.standing.heard if heard is None else heard
        since = ASTRAY if client in astray else known.get(client, 0)
        if since >= number:
            return []
        (exchange,) = self._exchanges
        model = self._terms.catch_up
        frames, message = catching_up(since, number, log, exchange.down, model, server["model"], self._terms.digest)
        code, flags = (Code.MODEL, Flag.FORCED * (since == ASTRAY)) if message is model else (Code.HEAR, 0)
        return [Record(code, each, flags=flags, data=data) for each, data in frames.items()]

    @property
    def _model_bytes(self) -> int:
        return HEADER_BYTES + self._terms.catch_up.max_bytes

    def _down(self, answer: bytes, clients: int) -> Traffic:
        return Traffic(down_payload=clients * (len(answer) - HEADER_BYTES), down_framing=clients * HEADER_BYTES)

    def _received(
        self, asked: Mapping[int, Sequence[Record]], replies: Mapping[int, Reply], number: int
    ) -> dict[str, Any]:
        """Who was to send in an exchange of round `number`, and what came."""
        frames = {client: replies[client].frame for client in sorted(asked) if client in replies}
        inbox = {client: data for client, data in frames.items() if data is not None}
        if asked:
            check_quorum(len(inbox), len(asked), self.config.run.quorum, number)
        claims = {client: replies[client].samples for client in inbox}
        return {"asked": tuple(sorted(asked)), "inbox": inbox, "claims": claims}

    def _trip(
        self, standing: Standing, asked: Mapping[int, Sequence[Record]], kind: Kind = Kind.REQUEST
    ) -> tuple[dict[int, Reply], dict[int, str], set[int], Standing]:
        """Requests to these clients; replies that are what was asked for, what is wrong with the others, to whom
        requests went, and where the server stands after that."""
        requests = {
            client: Envelope(kind, self.run, client, standing.round, standing.trip, tuple(work))
            for client, work in sorted(asked.items())
        }
        encoded = {client: request.encode() for client, request in requests.items()}
        came = self._transport.send(dict(encoded), self.config.run.timeout) if encoded else {}
        replies, failed, reached = dict[int, Reply](), dict[int, str](), set(requests)
        heard = dict(standing.heard)
        for client, request in requests.items():
            data = came.get(client)
            try:
                if data is None:
                    raise WireError(f"no reply within {self.config.run.timeout:g} s")
                said = checked(request, data)
                if is_carriers(said):
                    reached.discard(client)
                # Of one that was found astray, only once it has taken the model in.
                if heard.get(client) != ASTRAY and client not in standing.astray:
                    heard[client] = answers_heard(said, heard.get(client, 0), standing.round + 1)
                replies[client] = self._reader.read(request, said, standing.claims)
                heard[client] = answers_heard(said, heard.get(client, 0), standing.round + 1)
                self._told.pop(client, None)
            except WireError as error:
                failed[client] = str(error) if type(error) is WireError else f"{type(error).__name__}: {error}"
                if kind == Kind.REQUEST:
                    self._warn(standing.round, client, f"is left out: {failed[client]}")
        known = heard if self._method.tracks else {}
        samples = {**standing.samples, **{client: one.samples for client, one in replies.items() if one.samples}}
        down, up = (sum(len(each.get(client, b"")) for client in reached) for each in (encoded, came))
        after = replace(
            standing, trip=standing.trip + 1, heard=known, samples=samples, rejected=standing.rejected + len(failed),
            carried=(standing.carried[0] + down, standing.carried[1] + up), **self._length,
        )  # fmt: skip
        return replies, failed, reached, after

    def _warn(self, number: int, client: int, what: str) -> None:
        """Once, for as long as it stays the same."""
        if self._told.get(client) != what:
            self._told[client] = what
            warnings.warn(f"round {number + 1}: client {client} {what}", stacklevel=4)


def _spent(costs: Mapping[int, Traffic], reached: set[int]) -> Traffic:
    """What clients were sent that were there: to a place that nobody has taken, nothing goes."""
    return sum((each for client, each in costs.items() if client in reached), Traffic())
