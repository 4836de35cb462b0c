"""Going on with a study, whichever kind it is."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pfedlms.errors import RunDirectoryError
from pfedlms.experiment.compare import Comparison, resume_comparison
from pfedlms.experiment.play import Progress
from pfedlms.experiment.prepare import NOTHING_OWN, ModelLike, Own
from pfedlms.experiment.study import left, manifest_of
from pfedlms.experiment.sweep import MANIFEST, Sweep, resume_sweep
from pfedlms.experiment.watch import watching
from pfedlms.step.own import Metric, PerSample


def resume_study(
    directory: str | Path,
    data: Any = None,
    model: ModelLike = None,
    progress: Progress | bool | None = None,
    callbacks: Iterable[Any] | None = None,
    data_dir: str | None = None,
    loss: PerSample | None = None,
    metric: Metric | None = None,
) -> Comparison | Sweep:
    """Go on with the comparison or sweep in `directory`; data, model, loss and metric are needed again where they were
    given in Python. `data_dir` says where a data set's files are now, if they were moved. Ctrl-C as in `run`."""
    return left(go_on(directory, data, model, progress, callbacks, data_dir, Own(loss, metric)))


def go_on(
    directory: str | Path, data: Any = None, model: ModelLike = None, progress: Progress | bool | None = None,
    callbacks: Iterable[Any] | None = None, data_dir: str | None = None, own: Own = NOTHING_OWN,
) -> Comparison | Sweep:  # fmt: skip
    """`resume_study` for callers that look at `Study.signal` themselves."""
    manifest = manifest_of(Path(directory))
    if manifest is None:
        raise RunDirectoryError(f"{directory}: no comparison or sweep here (compare.json and sweep.json are missing)")
    kind = resume_sweep if manifest.name == MANIFEST else resume_comparison
    with watching(progress, callbacks) as told:
        return kind(Path(directory), data, model, told, data_dir, own)
