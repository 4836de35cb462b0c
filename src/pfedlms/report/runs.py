"""What tables, figures and the page know of runs, and the numbers that they share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import mean, stdev
from typing import Any, Protocol

MIB = 1 << 20
ALONE, REFERENCE = "local", "fedavg"
"""The methods that gains of clients and savings of bytes are measured against."""
MEASURES = {
    "p_acc": ("P-acc", "accuracy"),
    "v_acc": ("V-acc", "validation_accuracy"),
    "g_acc": ("G-acc", "global_accuracy"),
}
"""Names in metrics.jsonl: their names for people and in summary.json."""
_NOT_COMPARED = ("run.out", "run.seed", "method.name")
Settings = Mapping[str, Mapping[str, Any]]


class RunLike(Protocol):
    """One run, finished or not, from memory or from its folder: the name of its row (the method, or a variant such as
    `fedavg:server_step=2`; all seeds share it), the complete configuration by section, the lines of metrics.jsonl, the
    content of summary.json, and its folder."""

    @property
    def label(self) -> str: ...
    @property
    def settings(self) -> Settings: ...
    @property
    def metrics(self) -> list[dict[str, Any]]: ...
    @property
    def summary(self) -> dict[str, Any]: ...
    @property
    def directory(self) -> Path | None: ...


@dataclass(frozen=True)
class StoredRun:
    """A `RunLike` that only stores its values."""

    label: str
    summary: dict[str, Any]
    settings: Settings = field(default_factory=dict)
    metrics: list[dict[str, Any]] = field(default_factory=list)
    directory: Path | None = None


@dataclass(frozen=True)
class Section:
    """Runs that are shown together: a study, or single runs on the same data and model."""

    title: str
    runs: Sequence[RunLike]
    kind: str = "Runs"
    """What the page calls it: Comparison, Sweep or Runs."""
    axes: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    """Of a sweep: its settings, as `section.key`, with their values."""
    by: str = "p_acc"
    """Of a sweep: the measure that the best combination is chosen by."""


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


def percent(run: RunLike) -> bool:
    """Whether accuracy was measured, and not a metric of the user's own."""
    return "metric" not in run.summary


def score_text(value: float, record: Mapping[str, Any]) -> str:
    """A measure as a line of metrics, or a summary, has it: percent with two digits, or four digits of a metric of the
    user's own."""
    return f"{value:.4g}" if "metric" in record else f"{value:.2f} %"


def seed_of(run: RunLike) -> int:
    return int(run.summary["seed"])


def all_rows(runs: Iterable[RunLike]) -> dict[str, list[RunLike]]:
    """Every run by its label, in the order in which labels first appear."""
    found: dict[str, list[RunLike]] = {}
    for run in runs:
        found.setdefault(run.label, []).append(run)
    return found


def rows(runs: Iterable[RunLike]) -> dict[str, list[RunLike]]:
    """The runs that count: the finished ones of a row, or all of a row in which none finished."""
    return {
        label: [run for run in own if run.summary["status"] == "finished"] or own
        for label, own in all_rows(runs).items()
    }


