"""θ → Φθ and back."""

from pfedlms.sketch.hadamard import fwht_, fwht_reference
from pfedlms.sketch.operator import Sketch, sketch_of_round

__all__ = ["Sketch", "fwht_", "fwht_reference", "sketch_of_round"]
