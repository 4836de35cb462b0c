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

from pfedlms.errors import UsageError
from pfedlms.report.runs import Spread

TERMINAL_WIDTH = 80
_CAPTION_WIDTH = 60
"""Title and caption have lines of at least so many characters, even where their table is narrower."""
Summary = Mapping[str, Any]
PARTIAL = "partial"
"""A key of records that lack runs, such as those that diverged: what is left may be the best ones."""


# --- how values are shown ---


def plain_text(value: Any) -> str:
    """Two decimals; four digits of a small number, since it may be a user's own metric."""
    if not isinstance(value, float):
        return str(value)
    return f"{value:.4g}" if 0 < abs(value) < 1 else f"{value:.2f}"


def accuracy_text(value: Spread) -> str:
    return f"{value.mean:.2f}" + (f" ± {value.deviation:.2f}" if value.deviation is not None else "")


def metric_text(value: Spread) -> str:
    """A user's own metric: four digits of the mean, two of the deviation."""
    return f"{value.mean:.4g}" + (f" ± {value.deviation:.2g}" if value.deviation is not None else "")


def mib_text(mib: float) -> str:
    return f"{mib:,.2f}" if mib >= 1 else f"{mib:.3g}"


def count_text(number: int, noun: str) -> str:
    """`1 round`, `2 rounds`."""
    return f"{number} {noun}{'s' * (number != 1)}"


# --- a table ---


@dataclass(frozen=True)
class Column:
    """One column of a table."""

    key: str
    """Its name in CSV and in records."""
    head: str = ""
    """Its name for people. Empty: the column is in CSV and JSON only."""
    format: Callable[[Any], str] = plain_text
    note: str = ""
    """What it means, for the caption."""
    path: str = ""
    """Where its value is in summary.json and results.json, as `accuracy.max`."""
    compute: Callable[[Summary], Any] | None = None
    """Computes its value from the summary of a run, if that is not the value at `path`."""
    over_seeds: Callable[[list[Any]], Any] | None = Spread.of
    """Computes its value in a row from those of the seeds. None: it is computed for the whole table."""
    optional: int = 0
    """A narrow terminal leaves out columns with 2 first, then those with 1, never those with 0."""
    bold_highest: bool = False
    """Whether the highest value of the column is bold."""
    left_aligned: bool = False
    """Whether its cells begin on the left, as words do."""
    applies: Callable[[Summary], bool] = lambda summary: True
    """Whether it says something of a run; the column is shown if it does for any."""

    def value(self, summary: Summary) -> Any:
        """Its value for one run; None if the summary has none."""
        if self.compute is not None:
            return self.compute(summary)
        value: Any = summary
        for part in self.path.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        return value


