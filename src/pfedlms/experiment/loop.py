"""The loop over the rounds of a run, in this process or on nodes: records, checkpoints and signals."""

from __future__ import annotations

import copy
import platform
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from types import FrameType
from typing import Any, TypeVar

from pfedlms.backend import COMPILATION
from pfedlms.data import FederatedData
from pfedlms.data.sources import path_kind
from pfedlms.engine import Evaluation, RoundReport, Traffic
from pfedlms.engine.processes import handle_signals
from pfedlms.errors import DivergedError, RunDirectoryError, RunError
from pfedlms.experiment.callbacks import Callbacks, RunInfo, SharedModelWarning
from pfedlms.experiment.config import Config
from pfedlms.experiment.digests import digest, is_own
from pfedlms.experiment.prepare import NAMED_PROBLEM, execution_settings
from pfedlms.experiment.problem import Problem, resume_call
from pfedlms.experiment.store import RunDirectory
from pfedlms.experiment.summary import best_of, environment, finite_or_none, out_of_patience, summarise
from pfedlms.methods import METHODS
from pfedlms.settings import CUSTOM

COUNTS = ("rejected", "astray", "unheard")
"""Messages that did not count: refused, from a client that tracks another model, answers that did not arrive."""


class Stopped(BaseException):
    """A signal asked this process to end, in the middle of a step."""

    def __init__(self, signal: int) -> None:
        super().__init__(signal)
        self.signal = signal


