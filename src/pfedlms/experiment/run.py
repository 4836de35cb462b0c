"""One run, from a configuration or from Python objects to metrics, a summary and every client's model."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from math import isfinite
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from pfedlms.engine import Federation, RoundReport, Traffic
from pfedlms.errors import DivergedError, RunDirectoryError, RunError, UsageError
from pfedlms.experiment.config import CUSTOM, Config, load_config, method_in
from pfedlms.experiment.prepare import ModelLike, prepare, python_overrides
from pfedlms.experiment.store import RunDirectory, write_atomically

SUMMARY_SCHEMA = 1


class Progress:
    """Told what happens in a run; the default says nothing."""

    def started(self, config: Config, rounds_played: int) -> None: ...

    def evaluated(self, config: Config, record: Mapping[str, Any]) -> None: ...


@dataclass(frozen=True)
class Result:
    """What a run measured, and the models it trained."""

    config: Config
    summary: dict[str, Any]
    metrics: list[dict[str, Any]]
    directory: Path | None
    federation: Federation
    stopped: bool = False
    """Whether Ctrl-C was pressed, be it in the very last round."""

    @property
    def accuracy(self) -> float:
        """P-acc, mean of the last 10 evaluations, in percent."""
        return float(self.summary["accuracy"]["last10"])

    @property
    def models(self) -> list[dict[str, torch.Tensor]]:
        """Every client's model as a state dict."""
        return [self.federation.client_state_dict(client) for client in range(self.federation.data.clients)]


def run(
    data: Any = None,
    model: ModelLike = None,
    *,
    method: str | None = None,
    config: str | Path | None = None,
    out: str | Path | None = None,
    progress: Progress | None = None,
    **settings: Any,
) -> Result:
    """Train one federation.

    Args:
        data: a data set's name; arrays `(x, y)` to be partitioned; or one `((x, y), (x, y))` train and test pair per
        client. Default: the embedded digits.
        model: a name of the zoo, a factory that returns an `nn.Module`, or a module (its weights are w⁰). Default: the
        data set's own.
        method: name of the method. Default: the one `config` names, or pfedlms.
        config: a TOML file with settings.
        out: run directory; without one nothing is written.
        progress: told what happens.
        settings: any key of a section (`rounds=50, alpha=0.1, strength=0.05, seed=1, …`).

    Example:
        >>> import pfedlms
        >>> result = pfedlms.run("digits", rounds=2, clients=5)
        >>> sorted(result.summary["accuracy"])
        ['final', 'last10', 'max']
    """
    checked = load_config(config, python_overrides(data, model, [method or method_in(config)], out, settings))
    place = out or checked.run.out
    directory = RunDirectory(Path(place)) if place else None
    federation = prepare(checked, data, model)
    if directory is not None:
        directory.create(checked.to_toml())
    return execute(checked, federation, directory, progress or Progress())


def resume(
    directory: str | Path, data: Any = None, model: ModelLike = None, progress: Progress | None = None
) -> Result:
    """Go on with the run in `directory`; data and model are needed again where they were given in Python."""
    stored = RunDirectory(Path(directory))
    if not stored.config.is_file():
        raise RunDirectoryError(f"{directory}: no run here (config.toml is missing)")
    config = load_config(stored.config, schema_errors="run directory")
    for section, given, name in (("data", data, config.data.dataset), ("model", model, config.model.name)):
        if name == CUSTOM and given is None:
            raise UsageError(
                f"{directory}: this run's {section} was given in Python; "
                f"go on with pfedlms.resume({str(directory)!r}, data, model)"
            )
    before = stored.load_checkpoint()
    # Where the size of cohorts follows the memory at hand, it stays what it was: dropout depends on the grouping.
    size = config.run.cohort_size or (before["cohort_size"] if before else 0)
    federation = prepare(config.with_run(cohort_size=size), data, model)
    stored.open()
    return execute(config, federation, stored, progress or Progress())


