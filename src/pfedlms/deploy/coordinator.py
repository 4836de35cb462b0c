"""The server of a run on nodes: a federation with the interface of `engine.Federation`, trip by trip, and a whole run
with metrics, checkpoints, a summary as of any run, and a log.

A trip is one request to each of some nodes, with their replies. A request has as many orders as possible, so a round
takes as many trips as its method has exchanges: the last trip of a round also asks for the next round's first messages.
"""

from __future__ import annotations

import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pfedlms.backend import one_thread_per_operator
from pfedlms.deploy.envelope import Kind
from pfedlms.deploy.ground import Ground
from pfedlms.deploy.nodes import Nodes, Transport
from pfedlms.engine.reports import Counts, Evaluation, RoundReport, Stopwatch, personal_evaluation
from pfedlms.engine.server import START, Server, ServerState
from pfedlms.engine.transport import Event, Flag, Inbox, Split
from pfedlms.errors import QuorumError, UsageError, printable
from pfedlms.experiment.callbacks import Callback, RunInfo
from pfedlms.experiment.config import Config
from pfedlms.experiment.loop import Running, Stopped, execute
from pfedlms.experiment.prepare import NAMED, as_configured
from pfedlms.experiment.problem import Problem
from pfedlms.experiment.store import RunDirectory
from pfedlms.experiment.summary import in_short
from pfedlms.report.progress import accuracies


class Coordinator:
    """The server's end of a run on nodes.

    Args:
        config: as `Ground` takes it.
        transport: delivers requests to nodes.
        problem: model, loss and metric, where the configuration names none.
    """

    largest_cohort = 1

    def __init__(self, config: Config, transport: Transport, problem: Problem = NAMED) -> None:
        self.config = config
        ground = Ground(config, problem=problem)
        self.criterion, self.watch, self.run = ground.parts.criterion, Stopwatch(), ground.run
        self.data, self.model = ground.parts.data, ground.parts.model
        self._server = Server(ground.terms, config.run.quorum, self.criterion.score is None)
        self._nodes = Nodes(ground, transport)
        self._state = self._with_plan(self._server.begin())
        self.rounds_played = 0
        self.after_trip: Callable[[], None] = lambda: None
        """Called after every trip that does not end a round, to save `state` then, too."""
        self.samples: dict[int, int] = {}
        """The last N_k that each client sent, in any round."""
        self._warned: dict[int, str] = {}
        self._weight_limited: set[int] = set()

    @property
    def carried(self) -> dict[str, int]:
        """Bytes of all envelopes of the run."""
        down, up = self._state.carried
        return {"up": up, "down": down}

    # --- rounds

    def start(self) -> None:
        """Run phase 0, unless it is finished."""
        if self._state.stage == START:
            self.step()
            self.after_trip()

    def play_round(self, evaluate_global: bool = False) -> RoundReport:
        """The remaining trips of a round. The trip before decides what is measured, so that a repeated trip is the
        same; `RoundReport.evaluated` has the decision. If too few nodes reply, QuorumError is raised and nothing has
        changed: the next call, also of a later process, sends the same requests again, and nodes that have executed
        them return the same replies."""
        while (report := self.step()) is None:
            self.after_trip()
        return report

    def step(self) -> RoundReport | None:
        """One trip; at the end of a round, its report."""
        state = self._state
        with as_configured(self.config), one_thread_per_operator():
            inbox = self._server.inbox(state, self._server.outbox(state))
        self._nodes.carry(inbox.requests, inbox)
        for client in {client for request in inbox.requests for client in request.clients}.difference(inbox.failed):
            self._warned.pop(client, None)
        self._warn(inbox.events)
        with as_configured(self.config), one_thread_per_operator():
            after = self._server.step(state, inbox)
        self._warn(after.events)
        self.samples |= inbox.aggregation.claims if inbox.aggregation is not None else {}
        self.samples |= {client: samples for client, (samples, _) in inbox.trained.items()}
        self._state, self.rounds_played = self._with_plan(after), after.round
        return after.report

    def _with_plan(self, state: ServerState) -> ServerState:
        """The state with the plan of the next trip: what to measure, and whether to ask for messages ahead."""
        last, ends = self.config.train.rounds, state.round + (state.stage != START)
        measure = ends > 0 and (ends % self.config.run.evaluate_every == 0 or ends == last)
        return replace(state, measure=(Flag.PERSONAL | Flag.SHARED) * measure, ask_ahead=ends < last)

    def _warn(self, events: Iterable[Event]) -> None:
        """Warn once per client until its event changes."""
        for event in events:
            if event.kind == "weight_limited":
                if event.client in self._weight_limited:
                    continue
                self._weight_limited.add(event.client)
            elif self._warned.get(event.client) == event.text:
                continue
            else:
                self._warned[event.client] = event.text
            warnings.warn(str(event), stacklevel=4)

    # --- what was measured

    def evaluate(self) -> Evaluation:
        """The models of the participants of the last phase, as they measured them."""
        return self._evaluation(self._state.measured)

    def evaluate_everyone(self) -> Evaluation:
        """The models of all clients that can be reached. A client that was absent in the last phase receives its
        answers and takes its local steps on a copy."""
        state = self._state
        absent = [client for client in range(self.data.clients) if client not in state.participants]
        inbox = Inbox((self._server.request_for_copies(state, absent),), state.round, state.trip)
        if absent:
            self._nodes.carry(inbox.requests, inbox, Kind.LOOK)
        for split in (Split.TEST, Split.VALIDATION):
            inbox.measured.setdefault(split, {}).update(state.measured.get(split, {}))
        return self._evaluation(inbox.measured)

    def _evaluation(self, measured: Mapping[Split, Counts]) -> Evaluation:
        splits = measured.get(Split.TEST, {}), measured.get(Split.VALIDATION, {})
        found = personal_evaluation(*splits, self.criterion.score is None)
        if found is None:
            raise QuorumError("evaluation: got no measurement of any node, expected one of every node that trained")
        return found

    # --- checkpoints

    def state(self) -> dict[str, Any]:
        """Everything a later process needs to resume."""
        known = {"samples": self.samples, "counts": self._nodes.counts}
        return {"run": self.run, "standing": {**self._state.checkpoint(), **known}}

    def load(self, state: dict[str, Any]) -> None:
        """Resume from `state()`."""
        if state["run"] != self.run:
            raise ValueError("checkpoint: it belongs to another model, method, setting, seed or initial weights")
        kept = dict(state["standing"])
        if "inbox" in kept:
            raise ValueError(
                "checkpoint: it was made by an earlier version of pfedlms; finish this run with that version, or start "
                "a new one in another folder with another run.seed"
            )
        self.samples, self._nodes.counts = kept.pop("samples"), kept.pop("counts")
        self._state = self._server.restore(kept)
        self.rounds_played = self._state.round


