"""What clients do with the server's orders, on a cohort: stacked clients of a simulation, or a node's one client."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pfedlms.backend import to_host
from pfedlms.cohort import Cohort, Tensors
from pfedlms.data.federated import FederatedData
from pfedlms.engine.catch_up import CatchUp
from pfedlms.engine.reports import Counts
from pfedlms.engine.training import LocalWorker, Wait
from pfedlms.engine.transport import Code, Record, Split
from pfedlms.methods.contract import Method
from pfedlms.wire.fields import Message
from pfedlms.wire.frames import SERVER, Intake, Received


class Client:
    """The clients' half of a run. All functions are pure: a cohort goes in, a cohort comes out.

    Args:
        method: whose messages and objective.
        digest: of what both ends agree on.
        by: how clients that lack answers get the tracked model.
        work: local steps and measurements on the clients' data.
        data: who holds what.
    """

    def __init__(self, method: Method, digest: bytes, by: CatchUp, work: LocalWorker, data: FederatedData) -> None:
        self.method, self.digest, self.catch_up, self.work = method, digest, by, work
        self._data = data

    def message_of(self, order: Record) -> Message:
        """The message that an ANSWER or a MODEL carries."""
        return (
            self.catch_up.message_of(order.data)
            if order.code == Code.MODEL
            else self.method.exchanges[order.index].down
        )

    def read(self, order: Record) -> Received:
        """Check and decode what an ANSWER or a MODEL carries; raises the WireError that says what is wrong with it."""
        return Intake(self.message_of(order), self.digest, order.number, (SERVER,)).accept(order.data)

    def receive(self, cohort: Cohort, order: Record, received: Received) -> Cohort:
        """Clients after an ANSWER or a MODEL."""
        if order.code == Code.MODEL:
            return self.catch_up.taken_in(cohort, self.message_of(order), received)
        values = {name: torch.from_numpy(value) for name, value in received.values.items()}
        return self.method.exchanges[order.index].client_receive(cohort, values, order.number)

    def send(self, cohort: Cohort, order: Record) -> tuple[Cohort, Tensors]:
        """Clients after SEND, and the values of their messages, `[clients, …]`."""
        return self.method.exchanges[order.index].client_send(cohort, order.number, self.work)

    def launch(self, cohort: Cohort, phase: int) -> tuple[Cohort, Wait]:
        """`train` that does not wait for a GPU."""
        return self.work.local_update(self.method, cohort, phase)

    def train(self, cohort: Cohort, phase: int) -> tuple[Cohort, Tensor]:
        """Clients after the local steps of a phase, and the loss of each."""
        trained, losses = self.launch(cohort, phase)
        return trained, losses()

    def measure_personal(self, cohort: Cohort) -> dict[Split, Counts]:
        """Every client's own model, on its test split and on what it has set aside."""
        found = {Split.TEST: self._measure(cohort, cohort.params, self._data.test)}
        if self._data.validation:
            found[Split.VALIDATION] = self._measure(cohort, cohort.params, self._data.validation)
        return found

    def measure_shared(self, cohort: Cohort) -> Counts:
        """The model that all clients share before their local steps, on each one's test split; nothing if there is
        none."""
        shared = self.method.global_model(cohort)
        return {} if shared is None else self._measure(cohort, shared, self._data.test)

    def measure_start(self, cohort: Cohort) -> Counts:
        """What every client begins its local steps with, on its test split: the shared model, or its own."""
        shared = self.method.global_model(cohort)
        return self._measure(cohort, cohort.params if shared is None else shared, self._data.test)

    def _measure(self, cohort: Cohort, params: Tensor, held: Any) -> Counts:
        right, losses = to_host(*self.work.evaluate(cohort, params, held))
        sizes = [len(held[client]) * self._data.positions for client in cohort.ids]
        return dict(zip(cohort.ids, zip(right.tolist(), losses.tolist(), sizes, strict=True), strict=True))


def to_arrays(values: Tensors) -> dict[str, Any]:
    """Rows of every client as arrays."""
    return {name: value.numpy() for name, value in zip(values, to_host(*values.values()), strict=True)}
