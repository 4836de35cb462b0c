"""The rounds of a run, one after another, to metrics, a summary and every client's model."""

from __future__ import annotations

import signal
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from pfedlms.backend import COMPILATION
from pfedlms.engine import Federation
from pfedlms.engine.shared_model import falls_apart
from pfedlms.errors import DivergedError, QuorumError, RunError, UsageError
from pfedlms.experiment.config import Config
from pfedlms.experiment.prepare import as_configured
from pfedlms.experiment.record import Recorder, told
from pfedlms.experiment.store import RunDirectory


@dataclass(frozen=True)
class Result:
    """What a run measured, and the models it trained."""

    config: Config
    summary: dict[str, Any]
    metrics: list[dict[str, Any]]
    directory: Path | None
    federation: Federation
    stopped: int = 0
    """The signal that asked it to stop (Ctrl-C is 2, SIGTERM 15), be it in the very last round; 0: none."""
    best_state: dict[str, Any] | None = None
    """The federation after the best round, where `train.patience` keeps it and there is no directory."""

    def __repr__(self) -> str:
        """`Result(pfedlms on digits, 20 clients, 100 rounds: P-acc 97.31 %, mean of the last 10)`, and where."""
        return f"Result({in_short(self.summary)}{f', in {self.directory}' if self.directory else ''})"

    @property
    def accuracy(self) -> float:
        """P-acc, mean of the last 10 evaluations, in percent."""
        return float(self.summary["accuracy"]["last10"])

    @property
    def validation_accuracy(self) -> float | None:
        """V-acc, mean of the last 10 evaluations, in percent, to choose settings by; None without
        `data.validation`."""
        reached: dict[str, float | None] = self.summary.get("validation_accuracy", {})
        return reached.get("last10")

    @property
    def classes(self) -> tuple[str, ...]:
        """What the outputs of the models stand for, in order: the names of the classes, or their numbers."""
        data = self.federation.data
        return data.names or tuple(map(str, range(data.classes)))

    @property
    def client_names(self) -> tuple[str, ...]:
        """Of all clients, in order: the keys of a dict of clients, or their numbers."""
        data = self.federation.data
        return data.client_names or tuple(map(str, range(data.clients)))

    @property
    def models(self) -> list[dict[str, torch.Tensor]]:
        """Every client's model as a state dict."""
        with as_configured(self.config):
            return [model for _, model in sorted(self.federation.models(), key=lambda pair: pair[0])]

    @property
    def best_models(self) -> list[dict[str, torch.Tensor]]:
        """Every client's model after the round with the highest V-acc, `summary["best"]`; kept with
        `train.patience`."""
        state = self.best_state
        if self.directory is not None and self.config.train.patience:
            kept = RunDirectory(self.directory).load_best()
            state = kept and kept["federation"]
        if state is None:
            raise UsageError(
                "best_models: no best round was kept; run with data.validation and train.patience (as many as there "
                "are evaluations, to keep it without stopping early)"
            )
        latest = self.federation.state()
        try:
            self.federation.load(state)
            return self.models
        finally:
            self.federation.load(latest)


def in_short(summary: Mapping[str, Any]) -> str:
    """A run in a line: what was run, how far it came and what it reached, the mean of the last 10 evaluations."""
    reached, own = summary["accuracy"]["last10"], summary.get("metric")
    score = "nothing measured" if reached is None else f"{own} {reached:.4g}" if own else f"P-acc {reached:.2f} %"
    averaged = min(10, summary.get("evaluations") or 10)
    score += f", mean of the last {averaged}" if reached is not None and averaged > 1 else ""
    ended = f" ({summary['status']})" * (summary["status"] != "finished")
    rounds, clients = (f"{summary[of]} {of[:-1]}{'s' * (summary[of] != 1)}" for of in ("rounds", "clients"))
    return f"{summary['method']} on {summary['dataset']}, {clients}, {rounds}{ended}: {score}"


class Interrupted(KeyboardInterrupt):
    """Ctrl-C in a run, comparison or sweep that was started in Python, after its checkpoint."""

    def __init__(self, text: str, result: Any) -> None:
        super().__init__(text)
        self.result = result
        """What would have been returned, as far as it came."""


def leave(signalled: int, result: Any, go_on: str) -> None:
    """What a signal asked for, now that all is kept: Ctrl-C raises `Interrupted`, SIGTERM ends the program with 143.
    `go_on` is the call that goes on; empty if there is nothing to go on with."""
    if signalled == signal.SIGINT:
        raise Interrupted(f"interrupted; go on with {go_on}" if go_on else "interrupted", result)
    if signalled:
        raise SystemExit(128 + signalled)


