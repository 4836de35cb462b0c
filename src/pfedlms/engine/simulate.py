"""A simulation's clients, stacked in this process, and the transport to them, which may lose messages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain, compress
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pfedlms import rng
from pfedlms.backend import has_triton
from pfedlms.cohort import Cohort, Tensors, joined
from pfedlms.engine.aggregation import Aggregation
from pfedlms.engine.catch_up import fingerprints_of
from pfedlms.engine.client import Client, to_arrays
from pfedlms.engine.guard import name_method_in_errors
from pfedlms.engine.participation import PERSISTENT_FIELDS, AbsentClients
from pfedlms.engine.reports import Stopwatch
from pfedlms.engine.terms import Terms
from pfedlms.engine.transport import CatchUpOrders, Code, Event, Flag, Inbox, Record, Request, Split, server_frame
from pfedlms.errors import RunError, WireError
from pfedlms.wire.frames import HEADER_BYTES, SERVER, Intake, Received, frame, frame_on_gpu, frame_rows

_LONG_MESSAGE = 1 << 16  # bytes; a GPU frames such a message faster than the host
_ANSWER, _CATCH_UP = 0, 1  # deliveries to a client: the round's own answer, and all that brings it up to date

Data = bytes | memoryview
Link = Callable[[bytes, int], bytes | None]
"""The connection between the server and a client: it takes a frame and the client's id, and returns what arrives, or
None if nothing does."""


def perfect_link(data: bytes, client: int) -> bytes | None:
    """Deliver everything as it was sent."""
    return data


@dataclass(frozen=True)
class Links:
    """How messages travel: the links up and down, and the share of messages that is lost in addition."""

    up: Link = perfect_link
    down: Link = perfect_link
    lost: float = 0.0
    seed: int = 0

    @property
    def is_perfect(self) -> bool:
        """Whether all messages to the server arrive as they were sent."""
        return self.up is perfect_link and not self.lost

    def carry(self, link: Link, data: Data, client: int, *names: int) -> Data | None:
        """What arrives of a frame. Whether it is lost is a function of the seed, `names` and the client."""
        if self.lost and rng.uniforms(rng.stream(self.seed, "lost", *names, client), 1)[0] < self.lost:
            return None
        # A link gets a copy, because the next frame overwrites the buffer.
        return data if link is perfect_link else link(bytes(data), client)

    def is_simulated_loss(self, arrived: Data | None) -> bool:
        """Whether a frame was lost because `lost` asks for it. Such losses are counted without an event."""
        return arrived is None and self.lost > 0


class Clients:
    """The state of all clients of a simulation.

    The participants of the last phase are `present`, stacked on the device in cohorts of up to `group` clients. Clients
    that trained earlier are `absent`: stored as `Method.client_rest` returns them, on `home`, which is the device if
    there is room for all, else the host or a file. Clients that have never taken part have no state: `start` makes
    them.
    """

    def __init__(self, terms: Terms, samples: Sequence[int], home: torch.device, group: int) -> None:
        self._terms, self._samples, self._group = terms, samples, group
        self.present: list[Cohort] = []
        # Without `self` in it: a cycle of references would keep memory until Python next looks for cycles.
        self.absent = AbsentClients(
            len(samples), home, lambda: terms.method.client_rest(terms.start((0,), (samples[0],)))
        )  # fmt: skip

    @property
    def present_ids(self) -> tuple[int, ...]:
        return tuple(client for cohort in self.present for client in cohort.ids)

    def start(self, ids: tuple[int, ...]) -> Cohort:
        """Clients that take part for the first time."""
        return self._terms.start(ids, tuple(self._samples[k] for k in ids))

    def groups(self, ids: Sequence[int]) -> list[tuple[int, ...]]:
        """These ids in groups, one for each cohort."""
        return [tuple(ids[start : start + self._group]) for start in range(0, len(ids), self._group)]

    def take(self, ids: tuple[int, ...], present: Sequence[Cohort]) -> list[Cohort]:
        """The current state of these clients, on the device. Clients in the cohorts `present` have the state they have
        there. Nothing changes until cohorts are `put`."""
        groups = self.groups(ids)
        if groups == [cohort.ids for cohort in present]:
            return list(present)
        return [self._gather(group, present) for group in groups]

    def put(self, cohorts: Sequence[Cohort]) -> None:
        """Make these clients the present ones; all others become absent."""
        staying = {client for cohort in cohorts for client in cohort.ids}
        for cohort in self.present:
            leaving = [client for client in cohort.ids if client not in staying]
            if leaving:
                self.absent.put(self._terms.method.client_rest(cohort.take(leaving)))
        self.present = [cohort.without_round_values() for cohort in cohorts]
        self.absent.drop(self.present_ids)

    def _gather(self, ids: tuple[int, ...], present: Sequence[Cohort]) -> Cohort:
        missing, parts = set(ids), []
        for cohort in present:
            staying = [client for client in cohort.ids if client in missing]
            if staying:
                parts.append(cohort.without_round_values().take(staying))
                missing.difference_update(staying)
        others = [client for client in ids if client in missing]
        has_state = self.absent.has(others)
        if returning := tuple(compress(others, has_state)):
            parts.append(self._restore(returning))
        if new := tuple(compress(others, ~has_state)):
            parts.append(self.start(new))
        return joined(parts).take(ids)

    def _restore(self, ids: tuple[int, ...]) -> Cohort:
        """Absent clients with what was stored of them, and with w⁰ for everything else, which is replaced before it is
        used."""
        start, stored = self.start(ids), self.absent.take(ids).to(self._terms.model.device)
        if stored.params.shape[1]:
            start = replace(start, params=stored.params, momentum=stored.momentum)
        return replace(start, buffers=stored.buffers, state={**start.state, **stored.state})

    def state(self) -> dict[str, Any]:
        """What a checkpoint has of all clients: the present ones in one stack, however they are grouped, and the absent
        ones."""
        return clients_state(self.present, self.absent.state())

    def load(self, state: dict[str, Any], own: range | None = None) -> None:
        """Resume from `state()`, with all clients or with those in the range `own`."""
        ids = tuple(state["trained"])
        samples = tuple(self._samples[k] for k in ids)
        stack = Cohort(ids, samples, **{name: state[name] for name in PERSISTENT_FIELDS})
        present = [client for client in ids if own is None or client in own]
        self.present = [stack.take(group).to(self._terms.model.device) for group in self.groups(present)]
        self.absent.load(state["away"], own)


def clients_state(present: Sequence[Cohort], absent: dict[str, Any]) -> dict[str, Any]:
    """Present clients and the state of the absent ones, as a checkpoint has them."""
    stack = joined(present).to(torch.device("cpu"))
    fields = {name: getattr(stack, name) for name in PERSISTENT_FIELDS}
    return {**fields, "trained": list(stack.ids), "away": absent}


class InProcess:
    """Carries requests to stacked clients. An answer is decoded once for all of them, and messages of one size are
    framed together. Clients in the middle of a round are stored apart from `clients` until they train."""

    def __init__(self, client: Client, clients: Clients, links: Links | None = None, watch: Stopwatch | None = None):
        self.client, self._clients = client, clients
        self._links, self._watch = links or Links(), watch or Stopwatch()
        self._in_round: list[Cohort] = []
        self._buffer = np.empty(0, np.uint8)
        self._prepared: tuple[Cohort, Record, tuple[Cohort, dict[str, Any]]] | None = None
        """Clients and the SEND whose messages were computed ahead, and these."""

    def carry(self, requests: Sequence[Request], inbox: Inbox) -> None:
        """Carry out all requests, in order, and fill the inbox; see `engine.transport`."""
        for request in requests:
            if request.orders[0].code != Code.ANSWER:  # a round begins, maybe again, because it failed
                self._in_round = self._clients.present
            cohorts = self._in_round
            if not request.continues:
                cohorts = self._clients.take(request.clients, cohorts)
            cohorts = self.catch_up(request, cohorts, inbox)
            for order in request.orders:
                if order.code == Code.ANSWER:
                    cohorts = self.answer(request, order, cohorts, inbox)
                elif order.code == Code.SEND:
                    self._in_round = self.send(request, order, cohorts, inbox)
                else:
                    self._train(order, cohorts, inbox)

    def catch_up(self, request: Request, cohorts: list[Cohort], inbox: Inbox) -> list[Cohort]:
        """Bring clients that lack answers up to date; returns the clients that were reached. All that one client is
        sent arrives or is lost together: else a client that missed much would hardly ever catch up."""
        if not request.catch_up:
            return cohorts
        with self._watch.stage("catching up"):
            round, lost, delivered = request.orders[0].number, set[int](), []
            for missed in request.catch_up:
                inbox.count_catch_up(request, missed.orders, len(missed.clients))
                reached = missed.clients
                for order in missed.orders:
                    reached = self._clients_reached(round, order, reached, inbox, _CATCH_UP)
                    if self._links.down is perfect_link:
                        break  # then all orders are lost, or none is
                lost.update(set(missed.clients).difference(reached))
                delivered.append(replace(missed, clients=reached))
            return _without_clients([self._apply_catch_up(cohort, delivered) for cohort in cohorts], lost)

    def _apply_catch_up(self, cohort: Cohort, delivered: Sequence[CatchUpOrders]) -> Cohort:
        """Clients after all that they were sent. A client that has the w which the server had at that time is led to
        the w which the server has now: so that w is copied, and the answers are not decoded again."""
        row_of = {client: row for row, client in enumerate(cohort.ids)}
        fingerprints, adopting, leads_to = None, list[int](), Tensors()
        for missed in delivered:
            ids = [client for client in missed.clients if client in row_of]
            if ids and missed.orders[0].code == Code.ANSWER and missed.fingerprint is not None:
                fingerprints = fingerprints or fingerprints_of(cohort.state["model"])
                same = {client for client in ids if fingerprints[row_of[client]] == missed.fingerprint}
                adopting, leads_to = [*adopting, *(row_of[client] for client in sorted(same))], missed.leads_to
                ids = [client for client in ids if client not in same]
            if ids:
                part = cohort.take(sorted(ids))
                for order in missed.orders:
                    part = self.client.receive(part, order, self._read(order))
                cohort = cohort.put(part)
        return self.client.catch_up.adopt(cohort, leads_to, adopting) if adopting else cohort

    def answer(self, request: Request, order: Record, cohorts: list[Cohort], inbox: Inbox) -> list[Cohort]:
        """Deliver an answer: one frame, decoded once and counted for each client. Returns the clients it reached."""
        with self._watch.stage("messages down"):
            received, after = self._read(order), []
            for cohort in cohorts:
                inbox.count_down(request, order, len(cohort.ids))
                reached = self._clients_reached(order.number, order, cohort.ids, inbox)
                if reached:
                    after.append(self.client.receive(cohort.take(reached), order, received))
            return after

    def _train(self, order: Record, cohorts: list[Cohort], inbox: Inbox) -> None:
        if not cohorts:
            return
        client = self.client
        if client.method.about_last_steps:
            # The round cannot fail any more, so the clients' state after sending is final.
            self._clients.put(self._in_round)
        if order.flags & Flag.SHARED:
            with self._watch.stage("evaluation"):
                shared = inbox.measured.setdefault(Split.SHARED, {})
                for cohort in cohorts:
                    shared |= client.measure_shared(cohort)
        with self._watch.stage("local steps"):
            launched = [client.work.local_update(client.method, cohort, order.number) for cohort in cohorts]
        after = [cohort.without_round_values() for cohort, _ in launched]
        self._prepare_messages(after, order.number)
        with self._watch.stage("local steps"):
            for cohort, wait_for_losses in launched:
                samples_and_losses = zip(cohort.samples, wait_for_losses().tolist(), strict=True)
                inbox.trained.update(zip(cohort.ids, samples_and_losses, strict=True))
            self._clients.put(after)
        inbox.answers_known = dict.fromkeys(inbox.trained, order.number)
        self._in_round = self._clients.present

    def send(self, request: Request, order: Record, cohorts: Sequence[Cohort], inbox: Inbox) -> list[Cohort]:
        """Deliver every client's message to the server; returns the clients after sending."""
        aggregation, after = inbox.aggregation, []
        assert aggregation is not None  # the server opens one for every SEND
        inbox.expected = sum(len(cohort.ids) for cohort in cohorts)
        for cohort in cohorts:
            prepared, self._prepared = self._prepared, None
            if prepared is not None and prepared[0] is cohort and prepared[1] == order:
                cohort, rows = prepared[2]
            else:
                cohort, rows = self._messages(cohort, order)
            after.append(cohort)
            for start in range(0, len(cohort.ids), aggregation.capacity):
                part = slice(start, start + aggregation.capacity)
                ids, samples = cohort.ids[part], cohort.samples[part]
                with self._watch.stage("messages up"), name_method_in_errors(self.client.method, "client_send"):
                    payload = self._deliver(order.number, ids, samples, _select_rows(rows, part), aggregation, inbox)
                    inbox.count_up(request, payload, len(ids))
                with self._watch.stage("server"):
                    aggregation.add_up()
        return after

    def _deliver(
        self, round: int, ids: Sequence[int], samples: Sequence[int], rows: dict[str, Any], aggregation: Aggregation,
        inbox: Inbox,
    ) -> int:  # fmt: skip
        """Deliver some clients' messages, `[clients, …]`, to the aggregation: together if all have one size and are
        valid, else one after another. Returns the number of bytes of their payloads."""
        message, digest, links = aggregation.exchange.up, self.client.digest, self._links
        if any(isinstance(values, Tensor) for values in rows.values()):
            if aggregation.adds_on_gpu:  # frames stay in the memory of the GPU that has the clients
                on_gpu = frame_on_gpu(message, rows, round=round, senders=ids, samples=samples, digest=digest)
                if aggregation.take_rows(on_gpu, ids, samples):
                    return len(ids) * message.max_bytes
            rows = to_arrays(rows)
        size = message.rows_size(rows) if links.is_perfect else None
        if size is not None:
            frames = self._frame_buffer(len(ids), HEADER_BYTES + size)
            frame_rows(message, rows, round=round, senders=ids, samples=samples, digest=digest, out=frames)
            if aggregation.take_rows(frames, ids, samples):
                return len(ids) * size
        payload, out = 0, self._frame_buffer(1, HEADER_BYTES + message.max_bytes)[0].data
        for row, (client, weight) in enumerate(zip(ids, samples, strict=True)):
            values = _select_rows(rows, row)
            data = frame(message, values, round=round, sender=client, samples=weight, digest=digest, out=out)
            payload += len(data) - HEADER_BYTES
            arrived = links.carry(links.up, data, client, round, message.kind)
            try:
                if arrived is None:
                    raise WireError("nothing arrived")
                aggregation.take(arrived)
            except WireError as error:
                if links.is_simulated_loss(arrived):
                    inbox.rejected += 1
                else:
                    inbox.refuse(round, client, error)
        return payload

    def _frame_buffer(self, count: int, size: int) -> NDArray[np.uint8]:
        """Memory for `count` frames of `size` bytes, valid until the next call. It is reused, because fresh memory
        costs more than the copy into it."""
        if count * size > len(self._buffer):
            self._buffer = np.empty(count * size, np.uint8)
        return self._buffer[: count * size].reshape(count, size)

    def _messages(self, cohort: Cohort, order: Record) -> tuple[Cohort, dict[str, Any]]:
        """Clients after sending, and the values of their messages, `[clients, …]`."""
        with self._watch.stage("clients compute messages"):
            after, values = self.client.send(cohort, order)
        message, on_gpu = self.client.method.exchanges[order.index].up, all(value.is_cuda for value in values.values())
        is_long = message.only_floats and message.max_bytes >= _LONG_MESSAGE
        if on_gpu and is_long and self._links.is_perfect and has_triton():
            return after, values  # the GPU frames them, see `_deliver`
        with self._watch.stage("messages up"):
            return after, to_arrays(values)

    def _prepare_messages(self, cohorts: Sequence[Cohort], number: int) -> None:
        """Compute the first messages of the next round now, if the clients that train now will send them: a GPU is
        still busy with the local steps, so this takes the host no time."""
        method, order, self._prepared = self.client.method, Record(Code.SEND, number), None
        same = method.about_last_steps or method.task.participants == method.task.clients
        if method.exchanges and same and len(cohorts) == 1 and cohorts[0].params.is_cuda:
            # An error here is raised again where it belongs, if the round is played.
            with suppress(Exception):
                self._prepared = cohorts[0], order, self._messages(cohorts[0], order)

    def _clients_reached(
        self, round: int, order: Record, clients: Sequence[int], inbox: Inbox, delivery: int = _ANSWER
    ) -> tuple[int, ...]:
        """The clients that receive a valid frame of the server. Frames of one delivery and kind are lost together."""
        links, sent = self._links, order.data
        if links.down is perfect_link and not links.lost:
            return tuple(clients)
        reached, message = [], self.client.message_of(order)
        for client in clients:
            arrived = links.carry(links.down, sent, client, round, message.kind, delivery)
            try:
                if arrived is None:
                    raise WireError("nothing arrived")
                if arrived is not sent:
                    Intake(message, self.client.digest, order.number, (SERVER,)).accept(arrived)
                reached.append(client)
            except WireError as error:
                inbox.unheard += 1
                inbox.failed[client] = why = f"{type(error).__name__}: {error}"
                text = f"did not get the server's answer and sits this round out: {why}"
                if not links.is_simulated_loss(arrived):
                    inbox.events.append(Event(round, client, "answer_lost", text))
        return tuple(reached)

    def _read(self, order: Record) -> Received:
        try:
            return self.client.read(order)
        except WireError as error:
            # Clients cannot go on without the answer. The server made it, so what it was made from was already wrong.
            raise RunError(
                f"round {order.number + 1}: the server's answer is not valid: {type(error).__name__}: {error}"
            ) from error


