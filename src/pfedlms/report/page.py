"""One HTML page of runs, which loads nothing: page.html.j2 with the data of runs in it. It needs the extra `report`."""

from __future__ import annotations

import json
import re
from base64 import b64encode
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pfedlms import __version__
from pfedlms.errors import UsageError
from pfedlms.files import write_failure, write_text
from pfedlms.report import figures
from pfedlms.report.charts import DARK, LIGHT, Figure, Look, altair, looks
from pfedlms.report.results import comparison, described
from pfedlms.report.runs import RunLike, Section, best, cells, compare_settings, gains, percent, seed_of
from pfedlms.report.tables import Column, Table, counted


def write_page(
    sections: Sequence[Section], file: str | Path, figures: str | Path | None = None, left_out: Sequence[str] = ()
) -> list[Path]:
    """Write the page of these sections to `file`, and with `figures` every figure as SVG and its data as CSV to that
    folder; the page names what could not be read, `left_out`. Returns the files written."""
    altair("the page")
    style = looks(run.label for section in sections for run in section.runs)
    drawn, page = _draw(sections, style), Path(file)
    if page.is_dir():
        raise UsageError(f"{page}: is a folder, expected a file to write; name one with -o report.html")
    folder = Path(figures) if figures is not None else None
    made = [(folder / f"{each['slug']}-{own.name}", own) for each in drawn for own in each["figures"]] if folder else []
    files = {page: _render(drawn, style, left_out), **{Path(f"{stem}.csv"): own.csv() for stem, own in made}}
    try:
        for path, text in files.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.exists() and not path.is_file():  # a pipe, /dev/stdout
                path.write_text(text, encoding="utf-8")
            else:
                write_text(path.resolve(), text)
        for stem, own in made:
            own.save(f"{stem}.svg")
    except OSError as error:
        raise UsageError(write_failure(file, error)) from error
    return [*files, *(Path(f"{stem}.svg") for stem, _ in made)]


def _draw(sections: Sequence[Section], style: Mapping[str, Look]) -> list[dict[str, Any]]:
    """Each section with all that the template shows of it."""
    every = [run for section in sections for run in section.runs]
    taken: dict[str, int] = {}
    found = []
    for section in sections:
        stem = re.sub(r"[^a-z0-9]", "-", section.title.lower()).strip("-") or "runs"
        taken[stem] = taken.get(stem, 0) + 1
        slug = stem if taken[stem] == 1 else f"{stem}-{taken[stem]}"
        table = comparison(section.runs)
        top = best(cells(section)) if section.axes else None
        differing, shared = _settings(section)
        seeds = counted(len({seed_of(run) for run in section.runs}), "seed")
        found.append({
            "section": section, "slug": slug, "table": table, "figures": _figures(section, table, style, every),
            "about": " · ".join([section.kind, *described(section.runs, section.axes).values(), seeds]),
            "best": top.label if top else None, "differing": differing, "shared": shared,
        })  # fmt: skip
    return found


def _figures(section: Section, table: Table, style: Mapping[str, Look], every: Sequence[RunLike]) -> list[Figure]:
    """Those that the runs have numbers for, in reading order."""
    runs, gained = section.runs, gains(section.runs, every)
    sent = any(run.summary.get("total_bytes") for run in runs)
    made = [
        figures.by_setting(section) if section.axes else None,
        figures.accuracy_curves(runs, style=style),
        figures.accuracy_curves(runs, against="bytes", style=style) if sent else None,
        figures.accuracy_curves(runs, "g_acc", style=style),
        figures.accuracy_curves(runs, "v_acc", style=style) if not section.axes else None,
        figures.cost(table, style),
        figures.client_gains(gained, " points" if percent(runs[0]) else "") if gained else None,
    ]
    return [figure for figure in made if figure is not None]


def _settings(section: Section) -> tuple[Table | None, Table]:
    """Settings and versions in which rows differ, None where they do not, and those that all share."""
    of = [{**run.settings, "environment": run.summary.get("environment") or {}} for run in section.runs]
    same, differing = compare_settings(of)
    by_row = {run.label: own for run, own in zip(section.runs, differing, strict=True)}
    keys = [key for key in dict.fromkeys(key for own in differing for key in own) if key != "data.dir"]
    shared = [{"setting": key, "value": value} for key, value in same.items() if key != "data.dir"]
    common = Table([Column("setting", "setting"), Column("value", "value", str)], shared)
    if not keys:
        return None, common
    if len(by_row) <= len(keys):  # whichever way takes fewer columns
        columns = [Column("", "setting"), *(Column(f"row {label}", label, str) for label in by_row)]
        records = [{"": key, **{f"row {label}": own.get(key) for label, own in by_row.items()}} for key in keys]
    else:
        columns = [Column("", " "), *(Column(key, key, str) for key in keys)]
        records = [{"": label, **own} for label, own in by_row.items()]
    return Table(columns, records), common


# --- the template ---


def _render(drawn: Sequence[Mapping[str, Any]], style: Mapping[str, Look], left_out: Sequence[str]) -> str:
    import jinja2  # which Altair needs, too

    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    environment = jinja2.Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters["breaking"] = _breaking
    title = drawn[0]["section"].title if len(drawn) == 1 else f"{len(drawn)} studies"
    return environment.get_template("page.html.j2").render(
        title=title, drawn=drawn, style=style, left_out=left_out, version=__version__, light=LIGHT, dark=DARK,
        colours=_COLOURS, count=sum(len(each["section"].runs) for each in drawn),
        csv=lambda figure: "data:text/csv;charset=utf-8;base64," + b64encode(figure.csv().encode()).decode(),
        spec=_spec, raw=_json(_raw([each["section"] for each in drawn], left_out)), vega=_vega(), seed_of=seed_of,
    )  # fmt: skip


def _breaking(text: str) -> Any:
    """A name that may break where its parts meet."""
    from markupsafe import Markup, escape

    return Markup(re.sub(r"([_=:]|\.(?!\d))", r"\1<wbr>", str(escape(text))))


def _vega() -> str:
    """The libraries that draw."""
    import vl_convert

    bundle: Any = vl_convert.javascript_bundle  # its types ask for an argument that it does not need
    return str(bundle()).replace("</script", "<\\/script")


_COLOURS = {colour: f"var(--{name})" for name, colour in LIGHT.items()}


def _json(value: Any) -> str:
    """`<` as an escape, so that no text of a run can end the element."""
    return json.dumps(value).replace("<", "\\u003c")


def _spec(figure: Figure) -> str:
    """The chart for the page: its colours by name, so that a theme, or paper, can give others."""
    spec = {**figure.chart.to_dict(), "background": "transparent"}
    return re.sub(r'"(#[0-9a-f]{6})"', lambda found: f'"{_COLOURS.get(found[1], found[1])}"', _json(spec))


def _raw(sections: Sequence[Section], left_out: Sequence[str]) -> dict[str, Any]:
    """What the page is made of."""
    parts = [{"title": s.title, "kind": s.kind.lower(), "runs": list(map(_raw_run, s.runs))} for s in sections]
    return {"schema": 1, "parts": parts, "left_out": list(left_out)}


def _raw_run(run: RunLike) -> dict[str, Any]:
    """Accuracies of single clients of the last evaluation only."""
    long = ("client_acc", "clients")
    brief = [{key: own for key, own in line.items() if key not in long} for line in run.metrics[:-1]]
    return {
        "name": run.label,
        "directory": str(run.directory) if run.directory else None,
        "config": run.settings,
        "summary": run.summary,
        "metrics": [*brief, *run.metrics[-1:]],
    }
