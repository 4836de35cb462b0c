"""One run: start it, resume it, load it from its folder, and use its results."""

from __future__ import annotations

import tomllib
import warnings
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from functools import cached_property
from math import nan
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pfedlms.engine import Federation, Traffic, processes
from pfedlms.errors import RunDirectoryError, StorageError, UsageError
from pfedlms.experiment.callbacks import callbacks_with_progress
from pfedlms.experiment.config import Config, Tables, load_config, merge
from pfedlms.experiment.exporting import NO_BEST, RunModels, StateDict, client_number, load_models, write_models
from pfedlms.experiment.loop import ActiveRun, raise_if_stopped, run_rounds
from pfedlms.experiment.prepare import NAMED_PROBLEM, execution_settings, prepare, with_normalisation
from pfedlms.experiment.problem import Problem, resume_instruction
from pfedlms.experiment.store import RESTART_SERVER, RunDirectory
from pfedlms.experiment.summary import one_line_summary, summarise
from pfedlms.report.figures import accuracy_curves
from pfedlms.report.results import describe_runs
from pfedlms.report.runs import RunLike, client_accuracies
from pfedlms.settings import CUSTOM


class Run:
    """One run and its results: from memory, or loaded from its folder, finished or not.

    `label` is what tables call it, `settings` its complete configuration by section, `metrics` the lines of
    metrics.jsonl, `summary` the content of summary.json, `directory` its folder, if it has one.
    """

    def __init__(
        self, config: Config, directory: Path | None = None, problem: Problem = NAMED_PROBLEM, label: str = "",
        metrics: list[dict[str, Any]] | None = None, summary: dict[str, Any] | None = None, stopped: int = 0,
    ) -> None:  # fmt: skip
        self.config, self.directory, self.problem = config, directory, problem
        self.label = label or config.method
        self.settings: Tables = config.tables()
        self._federation: Federation | None = None
        self.stopped = stopped
        """The signal that asked it to stop (Ctrl-C is 2, SIGTERM 15); 0: none."""
        self._best_state: dict[str, Any] | None = None
        self._models_in_memory: list[StateDict] | None = None
        if metrics is not None:
            self.metrics = metrics
        if summary is not None:
            self.summary = summary

    def __repr__(self) -> str:
        """`Run(pfedlms on digits, 20 clients, 100 rounds: P-acc 97.31 %, mean of the last 10)`, and where."""
        return f"Run({one_line_summary(self.summary)}{f', in {self.directory}' if self.directory else ''})"

    @cached_property
    def metrics(self) -> list[dict[str, Any]]:
        """One record per evaluation."""
        return self._stored.read_metrics()

    @cached_property
    def summary(self) -> dict[str, Any]:
        """The content of summary.json; computed from the metrics where the file is missing or older than they are."""
        summary = self._stored.read_summary()
        totals = self.metrics[-1] if self.metrics else {"round": 0, "bytes": asdict(Traffic()), "seconds": 0.0}
        if summary is None or summary["rounds"] < totals["round"]:
            checkpoint = self._stored.load_checkpoint()
            facts = checkpoint["facts"] if checkpoint else {}
            summary = summarise(self.config, self.metrics, facts, "interrupted", totals)
        is_running = summary["status"] == "interrupted" and self._stored.is_locked
        return {**summary, "status": "running"} if is_running else summary

    @property
    def federation(self) -> Federation:
        """Clients and server in this process, in their state at the end of the run."""
        if self._federation is None:
            raise UsageError("federation: is there only in the process that trained, and not for the runs of a study")
        return self._federation

    @property
    def accuracy(self) -> float:
        """P-acc, mean of the last 10 evaluations, in percent; NaN where nothing finite was measured."""
        last10 = self.summary["accuracy"]["last10"]
        return nan if last10 is None else float(last10)

    @property
    def validation_accuracy(self) -> float | None:
        """V-acc, mean of the last 10 evaluations, in percent, to choose settings by; None without `data.validation`."""
        v_acc: dict[str, float | None] = self.summary.get("validation_accuracy", {})
        return v_acc.get("last10")

    @property
    def classes(self) -> tuple[str, ...]:
        """What the outputs of the models stand for, in order: the names of the classes, or their numbers."""
        return tuple(self.summary.get("classes") or map(str, range(self.trained_models().federation.data.classes)))

    @property
    def client_names(self) -> tuple[str, ...]:
        """Names of all clients, in order: the keys of a dict of clients, or their numbers."""
        return tuple(self.summary.get("client_names") or map(str, range(self.summary["clients"])))

    @property
    def models(self) -> list[StateDict]:
        """Every client's model as a state dict."""
        return self._models_in_memory if self._models_in_memory is not None else self.trained_models().models()

    @property
    def best_models(self) -> list[StateDict]:
        """Every client's model after the round with the highest V-acc, `summary["best"]`; kept with
        `train.patience`."""
        return self.trained_models(best=True).models()

    def model(self, client: int | str, best: bool = False) -> nn.Module:
        """The model of one client, by number or name: a module with its weights, on the CPU, ready to predict. It takes
        samples as they were trained on; `summary["normalisation"]` says how images become such samples."""
        models = self.trained_models(best)
        return models.module(models.model(client_number(client, self.summary)))

    def personalise(self, data: Any, *, local_steps: int | None = None, best: bool = False) -> nn.Module:
        """A model for a new device: the model that a client gets when it joins after the last round (the shared model,
        or w⁰ if there is none), after its first local steps on `data` under the method's objective. On the CPU, ready
        to predict.

        Args:
            data: all that the device trains on, as samples and labels, `(x, y)`, or a Dataset; for a run on text the
            text, or `pfedlms.data.texts` with the run's own tokenizer. Normalise samples as `summary["normalisation"]`
            says.
            local_steps: how many steps it takes. Default: E, as in a round.
            best: start from the round with the highest V-acc, which `train.patience` keeps, instead of the latest.
        """
        return self.trained_models(best).personalise(self.summary, self.problem, data, local_steps)

    def export(
        self, file: str | Path, *, client: int | str | None = None, shared: bool = False, best: bool = False
    ) -> None:
        """Write models; the suffix decides the format: `.pt` is a state dict that `torch.load` reads, `.onnx` a graph
        (extra `onnx`). Classes, shape and normalisation are in a JSON file beside it, in ONNX in the metadata.

        Args:
            file: where to write; for the models of all clients a folder, which gets client-0.pt, client-1.pt, …
            client: whose model, by number or name. Default: the models of all clients.
            shared: the shared model of the last round, before local steps, instead.
            best: models after the round with the highest V-acc, which `train.patience` keeps, instead of the latest.
        """
        write_models(self.trained_models(best), self.summary, Path(file), client, shared)

    def to_pandas(self) -> Any:
        """One row per evaluation: the fields of metrics.jsonl, without those of single clients (extra `pandas`)."""
        rows = []
        for record in self.metrics:
            row = {"label": self.label, "seed": self.summary["seed"]}
            row |= {key: value for key, value in record.items() if not isinstance(value, list | dict)}
            rows.append(row | {f"bytes_{name}": count for name, count in record["bytes"].items()})
        return data_frame(rows)

    def plot(self, file: str | Path) -> None:
        """Draw accuracy against bytes; PNG, SVG or PDF by the suffix (extra `report`)."""
        plot_curves([self], Path(file))

    def resume(self, *, progress: bool | None = None, callbacks: Iterable[Any] | None = None) -> Run:
        """Train the remaining rounds of a run with a folder, with the objects that it was given in Python."""
        if self.directory is None:
            raise UsageError("resume: this run has no folder; run it with out=DIR")
        with callbacks_with_progress(progress, callbacks) as all_callbacks:
            return raise_if_stopped(self.reload().train(all_callbacks))

    def reload(self) -> Run:
        """The run in its present state on disk, or as it is planned."""
        if self.directory is None:
            return self
        return load_run(self.directory, self.problem, self.config.data.dir, self.label, self.config.to_toml())

    @property
    def interrupted(self) -> bool:
        """Whether rounds remain to be trained."""
        return self.summary["status"] in ("interrupted", "running")

    @property
    def has_started(self) -> bool:
        """Whether its folder has a config.toml."""
        return self.directory is not None and self._stored.config.is_file()

    @property
    def finished(self) -> bool:
        """Whether its folder says that no round remains. A run without a checkpoint is not finished: it starts over."""
        summary = self._stored.read_summary() if self.has_started and self._stored.has_checkpoint else None
        if summary is None or summary.get("status") != "finished":
            return False
        return bool(summary.get("stopped_early")) or int(summary["rounds"]) >= self.config.train.rounds

    def train(self, callbacks: Sequence[Any] = (), new: bool = False, profile: bool = False, **overrides: Any) -> Run:
        """Train all remaining rounds, for callers that look at `stopped` themselves. A `new` run gets its folder once
        data and model are known to fit. With `profile` the federation measures the time of every stage. `overrides` are
        settings of [run] for this process."""
        stored = RunDirectory(self.directory) if self.directory else None
        if stored is not None and not new:
            if stored.on_nodes:
                raise UsageError(f"{stored.path}: this is a run on nodes, which its server resumes; {RESTART_SERVER}")
            if self.finished:  # so the objects given in Python are not needed
                return self
            self.problem.check_given(self.config, directory=stored.path)
        if processes.rank():
            return self._train_as_follower(self.config.with_run(**overrides), None if new else stored)
        try:
            with stored or nullcontext():
                return self._train_as_leader(stored, callbacks, new, profile, overrides)
        except StorageError as error:
            if self.has_started:
                error.resume_with(f"`{resume_instruction(self.directory, self.settings)}`")
            raise

    def _train_as_leader(
        self, stored: RunDirectory | None, callbacks: Sequence[Any], new: bool, profile: bool, overrides: dict[str, Any]
    ) -> Run:
        """Train in a single process, or on rank 0 of several: it holds the server and writes the files."""
        checkpoint = None
        if stored is not None and not new:
            stored.open()
            checkpoint = stored.load_checkpoint()
            status = (stored.read_summary() or {}).get("status")
            if checkpoint is None and status in ("finished", "interrupted"):
                warnings.warn(f"{stored.path}: checkpoint.pt is gone, so this run starts over", stacklevel=4)
        config = self.config.with_run(**overrides).with_cohort_size_of(checkpoint)
        federation = prepare(config, self.problem, shared=True)
        federation.watch.device = federation.model.device if profile else None
        complete = with_normalisation(self.config, federation.data)
        if stored is not None and new:
            stored.create(complete.to_toml())
        if stored is not None and not complete.train.patience:  # best.pt must not refer to rows that are overwritten
            federation.use_folder(stored.path)
        config = complete.with_run(**overrides)
        active = ActiveRun(config, federation, stored, self.label, self.problem)
        with federation.lead() as end:
            summary, stopped = run_rounds(active, callbacks, checkpoint)
            end((config, active.metrics, summary, stopped))
        result = Run(config, self.directory, self.problem, self.label, active.metrics, summary, stopped)
        # Models of clients in other processes are read from the folder.
        result._federation = None if isinstance(federation, processes.SharedFederation) else federation
        result._best_state = active.best_state
        return result

    def _train_as_follower(self, config: Config, stored: RunDirectory | None) -> Run:
        """Train on a rank above 0, which holds some of the clients and writes nothing. Returns what rank 0 measured."""
        config = config.with_cohort_size_of(stored.load_checkpoint() if stored is not None else None)
        if config.run.device in ("auto", "cuda") and torch.cuda.is_available():
            config = config.with_run(device=f"cuda:{processes.local_rank() % torch.cuda.device_count()}")
        federation = prepare(config, self.problem, shared=True)
        assert isinstance(federation, processes.SharedFederation)
        with execution_settings(config):
            config, metrics, summary, stopped = federation.serve()
        return Run(config, self.directory, self.problem, self.label, metrics, summary, stopped)

    def release(self, keep_models: bool) -> None:
        """Free the memory of the federation; keep the clients' models if asked to."""
        if self._federation is not None:
            self._models_in_memory = self.models if keep_models else None
            self._federation = None

    @property
    def _stored(self) -> RunDirectory:
        if self.directory is None:
            raise UsageError("models: were not kept in memory (a failed run, or more than 1 GiB of them); give out=DIR")
        return RunDirectory(self.directory)

    def trained_models(self, best: bool = False) -> RunModels:
        """The models of the run: from memory, or from its folder."""
        if best and self.directory is None and self._best_state is None:
            raise UsageError(f"best_models: {NO_BEST}")
        if self._federation is not None and (self.directory is None or not best):
            return RunModels(self.config, self._federation, True, self._best_state if best else None)
        return load_models(self._stored, self.config, self.problem, best)


