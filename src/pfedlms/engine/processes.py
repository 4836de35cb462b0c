"""A simulation in several processes, started by torchrun: each process holds the clients of a range of ids.

Rank 0 is the server. It sends calls to the other ranks, which execute them on their clients and reply. Clients' frames
go to rank 0 unread, and are added up there in the order of ids. So results have the same bits for any number of
processes. Frames are on the host, so gloo carries them also if clients are on GPUs.

    rank 0    ("carry", requests)  →  every rank
    rank r    frames, frames, …, reply  →  rank 0
"""

from __future__ import annotations

import os
import pickle
import signal
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from pfedlms.backend import one_thread_per_operator
from pfedlms.cohort import Cohort
from pfedlms.engine.federation import Federation
from pfedlms.engine.participation import PERSISTENT_FIELDS, merge_absent_states
from pfedlms.engine.reports import Counts
from pfedlms.engine.server import ServerState
from pfedlms.engine.simulate import InProcess, clients_state
from pfedlms.engine.transport import Code, Inbox, Record, Request
from pfedlms.errors import PfedlmsError, RunError, UsageError, WireError

_HOST = torch.device("cpu")
_MAX_BYTES = 1 << 26  # of frames that go to rank 0 together
_TIMEOUT = timedelta(days=1)  # ranks wait for each other's local steps; one that dies is noticed at once


def rank() -> int:
    """The number of this process; 0 is the server, and the only process of a run without torchrun."""
    return int(os.environ.get("RANK", 0)) if size() > 1 else 0


def size() -> int:
    """How many processes share this simulation."""
    return int(os.environ.get("WORLD_SIZE", 1)) if "MASTER_ADDR" in os.environ else 1


def local_rank() -> int:
    """The number of this process on its machine, and so of its GPU."""
    return int(os.environ.get("LOCAL_RANK", rank()))


def refuse_multiple_processes(what: str) -> None:
    """Raise UsageError for what only one process can do, if torchrun started several."""
    if size() > 1:
        raise UsageError(
            f"torchrun: {what} cannot be shared by {size()} processes; start it without torchrun, with --workers N"
        )


