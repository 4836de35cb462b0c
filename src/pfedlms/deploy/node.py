"""A node: one client (a cohort of one), its state on its own disk, and a handler from request bytes to reply bytes.

A node executes all orders of a request on a copy of its state. It saves the copy together with the reply, and only
then replies. So a node that is killed at any moment has executed all of a request or nothing, and a repeated request
gets the saved reply.
"""

from __future__ import annotations

import fcntl
import hashlib
import zipfile
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch

from pfedlms.backend import one_thread_per_operator
from pfedlms.cohort import Cohort
from pfedlms.deploy.envelope import Envelope, Kind, Why, decode, measured, refusal, trained
from pfedlms.deploy.ground import Ground
from pfedlms.engine.client import Client, LocalWorker, to_arrays
from pfedlms.engine.transport import Code, Flag, Record, Split
from pfedlms.errors import DivergedError, RunDirectoryError, WireError
from pfedlms.experiment.config import Config
from pfedlms.experiment.prepare import NAMED, as_configured
from pfedlms.experiment.problem import Problem
from pfedlms.files import write_atomically
from pfedlms.wire.frames import frame

SCHEMA = 1
_TENSORS = ("params", "momentum", "buffers", "state", "scratch", "heard")


class Refused(Exception):
    """A request that is not executed."""

    def __init__(self, why: Why, text: str) -> None:
        self.why = why
        super().__init__(text)


@dataclass(frozen=True)
class State:
    """A node's state. Functions take one and return a new one."""

    cohort: Cohort
    """The client between rounds; it remains valid if a round is not finished."""
    ongoing: Cohort | None = None
    """The client in the current round."""
    round: int = 0
    """The current round."""
    step: int = 0
    """Progress in it: 2 i + 1 after the message of exchange i was made, 2 i + 2 after its answer was applied."""
    phase: int = -1
    """Of the last local steps; −1 before any."""
    sent: int = -1
    """The last round for which a message about the last steps was made."""
    answers_known: int = 0
    """The number of answers applied, if the method tracks a model."""
    trip: int = -1
    request: bytes = b""
    """Digest of the last request, and the reply to it."""
    reply: bytes = b""


