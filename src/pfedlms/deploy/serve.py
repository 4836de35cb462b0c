"""A whole run of a server, with metrics, checkpoints and a summary as of any run."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from pfedlms.deploy.coordinator import Coordinator
from pfedlms.deploy.nodes import Transport
from pfedlms.errors import RunError, UsageError
from pfedlms.experiment.config import Config
from pfedlms.experiment.play import Progress
from pfedlms.experiment.prepare import NOTHING_OWN, ModelLike, Own
from pfedlms.experiment.record import Recorder, told
from pfedlms.experiment.store import RunDirectory

SILENT = Progress()


class Stopped(BaseException):
    """A signal asked this process to end, be it in the middle of a trip."""


def serve(
    config: Config,
    transport: Transport,
    progress: Progress = SILENT,
    model: ModelLike = None,
    own: Own = NOTHING_OWN,
) -> dict[str, Any]:
    """Play all rounds that are left of the run in `run.out`, with a checkpoint after every trip; its summary.

    Ctrl-C and SIGTERM write a summary that says `interrupted`, and then do what they did before: whoever handles them
    is called, and if nobody does, SIGTERM ends the program with 143. Calling `serve` again goes on from the last trip.
    """
    if not config.run.out:
        raise UsageError("run.out: got nothing, expected the folder in which the server keeps its run")
    coordinator = Coordinator(config, transport, model, own)
    with _stoppable(), RunDirectory(Path(config.run.out)) as directory:
        if directory.config.is_file():
            directory.open()
        else:
            directory.create(config.to_toml())
        recorder = Recorder(config, coordinator, directory)
        try:
            recorder.restore(directory.load_checkpoint())
            directory.mark_on_nodes()  # only now: the folder of a simulation is refused, and stays one
            progress.started(config, coordinator.rounds_played)
            _play(config, coordinator, recorder, progress)
            summary = recorder.finish("finished", {"transport": coordinator.carried})
        except RunError as error:
            error.summary = recorder.finish("failed", {"transport": coordinator.carried})
            progress.ended(config, error.summary)
            raise
        except Stopped:
            progress.ended(config, recorder.finish("interrupted", {"transport": coordinator.carried}))
            raise
        progress.ended(config, summary)
        return summary


@contextmanager
def _stoppable() -> Iterator[None]:
    """Signals raise `Stopped` where the run is, once, however many come: a trip may take long, and one that is not done
    is made again. Then they are passed on."""
    came: list[int] = []

    def handle(number: int, where: FrameType | None) -> None:
        came.append(number)
        if len(came) == 1:
            raise Stopped

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    except Stopped:
        pass
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if came:
        first = signal.Signals(came[0])
        if callable(handler := before[first]):
            handler(first, None)
        raise SystemExit(128 + first)


def _play(config: Config, coordinator: Coordinator, recorder: Recorder, progress: Progress) -> None:
    coordinator.after_trip = recorder.checkpoint
    coordinator.start()
    while coordinator.rounds_played < config.train.rounds and not recorder.out_of_patience:
        report = coordinator.play_round()
        recorder.count(report)
        left_out = {str(client): why for client, why in sorted(report.left_out.items())}
        progress.played(config, {"round": coordinator.rounds_played, **told(report), "left_out": left_out})
        if report.evaluated:
            weakened = {"weakened": list(report.limited)} if report.limited else {}
            more = {"transport": coordinator.carried, "left_out": left_out, **weakened}
            progress.evaluated(config, recorder.evaluate(report, more))
        recorder.checkpoint()