def export(directory: str | Path, client: int, file: str | Path) -> None:
    """Write the model of one client, as of the latest checkpoint, as a state dict that `torch.load` reads."""
    stored = RunDirectory(Path(directory))
    if not stored.config.is_file():
        raise RunDirectoryError(f"{directory}: no run here (config.toml is missing)")
    config = load_config(stored.config, schema_errors="run directory")
    if CUSTOM in (config.data.dataset, config.model.name):
        raise UsageError(
            f"{directory}: this run's data or model was given in Python; "
            f"take the models from pfedlms.resume({str(directory)!r}, data, model).models"
        )
    state = stored.load_checkpoint()
    if state is None:
        raise RunDirectoryError(f"{directory}: no checkpoint yet; `pfedlms resume {directory}` first")
    federation = prepare(config)
    if not 0 <= client < federation.data.clients:
        raise UsageError(f"--client: got {client}, expected 0 to {federation.data.clients - 1}")
    _load(config, federation, state, stored)
    try:
        write_atomically(Path(file), lambda opened: torch.save(federation.client_state_dict(client), opened))
    except (OSError, RuntimeError, ValueError) as error:
        raise UsageError(f"{file}: cannot be written ({getattr(error, 'strerror', None) or error})") from error


def _load(config: Config, federation: Federation, state: Mapping[str, Any], stored: RunDirectory) -> None:
    """Take a checkpoint in; one that was made with other settings would train on as if nothing had happened."""
    now = _settled(config)
    changed = [f"{key} = {value!r}" for key, value in state["settings"].items() if now.get(key) != value]
    if changed:
        raise RunDirectoryError(
            f"{stored.path}: checkpoint.pt does not fit config.toml, it was made with {', '.join(changed)}; "
            "put that back, or delete checkpoint.pt to start this run over"
        )
    if state["data"] != _data_of(config, federation):
        raise RunDirectoryError(
            f"{stored.path}: the data given are not those this run began with; give the same arrays"
        )
    try:
        federation.load(state["federation"])
    except (ValueError, KeyError, IndexError) as error:
        raise RunDirectoryError(
            f"{stored.path}: checkpoint.pt does not fit ({error}); go on with the data and model it was made with"
        ) from error


def _data_of(config: Config, federation: Federation) -> str:
    """A fingerprint of data given in Python; data sets by name are told by their settings."""
    return federation.data.fingerprint() if config.data.dataset == CUSTOM else config.data.dataset


def _settled(config: Config) -> dict[str, Any]:
    """What cannot change any more once a run has begun; the number of rounds, the data's folder and [run] can."""
    tables = config.tables()
    values = {f"{section}.{key}": value for section in tables for key, value in tables[section].items()}
    free = {"train.rounds", "data.dir"}
    return {key: value for key, value in values.items() if key not in free and not key.startswith("run.")}


def execute(config: Config, federation: Federation, directory: RunDirectory | None, progress: Progress) -> Result:
    """Play all rounds that are left, measuring and saving as the configuration says."""
    recorder = _Recorder(config, federation, directory)
    try:
        with _stop_on_interrupt() as stopped:
            recorder.restore()
            progress.started(config, federation.rounds_played)
            status = _play(config, federation, recorder, progress, stopped)
            summary = recorder.finish(status)
            path = directory.path if directory else None
            return Result(config, summary, recorder.metrics, path, federation, stopped())
    except DivergedError as error:
        error.summary = recorder.finish("diverged")
        raise
    except RunError:
        # The disk may be full, but what was measured so far is on it; a summary is worth a try, the cause is what
        # counts.
        recorder.finish("failed", quietly=True)
        raise
    finally:
        if directory is not None:
            directory.close()


def _play(
    config: Config, federation: Federation, recorder: _Recorder, progress: Progress, stopped: Callable[[], bool]
) -> str:
    last = config.train.rounds
    if federation.rounds_played == 0 and last > 0:
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