def compare_settings(several: Sequence[Settings]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The settings that all have in common, as `section.key`, and for each those in which they differ. Seed, method and
    folders are not compared: they have columns of their own."""
    flat = [
        {f"{name}.{key}": value for name, own in each.items() if isinstance(own, Mapping) for key, value in own.items()}
        for each in several
    ]
    keys = [key for key in dict.fromkeys(key for own in flat for key in own) if key not in _NOT_COMPARED]
    same = {key: flat[0][key] for key in keys if all(key in own and own[key] == flat[0].get(key) for own in flat)}
    return same, [{key: own[key] for key in keys if key in own and key not in same} for own in flat]


def curves(runs: Iterable[RunLike], measure: str = "p_acc") -> list[dict[str, Any]]:
    """A measure over the rounds: `row`, `round`, mean, lowest and highest over seeds, and `mib`, what one client has
    sent and received on average by then. Rounds that a run of the row did not measure are left out."""
    found = []
    for label, own in rows(runs).items():
        by_round = [{line["round"]: line for line in run.metrics if line.get(measure) is not None} for run in own]
        for number in sorted(set.intersection(*map(set, by_round))):
            lines = [each[number] for each in by_round]
            values = [float(line[measure]) for line in lines]
            sent = [sum(line["bytes"].values()) / run.summary["clients"] for run, line in zip(own, lines, strict=True)]
            spread = {"mean": mean(values), "low": min(values), "high": max(values)}
            found.append({"row": label, "round": number, "mib": mean(sent) / MIB, **spread})
    return found


def client_accuracies(run: RunLike) -> dict[int, float]:
    """P-acc of every client that was measured: after the last round, or in its last evaluation."""
    found: dict[int, float | None] = {}
    for line in run.metrics:
        values = line.get("client_acc") or []
        found |= dict(zip(line.get("clients", range(len(values))), values, strict=True))
    everyone = run.summary.get("everyone") or {}
    found |= dict(enumerate(everyone.get("client_acc") or []))
    return {client: value for client, value in sorted(found.items()) if value is not None}


def gains(runs: Sequence[RunLike], others: Sequence[RunLike] = ()) -> dict[str, list[dict[str, Any]]]:
    """By row, P-acc of each client with each seed beside `local`, what it reaches by training alone, and the gain. A
    run of `local` is also searched for in `others`; rows without one to compare with are left out."""
    found: dict[str, list[dict[str, Any]]] = {}
    for label, own in rows(runs).items():
        for run in own:
            local = _trained_alone(run, (*runs, *others)) if run.summary["method"] != ALONE else None
            alone = client_accuracies(local) if local is not None else {}
            names = dict(enumerate(run.summary.get("client_names") or ()))
            for client, here in client_accuracies(run).items():
                if client in alone:
                    values = {"local": alone[client], "here": here, "gain": here - alone[client]}
                    name = str(names.get(client, f"client {client}"))
                    found.setdefault(label, []).append({"client": name, "seed": seed_of(run), **values})
    return found


def _trained_alone(run: RunLike, candidates: Iterable[RunLike]) -> RunLike | None:
    """The run of `local` with the same data, model, seed and number of rounds; one with the same training settings is
    preferred."""
    same = [
        other
        for other in candidates
        if other.summary["method"] == ALONE
        and (_problem(other), seed_of(other), percent(other)) == (_problem(run), seed_of(run), percent(run))
        and other.settings.get("train", {}).get("rounds") == run.settings.get("train", {}).get("rounds")
    ]
    return max(same, key=lambda other: other.settings.get("train") == run.settings.get("train"), default=None)


def _problem(run: RunLike) -> tuple[dict[str, Any], dict[str, Any]]:
    data = {key: value for key, value in run.settings.get("data", {}).items() if key != "dir"}
    return data, dict(run.settings.get("model", {}))


@dataclass(frozen=True)
class Combination:
    """One combination of a sweep."""

    label: str
    settings: dict[str, Any]
    runs: list[RunLike]
    scores: list[float]
    """The mean of the last evaluations with each seed; empty if not all seeds finished."""

    @property
    def score(self) -> float | None:
        return mean(self.scores) if self.scores else None

    @property
    def method(self) -> str:
        """The method as the label has it, before the settings; empty where all combinations have the same."""
        swept = {key.partition(".")[2] for key in self.settings}
        return " ".join(word for word in self.label.split(" ") if word.partition("=")[0] not in swept)


def combinations(section: Section) -> list[Combination]:
    """The combinations of a sweep, in their order."""
    found = []
    for label, own in all_rows(section.runs).items():
        chosen = {key: own[0].settings[key.partition(".")[0]].get(key.partition(".")[2]) for key in section.axes}
        scores: list[Any] = [(run.summary.get(MEASURES[section.by][1]) or {}).get("last10") for run in own]
        whole = all(run.summary["status"] == "finished" for run in own) and None not in scores
        found.append(Combination(label, chosen, own, list(map(float, scores)) if whole else []))
    return found


def best_combination(found: Iterable[Combination]) -> Combination | None:
    """The combination with the highest score, the first of several; None before any has one."""
    scored = [(cell.score, cell) for cell in found if cell.score is not None]
    return max(scored, key=lambda pair: pair[0])[1] if scored else None


def group_by_problem(runs: Sequence[RunLike]) -> list[Section]:
    """Single runs in sections: those on the same data and model together. Runs of one method that differ in settings
    are labelled by these, and by their folders where even these are the same."""
    problems: dict[str, list[RunLike]] = {}
    for run in runs:
        problems.setdefault(repr(_problem(run)), []).append(run)
    sections = []
    for members in problems.values():
        first = members[0].settings
        title = f"{dataset_title(first['data']['dataset'])} · {first['model']['name']}"
        sections.append(Section(title, _tell_apart(members)))
    return [replace(each, title=_full_title(each, sections)) for each in sections]


def dataset_title(dataset: str) -> str:
    """The name of a data set; `file:/a/long/path.npz` is shown as `path`."""
    kind, _, path = dataset.partition(":")
    return Path(path).stem or kind


def _tell_apart(members: Sequence[RunLike]) -> list[RunLike]:
    seen: set[tuple[str, int]] = set()
    found: list[RunLike] = []
    for run in members:
        label = run.label
        if label == run.summary["method"]:
            same_method = [other for other in members if other.summary["method"] == label]
            differing = compare_settings([run.settings, *(other.settings for other in same_method)])[1][0]
            chosen = {key: own for key, own in differing.items() if not key.startswith(("run.", "data.dir"))}
            label = " ".join([label, *(f"{key.partition('.')[2]}={own}" for key, own in chosen.items())])
        if (label, seed_of(run)) in seen and run.directory is not None:
            label = f"{label} ({run.directory.name})"
        seen.add((label, seed_of(run)))
        found.append(StoredRun(label, run.summary, run.settings, run.metrics, run.directory))
    return found


def _full_title(section: Section, sections: Sequence[Section]) -> str:
    """Sections of the same title have the settings of data and model in it in which they differ."""
    alike = [each for each in sections if each.title == section.title]
    differing = compare_settings([each.runs[0].settings for each in alike])[1][alike.index(section)]
    keys = [key for key in differing if key.startswith(("data.", "model.")) and key != "data.dir"]
    values = ", ".join(f"{key.partition('.')[2]} {differing[key]}" for key in keys)
    return " · ".join(filter(None, [section.title, values]))
