"""One exchange, written once for every method and every way to execute clients."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pfedlms.cohort import Cohort
from pfedlms.engine.reports import Traffic
from pfedlms.engine.stopwatch import NoStopwatch, Stopwatch
from pfedlms.errors import DivergedError, QuorumError, RunError, WireError
from pfedlms.methods.contract import ClientWork, Exchange, Tensors
from pfedlms.wire.codec import Buffer
from pfedlms.wire.frames import HEADER_BYTES, SERVER, Intake, Received, frame

Link = Callable[[Buffer, int], Buffer | None]
"""The way from a client to the server: a frame and its sender go in; what arrives comes out, None if nothing does."""


def perfect_link(data: Buffer, sender: int) -> Buffer | None:
    """Everything arrives as it was sent."""
    return data


@dataclass
class Channel:
    """Encodes, sends, checks, counts and decodes the messages of one round."""

    digest: bytes
    round: int
    link: Link
    quorum: float
    watch: Stopwatch = field(default_factory=NoStopwatch)
    traffic: Traffic = field(default_factory=Traffic)
    rejected: int = 0

    def hold(
        self, exchange: Exchange[Any], cohorts: Sequence[Cohort], server: Tensors, work: ClientWork
    ) -> tuple[list[Cohort], Tensors]:
        """One whole exchange: every cohort's messages up, the server's answer down."""
        everyone = {client for cohort in cohorts for client in cohort.ids}
        intake = Intake(exchange.up, self.digest, self.round, everyone)
        total = exchange.server_open(server, self.round)
        accepted, after = 0, []
        for cohort in cohorts:
            with self.watch.stage("clients compute messages"):
                cohort, values = exchange.client_send(cohort, self.round, work)
            after.append(cohort)
            with self.watch.stage("messages up"):
                arrived = self._send_up(exchange, cohort, values, intake)
            if arrived:
                ids, samples = [message.sender for message in arrived], [message.samples for message in arrived]
                with self.watch.stage("server"):
                    total = exchange.server_add(total, ids, samples, _stack(arrived))
            accepted += len(arrived)
        if accepted < max(1, self.quorum * len(everyone)):
            raise QuorumError(
                f"round {self.round + 1}: {accepted} of {len(everyone)} messages were valid, expected at least "
                f"run.quorum = {self.quorum:g} of them"
            )
        with self.watch.stage("server"):
            server, reply = exchange.server_reply(server, total, self.round)
        with self.watch.stage("messages down"):
            return self._send_down(exchange, after, reply), server

    def _send_up(self, exchange: Exchange[Any], cohort: Cohort, values: Tensors, intake: Intake) -> list[Received]:
        arrays = {name: value.detach().cpu().numpy() for name, value in values.items()}
        arrived = []
        for row, (client, samples) in enumerate(zip(cohort.ids, cohort.samples, strict=True)):
            own = {name: array[row] for name, array in arrays.items()}
            sent = frame(exchange.up, own, round=self.round, sender=client, samples=samples, digest=self.digest)
            self.traffic.up_payload += len(sent) - HEADER_BYTES
            self.traffic.up_framing += HEADER_BYTES
            got = self.link(sent, client)
            try:
                if got is None:
                    raise WireError("nothing arrived")
                arrived.append(intake.accept(got))
            except WireError as error:
                self.rejected += 1
                warnings.warn(
                    f"round {self.round + 1}: client {client} is left out of this exchange: "
                    f"{type(error).__name__}: {error}",
                    stacklevel=2,
                )
        return sorted(arrived, key=lambda message: message.sender)

    def _send_down(self, exchange: Exchange[Any], cohorts: Sequence[Cohort], reply: Tensors) -> list[Cohort]:
        """The answer is one frame, received and decoded once by each cohort and counted once for each client."""
        arrays = {name: value.cpu().numpy() for name, value in reply.items()}
        sent = frame(exchange.down, arrays, round=self.round, sender=SERVER, samples=0, digest=self.digest)
        after = []
        for cohort in cohorts:
            received = self._checked(exchange, sent)
            self.traffic.down_payload += received.payload_bytes * len(cohort.ids)
            self.traffic.down_framing += (len(sent) - received.payload_bytes) * len(cohort.ids)
            values = {name: torch.from_numpy(value).to(cohort.params.device) for name, value in received.values.items()}
            after.append(exchange.client_receive(cohort, values, self.round))
        return after

    def _checked(self, exchange: Exchange[Any], sent: Buffer) -> Received:
        try:
            return Intake(exchange.down, self.digest, self.round, (SERVER,)).accept(sent)
        except WireError as error:
            # Clients cannot go on without the answer. It is the server's own, so what went into it was already wrong.
            raise RunError(
                f"round {self.round + 1}: the server's answer is not valid: {type(error).__name__}: {error}"
            ) from error


def _stack(arrived: Sequence[Received]) -> Tensors:
    names = arrived[0].values
    return {name: torch.from_numpy(np.stack([message.values[name] for message in arrived])) for name in names}


def check_finite(cohort: Cohort, losses: Tensor, round: int) -> None:
    """Stop where a client's loss or model is no longer finite, and name it."""
    # A sum with a NaN or an infinity in it is not finite; one that merely overflows is looked at again.
    if torch.isfinite(losses + cohort.params.sum(dim=1)).all():
        return
    fine = (torch.isfinite(losses) & torch.isfinite(cohort.params).all(dim=1)).tolist()
    if not all(fine):
        client = cohort.ids[fine.index(False)]
        when = f"round {round}" if round else "the local steps before round 1"
        raise DivergedError(
            f"{when}: the loss or the model of client {client} is not finite any more; "
            "lower train.learning_rate (or the method's strength)"
        )
