"""Runs as tables, figures and the page see them, and the numbers that these share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, stdev
from typing import Any, Protocol, TypeVar

from pfedlms.errors import ConfigError

MIB = 1 << 20
LOCAL, REFERENCE = "local", "fedavg"
"""The methods against which gains of clients and savings of bytes are measured."""
MEASURES = {
    "p_acc": ("P-acc", "accuracy"),
    "v_acc": ("V-acc", "validation_accuracy"),
    "g_acc": ("G-acc", "global_accuracy"),
}
"""Each measure of metrics.jsonl: its name for people, and its key in summary.json."""


def check_measure(by: str) -> None:
    if by not in MEASURES:
        raise ConfigError([f"by: got {by!r}, expected one of: {', '.join(MEASURES)}"])


_NOT_COMPARED = ("run.out", "run.seed", "method.name")
Settings = Mapping[str, Mapping[str, Any]]
Item = TypeVar("Item")


class RunLike(Protocol):
    """One run, finished or not, from memory or from its folder. It has the name of its row (the method, or a variant
    such as `fedavg:server_step=2`; all seeds share it), the complete configuration by section, the lines of
    metrics.jsonl, the content of summary.json, and its folder."""

    label: str
    settings: dict[str, dict[str, Any]]
    directory: Path | None

    @property
    def metrics(self) -> list[dict[str, Any]]: ...
    @property
    def summary(self) -> dict[str, Any]: ...


@dataclass(frozen=True)
class Section:
    """Runs that are shown together: a study, or single runs on the same data and model."""

    title: str
    runs: Sequence[RunLike]
    kind: str = "Runs"
    """Its kind on the page: Comparison, Sweep or Runs."""
    axes: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    """For a sweep: its settings, as `section.key`, with their values."""
    by: str = "p_acc"
    """For a sweep: the measure by which the best combination is chosen."""


@dataclass(frozen=True)
class Spread:
    """Mean and standard deviation over seeds; a single seed has no deviation."""

    mean: float
    deviation: float | None = None

    @classmethod
    def of(cls, values: Iterable[float | None]) -> Spread | None:
        measured = [float(value) for value in values if value is not None]
        if not measured:
            return None
        return cls(mean(measured), stdev(measured) if len(measured) > 1 else None)


def is_percent(run: RunLike) -> bool:
    """Whether the run measured accuracy, and not a metric of the user's own."""
    return "metric" not in run.summary


def score_text(value: float, record: Mapping[str, Any]) -> str:
    """A measure from `record`, a line of metrics or a summary, as text: percent with two decimals, or four digits of a
    user's own metric."""
    return f"{value:.4g}" if "metric" in record else f"{value:.2f} %"


