"""The transport of a simulation: clients in this process, stacked, and messages that may get lost on the way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from pfedlms import rng
from pfedlms.backend import has_triton
from pfedlms.cohort import Cohort, Tensors
from pfedlms.engine.aggregation import Aggregation
from pfedlms.engine.catch_up import fingerprints_of
from pfedlms.engine.client import Client, to_arrays
from pfedlms.engine.participation import Clients
from pfedlms.engine.reports import Stopwatch
from pfedlms.engine.transport import CatchUpOrders, Code, Event, Flag, Inbox, Record, Request, Split, server_frame
from pfedlms.errors import RunError, WireError
from pfedlms.wire.frames import HEADER_BYTES, SERVER, Intake, Received, frame, frame_on_gpu, frame_rows

_LONG = 1 << 16  # bytes of a message that a GPU frames faster than the host
CATCHING_UP = 1  # the delivery of all that brings a client up to date; 0 is the round's own answer

Data = bytes | memoryview
Link = Callable[[bytes, int], bytes | None]
"""The way between the server and a client: a frame and the client's id go in; what arrives comes out, None if nothing
does."""


def perfect_link(data: bytes, client: int) -> bytes | None:
    """Everything arrives as it was sent."""
    return data


@dataclass(frozen=True)
class Links:
    """How messages travel: links up and down, and the share of messages that is lost besides."""

    up: Link = perfect_link
    down: Link = perfect_link
    lost: float = 0.0
    seed: int = 0

    @property
    def is_perfect(self) -> bool:
        """Whether all messages to the server arrive as they were sent."""
        return self.up is perfect_link and not self.lost

    def carry(self, link: Link, data: Data, client: int, *names: int) -> Data | None:
        """What arrives; whether a message is lost is a function of seed, `names` and client."""
        if self.lost and rng.uniforms(rng.stream(self.seed, "lost", *names, client), 1)[0] < self.lost:
            return None
        # A buffer that is written over by the next frame is nothing to hand to others.
        return data if link is perfect_link else link(bytes(data), client)

    def expected_loss(self, got: Data | None) -> bool:
        """Losses that were asked for are only counted."""
        return got is None and self.lost > 0


class InProcess:
    """Carries requests to stacked clients. An answer is decoded once for all of them; messages of one size are
    framed together. Clients in the middle of a round are kept apart from `clients` until they train."""

    def __init__(self, client: Client, clients: Clients, links: Links | None = None, watch: Stopwatch | None = None):
        self.client, self._clients = client, clients
        self._links, self._watch = links or Links(), watch or Stopwatch()
        self._ongoing: list[Cohort] = []
        self._memory = np.empty(0, np.uint8)
        self._ahead: tuple[Cohort, Record, tuple[Cohort, dict[str, Any]]] | None = None

    def begin_round(self) -> None:
        """Forget what a round left behind that did not come to its end."""
        self._ongoing = self._clients.present

    def carry(self, requests: Sequence[Request], inbox: Inbox) -> None:
        """See `Transport`."""
        for request in requests:
            cohorts = self._ongoing
            if not request.continues:
                cohorts = self._clients.take(request.clients, cohorts)
            cohorts = self.catch_up(request, cohorts, inbox)
            for order in request.orders:
                if order.code == Code.ANSWER:
                    cohorts = self.answer(request, order, cohorts, inbox)
                elif order.code == Code.SEND:
                    self._ongoing = self.send(request, order, cohorts, inbox)
                else:
                    self._train(order, cohorts, inbox)

    def catch_up(self, request: Request, cohorts: list[Cohort], inbox: Inbox) -> list[Cohort]:
        """Clients that lack answers get what brings them up to date. All that one client is sent is lost or arrives
        together: else a client that missed much would hardly ever catch up. Those whom it reached."""
        if not request.catch_up:
            return cohorts
        with self._watch.stage("catching up"):
            round, lost, reached = request.orders[0].number, set[int](), []
            for missed in request.catch_up:
                inbox.count_catch_up(request, missed.orders, len(missed.clients))
                there = missed.clients
                for order in missed.orders:
                    there = self._reached(round, order, there, inbox, CATCHING_UP)
                    if self._links.down is perfect_link:
                        break  # what holds of one of them holds of all
                lost.update(set(missed.clients).difference(there))
                reached.append(replace(missed, clients=there))
            return _without([self._caught_up(cohort, reached) for cohort in cohorts], lost)

    def _caught_up(self, cohort: Cohort, reached: Sequence[CatchUpOrders]) -> Cohort:
        """Clients after all that they were sent. Answers were read when they were new, and lead every client that has
        the server's w of that time to the server's w of now: so it is taken from there, and not computed again."""
        place = {client: row for row, client in enumerate(cohort.ids)}
        known, adopting, leads_to = None, list[int](), Tensors()
        for missed in reached:
            ids = [client for client in missed.clients if client in place]
            if ids and missed.orders[0].code == Code.ANSWER and missed.fingerprint is not None:
                known = known or fingerprints_of(cohort.state["model"])
                same = {client for client in ids if known[place[client]] == missed.fingerprint}
                adopting, leads_to = [*adopting, *(place[client] for client in sorted(same))], missed.leads_to
                ids = [client for client in ids if client not in same]
            if ids:
                part = cohort.take(sorted(ids))
                for order in missed.orders:
                    part = self.client.receive(part, order, self._read(order))
                cohort = cohort.put(part)
        return self.client.catch_up.adopted(cohort, leads_to, adopting) if adopting else cohort

    def answer(self, request: Request, order: Record, cohorts: list[Cohort], inbox: Inbox) -> list[Cohort]:
        """An answer down: one frame, decoded once and counted for each client. Those whom it reached."""
        with self._watch.stage("messages down"):
            received, after = self._read(order), []
            for cohort in cohorts:
                inbox.count_down(request, order, len(cohort.ids))
                there = self._reached(order.number, order, cohort.ids, inbox)
                if there:
                    after.append(self.client.receive(cohort.take(there), order, received))
            return after

    def _train(self, order: Record, cohorts: list[Cohort], inbox: Inbox) -> None:
        if not cohorts:
            return
        if self.client.method.about_last_steps:
            # The round can fail no more: what clients keep after sending is kept.
            self._clients.put(self._ongoing)
        if order.flags & Flag.SHARED:
            with self._watch.stage("evaluation"):
                shared = inbox.measured.setdefault(Split.SHARED, {})
                for cohort in cohorts:
                    shared |= self.client.measure_shared(cohort)
        with self._watch.stage("local steps"):
            launched = [self.client.launch(cohort, order.number) for cohort in cohorts]
        after = [cohort.without_round_values() for cohort, _ in launched]
        self._send_ahead(after, order.number)
        with self._watch.stage("local steps"):
            for cohort, losses in launched:
                found = zip(cohort.samples, losses().tolist(), strict=True)
                inbox.trained.update(zip(cohort.ids, found, strict=True))
            self._clients.put(after)
        inbox.answers_known = dict.fromkeys(inbox.trained, order.number)
        self._ongoing = self._clients.present

    def send(self, request: Request, order: Record, cohorts: Sequence[Cohort], inbox: Inbox) -> list[Cohort]:
        """Every client's message up. The clients after sending."""
        aggregation, after = inbox.aggregation, []
        assert aggregation is not None  # the server opens one for every SEND
        inbox.expected = sum(len(cohort.ids) for cohort in cohorts)
        for cohort in cohorts:
            ahead, self._ahead = self._ahead, None
            known = ahead is not None and ahead[0] is cohort and ahead[1] == order
            cohort, rows = ahead[2] if ahead is not None and known else self._messages(cohort, order)
            after.append(cohort)
            for start in range(0, len(cohort.ids), aggregation.capacity):
                some = slice(start, start + aggregation.capacity)
                ids, samples = cohort.ids[some], cohort.samples[some]
                with self._watch.stage("messages up"):
                    payload = self._deliver(order.number, ids, samples, _some(rows, some), aggregation, inbox)
                    inbox.count_up(request, payload, len(ids))
                with self._watch.stage("server"):
                    aggregation.add_up()
        return after

    def _deliver(
        self, round: int, ids: Sequence[int], samples: Sequence[int], rows: dict[str, Any], aggregation: Aggregation,
        inbox: Inbox,
    ) -> int:  # fmt: skip
        """Some clients' messages, `[clients, …]`, to the aggregation: together if all are of one size with nothing
        wrong, else one after another. How many bytes their payloads have."""
        message, digest, links = aggregation.exchange.up, self.client.digest, self._links
        if any(isinstance(own, Tensor) for own in rows.values()):
            if aggregation.adds_on_gpu:  # frames stay in the memory of the GPU that has the clients
                there = frame_on_gpu(message, rows, round=round, senders=ids, samples=samples, digest=digest)
                if aggregation.take_rows(there, ids, samples):
                    return len(ids) * message.max_bytes
            rows = to_arrays(rows)
        size = message.rows_size(rows) if links.is_perfect and message.in_rows else None
        if size is not None:
            frames = self._room(len(ids), HEADER_BYTES + size)
            frame_rows(message, rows, round=round, senders=ids, samples=samples, digest=digest, out=frames)
            if aggregation.take_rows(frames, ids, samples):
                return len(ids) * size
        payload, out = 0, self._room(1, HEADER_BYTES + message.max_bytes)[0].data
        for row, (client, own) in enumerate(zip(ids, samples, strict=True)):
            values = _some(rows, row)
            data = frame(message, values, round=round, sender=client, samples=own, digest=digest, out=out)
            payload += len(data) - HEADER_BYTES
            got = links.carry(links.up, data, client, round, message.kind)
            try:
                if got is None:
                    raise WireError("nothing arrived")
                aggregation.take(got)
            except WireError as error:
                inbox.rejected += 1
                if not links.expected_loss(got):
                    inbox.events.append(refused(round, client, error))
        return payload

    def _room(self, count: int, size: int) -> NDArray[np.uint8]:
        """Room for `count` frames of `size` bytes, until the next call: fresh memory costs more than the copy into
        it."""
        if count * size > len(self._memory):
            self._memory = np.empty(count * size, np.uint8)
        return self._memory[: count * size].reshape(count, size)

    def _messages(self, cohort: Cohort, order: Record) -> tuple[Cohort, dict[str, Any]]:
        """Clients after sending, and the rows of their messages."""
        with self._watch.stage("clients compute messages"):
            after, values = self.client.send(cohort, order)
        message, there = self.client.method.exchanges[order.index].up, all(value.is_cuda for value in values.values())
        if there and message.only_floats and message.max_bytes >= _LONG and self._links.is_perfect and has_triton():
            return after, values  # the GPU frames them, see `_deliver`
        with self._watch.stage("messages up"):
            return after, to_arrays(values)

    def _send_ahead(self, cohorts: Sequence[Cohort], number: int) -> None:
        """The first messages of the next round, where those that train now will send them: a GPU is still busy with
        the local steps, so that computing them takes the host no time."""
        method, order, self._ahead = self.client.method, Record(Code.SEND, number), None
        same = method.about_last_steps or method.task.participants == method.task.clients
        if method.exchanges and same and len(cohorts) == 1 and cohorts[0].params.is_cuda:
            # What goes wrong here goes wrong again where it belongs, if the round is played.
            with suppress(Exception):
                self._ahead = cohorts[0], order, self._messages(cohorts[0], order)

    def _reached(
        self, round: int, order: Record, clients: Sequence[int], inbox: Inbox, delivery: int = 0
    ) -> tuple[int, ...]:
        """The clients at whom a frame of the server arrives as one they accept; what is of one delivery and kind is
        lost together."""
        links, sent = self._links, order.data
        if links.down is perfect_link and not links.lost:
            return tuple(clients)
        there, message = [], self.client.message_of(order)
        for client in clients:
            got = links.carry(links.down, sent, client, round, message.kind, delivery)
            try:
                if got is None:
                    raise WireError("nothing arrived")
                if got is not sent:
                    Intake(message, self.client.digest, order.number, (SERVER,)).accept(got)
                there.append(client)
            except WireError as error:
                inbox.unheard += 1
                inbox.failed[client] = why = f"{type(error).__name__}: {error}"
                text = f"did not get the server's answer and sits this round out: {why}"
                if not links.expected_loss(got):
                    inbox.events.append(Event(round, client, "answer_lost", text))
        return tuple(there)

    def _read(self, order: Record) -> Received:
        try:
            return self.client.read(order)
        except WireError as error:
            # Clients cannot go on without the answer. It is the server's own, so what went into it was already wrong.
            raise RunError(
                f"round {order.number + 1}: the server's answer is not valid: {type(error).__name__}: {error}"
            ) from error


