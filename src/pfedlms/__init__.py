"""Personalised federated learning that talks in low-bit sketches."""

from pfedlms.data import load_dataset
from pfedlms.errors import PfedlmsError
from pfedlms.experiment import Comparison, Config, Result, compare, load_config, resume, run

__version__ = "0.1.0"
__all__ = [
    "Comparison",
    "Config",
    "PfedlmsError",
    "Result",
    "__version__",
    "compare",
    "load_config",
    "load_dataset",
    "resume",
    "run",
]