def group_by(items: Iterable[Item], key: Callable[[Item], str]) -> dict[str, list[Item]]:
    """The items of each key, in the order in which keys first appear."""
    groups: dict[str, list[Item]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def rows_of_runs(runs: Iterable[RunLike]) -> dict[str, list[RunLike]]:
    """All runs by the label of their row."""
    return group_by(runs, lambda run: run.label)


def rows_of_finished(runs: Iterable[RunLike]) -> dict[str, list[RunLike]]:
    """The finished runs of each row; of a row in which none finished, all runs."""
    return {
        label: [run for run in row if run.summary["status"] == "finished"] or row
        for label, row in rows_of_runs(runs).items()
    }


def compare_settings(configs: Sequence[Settings]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The settings that all configurations have in common, as `section.key`, and for each configuration those in which
    they differ. Seed, method and folder are not compared: they have columns of their own."""
    flat = [
        {f"{name}.{key}": value for name, table in config.items() for key, value in table.items()} for config in configs
    ]
    keys = [key for key in dict.fromkeys(key for config in flat for key in config) if key not in _NOT_COMPARED]
    first = flat[0]
    same = {key: first[key] for key in keys if all(key in each and each[key] == first.get(key) for each in flat)}
    return same, [{key: each[key] for key in keys if key in each and key not in same} for each in flat]


def curves(runs: Iterable[RunLike], measure: str = "p_acc") -> dict[str, list[dict[str, Any]]]:
    """A measure over the rounds, per row one record for each round: its mean, lowest and highest value over seeds, and
    the MiB that a client has sent and received on average by then. Rounds that a seed did not measure are left out."""
    records: dict[str, list[dict[str, Any]]] = {}
    for label, row in rows_of_finished(runs).items():
        by_round = [{line["round"]: line for line in run.metrics if line.get(measure) is not None} for run in row]
        for number in sorted(set.intersection(*map(set, by_round))):
            lines = [run_lines[number] for run_lines in by_round]
            values = [float(line[measure]) for line in lines]
            sent = [sum(line["bytes"].values()) / run.summary["clients"] for run, line in zip(row, lines, strict=True)]
            spread = {"mean": mean(values), "low": min(values), "high": max(values)}
            records.setdefault(label, []).append({"row": label, "round": number, "mib": mean(sent) / MIB, **spread})
    return records


def client_accuracies(run: RunLike) -> dict[int, float]:
    """P-acc of every client that was measured: after the last round, else in its last evaluation."""
    accuracies: dict[int, float | None] = {}
    for measured in [*run.metrics, run.summary.get("everyone") or {}]:
        values = measured.get("client_acc") or []
        accuracies |= dict(zip(measured.get("clients", range(len(values))), values, strict=True))
    return {client: value for client, value in sorted(accuracies.items()) if value is not None}


def gains(runs: Sequence[RunLike], others: Sequence[RunLike] = ()) -> dict[str, list[dict[str, Any]]]:
    """For each row and client, with each seed: P-acc in the run (`here`), in a run of `local` (training alone), and the
    gain. `others` are also searched for a run of `local`; rows without a matching one are left out."""
    records: dict[str, list[dict[str, Any]]] = {}
    for label, row in rows_of_finished(runs).items():
        for run in row:
            local = _matching_local_run(run, (*runs, *others)) if run.summary["method"] != LOCAL else None
            alone = client_accuracies(local) if local is not None else {}
            names = dict(enumerate(run.summary.get("client_names") or ()))
            for client, here in client_accuracies(run).items():
                if client in alone:
                    values = {"local": alone[client], "here": here, "gain": here - alone[client]}
                    name = str(names.get(client, f"client {client}"))
                    records.setdefault(label, []).append({"client": name, "seed": run.summary["seed"], **values})
    return records


def _matching_local_run(run: RunLike, candidates: Iterable[RunLike]) -> RunLike | None:
    """The run of `local` with the same data, model, seed and number of rounds, preferably with the same training
    settings."""

    def task(run: RunLike) -> tuple[Any, ...]:
        return _problem(run), run.summary["seed"], is_percent(run), run.settings["train"]["rounds"]

    same = [other for other in candidates if other.summary["method"] == LOCAL and task(other) == task(run)]
    return max(same, key=lambda other: other.settings["train"] == run.settings["train"], default=None)


def _problem(run: RunLike) -> tuple[dict[str, Any], dict[str, Any]]:
    """The settings of data and model, but for the folder of the data."""
    data = {key: value for key, value in run.settings["data"].items() if key != "dir"}
    return data, dict(run.settings["model"])


@dataclass(frozen=True)
class Combination:
    """One combination of a sweep."""

    label: str
    settings: dict[str, Any]
    """Its values of the axes; with `method` where the label names one."""
    runs: list[RunLike]
    scores: list[float]
    """For each seed the mean of the last evaluations; empty if not all seeds finished."""

    @property
    def score(self) -> float | None:
        return mean(self.scores) if self.scores else None


def combinations(section: Section) -> list[Combination]:
    """The combinations of a sweep, in the order of its runs."""
    cells = []
    for label, row in rows_of_runs(section.runs).items():
        settings, method = row[0].settings, label.partition(" ")[0]
        own = {key: settings[key.partition(".")[0]].get(key.partition(".")[2]) for key in section.axes}
        if own and method.partition(":")[0] == settings["method"]["name"]:
            own = {"method": method, **own}
        scores: list[Any] = [(run.summary.get(MEASURES[section.by][1]) or {}).get("last10") for run in row]
        complete = all(run.summary["status"] == "finished" for run in row) and None not in scores
        cells.append(Combination(label, own, row, list(map(float, scores)) if complete else []))
    return cells


def best_combination(section: Section) -> Combination | None:
    """The combination of a sweep with the highest score, the first of equals; None before any has a score."""
    scored = (cell for cell in combinations(section) if cell.scores)
    return max(scored, key=lambda cell: mean(cell.scores), default=None)


def group_by_problem(runs: Sequence[RunLike]) -> list[Section]:
    """Sections of single runs: those on the same data and model together. A title names the data set, the model, and
    the settings of both in which sections of that title differ."""
    sections = []
    problems = group_by(runs, lambda run: repr(_problem(run)))
    for title, alike in group_by(problems.values(), lambda members: _short_title(members[0])).items():
        differing = compare_settings([members[0].settings for members in alike])[1]
        for members, settings in zip(alike, differing, strict=True):
            keys = [key for key in settings if key.startswith(("data.", "model.")) and key != "data.dir"]
            values = ", ".join(f"{key.partition('.')[2]} {settings[key]}" for key in keys)
            sections.append(Section(" · ".join(filter(None, [title, values])), _with_distinct_labels(members)))
    return sections


def _short_title(run: RunLike) -> str:
    return f"{dataset_title(run.settings['data']['dataset'])} · {run.settings['model']['name']}"


def dataset_title(dataset: str) -> str:
    """The name of a data set; `file:/a/long/path.npz` is shown as `path`."""
    kind, _, path = dataset.partition(":")
    return Path(path).stem or kind


def _with_distinct_labels(runs: Sequence[RunLike]) -> list[RunLike]:
    """Runs of one method that differ in settings are labelled by these, and by their folders where none differ."""
    seen: set[tuple[str, int]] = set()
    labelled: list[RunLike] = []
    for own in group_by(runs, lambda run: run.label).values():
        for run, differing in zip(map(copy, own), compare_settings([run.settings for run in own])[1], strict=True):
            named = {key: value for key, value in differing.items() if not key.startswith(("run.", "data.dir"))}
            run.label = " ".join([run.label, *(f"{key.partition('.')[2]}={value}" for key, value in named.items())])
            if (run.label, run.summary["seed"]) in seen and run.directory is not None:
                run.label += f" ({run.directory.name})"
            seen.add((run.label, run.summary["seed"]))
            labelled.append(run)
    return labelled
