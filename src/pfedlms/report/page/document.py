"""The page itself: one HTML file that loads nothing."""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from pfedlms import __version__
from pfedlms.report.page.choose import figures_of
from pfedlms.report.page.figures import NARROW, WIDE, Figure
from pfedlms.report.page.gather import Gathered, Part
from pfedlms.report.page.svg import DARK, LIGHT, Look, alone, looks, tag
from pfedlms.report.page.tables import environment_table, headline_table, settings_tables
from pfedlms.report.tables import dealt_by, last_evaluations, measured

_HERE = Path(__file__).parent
_ICON = "data:image/svg+xml,%3Csvg xmlns='http://www.w3.org/2000/svg'/%3E"  # or a browser asks a server for one


@dataclass(frozen=True)
class Section:
    """A part with its figures, drawn."""

    part: Part
    slug: str
    figures: list[Figure]
    notes: list[str]


def sections_of(gathered: Gathered) -> tuple[list[Section], dict[str, Look]]:
    """Every part with its figures, and how rows look on the whole page."""
    chosen = looks(run.name for run in gathered.runs)
    taken: dict[str, int] = {}
    found = []
    for part in gathered.parts:
        stem = "".join(c if c.isascii() and c.isalnum() else "-" for c in part.title).strip("-").lower() or "runs"
        taken[stem] = taken.get(stem, 0) + 1
        slug = stem if taken[stem] == 1 else f"{stem}-{taken[stem]}"
        found.append(Section(part, slug, *figures_of(part, gathered, chosen)))
    return found, chosen


def document(gathered: Gathered, sections: Sequence[Section], chosen: Mapping[str, Look]) -> str:
    """The whole page."""
    title = sections[0].part.title if len(sections) == 1 else f"{len(sections)} studies"
    counted = len(gathered.runs)
    head = [
        '<meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        '<meta name="color-scheme" content="light dark">',
        f'<link rel="icon" href="{_ICON}">',
        tag("title", escape(f"{title} · pfedlms report")),
        tag("style", _style()),
    ]
    links = [tag("a", escape(each.part.title), href=f"#{each.slug}") for each in sections] if len(sections) > 1 else []
    said = f"{counted} run{'s' * (counted != 1)} · pfedlms {__version__}"
    header = tag(
        "header",
        tag("div", tag("h1", escape(title)), tag("p", escape(said), class_="said")),
        tag("button", "Theme: auto", type="button", id="theme", class_="control"),
    )
    left_out = tag("p", "Left out: " + "; ".join(map(escape, gathered.left_out)) + ".", class_="warning")
    body = [
        header,
        tag("nav", *links, aria_label="studies") if links else "",
        left_out if gathered.left_out else "",
        tag("main", *(_section(each, chosen, len(sections) == 1) for each in sections)),
        tag("footer", _raw_link(), tag("p", "Made by pfedlms report; nothing on this page is loaded from elsewhere.")),
        # `<` as an escape, so that no text of a run can end the element.
        tag("script", json.dumps(raw(gathered)).replace("<", "\\u003c"), type="application/json", id="raw"),
        tag("script", (_HERE / "page.js").read_text(encoding="utf-8")),
    ]
    return f'<!doctype html>\n<html lang="en"><head>{"".join(head)}</head>\n<body>{"".join(body)}</body></html>\n'


def _raw_link() -> str:
    return tag("p", tag("a", "Raw data of this page as JSON", href="#raw", id="download", download="report.json"),
               class_="control")  # fmt: skip


def _style() -> str:
    light, dark = ("".join(f"--{name}:{value};" for name, value in own.items()) for own in (LIGHT, DARK))
    themes = (
        f":root{{{light}}}@media screen and (prefers-color-scheme:dark){{:root:not([data-theme=light]){{{dark}}}}}"
        f"@media screen{{:root[data-theme=dark]{{{dark}}}}}\n"
    )
    return themes + (_HERE / "page.css").read_text(encoding="utf-8")


