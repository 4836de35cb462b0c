"""The loop that plays the rounds of a run, in this process or on nodes: records, checkpoints and signals."""

from __future__ import annotations

import copy
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from types import FrameType
from typing import Any, TypeVar

from pfedlms.backend import COMPILATION
from pfedlms.data import FederatedData
from pfedlms.data.sources import kind_of
from pfedlms.engine import Evaluation, RoundReport, Traffic
from pfedlms.errors import DivergedError, RunDirectoryError, RunError
from pfedlms.experiment.callbacks import Calls, Checkpoints, EarlyStopping, RunInfo, SharedModelWarning, is_best
from pfedlms.experiment.config import Config
from pfedlms.experiment.prepare import as_configured
from pfedlms.experiment.problem import resume_call
from pfedlms.experiment.store import RunDirectory
from pfedlms.experiment.summary import environment, finite, same_result, summarise
from pfedlms.settings import CUSTOM

COUNTS = ("rejected", "astray", "unheard")
"""Messages of a round that did not count: refused, of an absent client, lost."""


class Stopped(BaseException):
    """A signal asked this process to end, in the middle of a step."""

    def __init__(self, signal: int) -> None:
        super().__init__(signal)
        self.signal = signal


class Running(RunInfo):
    """A run while it is played: writes metrics, checkpoints and a summary, on disk if there is a directory. `played` is
    a federation in this process; a subclass plays one on nodes."""

    def __init__(self, config: Config, played: Any, directory: RunDirectory | None = None, label: str = "") -> None:
        super().__init__(label, config, directory.path if directory else None)
        self.played: Any = played
        self.best_state: dict[str, Any] | None = None
        """The federation after the best round, where it is kept and there is no directory to keep it in."""
        self._stored = directory
        self._traffic, self._counts = Traffic(), dict.fromkeys(COUNTS, 0)
        self._before, self._began = 0.0, time.perf_counter() - COMPILATION.seconds

    # --- one step; nodes have their own

    def start(self) -> None:
        if self.round == 0:
            self.played.start()

    def step(self, evaluate: bool) -> RoundReport:
        """A round, to be evaluated or not."""
        report: RoundReport = self.played.play_round(evaluate_global=evaluate)
        return replace(report, evaluated=evaluate)

    def more(self, of: str) -> dict[str, Any]:
        """What is recorded besides: of a round, an evaluation or the summary."""
        return {}

    # --- records

    @property
    def round(self) -> int:
        return int(self.played.rounds_played)

    @property
    def seconds(self) -> float:
        """Spent in this run, all its processes together, without the compilation of kernels."""
        return round(self._before + time.perf_counter() - COMPILATION.seconds - self._began, 3)

    def totals(self) -> dict[str, Any]:
        """Of all rounds so far: bytes, messages that were refused or lost, and seconds."""
        shown = {"rejected": True, "astray": self._counts["astray"], "unheard": self.config.run.lost}
        refused = {name: count for name, count in self._counts.items() if shown[name]}
        return {"bytes": asdict(self._traffic), **refused, **self.more("evaluation"), "seconds": self.seconds}

    def restore(self, checkpoint: Mapping[str, Any] | None) -> None:
        """Go back to a checkpoint, or to the very beginning where there is none."""
        if self._stored is None:
            return
        if checkpoint:
            load_into(self.played, checkpoint, self.config, self._stored)
            self._traffic = Traffic(*checkpoint["traffic"])
            self._counts = {name: checkpoint.get(name, 0) for name in COUNTS}
            self._before = checkpoint["seconds"]
        # Only now, so that a checkpoint that is refused costs no measurement.
        self.metrics = self._stored.rewind_metrics(checkpoint["metrics_bytes"] if checkpoint else 0)
        if is_best(self):  # the process may have ended between the checkpoint and its being kept
            self._stored.keep_best()

    def count(self, report: RoundReport) -> dict[str, Any]:
        """Add a round to the totals; what callbacks are given of it."""
        self._traffic += report.traffic
        self._counts = {name: count + getattr(report, name) for name, count in self._counts.items()}
        return {
            "round": self.round,
            "participants": list(report.participants),
            "loss": report.loss,
            "bytes": asdict(report.traffic),
            "rejected": report.rejected,
            "unheard": report.unheard,
            **self.more("round"),
        }

    def evaluate(self, report: RoundReport) -> dict[str, Any]:
        """Measure, and record the results; accuracies are over the clients that took part."""
        measured: Evaluation = self.played.evaluate()
        results, shared, score = self._results(measured), report.global_evaluation, self.played.criterion.score
        record: dict[str, Any] = {"round": self.round, **({"metric": score} if score else {})}
        record |= {key: results[key] for key in ("p_acc", "v_acc") if key in results}
        if shared is not None:
            record["g_acc"] = finite(shared.accuracy)
        record |= {"loss": finite(report.loss), "test_loss": results["test_loss"], "client_acc": results["client_acc"]}
        if len(measured.ids) < self.played.data.clients:
            record["clients"] = list(measured.ids)
        if self._predicts_tokens:
            record["perplexity"] = finite(measured.perplexity)
            record |= {"g_perplexity": finite(shared.perplexity)} if shared is not None else {}
        record |= self.totals()
        if self._stored is not None:
            self._stored.append_metrics(record)
        self.metrics.append(record)
        return record

    def checkpoint(self) -> None:
        """Save all that is needed to resume from here; after the best round so far, for good."""
        if self._stored is not None:
            data = self.played.data
            self._stored.save_checkpoint({
                "settings": fixed_settings(self.config),
                "data": fingerprint(self.config, data) or self.config.data.dataset,
                "cohort_size": self.played.largest_cohort,
                # So that a model can be exported, and a summary made, without the data.
                "shape": list(data.shape),
                "classes": data.classes,
                "samples": list(data.samples),
                "integers": not data.x.is_floating_point(),
                "tokens": data.tokens,
                "parameters": self.played.model.layout.dim,
                "facts": facts_of(self.played),
                "federation": self.played.state(),
                "traffic": list(self._traffic.as_tuple()),
                **self._counts,
                "seconds": self.seconds,
            })  # fmt: skip
            if is_best(self):
                self._stored.keep_best()
        elif is_best(self):
            self.best_state = copy.deepcopy(self.played.state())

    def summary(self, status: str) -> dict[str, Any]:
        """The summary as it would be if the run ended here; nothing is stored."""
        stages = {name: round(spent, 6) for name, spent in self.played.watch.seconds.items()}
        # Only a folder is opened again, perhaps with other data.
        own = fingerprint(self.config, self.played.data) if self._stored is not None else None
        more = {**({"data_fingerprint": own} if own else {}), **({"stages": stages} if stages else {})}
        more |= self.more("summary")
        now = {"round": self.round, **self.totals()}
        return summarise(self.config, self.metrics, facts_of(self.played), status, now) | more

    def finish(self, status: str) -> dict[str, Any]:
        """The summary of the run, as it is stored; of one that failed, if it can be stored."""
        summary = self.summary(status)
        stored = self._stored.read_summary() if self._stored is not None else None
        if stored is not None and same_result(stored, summary):
            return stored  # a finished run that was resumed: nothing was done, nothing is changed
        if status == "finished":
            summary["everyone"] = self._everyone()
            if self.played.data.newcomers:
                summary["newcomers"] = self._newcomers()
        if self._stored is not None:
            try:
                self._stored.write_summary(summary)
            except RunError:
                if status != "failed":
                    raise
        return summary

    @property
    def _predicts_tokens(self) -> bool:
        """Whether losses are cross-entropies of next tokens."""
        return bool(self.played.data.tokens) and self.played.criterion.loss is None

    def _newcomers(self) -> dict[str, Any]:
        """Clients held out of the run, before and after their first local steps."""
        found: dict[str, Any] = {"clients": len(self.played.data.newcomers)}
        for name, measured in zip(("before", "after"), self.played.evaluate_newcomers(), strict=True):
            found |= {name: finite(measured.accuracy), f"{name}_loss": finite(measured.loss)}
            found |= {f"{name}_perplexity": finite(measured.perplexity)} if self._predicts_tokens else {}
            found[f"client_{name}"] = [finite(value) for value in measured.per_client]
        return found

    def _results(self, measured: Evaluation) -> dict[str, Any]:
        """An evaluation under the names of metrics.jsonl; V-acc is None where no client evaluated has set samples
        aside."""
        validation = measured.validation
        validated = {"v_acc": finite(validation.accuracy) if validation is not None else None}
        return {
            "p_acc": finite(measured.accuracy),
            **(validated if self.config.data.validation else {}),
            "test_loss": finite(measured.loss),
            "client_acc": [finite(value) for value in measured.per_client],
        }

    def _everyone(self) -> dict[str, Any] | None:
        """All clients at the end of the run: the last evaluation, if it was of all of them; None without
        `run.everyone`. In the mean over clients, unlike in the accuracy, a client that claims many samples weighs no
        more than others."""
        last = self.metrics[-1] if self.metrics else {}
        whole = last.get("round") == self.round and "clients" not in last
        if not whole and not self.config.run.everyone:
            return None
        results = last if whole else self._results(self.played.evaluate_everyone())
        known = [value for value in results["client_acc"] if value is not None]
        return {
            "accuracy": results["p_acc"],
            **({"mean_over_clients": sum(known) / len(known)} if known else {}),
            **({"validation_accuracy": results["v_acc"]} if "v_acc" in results else {}),
            "test_loss": results["test_loss"],
            "client_acc": results["client_acc"],
        }


