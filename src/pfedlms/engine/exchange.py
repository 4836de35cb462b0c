"""One exchange, written once for every method and every way to execute clients: bytes up, bytes down, both checked."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from pfedlms import rng
from pfedlms.backend import to_host
from pfedlms.cohort import Cohort, Tensors
from pfedlms.engine.catch_up import Answers, CatchUp, Sent, fingerprints_of, from_server
from pfedlms.engine.reports import Traffic
from pfedlms.engine.stopwatch import Stopwatch
from pfedlms.engine.tally import Tally
from pfedlms.errors import QuorumError, RunError, WireError
from pfedlms.methods.contract import ClientWork, Exchange
from pfedlms.wire.fields import Message
from pfedlms.wire.frames import HEADER_BYTES, SERVER, Intake, Received, frame, frame_rows

REMEDY = "lower run.lost or run.quorum (to go on, in the run's config.toml), or let more clients take part"
CATCHING_UP = 1  # the delivery of all that a client was sent later; 0 is the round's own answer
_BLOCK_BYTES = 1 << 18  # of frames that are written and read together

Data = bytes | memoryview
Link = Callable[[bytes, int], bytes | None]
"""The way between the server and a client: a frame and the client's id go in; what arrives comes out, None if nothing
does."""


def perfect_link(data: bytes, client: int) -> bytes | None:
    """Everything arrives as it was sent."""
    return data


@dataclass(frozen=True)
class Ways:
    """How messages travel: links up and down, the share of messages that is lost besides, and the share of those who
    were to send whose messages must be valid; and what one client may weigh of all."""

    up: Link = perfect_link
    down: Link = perfect_link
    lost: float = 0.0
    quorum: float = 0.5
    seed: int = 0
    max_weight: float = 1.0

    def carry(self, link: Link, data: Data, client: int, *names: int) -> Data | None:
        """What arrives; whether a message is lost is a function of seed, `names` and client."""
        if self.lost and rng.uniforms(rng.stream(self.seed, "lost", *names, client), 1)[0] < self.lost:
            return None
        # A buffer that is written over by the next frame is nothing to hand to others.
        return data if link is perfect_link else link(bytes(data), client)


@dataclass
class Channel:
    """Encodes, sends, checks, counts and decodes the messages of one round."""

    digest: bytes
    round: int
    ways: Ways = Ways()
    watch: Stopwatch = field(default_factory=Stopwatch)
    traffic: Traffic = field(default_factory=Traffic)
    rejected: int = 0
    """Messages of clients that did not arrive or were refused."""
    unheard: int = 0
    """Answers that did not arrive or were refused."""
    astray: set[int] = field(default_factory=set)
    """Clients that track another model than the server does; their messages are left out."""
    claims: dict[int, int] = field(default_factory=dict)
    """N_k as clients named it in this round."""

    def ask(
        self, exchange: Exchange[Any], cohorts: Sequence[Cohort], server: Tensors, work: ClientWork
    ) -> tuple[list[Cohort], Tensors, bytes]:
        """Every cohort's messages up: the clients after sending, the server's next state, and its answer as a frame."""
        senders = [client for cohort in cohorts for client in cohort.ids]
        ways = self.ways
        tally = Tally(exchange, server, self.digest, self.round, senders, ways.max_weight, self.claims)
        after, desk = [], _Desk(exchange.up, tally.places)
        for cohort in cohorts:
            with self.watch.stage("clients compute messages"):
                cohort, values = exchange.client_send(cohort, self.round, work)
            after.append(cohort)
            with self.watch.stage("messages up"):
                rows = on_host(values)
            for start in range(0, len(cohort.ids), tally.places):
                with self.watch.stage("messages up"):
                    self._send_up(exchange.up, cohort, rows, start, tally, desk)
                with self.watch.stage("server"):
                    tally.add_up()
        check_quorum(tally.valid, len(senders), ways.quorum, self.round)
        with self.watch.stage("server"):
            server, reply = tally.close()
        self.astray.update(tally.astray)
        for client in tally.astray:
            warnings.warn(
                f"round {self.round + 1}: client {client} is left out of this exchange: it tracks another model than "
                "the server, and is sent that one before it goes on",
                stacklevel=2,
            )
        with self.watch.stage("messages down"):
            return after, server, from_server(exchange.down, reply, self.round, self.digest)

    def tell(self, exchange: Exchange[Any], answer: bytes, cohorts: Sequence[Cohort]) -> list[Cohort]:
        """The answer down: one frame, decoded once and counted for each client. Those who heard it."""
        with self.watch.stage("messages down"):
            received = self._read(exchange.down, answer, self.round)
            after = []
            for cohort in cohorts:
                self.traffic.down_payload += received.payload_bytes * len(cohort.ids)
                self.traffic.down_framing += HEADER_BYTES * len(cohort.ids)
                heard = self._reached(exchange.down, answer, self.round, cohort.ids)
                if heard:
                    part = cohort.take(heard)
                    values = {name: torch.from_numpy(value) for name, value in received.values.items()}
                    after.append(exchange.client_receive(part, values, self.round))
        if not after:
            raise QuorumError(f"round {self.round + 1}: the server's answer reached no client; {REMEDY}")
        return after

    def catch_up(
        self, exchange: Exchange[Any], cohort: Cohort, heard: Sequence[int], answers: Answers, by: CatchUp,
        server: Tensors,
    ) -> Cohort | None:  # fmt: skip
        """Send clients that took no part what they missed, in the form of the fewest bytes.

        `heard` says how many answers each client of the cohort knows, `server` is the state these lead to. Bytes are
        counted apart from the round's own. All that one client is sent is lost or arrives together: else who has missed
        much would hardly ever catch up. The clients that it reached, as if they had taken part; None if there are none.
        """
        gone: list[int] = []
        for since in sorted({count for count in heard if count < self.round}):
            ids = [client for client, count in zip(cohort.ids, heard, strict=True) if count == since]
            sent = by.frames(since, self.round, answers, server)
            self.traffic.catch_up += len(ids) * sum(len(each.data) for each in sent)
            there = list(ids)
            for message, number, data in sent:
                there = self._reached(message, data, number, there, CATCHING_UP)
                if self.ways.down is perfect_link:
                    break  # what holds of one of them holds of all
            gone += [client for client in ids if client not in there]
            if there:
                cohort = cohort.put(self._caught_up(exchange, cohort.take(there), since, sent, answers, by, server))
        left = [client for client in cohort.ids if client not in gone]
        return cohort.take(left) if left else None

    def _caught_up(
        self, exchange: Exchange[Any], part: Cohort, since: int, sent: Sequence[Sent], answers: Answers, by: CatchUp,
        server: Tensors,
    ) -> Cohort:  # fmt: skip
        """Clients after all that they were sent. Answers were read when they were new, and lead every client that has
        the server's w of that time to the server's w of now: so it is taken from there, and not computed again."""
        if sent[0].message is exchange.down:
            known = answers.fingerprints.get(since - 1)
            if known is not None and {known} == set(fingerprints_of(part.state["model"])):
                return by.adopted(part, server)
        for message, number, data in sent:
            part = by.taken_in(exchange, part, message, self._read(message, data, number), number)
        return part

    def _send_up(
        self, message: Message, cohort: Cohort, rows: dict[str, Any], start: int, tally: Tally, desk: _Desk
    ) -> None:
        """Messages of some clients, from row `start` on."""
        if self._send_together(message, cohort, rows, start, tally, desk):
            return
        for row in range(start, min(start + tally.places, len(cohort.ids))):
            client, own = cohort.ids[row], {name: array[row] for name, array in rows.items()}
            sent = frame(
                message, own, round=self.round, sender=client, samples=cohort.samples[row], digest=self.digest,
                out=desk.buffer,
            )  # fmt: skip
            self.traffic.up_payload += len(sent) - HEADER_BYTES
            self.traffic.up_framing += HEADER_BYTES
            got = self.ways.carry(self.ways.up, sent, client, self.round, message.kind)
            try:
                if got is None:
                    raise WireError("nothing arrived")
                tally.take(got)
            except WireError as error:
                self.rejected += 1
                self._tell_of(f"client {client} is left out of this exchange", error, got)

    def _send_together(
        self, message: Message, cohort: Cohort, rows: dict[str, Any], start: int, tally: Tally, desk: _Desk
    ) -> bool:
        """`_send_up` of short messages that are all of one size, with nothing on their way and nothing wrong; else
        nothing was sent."""
        if desk.block is None or self.ways.lost or self.ways.up is not perfect_link:
            return False
        ids, samples = cohort.ids[start : start + tally.places], cohort.samples[start : start + tally.places]
        own = {name: array[start : start + tally.places] for name, array in rows.items()}
        size = message.rows_size(own)
        if size is None or sorted(ids) != list(ids):
            return False
        sent = desk.block[: len(ids), : HEADER_BYTES + size]
        frame_rows(message, own, round=self.round, senders=ids, samples=samples, digest=self.digest, out=sent)
        if not tally.take_rows(sent, ids, samples):
            return False
        self.traffic.up_payload += len(ids) * size
        self.traffic.up_framing += len(ids) * HEADER_BYTES
        return True

    def _reached(
        self, message: Message, sent: bytes, number: int, clients: Sequence[int], delivery: int = 0
    ) -> list[int]:
        """The clients at whom a frame of the server's arrives as one they accept; what is of one delivery and kind is
        lost together."""
        heard = []
        for client in clients:
            got = self.ways.carry(self.ways.down, sent, client, self.round, message.kind, delivery)
            try:
                if got is None:
                    raise WireError("nothing arrived")
                if got is not sent:
                    Intake(message, self.digest, number, (SERVER,)).accept(got)
                heard.append(client)
            except WireError as error:
                self.unheard += 1
                self._tell_of(f"client {client} did not hear the server and sits this round out", error, got)
        return heard

    def _tell_of(self, what: str, error: WireError, got: Data | None) -> None:
        """Warn of a message that was refused; where losses were asked for, they are only counted."""
        if got is not None or not self.ways.lost:
            warnings.warn(f"round {self.round + 1}: {what}: {type(error).__name__}: {error}", stacklevel=2)

    def _read(self, message: Message, sent: bytes, number: int) -> Received:
        try:
            return Intake(message, self.digest, number, (SERVER,)).accept(sent)
        except WireError as error:
            # Clients cannot go on without the answer. It is the server's own, so what went into it was already wrong.
            raise RunError(
                f"round {number + 1}: the server's answer is not valid: {type(error).__name__}: {error}"
            ) from error


class _Desk:
    """Where frames are written, each over the one before: memory that is there already, because fresh memory costs more
    than the copy into it."""

    def __init__(self, message: Message, places: int) -> None:
        frame = HEADER_BYTES + message.max_bytes
        self.buffer = bytearray(frame)
        # Where all are written together; not so long ones, each of which had better stay in the cache.
        short = message.in_rows and places * frame <= _BLOCK_BYTES
        self.block = np.empty((places, frame), np.uint8) if short else None


def check_quorum(valid: int, senders: int, quorum: float, round: int) -> None:
    """Stop where too few messages of an exchange were valid."""
    if valid < max(1, quorum * senders):
        raise QuorumError(
            f"round {round + 1}: {valid} of {senders} messages were valid, expected at least run.quorum = {quorum:g} "
            f"of them and never fewer than one; {REMEDY}"
        )


def on_host(values: Tensors) -> dict[str, Any]:
    """Rows of every client as arrays."""
    return {name: value.numpy() for name, value in zip(values, to_host(*values.values()), strict=True)}
