"""A table, and how it is shown: on a terminal, on the page, in Markdown, LaTeX and CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from textwrap import wrap
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console, Group
from rich.markup import escape
from rich.table import Table as RichTable
from rich.text import Text

from pfedlms.report.runs import Spread

SCREEN = 80
_NOTE = 60
"""Titles and notes take at least so many characters in a line, even where their table is narrower."""
Summary = Mapping[str, Any]


# --- how values are shown ---


def plain(value: Any) -> str:
    """Two decimals; of small numbers four digits, since it may be a metric of the user's own."""
    if not isinstance(value, float):
        return str(value)
    return f"{value:.4g}" if 0 < abs(value) < 1 else f"{value:.2f}"


def accuracy_text(value: Spread) -> str:
    return f"{value.mean:.2f}" + (f" ± {value.deviation:.2f}" if value.deviation is not None else "")


def metric_text(value: Spread) -> str:
    """Four and two digits, wherever the point is."""
    return f"{value.mean:.4g}" + (f" ± {value.deviation:.2g}" if value.deviation is not None else "")


def mib_text(mib: float) -> str:
    return "0" if mib == 0 else f"{mib:.4f}" if mib < 0.1 else f"{mib:,.2f}"


def count_text(number: int, what: str) -> str:
    """`1 round`, `2 rounds`."""
    return f"{number} {what}{'s' * (number != 1)}"


# --- a table ---


@dataclass(frozen=True)
class Column:
    """One column of a table."""

    key: str
    """Its name in CSV and in records."""
    head: str = ""
    """Its name for people; without one it is in CSV and JSON only."""
    show: Callable[[Any], str] = plain
    note: str = ""
    """What it means, for the caption."""
    place: str = ""
    """Where summary.json and results.json have it, as `accuracy.max`."""
    of: Callable[[Summary], Any] | None = None
    """Its value from the summary of one run, if that is not the value at `place`."""
    over_seeds: Callable[[list[Any]], Any] | None = Spread.of
    """Its value in a row of several seeds; None if it is computed for the whole table."""
    optional: int = 0
    """Where there is little room: 2 is left out first, then 1, 0 never."""
    leads: bool = False
    """Whether the highest value of the column is bold."""
    left: bool = False
    """Whether it has words, which begin on the left."""
    when: Callable[[Summary], bool] = lambda summary: True
    """Whether it applies to a run; it is shown if it applies to any."""

    def value(self, summary: Summary) -> Any:
        if self.of is not None:
            return self.of(summary)
        found: Any = summary
        for part in self.place.split("."):
            found = found.get(part) if isinstance(found, Mapping) else None
        return found


