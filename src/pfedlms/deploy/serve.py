"""A whole run of a server, with metrics, checkpoints and a summary as of any run."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pfedlms.deploy.coordinator import Coordinator, Transport
from pfedlms.engine import RoundReport
from pfedlms.errors import UsageError
from pfedlms.experiment.config import Config
from pfedlms.experiment.loop import Running, Stopped, execute
from pfedlms.experiment.prepare import NAMED
from pfedlms.experiment.problem import Problem
from pfedlms.experiment.store import RunDirectory


class Serving(Running):
    """A run whose clients are nodes: a step is a trip to them."""

    played: Coordinator

    def __init__(self, config: Config, played: Coordinator, directory: RunDirectory) -> None:
        super().__init__(config, played, directory)
        self._folder = directory

    def start(self) -> None:
        self._folder.mark_on_nodes()  # only now: the folder of a simulation is refused, and stays one

    def step(self, evaluate: bool) -> RoundReport | None:
        return self.played.step()

    def was_measured(self, due: bool) -> bool:
        return bool(self.played.standing.tested)

    def evaluate(self, report: RoundReport) -> dict[str, Any]:
        record = super().evaluate(report)
        self.played.told()
        return record

    def more(self, of: str) -> dict[str, Any]:
        standing = self.played.standing
        down, up = standing.carried
        carried = {"transport": {"up": up, "down": down}}
        out = {"left_out": {str(client): why for client, why in sorted(standing.left_out.items())}}
        weakened = {"weakened": list(standing.weakened)} if standing.weakened else {}
        found: dict[str, dict[str, Any]] = {
            "round": {**out}, "evaluation": {**carried, **out, **weakened}, "summary": {**carried}
        }  # fmt: skip
        return found[of]


def serve(
    config: Config, transport: Transport, callbacks: Sequence[Any] = (), problem: Problem = NAMED
) -> dict[str, Any]:
    """Play all rounds that are left of the run in `run.out`, with a checkpoint after every trip; its summary.

    Ctrl-C and SIGTERM write a summary that says `interrupted`, and then do what they did before: whoever handles them
    is called, and if nobody does, SIGTERM ends the program with 143. Calling `serve` again resumes after the last trip.
    """
    if not config.run.out:
        raise UsageError("run.out: got nothing, expected the folder in which the server keeps its run")
    coordinator = Coordinator(config, transport, problem)
    with _passed_on(), RunDirectory(Path(config.run.out)) as directory:
        if directory.config.is_file():
            directory.open()
        else:
            directory.create(config.to_toml())
        serving = Serving(config, coordinator, directory)
        return execute(serving, callbacks, directory.load_checkpoint(), at_once=True)[0]


@contextmanager
def _passed_on() -> Iterator[None]:
    """The signal that ended the run is passed on to whoever handled it before."""
    try:
        yield
    except Stopped as stopped:
        first = signal.Signals(stopped.signal)
        handler = signal.getsignal(first)
        if threading.current_thread() is threading.main_thread() and callable(handler):
            handler(first, None)
        raise SystemExit(128 + first) from None
