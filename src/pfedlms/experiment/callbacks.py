"""Callbacks of a run: progress on a screen, tracking and the user's own."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from pfedlms.engine.reports import shared_model_problem
from pfedlms.errors import UsageError
from pfedlms.experiment.config import Config

CALLBACK_METHODS = ("on_round", "on_evaluation", "on_end", "on_start", "on_step", "on_compile")


class RunInfo:
    """The run that a callback is called for."""

    def __init__(self, label: str, config: Config, directory: Path | None) -> None:
        self.name = f"{label or config.method} seed {config.run.seed}"
        """Method and seed; in a study the name of the row with the seed."""
        self.config = config
        """`config.tables()` has every setting."""
        self.directory = directory
        self.metrics: list[dict[str, Any]] = []
        """The evaluations so far."""
        self.stopping = False

    @property
    def round(self) -> int:
        """How many rounds the run has had."""
        return int(self.metrics[-1]["round"]) if self.metrics else 0

    def stop(self) -> None:
        """End the run after this round, as if it were its last."""
        self.stopping = True

    def checkpoint(self) -> None:
        """Save the state now, where the run has a directory."""


class Callback:
    """Override what you need. Any object that has one of these methods will do.

    What a callback raises ends the run, which can be resumed from its latest checkpoint. `on_end` is called once for
    every run that began, also after that.
    """

    def on_start(self, run: RunInfo) -> None:
        """Before the first round, or the first after a resume: the run has had `run.round` rounds before."""

    def on_round(self, run: RunInfo, record: Mapping[str, Any]) -> None:
        """After every round: `round`, `participants` (ids), `loss` of their local steps, `bytes` of this round,
        `rejected`, `unheard`."""

    def on_evaluation(self, run: RunInfo, record: Mapping[str, Any]) -> None:
        """After every evaluation: the line of metrics.jsonl. `run.stop()` makes this round the last."""

    def on_step(self, run: RunInfo) -> None:
        """After every round and its evaluation; where clients are nodes, after every trip to them."""

    def on_compile(self, run: RunInfo) -> None:
        """Before kernels are compiled, which takes a while."""

    def on_end(self, run: RunInfo, summary: Mapping[str, Any]) -> None:
        """At the end, also of a run that was interrupted or failed, or that a callback ended: what summary.json has,
        or would have; see its `status`."""


class SharedModelWarning(Callback):
    """Warns once if the shared model falls apart; the clients' own models, after local steps, may hide it."""

    _warned = False

    def on_evaluation(self, run: RunInfo, record: Mapping[str, Any]) -> None:
        if self._warned or "metric" in record or record.get("g_acc") is None:
            return
        pairs = [(line.get("g_acc"), line["p_acc"]) for line in run.metrics]
        measured = [(shared, personal) for shared, personal in pairs if shared is not None and personal is not None]
        symptom = shared_model_problem([shared for shared, _ in measured], [personal for _, personal in measured])
        if symptom:
            self._warned = True
            sketchmean = run.config.method == "sketchmean"
            remedy = "raise method.answer and method.ratio" if sketchmean else "use sketchmean where few do"
            warnings.warn(
                f"round {record['round']}: the shared model falls apart: {symptom}; lower the server's step or gain, "
                f"let more clients take part, or {remedy}",
                stacklevel=2,
            )


class Callbacks:
    """Calls a method of several callbacks, in their order."""

    def __init__(self, callbacks: Sequence[Any]) -> None:
        self._callbacks = callbacks

    def __call__(self, name: str, *arguments: Any) -> None:
        for callback in self._callbacks:
            self._call(callback, name, *arguments)

    def end(self, run: RunInfo, summary: Mapping[str, Any]) -> None:
        """Call `on_end` of all, even if one of them raises."""
        with ExitStack() as rest:
            for callback in reversed(self._callbacks):
                rest.callback(self._call, callback, "on_end", run, summary)

    @staticmethod
    def _call(callback: Any, name: str, *arguments: Any) -> None:
        method = getattr(callback, name, None)
        if method is not None:  # it may change its record, which the run still needs
            method(*(copy.deepcopy(value) if isinstance(value, Mapping) else value for value in arguments))


@contextmanager
def callbacks_with_progress(progress: bool | None, callbacks: Iterable[Any] | None) -> Iterator[list[Any]]:
    """The user's callbacks, checked, after those that show progress: None shows it on a terminal and in a notebook,
    True always, False never."""
    from pfedlms.report.progress import progress_callbacks

    expected = "expected a list of objects with on_round, on_evaluation or on_end (see pfedlms.Callback)"
    own_callbacks = list(callbacks or ())
    for callback in own_callbacks:
        if isinstance(callback, type) or not any(callable(getattr(callback, name, None)) for name in CALLBACK_METHODS):
            raise UsageError(f"callbacks: got {callback!r}, {expected}")
    with progress_callbacks(progress) as showing:
        yield [*showing, *own_callbacks]
