"""Models of a run: from memory, or from its folder, without the data."""

from __future__ import annotations

import copy
import json
import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from pfedlms import rng
from pfedlms.data import FederatedData, Pool, read, texts
from pfedlms.data.pool import class_numbers
from pfedlms.data.text import KINDS
from pfedlms.engine import Federation
from pfedlms.errors import DataError, RunDirectoryError, UsageError, did_you_mean
from pfedlms.experiment.config import Config
from pfedlms.experiment.loop import load_into
from pfedlms.experiment.prepare import execution_settings, normalisation, prepare
from pfedlms.experiment.problem import Problem, match_input_type, resume_instruction, trial_outputs
from pfedlms.experiment.store import RunDirectory
from pfedlms.files import write_atomically, write_failure, write_text
from pfedlms.methods import METHODS
from pfedlms.models import CohortModel
from pfedlms.models.intake import trainable_module
from pfedlms.settings import CUSTOM

StateDict = dict[str, torch.Tensor]
SUFFIXES = (".pt", ".pth", ".onnx")
NO_BEST = (
    "no best round was kept; run with data.validation and train.patience (as many as there are evaluations, to keep it "
    "without stopping early)"
)


@dataclass(frozen=True)
class RunModels:
    """The models of a run, after its last round or, with `state`, as of an earlier one."""

    config: Config
    federation: Federation
    has_data: bool
    """Whether clients that took no part in the last phase can take its steps now."""
    state: dict[str, Any] | None = None

    @property
    def untrained(self) -> tuple[int, ...]:
        """Clients that, without their data, have not taken the last phase's local steps."""
        present = set(self.federation.present_ids)
        return () if self.has_data else tuple(k for k in range(self.federation.data.clients) if k not in present)

    def model(self, client: int) -> StateDict:
        with self._state_loaded():
            return self.federation.client_state_dict(client, trains=self.has_data)

    def shared(self) -> StateDict | None:
        """The model that all clients share, before local steps; None if the method has none."""
        with self._state_loaded():
            return self.federation.shared_state_dict()

    def models(self) -> list[StateDict]:
        with self._state_loaded():
            models = self.federation.models(trains=self.has_data)
            return [model for _, model in sorted(models, key=lambda pair: pair[0])]

    def module(self, state: StateDict) -> nn.Module:
        """A module with these weights, on the CPU, ready to predict."""
        module = copy.deepcopy(self.federation.model.module).cpu()
        module.load_state_dict(state)
        return module.eval()

    def personalise(
        self, summary: Mapping[str, Any], problem: Problem, data: Any, local_steps: int | None = None
    ) -> nn.Module:
        """See `Run.personalise`."""
        if local_steps is not None and (not isinstance(local_steps, int) or local_steps < 1):
            raise UsageError(f"local_steps: got {local_steps!r}, expected at least 1; leave it out for E steps")
        model, run_data = self.federation.model, self.federation.data
        pool = _read_data(data, summary, self.config.data.stride, run_data, problem)
        own_data = _device_data(pool, run_data, summary)
        if own_data.shape != run_data.shape:
            raise DataError(f"data: got samples of shape {own_data.shape}, expected {run_data.shape}, as the run had")
        constants = normalisation(self.config)
        if constants and min(constants["mean"]) > 0 and own_data.x.min() >= 0:  # darker than the mean is negative
            raise DataError(
                f"data: got samples from {own_data.x.min():g} to {own_data.x.max():g}, but the run normalised its "
                "images; pass (raw / scale − mean) / std with the numbers of summary['normalisation']"
            )
        own_data = match_input_type(model.module, own_data)
        criterion = problem.criterion(trial_outputs(model, own_data, self.config), own_data)
        with self._state_loaded():
            return self.module(self.federation.personalise(own_data.to(model.device), criterion, local_steps))

    @contextmanager
    def _state_loaded(self) -> Iterator[None]:
        """Inside this context the federation has `state`, if there is one; afterwards its latest state again."""
        with execution_settings(self.config):
            if self.state is None:
                yield
                return
            latest = self.federation.state()
            try:
                self.federation.load(self.state)
                yield
            finally:
                self.federation.load(latest)