class _Recorder:
    """Turns what happens into metrics, checkpoints and a summary."""

    def __init__(self, config: Config, federation: Federation, directory: RunDirectory | None) -> None:
        self.metrics: list[dict[str, Any]] = []
        self._config, self._federation, self._directory = config, federation, directory
        self._traffic, self._rejected = Traffic(), 0
        self._before, self._began = 0.0, time.perf_counter()

    @property
    def _seconds(self) -> float:
        return round(self._before + time.perf_counter() - self._began, 3)

    def restore(self) -> None:
        """Go back to the latest checkpoint, or to the very beginning where there is none."""
        if self._directory is None:
            return
        state = self._directory.load_checkpoint()
        if state:
            _load(self._config, self._federation, state, self._directory)
        # Only now, so that a checkpoint that is refused costs no measurement.
        self.metrics = self._directory.rewind_metrics(state["metrics_bytes"] if state else 0)
        if state:
            self._traffic, self._rejected = Traffic(*state["traffic"]), state["rejected"]
            self._before = state["seconds"]

    def count(self, report: RoundReport) -> None:
        self._traffic += report.traffic
        self._rejected += report.rejected

    def evaluate(self, report: RoundReport) -> dict[str, Any]:
        measured = self._federation.evaluate()
        record: dict[str, Any] = {"round": self._federation.rounds_played, "p_acc": measured.accuracy}
        if report.global_evaluation is not None:
            record["g_acc"] = report.global_evaluation.accuracy
        record |= {
            "loss": report.loss,
            "test_loss": measured.loss if isfinite(measured.loss) else None,  # JSON has no NaN
            "client_acc": measured.per_client,
            "bytes": asdict(self._traffic),
            "rejected": self._rejected,
            "seconds": self._seconds,
        }
        if self._directory is not None:
            self._directory.append_metrics(record)
        self.metrics.append(record)
        return record

    def checkpoint(self) -> None:
        if self._directory is not None:
            state = {
                "settings": _settled(self._config),
                "data": _data_of(self._config, self._federation),
                "cohort_size": self._federation.largest_cohort,
                "federation": self._federation.state(),
                "traffic": list(self._traffic.as_tuple()),
                "rejected": self._rejected,
            }
            self._directory.save_checkpoint({**state, "seconds": self._seconds})

    def finish(self, status: str, quietly: bool = False) -> dict[str, Any]:
        summary = self._summarise(status)
        if self._directory is not None:
            stored = self._directory.read_summary()
            if stored is not None and {**stored, "seconds": 0} == {**summary, "seconds": 0}:
                return stored  # a finished run that was resumed: nothing was done, nothing is changed
            try:
                self._directory.write_summary(summary)
            except RunError:
                if not quietly:
                    raise
        return summary

    def _summarise(self, status: str) -> dict[str, Any]:
        config, rounds = self._config, self._federation.rounds_played
        summary: dict[str, Any] = {
            "schema": SUMMARY_SCHEMA,
            "status": status,
            "method": config.method,
            "dataset": config.data.dataset,
            "model": config.model.name,
            "seed": config.run.seed,
            "clients": self._federation.data.clients,
            "rounds": rounds,
            "accuracy": _reached([record["p_acc"] for record in self.metrics]),
        }
        shared = [record["g_acc"] for record in self.metrics if "g_acc" in record]
        if shared:
            summary["global_accuracy"] = _reached(shared)
        per_round = {name: _per_round(total, rounds) for name, total in asdict(self._traffic).items()}
        return summary | {
            "bytes_per_round": per_round,
            "total_bytes": self._traffic.total,
            "rejected": self._rejected,
            "seconds": self._seconds,
            "parameters": self._federation.model.layout.dim,
        }


def _reached(values: Sequence[float]) -> dict[str, float | None]:
    """Maximum over evaluations, mean of the last 10, and the last; nothing yet is null."""
    if not values:
        return {"max": None, "last10": None, "final": None}
    tail = values[-10:]
    return {"max": max(values), "last10": sum(tail) / len(tail), "final": values[-1]}


def _per_round(total: int, rounds: int) -> int | float:
    if rounds == 0:
        return 0
    return total // rounds if total % rounds == 0 else total / rounds


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
