"""Numbers of a part: the headline, curves over rounds with their range over seeds, what clients gain."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean, stdev
from typing import Any

from pfedlms.report.page.gather import Gathered, Part, Run, local_of
from pfedlms.report.tables import MIB


@dataclass(frozen=True)
class Spread:
    """Mean and standard deviation over seeds; no deviation of a single one, no mean of none."""

    mean: float | None
    deviation: float | None = None

    @classmethod
    def of(cls, values: Sequence[float | None]) -> Spread:
        measured = [float(value) for value in values if value is not None]
        if not measured:
            return cls(None)
        return cls(mean(measured), stdev(measured) if len(measured) > 1 else None)


@dataclass(frozen=True)
class Row:
    """One line of the headline table."""

    name: str
    note: str
    """How many seeds finished, if not all; how a row of which none did ended."""
    accuracies: dict[str, Spread]
    up: float
    """MiB of all participants in a round, framing included."""
    down: float
    """Likewise, catching up included."""
    total: float
    """MiB of the whole run, both ways."""
    fewer: float | None
    """How many times fewer bytes a round than FedAvg; None without FedAvg, or where nothing is sent."""
    rounds: int
    seeds: int
    seconds: float
    parameters: int


ACCURACIES = {
    "P-acc max": ("accuracy", "max"),
    "P-acc last": ("accuracy", "last10"),
    "V-acc last": ("validation_accuracy", "last10"),
    "G-acc max": ("global_accuracy", "max"),
}


def headline(part: Part) -> list[Row]:
    """A row a variant, in the order they were planned."""
    plain = next((runs for runs in part.rows.values() if runs[0].config.method == "fedavg"), None)
    fedavg = sum(mib_per_round(plain)) if plain else 0.0
    rows = []
    for name, runs in part.rows.items():
        up, down = mib_per_round(runs)
        summaries = [run.summary for run in runs]
        accuracies = {
            column: Spread.of([(summary.get(key) or {}).get(which) for summary in summaries])
            for column, (key, which) in ACCURACIES.items()
        }
        everyone = [(summary.get("everyone") or {}).get("accuracy") for summary in summaries]
        if any(len(run.metrics[-1].get("clients", ())) for run in runs):
            accuracies["everyone"] = Spread.of(everyone)
        planned = part.all_rows[name]
        ended = summaries[0]["status"]
        some = f"{len(runs)} of {len(planned)} seeds" if len(runs) < len(planned) else ""
        rows.append(
            Row(
                name,
                some or (ended if ended != "finished" else ""),
                accuracies,
                up,
                down,
                mean(summary.get("total_bytes", 0) for summary in summaries) / MIB,
                fedavg / (up + down) if fedavg and up + down else None,
                max(summary["rounds"] for summary in summaries),
                len(runs),
                mean(summary.get("seconds", 0.0) for summary in summaries),
                summaries[0].get("parameters", 0),
            )
        )
    return rows


def mib_per_round(runs: Sequence[Run]) -> tuple[float, float]:
    """What all participants together send and receive in a round; fields that an old run does not have are 0."""
    sent = [run.summary["bytes_per_round"] for run in runs]
    up, down = (
        mean(sum(each.get(name, 0) for name in names) for each in sent) / MIB
        for names in (("up_payload", "up_framing"), ("down_payload", "down_framing", "catch_up"))
    )
    return up, down


@dataclass(frozen=True)
class Curve:
    """A measure over a run, its mean over seeds with the range."""

    name: str
    rounds: list[int]
    mib: list[float]
    """Sent and received by one client on average up to then."""
    middle: list[float]
    low: list[float]
    high: list[float]


def curves(part: Part, key: str = "p_acc") -> list[Curve]:
    """A curve a row, over the rounds in which all of its runs measured `key`; rows without any are left out."""
    found = []
    for name, runs in part.rows.items():
        by_round = [{r["round"]: r for r in run.metrics if r.get(key) is not None} for run in runs]
        rounds = sorted(set.intersection(*(set(own) for own in by_round)))
        if not rounds:
            continue
        columns = [[float(own[number][key]) for own in by_round] for number in rounds]
        clients = [run.summary["clients"] for run in runs]
        mib = [
            mean(sum(own[number]["bytes"].values()) / count / MIB for own, count in zip(by_round, clients, strict=True))
            for number in rounds
        ]
        found.append(Curve(name, rounds, mib, [mean(c) for c in columns], [*map(min, columns)], [*map(max, columns)]))
    return found


@dataclass(frozen=True)
class Gain:
    """What a client's model has gained over training alone. With another seed it is another client, since the data are
    dealt out anew."""

    client: str
    seed: int
    alone: float
    here: float

    @property
    def gain(self) -> float:
        return self.here - self.alone


def gains(part: Part, everything: Gathered) -> dict[str, list[Gain]]:
    """By row, a client and seed each; rows that have no `local` to compare with are left out."""
    found: dict[str, list[Gain]] = {}
    for name, runs in part.rows.items():
        for run in runs:
            local = local_of(run, part, everything) if run.config.method != "local" else None
            if local is None:
                continue
            alone, here = local.client_accuracies, run.client_accuracies
            both = [client for client in here if client in alone]
            own = [Gain(run.client_name(client), run.seed, alone[client], here[client]) for client in both]
            found.setdefault(name, []).extend(own)
    return {name: own for name, own in found.items() if own}


def cells(part: Part) -> list[tuple[str, dict[str, Any], list[float]]]:
    """Of a sweep: each row's name, the values of its swept settings, and its score on every seed (mean of the last 10
    evaluations); rows that did not finish are left out."""
    measure = {"v_acc": "validation_accuracy", "p_acc": "accuracy", "g_acc": "global_accuracy"}[part.by]
    found = []
    for name, runs in part.all_rows.items():
        tables = runs[0].config.tables()
        chosen = {key: tables[key.partition(".")[0]][key.partition(".")[2]] for key in part.axes or {}}
        scores = [(run.summary.get(measure) or {}).get("last10") for run in runs]
        measured = [float(score) for score in scores if score is not None]
        if all(run.summary["status"] == "finished" for run in runs) and len(measured) == len(runs):
            found.append((name, chosen, measured))
    return found


def best(part: Part) -> str | None:
    """The name of a sweep's best row."""
    scored = cells(part) if part.kind == "sweep" else []
    return max(scored, key=lambda cell: mean(cell[2]))[0] if scored else None
