"""Models out of a run directory: from configuration and checkpoint alone, without the data."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pfedlms.data import DATASETS, FederatedData
from pfedlms.engine import Federation
from pfedlms.errors import DataError, RunDirectoryError, UsageError, did_you_mean
from pfedlms.experiment.config import CUSTOM, Config
from pfedlms.experiment.prepare import ModelLike, as_configured, module_of, prepare, train_settings
from pfedlms.experiment.record import load_into
from pfedlms.experiment.run import grouped, open_run
from pfedlms.experiment.store import RunDirectory, write_atomically
from pfedlms.experiment.study import manifest_of, read_manifest
from pfedlms.methods import METHODS
from pfedlms.models import CohortModel

StateDict = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Checkpointed:
    """The models of a run as of its latest checkpoint."""

    config: Config
    federation: Federation
    has_data: bool
    """Whether who took no part in the last phase can take its steps now, as `Result.models` has it."""

    @property
    def untrained(self) -> tuple[int, ...]:
        """Whose model is, for want of data, the one before the last phase's local steps."""
        here = set(self.federation.present_ids)
        return () if self.has_data else tuple(k for k in range(self.federation.data.clients) if k not in here)

    def model(self, client: int) -> StateDict:
        with as_configured(self.config):
            return self.federation.client_state_dict(client, trains=self.has_data)

    def models(self) -> list[StateDict]:
        with as_configured(self.config):
            models = self.federation.models(trains=self.has_data)
            return [model for _, model in sorted(models, key=lambda pair: pair[0])]

    def shared(self) -> StateDict | None:
        """The model all clients share, before local steps; None for a method that has none."""
        with as_configured(self.config):
            return self.federation.shared_state_dict()


def open_checkpoint(
    directory: str | Path,
    data: Any = None,
    model: ModelLike = None,
    data_dir: str | None = None,
    best: bool = False,
) -> Checkpointed:
    """The models in a run directory, of the latest checkpoint or of the best round. Data are looked for only where
    somebody took no part in the last phase."""
    refuse_study(Path(directory), "export")
    stored, config = open_run(directory, data_dir)
    if stored.on_nodes:
        raise UsageError(
            f"{directory}: this is a run on nodes, whose models lie with the nodes, each in its state directory; "
            "take one out there, with Node.model()"
        )
    if config.model.name == CUSTOM and model is None:
        raise UsageError(
            f"{directory}: this run's model was given in Python; "
            f"use pfedlms.export({str(directory)!r}, 'model.pt', client=0, model=model)"
        )
    checkpoint = stored.load_best() if best else stored.load_checkpoint()
    if checkpoint is None and best:
        raise RunDirectoryError(
            f"{directory}: no best round was kept; run with data.validation and train.patience (as many as there are "
            "evaluations never stops)"
        )
    if checkpoint is None:
        raise RunDirectoryError(f"{directory}: no checkpoint yet; `pfedlms resume {directory}` first")
    hollow = hollow_data(config, checkpoint)
    everybody = len(checkpoint["federation"]["trained"]) == config.data.clients
    federation = None
    if (not everybody or hollow is None) and (data is not None or config.data.dataset != CUSTOM):
        try:
            federation = prepare(grouped(config, checkpoint), data, model)
        except DataError:
            if hollow is None:
                raise
    if federation is None and hollow is None:
        raise UsageError(f"{directory}: checkpoint.pt does not tell the shape of samples; give the data again")
    has_data = federation is not None
    if federation is None:
        assert hollow is not None
        federation = _without_data(grouped(config, checkpoint), hollow, model)
    load_into(federation, checkpoint, config, stored, same_data=has_data)
    return Checkpointed(config, federation, has_data or everybody)


