"""Pieces of a drawing: elements as text, everything in them escaped; scales, ticks and the colours of rows."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from math import ceil, floor, log10

LIGHT = {
    "ink": "#1f2430", "soft": "#5b6472", "line": "#d9dde3", "paper": "#ffffff",
    "c0": "#0072b2", "c1": "#00805d", "c2": "#c84c00", "c3": "#6b7280",
    "c4": "#a8538a", "c5": "#a87400", "c6": "#2b95cf", "c7": "#7a4a21",
}  # fmt: skip
DARK = {
    "ink": "#e8eaee", "soft": "#a3abb8", "line": "#343a45", "paper": "#14171c",
    "c0": "#5aaef0", "c1": "#35c49a", "c2": "#ff8a4c", "c3": "#a1a8b3",
    "c4": "#e08fc0", "c5": "#e3b341", "c6": "#8ad0ff", "c7": "#cf9f72",
}  # fmt: skip
"""Colours by name, apart for every kind of colour vision; drawings say `var(--name)`."""
_OWN = {
    "sketchvote": 0, "pfedlms": 1, "fedavg": 2, "local": 3, "pfed1bs": 4, "eden": 5, "stc": 6, "zsign": 7,
}  # fmt: skip
_DASHES = ("", "6 3", "2 3", "8 3 2 3")
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"


@dataclass(frozen=True)
class Look:
    """How a row is drawn, everywhere on the page."""

    colour: str
    dash: str = ""


def looks(names: Iterable[str]) -> dict[str, Look]:
    """A look for every name: methods have colours of their own, others what is free, then dashes."""
    chosen: dict[str, Look] = {}
    taken: set[tuple[int, int]] = set()
    wanted = list(dict.fromkeys(names))
    for name in sorted(wanted, key=lambda each: each not in _OWN):
        free = ((dash, colour) for dash in range(len(_DASHES)) for colour in range(8) if (dash, colour) not in taken)
        place = (0, _OWN[name]) if name in _OWN else next(free, (len(chosen) % len(_DASHES), len(chosen) % 8))
        taken.add(place)
        chosen[name] = Look(f"var(--c{place[1]})", _DASHES[place[0]])
    return {name: chosen[name] for name in wanted}


def tag(name: str, *inside: str, **attributes: object) -> str:
    """An element; `inside` is markup already, attributes are escaped. `x_y` stands for `x-y`, `class_` for `class`;
    what is None is left out."""
    said = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(_short(value), quote=True)}"'
        for key, value in attributes.items()
        if value is not None
    )
    return f"<{name}{said}>{''.join(inside)}</{name}>"


def words(text: str, x: float, y: float, **attributes: object) -> str:
    """Text at a place."""
    given = {"font_size": 12, "fill": "var(--soft)", **attributes}
    return tag("text", escape(text), x=x, y=y, **given)


def tip(text: str) -> str:
    """What is shown when the pointer rests on an element."""
    return tag("title", escape(text))


def drawing(inside: Sequence[str], width: float, height: float, label: str) -> str:
    """An `<svg>` that scales with its place and tells what it shows."""
    return tag(
        "svg", *inside, xmlns="http://www.w3.org/2000/svg", viewBox=f"0 0 {_short(width)} {_short(height)}",
        width=width, height=height, role="img", aria_label=label, font_family=FONT,
    )  # fmt: skip


def alone(drawn: str) -> str:
    """A drawing as a file of its own: colours said, not named, so that every program shows them; on white."""
    plain = re.sub(r"var\(--(\w+)\)", lambda found: LIGHT[found[1]], drawn)
    head, rest = plain.split(">", 1)
    return f"{head}>{tag('rect', width='100%', height='100%', fill=LIGHT['paper'])}{rest}\n"


def _short(value: object) -> str:
    """A number with as many digits as a drawing needs."""
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)


@dataclass(frozen=True)
class Scale:
    """Values `low … high` → places `start … end`, by their logarithms if `log`."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        low, high, own = (log10(v) if self.log else v for v in (self.low, self.high, value))
        share = (own - low) / (high - low) if high > low else 0.5
        return self.start + share * (self.end - self.start)

    def ticks(self, count: int = 5) -> list[float]:
        """Round values within, about `count` of them; of a logarithmic scale 1, or 1, 2 and 5, of a decade."""
        if not self.log:
            return linear_ticks(self.low, self.high, count)
        decades = range(floor(log10(self.low)), ceil(log10(self.high)) + 1)
        steps = (1, 2, 5) if len(decades) <= 3 else (1,)
        ticks = [step * 10.0**decade for decade in decades for step in steps]
        within = [tick for tick in ticks if self.low * (1 - 1e-9) <= tick <= self.high * (1 + 1e-9)]
        return within[:: ceil(len(within) / (count + 2))] if within else [self.low]


def linear_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten.

    >>> linear_ticks(0, 30)
    [0.0, 10.0, 20.0, 30.0]
    """
    if high <= low:
        return [low]
    raw = (high - low) / count
    power = 10.0 ** floor(log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * (1 - 1e-9))
    first, last = ceil(low / step - 1e-9), floor(high / step + 1e-9)
    return [round(number * step, 12) + 0.0 for number in range(first, last + 1)]


def figure_text(value: float) -> str:
    """A tick's value in few characters.

    >>> [figure_text(value) for value in (0.001, -0.25, 97.5, 1500, 2e6, -0.0)]
    ['0.001', '−0.25', '97.5', '1500', '2e+06', '0']
    """
    text = f"{value:.4g}"
    return "0" if float(text) == 0 else text.replace("-", "−")


def cut(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"


def spread_out(places: Sequence[float], gap: float, top: float, bottom: float) -> list[float]:
    """Places for labels at about `places`, at least `gap` apart, in the same order and within bounds if there is room.

    >>> spread_out([10, 11, 50], 10, 0, 100)
    [5.5, 15.5, 50.0]
    """
    order = sorted(range(len(places)), key=lambda at: places[at])
    blocks: list[list[float]] = []  # [centre, members], each as wide as its members need
    for at in order:
        blocks.append([float(places[at]), 1.0])
        while len(blocks) > 1 and blocks[-1][0] - blocks[-2][0] < gap * (blocks[-1][1] + blocks[-2][1]) / 2:
            centre, members = blocks.pop()
            before, others = blocks.pop()
            blocks.append([(centre * members + before * others) / (members + others), members + others])
    found = [centre + gap * (at - (members - 1) / 2) for centre, members in blocks for at in range(int(members))]
    shift = min(0.0, bottom - found[-1]) if found else 0.0
    shift = max(shift, top - found[0]) if found else 0.0
    placed = [0.0] * len(places)
    for at, place in zip(order, found, strict=True):
        placed[at] = place + shift
    return placed