def execute(
    run: Running, callbacks: Sequence[Any], checkpoint: Mapping[str, Any] | None = None, at_once: bool = False
) -> tuple[dict[str, Any], int]:
    """Play all rounds that are left; the summary, and the signal that asked to stop (0: none). `at_once` is for steps
    that take long and can be taken again: a signal ends them where they are, with a checkpoint after every step."""
    call = Calls([EarlyStopping(), SharedModelWarning(), *callbacks, Checkpoints(always=at_once)])
    with (
        as_configured(run.config),
        signals(at_once) as received_signal,
        COMPILATION.announce_when_long(lambda: call("on_compile", run)),
    ):
        run.restore(checkpoint)
        call("on_start", run)
        try:
            interrupted = _rounds(run, call, received_signal)
            summary = run.finish("interrupted" if interrupted else "finished")
        except BaseException as error:
            _end(error, run, call)
            raise
        call.end(run, summary)
        return summary, received_signal()


def _rounds(run: Running, call: Calls, received_signal: Callable[[], int]) -> bool:
    """All rounds that are left; whether a signal interrupted them."""
    last = run.config.train.rounds
    run.start()
    while run.round < last and not run.stopping:
        number = run.round + 1
        due = number % run.config.run.evaluate_every == 0 or number == last
        report = run.step(due)
        call("on_round", run, run.count(report))
        if report.evaluated:
            call("on_evaluation", run, run.evaluate(report))
        interrupted = received_signal() > 0 and run.round < last and not run.stopping
        if interrupted:
            run.stop()
        call("on_step", run)
        if interrupted:
            return True
    return False


