"""Figures of a single run's insides: distributions by layer, symbols, time by stage; and a sweep's measure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import mean
from typing import Any

from pfedlms.report.page.figures import Axis, Figure, Line, lines
from pfedlms.report.page.layers import Histogram, LayerView
from pfedlms.report.page.svg import Look, Scale, cut, drawing, figure_text, linear_ticks, looks, tag, tip, words

_LINE = "var(--line)"
MOST_LAYERS = 12


def shown_layers(layers: Sequence[LayerView]) -> list[LayerView]:
    """All of a few, or the largest of many, in the order of the model."""
    if len(layers) <= MOST_LAYERS:
        return list(layers)
    large = sorted(layers, key=lambda layer: -layer.size)[:MOST_LAYERS]
    return [layer for layer in layers if layer in large]


def distributions(layers: Sequence[LayerView], name: str, of: str) -> Figure:
    """Weights and sketches of every layer, with the thresholds."""
    shown = shown_layers(layers)

    def draw(width: int) -> str:
        columns = 2 if width >= 500 else 1
        own, tall = width / columns, 178
        parts: list[str] = []
        for at, layer in enumerate(shown):
            for column, (label, drawn, drawn_in) in enumerate(
                (
                    (f"{layer.size:,} weights", layer.weights, []),
                    (f"sketch, {layer.sketched:,} entries", layer.sketch, layer.thresholds),
                )
            ):
                cell = at * 2 + column
                left, top = own * (cell % columns), tall * (cell // columns)
                parts += _histogram(drawn, drawn_in, f"layer {cut(layer.name, 22)}: {label}", left, top, own)
        return drawing(parts, width, tall * -(-2 * len(shown) // columns), f"distributions by layer of {of}")

    caption = (
        f"{of}, all clients that trained last, as they would be sent in the next round. Grey: the weights of a layer; "
        "green: its sketch Φθ, with the thresholds τ that clients agree on as lines. Values beyond 4 σ are in the "
        "outermost bins."
    )
    rows: list[tuple[object, ...]] = []
    for layer in layers:
        for what, histogram in (("weights", layer.weights), ("sketch", layer.sketch)):
            edges = histogram.edges.tolist()
            rows += [
                (layer.name, what, low, high, share)
                for low, high, share in zip(edges[:-1], edges[1:], histogram.shares.tolist(), strict=True)
            ]
        rows += [(layer.name, "threshold", tau, tau, None) for tau in layer.thresholds]
    return Figure(name, "Layers: weights, sketches and thresholds", caption + _more(layers), draw,
                  ("layer", "what", "from", "to", "share"), rows)  # fmt: skip


def _more(layers: Sequence[LayerView]) -> str:
    hidden = len(layers) - len(shown_layers(layers))
    return f" The {MOST_LAYERS} largest layers are shown; {hidden} more are in the CSV." if hidden else ""


def _histogram(
    drawn: Histogram, thresholds: Sequence[float], label: str, left: float, top: float, width: float
) -> list[str]:
    edges, shares = drawn.edges.tolist(), drawn.shares.tolist()
    across = Scale(edges[0], edges[-1], left + 8, left + width - 16)
    up = Scale(0.0, max(shares) or 1.0, top + 146, top + 34)
    parts = [words(label, left + 8, top + 18, fill="var(--ink)", font_size=12.5, font_weight=600)]
    for low, high, share in zip(edges[:-1], edges[1:], shares, strict=True):
        place, end = across(low), across(high)
        told = tip(f"{low:.3g} to {high:.3g}: {100 * share:.2f} %")
        shown = {"x": place, "width": max(end - place - 0.6, 0.4), "y": up(share), "height": up(0) - up(share)}
        parts.append(tag("rect", told, fill="var(--c1)" if thresholds else "var(--c3)", fill_opacity="0.75", **shown))
    for number, tau in enumerate(thresholds, 1):
        if edges[0] <= tau <= edges[-1]:
            told = tip(f"τ{number} = {tau:.4g}")
            spot = {"x1": across(tau), "x2": across(tau), "y1": top + 28, "y2": top + 150}
            parts.append(tag("line", told, stroke="var(--c2)", stroke_width=1.5, **spot))
    parts.append(tag("line", x1=across.start, x2=across.end, y1=up(0), y2=up(0), stroke="var(--soft)"))
    for tick in linear_ticks(edges[0], edges[-1], 4):
        parts.append(tag("line", x1=across(tick), x2=across(tick), y1=up(0), y2=up(0) + 4, stroke="var(--soft)"))
        parts.append(words(figure_text(tick), across(tick), top + 163, text_anchor="middle", font_size=11))
    return parts


def symbols(layers: Sequence[LayerView], name: str, of: str) -> Figure:
    """How often each symbol is sent, by layer."""
    shown = shown_layers(layers)

    def draw(width: int) -> str:
        columns = max(1, min(len(shown), width // 240 if width >= 500 else 1))
        own, tall = width / columns, 150
        parts: list[str] = []
        for at, layer in enumerate(shown):
            parts += _bars(layer, own * (at % columns), tall * (at // columns), own)
        return drawing(parts, width, tall * -(-len(shown) // columns), f"symbols by layer of {of}")

    caption = (
        f"{of}: the share of sketch entries in each of the intervals between thresholds, which is the symbol sent; the "
        "line is an equal share, at which a symbol carries the most."
    )
    rows: list[tuple[object, ...]] = [
        (layer.name, symbol, share) for layer in layers for symbol, share in enumerate(layer.symbols)
    ]
    return Figure(name, "Symbols sent", caption + _more(layers), draw, ("layer", "symbol", "share"), rows)


def _bars(layer: LayerView, left: float, top: float, width: float) -> list[str]:
    count = len(layer.symbols)
    even = 1 / count
    up = Scale(0.0, max(*layer.symbols, even), top + 118, top + 32)
    step = (width - 24) / count
    parts = [
        words(f"layer {cut(layer.name, 22)}", left + 8, top + 18, fill="var(--ink)", font_size=12.5, font_weight=600)
    ]
    for symbol, share in enumerate(layer.symbols):
        shown = {"x": left + 8 + step * symbol, "width": step * 0.86, "y": up(share), "height": up(0) - up(share)}
        parts.append(tag("rect", tip(f"symbol {symbol}: {100 * share:.2f} %"), fill="var(--c1)", **shown))
        if count <= 16 or symbol % -(-count // 8) == 0:
            place = left + 8 + step * (symbol + 0.43)
            parts.append(words(str(symbol), place, top + 134, text_anchor="middle", font_size=11))
    place = up(even)
    parts.append(tag("line", tip(f"equal shares: {100 * even:.2f} %"), x1=left + 6, x2=left + width - 14, y1=place,
                     y2=place, stroke="var(--c2)", stroke_width=1.5, stroke_dasharray="4 3"))  # fmt: skip
    return parts


def stages(profiled: Mapping[str, tuple[Mapping[str, float], int]]) -> Figure:
    """Milliseconds a round by stage, of runs (label → seconds by stage, rounds)."""
    table = [
        (label, stage, 1e3 * spent / max(1, rounds))
        for label, (seconds, rounds) in profiled.items()
        for stage, spent in sorted(seconds.items(), key=lambda item: -item[1])
    ]
    most = max(spent for *_, spent in table) or 1.0

    def draw(width: int) -> str:
        left, parts, top, last = (190.0 if width >= 500 else 130.0), [], 0.0, None
        scale = Scale(0.0, most, left, width - 76.0)
        for label, stage, spent in table:
            if label != last:
                top += 26
                parts.append(words(cut(label, 44), 0, top - 8, fill="var(--ink)", font_weight=600, font_size=13))
                last = label
            parts.append(words(cut(stage, 26), left - 8, top + 13, text_anchor="end", font_size=12))
            bar = {"x": left, "y": top + 2, "height": 14, "width": max(scale(spent) - left, 0.6)}
            parts.append(tag("rect", tip(f"{stage}: {spent:.3f} ms a round"), fill="var(--c0)", **bar))
            parts.append(words(f"{figure_text(float(f'{spent:.3g}'))} ms", scale(spent) + 6, top + 13))
            top += 22
        return drawing(parts, width, top + 8, "milliseconds a round by stage")

    caption = "Milliseconds a round, of runs made with --profile. A stage inside another counts for both."
    return Figure("stages", "Time by stage", caption, draw, ("run", "stage", "ms_a_round"), [*table])


def setting(cells: Sequence[tuple[str, dict[str, Any], list[float]]], measure: str) -> Figure:
    """A sweep's measure against the setting with the most values, a line a combination of the others."""
    keys = list(cells[0][1])
    tried = {key: list(dict.fromkeys(chosen[key] for _, chosen, _ in cells)) for key in keys}
    across = max(tried, key=lambda key: (_numeric(tried[key]), len(tried[key])))
    numeric = _numeric(tried[across])
    ticks = sorted(tried[across]) if numeric else tried[across]
    log = numeric and min(ticks) > 0 and max(ticks) >= 5 * min(ticks)
    found: dict[str, list[tuple[float, list[float]]]] = {}
    for _, chosen, scores in cells:
        others = ", ".join(f"{key.partition('.')[2]} {chosen[key]}" for key in keys if key != across)
        place = float(chosen[across]) if numeric else float(ticks.index(chosen[across]))
        found.setdefault(others or measure, []).append((place, scores))
    look: dict[str, Look] = looks(found)
    drawn = []
    for name, points in found.items():
        points.sort(key=lambda point: point[0])
        own = [scores for _, scores in points]
        drawn.append(Line(name, look[name], [at for at, _ in points], [*map(mean, own)], [*map(min, own)],
                          [*map(max, own)]))  # fmt: skip
    places = tuple((float(tick) if numeric else float(at), str(tick)) for at, tick in enumerate(ticks))

    def tell(line: Line, at: int) -> str:
        value = next(text for place, text in places if place == line.x[at])
        return f"{line.name}, {across} {value}: {line.middle[at]:.4g}"

    def draw(width: int) -> str:
        return lines(drawn, width, Axis(across, log=log, ticks=places), Axis(measure), tell, marks=True)

    rows: list[tuple[object, ...]] = [
        (*chosen.values(), mean(scores), min(scores), max(scores)) for _, chosen, scores in cells
    ]
    several = any(len(scores) > 1 for _, _, scores in cells)
    caption = "Mean of the last evaluations by setting" + "; the band is the range over seeds" * several + "."
    return Figure("setting", f"{measure} by {across}", caption, draw, (*keys, "mean", "lowest", "highest"), rows)


def _numeric(values: Sequence[Any]) -> bool:
    return all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)
