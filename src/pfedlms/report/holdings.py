"""Who holds what, as text for a terminal: one row per client, one column per class."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import mean, median
from textwrap import wrap
from typing import Any

from rich.text import Text

_ROWS = 40
"""Of more clients than these some are shown."""
_SHADES = ((4, "█"), (2, "▓"), (1, "▒"), (1 / 2, "░"), (0, "·"))
"""For more than that many times an even share."""
_LEGEND = "Of a client's samples, against an even share: · up to half of it, ░ to all, ▒ to 2 times, ▓ to 4, █ more."
_SHORT = {"train": "train", "test": "test", "validation": "valid"}
_LONGEST = 12


def holdings_lines(document: Mapping[str, Any], width: int = 80) -> list[Text]:
    """Title, map and summary of what `experiment.holdings` found, in lines of at most `width`. Counts where they fit,
    else shades; where not even these do, a column stands for several classes."""
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
    """Numbers; what a client has most of stands out where there are colours."""
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