class SharedFederation(Federation):
    """A federation whose clients are distributed over processes. `Federation`'s methods are called on rank 0; the other
    ranks `serve`."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        if self.data.newcomers:
            raise UsageError("data.newcomers: several processes cannot measure them; start the run without torchrun")
        if not dist.is_initialized():
            dist.init_process_group("gloo", timeout=_TIMEOUT)
        self._own_ids = range(self.data.clients * rank() // size(), self.data.clients * (rank() + 1) // size())
        self._local = _LocalTransport(self._client, self._clients, self._transport._links, self.watch)
        self._transport = _RankTransport(self._local, self._call)  # type: ignore[assignment]

    # --- rank 0

    def _call(self, name: str, *arguments: Any, inbox: Inbox | None = None) -> list[Any]:
        """Call the method `_on_NAME` on all ranks; returns the result of each. Frames that arrive before a result go to
        the inbox. An error is raised once no rank is in the middle of a reply."""
        _send((name, arguments), range(1, size()))
        replies, errors = [], []
        try:
            replies.append(getattr(self, f"_on_{name}")(*arguments, *([] if inbox is None else [inbox])))
        except Exception as error:
            errors.append(error)
        for source in range(1, size()):
            while isinstance(reply := _receive(source), _Frames):
                try:
                    if inbox is not None and not errors:
                        reply.deliver(inbox)
                except Exception as error:
                    errors.append(error)
            replies.append(reply)
            if isinstance(reply, Exception):
                errors.append(reply)
        if errors:
            raise errors[0]
        return replies

    def _measure(self, which: str) -> tuple[Counts, Counts]:
        tested, validated = Counts(), Counts()
        state = self._state_for_copies() if which == "everyone" else None
        for of_test, of_validation in self._call("measure", which, state):
            tested |= of_test
            validated |= of_validation
        return tested, validated

    def use_folder(self, folder: Path) -> None:
        self._call("use_folder", folder.absolute())

    def _clients_state(self) -> dict[str, Any]:
        parts = self._call("state")
        present = [cohort for cohorts, _ in parts for cohort in cohorts]
        return clients_state(present, merge_absent_states([absent for _, absent in parts]))

    def _load_clients(self, state: dict[str, Any]) -> None:
        self._call("load", {name: state[name] for name in (*PERSISTENT_FIELDS, "trained", "away")})

    def _state_for_copies(self) -> ServerState:
        """The part of the server's state that copies of absent clients need."""
        server = {name: value.cpu() for name, value in self._state.before.items()}
        return replace(
            self._state, server=server, current=server, before=server, log=self._terms.catch_up.new_log(),
            answers_known={}, measured={}, report=None, events=(), left_out={},
        )  # fmt: skip

    @contextmanager
    def lead(self) -> Iterator[Callable[[Any], None]]:
        """Entered while rank 0 plays a run. It yields a function; what that is called with, `serve` returns on the
        other ranks. If it is not called, the run failed."""
        ending: list[Any] = [None]
        try:
            yield lambda value: ending.__setitem__(0, value)
        finally:
            for other in range(1, size()):
                with suppress(RunError):
                    _send(("end", ending), [other])

    # --- the other ranks

    @one_thread_per_operator()
    def serve(self) -> Any:
        """Execute what rank 0 calls until its run ends; returns the result that rank 0 passed on, see `lead`."""
        with handle_signals(signal.SIG_IGN):
            while True:
                name, arguments = _receive(0)
                if name == "end":
                    if arguments[0] is None:
                        raise RunError("rank 0: the run failed there")
                    return arguments[0]
                try:
                    reply = getattr(self, f"_on_{name}")(*arguments)
                except Exception as error:  # it is raised on rank 0
                    reply = _picklable(error)
                _send(reply, [0])

    # --- what every rank does with its own clients

    def _on_carry(self, requests: Sequence[Request], inbox: Inbox | None = None) -> Inbox | None:
        own, last = [_restrict(request, self._own_ids) for request in requests], requests[-1].orders[-1]
        if inbox is not None:
            self._local.carry(own, inbox)
            return None
        inbox = Inbox()
        if last.code == Code.SEND:
            exchange = self.method.exchanges[last.index]
            inbox.aggregation = _FrameSender(exchange, len(own[-1].clients))  # type: ignore[assignment]
        self._local.carry(own, inbox)
        return replace(inbox, aggregation=None)

    def _on_measure(self, which: str, state: ServerState | None) -> tuple[Counts, Counts]:
        if state is not None and rank():
            self._state = state
        return super()._measure(which)

    def _on_use_folder(self, folder: Path) -> None:
        super().use_folder(folder)

    def _on_state(self) -> tuple[list[Cohort], dict[str, Any]]:
        return [cohort.to(_HOST) for cohort in self._clients.present], self._clients.absent.state()

    def _on_load(self, state: dict[str, Any]) -> None:
        self._clients.load(state, self._own_ids)


class _LocalTransport(InProcess):
    """The transport to the clients of one process. If none of them trains in a phase, those present become absent."""

    def _train(self, order: Record, cohorts: list[Cohort], inbox: Inbox) -> None:
        if cohorts:
            super()._train(order, cohorts, inbox)
            return
        if self.client.method.about_last_steps:
            self._clients.put(self._in_round)
        self._clients.put([])
        self._in_round = []


