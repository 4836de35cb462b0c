"""The server of a run on nodes. `Coordinator` has the interface of `engine.Federation`; `serve` plays a run with it and
writes metrics, checkpoints, a summary and a log, as for any run.

In one trip, the server sends one request to each participating node and receives their replies. A request has as many
orders as possible, so a round takes as many trips as its method has exchanges: the last trip of a round also asks for
the first messages of the next one.
"""

from __future__ import annotations

import signal
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pfedlms.backend import one_thread_per_operator
from pfedlms.deploy.envelope import Kind
from pfedlms.deploy.nodes import Nodes, Transport
from pfedlms.deploy.run_setup import RunSetup
from pfedlms.engine.reports import Counts, Evaluation, RoundReport, Stopwatch, personal_evaluation
from pfedlms.engine.server import START, Server, ServerState
from pfedlms.engine.transport import Event, Flag, Inbox, Split
from pfedlms.errors import QuorumError, UsageError, printable
from pfedlms.experiment.callbacks import Callback, RunInfo
from pfedlms.experiment.config import Config
from pfedlms.experiment.loop import ActiveRun, Stopped, run_rounds
from pfedlms.experiment.prepare import NAMED_PROBLEM, execution_settings
from pfedlms.experiment.problem import Problem
from pfedlms.experiment.store import RunDirectory
from pfedlms.experiment.summary import one_line_summary
from pfedlms.report.progress import evaluation_text


class Coordinator:
    """Plays rounds with clients that are nodes; configuration and problem are as `RunSetup` takes them."""

    largest_cohort = 1

    def __init__(self, config: Config, transport: Transport, problem: Problem = NAMED_PROBLEM) -> None:
        self.config = config
        setup = RunSetup(config, problem=problem)
        self.criterion, self.watch, self.run = setup.parts.criterion, Stopwatch(), setup.run
        self.data, self.model = setup.parts.data, setup.parts.model
        self._server = Server(setup.terms, config.run.quorum, self.criterion.score is None)
        self._nodes = Nodes(setup, transport)
        self._state = self._with_plan(self._server.begin())
        self.rounds_played = 0
        self.after_trip: Callable[[], None] = lambda: None
        """Called after every trip that does not end a round, to save `state`."""
        self.samples: dict[int, int] = {}
        """The last N_k that each client reported, in any round."""
        self._warned: dict[tuple[int, str], str] = {}
        """Text of the last warning, by client and kind of event."""

    @property
    def transport_bytes(self) -> dict[str, int]:
        """Bytes of all envelopes of the run, up and down."""
        down, up = self._state.carried
        return {"up": up, "down": down}

    # --- rounds

    def start(self) -> None:
        """Run phase 0, unless it is finished."""
        if self._state.stage == START:
            self.step()
            self.after_trip()

    def play_round(self) -> RoundReport:
        """Play the remaining trips of a round and return its report, which says whether nodes evaluated: that was
        decided with the trip before.

        If too few nodes reply, QuorumError is raised and nothing changes: the next call, also in a later process,
        sends the same requests, and nodes that have executed them return the same replies.
        """
        while (report := self.step()) is None:
            self.after_trip()
        return report

    def step(self) -> RoundReport | None:
        """Play one trip. Returns the report of the round if the trip ends it."""
        state = self._state
        with execution_settings(self.config), one_thread_per_operator():
            inbox = self._server.inbox(state, self._server.outbox(state))
        self._nodes.carry(inbox.requests, inbox)
        for client in {client for request in inbox.requests for client in request.clients} - inbox.failed.keys():
            self._warned.pop((client, "left_out"), None)  # it is back: the next failure is news
        self._warn(inbox.events)
        with execution_settings(self.config), one_thread_per_operator():
            after = self._server.step(state, inbox)
        self._warn(after.events)
        self.samples |= inbox.aggregation.claims if inbox.aggregation is not None else {}
        self.samples |= {client: samples for client, (samples, _) in inbox.trained.items()}
        self._state, self.rounds_played = self._with_plan(after), after.round
        return after.report

    def _with_plan(self, state: ServerState) -> ServerState:
        """The state with the plan of the next trip: what nodes measure, and whether they send messages ahead."""
        last, number = self.config.train.rounds, state.round + (state.stage != START)
        measure = number > 0 and (number % self.config.run.evaluate_every == 0 or number == last)
        return replace(state, measure=(Flag.PERSONAL | Flag.SHARED) * measure, ask_ahead=number < last)

    def _warn(self, events: Iterable[Event]) -> None:
        """Warn of each kind of event once per client until its text changes."""
        for event in events:
            if self._warned.get((event.client, event.kind)) != event.text:
                self._warned[event.client, event.kind] = event.text
                warnings.warn(str(event), stacklevel=4)

    # --- evaluation

    def evaluate(self) -> Evaluation:
        """The evaluation of the last phase, which its participants have measured."""
        return self._evaluation(self._state.measured)

    def evaluate_everyone(self) -> Evaluation:
        """The evaluation of all clients that can be reached. A client that was absent in the last phase applies the
        missed answers and takes its local steps on a copy of its state."""
        state = self._state
        absent = [client for client in range(self.data.clients) if client not in state.participants]
        inbox = Inbox((self._server.request_for_copies(state, absent),), state.round, state.trip)
        if absent:
            self._nodes.carry(inbox.requests, inbox, Kind.LOOK)
            self._warn(replace(event, round=state.round - 1) for event in inbox.events)  # there is no next round
        for split in (Split.TEST, Split.VALIDATION):
            inbox.measured.setdefault(split, {}).update(state.measured.get(split, {}))
        return self._evaluation(inbox.measured)

    def _evaluation(self, measured: Mapping[Split, Counts]) -> Evaluation:
        test, validation = measured.get(Split.TEST, {}), measured.get(Split.VALIDATION, {})
        result = personal_evaluation(test, validation, self.criterion.score is None)
        if result is None:
            raise QuorumError("evaluation: got no measurement of any node, expected one of every node that trained")
        return result

    # --- checkpoints

    def state(self) -> dict[str, Any]:
        """Everything a later process needs to resume."""
        reported = {"samples": self.samples, "counts": self._nodes.counts}
        return {"run": self.run, "standing": {**self._state.checkpoint(), **reported}}

    def load(self, state: dict[str, Any]) -> None:
        """Resume from `state()`."""
        if state["run"] != self.run:
            raise ValueError("checkpoint: it belongs to another model, method, setting, seed or initial weights")
        standing = dict(state["standing"])
        self.samples, self._nodes.counts = standing.pop("samples"), standing.pop("counts")
        self._state = self._server.restore(standing)
        self.rounds_played = self._state.round


