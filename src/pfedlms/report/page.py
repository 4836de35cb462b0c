"""One HTML page of runs, which loads nothing: page.html.j2 with the data of the runs. It needs the extra `report`."""

from __future__ import annotations

import json
import re
from base64 import b64encode
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pfedlms import __version__
from pfedlms.errors import UsageError
from pfedlms.files import write_failure, write_text
from pfedlms.report import figures
from pfedlms.report.charts import DARK, LIGHT, Figure, Look, import_altair, looks
from pfedlms.report.results import comparison
from pfedlms.report.runs import RunLike, Section, compare_settings, gains, is_percent
from pfedlms.report.tables import Column, Table, count_text


def write_page(
    sections: Sequence[Section], file: str | Path, figures: str | Path | None = None, left_out: Sequence[str] = ()
) -> list[Path]:
    """Write the page of these sections to `file`. With the folder `figures`, write every figure there, too, as SVG and
    its data as CSV. The page names what could not be read, `left_out`. Returns the paths of the files."""
    import_altair("the page")
    style = looks(run.label for section in sections for run in section.runs)
    contents, page = _section_contents(sections, style), Path(file)
    if page.is_dir():
        raise UsageError(f"{page}: is a folder, expected a file to write; name one with -o report.html")
    stems: dict[Path, Figure] = {}
    for part in contents if figures is not None else ():
        stems |= {Path(figures or "", f"{part['slug']}-{figure.name}"): figure for figure in part["figures"]}
    files = {page: _render(contents, style, left_out)}
    files |= {stem.with_suffix(".csv"): figure.csv() for stem, figure in stems.items()}
    try:
        for path, text in files.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.exists() and not path.is_file():  # a pipe, /dev/stdout
                path.write_text(text, encoding="utf-8")
            else:
                write_text(path.resolve(), text)
        for stem, figure in stems.items():
            figure.save(stem.with_suffix(".svg"))
    except OSError as error:
        raise UsageError(write_failure(file, error)) from error
    return [*files, *(stem.with_suffix(".svg") for stem in stems)]


def _section_contents(sections: Sequence[Section], style: Mapping[str, Look]) -> list[dict[str, Any]]:
    """For each section, all that the template shows of it."""
    all_runs = [run for section in sections for run in section.runs]
    stems = Counter[str]()
    contents = []
    for section in sections:
        stem = re.sub(r"[^a-z0-9]", "-", section.title.lower()).strip("-") or "runs"
        stems[stem] += 1
        slug = stem if stems[stem] == 1 else f"{stem}-{stems[stem]}"
        table = comparison(section.runs, section if section.axes else None)
        differing, shared = _settings_tables(section)
        seeds = count_text(len({run.summary["seed"] for run in section.runs}), "seed")
        contents.append({
            "section": section, "slug": slug, "table": table, "figures": _figures(section, table, style, all_runs),
            "about": f"{section.kind} · {table.title} · {seeds}", "differing": differing, "shared": shared,
        })  # fmt: skip
    return contents


def _figures(section: Section, table: Table, style: Mapping[str, Look], all_runs: Sequence[RunLike]) -> list[Figure]:
    """The figures for which the runs have numbers, in reading order."""
    runs, by_row = section.runs, gains(section.runs, all_runs)
    sent = any(run.summary["total_bytes"] for run in runs)
    drawn = [
        figures.by_setting(section) if section.axes else None,
        figures.accuracy_curves(runs, style=style),
        figures.accuracy_curves(runs, against="bytes", style=style) if sent else None,
        figures.accuracy_curves(runs, "g_acc", style=style),
        figures.accuracy_curves(runs, "v_acc", style=style) if not section.axes else None,
        figures.cost(table, style),
        figures.client_gains(by_row, " points" if is_percent(runs[0]) else "") if by_row else None,
    ]
    return [figure for figure in drawn if figure is not None]


