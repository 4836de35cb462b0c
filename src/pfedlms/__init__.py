"""Personalised federated learning that talks in low-bit sketches."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

# Threads of one PyTorch operator wait for each other by spinning; on cores that are busy with other jobs a long model
# then takes ten times as long. Giving up soon costs nothing on an idle machine. The variable is read when PyTorch is
# loaded: if it is already, `backend.all_threads_per_operator` has another way.
if "torch" not in sys.modules:
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")

if TYPE_CHECKING:
    from pfedlms import aggregate, data, methods, models, pull, quantise, sketch, step, tracking, wire
    from pfedlms.data import load_dataset
    from pfedlms.engine.method_check import check_method
    from pfedlms.errors import PfedlmsError
    from pfedlms.experiment.api import (
        bits_table,
        compare,
        export,
        load,
        method_of,
        prepare,
        resume,
        run,
        same_run,
        study,
        sweep,
        variant,
    )
    from pfedlms.experiment.callbacks import Callback, RunInfo
    from pfedlms.experiment.config import Config, load_config
    from pfedlms.experiment.problem import Problem
    from pfedlms.experiment.runs import Run
    from pfedlms.experiment.studies import Study

__version__ = "0.1.0"
__all__ = [
    "Callback", "Config", "PfedlmsError", "Problem", "Run", "RunInfo", "Study", "__version__", "aggregate",
    "bits_table", "check_method", "compare", "data", "export", "load", "load_config", "load_dataset",
    "method_of", "methods", "models", "prepare", "pull", "quantise", "resume", "run", "same_run", "sketch",
    "step", "study", "sweep", "tracking", "variant", "wire",
]  # fmt: skip


_MODULES = ("aggregate", "data", "methods", "models", "pull", "quantise", "sketch", "step", "tracking", "wire")


if not TYPE_CHECKING:  # which would take every name for a public one

    def __getattr__(name: str) -> Any:
        """Public names are imported when they are first used, so that `pfedlms --help` need not wait for PyTorch."""
        if name not in __all__:
            raise AttributeError(f"module 'pfedlms' has no attribute {name!r}")
        if name in _MODULES:
            # It takes all others. Not `from pfedlms import …`, which would ask this function again.
            import pfedlms.tracking  # noqa: F401

            return sys.modules[f"pfedlms.{name}"]
        from pfedlms.data import load_dataset
        from pfedlms.engine.method_check import check_method
        from pfedlms.errors import PfedlmsError
        from pfedlms.experiment import api, callbacks, config, problem

        found = {"PfedlmsError": PfedlmsError, "check_method": check_method, "load_dataset": load_dataset}
        for module in (api, callbacks, config, problem):
            found |= vars(module)
        return found[name]


def __dir__() -> list[str]:
    return sorted(__all__)
