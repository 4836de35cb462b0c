"""Who is told what happens in a run: progress on a screen, and callbacks of the caller's own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pfedlms.errors import UsageError
from pfedlms.experiment.config import Config
from pfedlms.experiment.play import Progress

CALLS = ("on_round", "on_evaluation", "on_end")


@dataclass(frozen=True)
class RunInfo:
    """Which run a callback is told about."""

    name: str
    """Method and seed; in a comparison the variant's name, in a sweep the cell's, with the seed."""
    config: Config
    """`config.tables()` has every setting."""

    @property
    def directory(self) -> Path | None:
        return Path(self.config.run.out) if self.config.run.out else None


class Callback:
    """Told what happens; override what you need. Any object that has one of these methods will do.

    What a callback raises ends the run, which can go on from its latest checkpoint. `on_end` is called once for every
    run that began, also after that.
    """

    def on_round(self, run: RunInfo, record: Mapping[str, Any]) -> None:
        """After every round: `round`, `participants` (ids), `loss` of their local steps, `bytes` of this round,
        `rejected`, `unheard`."""

    def on_evaluation(self, run: RunInfo, record: Mapping[str, Any]) -> None:
        """After every evaluation: the line of metrics.jsonl."""

    def on_end(self, run: RunInfo, summary: Mapping[str, Any]) -> None:
        """At the end, also of a run that was interrupted or failed, or that a callback ended: what summary.json says,
        or would say; see its `status`."""


class _Calls(Progress):
    """Tells callbacks, beside another progress."""

    def __init__(self, shown: Progress, callbacks: Sequence[Any]) -> None:
        self._shown, self._callbacks = shown, callbacks

    def named(self, name: str) -> None:
        super().named(name)
        self._shown.named(name)

    def compiling(self) -> None:
        self._shown.compiling()

    def started(self, config: Config, rounds_played: int) -> None:
        self._run = RunInfo(self.label(config), config)
        self._shown.started(config, rounds_played)

    def played(self, config: Config, record: Mapping[str, Any]) -> None:
        self._shown.played(config, record)
        self._call("on_round", record)

    def evaluated(self, config: Config, record: Mapping[str, Any]) -> None:
        self._shown.evaluated(config, record)
        self._call("on_evaluation", record)

    def ended(self, config: Config, summary: Mapping[str, Any]) -> None:
        self._shown.ended(config, summary)
        with ExitStack() as rest:  # all are told, in their order, even if one of them raises
            for callback in reversed(self._callbacks):
                rest.callback(self._tell, callback, "on_end", summary)

    def _call(self, name: str, record: Mapping[str, Any]) -> None:
        for callback in self._callbacks:
            self._tell(callback, name, record)

    def _tell(self, callback: Any, name: str, record: Mapping[str, Any]) -> None:
        told = getattr(callback, name, None)
        if told is not None:
            told(self._run, record)


@contextmanager
def watching(progress: Progress | bool | None, callbacks: Iterable[Any] | None) -> Iterator[Progress]:
    """Progress as asked for, with callbacks: None shows it on a terminal and in a notebook, True always, False
    never."""
    from pfedlms.report.progress import screen

    told = _checked(callbacks)
    if isinstance(progress, Progress):
        yield _Calls(progress, told) if told else progress
    else:
        with screen(progress) as shown:
            yield _Calls(shown, told) if told else shown


def _checked(callbacks: Iterable[Any] | None) -> list[Any]:
    expected = f"expected a list of objects with {', '.join(CALLS[:-1])} or {CALLS[-1]} (see pfedlms.Callback)"
    if isinstance(callbacks, str) or not isinstance(callbacks, Iterable | None):
        raise UsageError(f"callbacks: got {callbacks!r}, {expected}")
    given = list(callbacks or ())
    for each in given:
        if isinstance(each, type) or not any(callable(getattr(each, name, None)) for name in CALLS):
            raise UsageError(f"callbacks: got {each!r}, {expected}")
    return given