class Node:
    """One client of a federation, opened from its configuration, its own data and its state directory. Only one process
    at a time can open a directory; others wait. Use it in a `with`, or `close` it.

    Args:
        config: as `Ground` takes it.
        client: its number, 0 to data.clients − 1.
        directory: the folder of its state, one file per run; created if missing.
        data: its own data, or None if the configuration's data set is partitioned; see `ground.own_data`.
        problem: model, loss and metric, where the configuration names none.
    """

    def __init__(
        self, config: Config, client: int, directory: str | Path, data: Any = None, problem: Problem = NAMED
    ) -> None:  # fmt: skip
        if not 0 <= client < config.data.clients:
            raise IndexError(f"client: got {client}, expected 0 to data.clients - 1 = {config.data.clients - 1}")
        self.config, self.client = config, client
        ground = Ground(config, client, data, problem)
        self._terms, parts = ground.terms, ground.parts
        self._method, self._data = ground.terms.method, parts.data
        self.run = ground.run
        """Digest that requests must carry."""
        with as_configured(config):
            worker = LocalWorker(
                parts.model, parts.data, config.train, config.run.seed, ground.terms.participation, 1, parts.criterion
            )
        self._client = Client(self._method, ground.terms.digest, ground.terms.catch_up, worker, parts.data)
        self.samples = parts.data.samples[client]
        folder = Path(directory)
        self.path = folder / f"client-{client}-{ground.run.hex()}.pt"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = open(self.path.with_suffix(".lock"), "wb")  # noqa: SIM115 - until closed
            fcntl.flock(self._lock, fcntl.LOCK_EX)  # another process may still be busy with the request before
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
        own = self.state.cohort
        return self._terms.model.state_dict(own.params[0], {name: value[0] for name, value in own.buffers.items()})

    # --- handling

    def handle(self, request: bytes) -> bytes:
        """Execute a request once and return the reply, which may be a refusal."""
        try:
            asked = decode(request)
        except WireError as error:
            nothing = Envelope(Kind.REQUEST, self.run, self.client, 0, 0, ())
            return refusal(nothing, Why.BROKEN, f"{type(error).__name__}: {error}", self.state.answers_known)
        try:
            digest = hashlib.sha256(request).digest()
            if (reply := self._check(asked, digest)) is not None:
                return reply
            with as_configured(self.config), one_thread_per_operator():
                after, reply = self._execute(asked)
            if asked.kind == Kind.REQUEST:
                after = replace(after, trip=asked.trip, request=digest, reply=reply)
                self._save(after)
                self.state = after
            return reply
        except Refused as error:
            return refusal(asked, error.why, str(error), self.state.answers_known)
        except DivergedError as error:
            return refusal(asked, Why.DIVERGED, str(error), self.state.answers_known)
        except Exception as error:  # of a model, a loss or a disk; the node's state has not changed
            why = Why.BROKEN if isinstance(error, WireError) else Why.FAILED
            return refusal(asked, why, f"{type(error).__name__}: {error}", self.state.answers_known)

    def _check(self, asked: Envelope, digest: bytes) -> bytes | None:
        """Refuse a request that is not for this node and this time; the saved reply if it was executed already."""
        state = self.state
        if asked.kind == Kind.REPLY:
            raise Refused(Why.BROKEN, "got a reply, expected a request")
        if asked.run != self.run:
            raise Refused(
                Why.RUN,
                f"digest: got {asked.run.hex()}, expected {self.run.hex()}; the ends differ in model, method, "
                "settings, seed, names of classes or w⁰, or the request is of another run",
            )
        if asked.client != self.client:
            raise Refused(Why.CLIENT, f"client: got a request to {asked.client}, expected {self.client}")
        if asked.kind == Kind.REQUEST and asked.trip == state.trip and digest == state.request:
            return state.reply
        if asked.trip < state.trip or (asked.kind == Kind.REQUEST and asked.trip == state.trip):
            raise Refused(
                Why.STALE,
                f"round {asked.round + 1}: got trip {asked.trip}, expected one after {state.trip}; if the run was "
                "begun anew, give it another run.seed or empty the nodes' state directories",
            )
        return None

    def _execute(self, asked: Envelope) -> tuple[State, bytes]:
        state, reports, look = self.state, list[Record](), asked.kind == Kind.LOOK
        for order in asked.records:
            if order.index and order.index >= len(self._method.exchanges):
                raise Refused(Why.BROKEN, f"exchange: got {order.index}, expected below {len(self._method.exchanges)}")
            if order.code == Code.ANSWER:
                state = self._apply_answer(state, order, look)
            elif order.code == Code.MODEL:
                state = self._adopt(state, order)
            elif order.code == Code.SEND:
                state, data = self._send(state, order)
                reports.append(replace(order, data=data))
            elif order.code == Code.TRAIN:
                state, found = self._train(state, order, look)
                reports += found
            else:
                raise Refused(Why.BROKEN, f"got a record {order.code.name}, which is no order")
        reports.append(Record(Code.ANSWERS_KNOWN, state.answers_known))
        return state, asked.reply(*reports).encode()

    def _apply_answer(self, state: State, order: Record, look: bool) -> State:
        """Apply an answer; one that was applied to a tracked model before is ignored."""
        number, tracks = order.number, self._method.tracks
        if tracks and number != state.answers_known:
            if number < state.answers_known:
                return state
            raise Refused(
                Why.ORDER, f"got the answer of round {number + 1}, expected that of round {state.answers_known + 1}"
            )
        same_round = state.ongoing is not None and state.round == number
        due = same_round and state.step == 2 * order.index + 1
        # With messages about the last steps, or a tracked model, a client needs the answer also if it sent nothing.
        if not (due or look or self._method.about_last_steps or tracks):
            raise Refused(
                Why.ORDER, f"got an answer of exchange {order.index} of round {number + 1}, to which nothing was sent"
            )
        basis = state.ongoing if same_round and (due or look) else None
        after = self._client.receive(basis or state.cohort, order, self._client.read(order))
        state = replace(state, ongoing=after, round=number, step=2 * order.index + 2)
        return replace(state, cohort=after.without_round_values(), answers_known=number + 1) if tracks else state

    def _adopt(self, state: State, order: Record) -> State:
        """Take over the tracked model."""
        if not self._method.tracks:
            raise Refused(Why.BROKEN, f"got a model, but {self._method.name} tracks none")
        if order.number < state.answers_known and not order.flags & Flag.FORCED:
            return state
        received, known = self._client.read(order), state.answers_known
        if self._client.message_of(order) is self._client.catch_up.changes and received.values["since"][0] > known:
            since = received.values["since"][0]
            raise Refused(Why.ORDER, f"changes since round {since} take {since} answers, got {known} so far")
        after = self._client.receive(state.cohort, order, received)
        return replace(state, cohort=after, ongoing=None, answers_known=order.number + 1)

    def _send(self, state: State, order: Record) -> tuple[State, bytes]:
        number, about_last = order.number, self._method.about_last_steps
        if about_last and number <= state.sent:
            raise Refused(
                Why.STALE, f"the message of round {number + 1} was made already, the last is {state.sent + 1}"
            )
        if about_last and state.phase != number:
            raise Refused(Why.ORDER, f"the message of round {number + 1} is about phase {number}, not {state.phase}")
        if self._method.tracks and state.answers_known != number:
            raise Refused(
                Why.ORDER, f"to send in round {number + 1} takes {number} answers, got {state.answers_known} so far"
            )
        basis = state.cohort
        if order.index:
            if state.ongoing is None or state.round != number or state.step != 2 * order.index:
                raise Refused(
                    Why.ORDER, f"to send in exchange {order.index} of round {number + 1} takes the answer before it"
                )
            basis = state.ongoing
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
        if phase <= state.phase:
            raise Refused(Why.STALE, f"phase {phase} is over for this node, the last one was {state.phase}")
        cohort = state.cohort
        if phase and exchanges:
            done = state.ongoing is not None and state.round == phase - 1 and state.step == 2 * exchanges
            if not done and not look:
                raise Refused(Why.ORDER, f"phase {phase} takes the answers of round {phase}")
            cohort = state.ongoing if done and state.ongoing is not None else cohort
        found = {}
        if order.flags & Flag.SHARED:
            found[Split.SHARED] = self._client.measure_shared(cohort)
        after, losses = self._client.train(cohort, phase)
        after = after.without_round_values()
        if order.flags & Flag.PERSONAL:
            found |= self._client.measure_personal(after)
        reports = [trained(phase, self.samples, losses.tolist()[0])]
        reports += [measured(split, *counts[self.client]) for split, counts in found.items() if counts]
        return replace(state, cohort=after, ongoing=None, phase=phase), reports

    # --- the disk

    def _load(self) -> State:
        if not self.path.exists():
            fresh = self._terms.new_cohort((self.client,), (self.samples,))
            return State(self._method.client_start(fresh))
        try:
            with zipfile.ZipFile(self.path) as archive:
                if damaged := archive.testzip():  # torch.load itself compares no checksums
                    raise ValueError(f"checksum of {damaged}")
            kept = torch.load(self.path, map_location=self._terms.model.device, weights_only=True)
            if kept.pop("schema") != SCHEMA:
                raise ValueError("it is of another version of pfedlms")
            cohorts: dict[str, Any] = {
                name: Cohort((self.client,), (self.samples,), **values)
                for name in ("cohort", "ongoing")
                if (values := kept.pop(name)) is not None
            }
            return State(**cohorts, answers_known=kept.pop("heard"), **kept)
        except Exception as error:  # damaged bytes can make the unpickler raise anything
            raise RunDirectoryError(
                f"{self.path}: cannot be read ({type(error).__name__}: {error}); delete it to begin anew"
            ) from error

    def _save(self, state: State) -> None:
        def tensors(cohort: Cohort | None) -> dict[str, Any] | None:
            host = None if cohort is None else cohort.to(torch.device("cpu"))
            return None if host is None else {name: getattr(host, name) for name in _TENSORS}

        values = {each.name: getattr(state, each.name) for each in fields(State)}
        values["heard"] = values.pop("answers_known")  # as earlier versions have it
        kept = {**values, "schema": SCHEMA, "cohort": tensors(state.cohort), "ongoing": tensors(state.ongoing)}
        write_atomically(self.path, lambda file: torch.save(kept, file))
