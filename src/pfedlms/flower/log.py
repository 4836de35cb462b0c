"""One line per round for a log: bytes, seconds of the round, accuracy, and who was left out and why."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from pfedlms.errors import shown
from pfedlms.experiment.callbacks import Callback, RunInfo
from pfedlms.experiment.summary import in_short
from pfedlms.report.progress import accuracies

CHECK_RECORD = "pfedlms check: "
"""What a line of the log begins with that has a record of a check, as JSON: text and wrong."""


class RoundLog(Callback):
    """What is measured of a round comes after the round, so a line waits for it."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say, self._line, self._before = say, "", time.monotonic()

    def on_start(self, run: RunInfo) -> None:
        config, self._before = run.config, time.monotonic()
        begun = f", resumed after round {run.round}" if run.round else ""
        self._say(f"pfedlms: {config.method} on {config.data.title}, {config.train.rounds} rounds{begun}")

    def on_round(self, run: RunInfo, record: Mapping[str, Any]) -> None:
        self._flush()
        sent = record["bytes"]
        up, down = (sum(count for name, count in sent.items() if name.startswith(way)) for way in ("up", "down"))
        again = f" + {sent['catch_up']:,} to catch up" if sent["catch_up"] else ""
        now = time.monotonic()
        seconds, self._before = now - self._before, now
        self._line = (
            f"round {record['round']}/{run.config.train.rounds}: {len(record['participants'])} trained, loss "
            f"{record['loss']:.4f}, {up:,} bytes up, {down:,} down{again}, {seconds:.1f} s"
        )
        self._out = "; ".join(f"{client}: {shown(why)}" for client, why in record["left_out"].items())

    def on_evaluation(self, run: RunInfo, record: Mapping[str, Any]) -> None:
        self._line += f", {accuracies(record)}"
        self._flush()

    def on_end(self, run: RunInfo, summary: Mapping[str, Any]) -> None:
        self._flush()
        self._say(f"pfedlms: {in_short(summary)}")

    def _flush(self) -> None:
        if self._line:
            self._say(self._line + (f"; left out: {self._out}" if self._out else ""))
        self._line = ""
