"""Runs in TensorBoard, as a callback; it needs the extra `tracking`.

pfedlms.run(…, callbacks=[pfedlms.tracking.TensorBoard("tb")])        # then: tensorboard --logdir tb
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pfedlms.errors import UsageError
from pfedlms.experiment.callbacks import Callback, RunInfo


class TensorBoard(Callback):
    """Accuracies, losses and bytes by round, a folder per run below `directory`; at the end of a run its settings.

    A resumed run continues its curves; points after its last checkpoint are written twice, in different files.
    """

    def __init__(self, directory: str | Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise UsageError(
                "TensorBoard needs the package tensorboard; install it with: pip install 'pfedlms[tracking]'"
            ) from error
        self._make, self._directory = SummaryWriter, Path(directory)
        self._writers: dict[str, Any] = {}

    def on_round(self, run: RunInfo, record: Mapping[str, Any]) -> None:
        self._write(run, {"loss": record["loss"]}, record["round"])

    def on_evaluation(self, run: RunInfo, record: Mapping[str, Any]) -> None:
        values = {name: record.get(name) for name in ("p_acc", "v_acc", "g_acc", "test_loss", "seconds")}
        values["bytes"] = sum(record["bytes"].values())
        self._write(run, values, record["round"])

    def on_end(self, run: RunInfo, summary: Mapping[str, Any]) -> None:
        writer = self._writers.pop(run.name, None)
        if writer is not None:
            writer.add_text("settings", f"```\n{run.config.to_toml()}```", summary["rounds"])
            writer.close()

    def _write(self, run: RunInfo, values: Mapping[str, float | None], round: int) -> None:
        if run.name not in self._writers:
            folder = re.sub(r"[^\w.=+-]+", "-", run.name)
            self._writers[run.name] = self._make(str(self._directory / folder))
        for name, value in values.items():
            if value is not None:
                self._writers[run.name].add_scalar(name, value, round)
