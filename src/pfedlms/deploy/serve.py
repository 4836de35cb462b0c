"""A whole run of a server, with metrics, checkpoints and a summary as of any run."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pfedlms.deploy.coordinator import Coordinator
from pfedlms.deploy.nodes import Transport
from pfedlms.engine import RoundReport
from pfedlms.errors import UsageError
from pfedlms.experiment.config import Config
from pfedlms.experiment.loop import Running, Stopped, execute
from pfedlms.experiment.prepare import NAMED
from pfedlms.experiment.problem import Problem
from pfedlms.experiment.store import RunDirectory


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
    with _pass_on_signal(), RunDirectory(Path(config.run.out)) as directory:
        if directory.config.is_file():
            directory.open()
        else:
            directory.create(config.to_toml())
        serving = Serving(config, coordinator, directory)
        return execute(serving, callbacks, directory.load_checkpoint(), at_once=True)[0]


@contextmanager
def _pass_on_signal() -> Iterator[None]:
    """Pass the signal that ended the run on to the handler that was installed before."""
    try:
        yield
    except Stopped as stopped:
        first = signal.Signals(stopped.signal)
        handler = signal.getsignal(first)
        if threading.current_thread() is threading.main_thread() and callable(handler):
            handler(first, None)
        raise SystemExit(128 + first) from None
