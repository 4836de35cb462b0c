"""What bytes buy: the bytes until most of FedAvg's gain is reached, and FedAvg with the bytes of other methods."""

from __future__ import annotations

from statistics import mean
from typing import Any

import pfedlms
from papers.pfedlms.runs import Runs
from papers.pfedlms.sheets import MIB, Sheet, finished
from pfedlms.report.tables import counted

SHARE = 0.9
FRUGAL = ("sketchvote", "pfedlms")
_SHORTER = "fedavg, "
"""How the names of rows with fewer rounds of FedAvg begin."""


def bytes_to_most_of_the_gain(dataset: str, runs: Runs) -> Sheet | None:
    """MiB until P-acc first reaches that of `local` plus 90 % of what FedAvg adds to it. Each seed is compared with its
    own two, because partitions differ by points. None where no seed has both."""
    alone, together = (_last10(runs, name) for name in ("local", "fedavg"))
    wanted = {seed: own + SHARE * (together[seed] - own) for seed, own in alone.items() if seed in together}
    if not wanted:
        return None
    records = []
    for row, own in runs.items():
        if row.startswith(_SHORTER):  # the first rounds of `fedavg`
            continue
        compared = [run for run in finished(own) if run.summary["seed"] in wanted]
        if not compared:
            continue
        reached = [first_reaching(run, wanted[run.summary["seed"]]) for run in compared]
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
    title = f"{dataset}: {100 * SHARE:.0f} % of FedAvg's gain over local"
    return Sheet(f"gain-{dataset}", title, records, columns, note)


def first_reaching(run: pfedlms.Run, wanted: float) -> tuple[int, int] | None:
    """Round and bytes of the first evaluation with at least that P-acc."""
    for record in run.metrics:
        if record["p_acc"] is not None and record["p_acc"] >= wanted:
            return int(record["round"]), int(sum(record["bytes"].values()))
    return None


def frugal_fedavg(runs: Runs) -> dict[str, int]:
    """Rounds of FedAvg that cost as many bytes as another method's run, by the name of the row. At least one round: a
    row whose single round costs more has `>` in its name."""
    found: dict[str, int] = {}
    plain = finished(runs.get("fedavg", []))
    for name in FRUGAL:
        own = finished(runs.get(name, []))
        if not plain or not own:
            continue
        per_round = mean(sum(run.summary["bytes_per_round"].values()) for run in plain)
        paid = int(mean(run.summary["total_bytes"] for run in own) // per_round)
        bytes_of = f"bytes of {name}" if paid else f"> bytes of {name}"
        found[f"{_SHORTER}{counted(max(1, paid), 'round')} ({bytes_of})"] = max(1, paid)
    return found


def _last10(runs: Runs, name: str) -> dict[int, float]:
    """By seed."""
    return {run.summary["seed"]: float(run.summary["accuracy"]["last10"]) for run in finished(runs.get(name, []))}
