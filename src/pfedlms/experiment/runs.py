"""One run: begin it, resume it, load it from its folder, and use its results."""

from __future__ import annotations

import tomllib
import warnings
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pfedlms.engine import Federation, Traffic, processes
from pfedlms.errors import RunDirectoryError, StorageError, UsageError
from pfedlms.experiment.callbacks import watching
from pfedlms.experiment.config import Config, Tables, load_config, merge
from pfedlms.experiment.exporting import NO_BEST, Models, StateDict, client_number, open_models, write_models
from pfedlms.experiment.loop import Running, execute, or_leave
from pfedlms.experiment.prepare import NAMED, as_configured, prepare, with_constants
from pfedlms.experiment.problem import Problem, how_to_resume
from pfedlms.experiment.store import SERVER_AGAIN, RunDirectory
from pfedlms.experiment.summary import in_short, summarise
from pfedlms.report.figures import accuracy_curves
from pfedlms.report.results import described
from pfedlms.report.runs import RunLike, client_accuracies
from pfedlms.settings import CUSTOM


class Run:
    """One run and its results: from memory, or loaded from its folder, finished or not.

    `label` is what tables call it, `settings` its complete configuration by section, `metrics` the lines of
    metrics.jsonl, `summary` the content of summary.json, `directory` its folder, if it has one.
    """

    def __init__(
        self, config: Config, directory: Path | None = None, problem: Problem = NAMED, label: str = "",
        metrics: list[dict[str, Any]] | None = None, summary: dict[str, Any] | None = None, stopped: int = 0,
    ) -> None:  # fmt: skip
        self.config, self.directory, self.problem = config, directory, problem
        self.label = label or config.method
        self.settings: Tables = config.tables()
        self._federation: Federation | None = None
        self.stopped = stopped
        """The signal that asked it to stop (Ctrl-C is 2, SIGTERM 15); 0: none."""
        self._best_state: dict[str, Any] | None = None
        self._kept: list[StateDict] | None = None
        if metrics is not None:
            self.metrics = metrics
        if summary is not None:
            self.summary = summary

    def __repr__(self) -> str:
        """`Run(pfedlms on digits, 20 clients, 100 rounds: P-acc 97.31 %, mean of the last 10)`, and where."""
        return f"Run({in_short(self.summary)}{f', in {self.directory}' if self.directory else ''})"

    @cached_property
    def metrics(self) -> list[dict[str, Any]]:
        """One record per evaluation."""
        return self._stored.read_metrics()

    @cached_property
    def summary(self) -> dict[str, Any]:
        """As its process wrote it; made from its metrics where that one is missing or older than they are."""
        written = self._stored.read_summary()
        begun = {"round": 0, "bytes": asdict(Traffic()), "seconds": 0.0}
        last = self.metrics[-1] if self.metrics else begun
        if written is not None and written["rounds"] >= last["round"]:
            return written
        checkpoint = self._stored.load_checkpoint() or {}
        facts = checkpoint.get("facts") or {"parameters": checkpoint.get("parameters", 0)}
        return summarise(self.config, self.metrics, facts, "interrupted", last)

    @property
    def federation(self) -> Federation:
        """Clients and server as the run left them, in this process."""
        if self._federation is None:
            raise UsageError("federation: is there only in the process that trained, and not for the runs of a study")
        return self._federation

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
        return tuple(self.summary.get("classes") or map(str, range(self.trained().federation.data.classes)))

    @property
    def client_names(self) -> tuple[str, ...]:
        """Of all clients, in order: the keys of a dict of clients, or their numbers."""
        return tuple(self.summary.get("client_names") or map(str, range(self.summary["clients"])))

    @property
    def models(self) -> list[StateDict]:
        """Every client's model as a state dict."""
        return self._kept if self._kept is not None else self.trained().models()

    @property
    def best_models(self) -> list[StateDict]:
        """Every client's model after the round with the highest V-acc, `summary["best"]`; kept with
        `train.patience`."""
        return self.trained(best=True).models()

    def model(self, client: int | str, best: bool = False) -> nn.Module:
        """The model of one client, by number or name: a module with its weights, on the CPU, ready to predict. It takes
        samples as they were trained on; `summary["normalisation"]` says how images become such samples."""
        return self.trained(best).module(client_number(client, self.summary))

    def personalise(self, data: Any, *, local_steps: int | None = None, best: bool = False) -> nn.Module:
        """A model for a new device: what a client gets that joins after the last round (the shared model; where there
        is none w⁰), after its first local steps on `data` under the method's objective. On the CPU, ready to predict.

        Args:
            data: all that the device trains on, as samples and labels, `(x, y)`, or a Dataset; for a run on text the
            text, or `pfedlms.data.texts` with the run's own tokenizer. Samples are as `summary["normalisation"]` says.
            local_steps: how many steps it takes. Default: E, as in a round.
            best: after the round with the highest V-acc, which `train.patience` keeps, instead of the latest.
        """
        return self.trained(best).personalise(self.summary, self.problem, data, local_steps)

    def export(
        self, file: str | Path, *, client: int | str | None = None, shared: bool = False, best: bool = False
    ) -> None:
        """Write models; the suffix decides the format: `.pt` is a state dict that `torch.load` reads, `.onnx` a graph
        (extra `onnx`). Classes, shape and normalisation stand beside it in a JSON file, in ONNX as metadata.

        Args:
            file: where to write; for the models of all clients a folder, which gets client-0.pt, client-1.pt, …
            client: whose model, by number or name. Default: the models of all clients.
            shared: the shared model of the last round, before local steps, instead.
            best: after the round with the highest V-acc, which `train.patience` keeps, instead of the latest.
        """
        write_models(self.trained(best), self.summary, Path(file), client, shared)

    def to_pandas(self) -> Any:
        """One row per evaluation: what metrics.jsonl has of all clients together (extra `pandas`)."""
        lines = []
        for record in self.metrics:
            flat = {key: value for key, value in record.items() if not isinstance(value, list | dict)}
            lines.append(flat | {f"bytes_{way}": count for way, count in record["bytes"].items()})
        return data_frame([{"label": self.label, "seed": self.summary["seed"], **line} for line in lines])

    def plot(self, file: str | Path) -> None:
        """Draw accuracy against bytes; PNG, SVG or PDF by the suffix (extra `report`)."""
        plot_curves([self], Path(file))

    def resume(self, *, progress: bool | None = None, callbacks: Iterable[Any] | None = None) -> Run:
        """Play the rounds that are left of a run with a folder, with the objects it was given in Python."""
        if self.directory is None:
            raise UsageError("resume: this run has no folder; run it with out=DIR")
        with watching(progress, callbacks) as calls:
            return or_leave(self.reread().play(calls))

    def reread(self) -> Run:
        """As its folder has it now, or as it is planned."""
        if self.directory is None:
            return self
        return load_run(self.directory, self.problem, self.config.data.dir, self.label, self.config.to_toml())

    @property
    def interrupted(self) -> bool:
        """Whether rounds are left to play."""
        return bool(self.summary["status"] == "interrupted")

    @property
    def begun(self) -> bool:
        """Whether its folder is there."""
        return self.directory is not None and self._stored.config.is_file()

    @property
    def finished(self) -> bool:
        """Whether no round is left to play, as its folder says; one without a checkpoint starts over."""
        summary = self._stored.read_summary() if self.begun and self._stored.has_checkpoint else None
        if summary is None or summary.get("status") != "finished":
            return False
        return bool(summary.get("stopped_early")) or int(summary["rounds"]) >= self.config.train.rounds

    def play(self, callbacks: Sequence[Any] = (), begins: bool = False, profile: bool = False, **how: Any) -> Run:
        """The run after all rounds that are left, for callers that look at `stopped` themselves. The folder of one that
        `begins` is made once data and model are known to fit. With `profile` the federation's stopwatch runs; `how` are
        settings of [run] for this process."""
        stored = RunDirectory(self.directory) if self.directory else None
        if stored is not None and not begins:
            if stored.on_nodes:
                raise UsageError(f"{stored.path}: this is a run on nodes, which its server resumes; {SERVER_AGAIN}")
            if self.finished:  # nothing to play, so nothing to play it with
                return self
            self.problem.check_complete(self.config, stored.path)
        if processes.rank():
            return self._follow(self.config.with_run(**how), None if begins else stored)
        try:
            with stored or nullcontext():
                return self._lead(stored, callbacks, begins, profile, how)
        except StorageError as error:
            if self.begun:
                error.resume_with(f"`{how_to_resume(self.directory, self.settings)}`")
            raise

    def _lead(
        self, stored: RunDirectory | None, callbacks: Sequence[Any], begins: bool, profile: bool, how: dict[str, Any]
    ) -> Run:
        if stored is not None and not begins:
            stored.open()
        checkpoint = stored.load_checkpoint() if stored is not None and not begins else None
        earlier = (stored.read_summary() or {}).get("status") if stored is not None and not begins else None
        if stored is not None and checkpoint is None and earlier in ("finished", "interrupted"):
            warnings.warn(f"{stored.path}: checkpoint.pt is gone, so this run starts over", stacklevel=4)
        federation = prepare(self.config.with_run(**how).grouped_as(checkpoint), self.problem, shared=True)
        federation.watch.device = federation.model.device if profile else None
        complete = with_constants(self.config, federation.data)
        if stored is not None and begins:
            stored.create(complete.to_toml())
        elif stored is not None and complete != self.config:  # as studies of the last version began
            stored.write_config(complete.to_toml())
        if stored is not None and not complete.train.patience:  # a best round is kept for long, complete
            federation.use_folder(stored.path)
        config = complete.with_run(**how)
        playing = Running(config, federation, stored, self.label)
        with federation.lead() as end:
            summary, stopped = execute(playing, callbacks, checkpoint)
            end((config, playing.metrics, summary, stopped))
        done = Run(config, self.directory, self.problem, self.label, playing.metrics, summary, stopped)
        # Models of clients in other processes are read from the folder.
        done._federation = None if isinstance(federation, processes.SharedFederation) else federation
        done._best_state = playing.best_state
        return done

    def _follow(self, config: Config, stored: RunDirectory | None) -> Run:
        """On a rank above 0, which holds some of the clients and writes nothing: what rank 0 measured."""
        config = config.grouped_as(stored.load_checkpoint() if stored is not None else None)
        if config.run.device in ("auto", "cuda") and torch.cuda.is_available():
            config = config.with_run(device=f"cuda:{processes.local_rank() % torch.cuda.device_count()}")
        federation = prepare(config, self.problem, shared=True)
        assert isinstance(federation, processes.SharedFederation)
        with as_configured(config):
            config, metrics, summary, stopped = federation.serve()
        return Run(config, self.directory, self.problem, self.label, metrics, summary, stopped)

    def release(self, keep_models: bool) -> None:
        """Free the memory of the federation, perhaps keeping its models."""
        if self._federation is None:
            return
        self._kept = self.models if keep_models else None
        self._federation = None

    @property
    def _stored(self) -> RunDirectory:
        if self.directory is None:
            raise UsageError("models: were not kept in memory (a failed run, or more than 1 GiB of them); give out=DIR")
        return RunDirectory(self.directory)

    def trained(self, best: bool = False) -> Models:
        """The models of the run: from memory, or from its folder."""
        if best and self.directory is None:
            if self._federation is None or self._best_state is None:
                raise UsageError(f"best_models: {NO_BEST}")
            return Models(self.config, self._federation, True, self._best_state)
        if self._federation is not None and not best:
            return Models(self.config, self._federation, True)
        return open_models(self._stored, self.config, self.problem, best)