def _settings_tables(section: Section) -> tuple[Table | None, Table]:
    """A table of the settings and versions in which rows differ, None where they do not; and one of those that all
    share."""
    configs = [{**run.settings, "environment": run.summary.get("environment") or {}} for run in section.runs]
    same, differing = compare_settings(configs)
    by_row = {run.label: settings for run, settings in zip(section.runs, differing, strict=True)}
    keys = [key for key in dict.fromkeys(key for settings in differing for key in settings) if key != "data.dir"]
    shared = [{"setting": key, "value": value} for key, value in same.items() if key != "data.dir"]
    common = Table([Column("setting", "setting"), Column("value", "value", str)], shared)
    if not keys:
        return None, common
    if len(by_row) <= len(keys):  # whichever way takes fewer columns
        columns = [Column("", "setting"), *(Column(label, label, str) for label in by_row)]
        records = [{"": key, **{label: own.get(key) for label, own in by_row.items()}} for key in keys]
    else:
        columns = [Column("", " "), *(Column(key, key, str) for key in keys)]
        records = [{"": label, **settings} for label, settings in by_row.items()]
    return Table(columns, records), common


# --- the template ---


def _render(contents: Sequence[Mapping[str, Any]], style: Mapping[str, Look], left_out: Sequence[str]) -> str:
    import jinja2  # Altair depends on it

    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    environment = jinja2.Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters["break_points"] = _add_break_points
    sections = [part["section"] for part in contents]
    title = sections[0].title if len(sections) == 1 else f"{len(sections)} studies"
    return environment.get_template("page.html.j2").render(
        title=title, contents=contents, style=style, left_out=left_out, version=__version__, light=LIGHT, dark=DARK,
        colours=_COLOURS, count=sum(len(section.runs) for section in sections),
        csv=lambda figure: "data:text/csv;charset=utf-8;base64," + b64encode(figure.csv().encode()).decode(),
        spec=_spec, raw=_json(_raw_data(sections, left_out)), vega=_vega(),
    )  # fmt: skip


def _add_break_points(text: str) -> Any:
    """A name in which a browser may break the line between two parts."""
    from markupsafe import Markup, escape

    return Markup(re.sub(r"([_=:]|\.(?!\d))", r"\1<wbr>", str(escape(text))))


def _vega() -> str:
    """The JavaScript libraries that draw the figures."""
    import vl_convert

    bundle: Any = vl_convert.javascript_bundle  # its type hints demand an argument that it does not need
    return str(bundle()).replace("</script", "<\\/script")


_COLOURS = {colour: f"var(--{name})" for name, colour in LIGHT.items()}


def _json(value: Any) -> str:
    """JSON with `<` as an escape, so that no text of a run can end the script element."""
    return json.dumps(value).replace("<", "\\u003c")


def _spec(figure: Figure) -> str:
    """The chart for the page. Its colours are CSS variables, which a theme or a printout can change."""
    spec = {**figure.chart.to_dict(), "background": "transparent"}
    return re.sub(r'"(#[0-9a-f]{6})"', lambda match: f'"{_COLOURS.get(match[1], match[1])}"', _json(spec))


def _raw_data(sections: Sequence[Section], left_out: Sequence[str]) -> dict[str, Any]:
    """The data from which the page is made."""
    parts = [{"title": s.title, "kind": s.kind.lower(), "runs": list(map(_raw_run, s.runs))} for s in sections]
    return {"schema": 1, "parts": parts, "left_out": list(left_out)}


def _raw_run(run: RunLike) -> dict[str, Any]:
    """A run, with the accuracies of single clients in the last evaluation only."""
    long = ("client_acc", "clients")
    brief = [{key: value for key, value in line.items() if key not in long} for line in run.metrics[:-1]]
    return {
        "name": run.label,
        "directory": str(run.directory) if run.directory else None,
        "config": run.settings,
        "summary": run.summary,
        "metrics": [*brief, *run.metrics[-1:]],
    }
