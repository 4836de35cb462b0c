"""Experiments: configuration, runs, checkpoints, comparisons, sweeps."""

from pfedlms.experiment.compare import Comparison, compare
from pfedlms.experiment.config import Config, load_config
from pfedlms.experiment.export import export
from pfedlms.experiment.play import Result
from pfedlms.experiment.run import resume, run
from pfedlms.experiment.studies import resume_study
from pfedlms.experiment.sweep import Sweep, sweep
from pfedlms.experiment.watch import Callback, RunInfo

__all__ = [
    "Callback", "Comparison", "Config", "Result", "RunInfo", "Sweep", "compare", "export", "load_config", "resume",
    "resume_study", "run", "sweep",
]  # fmt: skip
