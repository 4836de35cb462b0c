"""What is known of a run before it trains: who holds which samples, bytes of messages, and memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import numpy as np
import torch

from pfedlms.data.sources import DATASETS
from pfedlms.engine import Federation
from pfedlms.engine.participation import Participation
from pfedlms.engine.reports import Traffic
from pfedlms.engine.terms import method_digest, task_of
from pfedlms.errors import ConfigError
from pfedlms.experiment.config import Config, Tables, load_config, merge, setting_fields, tables_for_method
from pfedlms.experiment.memory import needed_bytes
from pfedlms.experiment.prepare import NAMED_PROBLEM, load_named_pool, partition_pool
from pfedlms.methods import METHODS
from pfedlms.methods.contract import Method
from pfedlms.models import CohortModel, build
from pfedlms.wire.frames import HEADER_BYTES, SERVER, Intake, frame


def message_cost(method: Method) -> Traffic:
    """Bytes of one client in one round, without catching up. A message of every kind is encoded and decoded again, at
    its largest size, or at an average size if it sends positions, see `is_estimate`."""
    digest = method_digest(method)
    total = Traffic()
    for exchange in method.exchanges:
        for message, sender, samples in ((exchange.up, 0, 1), (exchange.down, SERVER, 0)):
            data = frame(message, message.example(), round=0, sender=sender, samples=samples, digest=digest)
            Intake(message, digest, 0, (sender,)).accept(data)
            payload, framing = len(data) - HEADER_BYTES, HEADER_BYTES
            total += Traffic(0, 0, payload, framing) if sender == SERVER else Traffic(payload, framing)
    return total


def is_estimate(method: Method) -> bool:
    """Whether `message_cost` counts average messages instead of the largest; real messages have nearly this size."""
    messages = [message for exchange in method.exchanges for message in (exchange.up, exchange.down)]
    return any(message.size(message.example()) < message.max_bytes for message in messages)


def catches_up(config: Config, method: Method) -> bool:
    """Whether clients can miss answers, which the server sends later; `message_cost` does not count these."""
    return method.tracks and (method.task.participants < method.task.clients or config.run.lost > 0)


def bits_table(
    overrides: Mapping[str, Mapping[str, Any]] | None = None, classes: int | None = None
) -> list[dict[str, Any]]:
    """Cost of one client and round for the method named in `overrides`, or for all of them: `up_payload_bits`, …,
    `parameters`, and of a round `mib_per_round`."""
    tables = merge({"data": {}, "method": {}}, overrides or {})
    method = tables["method"].get("name")
    # Without a data set: the paper's inputs, 28x28 for dnn and 32x32 in colour for the VGGs.
    as_in_paper = "dataset" not in tables["data"]
    if as_in_paper:
        tables["data"]["dataset"] = "mnist"
    methods = [method] if method else list(METHODS)
    rows = []
    for name in methods:
        settings = tables_for_method(tables, name, methods)["method"]
        downlink = setting_fields([name]).get(("method", "downlink"))
        downlinks: list[dict[str, str]] = [{}]
        if downlink is not None and "downlink" not in settings:  # a row for each kind of answer, the default first
            downlinks = [{"downlink": choice} for choice in downlink.metadata["choices"]()]
        rows += [_bits_row({**tables, "method": {**settings, **choice}}, classes, as_in_paper) for choice in downlinks]
    return rows


def _bits_row(tables: Tables, classes: int | None, as_in_paper: bool) -> dict[str, Any]:
    config = load_config(None, tables)
    NAMED_PROBLEM.check_given(config, "data", "model")
    if classes is not None and classes < 1:
        raise ConfigError([f"classes: got {classes}, expected at least 1"])
    method = method_of(config, classes, (3, 32, 32) if as_in_paper and config.model.name != "dnn" else None)
    task = method.task
    cost = message_cost(method)
    return {
        "method": config.method,
        **({"downlink": config.settings.downlink} if hasattr(config.settings, "downlink") else {}),
        "model": config.model.name,
        "classes": task.classes,
        "clients": task.clients,
        "participants": task.participants,
        "parameters": task.layout.dim,
        **{f"{part}_bits": 8 * count for part, count in asdict(cost).items() if part != "catch_up"},
        "estimated": is_estimate(method),
        "catches_up": catches_up(config, method),
        "mib_per_round": task.participants * (cost.up_payload + cost.down_payload) / (1 << 20),
    }


def method_of(config: Config, classes: int | None = None, shape: tuple[int, ...] | None = None) -> Method:
    """The method of a configuration, on the model that it names, before anything is trained. The files of a named data
    set are not needed. `classes` and `shape` (of a sample) are those of the data, unless they are given."""
    data_shape, data_classes, clients = _input_sizes(config)
    classes = classes or data_classes
    module = build(config.model.name, shape or data_shape, classes, config.model.hidden, 0)
    participation = Participation(clients, config.train.participation, seed=0)
    task = task_of(CohortModel(module, torch.device("cpu")), classes, participation, config.train, seed=0)
    return METHODS[config.method](task, config.settings)


def _input_sizes(config: Config) -> tuple[tuple[int, ...], int, int]:
    """Shape of a sample, number of classes and of clients; data given by path are read for this."""
    if config.data.dataset in DATASETS:
        source = DATASETS[config.data.dataset]
        if source.is_text:
            vocabulary = 256 if config.data.tokens == "bytes" else source.classes
            return (config.data.window,), vocabulary, config.data.clients
        return source.shape, source.classes, config.data.clients
    pool = load_named_pool(config)
    has_owners = pool.resolve_scheme(config.data.partition) == "given"
    return pool.x.shape[1:], len(pool.names), len(pool.client_names) if has_owners else config.data.clients


def plan_json(config: Config, federation: Federation) -> dict[str, Any]:
    """The plan of a run, for --json: configuration, layer table, bytes and memory."""
    layout, sketched = federation.method.sketched or (federation.model.layout, None)
    layers: list[dict[str, Any]] = [
        {"name": layer.name, "offset": layer.offset, "size": layer.size, "pad": layer.pad} for layer in layout.layers
    ]
    for layer, entries in zip(layers, sketched or (), strict=sketched is not None):
        layer["sketch"] = entries
    data, participants = federation.data, federation.participation.count
    kept, working = needed_bytes(federation, config.train)
    # Bytes to catch up depend on which clients take part, so no plan has them.
    sent = {name: participants * count for name, count in asdict(message_cost(federation.method)).items()}
    return {
        "config": config.tables(),
        "partition": federation.data.scheme,
        "device": str(federation.model.device),
        "samples": {
            "train": sum(data.samples),
            **({"validation": sum(map(len, data.validation))} if data.validation else {}),
            "smallest_client": min(data.samples),
            "largest_client": max(data.samples),
        },
        **({"classes": list(data.names)} if data.names else {}),
        **({"client_names": list(data.client_names)} if data.client_names else {}),
        "participants": participants,
        "parameters": federation.model.layout.dim,
        "layers": layers,
        "bytes_per_round": sent,
        "total_bytes": sum(sent.values()) * config.train.rounds,
        "estimated": is_estimate(federation.method),
        "catches_up": catches_up(config, federation.method),
        "memory_bytes": {"data": data.x.nbytes + data.y.nbytes, "clients": kept, "working": working},
    }


def holdings(config: Config) -> dict[str, Any]:
    """The data set, its partition, and each client's number of samples by part and by class (of text: tokens)."""
    pool = load_named_pool(config)
    data = partition_pool(config, pool)
    parts = {"train": data.train, "test": data.test, **({"validation": data.validation} if data.validation else {})}
    labels = data.y.numpy()
    clients = []
    for client in range(data.clients):
        samples = {part: indices[client] for part, indices in parts.items()}
        counts = np.bincount(labels[np.concatenate(list(samples.values()))].reshape(-1), minlength=data.classes)
        name = data.client_names[client] if data.client_names else str(client)
        sizes = {part: len(indices) for part, indices in samples.items()}
        clients.append({"client": client, "name": name, **sizes, "classes": counts.tolist()})
    return {
        "dataset": config.data.dataset,
        "samples": len(labels),
        "shape": list(data.shape),
        "partition": data.scheme,
        **({"alpha": config.data.alpha} if data.scheme in ("dirichlet", "quantity") else {}),
        "seed": config.run.seed,
        **({"unit": "tokens"} if data.tokens else {}),
        "classes": [repr(name)[1:-1] for name in pool.names or map(str, range(data.classes))],
        "clients": clients,
    }