class Progress:
    """Told what happens in a run; the default says nothing. `Callback` is for callers, this for screens."""

    _name = ""

    def named(self, name: str) -> None:
        """What the runs to come are called in their study, where that is not their method."""
        self._name = name

    def label(self, config: Config) -> str:
        return f"{self._name or config.method} seed {config.run.seed}"

    def compiling(self) -> None: ...

    def started(self, config: Config, rounds_played: int) -> None: ...

    def played(self, config: Config, record: Mapping[str, Any]) -> None: ...

    def evaluated(self, config: Config, record: Mapping[str, Any]) -> None: ...

    def ended(self, config: Config, summary: Mapping[str, Any]) -> None: ...


def execute(
    config: Config,
    federation: Federation,
    progress: Progress,
    directory: RunDirectory | None = None,
    checkpoint: Mapping[str, Any] | None = None,
) -> Result:
    """Play all rounds that are left, measuring and saving as the configuration says."""
    recorder = Recorder(config, federation, directory)
    with as_configured(config), _stop_on_interrupt() as stopped, COMPILATION.told(progress.compiling):
        recorder.restore(checkpoint)
        progress.started(config, federation.rounds_played)
        try:
            interrupted = _play(config, federation, progress, recorder, stopped)
            summary = recorder.finish("interrupted" if interrupted else "finished")
        except BaseException as error:
            _tell_of(error, config, progress, recorder)
            raise
        progress.ended(config, summary)
        out = directory.path if directory else None
        return Result(config, summary, recorder.metrics, out, federation, stopped(), recorder.best_state)


def _play(
    config: Config, federation: Federation, progress: Progress, recorder: Recorder, stopped: Callable[[], int]
) -> bool:
    """All rounds that are left; whether they were interrupted."""
    last, interrupted, warned = config.train.rounds, False, False
    if federation.rounds_played == 0:
        federation.start()
    while federation.rounds_played < last and not (interrupted or recorder.out_of_patience):
        number = federation.rounds_played + 1
        evaluate = number % config.run.evaluate_every == 0 or number == last
        report = federation.play_round(evaluate_global=evaluate)
        recorder.count(report)
        progress.played(config, {"round": number, **told(report)})
        if evaluate:
            progress.evaluated(config, recorder.evaluate(report))
            warned = warned or _warn_of_shared_model(recorder.metrics)
        done = number == last or recorder.out_of_patience
        interrupted = stopped() > 0 and not done
        if number % config.run.checkpoint_every == 0 or done or interrupted or recorder.rose:
            recorder.checkpoint()
    return interrupted


def _warn_of_shared_model(metrics: Sequence[Mapping[str, Any]]) -> bool:
    """Warn where the shared model falls apart; whether it does."""
    if "metric" in metrics[-1] or "g_acc" not in metrics[-1]:
        return False
    found = [(each["g_acc"], each["p_acc"]) for each in metrics if None not in (each.get("g_acc"), each["p_acc"])]
    wrong = falls_apart([shared for shared, _ in found], [own for _, own in found])
    if wrong:
        warnings.warn(
            f"round {metrics[-1]['round']}: the shared model falls apart: {wrong}; lower the server's step or gain, "
            "let more clients take part, or use sketchmean where few do",
            stacklevel=2,
        )
    return wrong is not None


def _tell_of(error: BaseException, config: Config, progress: Progress, recorder: Recorder) -> None:
    """The end of a run that came to none of its own: its cause is what counts, whatever else fails."""
    if isinstance(error, RunError):
        # The disk may be full, but what was measured so far is on it; a summary is worth a try.
        summary = recorder.finish("diverged" if isinstance(error, DivergedError) else "failed")
        if isinstance(error, DivergedError | QuorumError):
            error.summary = summary
    else:
        summary = recorder.so_far("failed" if isinstance(error, Exception) else "interrupted")
    try:
        progress.ended(config, summary)
    except Exception as other:
        error.add_note(f"on_end failed, too: {type(other).__name__}: {other}")


@contextmanager
def _stop_on_interrupt() -> Iterator[Callable[[], int]]:
    """Ctrl-C and SIGTERM, which schedulers send before they kill, let the round end and be saved; a second Ctrl-C ends
    the program at once. Yields the number of the first signal that came, 0 if none did."""
    came: list[int] = []

    def handle(number: int, where: FrameType | None) -> None:
        came.append(number)
        if came.count(signal.SIGINT) > 1:
            raise KeyboardInterrupt

    def first() -> int:
        return came[0] if came else 0

    if threading.current_thread() is not threading.main_thread():
        yield first
        return
    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield first
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
