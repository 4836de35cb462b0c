"""A node: one client, its state on its own disk, and a handler from request bytes to reply bytes.

A node executes all orders of a request on a copy of its state. It saves the copy together with the reply, and only
then replies. So a node that is killed at any moment has executed all of a request or nothing, and a repeated request
gets the saved reply.
"""

from __future__ import annotations

import fcntl
import hashlib
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch

from pfedlms.backend import one_thread_per_operator
from pfedlms.cohort import Cohort
from pfedlms.deploy.envelope import Envelope, Kind, Reason, decode, measurement_record, refusal, training_record
from pfedlms.deploy.run_setup import RunSetup
from pfedlms.engine.client import Client, LocalWorker, to_arrays
from pfedlms.engine.transport import Code, Flag, Record, Split
from pfedlms.errors import DivergedError, RunDirectoryError, WireError
from pfedlms.experiment.config import Config
from pfedlms.experiment.prepare import NAMED_PROBLEM, execution_settings
from pfedlms.experiment.problem import Problem
from pfedlms.experiment.store import load_tensors
from pfedlms.files import write_atomically
from pfedlms.wire.frames import frame

SCHEMA = 2
_TENSORS = tuple(field.name for field in fields(Cohort) if field.name not in ("ids", "samples"))
"""What of a cohort is saved; the node itself knows the rest."""


class RefusalError(Exception):
    """The node does not execute a request."""

    def __init__(self, reason: Reason, text: str) -> None:
        self.reason = reason
        super().__init__(text)


def _require(condition: bool, reason: Reason, text: str) -> None:
    """Refuse the request unless the condition holds."""
    if not condition:
        raise RefusalError(reason, text)


@dataclass(frozen=True)
class State:
    """The state of a node. Functions take one and return a new one."""

    cohort: Cohort
    """The client after its last finished round."""
    ongoing: Cohort | None = None
    """The client in the current round; None between rounds."""
    round: int = 0
    """The current round."""
    step: int = 0
    """Progress in the round: 2 i + 1 after the message of exchange i was made, 2 i + 2 after its answer was applied."""
    phase: int = -1
    """Phase of the last local steps; −1 before the first."""
    sent: int = -1
    """The last round for which the node made a message, if messages are about the last local steps."""
    answers_known: int = 0
    """The number of answers applied, if the method tracks a model."""
    trip: int = -1
    """Number of the last trip."""
    request: bytes = b""
    """SHA-256 of the last request."""
    reply: bytes = b""
    """The reply to the last request."""

    def at(self, round: int, step: int) -> Cohort | None:
        """The client in this round, if that has come to this step."""
        return self.ongoing if (self.round, self.step) == (round, step) else None


