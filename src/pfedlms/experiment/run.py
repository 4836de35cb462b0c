"""One run, from a configuration or from Python objects: begin it, go on with it, take a model out of it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from pfedlms.engine.stopwatch import Stopwatch
from pfedlms.errors import RunDirectoryError, UsageError
from pfedlms.experiment.config import CUSTOM, Config, load_config, method_in
from pfedlms.experiment.play import Progress, Result, execute
from pfedlms.experiment.prepare import ModelLike, Own, as_configured, prepare, python_overrides
from pfedlms.experiment.record import load_into
from pfedlms.experiment.store import RunDirectory, write_atomically
from pfedlms.step.own import PerSample


def run(
    data: Any = None,
    model: ModelLike = None,
    *,
    method: str | None = None,
    config: str | Path | None = None,
    out: str | Path | None = None,
    progress: Progress | None = None,
    loss: PerSample | None = None,
    metric: PerSample | None = None,
    **settings: Any,
) -> Result:
    """Train one federation.

    Args:
        data: a data set's name; one to be partitioned, as arrays `(x, y)`, a torch or Hugging Face Dataset, or a tuple
        of two, (train, test); or a list or dict of clients, each with a (train, test) pair or one data set. Default:
        the embedded digits.
        model: a name of the zoo, a factory that returns an `nn.Module`, or a module (its weights are w⁰). Default: the
        data set's own.
        method: name of the method. None, the default, is the one `config` names, or pfedlms.
        config: a TOML file with settings.
        out: run directory; without one nothing is written.
        progress: told what happens.
        loss: what local steps minimise in place of cross-entropy: a function of outputs `[batch, …]` and targets
        `[batch, …]` of one client that gives one number a sample. Targets may then be anything numeric, `[samples, …]`.
        metric: what is measured in place of accuracy, likewise; the higher the better. Default: accuracy where targets
        are classes and outputs are one number a class, else minus the loss.
        settings: any key of a section (`rounds=50, alpha=0.1, strength=0.05, seed=1, …`).
    """
    method = method_in(config) if method is None else method
    own = Own(loss, metric)
    data = own.read(data)
    overrides = python_overrides(data, model, [method], settings)
    overrides["method"]["name"] = method
    if out:
        overrides["run"]["out"] = str(out)
    return begin(load_config(config, own.into(overrides)), progress or Progress(), data, model, own=own)


def begin(
    config: Config, progress: Progress, data: Any = None, model: ModelLike = None, profile: bool = False,
    own: Own | None = None,
) -> Result:  # fmt: skip
    """Train from a checked configuration; without `run.out` nothing is written, with `profile` the federation's
    stopwatch runs."""
    federation = prepare(config, data, model, own or Own())
    if profile:
        federation.watch = Stopwatch(federation.model.device)
    if not config.run.out:
        return execute(config, federation, progress)
    with RunDirectory(Path(config.run.out)) as directory:
        directory.create(config.to_toml())
        return execute(config, federation, progress, directory)


def resume(
    directory: str | Path, data: Any = None, model: ModelLike = None, progress: Progress | None = None,
    loss: PerSample | None = None, metric: PerSample | None = None,
) -> Result:  # fmt: skip
    """Go on with the run in `directory`; data, model, loss and metric are needed again where they were given in
    Python."""
    stored, config = _stored(directory)
    for section, given, name in (("data", data, config.data.dataset), ("model", model, config.model.name)):
        if name == CUSTOM and given is None:
            raise UsageError(
                f"{directory}: this run's {section} was given in Python; "
                f"go on with pfedlms.resume({str(directory)!r}, data, model)"
            )
    own = Own(loss, metric)
    for name in own.missing(config):
        raise UsageError(
            f"{directory}: this run's {name} was given in Python; "
            f"go on with pfedlms.resume({str(directory)!r}, data, model, {name}={name})"
        )
    for name, function in vars(own).items():
        if function is not None and getattr(config.train, name) != CUSTOM:
            raise UsageError(f"{directory}: this run has no {name} of its own; leave {name} out")
    with stored:
        stored.open()
        checkpoint = stored.load_checkpoint()
        federation = prepare(_grouped(config, checkpoint), data, model, own)
        return execute(config, federation, progress or Progress(), stored, checkpoint)


def _stored(directory: str | Path) -> tuple[RunDirectory, Config]:
    stored = RunDirectory(Path(directory))
    if not stored.config.is_file():
        raise RunDirectoryError(f"{stored.path}: no run here (config.toml is missing)")
    return stored, load_config(stored.config, schema_errors="run directory")


def _grouped(config: Config, checkpoint: Mapping[str, Any] | None) -> Config:
    """Where the size of cohorts follows the memory at hand, it stays what it was: dropout depends on the grouping."""
    return config.with_run(cohort_size=config.run.cohort_size or (checkpoint["cohort_size"] if checkpoint else 0))


def export(directory: str | Path, client: int, file: str | Path) -> None:
    """Write the model of one client, as of the latest checkpoint, as a state dict that `torch.load` reads."""
    stored, config = _stored(directory)
    if CUSTOM in (config.data.dataset, config.model.name, config.train.loss, config.train.metric):
        raise UsageError(
            f"{directory}: this run's data, model or loss was given in Python; "
            f"take the models from pfedlms.resume({str(directory)!r}, data, model).models"
        )
    checkpoint = stored.load_checkpoint()
    if checkpoint is None:
        raise RunDirectoryError(f"{directory}: no checkpoint yet; `pfedlms resume {directory}` first")
    federation = prepare(_grouped(config, checkpoint))
    if not 0 <= client < federation.data.clients:
        raise UsageError(f"--client: got {client}, expected 0 to {federation.data.clients - 1}")
    load_into(federation, checkpoint, config, stored)
    with as_configured(config):
        model = federation.client_state_dict(client)
    try:
        write_atomically(Path(file), lambda opened: torch.save(model, opened))
    except (OSError, RuntimeError, ValueError) as error:
        raise UsageError(f"{file}: cannot be written ({getattr(error, 'strerror', None) or error})") from error
