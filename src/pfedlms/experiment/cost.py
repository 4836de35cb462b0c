"""What is known of a run before anything is trained: who holds which samples, bytes of messages, and memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import numpy as np
import torch

from pfedlms.data.partition import scheme_of
from pfedlms.data.sources import DATASETS
from pfedlms.engine import Federation
from pfedlms.engine.participation import Participation
from pfedlms.engine.reports import Traffic
from pfedlms.engine.terms import method_digest, task_of
from pfedlms.errors import ConfigError
from pfedlms.experiment.config import Config, Tables, for_method, keys, load_config, merge
from pfedlms.experiment.memory import needed_bytes
from pfedlms.experiment.prepare import NAMED, named_pool, partitioned
from pfedlms.methods import METHODS
from pfedlms.methods.contract import Method
from pfedlms.models import CohortModel, build
from pfedlms.wire.frames import SERVER, Intake, frame


def message_cost(method: Method) -> Traffic:
    """Bytes of one client in one round: a message of every kind at its largest size (with positions: at an average one,
    see `estimated`), encoded and decoded again. Bytes to catch up depend on which clients were absent, and are not
    included."""
    digest = method_digest(method)
    total = Traffic()
    for exchange in method.exchanges:
        for message, sender, samples in ((exchange.up, 0, 1), (exchange.down, SERVER, 0)):
            data = frame(message, message.example(), round=0, sender=sender, samples=samples, digest=digest)
            payload = Intake(message, digest, 0, (sender,)).accept(data).payload_bytes
            framing = len(data) - payload
            total += Traffic(0, 0, payload, framing) if sender == SERVER else Traffic(payload, framing)
    return total


def estimated(method: Method) -> bool:
    """Whether `message_cost` is of average messages, which real ones are near, and not of the largest."""
    messages = [message for exchange in method.exchanges for message in (exchange.up, exchange.down)]
    return any(message.size(message.example()) < message.max_bytes for message in messages)


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
        own = for_method(wanted, name, methods)["method"]
        downlink = keys([name]).get(("method", "downlink"))
        ways: list[dict[str, str]] = [{}]
        if downlink is not None and "downlink" not in own:  # all ways to answer its clients, its default first
            ways = [{"downlink": choice} for choice in downlink.metadata["choices"]()]
        rows += [_row({**wanted, "method": {**own, **way}}, classes, as_in_paper) for way in ways]
    return rows


def _row(tables: Tables, classes: int | None, as_in_paper: bool) -> dict[str, Any]:
    config = load_config(None, tables)
    NAMED.check_given(config, "data", "model")
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
        "estimated": estimated(method),
        "catches_up": catches_up(config, method),
        "mib_per_round": task.participants * (cost.up_payload + cost.down_payload) / (1 << 20),
    }


def method_of(config: Config, classes: int | None = None, shape: tuple[int, ...] | None = None) -> Method:
    """The method of a configuration, on the model it names, before anything is trained; data sets by name need not be
    there. `classes` and `shape` (of a sample) are those of the data, unless they are given."""
    own, known, clients = _inputs(config)
    classes = classes or known
    module = build(config.model.name, shape or own, classes, config.model.hidden, 0)
    who = Participation(clients, config.train.participation, seed=0)
    task = task_of(CohortModel(module, torch.device("cpu")), classes, who, config.train, seed=0)
    return METHODS[config.method](task, config.settings)


def _inputs(config: Config) -> tuple[tuple[int, ...], int, int]:
    """Shape of a sample, classes and clients; a user's own data are read for it."""
    if config.data.dataset in DATASETS:
        source = DATASETS[config.data.dataset]
        if source.is_text:
            vocabulary = 256 if config.data.tokens == "bytes" else source.classes
            return (config.data.window,), vocabulary, config.data.clients
        return source.shape, source.classes, config.data.clients
    pool = named_pool(config)
    given = scheme_of(config.data.partition, pool.owner) == "given"
    return pool.x.shape[1:], len(pool.names), len(pool.owners) if given else config.data.clients


def plan_json(config: Config, federation: Federation) -> dict[str, Any]:
    """The plan as data: configuration, layer table, bytes and memory."""
    layout, sketched = federation.method.sketched or (federation.model.layout, None)
    layers: list[dict[str, Any]] = [
        {"name": layer.name, "offset": layer.offset, "size": layer.size, "pad": layer.pad} for layer in layout.layers
    ]
    for layer, entries in zip(layers, sketched or (), strict=sketched is not None):
        layer["sketch"] = entries
    data, participants = federation.data, federation.participation.count
    kept, working = needed_bytes(federation, config.train)
    # What is sent to clients that come back depends on who is drawn, so it is in no plan.
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
        "estimated": estimated(federation.method),
        "catches_up": catches_up(config, federation.method),
        "notes": _notes(config, federation),
        "memory_bytes": {"data": data.x.nbytes + data.y.nbytes, "clients": kept, "working": working},
    }


def _notes(config: Config, federation: Federation) -> list[str]:
    """What is allowed and hardly meant."""
    layout, sketched = federation.method.sketched or (federation.model.layout, ())
    pads = [layer.pad for layer in layout.layers]
    if max(pads) == 1 or not sketched or max(sketched) > 1:
        return []
    return [
        f"method.ratio = {config.settings.ratio:g} keeps a single entry of every layer, the fewest there can be; the "
        f"largest layer keeps more from {2 / max(pads):.2g} on"
    ]


def holdings(config: Config) -> dict[str, Any]:
    """The data set, its partition, and of every client the samples of each part, and how many samples (of text: tokens)
    it has of each class."""
    pool = named_pool(config)
    data = partitioned(config, pool)
    parts = {"train": data.train, "test": data.test, **({"validation": data.validation} if data.validation else {})}
    labels = data.y.numpy()
    clients = []
    for client in range(data.clients):
        held = {part: own[client] for part, own in parts.items()}
        counts = np.bincount(labels[np.concatenate(list(held.values()))].reshape(-1), minlength=data.classes)
        name = data.client_names[client] if data.client_names else str(client)
        sizes = {part: len(own) for part, own in held.items()}
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
