"""A table or figure of the paper: its cells, and what is made of them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from pfedlms.data.sources import kind_of
from pfedlms.errors import DataError, UsageError, did_you_mean
from pfedlms.experiment.store import write_atomically
from pfedlms.report import charts
from pfedlms.reproduce import figures
from pfedlms.reproduce.bytes_to import bytes_to_most_of_the_gain, frugal_fedavg
from pfedlms.reproduce.communication import communication
from pfedlms.reproduce.convergence import convergence
from pfedlms.reproduce.convergence_plot import (
    PRACTICE,
    THEORY,
    by_round,
    convergence_chart,
    practice_records,
    theory_records,
)
from pfedlms.reproduce.distributions import accuracy_points, density_points, distributions
from pfedlms.reproduce.plans import ALL, EXPERIMENTS, Experiment, Row
from pfedlms.reproduce.play import Measured, Played, Where, play
from pfedlms.reproduce.sheets import Sheet, against_paper

OTHERS = {"communication": ALL, "distributions": ("mnist",), "convergence": ("digits", "mnist")}
"""What is not made of training runs, and its data sets."""
NAMES = (*EXPERIMENTS, *OTHERS)
Cells = dict[str, list[Measured]]


@dataclass(frozen=True)
class Wanted:
    """What of an experiment is asked for; empty: all of it."""

    datasets: tuple[str, ...] = ()
    methods: tuple[str, ...] = ()
    seeds: tuple[int, ...] = (0, 1, 2)
    quick: bool = False
    rows: Sequence[dict[str, Any]] = ()
    """Measured elsewhere."""

    def folder(self, where: Where) -> Path:
        """For tables and figures; those of a quick look do not replace others."""
        return where.out / "quick" if self.quick else where.out

    def table_folder(self, where: Where) -> Path:
        """For tables that have a row a method; those of some methods do not replace those of all, or of others."""
        some = "+".join(re.sub(r"[^\w.=-]+", "-", name) for name in self.methods)
        return self.folder(where) / f"only-{some}" if some else self.folder(where)


@dataclass
class Outcome:
    """What an experiment gave."""

    sheets: list[Sheet] = field(default_factory=list)
    files: list[Path] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)
    """Why cells of a data set stay open, by its name."""
    broken: int = 0
    """Cells that came to no end of their own: diverged, or too many messages were lost."""
    stopped: int = 0

    def count(self, played: Played, measured: Iterable[Measured]) -> None:
        """What became of cells."""
        self.missing |= played.missing
        self.broken += sum(each.summary["status"] in ("diverged", "failed") for each in measured)
        self.stopped = played.stopped


def reproduce(
    name: str, wanted: Wanted, where: Where, progress: Sequence[Any], say: Callable[[str], None] | None = None
) -> Outcome:
    """One table or figure; sheets are written beside the cells. `say` is told what else is done as it begins."""
    if name not in NAMES:
        raise UsageError(f"reproduce: got {name!r}; {did_you_mean(name, NAMES)}")
    outcome = Outcome()
    for dataset in wanted.datasets:
        if kind_of(dataset):
            known = ", ".join(("digits", *ALL))
            raise UsageError(f"--datasets: got {dataset!r}, expected some of: {known}; pfedlms compare takes any data")
    for dataset in dict.fromkeys(wanted.datasets or (OTHERS[name] if name in OTHERS else EXPERIMENTS[name].datasets)):
        try:
            if name == "communication":
                outcome.sheets.append(communication(dataset, wanted.methods))
            elif name == "distributions":
                _figure_1(dataset, wanted, where, progress, say, outcome)
            elif name == "convergence":
                _theorem(dataset, wanted, where, say, outcome)
            else:
                _experiment(name, EXPERIMENTS[name], dataset, wanted, where, progress, say, outcome)
        except DataError as error:
            outcome.missing[dataset] = str(error)
        if outcome.stopped:
            break
    by_method = name not in ("distributions", "convergence")
    for sheet in outcome.sheets:
        outcome.files += _write(sheet, wanted.table_folder(where) if by_method else wanted.folder(where))
    return outcome


def _experiment(
    name: str, plan: Experiment, dataset: str, wanted: Wanted, where: Where, progress: Sequence[Any],
    say: Callable[[str], None] | None, outcome: Outcome,
) -> None:  # fmt: skip
    """The cells of a data set, and what is made of them."""
    rows = plan.of(dataset, wanted.methods)
    cells = {row.label: plan.cells(row, dataset, wanted.seeds, wanted.quick) for row in rows}
    # Seed by seed, so that there is something of every row soon.
    everything = [cell for own in zip(*cells.values(), strict=True) for cell in own]
    played = play(everything, where, progress, wanted.rows, say)
    found = played.measured
    measured = {label: [found[cell] for cell in own if cell in found] for label, own in cells.items()}
    if name == "budget" and not played.stopped and not wanted.quick:
        for label, own in frugal_fedavg(plan.alpha, measured, everything).items():
            more = play(own, where, progress, wanted.rows, say and partial(_with, say, label))
            played.stopped = played.stopped or more.stopped
            played.missing |= more.missing
            measured[label] = list(more.measured.values())
            rows.append(Row(label, "fedavg"))
    outcome.count(played, [each for own in measured.values() for each in own])
    if not any(measured.values()):
        return
    title = plan.title + ", a quick look" * wanted.quick
    outcome.sheets.append(against_paper(name, title, dataset, rows, measured))
    if name in ("curves", "budget"):
        _curves(name, title, dataset, measured, wanted.table_folder(where), outcome)


def _with(say: Callable[[str], None], what: str, text: str) -> None:
    say(f"{text}: {what}")


def _curves(name: str, title: str, dataset: str, cells: Cells, folder: Path, outcome: Outcome) -> None:
    axis = "bytes" if name == "budget" else "round"
    outcome.sheets.append(_points(name, dataset, cells))
    gain = bytes_to_most_of_the_gain(dataset, cells) if name == "budget" else None
    if gain is not None:
        outcome.sheets.append(gain)
    _draw(
        folder / f"{name}-{dataset}",
        lambda: figures.curves(f"{dataset}: {title}", cells, axis),
        outcome,
    )


def _figure_1(
    dataset: str,
    wanted: Wanted,
    where: Where,
    progress: Sequence[Any],
    say: Callable[[str], None] | None,
    outcome: Outcome,
) -> None:
    """On the first seed."""
    played, document = distributions(dataset, where, progress, wanted.quick, wanted.seeds[0], say)
    outcome.count(played, played.measured.values())
    if document is None:
        return
    records = [
        {"round": stage["round"], "layer": layer, "deviation": own["deviation"]}
        for stage in document["stages"]
        for layer, own in stage["layers"].items()
    ]
    title = f"{dataset}: weights of the shared model while FedAvg trains"
    columns = {"layer": "layer", "round": "round", "deviation": "σ"}
    outcome.sheets.append(Sheet(f"distributions-{dataset}", title, records, columns, "σ: standard deviation."))
    outcome.sheets += [
        Sheet(f"distributions-{dataset}-points", "", density_points(document), {}),
        Sheet(f"distributions-{dataset}-accuracy-points", "", accuracy_points(document), {}),
    ]
    stem = wanted.folder(where) / f"distributions-{dataset}"
    _draw(stem, lambda: figures.distributions(document), outcome)


def _theorem(dataset: str, wanted: Wanted, where: Where, say: Callable[[str], None] | None, outcome: Outcome) -> None:
    """Both sides of the theorem on the first seed: every gradient is one over all samples."""
    folder = wanted.folder(where)
    document = convergence(dataset, folder, where.data_dir, where.device, wanted.seeds[:1], wanted.quick, say)
    name, title = f"convergence-{dataset}", f"{dataset}: the convergence theorem"
    note = "Each term as the theorem bounds it, then as it was; by norm: with the largest ‖θ‖ for its bound."
    used = "λ, h and η as they are used; the mean over rounds, the first and the last round looked at."
    theory, practice = theory_records(document), practice_records(document)
    outcome.sheets += [
        Sheet(name, f"{title}, softmax regression", theory, THEORY, note, ".3g"),
        Sheet(f"{name}-dnn", f"{title}, its left side on dnn", practice, PRACTICE, used, ".3g"),
        Sheet(f"{name}-points", "", by_round(document), {}),
    ]
    _draw(folder / f"convergence-{dataset}", lambda: convergence_chart(document), outcome)


def _points(name: str, dataset: str, cells: Cells) -> Sheet:
    """Every evaluation of every cell, for figures of one's own; not shown."""
    records = [
        {"row": label, "seed": each.summary["seed"], **dict(zip(each.curve, values, strict=True))}
        for label, own in cells.items()
        for each in own
        for values in zip(*each.curve.values(), strict=True)
    ]
    return Sheet(f"{name}-{dataset}-points", "", records, {})


def _write(sheet: Sheet, out: Path) -> list[Path]:
    """As CSV, and as Markdown what is shown."""
    texts = {".csv": sheet.csv(), **({".md": sheet.markdown()} if sheet.columns else {})}
    files = []
    for suffix, text in texts.items():
        file = out / f"{sheet.name}{suffix}"
        _store(file, text.encode())
        files.append(file)
    return files


def _store(file: Path, content: bytes) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, lambda opened: opened.write(content))
    except OSError as error:
        raise UsageError(f"{file}: cannot be written ({error.strerror}); name another --out") from error


def _draw(stem: Path, draw: Callable[[], Any], outcome: Outcome) -> None:
    """A picture, where the extra is there; the numbers are written in any case."""
    try:
        charts.altair()
    except UsageError:
        return
    chart = draw()
    stem.parent.mkdir(parents=True, exist_ok=True)
    for suffix in (".png", ".svg"):
        charts.save(chart, stem.with_suffix(suffix))
        outcome.files.append(stem.with_suffix(suffix))
