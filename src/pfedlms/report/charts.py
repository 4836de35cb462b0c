"""Charts from plain records: one Altair specification gives the interactive page and the PNG, SVG and PDF files. Altair
comes with the extra `report` and is imported where it is used."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any
from zlib import crc32

from pfedlms.errors import UsageError
from pfedlms.files import write_atomically, write_failure
from pfedlms.report.runs import group_by
from pfedlms.report.tables import to_csv

LIGHT = {
    "ink": "#1f2430", "soft": "#5b6472", "line": "#d9dde3", "paper": "#ffffff",
    "c0": "#1a58f0", "c1": "#d77d32", "c2": "#23551d", "c3": "#a02e5e",
    "c4": "#2899a5", "c5": "#642ba3", "c6": "#826a0b", "c7": "#2c3139",
}  # fmt: skip
DARK = {
    "ink": "#e8eaee", "soft": "#a3abb8", "line": "#343a45", "paper": "#14171c",
    "c0": "#65a7fb", "c1": "#faa25d", "c2": "#4c9550", "c3": "#dc60ab",
    "c4": "#57fefe", "c5": "#9e60fe", "c6": "#fde29a", "c7": "#b8bec8",
}  # fmt: skip
"""Colours by name. Charts use LIGHT; in its dark theme the page replaces them by DARK. Blue, orange, green, magenta,
turquoise, violet, olive and grey differ for every kind of colour vision: of two with the same hue, one is lighter."""
COLOURS = [LIGHT[f"c{place}"] for place in range(8)]
BLUE, ORANGE, GREEN, GREY = COLOURS[0], COLOURS[1], COLOURS[2], COLOURS[7]
_METHOD_COLOURS = ("sketchvote", "fedavg", "pfedlms", "stc", "sketchmean", "eden", "pfed1bs", "local")
"""These methods have one of `COLOURS` each, in this order, and solid lines. Others share the colours, with dashes."""
_DASHES: list[list[int]] = [[1, 0], [6, 3], [2, 3], [8, 3, 2, 3]]
_LEVEL_DASH = [3, 4]
_SUFFIXES = (".png", ".svg", ".pdf", ".html", ".json")
WIDTH, HEIGHT = 620, 320
Records = Sequence[Mapping[str, Any]]
_MAX_TIPS = 40
"""So many points of a curve show their values under the pointer."""


@dataclass(frozen=True)
class Look:
    """The colour and the dashes of a row. A row has the same look in every figure."""

    colour: str
    dash: list[int] = field(default_factory=lambda: _DASHES[0])

    @classmethod
    def number(cls, place: int) -> Look:
        return cls(COLOURS[place % 8], _DASHES[place // 8 % 4])


def looks(labels: Iterable[str]) -> dict[str, Look]:
    """One look per label. A method has the same look in every figure, by its place among the methods; other labels take
    the looks that are free."""
    from pfedlms.methods import METHODS  # imports PyTorch, for which the help of a command need not wait

    known = list(dict.fromkeys([*_METHOD_COLOURS, *METHODS]))
    places = {label: known.index(label) if label in known else None for label in labels}
    free = (place for place in count() if place not in places.values())
    return {label: Look.number(next(free) if place is None else place) for label, place in places.items()}


# --- a figure and its files ---


@dataclass(frozen=True)
class Figure:
    """A chart with its title, its caption, and its data as records."""

    name: str
    """The stem of its files."""
    title: str
    caption: str
    chart: Any
    """An Altair chart, which can be changed, combined, and shown in a notebook."""
    records: list[dict[str, Any]]

    def save(self, file: str | Path) -> None:
        """Write the figure in the format of the suffix."""
        save(self.chart, file)

    def csv(self) -> str:
        return to_csv(self.records)

    def _repr_mimebundle_(self, **options: Any) -> Any:
        return self.chart._repr_mimebundle_(**options)


def import_altair(what: str = "a figure") -> Any:
    """The module altair, or an error that names the extra."""
    try:
        import altair
        import vl_convert  # noqa: F401
    except ImportError as error:
        raise UsageError(f"{what} needs {error.name}; install it with: pip install 'pfedlms[report]'") from error
    return altair


def check_file(file: str | Path, option: str = "--plot") -> Path:
    """Make the folder of a figure. Raise if it cannot be drawn or written: before hours of training, not after."""
    import_altair(option)
    path = Path(file)
    if path.suffix in _SUFFIXES:
        with suppress(OSError):
            path.resolve().parent.mkdir(parents=True, exist_ok=True)
    if path.suffix not in _SUFFIXES or not os.access(path.resolve().parent, os.W_OK):
        kinds = f"{', '.join(_SUFFIXES[:-1])} or {_SUFFIXES[-1]}"
        raise UsageError(f"{option}: got {str(file)!r}, expected a {kinds} file in a folder that can be written")
    return path


def save(chart: Any, file: str | Path) -> None:
    """Write a chart as PNG, SVG, PDF, HTML page or JSON specification."""
    import vl_convert

    path = check_file(file, "save")
    spec = {**chart.to_dict(), "background": LIGHT["paper"]}
    write = {
        ".png": lambda: vl_convert.vegalite_to_png(spec, scale=2),
        ".svg": lambda: vl_convert.vegalite_to_svg(spec).encode(),
        ".pdf": lambda: vl_convert.vegalite_to_pdf(spec),
        ".html": lambda: vl_convert.vegalite_to_html(spec, bundle=True).encode(),
        ".json": lambda: json.dumps(spec, indent=1).encode(),
    }
    content = write[path.suffix]()
    try:
        write_atomically(path.resolve(), lambda file: file.write(content))
    except OSError as error:
        raise UsageError(write_failure(path, error)) from error


_STYLE: dict[str, Any] = {
    "font": "system-ui, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif",
    "tooltipFormat": {"numberFormat": ".4~r"},
    "view": {"strokeWidth": 0},
    "axis": {
        "labelColor": LIGHT["soft"], "titleColor": LIGHT["soft"], "titleFontWeight": "normal", "labelFontSize": 11,
        "titleFontSize": 12, "gridColor": LIGHT["line"], "domainColor": LIGHT["line"], "tickColor": LIGHT["line"],
        "labelOverlap": True,
    },
    "axisX": {"grid": False, "tickCount": 8, "tickSize": 4},
    "axisY": {"domain": False, "ticks": False, "labelLimit": 200},
    "legend": {
        "title": None, "labelColor": LIGHT["ink"], "labelFontSize": 12, "labelLimit": 220, "symbolOpacity": 1,
        "symbolStrokeWidth": 3, "symbolSize": 200,
    },
    "header": {"title": None, "labelColor": LIGHT["ink"], "labelFontSize": 12, "labelAnchor": "start"},
    "title": {"color": LIGHT["ink"], "anchor": "start", "fontSize": 13},
}  # fmt: skip


def apply_style(chart: Any) -> Any:
    """The chart in the style of every figure."""
    return chart.configure(**_STYLE)


# --- pieces ---


def chart_of(records: Iterable[Mapping[str, Any]]) -> Any:
    """An Altair chart of these records, without marks yet."""
    alt = import_altair()
    return alt.Chart(alt.Data(values=list(records)))


def row_colours(style: Mapping[str, Look], legend: Any) -> Any:
    """The encoding that gives each row its colour."""
    alt = import_altair()
    scale = alt.Scale(domain=list(style), range=[look.colour for look in style.values()])
    return alt.Color("row:N", sort=None, scale=scale, legend=legend)


def group_by_row(records: Iterable[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    return group_by(records, lambda record: str(record["row"]))


def value_range(points: Iterable[Mapping[str, Any]], full_range: bool = False) -> tuple[float, float]:
    """The range of values that an axis shows, with a margin: low values of the first tenth of a row, where training has
    only begun, are cut off unless `full_range`."""
    by_row = group_by_row(points)
    low = min(point["low"] for row in by_row.values() for point in row[0 if full_range else len(row) // 10 :])
    high = max(point["high"] for row in by_row.values() for point in row)
    margin = (high - low) * 0.06 or max(abs(high) * 0.05, 0.5)
    return low - margin, high + margin


# --- charts ---


def line_chart(
    records: Records, x: str, y: str, *, log_x: bool = False, log_y: bool = False, show_points: bool = False,
    ticks: Sequence[Any] = (), full_range: bool = False, title: str = "", style: Mapping[str, Look] | None = None,
) -> Any:  # fmt: skip
    """A chart of lines with bands, from records with `row`, `x`, `mean`, and perhaps `low` and `high`. A row without
    `x` is a horizontal line, a level.

    Args:
        x, y: the titles of the axes.
        show_points: whether points are shown, and not only lines.
        ticks: the values of x that have a tick.
        full_range: whether low values of the first rounds are shown, too.
    """
    alt = import_altair()
    points = [{"low": record["mean"], "high": record["mean"], **record} for record in records]
    by_row = group_by_row(points)
    style = {row: (style or looks(by_row))[row] for row in by_row}
    levels = [row for row in by_row if by_row[row][0].get("x") is None]
    kind = "O" if any(isinstance(point.get("x"), str) for point in points) else "Q"
    axis = alt.Axis(title=x, labelAngle=0, **({"values": list(ticks)} if ticks else {}))
    x_scale = alt.Scale(type="log", nice=False) if log_x else alt.Scale(zero=False, nice=False)
    x_scale.padding = 14 if show_points else 0
    across = alt.X(f"x:{kind}", sort=list(ticks) or None, axis=axis, **({} if kind == "O" else {"scale": x_scale}))
    span = alt.Scale(type="log") if log_y else alt.Scale(domain=list(value_range(points, full_range)), nice=False)
    side = alt.Axis(title=y, **({"format": "~g", "tickCount": 5} if log_y else {}))
    up, low, high = alt.Y("mean:Q", axis=side, scale=span), alt.Y("low:Q", axis=side, scale=span), alt.Y2("high:Q")
    legend = alt.Legend(symbolType="stroke") if len(by_row) > 1 else None
    colour = row_colours(style, legend)
    dashes = alt.Scale(domain=list(style), range=[_LEVEL_DASH if row in levels else style[row].dash for row in style])
    dash = alt.StrokeDash("row:N", sort=None, legend=legend, scale=dashes)
    # A unique name, so that a click on one legend changes one chart only.
    chosen = alt.selection_point(f"row_{crc32(repr((x, y, points)).encode())}", fields=["row"], bind="legend")

    def visible(opacity: float) -> Any:
        return alt.condition(chosen, alt.value(opacity), alt.value(0.12 * opacity))

    titles = {"mean": y, "low": "lowest", "high": "highest"}
    values = [alt.Tooltip(f"{name}:Q", title=title) for name, title in titles.items()]
    tips = ["row:N", alt.Tooltip(f"x:{kind}", title=x), *values]
    lines = chart_of(point for row in by_row if row not in levels for point in _with_tips(by_row[row]))
    layers = [
        lines.mark_area(clip=True).encode(across, low, high, color=colour, opacity=visible(0.14)),
        lines.mark_line(clip=True, strokeWidth=2, strokeJoin="round")
        .encode(across, up, color=colour, strokeDash=dash, opacity=visible(1))
        .add_params(chosen),
        lines.transform_filter("datum.tip")
        .mark_point(clip=True, filled=True, size=45 if show_points else 90)
        .encode(across, up, color=colour, opacity=visible(1) if show_points else alt.value(0), tooltip=tips),
    ]
    if levels:
        level = chart_of(by_row[row][0] for row in levels)
        layers += [
            level.mark_rect(clip=True).encode(low, high, color=colour, opacity=visible(0.1)),
            level.mark_rule(strokeWidth=2).encode(
                up, color=colour, strokeDash=dash, opacity=visible(1), tooltip=["row:N", *values]
            ),
        ]
    return alt.layer(*layers).properties(width=WIDTH, height=HEIGHT, title=title)


def _with_tips(points: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The points of a row, some of which, with the last one, are marked to show their values."""
    step, last = -(-len(points) // _MAX_TIPS), len(points) - 1
    return [{**point, "tip": place % step == 0 or place == last} for place, point in enumerate(points)]


def combine_charts(charts: Sequence[Any], columns: int = 3, title: str = "", shared_legend: bool = True) -> Any:
    """Several charts as one. With `shared_legend`, rows of the same name share a colour and a place in the legend below
    the charts."""
    chart = import_altair().concat(*charts, columns=columns, title=title)
    chart = chart if shared_legend else chart.resolve_scale(color="independent", strokeDash="independent")
    legend = {"orient": "bottom", "columns": 4 if shared_legend else 2, "labelLimit": 300}
    return apply_style(chart).configure_legend(title=None, symbolOpacity=1, **legend)