@dataclass(frozen=True)
class Table:
    """Records with the columns they are shown in."""

    columns: Sequence[Column]
    records: Sequence[Mapping[str, Any]]
    title: str = ""
    intro: str = ""
    """The beginning of the caption; notes of columns follow."""

    @property
    def shown(self) -> list[Column]:
        """Columns for people that have a value in any row."""
        return [
            column
            for column in self.columns
            if column.head and any(r.get(column.key) is not None for r in self.records)
        ]

    def text_of(self, record: Mapping[str, Any], column: Column) -> str:
        value = record.get(column.key)
        return "–" if value is None else column.show(value)

    def leads(self, record: Mapping[str, Any], column: Column) -> bool:
        """Whether the record has the highest value of a column that marks it."""
        values = [value for each in self.records if (value := self.number(each, column)) is not None]
        return column.leads and len(self.records) > 1 and self.number(record, column) == max(values, default=0.0)

    def number(self, record: Mapping[str, Any], column: Column) -> Any:
        """What a cell is sorted by."""
        value = record.get(column.key)
        return value.mean if isinstance(value, Spread) else value

    def caption(self, shown: Sequence[Column], left_out: Sequence[str] = ()) -> str:
        notes = [column.note for column in shown if column.note]
        text = " ".join(filter(None, [self.intro, "; ".join(dict.fromkeys(notes)) + "." if notes else ""]))
        return text + (f" No room for {', '.join(left_out)}: see results.csv or to_pandas()." if left_out else "")

    def rich(self, width: int | None = SCREEN) -> Group:
        """For a terminal of that width, without the columns it has no room for; with None all of them, for a pipe."""
        kept, left_out = self.shown, []
        words = any(column.left for column in kept)  # which rich breaks where there is room
        if width is not None and not words and _width(self._made(kept)) > width:
            kept = [self._narrower(column, first=place == 0) for place, column in enumerate(kept)]
            for column in sorted((each for each in kept[::-1] if each.optional), key=lambda each: -each.optional):
                if _width(self._made(kept)) > width:
                    kept = [each for each in kept if each is not column]
                    left_out += [column.head.replace("\n", " ")] if column.optional == 1 else []
        made = self._made(kept)
        room = max(_width(made), _NOTE)
        title, caption = ("\n".join(wrap(text, room)) for text in (self.title, self.caption(kept, left_out[::-1])))
        above, below = ([Text(text, style)] if text else [] for text, style in ((title, "bold"), (caption, "italic")))
        return Group(*above, made, *below)

    def _narrower(self, column: Column, first: bool) -> Column:
        """A name that is wider than its values takes several lines; so do the settings of a variant."""
        widest = max(cell_len(self.text_of(record, column)) for record in self.records)
        head = "\n".join(wrap(column.head, max(widest, 7), break_long_words=False))
        return replace(column, head=head, show=_in_lines if first else column.show)

    def _made(self, columns: Sequence[Column]) -> RichTable:
        """Names on the left, numbers on the right; all text as it is, brackets included."""
        made = RichTable(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
        for place, column in enumerate(columns):
            made.add_column(escape(column.head), justify="left" if column.left or not place else "right")
        for record in self.records:
            made.add_row(*(escape(self.text_of(record, column)) for column in columns))
        return made

    def __str__(self) -> str:
        text = io.StringIO()
        Console(file=text, width=120, no_color=True).print(self.rich())
        return text.getvalue()

    def markdown(self) -> str:
        shown = self.shown
        lines = [[column.head for column in shown], ["---", *("---" if column.left else "--:" for column in shown[1:])]]
        lines += [[self.text_of(record, column).replace("|", "\\|") for column in shown] for record in self.records]
        body = "\n".join("| " + " | ".join(line) + " |" for line in lines)
        return "\n\n".join(filter(None, [self.title, body, self.caption(shown)])) + "\n"

    def latex(self) -> str:
        """A `tabular` with the rules of the package booktabs."""
        shown = self.shown
        lines = [" & ".join(column.head.translate(_TEX) for column in shown)]
        for record in self.records:
            texts = [(self.text_of(record, column).translate(_TEX), self.leads(record, column)) for column in shown]
            lines.append(" & ".join(rf"\textbf{{{text}}}" if leads else text for text, leads in texts))
        head, *body = (rf"{line} \\" for line in lines)
        rule = "l" + "".join("l" if column.left else "r" for column in shown[1:])
        inside = "\n".join([r"\toprule", head, r"\midrule", *body, r"\bottomrule"])
        return f"\\begin{{tabular}}{{{rule}}}\n{inside}\n\\end{{tabular}}\n"


def _in_lines(name: Any) -> str:
    return str(name).replace(":", "\n ").replace(" (", "\n (")


def _width(table: RichTable) -> int:
    return Console(width=10_000).measure(table).maximum


def table_from_records(records: Sequence[Mapping[str, Any]], title: str = "", intro: str = "") -> Table:
    """Records as they are, one column per key."""
    words = {key for record in records for key, value in record.items() if _wordy(value)}
    return Table([Column(key, key or " ", left=key in words) for key in records[0]], records, title, intro)


def _wordy(value: Any) -> bool:
    return isinstance(value, str) and any(letter.isalpha() for letter in value)


def to_csv(records: Sequence[Mapping[str, Any]]) -> str:
    """One line per record, one column per key of any of them."""
    text = io.StringIO()
    keys = list(dict.fromkeys(key for record in records for key in record))
    writer = csv.DictWriter(text, keys, lineterminator="\n")
    writer.writeheader()
    writer.writerows(records)
    return text.getvalue()


_TEX = str.maketrans({
    "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}", "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}", "\\": r"\textbackslash{}", "±": r"$\pm$", "×": r"$\times$", "↑": r"$\uparrow$",
    "↓": r"$\downarrow$", "–": "--", "≈": r"$\approx$", "α": r"$\alpha$",
})  # fmt: skip