class Serving(Running):
    """A run whose clients are nodes: a round is some trips to them, with a checkpoint after each."""

    played: Coordinator

    def __init__(self, config: Config, played: Coordinator, directory: RunDirectory) -> None:
        super().__init__(config, played, directory)
        self._folder = directory
        self._report: RoundReport | None = None
        played.after_trip = self.checkpoint

    def start(self) -> None:
        self._folder.mark_on_nodes()  # after the check that refuses the folder of a simulation
        self.played.start()

    def step(self, evaluate: bool) -> RoundReport:
        self._report = self.played.play_round()
        return self._report

    def more(self, of: str) -> dict[str, Any]:
        carried = {"transport": self.played.carried}
        report = self._report
        if of == "summary" or report is None:
            return carried if of == "summary" else {}
        out = {"left_out": {str(client): why for client, why in sorted(report.left_out.items())}}
        weakened = {"weakened": list(report.limited)} if report.limited else {}
        return out if of == "round" else {**carried, **out, **weakened}


class RoundLog(Callback):
    """One line per round: bytes, seconds, accuracy, and who was left out and why. What is measured of a round comes
    after the round, so a line waits for it."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say, self._line, self._out, self._before = say, "", "", time.monotonic()

    def on_start(self, run: RunInfo) -> None:
        config, self._before = run.config, time.monotonic()
        begun = f", resumed after round {run.round}" if run.round else ""
        self._say(f"pfedlms: {config.method} on {config.data.title}, {config.train.rounds} rounds{begun}")

    def on_round(self, run: RunInfo, record: Mapping[str, Any]) -> None:
        self._flush()
        sent, now = record["bytes"], time.monotonic()
        up, down = (sum(count for name, count in sent.items() if name.startswith(way)) for way in ("up", "down"))
        again = f" + {sent['catch_up']:,} to catch up" if sent["catch_up"] else ""
        self._line = (
            f"round {record['round']}/{run.config.train.rounds}: {len(record['participants'])} trained, loss "
            f"{record['loss']:.4f}, {up:,} bytes up, {down:,} down{again}, {now - self._before:.1f} s"
        )
        self._out, self._before = (
            "; ".join(f"{each}: {printable(why)}" for each, why in record["left_out"].items()),
            now,
        )

    def on_evaluation(self, run: RunInfo, record: Mapping[str, Any]) -> None:
        self._line += f", {accuracies(record)}"
        self._flush()

    def on_end(self, run: RunInfo, summary: Mapping[str, Any]) -> None:
        self._flush()
        self._say(f"pfedlms: {in_short(summary)}")

    def _flush(self) -> None:
        if self._line:
            self._say(self._line + (f"; left out: {self._out}" if self._out else ""))
        self._line = ""


def serve(
    config: Config, transport: Transport, callbacks: Sequence[Any] = (), problem: Problem = NAMED
) -> dict[str, Any]:
    """Run all remaining rounds of the run in `run.out`, with a checkpoint after every trip; returns its summary.

    Ctrl-C and SIGTERM write a summary with the status `interrupted`. Then the caller's signal handler is called;
    without one SIGTERM ends the program with 143. Calling `serve` again resumes after the last trip.
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
            serving = Serving(config, coordinator, directory)
            return execute(serving, callbacks, directory.load_checkpoint(), at_once=True)[0]
    except Stopped as stopped:
        handler = signal.getsignal(stopped.signal)
        if threading.current_thread() is threading.main_thread() and callable(handler):
            handler(stopped.signal, None)
        raise SystemExit(128 + stopped.signal) from None


def persist(serve: Callable[[], Any], attempts: int, say: Callable[[str], None]) -> None:
    """Call `serve` again after a round in which too few nodes answered; QuorumError if the same round fails so many
    times."""
    left, stuck = attempts, None
    while True:
        try:
            serve()
            return
        except QuorumError as error:
            played = (error.summary or {}).get("rounds")
            left, stuck = (left if played == stuck else attempts) - 1, played
            if not left:
                raise
            say(f"pfedlms: {error}; {left} more attempts")
