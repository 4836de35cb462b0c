"""One table or figure of the paper: its runs, its sheets and its files."""

from __future__ import annotations

import re
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from papers.pfedlms import distributions, sheets, theorem_sheets
from papers.pfedlms.experiments import ALL, EXPERIMENTS, Row, cell, short_fedavg
from papers.pfedlms.runs import Outcome, Wanted, gather
from papers.pfedlms.sheets import Sheets, finished, flat
from papers.pfedlms.theorem import convergence
from pfedlms.errors import DataError, UsageError, did_you_mean
from pfedlms.methods import METHODS
from pfedlms.report import charts, figures
from pfedlms.report.tables import Table, to_csv

OTHERS = {"communication": ALL, "distributions": ("mnist",), "convergence": ("digits", "mnist")}
"""Experiments that are not tables of training runs, and their data sets."""
DRAWING = find_spec("altair") is not None and find_spec("vl_convert") is not None
"""Whether the extra `report` is installed; the numbers of a figure are written in any case."""
NAMES = (*EXPERIMENTS, *OTHERS)
DATASETS = ("digits", *ALL)


def reproduce(name: str, wanted: Wanted) -> Outcome:
    """One table or figure. Files are written into `wanted.out`; those of a quick look into `quick/` there, tables of
    some methods into `only-…/`, so that they do not replace others."""
    if name not in NAMES:
        raise UsageError(f"reproduce: got {name!r}; {did_you_mean(name, NAMES)}")
    for dataset in wanted.datasets:
        if dataset.partition("/")[0] not in DATASETS:
            near = did_you_mean(dataset, DATASETS)
            raise UsageError(f"--datasets: got {dataset!r}; {near}; pfedlms compare takes any data")
    if wanted.quick:
        wanted = replace(wanted, out=wanted.out / "quick")
    some = "+".join(re.sub(r"[^\w.=-]+", "-", method) for method in wanted.methods)
    out = wanted.out / f"only-{some}" if some and name not in ("distributions", "convergence") else wanted.out
    outcome = Outcome()
    for dataset in dict.fromkeys(wanted.datasets or (OTHERS[name] if name in OTHERS else EXPERIMENTS[name].datasets)):
        if outcome.signal:
            break
        try:
            made, chart = _made(name, dataset, wanted, outcome)
        except DataError as error:
            outcome.missing[dataset] = str(error)
            continue
        outcome.sheets |= made
        for sheet, table in made.items():
            _write(table, out / sheet.replace("/", "-"))
        for suffix in (".png", ".svg") if chart is not None else ():
            charts.save(chart, out / f"{name}-{dataset.replace('/', '-')}{suffix}")
    return outcome


def _made(name: str, dataset: str, wanted: Wanted, outcome: Outcome) -> tuple[Sheets, Any]:
    """The sheets of a data set and the chart, if there is one and the extra `report` is installed."""
    if name == "communication":
        return {f"communication-{dataset}": sheets.communication(dataset, wanted.methods)}, None
    if name == "distributions":
        weights = distributions.distributions(dataset, wanted, outcome)
        if weights is None:
            return {}, None
        return distributions.sheets(dataset, weights), distributions.chart(weights) if DRAWING else None
    if name == "convergence":  # seed 0 alone: every gradient is one over all samples
        terms = convergence(dataset, wanted.out, wanted.data_dir, wanted.device, wanted.quick, wanted.say)
        return theorem_sheets.sheets(terms), theorem_sheets.chart(terms) if DRAWING else None
    return _table(name, dataset, wanted, outcome)


def _table(name: str, dataset: str, wanted: Wanted, outcome: Outcome) -> tuple[Sheets, Any]:
    """Rows of one data set, measured beside printed; `budget` adds FedAvg with the bytes of other methods."""
    plan = EXPERIMENTS[name]
    rows = plan.of(dataset, wanted.methods)
    found = gather({row.variant: cell(dataset, plan.alpha, row.variant, wanted.quick) for row in rows}, wanted, outcome)
    runs = {row.label: found[row.variant] for row in rows}
    if name == "budget" and not outcome.signal and not wanted.quick:
        for label, rounds in sheets.frugal_fedavg(runs).items():
            (runs[label],) = gather(short_fedavg(dataset, plan.alpha, rounds), wanted, outcome).values()
            rows.append(Row(label, "fedavg"))
    if not any(runs.values()):
        return {}, None
    title = plan.title + ", a quick look" * wanted.quick
    made = {f"{name}-{dataset}": sheets.against_paper(title, dataset, rows, runs)}
    if name not in ("curves", "budget"):
        return made, None
    gain = sheets.bytes_to_most_of_the_gain(dataset, runs) if name == "budget" else None
    made |= {f"gain-{dataset}": gain} if gain is not None else {}
    # Variants of a method lie close to it, so methods alone are drawn where there are several.
    plain = [label for label in runs if label in METHODS]
    drawn = [run for label in (plain if len(plain) > 1 else runs) for run in finished(runs[label])]
    against = "bytes" if name == "budget" else "rounds"
    figure = figures.accuracy_curves(drawn, against=against, title=f"{dataset}: {title}") if DRAWING else None
    return made, figure and figure.chart


def _write(table: Table, stem: Path) -> None:
    """As CSV; a table that is shown as Markdown, too."""
    texts = {".csv": to_csv(list(map(flat, table.records))), **({".md": table.markdown()} if table.columns else {})}
    for suffix, text in texts.items():
        file = stem.with_name(stem.name + suffix)
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
        except OSError as error:
            raise UsageError(f"{file}: cannot be written ({error.strerror}); name another --out") from error
