"""The model zoo, and K models of one architecture as one flat tensor."""

from pfedlms.cohort import Cohort
from pfedlms.models.forward import CohortModel
from pfedlms.models.layout import Layer, Layout, flat_layout
from pfedlms.models.zoo import MODELS, build

__all__ = ["MODELS", "Cohort", "CohortModel", "Layer", "Layout", "build", "flat_layout"]
