"""The rounds of one run, played until the last one or Ctrl-C."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any

from pfedlms.engine import Federation
from pfedlms.errors import DivergedError, RunError
from pfedlms.experiment.config import Config
from pfedlms.experiment.prepare import as_configured
from pfedlms.experiment.record import Recorder
from pfedlms.experiment.store import RunDirectory


class Progress:
    """Told what happens in a run; the default says nothing."""

    def started(self, config: Config, rounds_played: int) -> None: ...

    def evaluated(self, config: Config, record: Mapping[str, Any]) -> None: ...


def execute(
    config: Config,
    federation: Federation,
    progress: Progress,
    directory: RunDirectory | None = None,
    checkpoint: Mapping[str, Any] | None = None,
) -> tuple[dict[str, Any], list[dict[str, Any]], bool]:
    """Play all rounds that are left, measuring and saving as the configuration says; the summary, the metrics, and
    whether Ctrl-C was pressed."""
    recorder = Recorder(config, federation, directory)
    try:
        with as_configured(config), _stop_on_interrupt() as stopped:
            recorder.restore(checkpoint)
            progress.started(config, federation.rounds_played)
            status = _play(config, federation, recorder, progress, stopped)
            return recorder.finish(status), recorder.metrics, stopped()
    except DivergedError as error:
        error.summary = recorder.finish("diverged")
        raise
    except RunError:
        # The disk may be full, but what was measured so far is on it; a summary is worth a try, the cause is what
        # counts.
        recorder.finish("failed", quietly=True)
        raise


def _play(
    config: Config, federation: Federation, recorder: Recorder, progress: Progress, stopped: Callable[[], bool]
) -> str:
    last = config.train.rounds
    if federation.rounds_played == 0:
        federation.start()
    while federation.rounds_played < last:
        number = federation.rounds_played + 1
        evaluate = number % config.run.evaluate_every == 0 or number == last
        report = federation.play_round(evaluate_global=evaluate)
        recorder.count(report)
        if evaluate:
            progress.evaluated(config, recorder.evaluate(report))
        interrupted = stopped() and number < last
        if number % config.run.checkpoint_every == 0 or number == last or interrupted:
            recorder.checkpoint()
        if interrupted:
            return "interrupted"
    return "finished"


@contextmanager
def _stop_on_interrupt() -> Iterator[Callable[[], bool]]:
    """Ctrl-C lets the round end and be saved; a second one ends the program at once."""
    pressed = threading.Event()

    def handle(number: int, where: FrameType | None) -> None:
        if pressed.is_set():
            raise KeyboardInterrupt
        pressed.set()

    if threading.current_thread() is not threading.main_thread():
        yield pressed.is_set
        return
    before = signal.signal(signal.SIGINT, handle)
    try:
        yield pressed.is_set
    finally:
        signal.signal(signal.SIGINT, before)