class RunOnNodes(ActiveRun):
    """A run whose clients are nodes, with a checkpoint after every trip."""

    federation: Coordinator

    _report: RoundReport | None = None

    def start(self) -> None:
        if self._stored is not None:
            self._stored.mark_on_nodes()  # only now, because the folder of a simulation has been refused before
        self.federation.after_trip = self.checkpoint
        self.federation.start()

    def step(self, evaluate: bool) -> RoundReport:
        self._report = self.federation.play_round()
        return self._report

    def extra_fields(self, of: str) -> dict[str, Any]:
        transport = {"transport": self.federation.transport_bytes}
        if of == "summary":
            return transport
        if self._report is None:
            return {}
        left_out = {"left_out": {str(client): why for client, why in sorted(self._report.left_out.items())}}
        if of == "round":
            return left_out
        return transport | left_out | ({"weakened": list(self._report.limited)} if self._report.limited else {})


class RoundLog(Callback):
    """Logs one line per round: bytes, seconds, accuracy, and which clients were left out and why."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say, self._line, self._left_out, self._last_time = say, "", "", time.monotonic()

    def on_start(self, run: RunInfo) -> None:
        config, self._last_time = run.config, time.monotonic()
        resumed = f", resumed after round {run.round}" if run.round else ""
        self._say(f"pfedlms: {config.method} on {config.data.title}, {config.train.rounds} rounds{resumed}")

    def on_round(self, run: RunInfo, record: Mapping[str, Any]) -> None:
        traffic, now = record["bytes"], time.monotonic()
        up, down = (sum(count for name, count in traffic.items() if name.startswith(way)) for way in ("up", "down"))
        catch_up = f" + {traffic['catch_up']:,} to catch up" if traffic["catch_up"] else ""
        self._line = (
            f"round {record['round']}/{run.config.train.rounds}: {len(record['participants'])} trained, loss "
            f"{record['loss']:.4f}, {up:,} bytes up, {down:,} down{catch_up}, {now - self._last_time:.1f} s"
        )
        left_out = "; ".join(f"{client}: {printable(why)}" for client, why in record["left_out"].items())
        self._left_out = f"; left out: {left_out}" if left_out else ""
        self._last_time = now

    def on_evaluation(self, run: RunInfo, record: Mapping[str, Any]) -> None:
        self._line += f", {evaluation_text(record)}"

    def on_step(self, run: RunInfo) -> None:
        self._say(self._line + self._left_out)

    def on_end(self, run: RunInfo, summary: Mapping[str, Any]) -> None:
        self._say(f"pfedlms: {one_line_summary(summary)}")


def serve(
    config: Config, transport: Transport, callbacks: Sequence[Any] = (), problem: Problem = NAMED_PROBLEM
) -> dict[str, Any]:
    """Play all remaining rounds of the run in `run.out`, with a checkpoint after every trip; returns its summary.

    After Ctrl-C or SIGTERM, the summary has the status `interrupted`. Then the caller's signal handler is called;
    without one, SIGTERM ends the program with 143. Calling `serve` again resumes after the last trip.
    """
    if not config.run.out:
        raise UsageError("run.out: got nothing, expected the folder in which the server keeps its run")
    coordinator = Coordinator(config, transport, problem)
    try:
        with RunDirectory(Path(config.run.out)) as directory:
            if directory.config.is_file():
                directory.open()
            else:
                directory.create(config.to_toml())
            run = RunOnNodes(config, coordinator, directory)
            return run_rounds(run, callbacks, directory.load_checkpoint(), at_once=True)[0]
    except Stopped as stopped:
        handler = signal.getsignal(stopped.signal)
        if callable(handler):
            handler(stopped.signal, None)
        raise SystemExit(128 + stopped.signal) from None


def serve_with_retries(play: Callable[[], Any], attempts: int, say: Callable[[str], None]) -> None:
    """Call `play`, and again after each QuorumError, which means that too few nodes replied. The error is raised once
    `attempts` calls have failed in the same round."""
    attempts_left, failed_round = attempts, None
    while True:
        try:
            play()
            return
        except QuorumError as error:
            rounds = (error.summary or {}).get("rounds")
            attempts_left = (attempts_left if rounds == failed_round else attempts) - 1
            failed_round = rounds
            if not attempts_left:
                raise
            say(f"pfedlms: {error}; {attempts_left} more attempts")
