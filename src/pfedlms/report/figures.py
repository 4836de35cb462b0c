"""The figures of runs, each with its title, caption and data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import floor, log10
from pathlib import Path
from statistics import mean
from typing import Any

from pfedlms.report import charts
from pfedlms.report.charts import BLUE, GREY, LIGHT, ORANGE, WIDTH, Figure, Look
from pfedlms.report.plans import partition_label
from pfedlms.report.runs import MEASURES, RunLike, Section, combinations, curves, is_percent, score_text
from pfedlms.report.tables import Table

_MAX_ROWS = 12
"""A figure has at most so many lines; of more rows the best are drawn."""
_SOFT = LIGHT["soft"]
_STAR = "M0,-1L.24,-.32L.95,-.31L.38,.12L.59,.81L0,.4L-.59,.81L-.38,.12L-.95,-.31L-.24,-.32Z"


def measure_name(run: RunLike, measure: str) -> str:
    """The title of an axis."""
    name = MEASURES[measure][0]
    return f"{name}, %" if is_percent(run) else f"{run.summary['metric']} ({name})"


def _has_ranges(points: Iterable[Mapping[str, Any]]) -> bool:
    """Whether any value has a range over seeds."""
    return any(point["low"] != point["high"] for point in points)


def accuracy_curves(
    runs: Sequence[RunLike], measure: str = "p_acc", against: str = "rounds", *, title: str = "",
    style: Mapping[str, Look] | None = None,
) -> Figure | None:  # fmt: skip
    """A measure against `rounds`, or against the `bytes` that a client has sent and received: one line per row with its
    range over seeds. None where no run has the measure."""
    by_row = curves(runs, measure)
    drawn = sorted(by_row, key=lambda row: -by_row[row][-1]["mean"])[:_MAX_ROWS]
    if not drawn:
        return None
    by_bytes = against == "bytes"
    across = "mib" if by_bytes else "round"
    style = style or charts.looks(run.label for run in runs)
    points: list[dict[str, Any]] = []
    styles = {}
    for label in drawn:
        silent = by_bytes and not by_row[label][-1]["mib"]
        row = f"{label} (sends nothing)" if silent else label
        styles[row] = style[label]
        if silent:
            points.append({**by_row[label][-1], "row": row})
        else:
            points += [{**point, "x": point[across]} for point in by_row[label] if point[across]]
    name, heading = {
        "p_acc": ("accuracy", "Accuracy"),
        "g_acc": ("shared-accuracy", "Accuracy of the shared model"),
        "v_acc": ("validation-accuracy", "V-acc"),
    }[measure]
    heading = heading if is_percent(runs[0]) else heading.replace("Accuracy", runs[0].summary["metric"])
    caption = _BY_BYTES * by_bytes
    caption += "Mean over seeds; the band is the range over seeds." if _has_ranges(points) else "One seed."
    if min(point["low"] for point in points) < charts.value_range(points)[0]:
        caption += " What the first rounds reach below the axis is cut off."
    caption += f" The best {len(drawn)} of {len(by_row)} rows are drawn." * (len(drawn) < len(by_row))
    x = "MiB per client, sent and received, framing included" if by_bytes else "round"
    y = measure_name(runs[0], measure)
    chart = charts.line_chart(points, x, y, log_x=by_bytes, style=styles, title=title)
    records = [dict(point) for label in drawn for point in by_row[label]]
    return Figure(f"{name}-{against}", f"{heading} against {against}", caption, charts.apply_style(chart), records)


_BY_BYTES = (
    "The same evaluations against the MiB that one client has sent and received on average by then, framing included, "
    "on a logarithmic scale: further left is cheaper. A dashed level is a row that sends nothing. "
)


def by_setting(section: Section, title: str = "") -> Figure | None:
    """The measure of a sweep against the setting with the most values: one line for each method and values of the other
    settings, with its range over seeds; the best is marked. None before two combinations are finished."""
    scored = [cell for cell in combinations(section) if cell.scores]
    if len(scored) < 2:
        return None
    values_of = {key: list(dict.fromkeys(cell.settings[key] for cell in scored)) for key in section.axes}
    across = max(values_of, key=lambda key: (_are_numbers(values_of[key]), len(values_of[key])))
    numeric = _are_numbers(values_of[across])
    ticks: list[Any] = sorted(values_of[across]) if numeric else list(map(str, values_of[across]))
    points: list[dict[str, Any]] = []
    records = []
    for cell in scored:
        others = [f"{key.partition('.')[2]} {cell.settings[key]}" for key in section.axes if key != across]
        row = ", ".join(filter(None, [cell.settings.get("method"), *others])) or section.by
        value = cell.settings[across] if numeric else str(cell.settings[across])
        values = {"mean": cell.score, "low": min(cell.scores), "high": max(cell.scores)}
        points.append({"row": row, "x": value, **values})
        records.append({**cell.settings, **values})
    best = max(points, key=lambda point: point["mean"])
    starred = {**best, "shown": score_text(best["mean"], section.runs[0].summary)}
    rows = charts.group_by_row(points)
    style = charts.looks(rows) if len(rows) > 1 else dict.fromkeys(rows, Look.number(0))
    points.sort(key=lambda point: ticks.index(point["x"]))
    measure = measure_name(section.runs[0], section.by)
    log = numeric and ticks[0] > 0 and ticks[-1] >= 5 * ticks[0]
    chart = charts.line_chart(
        points, across, measure, log_x=log, show_points=True, ticks=ticks, title=title, style=style
    )
    alt = charts.import_altair()
    star = charts.chart_of([starred]).encode(alt.X("x:Q" if numeric else "x:O"), alt.Y("mean:Q"))
    chart += star.mark_point(shape=_STAR, size=260, filled=True, color=LIGHT["ink"], opacity=1)
    chart += star.mark_text(dy=-16, color=LIGHT["ink"], fontSize=12).encode(alt.Text("shown:N"))
    caption = "Mean of the last evaluations, at most 10, by setting; the star is the best."
    caption += " The band is the range over seeds." * _has_ranges(points)
    return Figure("setting", f"{measure} by {across}", caption, charts.apply_style(chart), records)


def _are_numbers(values: Sequence[Any]) -> bool:
    return all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)


def cost(table: Table, style: Mapping[str, Look]) -> Figure | None:
    """MiB per round of every row of a comparison, up and down; None where nothing is sent."""
    records = [{key: record[key] for key in ("row", "mib_up", "mib_down", "total_bytes")} for record in table.records]
    ends = [
        {"row": record["row"], "way": way, "mib": record[f"mib_{way}"]}
        for record in records
        for way in ("up", "down")
        if record[f"mib_{way}"] > 0
    ]
    if not ends:
        return None
    powers = [floor(log10(end["mib"])) for end in ends]
    decades = [10.0**power for power in range(min(powers), max(powers) + 2)]
    texts = [
        {
            "row": record["row"],
            "mib": max(record["mib_up"], record["mib_down"]) or decades[0],
            "shown": f"{record['mib_up']:.3g} / {record['mib_down']:.3g}" if record["total_bytes"] else "sends nothing",
        }
        for record in records
    ]
    alt = charts.import_altair()
    scale = alt.Scale(type="log", domain=[decades[0], 4 * decades[-1]], nice=False)
    axis = alt.Axis(format="~g", values=decades)
    across = alt.X("mib:Q", title="MiB per round, all participants", scale=scale, axis=axis)
    row = alt.Y("row:N", sort=[record["row"] for record in records], title=None)
    colour = charts.row_colours({record["row"]: style[record["row"]] for record in records}, legend=None)
    legend = alt.Legend(orient="top", symbolSize=90, symbolStrokeWidth=1, symbolFillColor=_SOFT)
    ways = alt.Scale(domain=["up", "down"], range=["triangle-up", "triangle-down"])
    shape = alt.Shape("way:N", scale=ways, legend=legend)
    tips = ["row:N", "way:N", alt.Tooltip("mib:Q", title="MiB per round")]
    labels = charts.chart_of(texts)
    chart = alt.layer(
        labels.mark_rule(opacity=0.4, strokeWidth=1.5).encode(across, row, alt.X2(datum=decades[0]), color=colour),
        *(
            charts.chart_of(end for end in ends if end["way"] == way)
            .mark_point(filled=True, size=90, opacity=1, yOffset=offset)
            .encode(across, row, color=colour, shape=shape, tooltip=tips)
            for way, offset in (("up", -5), ("down", 5))
        ),
        labels.mark_text(align="left", dx=12, color=_SOFT).encode(across, row, alt.Text("shown:N")),
    ).properties(width=WIDTH, height=28 * len(records))
    caption = (
        "What all participants together send (▲) and receive (▼) in a round, framing and catching up included, on a "
        "logarithmic scale: further left is cheaper."
    )
    return Figure("cost", "Cost", caption, charts.apply_style(chart), records)


def client_gains(by_row: Mapping[str, Sequence[Mapping[str, Any]]], unit: str) -> Figure:
    """What each client gains or loses against training alone, one panel per row of `runs.gains`."""
    points, records = [], []
    for row, clients in list(by_row.items())[:_MAX_ROWS]:
        gains = [client["gain"] for client in clients]
        better, worse = sum(gain > 0 for gain in gains), sum(gain < 0 for gain in gains)
        head = f"{row}\nmean {mean(gains):+.2f}{unit} · {better} gain, {worse} lose, of {len(gains)}"
        for place, client in enumerate(sorted(clients, key=lambda client: client["gain"])):
            records.append({"row": row, **client})
            points.append({"head": head, "place": place, **records[-1]})
    alt = charts.import_altair()
    sign = alt.condition("datum.gain > 0", alt.value(BLUE), alt.value(ORANGE))
    tips = ["client:N", "seed:N", "local:Q", "here:Q", "gain:Q"]
    zero = alt.condition("datum.value == 0", alt.value(_SOFT), alt.value(LIGHT["line"]))
    axis = alt.Axis(tickCount=4, format="+.3~r", gridColor=zero)
    gain = alt.Y("gain:Q", title=None, axis=axis)
    chart = alt.Chart().mark_bar().encode(alt.X("place:O", axis=None), gain, color=sign, tooltip=tips)
    caption = (
        "P-acc of each client at the end of the run minus what it reaches by training alone (local, same data, seed "
        "and rounds), sorted; one bar is one client with one seed. Blue gains, orange loses."
    )
    header = alt.Header(title=None, labelExpr="split(datum.value, '\\n')", labelAnchor="start")
    facet = alt.Facet("head:N", header=header, sort=list(dict.fromkeys(point["head"] for point in points)))
    chart = chart.properties(width=300, height=130).facet(facet, columns=2, data=alt.Data(values=points))
    return Figure("clients", "Clients against local", caption, charts.apply_style(chart), records)


def client_map(document: Mapping[str, Any]) -> Figure:
    """A heat map of the samples by client and class, and beside it each client's samples by part. `document` is that of
    `pfedlms data show`."""
    clients, classes = document["clients"], document["classes"]
    names = [client["name"] for client in clients]
    counts = [
        {"client": client["name"], "class": name, "samples": count}
        for client in clients
        for name, count in zip(classes, client["classes"], strict=True)
    ]
    parts = [part for part in ("train", "validation", "test") if part in clients[0]]
    sizes = [
        {"client": client["name"], "part": part, "samples": client[part], "place": place}
        for client in clients
        for place, part in enumerate(parts)
    ]
    most = max(count["samples"] for count in counts)
    show_names = len(clients) <= 40
    show_counts = show_names and len(classes) <= 20
    height = min(max(16 * len(clients), 120), 900)
    alt = charts.import_altair()
    row = alt.Y("client:N", sort=names, axis=alt.Axis(title="client", labels=show_names, labelFontSize=9))
    angle = -90 if max(map(len, classes)) > 3 else 0
    axis = alt.Axis(labels=len(classes) <= 40, labelAngle=angle, labelLimit=90, ticks=False)
    column = alt.X("class:N", sort=list(classes), axis=axis)
    # Opacity, not a range of colours, so that the map fits both themes.
    scale = alt.Scale(domain=[0, most], range=[0, 1])
    shade = alt.Opacity("samples:Q", scale=scale, legend=None if show_counts else alt.Legend(title="samples"))
    heat_map = charts.chart_of(counts).mark_rect(color=BLUE).encode(
        column, row, opacity=shade, tooltip=["client:N", "class:N", "samples:Q"]
    )  # fmt: skip
    if show_counts:
        ink = alt.condition(f"datum.samples > {most / 2}", alt.value(LIGHT["paper"]), alt.value(LIGHT["ink"]))
        numbers = charts.chart_of(count for count in counts if count["samples"]).mark_text(fontSize=8)
        heat_map += numbers.encode(column, row, alt.Text("samples:Q"), color=ink)
    shades = {"train": BLUE, "validation": ORANGE, "test": GREY}
    colours = alt.Scale(domain=parts, range=[shades[part] for part in parts])
    bars = charts.chart_of(sizes).mark_bar().encode(
        alt.X("samples:Q"), alt.Y("client:N", sort=names, axis=None), alt.Order("place:Q"),
        alt.Color("part:N", scale=colours, legend=alt.Legend(orient="top")),
        tooltip=["client:N", "part:N", "samples:Q"],
    )  # fmt: skip
    title = f"{Path(document['dataset']).name} · {len(clients)} clients · {partition_label(document)}"
    width = min(max(240, 26 * len(classes)), 900)
    chart = alt.hconcat(
        heat_map.properties(width=width, height=height), bars.properties(width=150, height=height), title=title
    )
    return Figure("holdings", title, "", charts.apply_style(chart.resolve_scale(color="independent")), counts)
