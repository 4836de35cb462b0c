"""What a method's messages cost, measured on messages that are encoded and decoded, before anything is trained."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch

from pfedlms.data.sources import DATASETS
from pfedlms.engine.federation import agreement, task_of
from pfedlms.engine.participation import Participation
from pfedlms.engine.reports import Traffic
from pfedlms.errors import ConfigError
from pfedlms.experiment.config import CUSTOM, Config, Tables, keys, load_config, merge, of_method
from pfedlms.experiment.prepare import train_settings
from pfedlms.methods import METHODS
from pfedlms.methods.contract import Method
from pfedlms.models import CohortModel, build
from pfedlms.wire.frames import SERVER, Intake, frame


def message_cost(method: Method) -> Traffic:
    """Bytes of one client in one round: a message of every kind at its largest size, encoded and decoded again. What
    catching up takes depends on who was away, so none of it is in here."""
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
    return total


def catches_up(config: Config, method: Method) -> bool:
    """Whether clients can miss answers that they have to be sent later, besides those `message_cost` counts."""
    return method.tracks and (method.task.participants < method.task.clients or config.run.lost > 0)


def bits_table(
    overrides: Mapping[str, Mapping[str, Any]] | None = None, classes: int | None = None
) -> list[dict[str, Any]]:
    """Cost of one client and round for the method named in `overrides`, or for all of them: `up_payload_bits`, …,
    `parameters`, and of a round `mib_per_round`."""
    wanted = merge({"data": {}, "method": {}}, overrides or {})
    named = wanted["method"].get("name")
    # Without a data set: the paper's inputs, 28x28 for dnn and 32x32 in colour for the VGGs.
    as_in_paper = "dataset" not in wanted["data"]
    if as_in_paper:
        wanted["data"]["dataset"] = "mnist"
    methods = [named] if named else list(METHODS)
    rows = []
    for name in methods:
        own = of_method(name, methods, wanted["method"])
        for choice in _downlinks(name, own):
            tables = {**wanted, "method": {**own, **choice, "name": name}}
            rows.append(_row(tables, classes, as_in_paper))
    return rows


def _downlinks(method: str, chosen: Mapping[str, Any]) -> list[dict[str, str]]:
    """The ways a method can answer its clients, its default first; one where there is no choice or it was made."""
    declared = keys([method]).get(("method", "downlink"))
    if declared is None or "downlink" in chosen:
        return [{}]
    return [{"downlink": choice} for choice in declared.metadata["choices"]()]


def _row(tables: Tables, classes: int | None, as_in_paper: bool) -> dict[str, Any]:
    config = load_config(None, tables)
    if CUSTOM in (config.data.dataset, config.model.name):
        raise ConfigError(
            ["--dataset, --model: got 'custom', expected names of `pfedlms datasets` and `pfedlms models`"]
        )
    if classes is not None and classes < 1:
        raise ConfigError([f"--classes: got {classes}, expected at least 1"])
    source = DATASETS[config.data.dataset]
    shape = (3, 32, 32) if as_in_paper and config.model.name != "dnn" else source.shape
    classes = classes or source.classes
    model = CohortModel(build(config.model.name, shape, classes, config.model.hidden, 0), torch.device("cpu"))
    who = Participation(config.data.clients, config.train.participation, seed=0)
    method = METHODS[config.method](task_of(model, classes, who, train_settings(config), seed=0), config.settings)
    cost = message_cost(method)
    return {
        "method": config.method,
        **({"downlink": config.settings.downlink} if hasattr(config.settings, "downlink") else {}),
        "model": config.model.name,
        "classes": classes,
        "clients": who.clients,
        "participants": who.count,
        "parameters": model.layout.dim,
        **{f"{part}_bits": 8 * count for part, count in asdict(cost).items() if part != "catch_up"},
        "catches_up": catches_up(config, method),
        "mib_per_round": who.count * (cost.up_payload + cost.down_payload) / (1 << 20),
    }
