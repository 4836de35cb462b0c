"""What is shown without training: samples of every client, what messages cost, the plan of a run; and its profile."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import mean, median
from textwrap import wrap
from typing import Any

from rich.console import Console
from rich.text import Text

from pfedlms.report.results import partition_text
from pfedlms.report.runs import MIB
from pfedlms.report.tables import Column, Table, table_of


def bits(records: Sequence[Mapping[str, Any]]) -> Table:
    """The table of `pfedlms bits`."""
    first = records[0]
    all_clients, participants = first["clients"], first["participants"]
    some = participants < all_clients
    who = f"{participants} of {all_clients} clients per round" if some else f"{all_clients} clients"
    shown = [
        {
            **record,
            "name": f"{record['method']}, {record['downlink']} ↓" if "downlink" in record else record["method"],
            "up_per_parameter": record["up_payload_bits"] / record["parameters"],
            "down_per_parameter": record["down_payload_bits"] / record["parameters"],
            "mib": "≈" * record["estimated"] + _mib(record["mib_per_round"]) + " +" * record["catches_up"],
        }
        for record in records
    ]
    intro = (
        "Bits of one client in one round: payload, framing, and payload per parameter (/n). MiB: payload of all "
        "participants in a round, up and down."
    )
    intro += f" ≈: {ESTIMATED}." * any(record["estimated"] for record in records)
    intro += f" +: and {CATCHING_UP}." * any(record["catches_up"] for record in records)
    whole, share = "{:,}".format, "{:.3g}".format
    columns = [
        Column("name", "method"),
        Column("up_payload_bits", "bits ↑", whole), Column("up_framing_bits", "frame ↑", whole),
        Column("down_payload_bits", "bits ↓", whole), Column("down_framing_bits", "frame ↓", whole),
        Column("up_per_parameter", "/n ↑", share), Column("down_per_parameter", "/n ↓", share), Column("mib", "MiB"),
    ]  # fmt: skip
    return Table(columns, shown, f"{first['model']}, {first['parameters']:,} parameters, {who}", intro)


def _mib(value: float) -> str:
    return f"{value:,.2f}" if value >= 1 else f"{value:.3g}"


ESTIMATED = (
    "an average message; one of stc, here with entries at random places, is up to a few percent longer or shorter, one "
    "of sketchvote that has a digest 8 bytes longer"
)
CATCHING_UP = "what returning clients receive to catch up, which depends on the clients that are drawn"


def print_plan(plan: Mapping[str, Any], at_once: int, console: Console) -> None:
    """The plan of `pfedlms run --dry-run`; `at_once` clients train at the same time."""
    samples, memory, traffic = plan["samples"], plan["memory_bytes"], plan["bytes_per_round"]
    config, participants = plan["config"], plan["participants"]
    data, train, clients = config["data"], config["train"], config["data"]["clients"]
    aside = f" and {samples['validation']:,} for validation" if "validation" in samples else ""
    some = f", {participants} of them in a round" if participants < clients else ""
    lines = [
        f"{config['method']['name']} on {data['dataset']}, model {config['model']['name']}, "
        f"{plan['parameters']:,} parameters, on {plan['device']}",
        f"{clients} clients{some}, {partition_text(plan, data)}, {samples['train']:,} training samples "
        f"({samples['smallest_client']} to {samples['largest_client']} per client){aside}, {train['rounds']} rounds of "
        + (f"{train['local_epochs']:g} epochs" if train.get("local_epochs") else f"{train['local_steps']} steps"),
    ]
    if names := plan.get("classes"):
        lines.append(f"classes: {', '.join(names[:10])}" + f", … ({len(names)} in all)" * (len(names) > 10))
    _print(console, lines)
    layers = [
        {key: value if isinstance(value, str) else f"{value:,}" for key, value in layer.items()}
        for layer in plan["layers"]
    ]
    console.print(table_of(layers, "layers").rich())
    more = f", {ESTIMATED}" * plan["estimated"] + f", and {CATCHING_UP}" * plan["catches_up"]
    held, kept, working = (f"{memory[part] / MIB:,.1f} MiB" for part in ("data", "clients", "working"))
    _print(console, [
        *(
            f"{label}: {traffic[f'{way}_payload']:,} bytes per round and {traffic[f'{way}_framing']:,} of framing, all "
            "participants together"
            for way, label in (("up", "clients → server"), ("down", "server → clients"))
        ),
        f"whole run: {plan['total_bytes'] / MIB:,.2f} MiB{more}",
        *(f"note: {note}" for note in plan["notes"]),
        f"memory: about {held} of data, {kept} kept by all clients, {working} at work ({at_once} clients at once, "
        "activations included)",
    ])  # fmt: skip


def _print(console: Console, lines: Iterable[str]) -> None:
    for line in lines:
        console.print(line, markup=False)


def profile(spent: Mapping[str, float], rounds: int) -> Table:
    """The table of `--profile`: time by stage, largest first."""
    total, ordered = sum(spent.values()), sorted(spent.items(), key=lambda item: -item[1])
    records = [
        {"stage": stage, "ms per round": f"{1e3 * own / rounds:.2f}", "share": f"{100 * own / total:.0f} %"}
        for stage, own in ordered
    ]
    return table_of(records, "time by stage")


# --- samples of every client ---

_ROWS = 40
"""Of more clients than these some are shown."""
_SHADES = ((4, "█"), (2, "▓"), (1, "▒"), (1 / 2, "░"), (0, "·"))
"""For more than that many times an even share."""
_LEGEND = "Of a client's samples, against an even share: · up to half of it, ░ to all, ▒ to 2 times, ▓ to 4, █ more."
_SHORT = {"train": "train", "test": "test", "validation": "valid"}
_LONGEST = 12


def holdings_lines(document: Mapping[str, Any], width: int = 80) -> list[Text]:
    """Title, map and summary of the document of `experiment.holdings`, in lines of at most `width`. The map has counts
    where they fit, else shades. Where shades do not fit either, one column is several classes."""
    clients, classes = document["clients"], document["classes"]
    shown = _chosen(clients)
    left = _left(shown)
    room = width - len(left[0])
    widest = len(str(max(max(client["classes"]) for client in shown)))
    named = 1 + max(widest, *map(len, classes))
    numbered = 1 + max(widest, len(str(len(classes) - 1)))
    notes = []
    if named * len(classes) <= room:
        head, cells = _counts(shown, classes, named)
    elif numbered * len(classes) <= room:
        head, cells = _counts(shown, list(map(str, range(len(classes)))), numbered)
        notes.append("Classes: " + ", ".join(f"{place} {name}" for place, name in enumerate(classes)) + ".")
    else:
        together = -(-len(classes) // (room - 1))
        head, cells = Text(f" classes 0 to {len(classes) - 1}"), [_shaded(client, together) for client in shown]
        notes.append(f"{f'A column stands for {together} classes. ' * (together > 1)}{_LEGEND}")
    if len(shown) < len(clients):
        notes.append(f"{len(shown)} of {len(clients)} clients, from the largest to the smallest; --json has all.")
    rows = [Text(start) + row for start, row in zip(left, [head, *cells], strict=True)]
    words = [line for text in (*_summary(document), *notes) for line in wrap(text, width)]
    return [*map(Text, _title(document, width)), Text(), *rows, Text(), *map(Text, words)]


def _chosen(clients: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """All, or some that are evenly spaced when ordered by size."""
    if len(clients) <= _ROWS:
        return list(clients)
    ordered = sorted(clients, key=lambda client: -sum(client["classes"]))
    return [ordered[place * (len(ordered) - 1) // (_ROWS - 1)] for place in range(_ROWS)]


def _left(shown: Sequence[Mapping[str, Any]]) -> list[str]:
    """Names and sizes, a header first, all as wide as each other."""
    parts = [part for part in _SHORT if part in shown[0]]
    # Of a long name the end, in which long names mostly differ.
    names = [name if len(name) <= _LONGEST else "…" + name[1 - _LONGEST :] for name in (c["name"] for c in shown)]
    columns = [["client", *names]] + [[_SHORT[part], *(str(client[part]) for client in shown)] for part in parts]
    widths = [max(map(len, column)) for column in columns]
    return [
        "  ".join(cell.rjust(wide) for cell, wide in zip(row, widths, strict=True)) + " "
        for row in zip(*columns, strict=True)
    ]


def _counts(shown: Sequence[Mapping[str, Any]], names: Sequence[str], cell: int) -> tuple[Text, list[Text]]:
    """Numbers; the largest classes of a client are bold where there are colours."""
    rows = []
    for client in shown:
        row, total = Text(), sum(client["classes"])
        for count in client["classes"]:
            style = "dim" if not count else "bold reverse" if count > total / 2 else "bold" if count > total / 4 else ""
            row.append(" " * (cell - len(str(count))))
            row.append(str(count) if count else ".", style)
        rows.append(row)
    return Text("".join(name.rjust(cell) for name in names)), rows


def _shaded(client: Mapping[str, Any], together: int) -> Text:
    counts, total = client["classes"], sum(client["classes"])
    sums = [sum(counts[start : start + together]) for start in range(0, len(counts), together)]
    return Text(
        " "
        + "".join(next((shade for above, shade in _SHADES if each * len(sums) > above * total), " ") for each in sums)
    )


def _title(document: Mapping[str, Any], width: int) -> list[str]:
    """Broken between its parts only."""
    how = document["partition"] + (f", α = {document['alpha']:g}" if "alpha" in document else "")
    parts = (
        document["dataset"],
        f"{document['samples']:,} samples of {'x'.join(map(str, document['shape']))}",
        f"{len(document['classes'])} classes",
        f"{len(document['clients'])} clients",
        how,
        f"seed {document['seed']}",
    )
    lines = [parts[0]]
    for part in parts[1:]:
        longer = f"{lines[-1]} · {part}"
        lines = [*lines[:-1], longer] if len(longer) <= width else [*lines, part]
    return [piece for line in lines for piece in wrap(line, width)]


def _summary(document: Mapping[str, Any]) -> list[str]:
    clients = [client["classes"] for client in document["clients"]]
    unit, lines = document.get("unit", "samples"), []
    for what, numbers in (
        (unit, [sum(counts) for counts in clients]),
        ("classes", [sum(count > 0 for count in counts) for counts in clients]),
    ):
        lines.append(f"{what} per client: {min(numbers)} to {max(numbers)}, median {median(numbers):g}")
    largest = mean(max(counts) / sum(counts) for counts in clients)
    everybody = [sum(column) for column in zip(*clients, strict=True)]
    overall = max(everybody) / sum(everybody)
    lines.append(f"largest class: {largest:.0%} of a client's {unit} on average, {overall:.0%} of all {unit}")
    return lines