def _end(error: BaseException, run: Running, call: Calls) -> None:
    """The end of a run that an error ended: the error is what counts, whatever else fails."""
    if isinstance(error, RunError):
        # The disk may be full, but what was measured so far is on it; a summary is worth a try.
        summary = error.summary = run.finish("diverged" if isinstance(error, DivergedError) else "failed")
    elif isinstance(error, Stopped):
        summary = run.finish("interrupted")
    else:
        summary = run.summary("failed" if isinstance(error, Exception) else "interrupted")
    try:
        call.end(run, summary)
    except Exception as other:
        error.add_note(f"on_end failed, too: {type(other).__name__}: {other}")


@contextmanager
def signals(at_once: bool = False) -> Iterator[Callable[[], int]]:
    """Ctrl-C and SIGTERM, which schedulers send before they kill, let the round end and be saved; a second Ctrl-C ends
    the program immediately. With `at_once` the first signal raises `Stopped` where the run is, and later ones are
    ignored. Yields the number of the first signal received, 0 if there was none."""
    received: list[int] = []

    def handle(number: int, where: FrameType | None) -> None:
        received.append(number)
        if at_once and len(received) == 1:
            raise Stopped(number)
        if not at_once and received.count(signal.SIGINT) > 1:
            raise KeyboardInterrupt

    def first() -> int:
        return received[0] if received else 0

    if threading.current_thread() is not threading.main_thread():
        yield first
        return
    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield first
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