def export(
    directory: str | Path,
    file: str | Path,
    *,
    client: int | str | None = None,
    shared: bool = False,
    best: bool = False,
    data: Any = None,
    model: ModelLike = None,
    data_dir: str | None = None,
) -> None:
    """Write models of a run, as of its latest checkpoint, as state dicts that `torch.load` reads.

    Args:
        directory: the run directory; it is enough, unless the model was given in Python.
        file: where to write; for the models of all clients a folder, which gets client-0.pt, client-1.pt, …
        client: whose model, by number or name. Default: everybody's.
        shared: the shared model of the last round, before local steps, instead.
        best: after the round with the highest V-acc, which `train.patience` keeps, instead of the latest.
        data: given in Python, if they were. Needed, as are the files of a data set by name, for clients that took no
        part in the last phase: they hear its answer and take its steps. Without data they have heard the answer.
        model: given in Python, if it was.
        data_dir: where the data set's files are now.
    """
    if shared and client is not None:
        raise UsageError("client: got a client and shared=True, expected one of them")
    kept = open_checkpoint(directory, data, model, data_dir, best)
    clients = kept.federation.data.clients
    if client is not None:
        client = _number(client, client_names(Path(directory)), clients)
    target = Path(file)
    if shared:
        found = kept.shared()
        if found is None:
            raise UsageError(f"{directory}: {kept.config.method} has no shared model; name a client with --client K")
        _write(target, found)
        return
    stale = [k for k in kept.untrained if client in (None, k)]
    if stale:
        who = f"client {client}" if client is not None else f"{len(stale)} of {clients} clients"
        warnings.warn(
            f"{who} took no part in the last round, and its data are not here: the model is the one before local "
            "steps; --data-dir says where the data are",
            stacklevel=2,
        )
    if client is not None:
        _write(target, kept.model(client))
        return
    try:
        target.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{target}: cannot be written ({error.strerror})") from error
    for number, each in enumerate(kept.models()):
        _write(target / f"client-{number}.pt", each)


def client_names(directory: Path) -> list[str]:
    """Of a run whose clients have names; known once it has a summary."""
    summary = RunDirectory(directory).read_summary() or {}
    return list(summary.get("client_names", []))


def _number(client: int | str, names: list[str], clients: int) -> int:
    """Which client is meant; a name goes before a number, since names may be numbers."""
    if str(client) in names:
        return names.index(str(client))
    if str(client).isdecimal() and int(client) < clients:
        return int(client)
    named = f", or a name: {did_you_mean(str(client), names)}" if names else ""
    raise UsageError(f"--client: got {client}, expected 0 to {clients - 1}{named}")


def refuse_study(directory: Path, command: str) -> None:
    """A study's folder where a run's is expected: name its runs."""
    manifest = manifest_of(directory)
    if manifest is not None:
        runs = list(read_manifest(manifest)["runs"])
        shown = ", ".join(str(directory / name) for name in runs[:6]) + (", …" if len(runs) > 6 else "")
        raise UsageError(f"{directory}: holds {len(runs)} runs; {command} one of them: {shown}")


def hollow_data(config: Config, checkpoint: Mapping[str, Any]) -> FederatedData | None:
    """What a checkpoint tells of the data: shape, classes, and how many samples each client trains on, but none of
    them; None where it does not, and the data set is not known by name either."""
    if "shape" in checkpoint:
        shape, classes, samples = tuple(checkpoint["shape"]), checkpoint["classes"], checkpoint["samples"]
    elif config.data.dataset in DATASETS:  # a checkpoint of before these were in it
        source = DATASETS[config.data.dataset]
        shape, classes, samples = source.shape, source.classes, [1] * config.data.clients
    else:
        return None
    nothing = np.empty(0, dtype=np.int64)
    return FederatedData(
        x=torch.empty(0, *shape),
        y=torch.empty(0, dtype=torch.int64),
        train=tuple(np.arange(count) for count in samples),
        test=(nothing,) * len(samples),
        classes=classes,
    )


def _without_data(config: Config, hollow: FederatedData, model: ModelLike) -> Federation:
    cohort_model = CohortModel(module_of(config, model, hollow), torch.device("cpu"))
    return Federation(
        METHODS[config.method], config.settings, cohort_model, hollow, train_settings(config), config.run.seed,
        cohort_size=config.run.cohort_size,
    )  # fmt: skip


def _write(file: Path, model: StateDict) -> None:
    try:
        write_atomically(file, lambda opened: torch.save(model, opened))
    except (OSError, RuntimeError, ValueError) as error:
        raise UsageError(f"{file}: cannot be written ({getattr(error, 'strerror', None) or error})") from error
