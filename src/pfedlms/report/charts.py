"""Charts from plain records: one Altair specification gives the interactive page and PNG, SVG and PDF. Altair comes
with the extra `report` and is imported where it is used."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from zlib import crc32

from pfedlms.errors import UsageError
from pfedlms.files import write_atomically
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
"""Colours by name. Charts use LIGHT, and the page replaces them by DARK. Blue, orange, green, magenta, turquoise,
violet, olive and grey differ for every kind of colour vision: where two have the same hue, one is lighter."""
COLOURS = [LIGHT[f"c{place}"] for place in range(8)]
BLUE, ORANGE, GREEN, GREY = COLOURS[0], COLOURS[1], COLOURS[2], COLOURS[7]
_OWN_COLOUR = ("sketchvote", "fedavg", "pfedlms", "stc", "sketchmean", "eden", "pfed1bs", "local")
"""These methods have a colour each and solid lines. Other methods share the colours, with dashed lines."""
_DASHES: list[list[int]] = [[1, 0], [6, 3], [2, 3], [8, 3, 2, 3]]
_LOOKS = len(COLOURS) * len(_DASHES)
_LEVEL = [3, 4]
_FILES = (".png", ".svg", ".pdf", ".html", ".json")
WIDTH, HEIGHT = 620, 320
Records = Sequence[Mapping[str, Any]]
_TIPS = 40
"""Points of a curve that show their values under the pointer."""


@dataclass(frozen=True)
class Look:
    """The colour and the dashes of a row, the same in every figure."""

    colour: str
    dash: list[int] = field(default_factory=lambda: _DASHES[0])

    @classmethod
    def number(cls, place: int) -> Look:
        return cls(COLOURS[place % 8], _DASHES[place // 8 % 4])


def looks(labels: Iterable[str]) -> dict[str, Look]:
    """One look per label. A method has the same look in every figure: by its place among the methods or, where this
    process does not know the method, by its name. Variants take free looks."""
    from pfedlms.methods import METHODS  # with PyTorch, which the help of a command does not wait for

    wanted = list(dict.fromkeys(labels))
    known = list(dict.fromkeys([*_OWN_COLOUR, *METHODS]))
    places = {label: known.index(label) for label in wanted if label in known}
    others = (each for each in wanted if each not in known)
    for label in sorted(others, key=lambda each: (not each.isidentifier(), each * each.isidentifier())):
        own = len(known) + crc32(label.encode()) % max(1, _LOOKS - len(known)) if label.isidentifier() else 0
        free = (place for place in (*range(own, _LOOKS), *range(own)) if place not in places.values())
        places[label] = next(free, _LOOKS + len(places))
    return {label: Look.number(places[label]) for label in wanted}


# --- a figure and its files ---


@dataclass(frozen=True)
class Figure:
    """A chart, its words, and its data as records."""

    name: str
    """Of its files."""
    title: str
    caption: str
    chart: Any
    """An Altair chart: to change, to combine, to show in a notebook."""
    records: list[dict[str, Any]]

    def save(self, file: str | Path) -> None:
        """Write it in the format of the suffix."""
        save(self.chart, file)

    def csv(self) -> str:
        return to_csv(self.records)

    def _repr_mimebundle_(self, **options: Any) -> Any:
        return self.chart._repr_mimebundle_(**options)


def import_altair(what: str = "a figure") -> Any:
    """The library, or an error that names the extra."""
    try:
        import altair
        import vl_convert  # noqa: F401
    except ImportError as error:
        raise UsageError(f"{what} needs {error.name}; install it with: pip install 'pfedlms[report]'") from error
    return altair


def check_file(file: str | Path, option: str = "--plot") -> Path:
    """The file of a figure, if it can be drawn and written: before hours of training rather than after."""
    import_altair(option)
    path = Path(file)
    if path.suffix not in _FILES or not os.access(path.resolve().parent, os.W_OK):
        kinds = f"{', '.join(_FILES[:-1])} or {_FILES[-1]}"
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
    drawn = write[path.suffix]()
    write_atomically(path.resolve(), lambda file: file.write(drawn))


def apply_style(chart: Any) -> Any:
    """The style of every figure."""
    soft, ink, line = LIGHT["soft"], LIGHT["ink"], LIGHT["line"]
    axis = {
        "labelColor": soft, "titleColor": soft, "titleFontWeight": "normal", "labelFontSize": 11, "titleFontSize": 12,
        "gridColor": line, "domainColor": line, "tickColor": line, "labelOverlap": True,
    }  # fmt: skip
    legend = {
        "title": None, "labelColor": ink, "labelFontSize": 12, "labelLimit": 220, "symbolOpacity": 1,
        "symbolStrokeWidth": 3, "symbolSize": 200,
    }  # fmt: skip
    return (
        chart.configure(font="system-ui, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif")
        .configure_view(strokeWidth=0)
        .configure_axis(**axis)
        .configure_axisX(grid=False, tickCount=8, tickSize=4)
        .configure_axisY(domain=False, ticks=False, labelLimit=200)
        .configure_legend(**legend)
        .configure_header(title=None, labelColor=ink, labelFontSize=12, labelAnchor="start")
        .configure_title(color=ink, anchor="start", fontSize=13)
    )


# --- pieces ---


def chart_of(records: Iterable[Mapping[str, Any]]) -> Any:
    """A chart of these records, without marks yet."""
    alt = import_altair()
    return alt.Chart(alt.Data(values=list(records)))


def row_colours(style: Mapping[str, Look], legend: Any) -> Any:
    """Rows in their colours."""
    alt = import_altair()
    scale = alt.Scale(domain=list(style), range=[look.colour for look in style.values()])
    return alt.Color("row:N", sort=None, scale=scale, legend=legend)


def tooltips(*fields: str, **titles: str) -> list[Any]:
    """What is shown under the pointer: fields with their type, such as `mean:Q`, some with a title of their own."""
    alt, number = import_altair(), {"format": ".4~r"}
    named = {field: field.partition(":")[0] for field in fields}
    return [
        alt.Tooltip(field, title=titles.get(name, name), **(number if field.endswith(":Q") else {}))
        for field, name in named.items()
    ]


def group_by_row(records: Iterable[Mapping[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    for record in records:
        found.setdefault(record["row"], []).append(dict(record))
    return found


def value_range(points: Iterable[Mapping[str, Any]], full_range: bool = False) -> tuple[float, float]:
    """What is shown of the values: all but the first tenth of every row, where training has only begun, if that is
    lower, or all of them with `full_range`; with some air at both ends."""
    by_row = group_by_row(points)
    low = min(point["low"] for own in by_row.values() for point in own[0 if full_range else len(own) // 10 :])
    high = max(point["high"] for own in by_row.values() for point in own)
    air = (high - low) * 0.06 or max(abs(high) * 0.05, 0.5)
    return low - air, high + air


# --- charts ---


def line_chart(
    records: Records, x: str, y: str, *, log_x: bool = False, log_y: bool = False, show_points: bool = False,
    ticks: Sequence[Any] = (), full_range: bool = False, title: str = "", style: Mapping[str, Look] | None = None,
) -> Any:  # fmt: skip
    """Lines with their ranges, from records with `row`, `x`, `mean`, and if known `low` and `high`. A row without `x`
    is a level from side to side.

    Args:
        x, y: the words at the axes.
        show_points: whether points are shown, and not only lines.
        ticks: values of x that are marked.
        full_range: whether low values of the first rounds are shown, too.
    """
    alt = import_altair()
    points = [{"low": record["mean"], "high": record["mean"], **record} for record in records]
    by_row = group_by_row(points)
    style = {row: (style or looks(by_row))[row] for row in by_row}
    levels = {row for row, own in by_row.items() if own[0].get("x") is None}
    kind = "O" if any(isinstance(point.get("x"), str) for point in points) else "Q"
    axis = alt.Axis(title=x, labelAngle=0, **({"values": list(ticks)} if ticks else {}))
    place = alt.Scale(type="log", nice=False) if log_x else alt.Scale(zero=False, nice=False)
    place.padding = 14 if show_points else 0
    scale = {} if kind == "O" else {"scale": place}
    across = alt.X(f"x:{kind}", sort=list(ticks) or None, axis=axis, **scale)
    span = alt.Scale(type="log") if log_y else alt.Scale(domain=list(value_range(points, full_range)), nice=False)
    side = alt.Axis(title=y, **({"format": "~g", "tickCount": 5} if log_y else {}))
    up, low, high = alt.Y("mean:Q", axis=side, scale=span), alt.Y("low:Q", axis=side, scale=span), alt.Y2("high:Q")
    legend = alt.Legend(symbolType="stroke") if len(by_row) > 1 else None
    colour = row_colours(style, legend)
    dashes = alt.Scale(domain=list(style), range=[_LEVEL if row in levels else style[row].dash for row in style])
    dash = alt.StrokeDash("row:N", sort=None, legend=legend, scale=dashes)
    # A unique name, so that a click on one legend changes one chart only.
    chosen = alt.selection_point(f"row_{crc32(repr((x, y, points)).encode())}", fields=["row"], bind="legend")

    def visible(opacity: float) -> Any:
        return alt.condition(chosen, alt.value(opacity), alt.value(0.12 * opacity))

    values = tooltips("mean:Q", "low:Q", "high:Q", mean=y, low="lowest", high="highest")
    tips = [*tooltips("row:N", f"x:{kind}", x=x), *values]
    drawn = chart_of(point for row, own in by_row.items() if row not in levels for point in _with_tips(own))
    layers = [
        drawn.mark_area(clip=True).encode(across, low, high, color=colour, opacity=visible(0.14)),
        drawn.mark_line(clip=True, strokeWidth=2, strokeJoin="round")
        .encode(across, up, color=colour, strokeDash=dash, opacity=visible(1))
        .add_params(chosen),
        drawn.transform_filter("datum.tip")
        .mark_point(clip=True, filled=True, size=45 if show_points else 90)
        .encode(across, up, color=colour, opacity=visible(1) if show_points else alt.value(0), tooltip=tips),
    ]
    if levels:
        level = chart_of(by_row[row][0] for row in levels)
        layers += [
            level.mark_rect(clip=True).encode(low, high, color=colour, opacity=visible(0.1)),
            level.mark_rule(strokeWidth=2).encode(
                up, color=colour, strokeDash=dash, opacity=visible(1), tooltip=[tips[0], *values]
            ),
        ]
    return alt.layer(*layers).properties(width=WIDTH, height=HEIGHT, title=title)


def _with_tips(points: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Marks some points of a row, the last one among them."""
    step, last = -(-len(points) // _TIPS), len(points) - 1
    return [{**point, "tip": place % step == 0 or place == last} for place, point in enumerate(points)]


def combine_charts(charts: Sequence[Any], columns: int = 3, title: str = "", shared_legend: bool = True) -> Any:
    """Several charts as one; rows of the same name share a colour and a place in the legend below, unless it is not
    `shared_legend`."""
    made = import_altair().concat(*charts, columns=columns, title=title)
    made = made if shared_legend else made.resolve_scale(color="independent", strokeDash="independent")
    legend = {"orient": "bottom", "columns": 4 if shared_legend else 2, "labelLimit": 300}
    return apply_style(made).configure_legend(title=None, symbolOpacity=1, **legend)
