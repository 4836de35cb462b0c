"""Figures of runs: one Altair specification gives the interactive page and PNG, SVG and PDF. They need the extra
`report`, which is imported where it is used."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from math import floor, log10
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any
from zlib import crc32

from pfedlms.errors import UsageError
from pfedlms.methods import METHODS
from pfedlms.report.results import last_evaluations
from pfedlms.report.runs import MEASURES, Cell, Curve, Gain, RunLike, Section, best, cells, curves, percent
from pfedlms.report.tables import Table, to_csv

if TYPE_CHECKING:
    import altair as alt

LIGHT = {
    "ink": "#1f2430", "soft": "#5b6472", "line": "#d9dde3", "paper": "#ffffff",
    "c0": "#0072b2", "c1": "#00805d", "c2": "#a8538a", "c3": "#c84c00",
    "c4": "#2b95cf", "c5": "#a87400", "c6": "#7a4a21", "c7": "#6b7280",
}  # fmt: skip
DARK = {
    "ink": "#e8eaee", "soft": "#a3abb8", "line": "#343a45", "paper": "#14171c",
    "c0": "#5aaef0", "c1": "#35c49a", "c2": "#e08fc0", "c3": "#ff8a4c",
    "c4": "#8ad0ff", "c5": "#e3b341", "c6": "#cf9f72", "c7": "#a1a8b3",
}  # fmt: skip
"""Colours by name; they differ for every kind of colour vision. Figures use LIGHT, the page puts DARK in its place."""
_COLOURS = [LIGHT[f"c{place}"] for place in range(8)]
_DASHES: list[list[int]] = [[1, 0], [6, 3], [2, 3], [8, 3, 2, 3]]
_LEVEL = [3, 4]
BLUE, ORANGE, GREY, GREEN = LIGHT["c0"], LIGHT["c3"], LIGHT["c7"], LIGHT["c1"]
FILES = (".png", ".svg", ".pdf", ".html", ".json")
WIDE, HIGH = 620, 320
_TIPS = 40
"""Points of a curve that show their values under the pointer."""
_MOST_ROWS = 12
"""Lines that can be told apart in one figure; of more rows the best are drawn."""


@dataclass(frozen=True)
class Look:
    """How a row is drawn in every figure."""

    colour: str
    dash: list[int] = field(default_factory=lambda: _DASHES[0])


def looks(labels: Iterable[str]) -> dict[str, Look]:
    """One look per label. A method has its colour in every figure: by its place among the methods, or, if this process
    does not know it, by its name. Variants take what is free."""
    wanted = list(dict.fromkeys(labels))
    known = list(METHODS)
    taken: dict[int, str] = {known.index(label): label for label in wanted if label in METHODS}
    for label in wanted:
        if label not in METHODS:
            own = crc32(label.encode()) % 8 if label.isidentifier() else 0
            free = (place for place in (*range(own, 32), *range(own)) if place not in taken)
            taken[next(free, 32 + len(taken))] = label
    chosen = {label: Look(_COLOURS[place % 8], _DASHES[place // 8 % 4]) for place, label in taken.items()}
    return {label: chosen[label] for label in wanted}


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
    panel: int = 0
    """The least width of a panel, of a figure that has several; the page puts as many beside each other as fit."""

    def save(self, file: str | Path) -> None:
        save(self, file)

    def csv(self) -> str:
        return to_csv(self.records)

    def spec(self) -> dict[str, Any]:
        """The Vega-Lite specification."""
        found: dict[str, Any] = self.chart.to_dict()
        return found

    def _repr_mimebundle_(self, **options: Any) -> Any:
        return self.chart._repr_mimebundle_(**options)


def check_extra(what: str = "a figure") -> None:
    """Raise an error that names the extra, before hours of training rather than after."""
    missing = [name for name in ("altair", "vl_convert", "jinja2") if find_spec(name) is None]
    if missing:
        raise UsageError(f"{what} needs {', '.join(missing)}; install it with: pip install 'pfedlms[report]'")


def check_file(file: str | Path, option: str = "--plot") -> Path:
    """The file of a figure, if it can be drawn and written."""
    check_extra(option)
    path = Path(file)
    if path.suffix not in FILES or not os.access(path.resolve().parent, os.W_OK):
        raise UsageError(
            f"{option}: got {str(file)!r}, expected a {', '.join(FILES[:-1])} or {FILES[-1]} file in a folder that can be "
            "written"
        )
    return path


def save(figure: Figure, file: str | Path) -> None:
    """Write a figure; the suffix says as what."""
    import vl_convert

    path = check_file(file, "save")
    spec = {**figure.spec(), "background": LIGHT["paper"]}
    write = {
        ".png": lambda: vl_convert.vegalite_to_png(spec, scale=2),
        ".svg": lambda: vl_convert.vegalite_to_svg(spec).encode(),
        ".pdf": lambda: vl_convert.vegalite_to_pdf(spec),
        ".html": lambda: vl_convert.vegalite_to_html(spec, bundle=True).encode(),
        ".json": lambda: json.dumps(spec, indent=1).encode(),
    }
    path.write_bytes(write[path.suffix]())


def _altair() -> Any:
    check_extra()
    import altair

    return altair


def _dressed(chart: Any) -> Any:
    """The style of every figure."""
    soft, ink, line = LIGHT["soft"], LIGHT["ink"], LIGHT["line"]
    axis = {
        "labelColor": soft, "titleColor": soft, "titleFontWeight": "normal", "labelFontSize": 11, "titleFontSize": 12,
        "gridColor": line, "domainColor": line, "tickColor": line,
    }  # fmt: skip
    return (
        chart.configure(font="system-ui, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif")
        .configure_view(strokeWidth=0)
        .configure_axis(**axis)
        .configure_axisX(grid=False)
        .configure_axisY(domain=False, ticks=False, labelLimit=200)
        .configure_legend(title=None, labelColor=ink, labelFontSize=12, labelLimit=220, symbolStrokeWidth=3,
                          symbolSize=200)  # fmt: skip
        .configure_header(title=None, labelColor=ink, labelFontSize=12, labelAnchor="start")
        .configure_title(color=ink, anchor="start", fontSize=13)
    )


# --- lines ---


def lines(
    records: Sequence[Mapping[str, Any]],
    x: str,
    y: str,
    *,
    log: bool = False,
    log_y: bool = False,
    marks: bool = False,
    ticks: Sequence[Any] = (),
    title: str = "",
    style: Mapping[str, Look] | None = None,
    width: int | str = WIDE,
    height: int = HIGH,
) -> Any:
    """Lines with their ranges, from records with `row`, `x`, `mean`, and if known `low` and `high`. A row without `x`
    is a level from side to side. `x` and `y` are the words at the axes; what stands in `ticks` is marked at x."""
    alt = _altair()
    labels = list(dict.fromkeys(record["row"] for record in records))
    style = style or looks(labels)
    levels = {record["row"] for record in records if record.get("x") is None}
    points = _with_tips([{"low": record["mean"], "high": record["mean"], **record} for record in records])
    words = any(isinstance(point.get("x"), str) for point in points)
    scale = alt.Scale(type="log", nice=False) if log else alt.Scale(zero=False, nice=False)
    axis = alt.Axis(title=x, labelOverlap=True, **({"values": list(ticks)} if ticks else {}))
    if words:
        across = alt.X("x:O", sort=None, title=x, axis=alt.Axis(labelAngle=0, title=x))
    else:
        across = alt.X("x:Q", scale=scale, axis=axis)
    low, high = shown_range(points)
    span = alt.Scale(type="log") if log_y else alt.Scale(domain=[low, high], nice=False)
    up = alt.Y("mean:Q", title=y, scale=span)
    legend = None if len(labels) == 1 else alt.Legend(symbolType="stroke")
    colour = alt.Color(
        "row:N", sort=None, legend=legend, scale=alt.Scale(domain=labels, range=[style[label].colour for label in labels])
    )
    dash = alt.StrokeDash(
        "row:N", sort=None, legend=legend,
        scale=alt.Scale(domain=labels, range=[_LEVEL if label in levels else style[label].dash for label in labels]),
    )  # fmt: skip
    chosen = alt.selection_point(fields=["row"], bind="legend")
    told = [
        alt.Tooltip("row:N", title="row"), alt.Tooltip("x:O" if words else "x:Q", title=x, **({} if words else _DIGITS)),
        alt.Tooltip("mean:Q", title=y, **_DIGITS), alt.Tooltip("low:Q", title="lowest", **_DIGITS),
        alt.Tooltip("high:Q", title="highest", **_DIGITS),
    ]  # fmt: skip
    fade = alt.condition(chosen, alt.value(1), alt.value(0.12))
    drawn = alt.Chart(alt.Data(values=[point for point in points if point["row"] not in levels]))
    layers = [
        drawn.mark_area(clip=True).encode(across, alt.Y("low:Q", title=y, scale=span), alt.Y2("high:Q"), color=colour,
                                          opacity=alt.condition(chosen, alt.value(0.14), alt.value(0.02))),
        drawn.mark_line(clip=True, strokeWidth=2).encode(across, up, color=colour, strokeDash=dash, opacity=fade)
        .add_params(chosen),
        drawn.transform_filter("datum.tip").mark_point(clip=True, filled=True, size=45 if marks else 90)
        .encode(across, up, color=colour, opacity=fade if marks else alt.value(0), tooltip=told),
    ]  # fmt: skip
    if levels:
        level = alt.Chart(alt.Data(values=[point for point in points if point["row"] in levels]))
        layers += [
            level.mark_rect(opacity=0.1, clip=True).encode(alt.Y("low:Q", scale=span), alt.Y2("high:Q"), color=colour),
            level.mark_rule(strokeWidth=2).encode(up, color=colour, strokeDash=dash, opacity=fade,
                                                  tooltip=[told[0], *told[2:]]),
        ]  # fmt: skip
    return alt.layer(*layers).properties(width=width, height=height, title=title)


_DIGITS: dict[str, Any] = {"format": ".4~g"}


def _with_tips(points: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Marks some points of every row, the last one among them."""
    counts: dict[str, int] = {}
    for point in points:
        counts[point["row"]] = counts.get(point["row"], 0) + 1
    seen: dict[str, int] = {}
    found = []
    for point in points:
        place = seen.get(point["row"], 0)
        seen[point["row"]] = place + 1
        step = -(-counts[point["row"]] // _TIPS)
        found.append({**point, "tip": place % step == 0 or place == counts[point["row"]] - 1})
    return found


def shown_range(points: Sequence[Mapping[str, Any]]) -> tuple[float, float]:
    """What is shown of the values: all but the first tenth of every row, where training has only begun, if that is
    lower; with some air at both ends."""
    by_row: dict[str, list[Mapping[str, Any]]] = {}
    for point in points:
        by_row.setdefault(point["row"], []).append(point)
    low = min(point["low"] for own in by_row.values() for point in own[len(own) // 10 :])
    high = max(point["high"] for point in points)
    air = (high - low) * 0.06 or max(abs(high) * 0.05, 0.5)
    return low - air, high + air


def measure_name(run: RunLike, measure: str) -> str:
    """What an axis is called."""
    name = MEASURES[measure][0]
    return f"{name}, %" if percent(run) else f"{run.summary['metric']} ({name})"


def accuracy_curves(
    runs: Sequence[RunLike],
    measure: str = "p_acc",
    across: str = "round",
    *,
    title: str = "",
    style: Mapping[str, Look] | None = None,
) -> Figure | None:
    """A measure against the rounds (`round`) or against the MiB that a client has exchanged (`bytes`): one line per row
    with its range over seeds. None where no run has the measure."""
    every = sorted(curves(runs, measure), key=lambda curve: -curve.mean[-1])
    drawn = every[:_MOST_ROWS]
    if not drawn:
        return None
    style = style or looks(run.label for run in runs)
    by_bytes = across == "bytes"
    records, points = _curve_records(drawn), []
    styles = {}
    for curve in drawn:
        silent = by_bytes and not curve.mib[-1]
        row = f"{curve.row} (sends nothing)" if silent else curve.row
        styles[row] = style[curve.row]
        own = [{**record, "row": row} for record in records if record["row"] == curve.row]
        if silent:
            points.append({"row": row, **{key: own[-1][key] for key in ("mean", "low", "high")}})
        else:
            points += [{**record, "x": record["mib"] if by_bytes else record["round"]} for record in own
                       if not by_bytes or record["mib"] > 0]  # fmt: skip
    name = {"p_acc": "accuracy", "g_acc": "shared-accuracy", "v_acc": "validation-accuracy"}[measure]
    heading = {"p_acc": "Accuracy", "g_acc": "Accuracy of the shared model", "v_acc": "V-acc"}[measure]
    heading = heading if percent(runs[0]) else heading.replace("Accuracy", runs[0].summary["metric"])
    caption = _BY_BYTES if by_bytes else ""
    caption += "Mean over seeds; the band is the range over seeds." if _several(points) else "One seed."
    caption += _CUT * (min(point["low"] for point in points) < shown_range(points)[0])
    caption += f" The best {len(drawn)} of {len(every)} rows are drawn." * (len(drawn) < len(every))
    words = "MiB per client, sent and received, framing included" if by_bytes else "round"
    chart = lines(points, words, measure_name(runs[0], measure), log=by_bytes, style=styles, title=title)
    return Figure(f"{name}-{'bytes' if by_bytes else 'rounds'}", f"{heading} against {across if by_bytes else 'rounds'}",
                  caption, _dressed(chart), records)  # fmt: skip


_CUT = " What the first rounds reach below the axis is cut off."
_BY_BYTES = (
    "The same evaluations against the MiB that one client has sent and received on average by then, framing included, on "
    "a logarithmic scale: further left is cheaper. A dashed level is a row that sends nothing. "
)


def _several(points: Iterable[Mapping[str, Any]]) -> bool:
    return any(point["low"] != point["high"] for point in points)


def _curve_records(found: Iterable[Curve]) -> list[dict[str, Any]]:
    return [
        dict(zip(("row", "round", "mib", "mean", "low", "high"), (curve.row, *own), strict=True))
        for curve in found
        for own in zip(curve.rounds, curve.mib, curve.mean, curve.low, curve.high, strict=True)
    ]


def by_setting(section: Section, title: str = "") -> Figure | None: ...
def cost(runs: Sequence[RunLike], style: Mapping[str, Look] | None = None) -> Figure | None: ...
def client_gains(found: Mapping[str, Sequence[Gain]], unit: str) -> Figure: ...
def stages(runs: Sequence[RunLike]) -> Figure | None: ...
def holdings(document: Mapping[str, Any]) -> Figure: ...