def begin(config: Config, problem: Problem = NAMED, callbacks: Sequence[Any] = (), profile: bool = False) -> Run:
    """Train from a checked configuration; without `run.out` nothing is written."""
    run = Run(config, Path(config.run.out) if config.run.out else None, problem)
    return run.play(callbacks, begins=True, profile=profile)


def load_run(
    directory: str | Path, problem: Problem = NAMED, data_dir: str | None = None, label: str = "", planned: str = ""
) -> Run:
    """The run in `directory`, finished or not; needs no data. `data_dir` is where these are now, if they were moved,
    `planned` the configuration of a run that has not begun."""
    stored = RunDirectory(Path(directory))
    given = {} if stored.config.is_file() else tomllib.loads(planned)
    if not stored.config.is_file() and not given:
        missing = "config.toml is missing" if stored.path.is_dir() else "there is no such folder"
        raise RunDirectoryError(f"{stored.path}: no run here ({missing})")
    moved = {"data": {"dir": str(data_dir)}} if data_dir else {}
    config = load_config(None if given else stored.config, merge(given, moved), stored=True)
    return Run(config, stored.path, problem, label)


def per_client(run: Run) -> list[dict[str, Any]]:
    """A row per client: number, name if it has one, training samples, and P-acc after the last round, or in its last
    evaluation where the run did not finish. Of nodes with data of their own the samples are what nodes sent."""
    stored, config = run._stored, run.config
    checkpoint = stored.load_checkpoint() or {}
    samples: Sequence[int | None] | None = checkpoint.get("samples")
    unknown = stored.on_nodes and config.data.dataset == CUSTOM
    if unknown:
        sent = checkpoint["federation"]["standing"]["samples"] if checkpoint else {}
        samples = [sent.get(client) for client in range(config.data.clients)] if sent else None
    accuracies, names = client_accuracies(run), run.summary.get("client_names")
    return [
        {
            "client": client,
            **({"name": names[client]} if names else {}),
            **({"train samples": samples[client] if samples else None} if samples or not unknown else {}),
            "P-acc": accuracies.get(client),
        }
        for client in range(run.summary["clients"])
    ]


def plot_curves(runs: Sequence[RunLike], file: Path) -> None:
    """Accuracy against bytes, one line per label."""
    figure = accuracy_curves(runs, against="bytes", title=" · ".join(described(runs).values()))
    if figure is not None:
        figure.save(file)


def data_frame(rows: Sequence[Mapping[str, Any]]) -> Any:
    """Rows as a DataFrame."""
    try:
        import pandas  # type: ignore[import-untyped,unused-ignore]
    except ImportError as error:
        raise UsageError("to_pandas: needs pandas; install it with: pip install 'pfedlms[pandas]'") from error
    return pandas.DataFrame(list(rows))
