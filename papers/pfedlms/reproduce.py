"""One table or figure of the paper: its runs, its sheets and its files."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from papers.pfedlms import distributions, theorem_sheets
from papers.pfedlms.cells import cell, short_fedavg
from papers.pfedlms.experiments import ALL, EXPERIMENTS, Row
from papers.pfedlms.gain import bytes_to_most_of_the_gain, frugal_fedavg
from papers.pfedlms.runs import Gathered, Place, Runs, curve_of, gather
from papers.pfedlms.sheets import Sheet, against_paper, communication, finished
from papers.pfedlms.theorem import convergence
from pfedlms.errors import DataError, UsageError, did_you_mean
from pfedlms.methods import METHODS
from pfedlms.report import charts, figures

OTHERS = {"communication": ALL, "distributions": ("mnist",), "convergence": ("digits", "mnist")}
"""Experiments that are not tables of training runs, and their data sets."""
NAMES = (*EXPERIMENTS, *OTHERS)
DATASETS = ("digits", *ALL)


@dataclass(frozen=True)
class Wanted:
    """The part of an experiment that is asked for; empty: all of it."""

    datasets: tuple[str, ...] = ()
    methods: tuple[str, ...] = ()
    seeds: tuple[int, ...] = (0, 1, 2)
    quick: bool = False
    rows: Sequence[dict[str, Any]] = ()
    """Measured elsewhere."""

    def tables(self, out: Path) -> Path:
        """The folder of tables with one row per method: those of some methods do not replace those of all."""
        some = "+".join(re.sub(r"[^\w.=-]+", "-", name) for name in self.methods)
        return out / f"only-{some}" if some else out


@dataclass
class Outcome:
    """The results of an experiment."""

    sheets: list[Sheet] = field(default_factory=list)
    files: list[Path] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)
    """Why cells have no run, by data set."""
    broken: int = 0
    """Runs that diverged, or lost too many messages."""
    signal: int = 0
    """The signal that interrupted; 0: none."""

    def count(self, found: Gathered) -> None:
        self.missing |= found.missing
        self.signal = self.signal or found.signal
        statuses = [run.summary["status"] for own in found.runs.values() for run in own]
        self.broken += sum(status in ("diverged", "failed") for status in statuses)


def reproduce(name: str, wanted: Wanted, place: Place) -> Outcome:
    """One table or figure. Files are written into `place.out`; those of a quick look into `quick/` there."""
    if name not in NAMES:
        raise UsageError(f"reproduce: got {name!r}; {did_you_mean(name, NAMES)}")
    for dataset in wanted.datasets:
        if dataset not in DATASETS:
            near = did_you_mean(dataset, DATASETS)
            raise UsageError(f"--datasets: got {dataset!r}; {near}; pfedlms compare takes any data")
    if wanted.quick:
        place = replace(place, out=place.out / "quick")
    outcome = Outcome()
    for dataset in dict.fromkeys(wanted.datasets or (OTHERS[name] if name in OTHERS else EXPERIMENTS[name].datasets)):
        try:
            if name == "communication":
                _write([communication(dataset, wanted.methods)], wanted.tables(place.out), outcome)
            elif name == "distributions":
                _figure_1(dataset, wanted, place, outcome)
            elif name == "convergence":
                _theorem(dataset, wanted, place, outcome)
            else:
                _table(name, dataset, wanted, place, outcome)
        except DataError as error:
            outcome.missing[dataset] = str(error)
        if outcome.signal:
            break
    return outcome


def _table(name: str, dataset: str, wanted: Wanted, place: Place, outcome: Outcome) -> None:
    """Rows of one data set, measured beside printed; `budget` adds FedAvg with the bytes of other methods."""
    plan = EXPERIMENTS[name]
    rows = plan.of(dataset, wanted.methods)
    folder = place.out / f"{dataset}-a{plan.alpha:g}"
    cells = {row.variant: cell(dataset, plan.alpha, row.variant, wanted.quick) for row in rows}
    found = gather(cells, wanted.seeds, folder, place, wanted.rows)
    outcome.count(found)
    runs = {row.label: found.runs[row.variant] for row in rows}
    if name == "budget" and not outcome.signal and not wanted.quick:
        for label, rounds in frugal_fedavg(runs).items():
            short = short_fedavg(dataset, plan.alpha, rounds)
            more = gather(short, wanted.seeds, folder, place, wanted.rows, label)
            outcome.count(more)
            (runs[label],) = more.runs.values()
            rows.append(Row(label, "fedavg"))
    if not any(runs.values()):
        return
    title = plan.title + ", a quick look" * wanted.quick
    out = wanted.tables(place.out)
    sheets = [against_paper(name, title, dataset, rows, runs)]
    if name in ("curves", "budget"):
        sheets.append(_points(f"{name}-{dataset}-points", runs))
        gain = bytes_to_most_of_the_gain(dataset, runs) if name == "budget" else None
        sheets += [gain] if gain is not None else []
        _draw(out / f"{name}-{dataset}", lambda: _curves(f"{dataset}: {title}", runs, name), outcome)
    _write(sheets, out, outcome)


def _points(name: str, runs: Runs) -> Sheet:
    """Every evaluation of every run, for figures of one's own; not shown."""
    records = []
    for label, own in runs.items():
        for run in own:
            curve = curve_of(run)
            named = {"row": label, "seed": run.summary["seed"]}
            records += [named | dict(zip(curve, values, strict=True)) for values in zip(*curve.values(), strict=True)]
    return Sheet(name, "", records, {})


