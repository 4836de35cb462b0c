"""What a method's messages cost, measured on messages that are encoded and decoded, before anything is trained."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch

from pfedlms.data.sources import DATASETS
from pfedlms.engine.federation import agreement, task_of
from pfedlms.engine.participation import Participation
from pfedlms.engine.reports import Traffic
from pfedlms.errors import ConfigError
from pfedlms.experiment.config import CUSTOM, Config, load_config
from pfedlms.experiment.prepare import train_settings
from pfedlms.methods import METHODS
from pfedlms.methods.contract import Method
from pfedlms.models import CohortModel, build
from pfedlms.wire.frames import SERVER, Intake, frame


@dataclass(frozen=True)
class Cost:
    """Bytes of one client in one round."""

    per_client: Traffic
    clients: int

    @property
    def mib_per_round(self) -> float:
        """Payload of all clients, up and down."""
        return self.clients * (self.per_client.up_payload + self.per_client.down_payload) / (1 << 20)


def message_cost(method: Method, clients: int) -> Cost:
    """Encode one message of every kind at its largest size, decode it again, and count its bytes."""
    digest = agreement(method)
    total = Traffic()
    for exchange in method.exchanges:
        for message, sender, samples in ((exchange.up, 0, 1), (exchange.down, SERVER, 0)):
            data = frame(message, message.example(), round=0, sender=sender, samples=samples, digest=digest)
            payload = Intake(message, digest, 0, (sender,)).accept(data).payload_bytes
            framing = len(data) - payload
            total += (
                Traffic(down_payload=payload, down_framing=framing) if sender == SERVER else Traffic(payload, framing)
            )
    return Cost(total, clients)


def bits_table(
    method: str | None = None,
    model: str | None = None,
    classes: int | None = None,
    clients: int | None = None,
    dataset: str | None = None,
    overrides: Mapping[str, Mapping[str, Any]] | None = None,
) -> list[dict[str, Any]]:
    """Cost of one client and round for one method, or for all of them: `up_payload_bits`, …, `parameters`,
    `mib_per_round`."""
    wanted: dict[str, dict[str, Any]] = {section: dict(values) for section, values in (overrides or {}).items()}
    if model:
        wanted.setdefault("model", {})["name"] = model
    if clients is not None:
        wanted.setdefault("data", {})["clients"] = clients
    # Without a data set: the paper's inputs, 28x28 for dnn and 32x32 in colour for the VGGs.
    dataset = dataset or wanted.get("data", {}).get("dataset")
    wanted.setdefault("data", {})["dataset"] = dataset or "mnist"
    rows = []
    for name in [method] if method else list(METHODS):
        own = {key: value for key, value in wanted.get("method", {}).items() if method or key in _keys(name)}
        chosen = [{**wanted, "method": {**own, **choice, "name": name}} for choice in _downlinks(name, own)]
        rows += [_row_of(tables, dataset, classes) for tables in chosen]
    return rows


def _downlinks(method: str, chosen: Mapping[str, Any]) -> list[dict[str, str]]:
    """The ways a method can answer its clients, its default first; one where there is no choice or it was made."""
    declared = {each.name: each for each in fields(METHODS[method].Settings)} if method in METHODS else {}
    if "downlink" not in declared or "downlink" in chosen:
        return [{}]
    return [{"downlink": choice} for choice in declared["downlink"].metadata["choices"]()]


def _row_of(tables: Mapping[str, Mapping[str, Any]], dataset: str | None, classes: int | None) -> dict[str, Any]:
    config = load_config(None, tables)
    if CUSTOM in (config.data.dataset, config.model.name):
        raise ConfigError(
            ["--dataset, --model: got 'custom', expected names of `pfedlms datasets` and `pfedlms models`"]
        )
    source = DATASETS[config.data.dataset]
    shape = source.shape if dataset or config.model.name == "dnn" else (3, 32, 32)
    if classes is not None and classes < 1:
        raise ConfigError([f"--classes: got {classes}, expected at least 1"])
    return _row(config, shape, classes or source.classes)


def _keys(method: str) -> set[str]:
    return {each.name for each in fields(METHODS[method].Settings)}


def _row(config: Config, shape: tuple[int, ...], classes: int) -> dict[str, Any]:
    model = CohortModel(build(config.model.name, shape, classes, config.model.hidden, 0), torch.device("cpu"))
    task = task_of(model, classes, Participation(config.data.clients, 1.0, 0), train_settings(config), seed=0)
    cost = message_cost(METHODS[config.method](task, config.settings), config.data.clients)
    bits = {f"{name}_bits": 8 * count for name, count in asdict(cost.per_client).items()}
    return {
        "method": config.method,
        **({"downlink": config.settings.downlink} if hasattr(config.settings, "downlink") else {}),
        "model": config.model.name,
        "classes": classes,
        "clients": config.data.clients,
        "parameters": model.layout.dim,
        **bits,
        "mib_per_round": cost.mib_per_round,
    }