class ActiveRun(RunInfo):
    """A run while it trains. It records metrics, checkpoints and a summary, on disk if it has a directory. The
    federation is in this process; a subclass has a coordinator of nodes in its place."""

    def __init__(
        self, config: Config, federation: Any, directory: RunDirectory | None = None, label: str = "",
        problem: Problem = NAMED_PROBLEM,
    ) -> None:  # fmt: skip
        super().__init__(label, config, directory.path if directory else None)
        self._problem = problem
        self.federation: Any = federation
        self._digests = problem.digests() | method_digest(config) if directory else {}
        self.best_state: dict[str, Any] | None = None
        """The federation after the best round, where it is kept and there is no directory to keep it in."""
        self._stored = directory
        self._traffic, self._counts = Traffic(), dict.fromkeys(COUNTS, 0)
        self._earlier_seconds, self._started = 0.0, time.perf_counter() - COMPILATION.seconds

    # --- one step; a run on nodes overrides these methods

    def start(self) -> None:
        if self.round == 0:
            self.federation.start()

    def step(self, evaluate: bool) -> RoundReport:
        """Train one round; the report says whether it is to be evaluated."""
        report: RoundReport = self.federation.play_round(evaluate_global=evaluate)
        return report

    def extra_fields(self, of: str) -> dict[str, Any]:
        """Fields that a subclass adds to the record of a round, an evaluation or the summary."""
        return {}

    # --- records

    @property
    def round(self) -> int:
        return int(self.federation.rounds_played)

    @property
    def seconds(self) -> float:
        """Time spent in this run by all its processes, one after another, without the compilation of kernels."""
        return round(self._earlier_seconds + time.perf_counter() - COMPILATION.seconds - self._started, 3)

    def totals(self) -> dict[str, Any]:
        """Sums over all rounds so far: bytes, messages that did not count, and seconds."""
        shown = {"rejected": True, "astray": self._counts["astray"], "unheard": self.config.run.lost}
        counts = {name: count for name, count in self._counts.items() if shown[name]}
        return {"bytes": asdict(self._traffic), **counts, **self.extra_fields("evaluation"), "seconds": self.seconds}

    def restore(self, checkpoint: Mapping[str, Any] | None) -> None:
        """Go back to a checkpoint, or to the very beginning where there is none."""
        if self._stored is None:
            return
        if checkpoint:
            load_into(self.federation, checkpoint, self.config, self._stored, self._digests)
            self._traffic = Traffic(*checkpoint["traffic"])
            self._counts = {name: checkpoint[name] for name in COUNTS}
            self._earlier_seconds = checkpoint["seconds"]
        else:
            self._stored.delete_summary()
        # Only now: a checkpoint that is refused must not cut metrics.jsonl.
        self.metrics = self._stored.rewind_metrics(checkpoint["metrics_bytes"] if checkpoint else 0)
        self.stopping = out_of_patience(self.config, self.metrics)
        if self._is_best:  # the earlier process may have ended between its checkpoint and best.pt
            self._stored.keep_best()

    def count(self, report: RoundReport) -> dict[str, Any]:
        """Add a round to the totals; returns the record for `on_round`."""
        self._traffic += report.traffic
        self._counts = {name: count + getattr(report, name) for name, count in self._counts.items()}
        return {
            "round": self.round,
            "participants": list(report.participants),
            "loss": report.loss,
            "bytes": asdict(report.traffic),
            "rejected": report.rejected,
            "unheard": report.unheard,
            **self.extra_fields("round"),
        }

    def evaluate(self, report: RoundReport) -> dict[str, Any]:
        """Evaluate the clients that took part; record and return the results."""
        measured: Evaluation = self.federation.evaluate()
        results, shared, score = self._results(measured), report.global_evaluation, self.federation.criterion.score
        record: dict[str, Any] = {"round": self.round, **({"metric": score} if score else {})}
        record |= {key: results[key] for key in ("p_acc", "v_acc") if key in results}
        if shared is not None:
            record["g_acc"] = shared.accuracy
        record |= {"loss": report.loss, **results}
        if self._has_perplexity:
            record["perplexity"] = measured.perplexity
            record |= {"g_perplexity": shared.perplexity} if shared is not None else {}
        record = {**finite_or_none(record), **self.totals()}
        if self._stored is not None:
            self._stored.append_metrics(record)
        self.metrics.append(record)
        if out_of_patience(self.config, self.metrics):
            self.stop()
        return record

    def checkpoint(self) -> None:
        """Save all that is needed to resume from here; after the best round so far, keep a copy."""
        if self._stored is not None:
            data = self.federation.data
            self._stored.save_checkpoint({
                "settings": fixed_settings(self.config),
                "data": fingerprint(self.config, data) or self.config.data.dataset,
                "cohort_size": self.federation.largest_cohort,
                # With these, models can be exported and a summary made without the data.
                "shape": list(data.shape),
                "classes": data.classes,
                "samples": list(data.samples),
                "integers": not data.x.is_floating_point(),
                "tokens": data.tokens,
                "facts": self._facts(),
                "federation": self.federation.state(),
                "traffic": list(self._traffic.as_tuple()),
                **self._counts,
                "seconds": self.seconds,
            })  # fmt: skip
            if self._is_best:
                self._stored.keep_best()
        elif self._is_best:
            self.best_state = copy.deepcopy(self.federation.state())

    @property
    def _is_best(self) -> bool:
        """Whether the latest round has the highest V-acc so far, and `train.patience` asks to keep its models."""
        best = best_of(self.metrics) if self.config.train.patience else None
        return best is not None and best["round"] == self.round

    @property
    def is_checkpoint_due(self) -> bool:
        """After so many rounds, after the last one, and after the best so far."""
        due = self.round % self.config.run.checkpoint_every == 0 or self.round == self.config.train.rounds
        return due or self.stopping or self._is_best

    def summary(self, status: str) -> dict[str, Any]:
        """The summary, as if the run ended now; nothing is stored."""
        stages = {name: round(spent, 6) for name, spent in self.federation.watch.seconds.items()}
        totals = {"round": self.round, **self.totals()}
        return {
            **summarise(self.config, self.metrics, self._facts(), status, totals),
            **({"stages": stages} if stages else {}),
            **self.extra_fields("summary"),
        }

    def _facts(self) -> dict[str, Any]:
        """What a summary says about data and model; with a folder, also what later calls compare with theirs."""
        data, score = self.federation.data, self.federation.criterion.score
        lists = {"classes": data.names, "client_names": data.client_names}
        facts = {
            "clients": data.clients,
            **{key: list(names) for key, names in lists.items() if names},
            "partition": data.scheme,
            **({"tokens": data.tokens} if data.tokens else {}),
            **({"metric": score} if score else {}),
            "parameters": self.federation.model.layout.dim,
            "environment": environment(self.federation.model.device),
        }
        if self._stored is not None:
            data_fingerprint = fingerprint(self.config, data)
            facts |= {"data_fingerprint": data_fingerprint} if data_fingerprint else {}
            facts["digests"] = self._digests
        return facts

    def finish(self, status: str) -> dict[str, Any]:
        """Store the summary at the end of the run, and return it. A failed run ends without one if the disk is full."""
        summary = self.summary(status)
        stored = (self._stored.read_summary() if self._stored is not None else None) or {}
        if all(stored.get(key) == summary[key] for key in ("status", "rounds", "evaluations")):
            return stored  # a finished run was resumed: nothing was trained, so nothing changes
        if status == "finished":
            summary["everyone"] = self._everyone()
            if self.federation.data.newcomers:
                summary["newcomers"] = self._newcomers()
        if self._stored is not None:
            try:
                self._stored.write_summary(summary)
            except RunError:
                if status != "failed":
                    raise
        return summary

    @property
    def _has_perplexity(self) -> bool:
        """Whether losses are cross-entropies of next tokens, so that perplexities can be given."""
        return bool(self.federation.data.tokens) and self.federation.criterion.loss is None

    def _newcomers(self) -> dict[str, Any]:
        """Measures of the clients held out of the run, before and after their first local steps."""
        data = self.federation.data
        results: dict[str, Any] = {"clients": len(data.newcomers)}
        results |= {"names": list(data.newcomer_names)} if data.newcomer_names else {}
        for name, measured in zip(("before", "after"), self.federation.evaluate_newcomers(), strict=True):
            results |= {name: measured.accuracy, f"{name}_loss": measured.loss}
            results |= {f"{name}_perplexity": measured.perplexity} if self._has_perplexity else {}
            results[f"client_{name}"] = measured.per_client
        return finite_or_none(results)

    def _results(self, measured: Evaluation) -> dict[str, Any]:
        """An evaluation under the names of metrics.jsonl; V-acc is None if no client has set samples aside."""
        validation = measured.validation
        v_acc = {"v_acc": validation.accuracy if validation is not None else None}
        return finite_or_none({
            "p_acc": measured.accuracy,
            **(v_acc if self.config.data.validation else {}),
            "test_loss": measured.loss,
            "client_acc": measured.per_client,
            **({"clients": list(measured.ids)} if len(measured.ids) < self.federation.data.clients else {}),
        })  # fmt: skip

    def _everyone(self) -> dict[str, Any] | None:
        """Measures of all clients that have test samples and, on nodes, can be reached, at the end of the run: the last
        evaluation, if it was of all clients; None without `run.everyone`. In the mean over clients, unlike in the
        accuracy, a client that claims many samples weighs no more than others."""
        last = self.metrics[-1] if self.metrics else {}
        has_everyone = last.get("round") == self.round and "clients" not in last
        if not has_everyone and not self.config.run.everyone:
            return None
        results = last if has_everyone else self._results(self.federation.evaluate_everyone())
        accuracies = [value for value in results["client_acc"] if value is not None]
        return {
            "accuracy": results["p_acc"],
            **({"mean_over_clients": sum(accuracies) / len(accuracies)} if accuracies else {}),
            **({"validation_accuracy": results["v_acc"]} if "v_acc" in results else {}),
            "test_loss": results["test_loss"],
            "client_acc": results["client_acc"],
            **({"clients": results["clients"]} if "clients" in results else {}),
        }