def _curves(title: str, runs: Runs, name: str) -> Any:
    """Accuracy against rounds or bytes. Variants of a method lie close to it, so methods alone are drawn where there
    are several."""
    plain = [label for label in runs if label in METHODS]
    drawn = [run for label in (plain if len(plain) > 1 else runs) for run in finished(runs[label])]
    figure = figures.accuracy_curves(drawn, against="bytes" if name == "budget" else "rounds", title=title)
    return figure and figure.chart


def _figure_1(dataset: str, wanted: Wanted, place: Place, outcome: Outcome) -> None:
    found, document = distributions.distributions(dataset, place, wanted.quick, wanted.seeds[0])
    outcome.count(found)
    if document is not None:
        _write(distributions.sheets(dataset, document), place.out, outcome)
        _draw(place.out / f"distributions-{dataset}", lambda: distributions.chart(document), outcome)


def _theorem(dataset: str, wanted: Wanted, place: Place, outcome: Outcome) -> None:
    """Seed 0 alone: every gradient is one over all samples."""
    document = convergence(dataset, place.out, place.data_dir, place.device, wanted.quick, place.say)
    _write(theorem_sheets.sheets(document), place.out, outcome)
    _draw(place.out / f"convergence-{dataset}", lambda: theorem_sheets.chart(document), outcome)


def _write(sheets: Sequence[Sheet], out: Path, outcome: Outcome) -> None:
    """As CSV; those that are shown as Markdown, too."""
    outcome.sheets += sheets
    for sheet in sheets:
        texts = {".csv": sheet.csv(), **({".md": sheet.table.markdown()} if sheet.columns else {})}
        for suffix, text in texts.items():
            file = out / f"{sheet.name}{suffix}"
            try:
                out.mkdir(parents=True, exist_ok=True)
                file.write_text(text, encoding="utf-8")
            except OSError as error:
                raise UsageError(f"{file}: cannot be written ({error.strerror}); name another --out") from error
            outcome.files.append(file)


def _draw(stem: Path, draw: Callable[[], Any], outcome: Outcome) -> None:
    """A picture, where the extra `report` is installed; the numbers are written in any case."""
    try:
        charts.altair()
    except UsageError:
        return
    chart = draw()
    stem.parent.mkdir(parents=True, exist_ok=True)
    for suffix in (".png", ".svg") if chart is not None else ():
        file = stem.with_name(stem.name + suffix)
        charts.save(chart, file)
        outcome.files.append(file)
