"""Tables without results: the samples of every client, the size of messages, the plan of a run, and its profile."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import mean, median
from typing import Any

from pfedlms.report.results import partition_text
from pfedlms.report.runs import MIB
from pfedlms.report.tables import Column, Table, mib_text, table_from_records

ESTIMATED = (
    "an average message; one of stc, here with entries at random places, is up to a few percent longer or shorter, one "
    "of sketchvote that has a digest 8 bytes longer"
)
CATCHING_UP = "what returning clients receive to catch up, which depends on the clients that are drawn"


def message_table(records: Sequence[Mapping[str, Any]]) -> Table:
    """The table of `pfedlms bits`."""
    first = records[0]
    clients, participants = first["clients"], first["participants"]
    who = f"{participants} of {clients} clients per round" if participants < clients else f"{clients} clients"
    rows = [
        {
            **record,
            "name": f"{record['method']}, {record['downlink']} ↓" if "downlink" in record else record["method"],
            "mib": "≈" * record["estimated"] + mib_text(record["mib_per_round"]) + " +" * record["catches_up"],
        }
        for record in records
    ]
    intro = (
        "Bits of one client in one round, payload and framing. MiB: payload of all participants in a round, up and "
        "down."
    )
    intro += f" ≈: {ESTIMATED}." * any(record["estimated"] for record in records)
    intro += f" +: and {CATCHING_UP}." * any(record["catches_up"] for record in records)
    heads = {"up_payload_bits": "bits ↑", "up_framing_bits": "frame ↑", "down_payload_bits": "bits ↓",
             "down_framing_bits": "frame ↓"}  # fmt: skip
    counts = [Column(key, head, "{:,}".format) for key, head in heads.items()]
    columns = [Column("name", "method"), *counts, Column("mib", "MiB")]
    return Table(columns, rows, f"{first['model']}, {first['parameters']:,} parameters, {who}", intro)


def plan_table(documents: Sequence[Mapping[str, Any]]) -> Table:
    """The table of `pfedlms run --dry-run`: the layers of the model, with what is known before training."""
    (document,) = documents
    config, samples, memory, sent = (document[key] for key in ("config", "samples", "memory_bytes", "bytes_per_round"))
    data, train, names = config["data"], config["train"], document.get("classes", [])
    sampled = f", {document['participants']} of them in a round" * (document["participants"] < data["clients"])
    steps = f"{train['local_epochs']:g} epochs" if train.get("local_epochs") else f"{train['local_steps']} steps"
    title = [
        f"{config['method']['name']} on {data['dataset']}",
        f"{config['model']['name']}, {document['parameters']:,} parameters",
        f"{data['clients']} clients{sampled}, {partition_text(document, data)}",
        f"{train['rounds']} rounds of {steps}",
        document["device"],
    ]
    validation = f" and {samples['validation']:,} for validation" if "validation" in samples else ""
    more = f", not counting {CATCHING_UP}" * document["catches_up"] + f"; {ESTIMATED}" * document["estimated"]
    sizes = {part: f"{size / MIB:,.1f} MiB" for part, size in memory.items()}
    notes = [
        f"{samples['train']:,} training samples, {samples['smallest_client']} to {samples['largest_client']} per "
        f"client{validation}.",
        f"Classes: {', '.join(names[:10])}{f', … ({len(names)} in all)' * (len(names) > 10)}." if names else "",
        f"All participants send {sent['up_payload']:,} bytes per round and {sent['up_framing']:,} of framing, and "
        f"receive {sent['down_payload']:,} and {sent['down_framing']:,}; in the whole run "
        f"{document['total_bytes'] / MIB:,.2f} MiB{more}.",
        f"Memory: about {sizes['data']} of data, {sizes['clients']} kept by all clients, {sizes['working']} at work.",
    ]
    layers = [
        {key: value if isinstance(value, str) else f"{value:,}" for key, value in layer.items()}
        for layer in document["layers"]
    ]
    return table_from_records(layers, " · ".join(title), " ".join(filter(None, notes)))


def profile_table(seconds: Mapping[str, float], rounds: int) -> Table:
    """The table of `--profile`: time by stage, largest first."""
    total, ordered = sum(seconds.values()), sorted(seconds.items(), key=lambda item: -item[1])
    records = [
        {"stage": stage, "ms per round": f"{1e3 * time / rounds:.2f}", "share": f"{100 * time / total:.0f} %"}
        for stage, time in ordered
    ]
    return table_from_records(records, "time by stage")


_MAX_CLIENTS, _MAX_CLASSES = 40, 20


def client_table(document: Mapping[str, Any]) -> Table:
    """The table of `pfedlms data show`: samples of every client by part and by class. With many classes it shows how
    many a client has and the largest one. Of many clients it shows some, evenly spaced by size."""
    clients, classes = document["clients"], document["classes"]
    shown, many, notes = clients, len(classes) > _MAX_CLASSES, _balance_note(document)
    if len(clients) > _MAX_CLIENTS:
        ordered = sorted(clients, key=lambda client: -sum(client["classes"]))
        shown = [ordered[place * (len(ordered) - 1) // (_MAX_CLIENTS - 1)] for place in range(_MAX_CLIENTS)]
        notes += f" {len(shown)} of {len(clients)} clients, from the largest to the smallest; --json has all."
    heads = classes
    if not many and sum(map(len, classes)) > 40:  # names that would not stand side by side
        heads = [str(place) for place in range(len(classes))]
        notes += f" Classes: {', '.join(f'{place} {name}' for place, name in enumerate(classes))}."
    records = []
    for client in shown:
        counts, parts = client["classes"], ("train", "validation", "test")
        by_class = {f" {head}": count or "." for head, count in zip(heads, counts, strict=True)}
        largest = {"classes": _class_count(client), "largest": f"{classes[counts.index(max(counts))]}: {max(counts)}"}
        sizes = {part: client[part] for part in parts if part in client}
        records.append({"client": client["name"], **sizes, **(largest if many else by_class)})
    samples = f"{document['samples']:,} samples of {'x'.join(map(str, document['shape']))}"
    counts = f"{len(classes)} classes · {len(clients)} clients"
    title = [document["dataset"], samples, counts, partition_label(document), f"seed {document['seed']}"]
    return table_from_records(records, " · ".join(title), notes)


def partition_label(document: Mapping[str, Any]) -> str:
    """The scheme, with α where it has one."""
    alpha = f", α = {document['alpha']:g}" if "alpha" in document else ""
    return f"{document['partition']}{alpha}"


def _class_count(client: Mapping[str, Any]) -> int:
    return sum(count > 0 for count in client["classes"])


def _balance_note(document: Mapping[str, Any]) -> str:
    """How evenly samples and classes are spread over clients."""
    counts, unit = [client["classes"] for client in document["clients"]], document.get("unit", "samples")
    sizes, classes = list(map(sum, counts)), list(map(_class_count, document["clients"]))
    overall = [sum(column) for column in zip(*counts, strict=True)]
    largest = mean(max(client) / sum(client) for client in counts)
    return (
        f"{unit} per client: {min(sizes)} to {max(sizes)}, median {median(sizes):g}; classes per client: "
        f"{min(classes)} to {max(classes)}, median {median(classes):g}; largest class: {largest:.0%} of a client's "
        f"{unit} on average, {max(overall) / sum(overall):.0%} of all {unit}."
    )