def run_rounds(
    run: ActiveRun, callbacks: Sequence[Any], checkpoint: Mapping[str, Any] | None = None, at_once: bool = False
) -> tuple[dict[str, Any], int]:
    """Train all remaining rounds; returns the summary, and the signal that asked to stop (0: none). `at_once` is for
    steps that take long and can be repeated: a signal interrupts them, and a checkpoint follows each."""
    call = Callbacks([SharedModelWarning(), *callbacks])
    with (
        execution_settings(run.config),
        signals(at_once) as received_signal,
        COMPILATION.announce_when_long(lambda: call("on_compile", run)),
    ):
        run.restore(checkpoint)
        call("on_start", run)
        try:
            interrupted = _train_rounds(run, call, received_signal, at_once)
            summary = run.finish("interrupted" if interrupted else "finished")
        except BaseException as error:
            _end_failed_run(error, run, call)
            raise
        call.end(run, summary)
        return summary, received_signal()


def _train_rounds(run: ActiveRun, call: Callbacks, received_signal: Callable[[], int], at_once: bool) -> bool:
    """Train all remaining rounds, `at_once` with a checkpoint after each step; returns whether a signal interrupted
    them."""
    last = run.config.train.rounds
    interrupted = False
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
        if at_once or run.is_checkpoint_due:
            run.checkpoint()
    return interrupted


def _end_failed_run(error: BaseException, run: ActiveRun, call: Callbacks) -> None:
    """Write the summary and call `on_end` after an error. That error is raised afterwards, whatever else fails here."""
    if isinstance(error, RunError):
        # The disk may be full; `finish` still tries to write a summary.
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
    """Handle Ctrl-C, and SIGTERM, which schedulers send before they kill: the round ends and is saved; a second Ctrl-C
    ends the program immediately. With `at_once` the first signal raises `Stopped` in the middle of the step, and later
    ones are ignored. Yields a function that returns the number of the first signal, 0 before there is one."""
    received: list[int] = []

    def handle(number: int, where: FrameType | None) -> None:
        received.append(number)
        if at_once and len(received) == 1:
            raise Stopped(number)
        if not at_once and received.count(signal.SIGINT) > 1:
            raise KeyboardInterrupt

    def first() -> int:
        return received[0] if received else 0

    with handle_signals(handle):
        yield first


