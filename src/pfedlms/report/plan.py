"""What a run would do: `pfedlms run --dry-run`."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from pfedlms.engine import Federation
from pfedlms.experiment.config import Config
from pfedlms.experiment.cost import message_cost


def plan_json(config: Config, federation: Federation) -> dict[str, Any]:
    """The plan as data: configuration, layer table, bytes and memory."""
    layout, kept = federation.method.sketched or (federation.model.layout, None)
    layers: list[dict[str, Any]] = [
        {"name": layer.name, "offset": layer.offset, "size": layer.size, "pad": layer.pad} for layer in layout.layers
    ]
    for layer, entries in zip(layers, kept or (), strict=kept is not None):
        layer["sketch"] = entries
    cost = message_cost(federation.method, federation.data.clients)
    per_round = {name: count * federation.data.clients for name, count in asdict(cost.per_client).items()}
    return {
        "config": config.tables(),
        "device": str(federation.model.device),
        "samples": {
            "train": sum(federation.data.samples),
            "smallest_client": min(federation.data.samples),
            "largest_client": max(federation.data.samples),
        },
        "parameters": federation.model.layout.dim,
        "layers": layers,
        "bytes_per_round": per_round,
        "total_bytes": sum(per_round.values()) * config.train.rounds,
        "memory_bytes": memory_estimate(config, federation),
    }


def memory_estimate(config: Config, federation: Federation) -> dict[str, int]:
    """Bytes of the data, of the clients' kept state, and of the copies one local step makes of it (activations come on
    top)."""
    vector = 4 * federation.model.layout.dim
    data = federation.data.x.numel() * 4 + federation.data.y.numel() * 8
    return {"data": data, "clients": federation.kept_bytes, "working": 4 * federation.largest_cohort * vector}


def print_plan(config: Config, federation: Federation, console: Console) -> None:
    """The plan for people."""
    plan = plan_json(config, federation)
    samples, memory, traffic = plan["samples"], plan["memory_bytes"], plan["bytes_per_round"]
    console.print(
        f"[bold]{config.method}[/bold] on {config.data.dataset}, model {config.model.name}, "
        f"{plan['parameters']:,} parameters, on {plan['device']}"
    )
    console.print(
        f"{federation.data.clients} clients, α = {config.data.alpha:g}, {samples['train']:,} training samples "
        f"({samples['smallest_client']} to {samples['largest_client']} a client), {config.train.rounds} rounds of "
        f"{config.train.local_steps} steps"
    )
    table = Table(box=SIMPLE_HEAD, title="layers")
    for name in plan["layers"][0]:
        table.add_column(name, justify="left" if name == "name" else "right")
    for layer in plan["layers"]:
        table.add_row(*(value if isinstance(value, str) else f"{value:,}" for value in layer.values()))
    console.print(table)
    for way, label in (("up", "clients → server"), ("down", "server → clients")):
        console.print(
            f"{label}: {traffic[f'{way}_payload']:,} bytes a round and {traffic[f'{way}_framing']:,} of framing, "
            "all clients together"
        )
    console.print(f"whole run: {plan['total_bytes'] / 2**20:,.2f} MiB")
    parts = ", ".join(f"{name} {size / 2**20:,.1f} MiB" for name, size in memory.items())
    console.print(f"memory: about {parts}, plus activations")
