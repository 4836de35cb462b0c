"""Callbacks of a run: progress on a screen, early stopping, checkpoints, tracking and the user's own."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from pfedlms.engine.reports import shared_model_problem
from pfedlms.errors import UsageError
from pfedlms.experiment.config import Config
from pfedlms.experiment.summary import best_of, out_of_patience

CALLS = ("on_round", "on_evaluation", "on_end", "on_start", "on_step", "on_compile")


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
        """Rounds that were played."""
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
        """Before the first round, or the first after a resume: `run.round` rounds were played before."""

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
    """Warns once if the shared model falls apart, although the clients' own models, after local steps, are fine."""

    _warned = False

    def on_evaluation(self, run: RunInfo, record: Mapping[str, Any]) -> None:
        if self._warned or "metric" in record or record.get("g_acc") is None:
            return
        pairs = [(each.get("g_acc"), each["p_acc"]) for each in run.metrics]
        known = [(shared, own) for shared, own in pairs if shared is not None and own is not None]
        wrong = shared_model_problem([shared for shared, _ in known], [own for _, own in known])
        if wrong:
            self._warned = True
            own = run.config.method == "sketchmean"
            last = "raise method.answer and method.ratio" if own else "use sketchmean where few do"
            warnings.warn(
                f"round {record['round']}: the shared model falls apart: {wrong}; lower the server's step or gain, let "
                f"more clients take part, or {last}",
                stacklevel=2,
            )


class EarlyStopping(Callback):
    """`train.patience`: ends a run when V-acc has not risen for so many evaluations. It looks at metrics alone, which a
    resumed run has, too."""

    def on_start(self, run: RunInfo) -> None:
        if out_of_patience(run.config, run.metrics):
            run.stop()

    def on_evaluation(self, run: RunInfo, record: Mapping[str, Any]) -> None:
        self.on_start(run)


class Checkpoints(Callback):
    """`run.checkpoint_every`: a checkpoint after so many rounds, after the last one, and after the best one so far
    where `train.patience` keeps that; with `always`, after every step."""

    def __init__(self, always: bool = False) -> None:
        self._always = always

    def on_step(self, run: RunInfo) -> None:
        due = run.round % run.config.run.checkpoint_every == 0 or run.round == run.config.train.rounds
        if self._always or due or run.stopping or is_best(run):
            run.checkpoint()


def is_best(run: RunInfo) -> bool:
    """Whether the round just played has the highest V-acc so far, and is to be kept."""
    best = best_of(run.metrics) if run.config.train.patience else None
    return best is not None and best["round"] == run.round


class Calls:
    """Calls each of several callbacks, in their order."""

    def __init__(self, callbacks: Sequence[Any]) -> None:
        self._callbacks = callbacks

    def __call__(self, name: str, *arguments: Any) -> None:
        for callback in self._callbacks:
            self._one(callback, name, *arguments)

    def end(self, run: RunInfo, summary: Mapping[str, Any]) -> None:
        """Call `on_end` of all, even if one of them raises."""
        with ExitStack() as rest:
            for callback in reversed(self._callbacks):
                rest.callback(self._one, callback, "on_end", run, summary)

    @staticmethod
    def _one(callback: Any, name: str, *arguments: Any) -> None:
        method = getattr(callback, name, None)
        if method is not None:
            method(*arguments)


@contextmanager
def watching(progress: bool | None, callbacks: Iterable[Any] | None) -> Iterator[list[Any]]:
    """The list of callbacks with progress as asked for: None shows it on a terminal and in a notebook, True always,
    False never."""
    from pfedlms.report.progress import screen

    expected = f"expected a list of objects with {', '.join(CALLS[:2])} or {CALLS[2]} (see pfedlms.Callback)"
    if isinstance(callbacks, str) or not isinstance(callbacks, Iterable | None):
        raise UsageError(f"callbacks: got {callbacks!r}, {expected}")
    given = list(callbacks or ())
    for each in given:
        if isinstance(each, type) or not any(callable(getattr(each, name, None)) for name in CALLS):
            raise UsageError(f"callbacks: got {each!r}, {expected}")
    with screen(progress) as shown:
        yield [*shown, *given]
