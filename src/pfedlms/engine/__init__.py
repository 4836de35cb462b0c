"""How cohorts are executed."""

from pfedlms.engine.federation import Federation
from pfedlms.engine.reports import Evaluation, RoundReport, Traffic

__all__ = ["Evaluation", "Federation", "RoundReport", "Traffic"]