def run_exchange(
    transport: InProcess, send: Record, cohorts: Sequence[Cohort], server: Tensors
) -> tuple[list[Cohort], Tensors, Record, Inbox]:
    """Run one exchange outside of any run, up to the answer. Returns the clients after sending, the server's next
    state, its answer as the order that `transport.answer` takes, and the inbox with what was counted."""
    client, senders = transport.client, tuple(chain.from_iterable(cohort.ids for cohort in cohorts))
    exchange, request = client.method.exchanges[send.index], Request(senders, (send,), continues=True)
    aggregation = Aggregation(exchange, server, client.digest, send.number, senders)
    inbox = Inbox((request,), aggregation=aggregation)
    after = transport.send(request, send, cohorts, inbox)
    server, values = aggregation.close()
    answer = server_frame(exchange.down, values, send.number, client.digest)
    return after, server, replace(send, code=Code.ANSWER, data=answer), inbox


def _select_rows(values: dict[str, Any], rows: slice | int) -> dict[str, Any]:
    return {name: value[rows] for name, value in values.items()}


def _without_clients(cohorts: Sequence[Cohort], lost: set[int]) -> list[Cohort]:
    if not lost:
        return list(cohorts)
    remaining = [[client for client in cohort.ids if client not in lost] for cohort in cohorts]
    return [cohort.take(ids) for cohort, ids in zip(cohorts, remaining, strict=True) if ids]