Found = TypeVar("Found", bound=Any)


class Interrupted(KeyboardInterrupt):
    """Ctrl-C in a run or study that was started in Python, after its checkpoint."""

    def __init__(self, text: str, result: Any) -> None:
        super().__init__(text)
        self.result = result
        """What would have been returned, so far."""


def or_leave(found: Found) -> Found:
    """A run or study, for callers in Python; or what a signal asked for, now that all is saved: Ctrl-C raises
    `Interrupted`, SIGTERM ends the program with 143."""
    if found.stopped == signal.SIGINT:
        kept = found.directory is not None and found.interrupted
        how = f"; resume with {resume_call(found.directory, found.settings)}" if kept else ""
        raise Interrupted(f"interrupted{how}", found)
    if found.stopped:
        raise SystemExit(128 + found.stopped)
    return found


def facts_of(played: Any) -> dict[str, Any]:
    """What a summary says of data and model."""
    data = played.data
    named = {"classes": data.names, "client_names": data.client_names}
    return {
        "clients": data.clients,
        **{key: list(names) for key, names in named.items() if names},
        "partition": data.scheme,
        **({"tokens": data.tokens} if data.tokens else {}),
        **({"metric": played.criterion.score} if played.criterion.score else {}),
        "parameters": played.model.layout.dim,
        "environment": environment(played.model.device),
    }


def load_into(
    played: Any, checkpoint: Mapping[str, Any], config: Config, stored: RunDirectory, same_data: bool = True
) -> None:
    """Load a checkpoint; one that was made with other settings or data would train on as if nothing had happened."""
    now = fixed_settings(config)
    changed = [f"{key} = {value!r}" for key, value in checkpoint["settings"].items() if now.get(key) != value]
    if changed:
        raise RunDirectoryError(
            f"{stored.path}: checkpoint.pt does not fit config.toml, it was made with {', '.join(changed)}; "
            "put that back, or delete checkpoint.pt to start this run over"
        )
    if same_data and checkpoint["data"] != (fingerprint(config, played.data) or config.data.dataset):
        raise RunDirectoryError(
            f"{stored.path}: the data given are not those this run began with; give the same arrays or files"
        )
    try:
        played.load(checkpoint["federation"])
    except (ValueError, KeyError, IndexError) as error:
        raise RunDirectoryError(
            f"{stored.path}: checkpoint.pt does not fit ({error}); resume with the data and model it was made with"
        ) from error


def fixed_settings(config: Config) -> dict[str, Any]:
    """What cannot change once a run has begun: all but its length (unless its learning rates depend on that), where the
    data are and how it is executed."""
    left_out = ("data.dir", *(("train.rounds",) if config.train.schedule != "cosine" else ()))
    kept = {key: own for key, own in config.flat().items() if not key.startswith("run.") and key not in left_out}
    return kept | {"data.dataset": kind_of(config.data.dataset) or config.data.dataset}


def fingerprint(config: Config, data: FederatedData) -> str | None:
    """Of data given in Python or by path; data sets by name are identified by their settings."""
    own = config.data.dataset == CUSTOM or kind_of(config.data.dataset)
    return data.fingerprint() if own else None
