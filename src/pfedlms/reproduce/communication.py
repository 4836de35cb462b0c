"""The paper's cost of a round, from messages that are encoded and decoded; nothing is trained."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pfedlms.experiment.cost import bits_table
from pfedlms.reproduce.paper import printed
from pfedlms.reproduce.sheets import Sheet


def communication(dataset: str, methods: Sequence[str] = ()) -> Sheet:
    """MiB of a round of all clients, payload alone, as the paper counts."""
    records: list[dict[str, Any]] = []
    for row in bits_table({"data": {"dataset": dataset}}):
        if methods and row["method"] not in methods:
            continue
        label = f"{row['method']}, {row['downlink']} ↓" if "downlink" in row else row["method"]
        record: dict[str, Any] = {"row": label, "dataset": dataset, "mib": row["mib_per_round"]}
        own = printed("communication", row["method"], dataset)
        if own is not None:
            record |= {"paper": own.mean, "difference": round(row["mib_per_round"], 2) - own.mean}
        records.append(record)
    title = f"{dataset}: MiB a round"
    note = "Up and down, payload (symbols and statistics) without framing, as the paper counts; 2^20 bytes a MiB."
    return Sheet(
        f"communication-{dataset}", title, records,
        {"row": "method", "mib": "MiB", "paper": "paper", "difference": "diff"}, note,
    )  # fmt: skip