def _read_data(data: Any, summary: Mapping[str, Any], stride: int, like: FederatedData, problem: Problem) -> Pool:
    """The data of a new device, read; a text is cut into windows as the run's text was."""
    if isinstance(data, str):
        kind = summary.get("tokens")
        if kind not in KINDS:
            raise DataError(
                "data: got a text, but the run was not trained on characters or bytes; pass samples and labels, "
                "(x, y), or pfedlms.data.texts({'me': text}, tokens=tokenizer)"
            )
        return texts({"data": data}, kind, like.shape[0], stride, vocabulary=summary["classes"])
    is_pool = isinstance(data, Pool | np.ndarray | torch.Tensor)  # `read` refuses a single array, as in `run`
    pool = read(data if is_pool else [data], problem.loss is not None)
    if len(pool.client_indices) > 1 or any(isinstance(own, tuple) for own in pool.client_indices):
        raise DataError(
            "data: got two data sets or those of several clients, expected all that one device trains on, (x, y)"
        )
    return pool


def _device_data(pool: Pool, like: FederatedData, summary: Mapping[str, Any]) -> FederatedData:
    """The data of a new device as those of one client, which trains on all samples."""
    names = tuple(summary.get("classes") or map(str, range(like.classes)))
    if pool.tokens and pool.names != names:
        raise DataError("data: got another vocabulary than the run's; pass the text itself, or vocabulary=run.classes")
    if not like.classes and pool.names:
        raise DataError(f"data: got the classes {', '.join(pool.names)}, expected numbers, as the run had")
    if not like.classes:
        pool = replace(pool, classes=0)
    elif not pool.tokens:
        pool = replace(pool, y=class_numbers(pool, names, warns=True), classes=len(names), names=names)
    train = np.arange(len(pool.y))
    x, y = torch.from_numpy(pool.x), torch.from_numpy(pool.y)
    return FederatedData(x, y, (train,), (train,), pool.classes, names=pool.names, tokens=pool.tokens)


def load_models(stored: RunDirectory, config: Config, problem: Problem, best: bool = False) -> RunModels:
    """The models in a run directory, of the latest checkpoint or of the best round. Data are read only if some client
    took no part in the last phase."""
    directory = stored.path
    if stored.on_nodes:
        raise UsageError(
            f"{directory}: this is a run on nodes, whose models are on the nodes; take one out with Node.model()"
        )
    problem.check_given(config, "model")
    checkpoint = stored.load_checkpoint(best)
    if checkpoint is None:
        missing = NO_BEST if best else f"no checkpoint yet; `{resume_instruction(directory, config.tables())}` first"
        raise RunDirectoryError(f"{directory}: {missing}")
    all_present = len(checkpoint["federation"]["trained"]) == len(checkpoint["samples"])
    config = config.with_cohort_size_of(checkpoint)
    kind, _, number = config.run.device.partition(":")
    if kind == "cuda" and int(number or 0) >= torch.cuda.device_count():  # trained on another machine
        config = config.with_run(device="auto")
    federation = None
    if not all_present and (problem.own_pool is not None or config.data.dataset != CUSTOM):
        with suppress(DataError):
            federation = prepare(config, problem)
    has_data = federation is not None
    if federation is None:
        data = _data_without_samples(checkpoint)
        # Lazy layers need the shape of samples; their weights come from the run's seed, as when it began.
        sample, key = data.x.new_zeros(2, *data.shape), rng.stream(config.run.seed, "initial")
        module = trainable_module(problem.module(config, data), sample, key)
        federation = Federation(
            METHODS[config.method], config.settings, CohortModel(module, torch.device("cpu")), data, config.train,
            config.run.seed, cohort_size=config.run.cohort_size,
        )  # fmt: skip
    federation.use_folder(directory)
    load_into(federation, checkpoint, config, stored, problem.digests(), same_data=has_data)
    return RunModels(config, federation, has_data or all_present)


def _data_without_samples(checkpoint: Mapping[str, Any]) -> FederatedData:
    """Data with the shape of samples, the classes and each client's number of training samples, but no samples."""
    samples = checkpoint["samples"]
    return FederatedData(
        x=torch.empty(0, *checkpoint["shape"], dtype=torch.int64 if checkpoint["integers"] else torch.float32),
        y=torch.empty(0, *(checkpoint["shape"] if checkpoint["tokens"] else ()), dtype=torch.int64),
        train=tuple(np.arange(count) for count in samples),
        test=(np.empty(0, dtype=np.int64),) * len(samples),
        classes=checkpoint["classes"],
        tokens=checkpoint["tokens"],
    )


