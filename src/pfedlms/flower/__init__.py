"""Runs on Flower's SuperLink and SuperNodes; needs the extra `flower`.

Flower carries bytes between `pfedlms.deploy.serve` on the server and a `pfedlms.deploy.Node` on each node; nothing in
this folder knows a method. `pfedlms deploy init DIR` writes the app that `flwr run` takes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pfedlms.errors import UsageError

MISSING = "Flower is not installed; install it with: pip install 'pfedlms[flower]'"


def server(file: str | Path, problem: Any = None) -> Any:
    """The ServerApp of the run that a TOML file describes.

    Args:
        file: the configuration; keys of Flower's run config override it.
        problem: `pfedlms.Problem(model=…, loss=…, metric=…)`, if the configuration has "custom" for one of them.
    """
    return _apps().server_app(Path(file), problem)


def client(file: str | Path, problem: Any = None) -> Any:
    """The ClientApp of the same run; see `server`."""
    return _apps().client_app(Path(file), problem)


def _apps() -> Any:
    try:
        from pfedlms.flower import apps
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "flwr":
            raise
        raise UsageError(MISSING) from error
    return apps