class Node:
    """One client of a federation, opened from its configuration, its own data and its state directory. Use it in a
    `with` statement, or `close` it: other processes that open the same client wait until then.

    `directory` is the folder for its state, one file per run; it is created if missing. The other arguments are as
    `RunSetup` takes them.
    """

    def __init__(
        self, config: Config, client: int, directory: str | Path, data: Any = None, problem: Problem = NAMED_PROBLEM
    ) -> None:  # fmt: skip
        if not 0 <= client < config.data.clients:
            raise IndexError(f"client: got {client}, expected 0 to data.clients - 1 = {config.data.clients - 1}")
        self.config, self.client = config, client
        setup = RunSetup(config, client, data, problem)
        self._terms, self._method, parts = setup.terms, setup.terms.method, setup.parts
        self.run = setup.run
        """The digest that requests must have."""
        with execution_settings(config):
            worker = LocalWorker(
                parts.model, parts.data, config.train, config.run.seed, setup.terms.participation, 1, parts.criterion
            )
        self._client = Client(setup.terms, worker, parts.data)
        self.samples = parts.data.samples[client]
        folder = Path(directory)
        self.path = folder / f"client-{client}-{setup.run.hex()}.pt"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = open(self.path.with_suffix(".lock"), "wb")  # noqa: SIM115 - `close` closes it
            fcntl.flock(self._lock, fcntl.LOCK_EX)  # another process may still execute the request before
        except OSError as error:
            raise RunDirectoryError(f"{folder}: cannot be written ({error.strerror}); name another folder") from error
        try:
            self.state = self._load()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Node:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Unlock the state directory."""
        self._lock.close()

    def model(self) -> dict[str, torch.Tensor]:
        """The client's model as its module's `load_state_dict` takes it."""
        cohort = self.state.cohort
        buffers = {name: value[0] for name, value in cohort.buffers.items()}
        return self._terms.model.state_dict(cohort.params[0], buffers)

    # --- requests

    def handle(self, request: bytes) -> bytes:
        """Execute a request once and return the reply, which may be a refusal."""
        try:
            envelope = decode(request)
        except WireError as error:
            return self.refuse(None, Reason.BROKEN, f"{type(error).__name__}: {error}")
        try:
            digest = hashlib.sha256(request).digest()
            if (reply := self._check(envelope, digest)) is not None:
                return reply
            with execution_settings(self.config), one_thread_per_operator():
                after, reply = self._execute(envelope)
            if envelope.kind == Kind.REQUEST:
                after = replace(after, trip=envelope.trip, request=digest, reply=reply)
                self._save(after)
                self.state = after
            return reply
        except RefusalError as error:
            return self.refuse(envelope, error.reason, str(error))
        except DivergedError as error:
            return self.refuse(envelope, Reason.DIVERGED, str(error))
        except Exception as error:  # the model, the loss or the disk may raise anything; the state has not changed
            reason = Reason.BROKEN if isinstance(error, WireError) else Reason.FAILED
            return self.refuse(envelope, reason, f"{type(error).__name__}: {error}")

    def refuse(self, request: Envelope | None, reason: Reason, text: str) -> bytes:
        """The refusal of a request; None stands for one that cannot be read."""
        request = request or Envelope(Kind.REQUEST, self.run, self.client, 0, 0, ())
        return refusal(request, reason, text, self.state.answers_known)

    def _check(self, envelope: Envelope, digest: bytes) -> bytes | None:
        """Refuse a request that is not for this node or is too old. Returns the saved reply if it is a repeated one."""
        state = self.state
        _require(envelope.kind != Kind.REPLY, Reason.BROKEN, "got a reply, expected a request")
        got, why = f"digest: got {envelope.run.hex()}", "model, method, settings, seed, classes or w⁰ differ"
        _require(envelope.run == self.run, Reason.RUN, f"{got}, expected {self.run.hex()}; {why}")
        to = envelope.client
        _require(to == self.client, Reason.CLIENT, f"client: got a request to {to}, expected {self.client}")
        same_trip = envelope.kind == Kind.REQUEST and envelope.trip == state.trip
        if same_trip and digest == state.request:
            return state.reply
        expected = f"expected one after {state.trip}; a run that is begun anew needs another run.seed"
        stale = f"round {envelope.round + 1}: got trip {envelope.trip}, {expected}"
        _require(not same_trip and envelope.trip >= state.trip, Reason.STALE, stale)
        return None

    def _execute(self, envelope: Envelope) -> tuple[State, bytes]:
        state, records, look = self.state, list[Record](), envelope.kind == Kind.LOOK
        exchanges = len(self._method.exchanges)
        for order in envelope.records:
            known = not order.index or order.index < exchanges
            _require(known, Reason.BROKEN, f"exchange: got {order.index}, expected below {exchanges}")
            if order.code == Code.ANSWER:
                state = self._apply_answer(state, order, look)
            elif order.code == Code.MODEL:
                state = self._adopt(state, order)
            elif order.code == Code.SEND:
                state, data = self._send(state, order)
                records.append(replace(order, data=data))
            elif order.code == Code.TRAIN:
                state, reports = self._train(state, order, look)
                records += reports
            else:
                raise RefusalError(Reason.BROKEN, f"got a record {order.code.name}, which is no order")
        records.append(Record(Code.ANSWERS_KNOWN, state.answers_known))
        return state, envelope.reply(*records).encode()

    def _apply_answer(self, state: State, order: Record, look: bool) -> State:
        """Apply an answer. An answer that the tracked model already has is ignored."""
        number, tracks, known = order.number, self._method.tracks, state.answers_known
        if tracks and number < known:
            return state
        expected = f"got the answer of round {number + 1}, expected that of round {known + 1}"
        _require(not tracks or number == known, Reason.ORDER, expected)
        basis = state.at(number, 2 * order.index + 1)
        # With a tracked model, or messages about the last local steps, a client needs the answer even if it sent none.
        needed = basis is not None or look or self._method.about_last_steps or tracks
        _require(needed, Reason.ORDER, f"got an answer of round {number + 1} to which nothing was sent")
        if look and state.round == number:
            basis = state.ongoing
        after = self._client.receive(basis or state.cohort, order, self._client.read(order))
        state = replace(state, ongoing=after, round=number, step=2 * order.index + 2)
        return replace(state, cohort=after.without_round_values(), answers_known=number + 1) if tracks else state

    def _adopt(self, state: State, order: Record) -> State:
        """Replace the tracked model, or update it by the changes, as the server sends them."""
        known = state.answers_known
        _require(self._method.tracks, Reason.BROKEN, f"got a model, but {self._method.name} tracks none")
        if order.number < known and not order.flags & Flag.FORCED:
            return state
        received = self._client.read(order)
        if self._client.message_of(order) is self._client.catch_up.changes:
            since = received.values["since"][0]
            _require(since <= known, Reason.ORDER, f"changes since round {since} take as many answers, got {known}")
        after = self._client.receive(state.cohort, order, received)
        return replace(state, cohort=after, ongoing=None, answers_known=order.number + 1)

    def _send(self, state: State, order: Record) -> tuple[State, bytes]:
        number, about_last, known = order.number, self._method.about_last_steps, state.answers_known
        message = f"the message of round {number + 1}"
        if about_last:
            _require(number > state.sent, Reason.STALE, f"{message} was made already, the last is {state.sent + 1}")
            _require(state.phase == number, Reason.ORDER, f"{message} is about phase {number}, not {state.phase}")
        tracked = not self._method.tracks or known == number
        _require(tracked, Reason.ORDER, f"{message} takes {number} answers, got {known} so far")
        basis = state.at(number, 2 * order.index) if order.index else state.cohort
        if basis is None:
            raise RefusalError(Reason.ORDER, f"{message} of exchange {order.index} takes the answer before it")
        after, values = self._client.send(basis, order)
        data = frame(
            self._method.exchanges[order.index].up, {name: array[0] for name, array in to_arrays(values).items()},
            round=number, sender=self.client, samples=self.samples, digest=self._terms.digest,
        )  # fmt: skip
        state = replace(state, ongoing=after, round=number, step=2 * order.index + 1)
        if about_last:
            state = replace(state, cohort=after.without_round_values(), sent=number)
        return state, bytes(data)

    def _train(self, state: State, order: Record, look: bool) -> tuple[State, list[Record]]:
        phase, exchanges = order.number, len(self._method.exchanges)
        _require(phase > state.phase, Reason.STALE, f"phase {phase} is over, the last one was {state.phase}")
        done = state.at(phase - 1, 2 * exchanges)
        ready = done is not None or look or not (phase and exchanges)
        _require(ready, Reason.ORDER, f"phase {phase} takes the answers of round {phase}")
        cohort = done or state.cohort
        measured = {}
        if order.flags & Flag.SHARED:
            measured[Split.SHARED] = self._client.measure_shared(cohort)
        after, losses = self._client.train(cohort, phase)
        after = after.without_round_values()
        if order.flags & Flag.PERSONAL:
            measured |= self._client.measure_personal(after)
        reports = [training_record(phase, self.samples, losses.tolist()[0])]
        reports += [measurement_record(split, *counts[self.client]) for split, counts in measured.items() if counts]
        return replace(state, cohort=after, ongoing=None, phase=phase), reports

    # --- the state on disk

    def _load(self) -> State:
        if not self.path.exists():
            return State(self._terms.start((self.client,), (self.samples,)))
        try:
            values = load_tensors(self.path, self._terms.model.device)
            if (schema := values.pop("schema")) != SCHEMA:
                raise ValueError(f"it has schema {schema}, expected {SCHEMA}: another version of pfedlms wrote it")
            for name in ("cohort", "ongoing"):
                if values[name] is not None:
                    values[name] = Cohort((self.client,), (self.samples,), **values[name])
            return State(**values)
        except Exception as error:  # damaged bytes can make the unpickler raise anything
            raise RunDirectoryError(
                f"{self.path}: cannot be read ({type(error).__name__}: {error}); delete it to begin anew"
            ) from error

    def _save(self, state: State) -> None:
        values = {field.name: getattr(state, field.name) for field in fields(State)}
        for name in ("cohort", "ongoing"):
            if values[name] is not None:
                host = values[name].to(torch.device("cpu"))
                values[name] = {field: getattr(host, field) for field in _TENSORS}
        write_atomically(self.path, lambda file: torch.save({**values, "schema": SCHEMA}, file))
