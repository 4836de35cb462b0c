"""The server's half of one exchange: it adds up clients' messages and computes one answer."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import cached_property
from itertools import compress
from math import prod
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pfedlms.aggregate import limit_weights, outliers
from pfedlms.backend import to_host
from pfedlms.cohort import Tensors
from pfedlms.errors import DecodeError, QuorumError
from pfedlms.methods.contract import Exchange, FieldMeans
from pfedlms.wire.codec import Buffer
from pfedlms.wire.frames import Intake, Received, ReceivedRows

MIN_SENDERS = 3  # for a median that shows which of them is far off
BUFFER_BYTES = 1 << 26  # of decoded messages that wait to be added up

Messages = tuple[list[int], list[int], Tensors]
"""Some senders, their N_k, and the values of their messages."""


class Aggregation:
    """Checks messages, adds them up in the order of ids, and computes the values of one answer.

    Args:
        senders: the clients whose messages are expected.
        max_weight: the largest share of all weight that one client may have. Below 1, messages wait until all have
            arrived, since a client's largest weight depends on the others.
        max_scale: the largest multiple of the median of all senders that a number may be; 0 is no limit. With a limit,
            messages wait as well.
        claims: N_k of clients that stated it before. A message with another N_k is refused.
    """

    def __init__(
        self,
        exchange: Exchange[Any],
        server: Tensors,
        digest: bytes,
        round: int,
        senders: Collection[int],
        max_weight: float = 1.0,
        claims: dict[int, int] | None = None,
        max_scale: float = 0.0,
    ) -> None:
        self.exchange, self._server, self._round = exchange, server, round
        self._intake = Intake(exchange.up, digest, round, frozenset(senders))
        self._total = exchange.server_open(server, round)
        self._max_weight, self._max_scale = max_weight, max_scale
        self.claims = {} if claims is None else claims
        decoded = sum(prod(part.shape) * np.dtype(part.dtype).itemsize for part in exchange.up.fields)
        self.capacity = max(1, min(len(senders), BUFFER_BYTES // max(1, decoded)))
        """How many messages wait at most to be added up."""
        self._arrived: list[Received] = []
        self._rows: ReceivedRows | None = None
        self._waiting: list[Messages] = []
        self.valid = 0
        """Messages that were accepted. Those of clients that are out of sync are: were they missing from the quorum,
        nobody would send them the model."""
        self.out_of_sync: list[int] = []
        """Whose messages were left out because they track another model than the server does."""
        self.limited: list[int] = []
        """Who weighs less than it claimed."""
        self.too_large: dict[int, str] = {}
        """Whose messages were left out because a number in them is far larger than the others'."""

    def take(self, data: Buffer) -> Received:
        """Check one message and store it until it is added up. Raises the WireError that says what is wrong with it."""
        if self._rows is not None or len(self._arrived) == self.capacity:
            self.add_up()
        # A message that is refused leaves its row of the buffer to the next one.
        received = self._intake.accept(data, {name: array[len(self._arrived)] for name, array in self._buffer.items()})
        claimed = self.claims.setdefault(received.sender, received.samples)
        if claimed != received.samples:
            raise DecodeError(f"samples: got {received.samples}, expected {claimed}, as before")
        self._arrived.append(received)
        self.valid += 1
        return received

    @cached_property
    def adds_on_gpu(self) -> bool:
        """Whether `take_rows` accepts frames in a GPU's memory: of floats alone, of which only means are taken."""
        kind = self.exchange.__class__
        means = issubclass(kind, FieldMeans) and kind.server_add is FieldMeans.server_add
        limited = self._max_weight < 1 or self._max_scale
        return means and kind.in_step is Exchange.in_step and self.exchange.up.only_floats and not limited

    def take_rows(self, frames: NDArray[np.uint8] | Tensor, senders: Sequence[int], samples: Sequence[int]) -> bool:
        """Take messages of one size, `[messages, bytes]`, with ascending ids, all or none: False where one is not as it
        should be, or others wait to be added up. `frames` must stay as they are until they are. Where it
        `adds_on_gpu`, also `[messages, words]` in a GPU's memory."""
        claims = zip(senders, samples, strict=True)
        if self._arrived or self._rows or any(self.claims.get(client, own) != own for client, own in claims):
            return False
        accept: Any = self._intake.accept_on_gpu if isinstance(frames, Tensor) else self._intake.accept_rows
        self._rows = accept(frames)
        if self._rows is None:
            return False
        self.claims.update(zip(senders, samples, strict=True))
        self.valid += len(senders)
        return True

    def add_up(self) -> None:
        """Add the messages that have arrived since the last call, in the order of ids."""
        if self._rows is not None:
            self._add(self._rows)
            self._rows = None
        arrived, self._arrived = self._arrived, []
        if not arrived:
            return
        order = sorted(range(len(arrived)), key=lambda index: arrived[index].sender)
        rows = slice(len(order)) if order == list(range(len(order))) else order
        values = {name: array[rows] for name, array in self._buffer.items()}
        self._add(ReceivedRows([arrived[i].sender for i in order], [arrived[i].samples for i in order], values))

    def _add(self, arrived: ReceivedRows) -> None:
        ids, samples = arrived.senders, arrived.samples
        values = {
            name: value if isinstance(value, Tensor) else torch.from_numpy(value)
            for name, value in arrived.values.items()
        }
        # In round 0 w⁰ is in every frame's digest, and there is no round before from which to send a model.
        in_step = self.exchange.in_step(self._server, values) if self._round > 0 else [True] * len(ids)
        if not all(in_step):
            self.out_of_sync += [client for client, same in zip(ids, in_step, strict=True) if not same]
            ids, samples, values = _select(ids, samples, values, in_step)
        if not ids:
            return
        if self._max_weight < 1 or self._max_scale:
            self._waiting.append((ids, samples, {name: value.clone() for name, value in values.items()}))
        else:
            self._total = self.exchange.server_add(self._total, ids, samples, values)

    @cached_property
    def _buffer(self) -> dict[str, NDArray[Any]]:
        """Memory for messages that arrive one by one. It is reused, because fresh memory costs more than the copy."""
        return self.exchange.up.empty_values(self.capacity)

    def close(self) -> tuple[Tensors, dict[str, Any]]:
        """The server's next state, and the values of its answer as arrays."""
        self.add_up()
        if self._max_scale:
            self._leave_out_too_large()
        weights = iter(limit_weights([n for _, samples, _ in self._waiting for n in samples], self._max_weight))
        for ids, samples, values in self._waiting:
            limited = [next(weights) for _ in ids]
            self.limited += [k for k, claimed, used in zip(ids, samples, limited, strict=True) if used < claimed]
            self._total = self.exchange.server_add(self._total, ids, limited, values)
        server, reply = self.exchange.server_reply(self._server, self._total, self._round)
        return server, {name: value.numpy() for name, value in zip(reply, to_host(*reply.values()), strict=True)}

    def _leave_out_too_large(self) -> None:
        """Leave out senders with a number more than `max_scale` times as large as the median of all senders."""
        ids = [client for own, _, _ in self._waiting for client in own]
        for part in self.exchange.up.fields:
            if part.dtype is np.float32 and len(ids) >= MIN_SENDERS:
                rows = [values[part.name].flatten(1) for _, _, values in self._waiting]
                for row in outliers(torch.cat(rows).numpy(), self._max_scale):
                    text = f"{part.name} is more than train.max_scale = {self._max_scale:g} times the others'"
                    self.too_large.setdefault(ids[row], text)
        if self.too_large:
            kept = (_select(*each, [client not in self.too_large for client in each[0]]) for each in self._waiting)
            self._waiting = [messages for messages in kept if messages[0]]
            if not self._waiting:
                raise QuorumError(
                    f"round {self._round + 1}: all {len(ids)} messages were left out, each with a number more than "
                    f"train.max_scale = {self._max_scale:g} times the others'; raise train.max_scale"
                )


def _select(ids: list[int], samples: list[int], values: Tensors, which: list[bool]) -> Messages:
    rows = torch.tensor(which, dtype=torch.bool)
    chosen = {name: value[rows] for name, value in values.items()}
    return list(compress(ids, which)), list(compress(samples, which)), chosen
