"""Experiments: configuration, runs, checkpoints, comparisons."""

from pfedlms.experiment.compare import Comparison, compare
from pfedlms.experiment.config import Config, load_config
from pfedlms.experiment.play import Result
from pfedlms.experiment.run import resume, run

__all__ = ["Comparison", "Config", "Result", "compare", "load_config", "resume", "run"]
