"""What a run would do: `pfedlms run --dry-run`."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rich.console import Console

from pfedlms.engine import Federation
from pfedlms.experiment.config import Config
from pfedlms.experiment.cost import catches_up, message_cost
from pfedlms.experiment.memory import needed_bytes
from pfedlms.report.tables import CATCHING_UP, MIB, table


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
        "device": str(federation.model.device),
        "samples": {
            "train": sum(data.samples),
            "smallest_client": min(data.samples),
            "largest_client": max(data.samples),
        },
        "participants": participants,
        "parameters": federation.model.layout.dim,
        "layers": layers,
        "bytes_per_round": sent,
        "total_bytes": sum(sent.values()) * config.train.rounds,
        "catches_up": catches_up(config, federation.method),
        "memory_bytes": {"data": data.x.numel() * 4 + data.y.numel() * 8, "clients": kept, "working": working},
    }


def print_plan(config: Config, federation: Federation, console: Console) -> None:
    """The plan for people."""
    plan = plan_json(config, federation)
    samples, memory, traffic = plan["samples"], plan["memory_bytes"], plan["bytes_per_round"]
    clients, participants = federation.data.clients, plan["participants"]
    console.print(
        f"[bold]{config.method}[/bold] on {config.data.dataset}, model {config.model.name}, "
        f"{plan['parameters']:,} parameters, on {plan['device']}"
    )
    taking_part = f", {participants} of them in a round" if participants < clients else ""
    console.print(
        f"{clients} clients{taking_part}, α = {config.data.alpha:g}, {samples['train']:,} training samples "
        f"({samples['smallest_client']} to {samples['largest_client']} a client), {config.train.rounds} rounds of "
        f"{config.train.local_steps} steps"
    )
    rows = [[value if isinstance(value, str) else f"{value:,}" for value in layer.values()] for layer in plan["layers"]]
    console.print(table(plan["layers"][0], rows, "layers"))
    for way, label in (("up", "clients → server"), ("down", "server → clients")):
        console.print(
            f"{label}: {traffic[f'{way}_payload']:,} bytes a round and {traffic[f'{way}_framing']:,} of framing, "
            "all participants together"
        )
    more = f", and {CATCHING_UP}" if plan["catches_up"] else ""
    console.print(f"whole run: {plan['total_bytes'] / MIB:,.2f} MiB{more}")
    data, kept, working = (f"{memory[part] / MIB:,.1f} MiB" for part in ("data", "clients", "working"))
    console.print(
        f"memory: about {data} of data, {kept} kept by all clients, {working} at work "
        f"({federation.largest_cohort} at once, activations included)"
    )