def start_run(
    config: Config, problem: Problem = NAMED_PROBLEM, callbacks: Sequence[Any] = (), profile: bool = False
) -> Run:
    """Train a new run; without `run.out` nothing is written."""
    run = Run(config, Path(config.run.out) if config.run.out else None, problem)
    return run.train(callbacks, new=True, profile=profile)


def load_run(
    directory: str | Path,
    problem: Problem = NAMED_PROBLEM,
    data_dir: str | None = None,
    label: str = "",
    planned: str = "",
) -> Run:
    """The run in `directory`, finished or not; needs no data. `data_dir` is the folder of the data set's files, if they
    were moved. `planned` is the configuration, as TOML, of a run of a study that may not have started."""
    stored = RunDirectory(Path(directory))
    file = stored.config if stored.config.is_file() else None
    if file is None and not planned:
        missing = "config.toml is missing" if stored.path.is_dir() else "there is no such folder"
        raise RunDirectoryError(f"{stored.path}: no run here ({missing})")
    moved = {"data": {"dir": str(data_dir)}} if data_dir else {}
    config = load_config(file, merge({} if file else tomllib.loads(planned), moved), stored=True)
    return Run(config, stored.path, problem, label)


def per_client(run: Run) -> list[dict[str, Any]]:
    """A row per client: number, name if it has one, number of training samples (nodes with data of their own have
    reported it), and P-acc after the last round, or in its last evaluation if the run did not finish."""
    stored, config = run._stored, run.config
    checkpoint = stored.load_checkpoint() or {}
    samples: Sequence[int | None] | None = checkpoint.get("samples")
    own_data = stored.on_nodes and config.data.dataset == CUSTOM
    if own_data:
        reported = checkpoint["federation"]["standing"]["samples"] if checkpoint else {}
        samples = [reported.get(client) for client in range(config.data.clients)] if reported else None
    accuracies, names = client_accuracies(run), run.summary.get("client_names")
    return [
        {
            "client": client,
            **({"name": names[client]} if names else {}),
            **({"train samples": samples[client] if samples else None} if samples or not own_data else {}),
            "P-acc": accuracies.get(client),
        }
        for client in range(run.summary["clients"])
    ]


def plot_curves(runs: Sequence[RunLike], file: Path) -> None:
    """Accuracy against bytes, one line per label."""
    figure = accuracy_curves(runs, against="bytes", title=describe_runs(runs))
    if figure is not None:
        figure.save(file)


def data_frame(rows: Sequence[Mapping[str, Any]]) -> Any:
    """Rows as a DataFrame of pandas."""
    try:
        import pandas  # type: ignore[import-untyped,unused-ignore]
    except ImportError as error:
        raise UsageError("to_pandas: needs pandas; install it with: pip install 'pfedlms[pandas]'") from error
    return pandas.DataFrame(list(rows))