def run_exchange(
    transport: InProcess, send: Record, cohorts: Sequence[Cohort], server: Tensors
) -> tuple[list[Cohort], Tensors, Record, Inbox]:
    """The messages of one exchange up, outside of any run: the clients after sending, the server's next state, its
    answer as the order `transport.answer` takes, and what was counted."""
    client, senders = transport.client, tuple(chain.from_iterable(cohort.ids for cohort in cohorts))
    exchange, request = client.method.exchanges[send.index], Request(senders, (send,), continues=True)
    aggregation = Aggregation(exchange, server, client.digest, send.number, senders)
    inbox = Inbox((request,), aggregation=aggregation)
    after = transport.send(request, send, cohorts, inbox)
    server, values = aggregation.close()
    answer = server_frame(exchange.down, values, send.number, client.digest)
    return after, server, replace(send, code=Code.ANSWER, data=answer), inbox


def _some(rows: dict[str, Any], which: slice | int) -> dict[str, Any]:
    return {name: values[which] for name, values in rows.items()}


def refused(round: int, client: int, error: WireError) -> Event:
    """That a client's message was refused."""
    return Event(
        round, client, "message_refused", f"is left out of this exchange: {type(error).__name__}: {error}"
    )  # fmt: skip


def _without(cohorts: Sequence[Cohort], lost: set[int]) -> list[Cohort]:
    """These cohorts without some clients."""
    if not lost:
        return list(cohorts)
    left = [[client for client in cohort.ids if client not in lost] for cohort in cohorts]
    return [cohort.take(ids) for cohort, ids in zip(cohorts, left, strict=True) if ids]