@dataclass(frozen=True)
class Table:
    """Records, and the columns in which they are shown."""

    columns: Sequence[Column]
    records: Sequence[Mapping[str, Any]]
    title: str = ""
    intro: str = ""
    """The begin of the caption; the notes of columns follow."""

    @property
    def visible_columns(self) -> list[Column]:
        """Columns for people that have a value in any record."""
        used = {key for record in self.records for key, value in record.items() if value is not None}
        return [column for column in self.columns if column.head and column.key in used]

    def select(self, names: Sequence[str]) -> Table:
        """The table with the first column and those of these names, as CSV or people call them; all where none is
        named."""
        if not names:
            return self
        by_name = {name: column for column in self.columns if column.head for name in (column.head, column.key)}
        unknown = [name for name in names if name not in by_name]
        if unknown:
            raise UsageError(f"columns: got {', '.join(map(repr, unknown))}, expected some of {', '.join(by_name)}")
        first = self.columns[0]
        return replace(self, columns=[first, *(by_name[name] for name in names if by_name[name] != first)])

    def cell_text(self, record: Mapping[str, Any], column: Column) -> str:
        value = record.get(column.key)
        return "–" if value is None else column.format(value)

    def is_bold(self, record: Mapping[str, Any], column: Column) -> bool:
        """Whether the record has the highest value of a column that shows it in bold."""
        if not column.bold_highest or len(self.records) < 2 or PARTIAL in record:
            return False
        whole = [other for other in self.records if PARTIAL not in other]
        values = [value for other in whole if (value := self.sort_value(other, column)) is not None]
        return bool(self.sort_value(record, column) == max(values, default=0.0))

    def sort_value(self, record: Mapping[str, Any], column: Column) -> Any:
        """The value by which the page sorts a cell."""
        value = record.get(column.key)
        return value.mean if isinstance(value, Spread) else value

    def caption(self, columns: Sequence[Column], left_out: Sequence[str] = ()) -> str:
        """The intro, the notes of these columns, and the names of columns that were left out."""
        notes = [column.note for column in columns if column.note]
        text = " ".join(filter(None, [self.intro, "; ".join(dict.fromkeys(notes)) + "." if notes else ""]))
        return text + (f" No room for {', '.join(left_out)}: see results.csv or to_pandas()." if left_out else "")

    def rich(self, width: int | None = TERMINAL_WIDTH) -> Group:
        """The table for a terminal of that width, without the columns for which it has no room. With None, for a pipe,
        it has all columns."""
        columns, left_out = self.visible_columns, []
        has_words = any(column.left_aligned for column in columns)  # rich breaks words into several lines
        if width is not None and not has_words and _width(self._rich_table(columns)) > width:
            columns = [self._narrow(column, first=place == 0) for place, column in enumerate(columns)]
            for column in sorted(filter(lambda c: c.optional, columns[::-1]), key=lambda c: -c.optional):
                if _width(self._rich_table(columns)) > width:
                    columns = [other for other in columns if other is not column]
                    left_out.append(column.head.replace("\n", " "))
        table = self._rich_table(columns)
        room = max(_width(table), _CAPTION_WIDTH)
        title, caption = ("\n".join(wrap(text, room)) for text in (self.title, self.caption(columns, left_out[::-1])))
        above, below = ([Text(text, style)] if text else [] for text, style in ((title, "bold"), (caption, "italic")))
        return Group(*above, table, *below)

    def _narrow(self, column: Column, first: bool) -> Column:
        """The column, with a head that is wider than its values in several lines; so are the names of variants."""
        widest = max(cell_len(self.cell_text(record, column)) for record in self.records)
        head = "\n".join(wrap(column.head, max(widest, 7), break_long_words=False))
        return replace(column, head=head, format=_break_name if first else column.format)

    def _rich_table(self, columns: Sequence[Column]) -> RichTable:
        """Names on the left, numbers on the right; `escape` keeps rich from reading brackets as markup."""
        table = RichTable(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
        for place, column in enumerate(columns):
            table.add_column(escape(column.head), justify="left" if column.left_aligned or not place else "right")
        for record in self.records:
            table.add_row(*(escape(self.cell_text(record, column)) for column in columns))
        return table

    def __str__(self) -> str:
        text = io.StringIO()
        Console(file=text, width=120, no_color=True).print(self.rich())
        return text.getvalue()

    def markdown(self) -> str:
        columns = self.visible_columns
        lines = [[column.head for column in columns]]
        lines += [["---", *("---" if column.left_aligned else "--:" for column in columns[1:])]]
        lines += [[self.cell_text(record, column).replace("|", "\\|") for column in columns] for record in self.records]
        body = "\n".join("| " + " | ".join(line) + " |" for line in lines)
        return "\n\n".join(filter(None, [self.title, body, self.caption(columns)])) + "\n"

    def latex(self) -> str:
        """A `tabular` for LaTeX, with the rules of the package booktabs."""
        columns = self.visible_columns
        lines = [" & ".join(column.head.translate(_TEX) for column in columns)]
        for record in self.records:
            texts = [self.cell_text(record, column).translate(_TEX) for column in columns]
            bold = [self.is_bold(record, column) for column in columns]
            lines.append(" & ".join(rf"\textbf{{{text}}}" if b else text for text, b in zip(texts, bold, strict=True)))
        head, *body = (rf"{line} \\" for line in lines)
        alignment = "l" + "".join("l" if column.left_aligned else "r" for column in columns[1:])
        rows = "\n".join([r"\toprule", head, r"\midrule", *body, r"\bottomrule"])
        return f"\\begin{{tabular}}{{{alignment}}}\n{rows}\n\\end{{tabular}}\n"


def _break_name(name: Any) -> str:
    return str(name).replace(":", "\n ").replace(" (", "\n (")


def _width(table: RichTable) -> int:
    return Console(width=10_000).measure(table).maximum


def table_from_records(records: Sequence[Mapping[str, Any]], title: str = "", intro: str = "") -> Table:
    """A table of records as they are, one column per key; columns with words begin on the left."""

    def has_words(key: str) -> bool:
        return any(any(map(str.isalpha, value)) for record in records if isinstance(value := record.get(key), str))

    return Table([Column(key, key or " ", left_aligned=has_words(key)) for key in records[0]], records, title, intro)


def to_csv(records: Sequence[Mapping[str, Any]]) -> str:
    """One line per record, one column per key of any record."""
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
