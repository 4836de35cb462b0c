"""The paper's tables and figures, by one command each: cells are trained where they are not there yet, and what was
measured stands beside what is printed."""

from pfedlms.reproduce.outcome import NAMES, Outcome, Wanted, reproduce
from pfedlms.reproduce.plans import EXPERIMENTS

__all__ = ["EXPERIMENTS", "NAMES", "Outcome", "Wanted", "reproduce"]
