"""Tables of a page: sortable, numbers on the right, each with the value it is sorted by."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from pfedlms.experiment.config import differing as compared
from pfedlms.report.page.gather import Part
from pfedlms.report.page.measures import Row, Spread, best, headline
from pfedlms.report.page.svg import Look, tag
from pfedlms.report.tables import last_evaluations

_SHORT = 34  # letters of a name that has a line of its own on a wide screen


@dataclass(frozen=True)
class Cell:
    """What is shown and what it is sorted by; markup already."""

    shown: str
    value: float | str | None = None
    lead: bool = False
    """Whether it is the best of its column."""


def table(columns: Sequence[str], rows: Sequence[Sequence[Cell]], label: str) -> str:
    """Columns with a button each, which sorts; the first one has names."""
    head = [
        tag("th", tag("button", escape(name), type="button"), scope="col", aria_sort="none", class_=_side(at))
        for at, name in enumerate(columns)
    ]
    body = []
    for row in rows:
        first, *others = row
        short = isinstance(first.value, str) and len(first.value) <= _SHORT
        cells = [tag("th", first.shown, scope="row", data_value=first.value, class_="short" if short else None)]
        cells += [tag("td", cell.shown, data_value=_sorted_by(cell), class_="lead" if cell.lead else None)
                  for cell in others]  # fmt: skip
        body.append(tag("tr", *cells))
    inside = tag("thead", tag("tr", *head)) + tag("tbody", *body)
    return tag("div", tag("table", inside, aria_label=label), class_="scroll", tabindex=0, role="region",
               aria_label=label)  # fmt: skip


def _side(at: int) -> str | None:
    return None if at == 0 else "number"


def _sorted_by(cell: Cell) -> str | None:
    return repr(cell.value) if isinstance(cell.value, float) else cell.value


def headline_table(part: Part, looks: Mapping[str, Look]) -> str:
    """What every row reached and cost, the best of each accuracy marked."""
    rows, chosen = headline(part), best(part)
    tail = last_evaluations([run.summary for run in part.runs])[0]
    accuracies = [name for name in (*rows[0].accuracies, "everyone") if _measured(rows, name)]
    accuracies = list(dict.fromkeys(accuracies))
    names = {"P-acc last": f"P-acc {tail}", "V-acc last": f"V-acc {tail}"}
    tops = {name: max(row.accuracies[name].mean or -1e300 for row in rows if name in row.accuracies)
            for name in accuracies}  # fmt: skip
    fewer = any(row.fewer for row in rows)
    columns = ["", *(names.get(name, name) for name in accuracies), "MiB ↑", "MiB ↓", "MiB total"]
    columns += [*(["fewer"] * fewer), "rounds", "seeds", "s"]
    body = []
    for row in rows:
        cells = [Cell(_name(row, looks, row.name == chosen), row.name)]
        for name in accuracies:
            spread = row.accuracies.get(name, Spread(None))
            lead = len(rows) > 1 and spread.mean is not None and spread.mean == tops[name]
            cells.append(Cell(_spread(spread), spread.mean, lead))
        cells += [Cell(_size(value), value) for value in (row.up, row.down, row.total)]
        if fewer:
            cells.append(Cell(f"{row.fewer:,.1f}×" if row.fewer else "–", row.fewer))
        cells += [Cell(f"{row.rounds:,}", float(row.rounds)), Cell(str(row.seeds), float(row.seeds))]
        body.append([*cells, Cell(f"{row.seconds:,.1f}", row.seconds)])
    return table(columns, body, f"results of {part.title}")


def _measured(rows: Sequence[Row], name: str) -> bool:
    return any(row.accuracies.get(name, Spread(None)).mean is not None for row in rows)


def breaking(name: str) -> str:
    """A name, escaped, that breaks where its parts meet if there is no room."""
    return re.sub(r"([_=:]|\.(?!\d))", r"\1<wbr>", escape(name))


def _name(row: Row, looks: Mapping[str, Look], chosen: bool) -> str:
    look = looks[row.name]
    mark = tag("span", class_="swatch", style=f"background:{look.colour}")
    note = tag("small", escape(f" {row.note}")) if row.note else ""
    return mark + breaking(row.name) + (tag("small", " best") if chosen else "") + note


def _spread(spread: Spread) -> str:
    if spread.mean is None:
        return "–"
    return f"{spread.mean:.2f}" + (tag("small", f" ± {spread.deviation:.2f}") if spread.deviation is not None else "")


def _size(mib: float) -> str:
    return "0" if mib == 0 else f"{mib:.4f}" if mib < 0.1 else f"{mib:,.2f}"


def settings_tables(part: Part) -> tuple[str, str]:
    """In what runs differ, as a table of rows x settings, empty where they do not; and what all have in common."""
    same, differing = compared([run.config for run in part.runs])
    names = list(dict.fromkeys(key for own in differing for key in own if key != "data.dir"))
    by_row = {run.name: own for run, own in zip(part.runs, differing, strict=True)}
    shared = [[Cell(breaking(key), key), _setting(value)] for key, value in same.items() if key != "data.dir"]
    differ = _apart(names, by_row, f"settings in which the rows of {part.title} differ")
    return differ, table(["setting", "value"], shared, f"settings all runs of {part.title} share")


def _apart(names: Sequence[str], by_row: Mapping[str, Mapping[str, Any]], label: str) -> str:
    """Whichever way takes fewer columns; nothing where there is nothing to tell apart."""
    if not names:
        return ""
    across, down = (list(by_row), list(names)) if len(by_row) <= len(names) else (list(names), list(by_row))
    cells = [
        [_setting(by_row[one].get(two) if one in by_row else by_row[two].get(one)) for one in across] for two in down
    ]
    rows = [[Cell(breaking(name), name), *own] for name, own in zip(down, cells, strict=True)]
    return table(["setting" if across == list(by_row) else "", *across], rows, label)


def _setting(value: Any) -> Cell:
    if value is None:
        return Cell("–")
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return Cell(escape(str(value)) or "–", float(value) if number else str(value))


def environment_table(part: Part) -> str:
    """What the runs were made with, each environment once; empty for runs that do not tell."""
    found: dict[str, tuple[dict[str, Any], list[str]]] = {}
    for run in part.runs:
        told = run.summary.get("environment") or {}
        found.setdefault(repr(told), (told, []))[1].append(f"{run.name} seed {run.seed}")
    names = list(dict.fromkeys(name for told, _ in found.values() for name in told))
    if not names:
        return ""
    rows = []
    for told, runs in found.values():
        who = "all runs" if len(found) == 1 else f"{runs[0]} and {len(runs) - 1} more" if len(runs) > 1 else runs[0]
        rows.append([Cell(escape(who), who), *(_setting(told.get(name)) for name in names)])
    return table(["", *names], rows, f"environment of {part.title}")