def _section(section: Section, chosen: Mapping[str, Look], only: bool) -> str:
    """A part of the page; the only one is named by the page's own title."""
    part = section.part
    differing, shared = settings_tables(part)
    made_with = environment_table(part)
    folders = [f"{run.name} seed {run.seed}: {run.directory}" for run in part.runs]
    return tag(
        "section",
        "" if only else tag("h2", escape(part.title)),
        tag("p", escape(about(part)), class_="said"),
        headline_table(part, chosen),
        tag("p", escape(explained(part)), class_="caption"),
        *(_figure(section, figure) for figure in section.figures),
        tag("h3", "Settings and environment"),
        differing,
        tag("details", tag("summary", "Settings all runs share"), shared),
        made_with or tag("p", "The runs do not tell what they were made with.", class_="caption"),
        tag("details", tag("summary", "Folders"), tag("ul", *(tag("li", escape(each)) for each in folders))),
        tag("p", "Not shown: " + escape(" ".join(section.notes)), class_="caption") if section.notes else "",
        id=section.slug,
    )


def about(part: Part) -> str:
    """What was run, in a line."""
    first, config = part.runs[0].summary, part.runs[0].config
    seeds = len({run.seed for run in part.runs})
    rounds = sorted({run.summary["rounds"] for run in part.runs})
    dealt = f", {how}" if (how := dealt_by(first, config.data)) else ""
    share = first.get("participation", 1.0)
    pieces = [
        {"comparison": "Comparison", "sweep": "Sweep", "runs": "Runs"}[part.kind],
        config.data.title or first["dataset"],
        f"{first['model']}, {first.get('parameters', 0):,} parameters",
        f"{first['clients']:,} clients{dealt}" + (f", {100 * share:g} % a round" if share < 1 else ""),
        f"{rounds[0]:,} rounds" if len(rounds) == 1 else f"{rounds[0]:,} to {rounds[-1]:,} rounds",
        f"{seeds} seed{'s' * (seeds != 1)}",
    ]
    return " · ".join(pieces)


def explained(part: Part) -> str:
    """What the columns of the headline are."""
    over = last_evaluations([run.summary for run in part.runs])[1]
    first = part.runs[0].summary
    spread = ", ± standard deviation over seeds" if max(map(len, part.rows.values())) > 1 else ""
    last = f"maximum, and mean of {over}" if "the one" not in over else "of the one evaluation"
    told = [
        f"{measured(first)}{spread}: {last}",
        "P-acc: each participant's own model on its own test split after local steps",
        *(text for key, text in _COLUMNS.items() if any(key in run.summary for run in part.runs)),
        *([_EVERYONE] if any("clients" in run.metrics[-1] for run in part.runs) else []),
        "MiB ↑ ↓ of all participants in a round, and of the whole run, framing and catching up included",
        *([_FEWER] if any(run.config.method == "fedavg" for run in part.runs) else []),
        "s: seconds a run",
    ]
    return "; ".join(told).replace(f"{last}; ", f"{last}. ", 1) + ". A click on a column's name sorts."


_COLUMNS = {
    "validation_accuracy": "V-acc: the same models on samples set aside",
    "global_accuracy": "G-acc: the shared model before local steps",
}
_EVERYONE = "everyone: all clients after the last round"
_FEWER = "fewer: how many times fewer bytes a round than FedAvg"


def _figure(section: Section, figure: Figure) -> str:
    name = f"{section.slug}-{figure.name}"
    wide = figure.draw(WIDE)
    files = [
        tag("a", "SVG", href=_data("image/svg+xml", alone(wide)), download=f"{name}.svg"),
        tag("a", "CSV", href=_data("text/csv;charset=utf-8", figure.csv()), download=f"{name}.csv"),
    ]
    told = tag("figcaption", escape(figure.caption), tag("span", " ", *files, class_="control files"))
    drawn = tag("div", wide, class_="wide") + tag("div", figure.draw(NARROW), class_="narrow")
    return tag("figure", tag("h3", escape(figure.title)), drawn, told, id=name)


def _data(kind: str, text: str) -> str:
    return f"data:{kind};base64,{b64encode(text.encode()).decode()}"


def raw(gathered: Gathered) -> dict[str, Any]:
    """What the page is made of; accuracies of single clients of the last evaluation only."""
    return {
        "schema": 1,
        "parts": [
            {
                "title": part.title,
                "kind": part.kind,
                "runs": [
                    {
                        "name": run.name,
                        "directory": str(run.directory),
                        "config": run.config.tables(),
                        "summary": run.summary,
                        "metrics": [_brief(record) for record in run.metrics[:-1]] + run.metrics[-1:],
                    }
                    for run in part.runs
                ],
            }
            for part in gathered.parts
        ],
        "left_out": list(gathered.left_out),
    }


def _brief(record: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in record.items() if key not in ("client_acc", "clients")}
