"""What is kept of a run: metrics, checkpoints and a summary."""

from __future__ import annotations

import copy
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from math import isfinite
from typing import Any, Protocol

from pfedlms.backend import COMPILATION
from pfedlms.data import FederatedData
from pfedlms.data.sources import kind_of
from pfedlms.engine import Evaluation, RoundReport, Traffic
from pfedlms.engine.criterion import Criterion
from pfedlms.engine.stopwatch import Stopwatch
from pfedlms.errors import RunDirectoryError, RunError
from pfedlms.experiment.config import CUSTOM, Config
from pfedlms.experiment.environment import environment
from pfedlms.experiment.store import RunDirectory
from pfedlms.models import CohortModel

SUMMARY_SCHEMA = 1


class Played(Protocol):
    """What is recorded: a federation, be it in this process or on nodes."""

    rounds_played: int
    largest_cohort: int
    criterion: Criterion
    watch: Stopwatch

    @property
    def data(self) -> FederatedData: ...

    @property
    def model(self) -> CohortModel: ...

    def evaluate(self) -> Evaluation: ...

    def everyone(self) -> Evaluation: ...

    def state(self) -> dict[str, Any]: ...

    def load(self, state: dict[str, Any]) -> None: ...


class Recorder:
    """Turns what happens into metrics, checkpoints and a summary; on disk where there is a directory."""

    def __init__(self, config: Config, federation: Played, directory: RunDirectory | None) -> None:
        self.metrics: list[dict[str, Any]] = []
        self._config, self._federation, self._directory = config, federation, directory
        self._traffic, self._rejected, self._astray, self._unheard = Traffic(), 0, 0, 0
        self.best_state: dict[str, Any] | None = None
        """The federation after the best round, where it is kept and there is no directory to keep it in."""
        self._before, self._began = 0.0, time.perf_counter() - COMPILATION.seconds

    @property
    def _seconds(self) -> float:
        """Spent in this run, all its processes together, without the compilation of kernels."""
        return round(self._before + time.perf_counter() - COMPILATION.seconds - self._began, 3)

    def restore(self, checkpoint: Mapping[str, Any] | None) -> None:
        """Go back to a checkpoint, or to the very beginning where there is none."""
        if self._directory is None:
            return
        if checkpoint:
            load_into(self._federation, checkpoint, self._config, self._directory)
            self._traffic = Traffic(*checkpoint["traffic"])
            self._rejected, self._unheard = checkpoint["rejected"], checkpoint["unheard"]
            self._astray = checkpoint.get("astray", 0)
            self._before = checkpoint["seconds"]
        # Only now, so that a checkpoint that is refused costs no measurement.
        self.metrics = self._directory.rewind_metrics(checkpoint["metrics_bytes"] if checkpoint else 0)
        if self.rose:  # the process may have ended between the checkpoint and its being kept
            self._directory.keep_best()

    @property
    def best(self) -> dict[str, Any] | None:
        """The first of the evaluations with the highest V-acc; None where there is none."""
        return max(self._validated, key=lambda record: record["v_acc"], default=None)

    @property
    def rose(self) -> bool:
        """Whether the round just played is the best so far, and is to be kept."""
        best = self.best if self._config.train.patience else None
        return best is not None and best["round"] == self._federation.rounds_played

    @property
    def out_of_patience(self) -> bool:
        """Whether V-acc has not risen for `train.patience` evaluations; by the metrics alone, which a resumed run has,
        too."""
        patience, best = self._config.train.patience, self.best
        return bool(patience) and best is not None and len(self._validated) > self._validated.index(best) + patience

    @property
    def _validated(self) -> list[dict[str, Any]]:
        return [record for record in self.metrics if record.get("v_acc") is not None]

    def count(self, report: RoundReport) -> None:
        self._traffic += report.traffic
        self._rejected += report.rejected
        self._astray += report.astray
        self._unheard += report.unheard

    def evaluate(self, report: RoundReport, more: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Measure, and keep what was measured, and `more`; accuracies are over the clients that took part."""
        measured = self._federation.evaluate()
        record: dict[str, Any] = {"round": self._federation.rounds_played, **self._score()}
        record["p_acc"] = _finite(measured.accuracy)
        if self._federation.data.validation:
            record["v_acc"] = _validated(measured)
        if report.global_evaluation is not None:
            record["g_acc"] = _finite(report.global_evaluation.accuracy)
        record |= {"loss": report.loss, "test_loss": _finite(measured.loss), "client_acc": _per_client(measured)}
        if len(measured.ids) < self._federation.data.clients:
            record["clients"] = list(measured.ids)
        record |= {"bytes": asdict(self._traffic), **self._failures(), **(more or {}), "seconds": self._seconds}
        if self._directory is not None:
            self._directory.append_metrics(record)
        self.metrics.append(record)
        return record

    def checkpoint(self) -> None:
        """Keep all that is needed to go on from here; after the best round so far, for good."""
        if self._directory is not None:
            state = {
                "settings": settled(self._config),
                "data": _data_of(self._config, self._federation),
                "cohort_size": self._federation.largest_cohort,
                # So that a model can be taken out without the data.
                "shape": list(self._federation.data.shape),
                "classes": self._federation.data.classes,
                "samples": list(self._federation.data.samples),
                "parameters": self._federation.model.layout.dim,
                "federation": self._federation.state(),
                "traffic": list(self._traffic.as_tuple()),
                "rejected": self._rejected,
                "astray": self._astray,
                "unheard": self._unheard,
            }
            self._directory.save_checkpoint({**state, "seconds": self._seconds})
            if self.rose:
                self._directory.keep_best()
        elif self.rose:
            self.best_state = copy.deepcopy(self._federation.state())

    def finish(self, status: str, more: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """The summary of the run with `more`, as it is stored; of one that failed, if it can be stored."""
        summary = {**self.so_far(status), **(more or {})}
        stored = self._directory.read_summary() if self._directory is not None else None
        if stored is not None and _compared(stored) == _compared(summary):
            return stored  # a finished run that was resumed: nothing was done, nothing is changed
        if status == "finished":
            summary["everyone"] = self._everyone()
        if self._directory is not None:
            try:
                self._directory.write_summary(summary)
            except RunError:
                if status != "failed":
                    raise
        return summary

    def so_far(self, status: str) -> dict[str, Any]:
        """The summary as it would be if the run ended here; nothing is stored."""
        config, rounds = self._config, self._federation.rounds_played
        summary: dict[str, Any] = {
            "schema": SUMMARY_SCHEMA,
            "status": status,
            "method": config.method,
            "dataset": config.data.dataset,
            "model": config.model.name,
            "seed": config.run.seed,
            "clients": self._federation.data.clients,
            **_names(self._federation.data),
            "partition": self._federation.data.scheme,
            "participation": config.train.participation,
            "rounds": rounds,
            **self._score(),
            "evaluations": len(self.metrics),
            "accuracy": reached([record["p_acc"] for record in self.metrics]),
        }
        if self._federation.data.validation:
            summary["validation_accuracy"] = reached([record["v_acc"] for record in self.metrics])
            summary["best"] = self.best and {name: self.best[name] for name in ("round", "v_acc", "p_acc")}
        if config.train.patience:
            summary["stopped_early"] = self.out_of_patience and rounds < config.train.rounds
        shared = [record["g_acc"] for record in self.metrics if "g_acc" in record]
        if shared:
            summary["global_accuracy"] = reached(shared)
        return summary | {
            "everyone": None,
            "bytes_per_round": {name: mean_bytes(total, rounds) for name, total in asdict(self._traffic).items()},
            "total_bytes": self._traffic.total,
            **self._failures(),
            "seconds": self._seconds,
            "parameters": self._federation.model.layout.dim,
            "environment": environment(self._federation.model.device),
            **self._stages(),
        }

    def _stages(self) -> dict[str, dict[str, float]]:
        """Seconds by stage, where they were measured: of the process that ended the run."""
        measured = self._federation.watch.seconds
        return {"stages": {name: round(spent, 6) for name, spent in measured.items()}} if measured else {}

    def _score(self) -> dict[str, str]:
        """What is measured, where it is not accuracy."""
        name = self._federation.criterion.score
        return {} if name is None else {"metric": name}

    def _failures(self) -> dict[str, int]:
        """Messages the server refused; where there were any, those it left out because their senders track another
        model; where they can get lost, answers that clients did not hear."""
        astray = {"astray": self._astray} if self._astray else {}
        unheard = {"unheard": self._unheard} if self._config.run.lost else {}
        return {"rejected": self._rejected, **astray, **unheard}

    def _everyone(self) -> dict[str, Any]:
        """All clients at the end of the run; the last evaluation, if it was of all of them."""
        last = self.metrics[-1] if self.metrics else {}
        if last.get("round") == self._federation.rounds_played and "clients" not in last:
            validated = {"validation_accuracy": last["v_acc"]} if "v_acc" in last else {}
            measures = {"test_loss": last["test_loss"], "client_acc": last["client_acc"]}
            return {"accuracy": last["p_acc"], **validated, **measures}
        measured = self._federation.everyone()
        validated = {"validation_accuracy": _validated(measured)} if self._federation.data.validation else {}
        measures = {"test_loss": _finite(measured.loss), "client_acc": _per_client(measured)}
        return {"accuracy": _finite(measured.accuracy), **validated, **measures}


def _compared(summary: Mapping[str, Any]) -> dict[str, Any]:
    """What a summary says of a run, whoever made it and however long that took; one of before `partition` says the
    same without."""
    unlike = ("seconds", "everyone", "environment", "stages", "partition")
    return {key: value for key, value in summary.items() if key not in unlike}


def told(report: RoundReport) -> dict[str, Any]:
    """What callbacks are told of a round."""
    return {
        "participants": list(report.participants),
        "loss": report.loss,
        "bytes": asdict(report.traffic),
        "rejected": report.rejected,
        "unheard": report.unheard,
    }


def load_into(
    federation: Played, checkpoint: Mapping[str, Any], config: Config, stored: RunDirectory, same_data: bool = True
) -> None:
    """Take a checkpoint in; one that was made with other settings or data would train on as if nothing had happened."""
    now = settled(config)
    changed = [f"{key} = {value!r}" for key, value in checkpoint["settings"].items() if now.get(key) != value]
    if changed:
        raise RunDirectoryError(
            f"{stored.path}: checkpoint.pt does not fit config.toml, it was made with {', '.join(changed)}; "
            "put that back, or delete checkpoint.pt to start this run over"
        )
    if same_data and checkpoint["data"] != _data_of(config, federation):
        raise RunDirectoryError(
            f"{stored.path}: the data given are not those this run began with; give the same arrays or files"
        )
    try:
        federation.load(checkpoint["federation"])
    except (ValueError, KeyError, IndexError) as error:
        raise RunDirectoryError(
            f"{stored.path}: checkpoint.pt does not fit ({error}); go on with the data and model it was made with"
        ) from error


def _data_of(config: Config, federation: Played) -> str:
    """A fingerprint of data given in Python or by path; data sets by name are told by their settings."""
    own = config.data.dataset == CUSTOM or kind_of(config.data.dataset)
    return federation.data.fingerprint() if own else config.data.dataset


def settled(config: Config) -> dict[str, Any]:
    """What cannot change once a run has begun: all but its length (unless its learning rates depend on that), where the
    data lie and how it is executed."""
    tables = config.tables()
    del tables["run"], tables["data"]["dir"]
    tables["data"]["dataset"] = kind_of(config.data.dataset) or config.data.dataset
    if config.train.schedule != "cosine":
        del tables["train"]["rounds"]
    return {f"{section}.{key}": value for section, own in tables.items() for key, value in own.items()}


def _names(data: FederatedData) -> dict[str, list[str]]:
    """Of classes and of clients, where they have any."""
    named = {"classes": data.names, "client_names": data.client_names}
    return {key: list(names) for key, names in named.items() if names}


def _validated(measured: Evaluation) -> float | None:
    """V-acc; None where no client that was evaluated has set anything aside."""
    return _finite(measured.validation.accuracy) if measured.validation is not None else None


def _per_client(measured: Evaluation) -> list[float | None]:
    return [_finite(value) for value in measured.per_client]


def _finite(value: float) -> float | None:
    """JSON has no NaN."""
    return value if isfinite(value) else None


def reached(measured: Sequence[float | None]) -> dict[str, float | None]:
    """Maximum over evaluations, mean of the last 10, and the last, of those there are; nothing yet is null."""
    values = [value for value in measured if value is not None]
    if not values:
        return {"max": None, "last10": None, "final": None}
    tail = values[-10:]
    return {"max": max(values), "last10": sum(tail) / len(tail), "final": values[-1]}


def mean_bytes(total: int, rounds: int) -> int | float:
    """A whole number where it is one; nothing before the first round."""
    return total / rounds if rounds and total % rounds else total // max(1, rounds)