class _RankTransport:
    """The transport of rank 0: it sends requests to all processes."""

    def __init__(self, local: _LocalTransport, call: Callable[..., list[Any]]) -> None:
        self.client, self._call = local.client, call

    def carry(self, requests: Sequence[Request], inbox: Inbox) -> None:
        """Carry out all requests, in order, and fill the inbox; see `engine.transport`."""
        for other in self._call("carry", tuple(requests), inbox=inbox)[1:]:
            for part in ("trained", "answers_known", "failed"):
                getattr(inbox, part).update(getattr(other, part))
            for split, counts in other.measured.items():
                inbox.measured.setdefault(split, {}).update(counts)
            for part in ("expected", "rejected", "unheard", "traffic", "next_traffic"):
                setattr(inbox, part, getattr(inbox, part) + getattr(other, part))
            inbox.events += other.events


@dataclass
class _Frames:
    """Frames of clients on their way to rank 0, in the order of ids: blocks of one size, and single frames."""

    parts: list[tuple[NDArray[np.uint8], Sequence[int], Sequence[int]] | bytes] = field(default_factory=list)

    def deliver(self, inbox: Inbox) -> None:
        """Add them to the inbox, as `InProcess` does with frames of its own process."""
        aggregation = inbox.aggregation
        assert aggregation is not None  # frames are of requests that end with SEND
        for part in self.parts:
            aggregation.add_up()
            if isinstance(part, bytes) or not aggregation.take_rows(*part):
                for data in [part] if isinstance(part, bytes) else [row.tobytes() for row in part[0]]:
                    try:
                        aggregation.take(data)
                    except WireError as error:
                        inbox.refuse(inbox.round, int.from_bytes(data[12:16], "little"), error)
        aggregation.add_up()


class _FrameSender:
    """Stands in for the server's `Aggregation` on other ranks than 0: it sends frames to rank 0 unread."""

    adds_on_gpu = False

    def __init__(self, exchange: Any, senders: int) -> None:
        self.exchange, self._frames = exchange, _Frames()
        self.capacity = max(1, min(senders, _MAX_BYTES // max(1, exchange.up.max_bytes)))

    def take(self, data: bytes | memoryview) -> None:
        self._frames.parts.append(bytes(data))

    def take_rows(self, frames: NDArray[np.uint8], senders: Sequence[int], samples: Sequence[int]) -> bool:
        self._frames.parts.append((frames.copy(), tuple(senders), tuple(samples)))
        return True

    def add_up(self) -> None:
        if self._frames.parts:
            _send(self._frames, [0])
            self._frames = _Frames()


def _restrict(request: Request, ids: range) -> Request:
    """The part of a request for the clients of one process."""
    missed = [replace(part, clients=tuple(k for k in part.clients if k in ids)) for part in request.catch_up]
    clients = tuple(client for client in request.clients if client in ids)
    return replace(request, clients=clients, catch_up=tuple(part for part in missed if part.clients))


def _send(value: Any, targets: Iterable[int]) -> None:
    for target in targets:
        with _name_rank_in_errors(target):
            dist.send_object_list([value], target)


def _receive(source: int) -> Any:
    received = [None]
    with _name_rank_in_errors(source):
        dist.recv_object_list(received, source)
    return received[0]


@contextmanager
def _name_rank_in_errors(other: int) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise RunError(
            f"rank {other} of {size()} ended in the middle of the run; torchrun prints its exit code. Resume from the "
            "latest checkpoint, with any number of processes: pfedlms resume DIR"
        ) from error


def _picklable(error: Exception) -> Exception:
    """The error, or another one if it cannot be pickled, to be raised in another process; with its traceback."""
    if not isinstance(error, PfedlmsError):
        error.add_note(f"on rank {rank()}:\n{''.join(traceback.format_exception(error))}")
    try:
        copy = pickle.loads(pickle.dumps(error))
    except Exception:
        return RunError(f"rank {rank()}: {type(error).__name__}: {error}")
    return error if isinstance(copy, Exception) else RunError(f"rank {rank()}: {error}")


@contextmanager
def handle_signals(handler: Any) -> Iterator[None]:
    """Within it `handler` receives SIGINT and SIGTERM. Only the main thread can install handlers."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)
