"""What bytes buy: how many it takes to most of FedAvg's gain, and what FedAvg has for as many as others take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import mean
from typing import Any

from pfedlms.report.tables import counted
from pfedlms.reproduce.cells import Cell, short_fedavg
from pfedlms.reproduce.play import Measured
from pfedlms.reproduce.sheets import MIB, Sheet

SHARE = 0.9
FRUGAL = ("sketchvote", "pfedlms")
_SHORTER = "fedavg, "
"""How rows of FedAvg with fewer rounds begin."""


def bytes_to_most_of_the_gain(dataset: str, cells: Mapping[str, Sequence[Measured]]) -> Sheet | None:
    """MiB until P-acc first reaches that of `local` plus most of what FedAvg adds to it, each seed by its own two (its
    partition may lie points above or below the others'); None where no seed has both."""
    alone, together = (_last10(cells.get(name, ())) for name in ("local", "fedavg"))
    wanted = {seed: own + SHARE * (together[seed] - own) for seed, own in alone.items() if seed in together}
    if not wanted:
        return None
    records = []
    for row, measured in cells.items():
        if row.startswith(_SHORTER):  # the beginning of what `fedavg` does
            continue
        reached = [
            first_reaching(each, wanted[each.summary["seed"]])
            for each in _finished(measured)
            if each.summary["seed"] in wanted
        ]
        if not reached:
            continue
        found = [each for each in reached if each is not None]
        record: dict[str, Any] = {"row": row, "reached": f"{len(found)} of {len(reached)}"}
        if found and len(found) == len(reached):
            record |= {"rounds": mean(own[0] for own in found), "mib": mean(own[1] for own in found) / MIB}
        records.append(record)
    columns = {"row": "method", "reached": "seeds", "rounds": "rounds", "mib": "MiB"}
    means = [mean(values[seed] for seed in wanted) for values in (wanted, alone, together)]
    note = (
        f"P-acc of {means[0]:.2f} % on average: local has {means[1]:.2f}, FedAvg {means[2]:.2f} (last 10), each seed "
        "by its own. The first evaluation at or above it; MiB of all clients up to there, framing included."
    )
    return Sheet(
        f"gain-{dataset}", f"{dataset}: {100 * SHARE:.0f} % of FedAvg's gain over local", records, columns, note
    )


def first_reaching(measured: Measured, wanted: float) -> tuple[int, int] | None:
    """Round and bytes of the first evaluation with at least that P-acc."""
    curve = measured.curve
    for number, accuracy, sent in zip(curve["round"], curve["p_acc"], curve["bytes"], strict=True):
        if accuracy is not None and accuracy >= wanted:
            return int(number), int(sent)
    return None


def frugal_fedavg(alpha: float, cells: Mapping[str, Sequence[Measured]], done: Sequence[Cell]) -> dict[str, list[Cell]]:
    """FedAvg for as many rounds as the total bytes of others pay for; for one, and its row says so, where already that
    takes more: cells by row."""
    found: dict[str, list[Cell]] = {}
    plain = _finished(cells.get("fedavg", ()))
    for name in FRUGAL:
        own = _finished(cells.get(name, ()))
        if not plain or not own:
            continue
        a_round = mean(sum(each.summary["bytes_per_round"].values()) for each in plain)
        paid = int(mean(each.summary["total_bytes"] for each in own) // a_round)
        rounds = max(1, paid)
        bytes_of = f"bytes of {name}" if paid else f"> bytes of {name}"
        row = f"{_SHORTER}{counted(rounds, 'round')} ({bytes_of})"
        for each in done:
            if each.row == name:
                found.setdefault(row, []).append(short_fedavg(each.dataset, alpha, rounds, each.seed))
    return found


def _finished(measured: Sequence[Measured]) -> list[Measured]:
    return [each for each in measured if each.finished]


def _last10(measured: Sequence[Measured]) -> dict[int, float]:
    """By seed."""
    return {each.summary["seed"]: float(each.summary["accuracy"]["last10"]) for each in _finished(measured)}
