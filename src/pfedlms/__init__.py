"""Personalised federated learning that talks in low-bit sketches."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

# Threads of one PyTorch operator wait for each other by spinning; on cores that are busy with other jobs a long model
# then takes ten times as long. Giving up soon costs nothing on an idle machine. The variable is read when PyTorch is
# loaded: if it is already, `backend.long_operators` has another way.
if "torch" not in sys.modules:
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")

if TYPE_CHECKING:
    from pfedlms.data import load_dataset
    from pfedlms.errors import PfedlmsError
    from pfedlms.experiment import (  # type: ignore[no-redef]
        Callback,
        Comparison,
        Config,
        Result,
        RunInfo,
        Sweep,
        compare,
        export,
        load_config,
        resume,
        resume_study,
        run,
        sweep,
    )

__version__ = "0.1.0"
__all__ = [
    "Callback",
    "Comparison",
    "Config",
    "PfedlmsError",
    "Result",
    "RunInfo",
    "Sweep",
    "__version__",
    "compare",
    "export",
    "load_config",
    "load_dataset",
    "resume",
    "resume_study",
    "run",
    "sweep",
]


def __getattr__(name: str) -> Any:
    """Public names are imported when they are first used, so that `pfedlms --help` need not wait for PyTorch."""
    if name == "tracking":
        import pfedlms.tracking  # noqa: F401

        return sys.modules["pfedlms.tracking"]
    if name not in __all__:
        raise AttributeError(f"module 'pfedlms' has no attribute {name!r}")
    from pfedlms import data, errors, experiment

    return getattr({"PfedlmsError": errors, "load_dataset": data}.get(name, experiment), name)


def __dir__() -> list[str]:
    return sorted(__all__)
