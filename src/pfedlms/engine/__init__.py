"""How cohorts are executed."""

from pfedlms.engine.round import Evaluation, RoundReport, Traffic
from pfedlms.engine.simulate import Federation

__all__ = ["Evaluation", "Federation", "RoundReport", "Traffic"]
