"""The figures of a page. Each is drawn for the width it is shown at, wide or narrow, as an `<svg>`, and has its data as
rows."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import floor, log10
from zlib import crc32

from pfedlms.report.page.measures import Curve, Gain, Row
from pfedlms.report.page.svg import (
    Look,
    Scale,
    cut,
    drawing,
    figure_text,
    linear_ticks,
    spread_out,
    tag,
    tip,
    words,
)

WIDE, NARROW = 760, 350
_TIPS = 40  # places of a curve that say what is there
_FEW, _SHORT = 6, 16  # lines, and letters of their names, that stand right at the ends of lines
_LINE = "var(--line)"


@dataclass(frozen=True)
class Figure:
    """A drawing for any width, and what it shows as a table."""

    name: str
    """Of its files."""
    title: str
    caption: str
    draw: Callable[[int], str]
    header: tuple[str, ...]
    rows: list[tuple[object, ...]]

    def csv(self) -> str:
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows([self.header, *self.rows])
        return text.getvalue()


@dataclass(frozen=True)
class Line:
    """What `lines` draws: points with a range, and a look."""

    name: str
    look: Look
    x: list[float]
    middle: list[float]
    low: list[float]
    high: list[float]

    @property
    def level(self) -> bool:
        """Whether it stands for one value at every x, drawn from side to side."""
        return not self.x


@dataclass(frozen=True)
class Axis:
    """One side of a drawing."""

    label: str
    log: bool = False
    ticks: tuple[tuple[float, str], ...] = ()
    """Places and words, where values alone will not do."""
    whole: bool = False
    """Whether there is nothing between whole numbers."""


def lines(drawn: Sequence[Line], width: int, x: Axis, y: Axis, tell: Callable[[Line, int], str], marks: bool) -> str:
    """Lines with their ranges; named at their ends where there is room, else above."""
    wide = width >= 500
    names = [cut(line.name, 30 if wide else 42) for line in drawn]
    legend = [] if wide else _legend(names, drawn, width)
    above = 32 + 18 * (1 + max((at[1] for at in legend), default=0)) if legend else 20
    right = 14 + (7.0 * max(map(len, names)) + 10 if wide else 0)
    left, below, height = 44.0, 44, (380 if wide else 300 + above)
    inner = (left, width - right, float(height - below), float(above + 4))

    values = [line for line in drawn if not line.level]
    across = [value for line in values for value in line.x]
    low, high = _range(drawn)
    span_x = (min(across), max(across)) if across else (0.0, 1.0)
    if span_x[0] == span_x[1]:
        span_x = (span_x[0] / 2, span_x[0] * 2) if x.log else (span_x[0] - 1, span_x[0] + 1)
    to_x, to_y = Scale(*span_x, inner[0], inner[1], log=x.log), Scale(low, high, inner[2], inner[3])
    parts = [*_axes(to_x, to_y, x, y, width, height)]

    clip = f"clip-{crc32(repr((x, y, width, inner, low, high)).encode()):08x}"
    box = tag("rect", x=inner[0] - 4, y=inner[3] - 8, width=inner[1] - inner[0] + 8, height=inner[2] - inner[3] + 8)
    parts.append(tag("defs", tag("clipPath", box, id=clip)))
    shapes = []
    for line in drawn:
        xs = [inner[0], inner[1]] if line.level else [to_x(value) for value in line.x]
        ys = [[to_y(v) for v in own] * (2 if line.level else 1) for own in (line.middle, line.low, line.high)]
        look = {"stroke": line.look.colour, "stroke_dasharray": "3 4" if line.level else line.look.dash or None}
        if line.low != line.high and len(xs) > 1:
            outline = _path([*zip(xs, ys[2], strict=True), *zip(xs[::-1], ys[1][::-1], strict=True)])
            shapes.append(tag("path", d=outline + "Z", fill=line.look.colour, fill_opacity="0.14"))
        path = _path(list(zip(xs, ys[0], strict=True)))
        shapes.append(tag("path", tip(line.name), d=path, fill="none", stroke_width=2, stroke_linejoin="round", **look))
        step = max(1, -(-len(xs) // _TIPS))
        alone = marks or len(xs) == 1
        for at in [] if line.level else [*range(0, len(xs) - 1, step), len(xs) - 1]:
            dot = {"r": 3.5, "fill": line.look.colour} if alone else {"r": 5, "fill": "transparent"}
            shapes.append(tag("circle", tip(tell(line, at)), cx=xs[at], cy=ys[0][at], **dot))
    parts.append(tag("g", *shapes, clip_path=f"url(#{clip})"))
    if wide:
        # Long names would lie over other lines; they stand in a column of their own.
        beside = len(values) <= _FEW and max((len(line.name) for line in values), default=0) <= _SHORT
        ends = [to_x(line.x[-1]) if beside and not line.level else inner[1] for line in drawn]
        levels = [min(max(to_y(line.middle[-1]), inner[3]), inner[2]) for line in drawn]
        for line, name, (at, place) in zip(drawn, names, _at_ends(ends, levels, names, inner), strict=True):
            shown = {"fill": line.look.colour, "font_weight": 600, "dominant_baseline": "middle", **_HALO}
            parts.append(words(name, at + 8, place, **shown))
    for line, name, (at, row) in zip(drawn, names, legend, strict=False):
        place = 16 + 18 * row
        sample = tag("line", x1=at - 6, x2=at + 11, y1=place - 4, y2=place - 4, stroke=line.look.colour,
                     stroke_width=3, stroke_dasharray=line.look.dash or None)  # fmt: skip
        parts.append(sample)
        parts.append(words(name, at + 15, place, font_size=12, fill="var(--ink)"))
    return drawing(parts, width, height, f"{y.label} against {x.label}: {', '.join(line.name for line in drawn)}")


_HALO = {"stroke": "var(--paper)", "stroke_width": 4, "stroke_linejoin": "round", "paint_order": "stroke"}
"""So that a name can be read where a line passes behind it."""


def _at_ends(
    ends: Sequence[float], levels: Sequence[float], names: Sequence[str], inner: tuple[float, float, float, float]
) -> list[tuple[float, float]]:
    """Where names stand: right of the ends of their lines, those that would lie over each other one below the other."""
    groups: list[list[int]] = []
    reach = 0.0
    for at in sorted(range(len(ends)), key=lambda at: ends[at]):
        if groups and ends[at] < reach:
            groups[-1].append(at)
        else:
            groups.append([at])
        reach = max(reach, ends[at] + 8 + 7.0 * len(names[at]))
    places = [(0.0, 0.0)] * len(ends)
    for group in groups:
        spread = spread_out([levels[at] for at in group], 15, inner[3], inner[2])
        for at, place in zip(group, spread, strict=True):
            places[at] = ends[at], place
    return places


def _range(drawn: Sequence[Line]) -> tuple[float, float]:
    """What is shown of the values: all but the first tenth of a line, where training has only begun, if that is lower;
    with air at both ends."""
    lows = [value for line in drawn for value in line.low[len(line.low) // 10 :]]
    low, high = min(lows), max(value for line in drawn for value in line.high)
    air = (high - low) * 0.06 or max(abs(high) * 0.05, 0.5)
    return low - air, high + air


def cut_off(drawn: Sequence[Line]) -> bool:
    """Whether some of a line lies below what is shown."""
    return min(value for line in drawn for value in line.low) < _range(drawn)[0]


def _legend(names: Sequence[str], drawn: Sequence[Line], width: int) -> list[tuple[float, int]]:
    """Where each name stands: x and row."""
    places, at, row = [], 8.0, 0
    for name in names:
        needed = 15 + 6.8 * len(name) + 14
        if at > 8 and at + needed > width:
            at, row = 8.0, row + 1
        places.append((at, row))
        at += needed
    return places


def _axes(to_x: Scale, to_y: Scale, x: Axis, y: Axis, width: int, height: int) -> list[str]:
    parts = [words(y.label, 4, to_y.end - 10, fill="var(--soft)")]
    for tick in to_y.ticks(8):
        place = to_y(tick)
        parts.append(tag("line", x1=to_x.start, x2=to_x.end, y1=place, y2=place, stroke=_LINE))
        parts.append(words(figure_text(tick), to_x.start - 8, place + 4, text_anchor="end"))
    room = max(2, int((to_x.end - to_x.start) // 70))
    values = [tick for tick in to_x.ticks(room) if not x.whole or tick == round(tick)]
    for value, text in x.ticks or [(tick, figure_text(tick)) for tick in values]:
        parts.append(tag("line", x1=to_x(value), x2=to_x(value), y1=to_y.start, y2=to_y.start + 5, stroke=_LINE))
        parts.append(words(text, to_x(value), to_y.start + 19, text_anchor="middle"))
    parts.append(words(x.label, (to_x.start + to_x.end) / 2, height - 6, text_anchor="middle"))
    return parts


def _path(points: Sequence[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)


def over_rounds(curves: Sequence[Curve], looks: Mapping[str, Look], measure: str, name: str, title: str) -> Figure:
    """A measure against rounds."""
    drawn = [Line(c.name, looks[c.name], [*map(float, c.rounds)], c.middle, c.low, c.high) for c in curves]

    def tell(line: Line, at: int) -> str:
        return f"{line.name}, round {line.x[at]:g}: {_ranged(line, at)}"

    def draw(width: int) -> str:
        return lines(drawn, width, Axis("round", whole=True), Axis(measure), tell, marks=False)

    rows: list[tuple[object, ...]] = [
        (c.name, r, m, lo, hi) for c in curves for r, m, lo, hi in zip(c.rounds, c.middle, c.low, c.high, strict=True)
    ]
    several = any(line.low != line.high for line in drawn)
    caption = "Mean over seeds; the band is the range over seeds." if several else "One seed."
    caption += _CUT * cut_off(drawn)
    return Figure(name, title, caption, draw, ("row", "round", "mean", "lowest", "highest"), rows)


_CUT = " What the first rounds reach below the axis is cut off."


def over_bytes(curves: Sequence[Curve], looks: Mapping[str, Look], measure: str) -> Figure:
    """A measure against what a client has exchanged; who sends nothing is a level."""
    drawn = []
    for c in curves:
        if c.mib[-1] > 0:
            sent = [at for at, mib in enumerate(c.mib) if mib > 0]
            own = ([column[at] for at in sent] for column in (c.mib, c.middle, c.low, c.high))
            drawn.append(Line(c.name, looks[c.name], *own))
        else:
            ends = (c.middle[-1:], c.low[-1:], c.high[-1:])
            drawn.append(Line(f"{c.name} (sends nothing)", looks[c.name], [], *ends))

    def tell(line: Line, at: int) -> str:
        return f"{line.name}, after {line.x[at]:.4g} MiB: {_ranged(line, at)}"

    def draw(width: int) -> str:
        return lines(drawn, width, Axis("MiB a client has exchanged", log=True), Axis(measure), tell, marks=False)

    rows: list[tuple[object, ...]] = [
        (c.name, r, mib, m, lo, hi)
        for c in curves
        for r, mib, m, lo, hi in zip(c.rounds, c.mib, c.middle, c.low, c.high, strict=True)
    ]
    caption = (
        "The same evaluations against the MiB that one client has sent and received on average by then, framing "
        "included, on a logarithmic scale: further left is cheaper. A dashed level is a row that sends nothing."
    )
    header = ("row", "round", "mib_a_client", "mean", "lowest", "highest")
    return Figure("accuracy-bytes", "Accuracy against bytes", caption + _CUT * cut_off(drawn), draw, header, rows)


def _ranged(line: Line, at: int) -> str:
    between = f" ({line.low[at]:.4g} to {line.high[at]:.4g})" if line.low[at] != line.high[at] else ""
    return f"{line.middle[at]:.4g}{between}"


def cost(rows: Sequence[Row], looks: Mapping[str, Look]) -> Figure:
    """MiB a round by row, up and down, on a logarithmic scale."""
    sent = [value for row in rows for value in (row.up, row.down) if value > 0]
    low, high = 10.0 ** floor(log10(min(sent))), 10.0 ** (floor(log10(max(sent))) + 1)

    def draw(width: int) -> str:
        wide = width >= 500
        left = min(7.0 * max(len(cut(row.name, 30)) for row in rows) + 20, 240) if wide else 10.0
        step, top = (30 if wide else 44), 30
        height = top + step * len(rows) + 48
        scale = Scale(low, high, left + 6, width - (136.0 if wide else 16.0), log=True)
        bottom = top + step * len(rows)
        parts = []
        for tick in scale.ticks(6 if wide else 3):
            place = scale(tick)
            parts.append(tag("line", x1=place, x2=place, y1=top, y2=bottom, stroke=_LINE))
            parts.append(words(figure_text(tick), place, bottom + 18, text_anchor="middle"))
        parts.append(words("MiB a round, all participants", (scale.start + scale.end) / 2, height - 6,
                           text_anchor="middle"))  # fmt: skip
        parts.append(words("▲ up   ▽ down", scale.start, 16))
        for at, row in enumerate(rows):
            middle = top + step * (at + 0.5) + (0 if wide else 8)
            look = looks[row.name]
            name = {"fill": look.colour, "font_weight": 600}
            if wide:
                parts.append(words(cut(row.name, 30), left - 6, middle + 4, text_anchor="end", **name))
            else:
                parts.append(words(cut(row.name, 40), scale.start, middle - 12, **name))
            if not row.up + row.down:
                parts.append(words("sends nothing", scale.start + 4, middle + 4, font_style="italic"))
                continue
            ends = [scale(value) for value in (row.up, row.down) if value > 0]
            parts.append(tag("line", x1=scale.start, x2=max(ends), y1=middle, y2=middle, stroke=look.colour,
                             stroke_width=1.5, stroke_opacity="0.5"))  # fmt: skip
            for value, up in ((row.up, True), (row.down, False)):
                if value > 0:
                    told = tip(f"{row.name}, {'up' if up else 'down'}: {value:.4g} MiB a round")
                    parts.append(tag("path", told, d=_triangle(scale(value), middle, up), stroke=look.colour,
                                     stroke_width=1.5, fill=look.colour if up else "var(--paper)"))  # fmt: skip
            if wide:
                both = f"{row.up:.3g} / {row.down:.3g}"
                parts.append(words(both, width - 4, middle + 4, text_anchor="end"))
        return drawing(parts, width, height, "MiB a round by row, on a logarithmic scale")

    caption = (
        "What all participants together send (▲) and receive (▽) in a round, framing and catching up included, on a "
        "logarithmic scale: further left is cheaper."
    )
    table: list[tuple[object, ...]] = [(row.name, row.up, row.down, row.total) for row in rows]
    header = ("row", "mib_up_a_round", "mib_down_a_round", "mib_of_the_run")
    return Figure("cost", "Cost", caption, draw, header, table)


def _signed(value: float) -> str:
    return f"{value:+g}".replace("-", "−") if value else "0"


def _triangle(x: float, y: float, up: bool) -> str:
    """Above a line, pointing up, or below it, pointing down."""
    way = -1 if up else 1
    return _path([(x - 4.5, y + way), (x + 4.5, y + way), (x, y + 9 * way)]) + "Z"


def gain(found: Mapping[str, Sequence[Gain]], unit: str) -> Figure:
    """What each client gains or loses against training alone, a panel a row."""
    every = [each.gain for own in found.values() for each in own]
    lowest, highest = min(0.0, *every), max(0.0, *every)
    if lowest == highest:
        lowest, highest = -1.0, 1.0

    def panel(name: str, own: Sequence[Gain], left: float, top: float, width: float) -> list[str]:
        ordered = sorted(own, key=lambda each: each.gain)
        better = sum(each.gain > 0 for each in own)
        worse = sum(each.gain < 0 for each in own)
        mean = sum(each.gain for each in own) / len(own)
        scale = Scale(lowest, highest, top + 186, top + 50)
        step = (width - 50) / len(ordered)
        parts = [
            words(cut(name, 34), left, top + 16, fill="var(--ink)", font_weight=600, font_size=13),
            words(f"mean {mean:+.2f}{unit} · {better} gain, {worse} lose, of {len(own)}", left, top + 34),
        ]
        for tick in linear_ticks(lowest, highest, 4):
            place = scale(tick)
            stroke = "var(--soft)" if tick == 0 else _LINE
            parts.append(tag("line", x1=left + 40, x2=left + width - 10, y1=place, y2=place, stroke=stroke))
            parts.append(words(_signed(tick), left + 34, place + 4, text_anchor="end"))
        for at, each in enumerate(ordered):
            place, zero = scale(each.gain), scale(0)
            told = f"{each.client}, seed {each.seed}: {each.gain:+.2f}{unit} ({each.alone:.2f} → {each.here:.2f})"
            shown = {"x": left + 40 + step * at, "width": max(step * 0.82, 0.4), "y": min(place, zero),
                     "height": max(abs(place - zero), 0.8)}  # fmt: skip
            colour = "var(--c0)" if each.gain > 0 else "var(--c2)" if each.gain < 0 else "var(--c3)"
            parts.append(tag("rect", tip(told), fill=colour, **shown))
        return parts

    def draw(width: int) -> str:
        columns = max(1, width // 340) if len(found) > 1 else 1
        own = width / columns
        parts = [
            part
            for at, (name, gains) in enumerate(found.items())
            for part in panel(name, gains, own * (at % columns), 206 * (at // columns), own)
        ]
        return drawing(parts, width, 206 * -(-len(found) // columns), "what each client gains against local")

    caption = (
        "P-acc of each client at the end of the run minus what it reaches by training alone (local, same data, seed "
        "and rounds), sorted; a bar is a client with one seed. Blue gains, orange loses."
    )
    rows: list[tuple[object, ...]] = [
        (name, each.client, each.seed, each.alone, each.here, each.gain) for name, own in found.items() for each in own
    ]
    return Figure("clients", "Clients against local", caption, draw,
                  ("row", "client", "seed", "local", "here", "gain"), rows)  # fmt: skip