def client_number(client: int | str, summary: Mapping[str, Any]) -> int:
    """The number of a client, given by name or number. A text is a name first, since a name may look like a number. A
    number that is also another client's name is refused."""
    names, clients = list(summary.get("client_names", [])), summary["clients"]
    if str(client) in names:
        number = names.index(str(client))
        if not isinstance(client, str) and client != number and 0 <= client < clients:
            raise UsageError(
                f"client: got {client}, which is the number of client {names[client]!r} and the name of client number "
                f"{number}; give the name as text, {str(client)!r}, or run.client_names[{client}]"
            )
        return number
    if str(client).isdecimal() and int(client) < clients:
        return int(client)
    by_name = f", or a name: {did_you_mean(str(client), names)}" if names else ""
    raise UsageError(f"client: got {client}, expected 0 to {clients - 1}{by_name}")


def write_models(
    models: RunModels, summary: Mapping[str, Any], target: Path, client: int | str | None = None, shared: bool = False
) -> None:
    """See `Run.export`."""
    clients, is_single = models.federation.data.clients, shared or client is not None
    number = None if shared or client is None else client_number(client, summary)
    if is_single != (target.suffix in SUFFIXES):
        expected = "expected a .pt (a state dict for torch.load) or .onnx file" if is_single else "expected a folder"
        whose = "one model" if is_single else "the models of all clients"
        raise UsageError(f"{target}: got the suffix {target.suffix!r} for {whose}, {expected}")
    stale = [] if shared else [k for k in models.untrained if number in (None, k)]
    if stale:
        who = f"client {client}" if client is not None else f"{len(stale)} of {clients} clients"
        warnings.warn(
            f"{who} took no part in the last round, and its data are not here: the model is the one before local "
            "steps; data_dir=DIR says where the data are",
            stacklevel=2,
        )
    about = {
        "method": models.config.method,
        "client": number,
        "shape": list(models.federation.data.shape),
        "classes": summary.get("classes") or models.federation.data.classes,
        **({"tokens": summary["tokens"]} if "tokens" in summary else {}),
        "normalisation": normalisation(models.config),
    }
    text = json.dumps(about, indent=2) + "\n"
    state = models.shared() if shared else None if number is None else models.model(number)
    if shared and state is None:
        raise UsageError(f"{models.config.method} has no shared model; name a client with client=K")
    try:
        if state is None:
            target.mkdir(parents=True, exist_ok=True)
            for client_id, own in enumerate(models.models()):
                write_atomically(target / f"client-{client_id}.pt", partial(torch.save, own))
            write_text(target / "models.json", text)
        elif target.suffix == ".onnx":
            _write_onnx(models, state, target, about)
        else:
            write_atomically(target, partial(torch.save, state))
            write_text(target.with_suffix(".json"), text)
    except (OSError, RuntimeError, ValueError) as error:
        raise UsageError(write_failure(target, error)) from error


def _write_onnx(models: RunModels, state: StateDict, file: Path, about: Mapping[str, Any]) -> None:
    try:
        import onnx
        import onnxscript  # noqa: F401 - torch.onnx needs it
    except ImportError as error:
        raise UsageError(f"{file}: .onnx needs the extra onnx; install it with: pip install 'pfedlms[onnx]'") from error
    data = models.federation.data
    sample = torch.zeros(2, *data.shape, dtype=data.x.dtype)
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)  # else a line for every package that it does not find
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the exporter, about its own future
        program = torch.onnx.export(
            models.module(state), (sample,), dynamo=True, verbose=False, input_names=["x"],
            output_names=["outputs"], dynamic_shapes=({0: torch.export.Dim("batch")},),
        )  # fmt: skip
    assert program is not None
    proto = program.model_proto
    onnx.helper.set_model_props(proto, {"pfedlms": json.dumps(about)})
    write_atomically(file, lambda opened: opened.write(proto.SerializeToString()))