RunOrStudy = TypeVar("RunOrStudy", bound=Any)


class Interrupted(KeyboardInterrupt):
    """Ctrl-C in a run or study that was started in Python, after its checkpoint."""

    def __init__(self, text: str, result: Any) -> None:
        super().__init__(text)
        self.result = result
        """The run or study so far, as the call would have returned it."""


def raise_if_stopped(result: RunOrStudy) -> RunOrStudy:
    """Return a run or study to a caller in Python, unless a signal stopped it: now that all is saved, Ctrl-C raises
    `Interrupted`, and SIGTERM ends the program with 143."""
    if result.stopped == signal.SIGINT:
        can_resume = result.directory is not None and result.interrupted
        remedy = f"; resume with {resume_call(result.directory, result.settings)}" if can_resume else ""
        raise Interrupted(f"interrupted{remedy}", result)
    if result.stopped:
        raise SystemExit(128 + result.stopped)
    return result


def load_into(
    federation: Any, checkpoint: Mapping[str, Any], config: Config, stored: RunDirectory,
    digests: Mapping[str, str], same_data: bool = True,
) -> None:  # fmt: skip
    """Load a checkpoint into a federation, unless it was made with other settings or data, or with a model, loss,
    metric or method that has another digest."""
    now = fixed_settings(config)
    then = checkpoint["settings"]
    differing = [key for key in {**then, **now} if then.get(key) != now.get(key)]
    changed = [f"{key} = {then[key]!r}" if key in then else f"no {key}" for key in differing]
    if changed:
        raise RunDirectoryError(
            f"{stored.path}: checkpoint.pt does not fit config.toml, it was made with {', '.join(changed)}; "
            "put that back, or delete checkpoint.pt to start this run over"
        )
    if same_data and checkpoint["data"] != (fingerprint(config, federation.data) or config.data.dataset):
        raise RunDirectoryError(
            f"{stored.path}: the data given are not those this run began with; give the same arrays or files"
        )
    if other := other_parts(checkpoint["facts"], digests):
        raise RunDirectoryError(f"{stored.path}: {other}; give the same as before")
    try:
        federation.load(checkpoint["federation"])
    except (ValueError, KeyError, IndexError) as error:
        raise RunDirectoryError(
            f"{stored.path}: checkpoint.pt does not fit ({error}); resume with the data and model it was made with"
        ) from error


def other_parts(facts: Mapping[str, Any], digests: Mapping[str, str]) -> str:
    """A sentence if a run, of which a summary or checkpoint has `facts`, had another model, loss, metric or method than
    those with these digests, or none, or if that cannot be known, because an earlier version began it; else "". Other
    versions of Python give other digests."""
    stored, python = facts.get("digests"), facts.get("environment", {}).get("python", "")
    if stored is None:
        has_parts = facts.get("problem_digests") or digests
        return "was begun by an earlier version, with parts that cannot be compared" if has_parts else ""
    is_same_python = python.split(".")[:2] == list(platform.python_version_tuple()[:2])
    names = [name for name in digests if name not in stored or (is_same_python and stored[name] != digests[name])]
    names = ["code of its method" if name == "method" else name for name in names]
    return f"was trained with another {' and another '.join(sorted(names))} than given now" if names else ""


def method_digest(config: Config) -> dict[str, str]:
    """The digest of the method of a run, if it is of the user's own."""
    method = METHODS[config.method]
    return {"method": digest(method)} if is_own(method) else {}


def fixed_settings(config: Config) -> dict[str, Any]:
    """The settings that cannot change once a run has begun: all but the number of rounds (unless the learning rates
    depend on it), the folder of the data, and [run]."""
    free = ("data.dir", *(("train.rounds",) if config.train.schedule != "cosine" else ()))
    fixed = {key: value for key, value in config.flat().items() if not key.startswith("run.") and key not in free}
    return fixed | {"data.dataset": path_kind(config.data.dataset) or config.data.dataset}


def fingerprint(config: Config, data: FederatedData) -> str | None:
    """Fingerprint of data given in Python or by path. Named data sets need none: their settings identify them."""
    is_own = config.data.dataset == CUSTOM or path_kind(config.data.dataset)
    return data.fingerprint if is_own else None
