"""A whole run of a server, with metrics, checkpoints and a summary as of any run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pfedlms.deploy.coordinator import Coordinator, Transport
from pfedlms.errors import RunError, UsageError
from pfedlms.experiment.config import Config
from pfedlms.experiment.play import Progress
from pfedlms.experiment.prepare import NOTHING_OWN, ModelLike, Own
from pfedlms.experiment.record import Recorder, told
from pfedlms.experiment.store import RunDirectory

SILENT = Progress()


def serve(
    config: Config,
    transport: Transport,
    progress: Progress = SILENT,
    model: ModelLike = None,
    own: Own = NOTHING_OWN,
) -> dict[str, Any]:
    """Play all rounds that are left of the run in `run.out`, with a checkpoint after every trip; its summary."""
    if not config.run.out:
        raise UsageError("run.out: got nothing, expected the folder in which the server keeps its run")
    coordinator = Coordinator(config, transport, model, own)
    with RunDirectory(Path(config.run.out)) as directory:
        if directory.config.is_file():
            directory.open()
        else:
            directory.create(config.to_toml())
        recorder = Recorder(config, coordinator, directory)
        try:
            recorder.restore(directory.load_checkpoint())
            progress.started(config, coordinator.rounds_played)
            _play(config, coordinator, recorder, progress)
            summary = recorder.finish("finished", _carried(coordinator))
        except RunError as error:
            error.summary = recorder.finish("failed", _carried(coordinator))
            progress.ended(config, error.summary)
            raise
        progress.ended(config, summary)
        return summary


def _play(config: Config, coordinator: Coordinator, recorder: Recorder, progress: Progress) -> None:
    last = config.train.rounds
    while coordinator.rounds_played < last and not recorder.out_of_patience:
        number = coordinator.rounds_played + 1
        report = coordinator.step()
        if report is not None:
            recorder.count(report)
            out = {str(client): why for client, why in sorted(coordinator.standing.left_out.items())}
            progress.played(config, {"round": number, **told(report), "left_out": out})
            if coordinator.standing.tested:
                weakened = list(coordinator.standing.weakened)
                more = {**_carried(coordinator), "left_out": out, **({"weakened": weakened} if weakened else {})}
                progress.evaluated(config, recorder.evaluate(report, more))
                coordinator.told()
        recorder.checkpoint()


def _carried(coordinator: Coordinator) -> dict[str, Any]:
    down, up = coordinator.standing.carried
    return {"transport": {"up": up, "down": down}}
